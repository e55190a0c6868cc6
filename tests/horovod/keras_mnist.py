"""MNIST by `fit`, with Horovod's callbacks: warm-up, averaged metrics, a checkpoint of worker 0."""

import argparse

import tensorflow as tf
from data import mnist
from report import report
from tensorflow import keras

import hps_keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--images", type=int, default=2000)
args = parser.parse_args()

# Horovod: join the others.
hvd.init()

# Horovod: one GPU for each process of a machine.
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

images, digits = mnist(args.images)
dataset = tf.data.Dataset.from_tensor_slices((images, digits)).shard(hvd.size(), hvd.rank())
dataset = dataset.repeat().shuffle(1000).batch(args.batch_size)

model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(8, 3, activation="relu"),
        keras.layers.MaxPooling2D(4),
        keras.layers.Dropout(0.1),
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)

# Horovod: a large batch wants a large rate.
scaled_lr = 0.001 * hvd.size()
opt = keras.optimizers.Adam(scaled_lr)

# Horovod: the gradients of all workers.
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
model.compile(loss=keras.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])

callbacks = [
    # Horovod: all begin with the weights of worker 0.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Horovod: must stand before what reads the metrics.
    hvd.callbacks.MetricAverageCallback(),
    # Horovod: from a small rate to the scaled one.
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=1),
]

# Horovod: one process writes, or they would spoil each other's files.
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))

verbose = 2 if hvd.rank() == 0 else 0

# Horovod: the more workers, the fewer steps of each.
history = model.fit(
    dataset,
    steps_per_epoch=args.images // args.batch_size // hvd.size(),
    callbacks=callbacks,
    epochs=args.epochs,
    verbose=verbose,
)
report(hvd.rank(), model, history.history["loss"])

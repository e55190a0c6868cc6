"""MNIST by `fit` with a state that is committed, synchronised and restored."""

import argparse

import tensorflow as tf
from data import mnist
from report import report
from tensorflow import keras

import hps_keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--images", type=int, default=1200)
args = parser.parse_args()

hvd.init()

gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

images, digits = mnist(args.images)
dataset = tf.data.Dataset.from_tensor_slices((images, digits)).repeat().shuffle(1000).batch(args.batch_size)

model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(8, 3, activation="relu"),
        keras.layers.MaxPooling2D(4),
        keras.layers.Flatten(),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
lr = 0.002
opt = hvd.DistributedOptimizer(keras.optimizers.Adam(lr * hvd.size()))
model.compile(loss=keras.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])


def on_state_reset():
    """Another number of workers wants another rate."""
    state.model.optimizer.learning_rate = lr * hvd.size()


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([on_state_reset])

callbacks = [
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=lr * hvd.size(), warmup_epochs=2, verbose=1),
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state, batches_per_commit=10),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.weights.h5", save_weights_only=True))


@hvd.elastic.run
def train(state):
    """Trains the epochs that the state does not have yet."""
    return state.model.fit(
        dataset,
        steps_per_epoch=args.images // args.batch_size // hvd.size(),
        callbacks=callbacks,
        epochs=args.epochs - state.epoch,
        verbose=2 if hvd.rank() == 0 else 0,
    )


history = train(state)
print(f"\nworker {hvd.rank()} has epoch {state.epoch}", flush=True)
report(hvd.rank(), model, history.history["loss"])

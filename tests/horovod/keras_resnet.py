"""A residual network with rate schedules, checkpoints, and a training that goes on where it was left.

The network is much smaller than ResNet-50, and the images are random ones with a pattern for each class.
"""

import argparse
import os

import numpy as np
from report import report
from tensorflow import keras

import hps_keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.h5")
parser.add_argument("--log-dir", default="./logs")
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--base-lr", type=float, default=0.02, help="rate of one worker")
parser.add_argument("--warmup-epochs", type=int, default=1)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=0.00005)
parser.add_argument("--seed", type=int, default=42)
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(args.seed + hvd.rank())

# Is there a checkpoint to go on from?
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break

# Horovod: worker 0 has the checkpoints, so it tells the others.
resume_from_epoch = hvd.broadcast(resume_from_epoch, 0, name="resume_from_epoch")

# Horovod: worker 0 alone speaks.
verbose = 2 if hvd.rank() == 0 else 0

rng = np.random.default_rng(hvd.rank())
patterns = np.random.default_rng(0).normal(size=(4, 16, 16, 3))


def batches(number, size):
    """Images of four classes, as arrays."""
    labels = rng.integers(0, 4, size=number * size)
    return (patterns[labels] + rng.normal(size=(number * size, 16, 16, 3))).astype("float32"), labels


x_train, y_train = batches(12, 16)
x_test, y_test = batches(2, 16)


def residual(x, filters, stride):
    """A block of two convolutions with a shortcut."""
    layers = keras.layers
    decay = keras.regularizers.L2(args.wd)
    y = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False, kernel_regularizer=decay)(x)
    y = layers.Activation("relu")(layers.BatchNormalization(momentum=0.8)(y))
    y = layers.Conv2D(filters, 3, padding="same", use_bias=False, kernel_regularizer=decay)(y)
    y = layers.BatchNormalization(momentum=0.8)(y)
    if stride > 1:
        x = layers.Conv2D(filters, 1, stride, kernel_regularizer=decay)(x)
    return layers.Activation("relu")(layers.Add()([x, y]))


def resnet():
    """The network, with logits out."""
    inputs = keras.Input((16, 16, 3))
    x = keras.layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    x = residual(residual(x, 8, 1), 16, 2)
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.GlobalAveragePooling2D()(x)))


# Horovod: fewer bits on the wire, or not.
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
# Horovod: a large batch wants a large rate.
initial_lr = args.base_lr * hvd.size()

# Worker 0 takes model and optimizer from the checkpoint; the callback below gives both to the others.
if resume_from_epoch > 0 and hvd.rank() == 0:
    path = args.checkpoint_format.format(epoch=resume_from_epoch)
    model = hvd.load_model(path, compression=compression)
    print(f"going on from {path} after {int(model.optimizer.iterations)} steps", flush=True)
else:
    model = resnet()
    opt = keras.optimizers.SGD(learning_rate=initial_lr, momentum=args.momentum)
    opt = hvd.DistributedOptimizer(opt, compression=compression)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, optimizer=opt, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=initial_lr, warmup_epochs=args.warmup_epochs, verbose=verbose),
    # Horovod: after the warm-up the rate falls step by step.
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=initial_lr, multiplier=1.0, start_epoch=args.warmup_epochs, end_epoch=2
    ),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=initial_lr, multiplier=1e-1, start_epoch=2, end_epoch=3),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=initial_lr, multiplier=1e-2, start_epoch=3),
]
# Horovod: worker 0 alone writes.
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint_format))
    callbacks.append(keras.callbacks.CSVLogger(args.log_dir + ".csv", append=True))

history = model.fit(
    x_train,
    y_train,
    batch_size=16,
    callbacks=callbacks,
    epochs=args.epochs,
    verbose=verbose,
    initial_epoch=resume_from_epoch,
    validation_data=(x_test, y_test),
)

# Horovod: the mean of all workers.
score = hvd.allreduce(model.evaluate(x_test, y_test, verbose=0))
if verbose:
    print(f"Test loss: {float(score[0]):.4f}, test accuracy: {float(score[1]):.4f}")
report(hvd.rank(), model, history.history["loss"])

"""How many images a second all workers train on, by random ones."""

import argparse
from timeit import default_timer as timer

import numpy as np
import tensorflow as tf
from report import report
from tensorflow import keras

import hps_keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true", help="send the gradients in 16 bits")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--num-batches-per-iter", type=int, default=5)
parser.add_argument("--num-iters", type=int, default=4)
args = parser.parse_args()

hvd.init()

gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((32, 32, 3)),
        layers.Conv2D(8, 3, 2, padding="same", activation="relu"),
        layers.Conv2D(16, 3, 2, padding="same", activation="relu"),
        layers.Flatten(),
        layers.Dense(100, activation="softmax"),
    ]
)
opt = keras.optimizers.SGD(0.05)

# Horovod: the same batch again and again.
data = tf.random.uniform([args.batch_size, 32, 32, 3])
target = tf.random.uniform([args.batch_size, 1], minval=0, maxval=99, dtype=tf.int64)
dataset = tf.data.Dataset.from_tensor_slices((data, target)).cache().repeat().batch(args.batch_size)

compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
opt = hvd.DistributedOptimizer(opt, compression=compression)
model.compile(loss=keras.losses.SparseCategoricalCrossentropy(), optimizer=opt)


class TimingCallback(keras.callbacks.Callback):
    """Notes images a second of each round."""

    def on_train_begin(self, logs=None):
        self.img_secs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.starttime = timer()

    def on_epoch_end(self, epoch, logs=None):
        img_sec = args.batch_size * args.num_batches_per_iter / (timer() - self.starttime)
        print(f"Iter #{epoch}: {img_sec:.1f} img/sec on each worker", flush=True)
        self.img_secs.append(img_sec)


callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
if hvd.rank() == 0:
    timing = TimingCallback()
    callbacks.append(timing)
    print(f"Batch size: {args.batch_size}, number of workers: {hvd.size()}", flush=True)

history = model.fit(
    dataset, steps_per_epoch=args.num_batches_per_iter, callbacks=callbacks, epochs=args.num_iters, verbose=0
)

if hvd.rank() == 0:
    img_sec_mean = np.mean(timing.img_secs)
    img_sec_conf = 1.96 * np.std(timing.img_secs)
    print(f"Img/sec on each worker: {img_sec_mean:.1f} +-{img_sec_conf:.1f}")
    total = f"{hvd.size() * img_sec_mean:.1f} +-{hvd.size() * img_sec_conf:.1f}"
    print(f"Total img/sec on {hvd.size()} workers: {total}", flush=True)
report(hvd.rank(), model, history.history["loss"])

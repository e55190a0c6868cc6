"""MNIST by a loop of its own: a gradient tape, and all that is broadcast after the first batch."""

import argparse

import tensorflow as tf
from data import mnist
from report import report

import hps_keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--images", type=int, default=2000)
args = parser.parse_args()

hvd.init()

gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

images, digits = mnist(args.images)
dataset = tf.data.Dataset.from_tensor_slices((images, digits))
dataset = dataset.repeat().shuffle(1000, seed=hvd.rank()).batch(args.batch_size)

model = tf.keras.Sequential(
    [
        tf.keras.Input((28, 28, 1)),
        tf.keras.layers.Conv2D(8, 3, activation="relu"),
        tf.keras.layers.MaxPooling2D(4),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()

# Horovod: a large batch wants a large rate.
opt = tf.optimizers.Adam(0.002 * hvd.size())


@tf.function
def training_step(images, labels, first_batch):
    """One batch of this worker's; all workers apply the same gradient."""
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss_value = loss(labels, probs)

    # Horovod: the mean of all workers' gradients.
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))

    # Horovod: all go on from the weights of worker 0. After the first step, when the optimizer has its variables too.
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return loss_value


# Horovod: the more workers, the fewer steps of each.
losses = []
for batch, (images, labels) in enumerate(dataset.take(args.steps // hvd.size())):
    loss_value = training_step(images, labels, batch == 0)
    losses.append(hvd.allreduce(loss_value, name="loss"))
    if batch % 10 == 0 and hvd.rank() == 0:
        print(f"Step #{batch}\tLoss: {float(loss_value):.6f}", flush=True)

# Horovod: worker 0 alone writes.
if hvd.rank() == 0:
    model.save("./checkpoint.keras")
report(hvd.rank(), model, losses)

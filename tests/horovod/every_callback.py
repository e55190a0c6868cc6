"""Every callback of Keras, of Horovod and of this package in one `fit`, all given to all workers."""

import argparse
from importlib.util import find_spec
from pathlib import Path

import keras
import numpy as np
from report import report

import hps_keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
folder = parser.parse_args().folder

EXCLUDED = {
    "Callback": "is the base class",
    "CallbackList": "is the list that holds them",
    "RemoteMonitor": "needs a web server to talk to",
    "SwapEMAWeights": "is refused by design: averaged weights live on the server, which every fit ends with",
}
if not find_spec("orbax"):
    EXCLUDED["OrbaxCheckpoint"] = "needs the package orbax, which is not installed"
if not (find_spec("tensorboard") and find_spec("tensorflow")):
    EXCLUDED["TensorBoard"] = "needs tensorboard and tensorflow, which are not installed"

hvd.init()
keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.02), consistency=hvd.WASP(3)), "mse", metrics=["mae"])

of, ours, elastic = keras.callbacks, hvd.callbacks, hvd.elastic
state = elastic.KerasState(model, batch=0, epoch=0)
best = ours.BestModelCheckpoint("val_loss")
best.filepath = str(folder / "best.keras")
callbacks = [
    ours.BroadcastGlobalVariablesCallback(0),
    of.BackupAndRestore(str(folder / "backup"), delete_checkpoint=False),
    of.CSVLogger(str(folder / "log.csv")),
    of.EarlyStopping("val_loss", patience=10, restore_best_weights=True),
    of.History(),
    of.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    of.LearningRateScheduler(lambda epoch, rate: rate),
    of.ModelCheckpoint(str(folder / "model-{epoch}.keras")),
    of.ProgbarLogger(),
    of.ReduceLROnPlateau("loss", factor=0.5, patience=1),
    of.TerminateOnNaN(),
    ours.MetricAverageCallback(),
    ours.LearningRateScheduleCallback(0.02, 1.0, end_epoch=1),
    ours.LearningRateWarmupCallback(0.02, 1),
    best,
    ours.ForcedSync(2),
    ours.BatchResizer(),
    ours.AdaptiveQuantization("val_loss", policy="fixed:16"),
    elastic.CommitStateCallback(state, 2),
    elastic.UpdateBatchStateCallback(state),
    elastic.UpdateEpochStateCallback(state),
    ours.ParameterServer(),  # last on purpose: it finds its place
]
if "TensorBoard" not in EXCLUDED:
    callbacks.append(of.TensorBoard(str(folder / "board")))
if "OrbaxCheckpoint" not in EXCLUDED:
    callbacks.append(of.OrbaxCheckpoint(str(folder / "orbax")))


def classes(module):
    """Names of the callbacks of a module."""
    members = {name: getattr(module, name) for name in dir(module)}
    return {
        name for name, one in members.items() if isinstance(one, type) and issubclass(one, keras.callbacks.Callback)
    }


listed = {type(one).__name__ for one in callbacks}
left_out = (classes(of) | classes(ours) | classes(elastic)) - listed - EXCLUDED.keys() - {"Carrier"}
if hvd.rank() == 0:
    for name in sorted(EXCLUDED):
        print(f"{name} {EXCLUDED[name]}")
    print(f"{len(listed)} callbacks; forgotten: {sorted(left_out)}", flush=True)

rng = np.random.default_rng(1)
x = rng.normal(size=(96, 4)).astype("float32")
y = x[:, :1] * x[:, 1:2]
data = hvd.data.ElasticDataset(x, y, batch_size=8)
history = model.fit(data, epochs=3, verbose=2 if hvd.rank() == 0 else 0, validation_data=(x, y), callbacks=callbacks)
print(f"\nworker {hvd.rank()} has epoch {state.epoch}", flush=True)
report(hvd.rank(), model, history.history["loss"])

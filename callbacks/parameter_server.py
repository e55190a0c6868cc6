"""ParameterServer: turns `fit` on the server into serving, and on a worker into training with the others."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import keras
import numpy as np

from hps_keras import backends, cluster
from hps_keras.backends.pipeline import supply
from hps_keras.callbacks.batch_resizer import BatchResizer
from hps_keras.callbacks.writers import leave_to_the_chief
from hps_keras.data.dataset import ElasticDataset, Feed, check_arguments, running_fit
from hps_keras.data.sharding import fingerprint_of
from hps_keras.errors import ConfigurationError, HpsError
from hps_keras.server.serving import serve
from hps_keras.server.telemetry import Summary
from hps_keras.worker.exchange import Exchange
from hps_keras.worker.guard import Guard, unguarded
from hps_keras.worker.inventory import check_model
from hps_keras.worker.link import link
from hps_keras.worker.loop import end_running

# Set as `model.stop_training`, it makes Keras break out of an epoch's loop after this batch, when the pass is over.
_EPOCH_OVER = object()


class ParameterServer(keras.callbacks.Callback):
    """Put it first in ``model.fit(callbacks=[...])``, on every rank.

    On a worker it starts all from the chief's weights, exchanges gradients and parameters after every step, and at
    every epoch's end synchronises: all workers then hold bitwise the same weights, and the epoch's logs are
    sample-weighted means over the workers before any other callback reads them. One worker that wants to stop
    (``model.stop_training``) stops all.

    On a parameter server, `fit` serves the workers until the job ends and then leaves the process with exit code 0:
    nothing that stands after `fit` in the script runs there.

    In a world of one process it does nothing: training is plain Keras, and the summary says so.

    Args:
        return_on_server: True gives control back to the script on the server too after each `fit`, with an empty
            history and the final weights in its model (which must be built).

    Attributes:
        summary: After `fit`, on workers: a :class:`hps_keras.server.telemetry.Summary`; ``print`` it for a table.
        last_step_seconds: Time that this worker's last training step took, without the exchange.
        batch_size: Samples of the batch that this worker trains on or trained on last, with an
            :class:`hps_keras.data.ElasticDataset`; 0 without.

    Raises:
        ConfigurationError: In `fit`, when the model cannot be trained so; the message says what to change.

    Example:
        >>> model.fit(x, y, callbacks=[hps.callbacks.ParameterServer()])   # doctest: +SKIP
    """

    def __init__(self, return_on_server: bool = False) -> None:
        super().__init__()
        self.return_on_server = return_on_server
        self.summary: Summary | None = None
        self._exchange: Exchange | None = None
        self._paused = False
        self._validated = 0.0
        self._bars: list[Any] = []
        self._progress = 0.0
        self._unset: list[Any] = []  # callbacks that get their model when it is agreed who writes

    @property
    def last_step_seconds(self) -> float:
        """Time that this worker's last training step took, without the exchange."""
        return self._exchange.last_seconds if self._exchange else 0.0

    @property
    def batch_size(self) -> int:
        """Samples of this worker's present or last batch, with an ElasticDataset; 0 without."""
        exchange = self._exchange
        if not exchange or not exchange.training.feed:
            return 0
        return int(exchange.training.feed.handed) or exchange.last_samples  # in a step, or after it

    @property
    def progress(self) -> float:
        """Share of the epoch's samples that were lent before this worker's next batch, with an ElasticDataset."""
        feed = self._exchange.training.feed if self._exchange else None
        if feed and not feed.more:
            lease = feed.next or feed.last  # torch has drawn the batch before it begins
            if lease:
                self._progress = lease.start / feed.samples
        return self._progress

    @property
    def steps(self) -> float | None:
        """About how many steps an epoch has on this worker; None when that is not known."""
        feed = self._exchange.training.feed if self._exchange else None
        return feed.samples / (feed.batch_size * cluster.size()) if feed else (self.params or {}).get("steps")

    # -- hooks --

    def set_model(self, model: Any) -> None:
        """Takes its place around the other callbacks."""
        super().set_model(model)
        if cluster.current().alone:
            return
        _place_around(self)
        if not cluster.is_server():
            backends.watch(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Serves, on a parameter server; sets the exchange up, on a worker."""
        here = cluster.current()
        if here.alone:
            return
        fit = running_fit()
        elastic = fit.get("x") if isinstance(fit.get("x"), ElasticDataset) else None
        resizer = _resizer(fit, elastic)
        if elastic is not None:
            _check_elastic(fit)
        if here.is_server:
            self._serve(here)
            return
        end_running()
        if here.busy:
            raise HpsError(
                f"an earlier {here.busy} on this worker did not end (an exception was caught, or this fit stands in "
                "it?); the exchange cannot go on"
            )
        check_model(self.model)
        here.busy = "fit"
        if "callbacks" in fit:
            leave_to_the_chief(fit["callbacks"], link(here), here.rank)
            for callback in self._unset:
                if callback in fit["callbacks"].callbacks:
                    callback.set_model(self.model)
        exchange = self._exchange = Exchange(link(here), self.model, here.rank)
        self._paused = False
        given = fit.get("x") if elastic is None else getattr(elastic.source, "arrays", None)
        exchange.looks = fingerprint_of(given)
        if elastic is not None:
            self._draw_leases(elastic, fit)
            exchange.resizing = resizer.options if resizer else None
            exchange.training.headroom = resizer.headroom(self.model, here.memory_sharers) if resizer else None
        original = unguarded(self.model.train_function)
        step = backends.step(self.model)
        savers = [c for c in fit["callbacks"].callbacks if _saves_in_epochs(c)] if "callbacks" in fit else []
        model = self.model  # reading it in a step makes Keras take over the step before's state, which JAX has reused

        # Not a batch hook: with one, Keras would wait for every step's logs before it starts the next.
        def train_function(*arguments: Any) -> Any:
            exchange.pushes.wait = any(map(_saves_next, savers))
            result = exchange.run(step, original, arguments)
            if exchange.pushes.stop_asked:
                model.stop_training = True
            elif exchange.pushes.epoch_over and not model.stop_training:
                model.stop_training = _EPOCH_OVER
            return result

        self.model.train_function = train_function
        self._original = original

    def _draw_leases(self, elastic: ElasticDataset, fit: Mapping[str, Any]) -> None:
        """Makes Keras train on what the server lends, until we break its loop."""
        assert self._exchange
        self._exchange.training.feed = feed = Feed(elastic)
        supply(fit["epoch_iterator"], feed, elastic.specimen)
        # How many steps an epoch will have on this worker is not known, and differs from epoch to epoch.
        self.params["steps"] = None
        self._bars = [c for c in fit["callbacks"].callbacks if isinstance(c, keras.callbacks.ProgbarLogger)]

    def _serve(self, here: cluster.Cluster) -> None:
        serve(here, self.model, self.return_on_server)
        if not self.return_on_server:
            raise SystemExit(0)
        self.model._initial_epoch = sys.maxsize  # so that Keras runs no epoch and returns an empty history

    def on_test_begin(self, logs: Any = None) -> None:
        """Synchronises before a validation inside `fit`."""
        if self._exchange:
            self._pause()  # validation must see the synchronised parameters

    def on_test_end(self, logs: Any = None) -> None:
        """Notes how many samples the validation had."""
        if self._exchange:
            self._validated = _samples_seen(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Forgets the last epoch's validation and length."""
        self._validated = self._progress = 0.0
        for bar in self._bars:
            bar.target = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Synchronises and averages the logs in place."""
        if not self._exchange:
            return
        self._pause()
        logs = logs if logs is not None else {}
        weights = {name: (self._validated if name.startswith("val_") else float(self._epoch_samples)) for name in logs}
        logs.update(self._exchange.average(logs, weights))
        logs.update(self._exchange.metrics)

    def _pause(self) -> None:
        assert self._exchange
        if not self._paused:
            self._paused = True
            if self.model.stop_training is _EPOCH_OVER:  # else somebody wants to stop at this very batch
                self.model.stop_training = False
            self._epoch_samples = self._exchange.samples
            self._exchange.pause(bool(self.model.stop_training))

    def on_train_end(self, logs: Any = None) -> None:
        """Says, in a process alone, that there was nothing to do; else the end comes after all other callbacks."""
        if cluster.current().alone:
            self.summary = Summary.alone(epochs=len(self.model.history.epoch))

    # -- what must run after all other callbacks --

    def _joined(self) -> None:
        """All `on_train_begin` have run, a restored checkpoint is in place: join the others."""
        assert self._exchange
        initial = self._exchange.enter(self.params.get("epochs"), self.model._initial_epoch or 0)
        if initial:
            self.model._initial_epoch = initial

    def _resumed(self, epoch: int) -> None:
        """All `on_epoch_end` have run and may have asked to stop: one decision for all."""
        assert self._exchange
        self._paused = False
        if self._exchange.resume(bool(self.model.stop_training), last=epoch + 1 >= self.params["epochs"]):
            self.model.stop_training = True

    def _ended(self) -> None:
        assert self._exchange
        self.summary = Summary.of(self._exchange.exit())
        self.model.train_function = Guard(self._original)
        self._exchange = None
        self._bars = []
        cluster.current().busy = None


def _check_elastic(fit: Mapping[str, Any]) -> None:
    """Refuses what cannot be with leases: an epoch is one pass of all workers."""
    check_arguments(fit)
    steps = fit["epoch_iterator"].steps_per_epoch  # the argument of fit, or what keras.config allows at most
    if steps:
        raise ConfigurationError(
            f"steps_per_epoch={steps} with an ElasticDataset: an epoch is one pass of all workers over the samples, so "
            "no worker has a number of steps of its own; leave steps_per_epoch out of model.fit (and "
            "keras.config.set_max_steps_per_epoch)"
        )


def _resizer(fit: Mapping[str, Any], elastic: ElasticDataset | None) -> BatchResizer | None:
    """The BatchResizer among the callbacks of the running `fit`, if there is one."""
    found = [c for c in fit["callbacks"].callbacks if isinstance(c, BatchResizer)] if "callbacks" in fit else []
    if len(found) > 1:
        raise ConfigurationError("callbacks hold hps.callbacks.BatchResizer twice: list it once")
    if found and elastic is None:
        raise ConfigurationError(
            "hps.callbacks.BatchResizer changes the batches of an hps.data.ElasticDataset, but x of model.fit is "
            f"{type(fit.get('x')).__name__}: give it model.fit(hps.data.ElasticDataset(x, y, batch_size=...))"
        )
    return found[0] if found else None


def _saves_in_epochs(callback: Any) -> bool:
    """Whether a callback saves the model after so many batches, and not at epochs' ends alone."""
    kinds = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)
    if isinstance(callback, kinds):
        return isinstance(callback.save_freq, int) and bool(callback.save_freq)
    return bool(getattr(callback, "batches_per_commit", 0))  # of hps.elastic


def _saves_next(callback: Any) -> bool:
    """Whether it saves after the next batch: then the weights must be those that belong to the server's slots."""
    if hasattr(callback, "batches_per_commit"):
        return bool(callback.batches_remaining <= 1)
    return bool(getattr(callback, "_batches_seen_since_last_saving", callback.save_freq) + 1 >= callback.save_freq)


class _Last(keras.callbacks.Callback):
    """Runs the halves of :class:`ParameterServer` that must come after every other callback."""

    def __init__(self, first: ParameterServer) -> None:
        super().__init__()
        self._first = first

    def on_train_begin(self, logs: Any = None) -> None:
        if self._first._exchange:
            self._first._joined()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._first._exchange:
            self._first._resumed(epoch)

    def on_train_end(self, logs: Any = None) -> None:
        if self._first._exchange:
            self._first._ended()
        elif cluster.is_initialized() and cluster.is_server():
            self.model._initial_epoch = None


def enclosing_list(callback: Any) -> Any:
    """The list that Keras is setting a callback's model in.

    Keras gives a callback no way to its list, but the list is the caller's caller: `CallbackList.set_model` calls ours.

    Raises:
        ConfigurationError: There is none.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList) and callback in owner.callbacks:
            return owner
        frame = frame.f_back
    raise ConfigurationError(
        f"hps.callbacks.{type(callback).__name__} does not find the keras.callbacks.CallbackList that it is in: pass "
        "it in the callbacks list of model.fit"
    )


def bring_server(callback: Any) -> ParameterServer:
    """Returns the ParameterServer of the list that a callback of ours is in; puts one in if there is none."""
    owner = enclosing_list(callback)
    for other in owner.callbacks:
        if isinstance(other, ParameterServer):
            return other
    brought, listed = ParameterServer(), owner.callbacks
    owner.callbacks = [brought, *listed]  # not in place: Keras is going through the list
    brought.set_model(callback._model)  # as `model`, but leaves JAX's state alone
    brought.set_params(getattr(owner, "params", None))
    brought._unset = []  # those that Keras has not come to, of its own list
    _postpone(brought, listed, callback)
    return brought


def _postpone(server: ParameterServer, listed: list[Any], present: Any) -> None:
    """Keeps Keras, which has come to `present` in a list, from giving what writes at once a model.

    TensorBoard writes the graph into a file then, before the workers have agreed who is to write. On a server it has
    nothing to write, and leaves the list.
    """
    if not running_fit() or not (cluster.is_server() or cluster.rank()):
        return
    for place in range(listed.index(present) + 1, len(listed)):
        if isinstance(listed[place], keras.callbacks.TensorBoard):
            if cluster.is_server():
                owner = enclosing_list(server)
                owner.callbacks = [c for c in owner.callbacks if c is not listed[place]]
            else:
                server._unset.append(listed[place])
            listed[place] = keras.callbacks.Callback()


def _place_around(first: ParameterServer) -> None:
    """Puts our callback first in the list that Keras is setting up, and its second half last."""
    owner = enclosing_list(first)
    others = [c for c in owner.callbacks if c is not first and not isinstance(c, _Last)]
    if any(isinstance(c, ParameterServer) for c in others):
        raise ConfigurationError("callbacks hold hps.callbacks.ParameterServer twice: list it once, first")
    if any(isinstance(c, keras.callbacks.SwapEMAWeights) for c in others):
        raise ConfigurationError(
            "keras.callbacks.SwapEMAWeights needs the moving averages in this process, but they are on the "
            "parameter server: leave it out; with use_ema=True the weights become the averages when fit ends"
        )
    last = _Last(first)
    last.set_model(first.model)
    listed = owner.callbacks
    owner.callbacks = [first, *others, last]
    first._unset = []
    _postpone(first, listed, first)


def _samples_seen(model: Any) -> float:
    """Samples of the evaluation that has just ended, 0 if its `test_step` does not count them."""
    tracker = getattr(model, "_loss_tracker", None)
    return float(np.asarray(keras.ops.convert_to_numpy(tracker.count))) if tracker is not None else 0.0

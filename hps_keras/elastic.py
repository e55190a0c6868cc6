"""Horovod's elastic surface: a state that can be committed, synchronised and restored.

Hosts do not come and go here: a job begins and ends with the same ranks, and a failure ends it. So :func:`run` calls
its function once, no reset callback is called by this package, and :meth:`KerasState.check_host_updates` finds nothing.
What stays is what such scripts do with their state themselves: all workers begin with the chief's, commits keep a copy
in memory, and :meth:`KerasState.restore` brings it back. Batches that follow each worker's speed are elsewhere
(:class:`hps_keras.callbacks.BatchResizer`), and so is going on after a failure (``keras.callbacks.BackupAndRestore``).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

from hps_keras import cluster
from hps_keras.callbacks.carrier import Carrier
from hps_keras.disguise import Disguised, Distributed
from hps_keras.errors import ConfigurationError
from hps_keras.hints import say_once
from hps_keras.horovod.collectives import broadcast_object, broadcast_variables
from hps_keras.optimizer import inside, wrapped_in
from hps_keras.worker import local
from hps_keras.worker.inventory import common_weights
from hps_keras.worker.loop import end_running

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class TensorFlowKerasState:
    """A model, its optimizer and further values of a script, committed and restored together.

    Args:
        model: A built Keras model.
        optimizer: Its optimizer; None takes the one that the model was compiled with.
        backend: Taken for Horovod's sake.
        kwargs: The further values; each becomes an attribute: ``KerasState(model, epoch=0).epoch``.

    Attributes:
        model: The model.
        optimizer: The optimizer, or None.

    Raises:
        ConfigurationError: No model, or it is not built; no optimizer; or a value has a name that is taken.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        _check_names(type(self), kwargs)
        if not isinstance(model, keras.Model):
            raise ConfigurationError(f"model={model!r} of {type(self).__name__}: give a keras.Model")
        if optimizer is not None and not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ConfigurationError(
                f"optimizer={optimizer!r} of {type(self).__name__}: give an optimizer object, or "
                "leave it out to take the one that the model was compiled with"
            )
        if not model.built:
            raise ConfigurationError(
                f"model={getattr(model, 'name', model)!r} of {type(self).__name__} is not built, so there are no "
                "weights to keep: call model.build(input_shape) first, or give it a keras.Input"
            )
        self.model, self.optimizer = model, optimizer if optimizer is not None else getattr(model, "optimizer", None)
        self._names = tuple(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._reset_callbacks: list[Callable[[], Any]] = []
        for part in _parts(self.optimizer):
            if not part.built:  # so that what is kept now can be restored after training
                part.build(model.trainable_variables)
        self.save()

    def save(self) -> None:
        """Keeps a copy of everything, in this process's memory.

        The slots of a wrapped optimizer, which are on the server, are kept by the chief; a plain one's by each worker.
        """
        _attach(self.model)
        self._values = {name: copy.deepcopy(getattr(self, name)) for name in self._names}
        self._weights = [np.array(ops.convert_to_numpy(v)) for v in self.model.weights]
        self._alone = [local.of(o).state()[1] for o in wrapped_in(self.model)]
        self._slots: list[dict[str, Any]] = []
        for part in self._kept():
            store: dict[str, Any] = {}
            part.save_own_variables(store)
            self._slots.append({name: np.array(value) for name, value in store.items()})

    def commit(self) -> None:
        """Keeps a copy of everything, as :meth:`save`."""
        self.save()
        self.check_host_updates()

    def restore(self) -> None:
        """Brings back what was committed last: the chief's, on all workers. All must call it, outside `fit`.

        The slots of a wrapped optimizer come back when the next training begins. What `train_on_batch` has begun by
        itself ends here, together with the other workers; the next call begins anew, from what is restored.

        Raises:
            ConfigurationError: In a `fit` or a block of ``hps.training``, whose next exchange would undo it.
        """
        _check_not_in(cluster.current().busy)
        end_running()
        for variable, value in zip(self.model.weights, self._weights):
            variable.assign(np.array(value))
        for part, store in zip(self._kept(), self._slots):
            part.load_own_variables({name: np.array(value) for name, value in store.items()})
        for wrapped, values in zip(wrapped_in(self.model), self._alone):
            local.of(wrapped).restore(values)
        for name, value in self._values.items():
            setattr(self, name, copy.deepcopy(value))
        self._take_the_chief_s()

    def sync(self) -> None:
        """Gives all workers the chief's weights, optimizer and further values, and keeps them as :meth:`save` does.

        The slots of a wrapped optimizer are on the server, where the chief's are taken when the next training begins.
        What `train_on_batch` has begun by itself ends here. All must call it, outside `fit` or in the same hook of a
        callback.

        Raises:
            ConfigurationError: A plain optimizer's variables are not those of the chief's.
        """
        end_running()
        _attach(self.model)
        self._take_the_chief_s()
        self.save()

    def _take_the_chief_s(self) -> None:
        broadcast_variables(common_weights(self.model), 0)
        plain = [part for part in _parts(self.optimizer) if not _on_server(part)]
        for part in plain:
            if not part.built:
                part.build(self.model.trainable_variables)
        # As an object: Keras numbers slots without a name, not alike on a worker that has loaded a file.
        slots = [_values_of(part) for part in plain] if cluster.rank() == 0 else []
        mine = {name: getattr(self, name) for name in self._names}, slots
        values, theirs = broadcast_object(mine, 0)
        for name, value in values.items():
            setattr(self, name, value)
        if not cluster.is_server():  # whose script may have made an optimizer, but trains nothing
            _set_all(plain, theirs)

    def _kept(self) -> list[Any]:
        """The parts of the optimizer that this process keeps; of what is on the server, all take the chief's."""
        return [part for part in _parts(self.optimizer) if cluster.rank() == 0 or not _on_server(part)]

    # -- what hosts that come and go would need --

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Keeps functions for :meth:`on_reset`, which nobody calls by itself here; says so once."""
        self._reset_callbacks += callbacks
        if self._reset_callbacks:
            say_once(
                "reset callbacks are called by state.on_reset() only: the number of workers stays what it was at the "
                "job's start"
            )

    def on_reset(self) -> None:
        """Calls :meth:`reset` and the functions that were registered."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Does nothing; for subclasses."""

    def on_hosts_updated(self, timestamp: Any, update_res: Any) -> None:
        """Does nothing: no host comes or goes."""

    def check_host_updates(self) -> None:
        """Does nothing: no host comes or goes."""


class KerasState(TensorFlowKerasState):
    """A model, its optimizer and further values of a script, committed and restored together; on any back end.

    Args:
        model: A built Keras model.
        optimizer: Its optimizer; None takes the one that the model was compiled with.
        kwargs: The further values; each becomes an attribute.

    Raises:
        ConfigurationError: No model, or it is not built; no optimizer; or a value has a name that is taken.

    Example:
        >>> state = hvd.elastic.KerasState(model, batch=0, epoch=0)   # doctest: +SKIP
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        _check_names(type(self), kwargs)  # a value called backend would be taken for the argument
        super().__init__(model, optimizer, None, **kwargs)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a training function: what it returns synchronises the state and calls the function, once.

    Args:
        func: Its first argument is the state.

    Raises:
        ConfigurationError: No function; or, when that is called, its first argument is no state.

    Example:
        >>> @hvd.elastic.run   # doctest: +SKIP
        ... def train(state):
        ...     state.model.fit(x, y, callbacks=[hvd.elastic.CommitStateCallback(state)])
    """
    if not callable(func):
        raise ConfigurationError(f"func={func!r} of elastic.run: give a function, whose first argument is the state")

    @functools.wraps(func)
    def once(state: Any, *args: Any, **kwargs: Any) -> Any:
        if not callable(getattr(state, "sync", None)):
            raise ConfigurationError(f"state={state!r}: give the function an hps.elastic.KerasState first")
        state.sync()
        return func(state, *args, **kwargs)

    return once


class CommitStateCallback(Carrier):
    """Commits a state after so many batches. Brings a ParameterServer into `fit`, as all callbacks of Horovod's do.

    Each commit copies the weights, and on the chief fetches the optimizer's slots from the server.

    Args:
        state: The state.
        batches_per_commit: 1 or more; 0 commits at the end of each epoch.

    Raises:
        ConfigurationError: Not such a number, or no state.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        whole = isinstance(batches_per_commit, int) and not isinstance(batches_per_commit, bool)
        if not whole or batches_per_commit < 0:
            raise ConfigurationError(
                f"batches_per_commit={batches_per_commit!r}: give a number of batches, or 0 for the ends of epochs"
            )
        if not callable(getattr(state, "commit", None)):
            raise ConfigurationError(f"state={state!r} of CommitStateCallback: give an hps.elastic.KerasState")
        self.state, self.batches_per_commit = state, batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to count."""
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits, if it is time to."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits, with ``batches_per_commit=0``."""
        if self.batches_per_commit == 0:
            self.commit()

    def commit(self) -> None:
        """Commits the state."""
        self.state.commit()


class UpdateBatchStateCallback(Carrier):
    """Keeps the number of the batch in ``state.batch``; 0 between epochs.

    Args:
        state: The state, with a value ``batch``.

    Raises:
        ConfigurationError: It has none.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        _check_has(state, "batch", type(self))
        self.state = state

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The next epoch begins with batch 0."""
        self.state.batch = 0


class UpdateEpochStateCallback(Carrier):
    """Counts the epochs of all `fit` in ``state.epoch``.

    Args:
        state: The state, with a value ``epoch``.

    Raises:
        ConfigurationError: It has none.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        _check_has(state, "epoch", type(self))
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to count where the state is."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts an epoch."""
        self.state.epoch = self.initial_epoch + epoch + 1


def _check_names(kind: type, values: Iterable[str]) -> None:
    for name in values:
        if name.startswith("_") or name in ("model", "optimizer", "backend") or hasattr(kind, name):
            raise ConfigurationError(f"{name}= of {kind.__name__} is a name of its own: call the value something else")


def _check_has(state: Any, name: str, kind: type) -> None:
    if not hasattr(state, name):
        raise ConfigurationError(
            f"state={state!r} of {kind.__name__} has no {name}, so none would be committed: make it with "
            f"hps.elastic.KerasState(model, {name}=0)"
        )


def _check_not_in(busy: str | None) -> None:
    """Refuses to restore in the middle of a training."""
    if busy is None:
        return
    if busy == "hps.training block":
        raise ConfigurationError(
            "restore() in a block of hps.training: its next exchange would undo it; call it after the block, and train "
            "on in a new one"
        )
    raise ConfigurationError(
        "restore() in a callback, or after an exception of fit that was caught: this fit has not ended, and its next "
        "exchange would undo it; call it after fit, or use keras.callbacks.EarlyStopping(restore_best_weights=True), "
        "and keras.callbacks.BackupAndRestore to go on after a failure"
    )


def _parts(optimizer: Any) -> list[Any]:
    """An optimizer and those in it, each of which saves what is its own; none on a server, which has no use for it."""
    if optimizer is None or cluster.is_server():
        return []
    every = [optimizer, *inside(optimizer)]
    # A plain container saves the inner ones' values itself.
    return every if any(isinstance(one, Disguised) for one in every) else [optimizer]


def _on_server(part: Any) -> bool:
    """Whether slots of an optimizer, or of one inside it, are exchanged rather than this worker's own."""
    return any(isinstance(one, Distributed) for one in [part, *inside(part)])


def _values_of(part: Any) -> list[np.ndarray]:
    return [np.array(ops.convert_to_numpy(v)) for v in part.variables]


def _set_all(parts: list[Any], values: list[list[np.ndarray]]) -> None:
    """Sets the variables of plain optimizers.

    Raises:
        ConfigurationError: They are not those that the values belong to.
    """
    mine = [[tuple(v.shape) for v in part.variables] for part in parts]
    theirs = [[value.shape for value in some] for some in values]
    if mine != theirs:
        names, here, there = [part.name for part in parts], sum(map(len, mine)), sum(map(len, theirs))
        raise ConfigurationError(
            f"optimizer={names} of a state has {here} variables on worker {cluster.rank()}, which do not fit the "
            f"{there} of worker 0: make the same optimizer, for the same trainable layers, on all workers"
        )
    for part, some in zip(parts, values):
        for variable, value in zip(part.variables, some):
            variable.assign(np.array(value))


def _attach(model: Any) -> None:
    """Gives a model its weights back, which JAX keeps elsewhere during an epoch."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()

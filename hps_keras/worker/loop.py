"""Training outside `fit`: loops of the script's own, and `train_on_batch`.

:func:`training` attaches an exchange to a model for a block of code. `train_on_batch` without such a block attaches one
by itself, which ends with the process, or where a `fit` or a block begins.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from hps_keras import backends, cluster
from hps_keras.errors import ConfigurationError, HpsError
from hps_keras.optimizer import wrapped_in
from hps_keras.server.telemetry import Summary
from hps_keras.worker.exchange import Exchange
from hps_keras.worker.guard import Exchanging, Guard, unguarded
from hps_keras.worker.link import link
from hps_keras.worker.parts import Parts, check_parts, parts_of

_TOO_MANY = 1 << 53  # samples: they are added up in floats


class Loop:
    """What :func:`training` returns; a context manager.

    Attributes:
        summary: After the block, on workers: a :class:`hps_keras.server.telemetry.Summary`; ``print`` it for a table.
    """

    def __init__(self, parts: Parts, by_itself: bool = False) -> None:
        self.summary: Summary | None = None
        self._parts, self._by_itself = parts, by_itself
        self._exchange: Exchange | None = None
        self._step: Any = None
        self._steps: dict[int, backends.Step] = {}  # of models that train_on_batch trains
        self._stored = True  # whether the variables hold the state

    # -- the block --

    def __enter__(self) -> Loop:
        """Starts all workers from the chief's weights; on a parameter server, serves and never returns."""
        here = cluster.current()
        if here.is_server:
            from hps_keras.server.dedicated import serve_to_the_end

            serve_to_the_end(here)
        if not self._by_itself:
            end_running()
        if here.busy:
            raise HpsError(
                f"an earlier {here.busy} on this worker did not end (an exception was caught, or this block stands in "
                "it?); the exchange cannot go on"
            )
        self._begin(here)
        return self

    def _begin(self, here: cluster.Cluster) -> None:
        if not here.alone:
            check_parts(self._parts)
            exchange = self._exchange = Exchange(link(here), self._parts, here.rank)
            # Nobody ends it: what travels would be lost, and a worker may do something else for long.
            exchange.pushes.wait = exchange.ends_with_process = self._by_itself
            exchange.enter(None, 0)
            exchange.resume_clock()
            here.busy = None if self._by_itself else "hps.training block"
        self._step = backends.step(self._parts)
        here.loop = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the training together with the other workers; after an error, leaves everything as it is."""
        if kind is None:
            self._end()

    def _end(self) -> None:
        here, exchange = cluster.current(), self._exchange
        self._store()
        if exchange is None:
            self.summary = Summary.alone()
        else:
            self._check_exchanged()
            assigned = exchange.assigned()
            exchange.pause(False)
            self.summary = Summary.of(exchange.leave())
            _assign(assigned)
            here.busy = None
        self._exchange = here.loop = None

    # -- in it --

    @property
    def state(self) -> Any:
        """On JAX: ``(trainable_variables, non_trainable_variables, optimizer_variables)``, lists of arrays.

        A JAX loop begins with it, inside the block: all workers then have the chief's weights. Variables of several
        models stand one after the other, in their order; of several optimizers ``optimizer_variables`` has a list for
        each. None on TensorFlow and torch, where variables hold the state.
        """
        self._check_open("state")
        for optimizer in self._parts.optimizers:
            if not optimizer.built:
                optimizer.build(self._parts.trainable_variables)
        return self._step.read()

    def step(self, samples: int, state: Any = None) -> Any:
        """Exchanges the gradient of the step that the script has just made. Call it once after each.

        Args:
            samples: Samples that the step trained on, 0 or more: the weight of this worker's gradient.
            state: On JAX with ``optimizer.stateless_apply``: the state after the step, a tuple or list that begins as
                :attr:`state` does; what stands behind these three comes back as it is.

        Returns:
            The state to go on with, of the kind that was given; None when none was.

        Raises:
            ConfigurationError: An argument cannot be, or the optimizer was applied more than once.
        """
        self._check_open("step")
        try:
            number = operator.index(samples)
        except TypeError:
            number = -1
        if not 0 <= number < _TOO_MANY or isinstance(samples, bool):
            raise ConfigurationError(f"samples={samples!r} of loop.step: give the number of samples of the step")
        self._step.take(number, state)
        self._stored = state is None
        if self._exchange is not None:
            if not self._parts.built:
                raise ConfigurationError(
                    f"the model {self._parts.name!r} has no weights yet: call it once on a batch before hps.training"
                )
            self._exchange.stepped(self._step, number)
        return self._step.give()

    def sync(self, state: Any = None) -> Any:
        """Waits for all workers, and makes them equal bit by bit; moving statistics are averaged. Call it on all.

        A worker that leaves the block instead ends its own training there; the others go on without it. What the chief
        has assigned to weights since its last step is taken by all.

        Args:
            state: As for :meth:`step`, for example after the last step of an epoch.

        Returns:
            The state to go on with, of the kind that was given; None when none was.
        """
        self._check_open("sync")
        if state is not None:
            self._step.take(0, state)
            self._stored = False
        self._store()
        if self._exchange is not None:
            self._check_exchanged()
            assigned = self._exchange.assigned()
            self._exchange.pause(False)
            _assign(assigned)
            self._exchange.resume(False, last=False)
            self._exchange.resume_clock()
        if state is None:
            return None
        self._step.take(0, [*self._step.read(), *state[3:]])
        kind = type(state)
        return getattr(kind, "_make", kind)(self._step.give())

    def _store(self) -> None:
        if not self._stored:
            self._step.store()
            self._stored = True

    def _check_open(self, name: str) -> None:
        if not cluster.is_initialized() or cluster.current().loop is not self:
            raise ConfigurationError(f"loop.{name} outside of its block: write `with hps.training(model) as loop:`")

    def _check_exchanged(self) -> None:
        assert self._exchange
        for name, times in self._exchange.unexchanged().items():
            raise ConfigurationError(
                f"optimizer {name!r} has been applied {times} times since its last exchange, so this worker's weights "
                "miss what it has learnt: call loop.step(samples) after each step"
            )

    # -- train_on_batch --

    def covers(self, model: Any) -> bool:
        """Whether a model, with all its wrapped optimizers, is trained in this loop."""
        mine = {id(o) for o in wrapped_in(self._parts)}
        return model in self._parts.models and {id(o) for o in wrapped_in(model)} <= mine

    def wrap(self, model: Any) -> None:
        """Makes the next call of the model's train function exchange."""
        exchange = self._exchange
        assert exchange
        if not exchange.started and self._parts.built:
            exchange.start()
        if id(model) not in self._steps:
            backends.watch(model)
            step = self._steps[id(model)] = backends.step(model)
            step.others = len(wrapped_in(self._parts)) > len(wrapped_in(model))
        model.train_function = unguarded(model.train_function)
        model.make_train_function()
        model.train_function = Exchanging(model.train_function, exchange, self._steps[id(model)])


def _assign(assigned: Sequence[tuple[Any, Any]]) -> None:
    """Gives weights the values again that the script had assigned to them."""
    for variable, value in assigned:
        variable.assign(value)


def training(model: Any, optimizer: Any = None) -> Loop:
    """Trains a model over the workers in a loop of the script's own: a block, and a call after each step.

    At its begin all workers take the chief's weights. In it ``model.train_on_batch`` exchanges by itself; a loop that
    calls ``optimizer.apply`` calls :meth:`Loop.step` after each step, see there for JAX. At its end all workers wait
    for each other and are equal bit by bit; they need not have made the same number of steps. On a parameter server
    the block serves until the job ends, and nothing after it runs there. In a world of one process it does nothing.

    Args:
        model: A Keras model, or a list of them (a generator and a discriminator); built, for loops of your own.
        optimizer: What :func:`hps_keras.DistributedOptimizer` returned, or a list of them; None for the optimizers that
            the models were compiled with.

    Returns:
        A :class:`Loop`.

    Raises:
        ConfigurationError: No model, or no wrapped optimizer.

    Example:
        >>> with hps.training(model, optimizer) as loop:             # doctest: +SKIP
        ...     for x, y in batches:
        ...         with tf.GradientTape() as tape:
        ...             loss = loss_function(y, model(x, training=True))
        ...         gradients = tape.gradient(loss, model.trainable_variables)
        ...         optimizer.apply(gradients, model.trainable_variables)
        ...         loop.step(len(x))
    """
    return Loop(parts_of(model, optimizer))


def end_running() -> None:
    """Ends, together with the other workers, what `train_on_batch` has begun by itself, if it has."""
    loop = cluster.current().loop
    if loop is not None and loop._by_itself:
        loop._end()


def attach(model: Any, batch: Any) -> bool:
    """Makes the next call of a model's train function exchange, if its optimizer was wrapped.

    Args:
        model: A compiled model, in its `train_on_batch`.
        batch: ``(x, y, sample_weight)``, from whose shapes the model is built if it is not.

    Returns:
        Whether it will; :func:`release` is then to be called after it.
    """
    if not cluster.is_initialized() or cluster.current().alone or not wrapped_in(model):
        return False
    if cluster.is_server():
        Loop(parts_of(model, None)).__enter__()
    if cluster.current().busy == "fit":  # a callback that trains another model, say: the guard speaks
        return False
    if not model.built:
        model._symbolic_build(data_batch=batch)
    loop = cluster.current().loop or Loop(parts_of(model, None), by_itself=True).__enter__()
    if not loop.covers(model):
        raise ConfigurationError(
            f"train_on_batch of model {model.name!r}, while model {loop._parts.name!r} is trained: let both be trained "
            "in one block, `with hps.training([one, other]):`, around the whole loop"
        )
    loop.wrap(model)
    return True


def release(model: Any) -> None:
    """After `train_on_batch`: outside of it the train function exchanges nothing."""
    model.train_function = Guard(unguarded(model.train_function))

"""Numeric mode: a real Keras model trains on virtual workers, so that what staleness costs is measured, not guessed.

The engine keeps virtual time and asks the coordinator; :class:`Numeric` computes what its decisions mean: each
gradient on the parameters that its worker holds, each update by the parameter server's own
:class:`hps_keras.server.update.ServerOptimizer`. All workers share one model in one process; what they hold and send is
in :mod:`hps_keras.simulate.holdings`, in as few bits as the widths say.

What differs from real workers: the model's moving statistics (BatchNorm) and its random seeds are one for all workers
and move on with every gradient, instead of being averaged at the ends of epochs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from hps_keras import backends
from hps_keras.batches.shares import Resizing
from hps_keras.consistency import Asynchronous, Consistency, resolve
from hps_keras.coordination.decisions import Push, Update
from hps_keras.coordination.scheduling import Lease
from hps_keras.data.dataset import ElasticDataset
from hps_keras.errors import ConfigurationError
from hps_keras.layout import ParameterLayout
from hps_keras.optimizer import describe_plain, inside, wrapped_in
from hps_keras.quantization.codecs import Codec
from hps_keras.server.update import ServerOptimizer
from hps_keras.simulate.engine import simulate
from hps_keras.simulate.holdings import Gradients, Holdings
from hps_keras.simulate.report import Report
from hps_keras.simulate.scenario import Failure, Scenario, Server, Slowdown, Worker
from hps_keras.slots import slots_of

logger = logging.getLogger("hps_keras")


def train(
    model: Any,
    data: Any,
    workers: int | Sequence[Worker],
    consistency: Consistency | str | None = None,
    *,
    epochs: int = 1,
    validation_data: Any = None,
    seed: int = 0,
    evaluate_every: int = 0,
    server: Server | None = None,
    slowdowns: Sequence[Slowdown] = (),
    failures: Sequence[Failure] = (),
    resizing: Resizing | None = None,
    push_bits: int = 32,
    pull_bits: int = 32,
    policy: Any = None,
    pull_policy: Any = None,
    monitor: str = "val_accuracy",
    overlap: bool = False,
) -> Report:
    """Trains a Keras model on virtual workers: real gradients, real staleness, virtual seconds.

    Args:
        model: A built Keras model, compiled with a plain optimizer and trained by Keras's own training step. It is
            trained as if by `fit`: to compare settings, begin each with a model of the same weights.
        data: ``(x, y)`` or ``(x, y, sample_weight)``, or an :class:`hps_keras.data.ElasticDataset`. The workers share
            one shuffled stream of it, unless they have `steps` of their own.
        workers: The virtual workers, or a number of equal ones whose step takes one virtual second; their batch size is
            then that of the :class:`hps_keras.data.ElasticDataset`, or 64.
        consistency: ``hps.WASP(50)``, ``"wasp:50"``, ...; else ``HPS_CONSISTENCY`` decides, else it is BSP.
        epochs: Passes over the data.
        validation_data: What to evaluate on after each epoch, outside virtual time.
        seed: Of the order of the samples and of the jitter.
        evaluate_every: Updates between further evaluations, for the time to an accuracy; 0 for none.
        server: The parameter servers; without one, transfers and updates take no time.
        slowdowns: Workers that are slower for a time.
        failures: Workers that are lost.
        resizing: How batch sizes follow speed and memory, as `BatchResizer(...).options`; None: they stay.
        push_bits: Width of gradients.
        pull_bits: Width of parameters in answers.
        policy: Instead of both: how they follow `monitor`, as in :class:`hps_keras.callbacks.AdaptiveQuantization`.
        pull_policy: The same for answers; None: as `policy`.
        monitor: What is monitored; where there is no such value, the loss.
        overlap: Whether workers compute the next step while their pushes travel.

    Returns:
        The report; ``report.history`` has the loss of each epoch and the evaluations, each with its virtual second.

    Raises:
        ConfigurationError: The model cannot be simulated, or something else does not fit; says what to do.

    Example:
        >>> machines = [Worker(step_seconds=0.05 / speed) for speed in (1, 1, 0.5, 0.25)]
        >>> report = train(model, (x, y), machines, "wasp:50", epochs=3, validation_data=(a, b))  # doctest: +SKIP
        >>> report.time_to("val_accuracy", 0.985)  # doctest: +SKIP
    """
    if isinstance(workers, int):
        size = data.batch_size if isinstance(data, ElasticDataset) else 64
        workers = [Worker(step_seconds=1.0, batch_size=size)] * workers
    rule = resolve(consistency)
    numeric = Numeric(
        model,
        data,
        len(workers),
        rule,
        seed=seed,
        validation_data=validation_data,
        evaluate_every=evaluate_every,
    )
    sharded = bool(workers) and all(w.steps is not None for w in workers)
    scenario = Scenario(
        workers=tuple(workers),
        consistency=rule,
        server=server or Server(),
        parameters=sum(int(np.prod(v.shape)) for v in model.trainable_variables),
        samples=None if sharded else numeric.samples,
        epochs=epochs,
        slowdowns=tuple(slowdowns),
        failures=tuple(failures),
        resizing=resizing,
        seed=seed,
        push_bits=push_bits,
        pull_bits=pull_bits,
        policy=policy,
        pull_policy=pull_policy,
        monitor=monitor,
        overlap=overlap,
    )
    report = simulate(scenario, numeric)
    numeric.finish()
    return report


class Numeric:
    """Computes gradients, updates and accuracies for :func:`hps_keras.simulate.simulate`.

    Args:
        model: A built Keras model, compiled with a plain optimizer and trained by Keras's own training step. It is
            trained: it has the present parameters at the ends of epochs, and optimizer slots too after :meth:`finish`.
        data: ``(x, y)`` or ``(x, y, sample_weight)``, or an :class:`hps_keras.data.ElasticDataset`.
        workers: Number of workers.
        consistency: The consistency model, for its delay compensation and momentum correction.
        seed: Of the order of the samples, unless `data` has its own.
        validation_data: What is evaluated at the ends of epochs: ``(x, y)``, ``(x, y, sample_weight)``, or a data set
            that `model.evaluate` takes.
        evaluate_every: Updates between further evaluations; 0 for none.
        evaluation_batch: Batch size of evaluations.

    Attributes:
        samples: Samples of one pass.

    Raises:
        ConfigurationError: The model cannot be simulated, or the arrays do not fit together.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        workers: int,
        consistency: Consistency,
        *,
        seed: int = 0,
        validation_data: Any = None,
        evaluate_every: int = 0,
        evaluation_batch: int = 500,
    ) -> None:
        _check(model)
        if evaluate_every < 0:
            raise ConfigurationError(f"evaluate_every={evaluate_every!r}: give a number of updates, or 0 for none")
        if evaluate_every and validation_data is None:
            raise ConfigurationError(f"evaluate_every={evaluate_every!r} without validation_data: give both, or none")
        self.model, self._data = model, _dataset(data, seed)
        self.samples = self._data.samples
        if self.samples < workers:
            raise ConfigurationError(f"data of {self.samples} samples for {workers} workers: each needs one at least")
        self._validation, self._every, self._batch = validation_data, evaluate_every, evaluation_batch
        variables = model.trainable_variables
        description = describe_plain(model.optimizer, variables)
        self._layout = ParameterLayout.from_json(description["layout"])
        self._gradient = backends.gradient_function(model, self._layout)
        parameters = self._layout.allocate()
        for view, variable in zip(self._layout.views(parameters), variables):
            view[...] = ops.convert_to_numpy(variable)
        with keras.saving.custom_object_scope(_classes(model)):
            self._server = ServerOptimizer(description, parameters)
        self._first_step = _count(model.optimizer)
        if model.optimizer.built:
            self._server.write_state(self._first_step, [ops.convert_to_numpy(v) for v in slots_of(model.optimizer)])
        self._rates = _rates(model.optimizer)
        self._steps: Counter[int] = Counter()
        self._order: np.ndarray | None = None
        self._workers, self._positions = workers, Counter[int]()
        self._holdings, self._gradients = Holdings(self._server, workers), Gradients(self._server)
        self._loss, self._trained = 0.0, 0
        self._asynchronous: Asynchronous | None = None
        self.switch(consistency)

    # -- what the engine asks for --

    def overlap(self) -> None:
        """Workers compute while their pushes travel, so that a gradient may be of what its worker held before."""
        self._holdings.keep_earlier = True

    def rate(self, worker: int) -> float:
        """The learning rate of a worker's next push: a schedule goes by the worker's own steps."""
        return self._rates(self._first_step + self._steps[worker])

    def switch(self, model: Consistency) -> None:
        """Follows another consistency model from now on."""
        self._holdings.share(model.synchronous)
        self._asynchronous = model if isinstance(model, Asynchronous) else None
        self._server.compensation = getattr(model, "compensation", 0.0)
        if self._asynchronous:
            self._correct_momentum()
        else:
            self._server.correct_momentum(1, "as_given")

    def begin_pass(self, number: int) -> None:
        """Shuffles the samples anew: as the elastic data set does in pass `number`, counted from 1."""
        self._order = self._data.order(self._data.seed, number)
        self._positions.clear()

    def take(self, push: Push, factor: float, first: bool, lease: Lease | None) -> None:
        """Adds `factor` times the gradient of a push, on the parameters that it names, to the server's gradient.

        Without a lease, the worker has a shard of its own of the shuffled samples, and begins it again at its end.
        """
        batch = self._shard(push) if lease is None else self._data.rows(self._order, *lease)
        into = self._gradients.room(first)
        loss = self._gradient(self._holdings.of(push.worker, push.version), batch, into)
        self._loss, self._trained = self._loss + push.samples * loss, self._trained + push.samples
        self._steps[push.worker] += 1
        # A run may diverge: that is a result, not an error.
        with np.errstate(over="ignore", invalid="ignore"):
            self._gradients.add(push.worker, into, factor, first)

    def update(self, decision: Update) -> dict[str, float] | None:
        """Updates the parameters as the parameter server does; returns an evaluation when one is due."""
        server, first, scale = self._server, decision.pushes[0], decision.scale
        if server.compensation and first.version < decision.version - 1:
            with np.errstate(over="ignore", invalid="ignore"):
                scale = server.compensate_from(self._holdings.of(first.worker, first.version), scale)
        self._holdings.release()
        server.update(scale, decision.rate, self._gradient.present)
        server.version = decision.version
        return self.evaluate() if self._every and decision.version % self._every == 0 else None

    def nbytes(self, bits: int) -> int:
        """Bytes of a message of a width, of this model's tensors."""
        return Codec(self._layout, bits).nbytes

    def widths(self, push: int, pull: int) -> None:
        """Gradients and answers have these widths from now on."""
        self._gradients.bits = push
        self._holdings.width(pull)

    def answer(self, worker: int, exact: bool) -> None:
        """The worker now holds the present parameters, or in few bits what an answer tells of them."""
        self._holdings.give(worker, exact)

    def leave(self, worker: int) -> None:
        """The worker is lost: less asynchrony, more of the user's own momentum."""
        self._holdings.lose(worker)
        self._gradients.lose(worker)
        self._correct_momentum()

    def epoch_end(self, epoch: int, now: float) -> dict[str, float] | None:
        """All workers take the present parameters; returns what Keras would log: training loss and validation."""
        self._holdings.give_all()
        logs = {"loss": self._loss / self._trained} if self._trained else {}
        self._loss, self._trained = 0.0, 0
        if self._validation is None:
            self._into_model()
        else:
            logs |= self.evaluate()
        return logs

    # -- evaluation, the end --

    def evaluate(self) -> dict[str, float]:
        """Evaluates the present parameters on the validation data; outside virtual time."""
        self._into_model()
        options = {"verbose": 0, "return_dict": True}
        if isinstance(self._validation, (tuple, list)):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tuple(self._validation))
            options |= {"batch_size": self._batch}
            found = self.model.evaluate(x, y, sample_weight=sample_weight, **options)
        else:
            found = self.model.evaluate(self._validation, **options)
        return {f"val_{name}": float(value) for name, value in found.items()}

    def finish(self) -> None:
        """Leaves model and optimizer as `fit` would: final parameters, slots, the first worker's count of steps."""
        optimizer = self.model.optimizer
        if optimizer.use_ema:
            self._holdings.release()
            self._server.finalize()
        self._into_model()
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        for variable, value in zip(slots_of(optimizer), self._server.read_state()):
            variable.assign(value)
        optimizer._iterations.assign(self._first_step + self._steps[0])

    # -- small things --

    def _into_model(self) -> None:
        for variable, view in zip(self.model.trainable_variables, self._layout.views(self._server.parameters)):
            variable.assign(np.array(view))  # JAX would share the memory, which changes

    def _correct_momentum(self) -> None:
        workers = len(self._holdings.workers)
        if self._asynchronous and workers:
            chosen = self._server.correct_momentum(workers, self._asynchronous.momentum)
            if chosen is not None:
                logger.info("%s", chosen)

    def _shard(self, push: Push) -> Any:
        start, end = (rank * self.samples // self._workers for rank in (push.worker, push.worker + 1))
        first = self._positions[push.worker]
        self._positions[push.worker] += push.samples
        mine = start + np.arange(first, first + push.samples) % (end - start)
        return self._data.rows(mine if self._order is None else self._order[mine], 0, push.samples)


def _dataset(data: Any, seed: int) -> ElasticDataset:
    if isinstance(data, ElasticDataset):
        return data
    if not isinstance(data, (tuple, list)) or not 1 <= len(data) <= 3:
        raise ConfigurationError(
            f"data of type {type(data).__name__}: give (x, y), (x, y, sample_weight) or an ElasticDataset"
        )
    x, y, sample_weight = (*data, None, None)[:3]
    return ElasticDataset(x, y, sample_weight, seed=seed)


def _check(model: Any) -> None:
    name = getattr(model, "name", type(model).__name__)
    if not getattr(model, "compiled", False):
        raise ConfigurationError(f"model {name!r} is not compiled: call model.compile(optimizer=..., loss=...) first")
    if not model.built or not model.trainable_variables:
        raise ConfigurationError(
            f"model {name!r} has no trainable weights yet: give it a keras.Input, or call it once on a batch"
        )
    if type(model).train_step is not keras.Model.train_step:
        raise ConfigurationError(
            f"model {name!r} has a train_step of its own: only Keras's own training step can be simulated"
        )
    optimizer = model.optimizer
    if inside(optimizer) or wrapped_in(model):
        raise ConfigurationError(
            f"model {name!r} is compiled with {type(optimizer).__name__}, which is more than a plain optimizer: give "
            "one that is not wrapped (the simulator does what hps.DistributedOptimizer would) and, instead of "
            "mixed_float16, mixed_bfloat16 or float32"
        )
    if optimizer.gradient_accumulation_steps:
        raise ConfigurationError(
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}: simulate larger batches instead"
        )


def _classes(model: Any) -> dict[str, type]:
    constraints = [v.constraint for v in model.trainable_variables if v.constraint is not None]
    return {type(one).__name__: type(one) for one in [model.optimizer, *constraints]}


def _count(optimizer: Any) -> int:
    return int(ops.convert_to_numpy(optimizer._iterations))


def _rates(optimizer: Any) -> Callable[[int], float]:
    """The learning rate as a function of the number of steps."""
    given = optimizer._learning_rate
    if isinstance(given, keras.Variable):
        rate = float(ops.convert_to_numpy(given))
        return lambda step: rate
    known: dict[int, float] = {}

    def scheduled(step: int) -> float:
        if step not in known:  # a schedule costs many small operations, and all workers come by the same steps
            value = given(step) if isinstance(given, keras.optimizers.schedules.LearningRateSchedule) else given()
            known[step] = float(ops.convert_to_numpy(value))
        return known[step]

    return scheduled

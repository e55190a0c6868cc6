"""The server's half of a Keras optimizer: parameters, slots and the update.

A :class:`ServerOptimizer` is rebuilt from what a worker tells (:func:`hps_keras.optimizer.describe`). The user's
optimizer does the arithmetic, through Keras. Where its arithmetic is elementwise it runs over *one* flat variable
instead of one per tensor: the same numbers, but a model of 200 tensors then costs one call and not 200, and the answer
is sent from the variable's own memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from hps_keras import backends
from hps_keras.consistency import corrected_momentum
from hps_keras.errors import ConfigurationError
from hps_keras.layout import ParameterLayout, aligned_zeros
from hps_keras.optimizer import known_classes
from hps_keras.quantization.coding import WHOLE, ParameterCoder, Room
from hps_keras.quantization.precision import EXACT
from hps_keras.server.classes import find_classes
from hps_keras.server.fused import FusedUpdater, fits, keras_class
from hps_keras.slots import slots_of

# Each element is updated from its own gradient and slots alone, so that tensors can lie end to end in one variable.
_ELEMENTWISE = ("SGD", "RMSprop", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion")

_MOMENTA = ("momentum", "beta_1")
_WITH_RATE_IN_VELOCITY = (keras.optimizers.SGD, keras.optimizers.RMSprop)
_FUSED_UP_TO = 1 << 23  # elements: it holds parameters and slots twice, which large models have no need of


class ServerOptimizer:
    """Parameters, slots and update of one of the workers' optimizers.

    Args:
        description: See :func:`hps_keras.optimizer.describe`.
        parameters: The parameters to begin with, flat.

    Attributes:
        layout: The parameters' places in flat buffers.
        gradient: Flat buffer that :meth:`update` reads.
        version: Updates so far; kept from one `fit` to the next.
        compensation: Strength of the delay compensation, 0 for none; above it, each worker's parameters are kept.
        momentum_correction: Whether the velocity of momentum follows the learning rate from one round to the next.
        overlap: Whether workers compute while their pushes travel: delay compensation then keeps, for each, the
            parameters before its last ones too.

    Raises:
        ConfigurationError: The optimizer or a constraint is of a class that this process does not know.
    """

    def __init__(self, description: dict[str, Any], parameters: np.ndarray) -> None:
        self.layout = ParameterLayout.from_json(description["layout"])
        self.gradient = self.layout.allocate()
        self.version = 0
        self.compensation, self.overlap = 0.0, False
        self.momentum_correction, self._rate = False, 0.0
        self._versions: dict[int, int] = {}  # of what workers hold, and of what they held before that
        self._earlier: dict[int, tuple[int, np.ndarray]] = {}
        self._scratch: np.ndarray | None = None
        self.coder = ParameterCoder(self.layout)
        self._arriving = Room(self.coder.codecs)
        self._optimizer, constraints = _deserialize(description)
        self._given = {n: float(getattr(self._optimizer, n)) for n in _MOMENTA if hasattr(self._optimizer, n)}
        self._decay = self._optimizer.weight_decay
        self._chosen: dict[str, float] = {}
        self._factor = 1.0
        self._flat = _can_be_flat(self._optimizer, description, self.layout)
        if self._flat:
            self._variables = [_variable(np.array(parameters), "float32", "hps")]
            gradients = [self.gradient]
        else:
            self._variables = [
                _variable(np.array(view), tensor.dtype, tensor.name)
                for view, tensor in zip(self.layout.views(parameters), self.layout.tensors)
            ]
            for variable, constraint in zip(self._variables, constraints):
                variable.constraint = constraint
            gradients = self.layout.views(self.gradient)
        undecayed = [v for v, decayed in zip(self._variables, description["decay"]) if not decayed]
        if undecayed:
            self._optimizer.exclude_from_weight_decay(var_list=undecayed)
        self._optimizer.build(self._variables)
        small = self.layout.elements <= _FUSED_UP_TO
        self._updater: backends.Updater = (
            FusedUpdater(self._optimizer, self._variables[0], self.gradient)
            if self._flat and small and fits(self._optimizer)
            else backends.updater(self._optimizer, self._variables, gradients)
        )
        self._parameters: np.ndarray | None = None

    @property
    def parameters(self) -> np.ndarray:
        """The parameters, flat: (elements,) float32. Valid until the next update; nobody may hold it longer."""
        if self._parameters is None:
            if self._flat:
                self._parameters = self._updater.memory()
            else:
                self._parameters = self.layout.allocate()
                self._updater.collect(self.layout.views(self._parameters))
        return self._parameters

    @property
    def scratch(self) -> np.ndarray:
        """Room for a payload that is added to another one; a single worker and asynchronous ones do not need it."""
        if self._scratch is None:
            self._scratch = self.layout.allocate()
        return self._scratch

    def load(self, parameters: np.ndarray) -> None:
        """Takes other parameters, e.g. those with which a second `fit` begins."""
        self._parameters = None
        values = [parameters] if self._flat else self.layout.views(parameters)
        self._updater.settle()  # the slots stay
        for variable, value in zip(self._variables, values):
            variable.assign(np.array(value))
        self._updater.reload()

    def update(self, scale: float, rate: float, present: Sequence[int] | None) -> None:
        """Applies `scale` times the gradient with learning rate `rate`.

        Args:
            scale: Factor of the gradient.
            rate: Learning rate, weights included.
            present: Indices of the tensors that have a gradient; the others stay as they are, slots too. None: all.
        """
        if present is not None and len(present) == 0:
            return
        self._parameters = None  # so that the variable's memory is its own again, and is updated in place
        self._correct_velocity(rate)
        rate *= self._factor
        everything = tuple(range(len(self._variables)))
        if present is None or len(present) == len(self.layout.tensors):
            self._updater.apply(scale, rate, everything)
        elif self._flat:
            self._update_some(scale, rate, present)
        else:
            self._updater.apply(scale, rate, tuple(present))

    def _correct_velocity(self, rate: float) -> None:
        """Scales the velocity with the learning rate that is in it (momentum correction, Goyal 2017).

        It holds the sum of past gradients, each times the rate of its time. m u r'/r is what a momentum of m r'/r would
        make of it in this step.
        """
        before, self._rate = self._rate, rate
        asked = self.momentum_correction and self.coder.shared and isinstance(self._optimizer, _WITH_RATE_IN_VELOCITY)
        if not asked or not before or before == rate:
            return
        self._updater.settle()
        for slot in slots_of(self._optimizer):
            if slot.name.endswith("_momentum"):
                slot.assign(slot * (rate / before))
        self._updater.reload()

    def _update_some(self, scale: float, rate: float, present: Sequence[int]) -> None:
        self._updater.settle()
        arrays = [v for v in [*self._variables, *slots_of(self._optimizer)] if v.shape]
        before = [np.array(ops.convert_to_numpy(v)) for v in arrays]
        self._updater.apply(scale, rate, (0,))
        self._updater.settle()
        for variable, old in zip(arrays, before):
            new = np.array(ops.convert_to_numpy(variable))
            for index, tensor in enumerate(self.layout.tensors):
                if index not in present:
                    place = slice(tensor.offset, tensor.offset + tensor.size)
                    new[place] = old[place]
            variable.assign(new)
        self._updater.reload()

    # -- under asynchrony --

    @property
    def keeps(self) -> bool:
        """Whether what workers hold is kept: for delay compensation and for differences, a copy per worker."""
        return bool(self.compensation) or self.coder.bits < WHOLE

    def begin(self, shared: bool, overlap: bool) -> None:
        """A `fit` begins: nobody holds anything yet.

        Args:
            shared: Whether all workers will hold the same, as in BSP.
            overlap: See :attr:`overlap`.
        """
        self.overlap = overlap
        self.coder.begin(shared)
        self._forget_versions()

    def regroup(self, shared: bool, workers: Sequence[int]) -> None:
        """From now on all workers hold the same, or each its own, see :meth:`ParameterCoder.regroup`."""
        if shared != self.coder.shared:
            self._forget_versions()
        self.coder.regroup(shared, workers)

    def _forget_versions(self) -> None:
        self._versions.clear()
        self._earlier.clear()

    def hold(self, worker: int) -> None:
        """Notes that a worker holds the present parameters, where that is kept."""
        if self.keeps:
            self._keep_earlier(worker)
            self.coder.hold(worker, self.parameters)

    def _keep_earlier(self, worker: int) -> None:
        """Before a worker gets the present parameters: its gradient under way is of those that it holds."""
        whose = self.coder.whose(worker)
        if not (self.overlap and self.compensation) or self._versions.get(whose) == self.version:
            return
        if whose in self._versions:
            memory = self._earlier[whose][1] if whose in self._earlier else self.layout.allocate()
            memory[...] = self.coder.held(worker)
            self._earlier[whose] = self._versions[whose], memory
        self._versions[whose] = self.version

    def answer(self, worker: int) -> tuple[int, np.ndarray]:
        """Returns the width and the memory of an answer with the present parameters, which the worker then holds."""
        if self.coder.bits < EXACT:
            self._keep_earlier(worker)
            message = self.coder.encode(worker, self.parameters, self.version, bool(self.compensation))
            if message is not None:
                return self.coder.bits, message
        self.hold(worker)
        return EXACT, self.parameters

    def encoded(self, bits: int) -> np.ndarray:
        """Room for an encoded gradient that is received."""
        return self._arriving.of(bits)

    def compensate(self, worker: int, version: int, scale: float) -> float:
        """Corrects the gradient for what has changed since the parameters that it was computed on.

        Args:
            worker: Who has computed it, or one of those who have.
            version: Of those parameters.
            scale: What the gradient is to be multiplied by.

        Returns:
            What it is still to be multiplied by.
        """
        if not self.compensation:
            return scale
        earlier = self._earlier.get(self.coder.whose(worker))
        held = earlier[1] if earlier and earlier[0] == version else self.coder.held(worker)
        return self.compensate_from(held, scale)

    def compensate_from(self, held: np.ndarray, scale: float) -> float:
        """Adds lambda g g (theta - held) to the gradient g (DC-ASGD, Zheng 2017).

        Args:
            held: The parameters that the gradient was computed on, flat.
            scale: What the buffer is to be multiplied by to be the gradient.

        Returns:
            What it is still to be multiplied by.
        """
        if scale != 1:  # the correction is no linear function of the gradient
            self.gradient *= np.float32(scale)
        change = np.subtract(self.parameters, held, out=self.scratch)
        change *= self.gradient
        change *= self.gradient
        change *= np.float32(self.compensation)
        self.gradient += change
        return 1.0

    def correct_momentum(self, workers: int, how: str) -> str | None:
        """Lowers the momentum by what asynchrony of `workers` adds, see :func:`corrected_momentum`.

        Args:
            workers: Present workers.
            how: ``"corrected"``: momentum; ``"corrected_betas"``: Adam's beta_1 as well; ``"as_given"``: none.

        Returns:
            What was chosen, for the user; None when there is nothing to choose.
        """
        names = {"as_given": (), "corrected": ("momentum",)}.get(how, _MOMENTA)
        chosen, self._factor, said = dict(self._given), 1.0, []
        for name in names:
            given = self._given.get(name, 0.0)
            if not 0 < given < 1:
                continue
            chosen[name], factor = corrected_momentum(given, workers)
            said.append(f"{name} {given:g} -> {chosen[name]:.3g}")
            if name == "momentum":  # Adam's average has weight 1 whatever its beta_1
                self._factor = factor
                said[-1] += f", learning rate x{factor:.3g}"
        if chosen != (self._chosen or self._given):
            self._change_momentum(chosen)
        name = type(self._optimizer).__name__
        return f"{name} with {workers} asynchronous workers: {'; '.join(said)}" if said else None

    def _change_momentum(self, chosen: dict[str, float]) -> None:
        self._chosen = chosen
        for name, value in chosen.items():
            # Not 0: Keras would leave the slots as they are, stale as they were. 1e-30 of them is nothing in float32.
            setattr(self._optimizer, name, value or (1e-30 if self._given[name] else 0.0))
        if self._decay:  # decay is per unit of learning rate, and no momentum adds it up
            self._optimizer.weight_decay = self._decay / self._factor
        self._updater.forget()

    def finalize(self) -> None:
        """Replaces the parameters by their moving averages, where the optimizer keeps some (EMA)."""
        self._parameters = None
        self._updater.settle()
        self._optimizer.finalize_variable_values(self._variables)
        self._updater.reload()

    # -- slots --

    def read_state(self) -> list[np.ndarray]:
        """The slots, one array each, in the order in which the workers' optimizer has them."""
        self._updater.settle()
        slots = slots_of(self._optimizer)
        if not self._flat:
            return [ops.convert_to_numpy(v) for v in slots]
        values = {key: ops.convert_to_numpy(v) for key, v in _flat_keys(slots).items()}
        arrays = []
        for key, index in self._order():
            value = values[key]
            if index is not None:
                tensor = self.layout.tensors[index]
                value = value[tensor.offset : tensor.offset + tensor.size].reshape(tensor.shape)
            arrays.append(np.array(value))  # ascontiguousarray would make a vector of a scalar
        return arrays

    def write_state(self, iterations: int, slots: Sequence[np.ndarray] | None) -> None:
        """Sets the update count, and the slots unless None.

        Raises:
            ConfigurationError: The slots are those of another optimizer.
        """
        self._updater.settle()
        self._optimizer._iterations.assign(iterations)
        self._updater.reload()
        if slots is None:
            return
        variables = slots_of(self._optimizer)
        if not self._flat:
            self._check(slots, [tuple(v.shape) for v in variables])
            for variable, value in zip(variables, slots):
                variable.assign(np.array(value))
            return
        order = self._order()
        self._check(slots, [() if index is None else self.layout.tensors[index].shape for _, index in order])
        keyed = _flat_keys(variables)
        for key, variable in keyed.items():
            whole = np.array(ops.convert_to_numpy(variable))
            for (other, index), value in zip(order, slots):
                if other == key and index is None:
                    whole = np.array(value)
                elif other == key and index is not None:
                    tensor = self.layout.tensors[index]
                    whole[tensor.offset : tensor.offset + tensor.size] = value.reshape(-1)
            variable.assign(whole)

    def _check(self, slots: Sequence[np.ndarray], shapes: Sequence[tuple[int, ...]]) -> None:
        if [tuple(s.shape) for s in slots] != list(shapes):
            raise ConfigurationError(
                f"the loaded optimizer state ({len(slots)} arrays) does not fit {type(self._optimizer).__name__} with "
                f"{len(shapes)} slots: was it saved by another optimizer?"
            )

    def _order(self) -> list[tuple[str, int | None]]:
        """The slots of the same optimizer built tensor by tensor: of which flat slot, and which tensor's piece."""
        template = type(self._optimizer).from_config(self._optimizer.get_config())
        template.build(
            [_variable(np.zeros(1, np.float32), "float32", f"hps{i}") for i in range(len(self.layout.tensors))]
        )
        order: list[tuple[str, int | None]] = []
        scalars = 0
        for slot in slots_of(template):
            found = re.match(r"hps(\d+)_", slot.name)
            if found:
                order.append((slot.name[found.end() :], int(found[1])))
            else:
                order.append((f"scalar {scalars}", None))
                scalars += 1
        return order


def _flat_keys(slots: Sequence[Any]) -> dict[str, Any]:
    """The slots of an optimizer that was built on the flat variable, by what is theirs in their name."""
    keyed = {}
    scalars = 0
    for slot in slots:
        if slot.name.startswith("hps_"):
            keyed[slot.name.removeprefix("hps_")] = slot
        else:
            keyed[f"scalar {scalars}"] = slot
            scalars += 1
    return keyed


def _variable(value: np.ndarray, dtype: str, path: str) -> Any:
    # Aligned, so that the back end need not copy.
    memory = aligned_zeros(value.size)
    memory[...] = value.reshape(-1)
    variable = keras.Variable(memory.reshape(value.shape), dtype=dtype, trainable=True, name=path.split("/")[-1])
    variable._path = path  # slots are named after it, and some optimizers (Muon) choose by it
    return variable


def _can_be_flat(optimizer: Any, description: dict[str, Any], layout: ParameterLayout) -> bool:
    elementwise = keras_class(optimizer) in [getattr(keras.optimizers, n) for n in _ELEMENTWISE]
    plain = optimizer.clipnorm is None and not any(description["constraints"]) and all(description["decay"])
    # The averages go on even where a tensor has no gradient, all else there stands still.
    plain = plain and not optimizer.use_ema
    return elementwise and plain and all(t.dtype == "float32" for t in layout.tensors)


def _deserialize(description: dict[str, Any]) -> tuple[Any, list[Any]]:
    known = find_classes(description.get("classes", ())) | known_classes()
    try:
        constraints = [c and keras.constraints.deserialize(c, known) for c in description["constraints"]]
        return keras.optimizers.deserialize(description["optimizer"], known), constraints
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigurationError(
            "the parameter server cannot rebuild the workers' optimizer: put its class (and those of constraints) into "
            "a module of its own that this process can import, or decorate it with "
            "@keras.saving.register_keras_serializable() in a module that this process imports too; of the script "
            "itself a dedicated server has run only what stands above hps.init(). Keras says: "
            f"{error}"
        ) from error

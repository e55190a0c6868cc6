"""What the server does when workers have agreed: entering `fit`, weights, declarations, the ends of epochs.

:class:`Agreements` holds what is common to the workers of the present `fit`: the optimizers (:attr:`Agreements.groups`)
and the moving statistics. :class:`hps_keras.server.serving.Server` runs the loop and hands completed gathers over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hps_keras import wire
from hps_keras.batches.shares import BatchSizes, Resizing
from hps_keras.cluster import Cluster
from hps_keras.consistency import BSP, Asynchronous, Consistency
from hps_keras.coordination.consensus import consensus
from hps_keras.coordination.coordinator import Coordinator
from hps_keras.coordination.decisions import Complete, Switch
from hps_keras.errors import ConfigurationError, ProtocolError
from hps_keras.horovod.reductions import as_array, combine, described, is_collective
from hps_keras.layout import ParameterLayout, aligned_zeros, shapes_difference
from hps_keras.quantization.codecs import coded_tensors
from hps_keras.server.classes import adopt_backend
from hps_keras.server.telemetry import Books
from hps_keras.server.twins import Twins
from hps_keras.wire import Header, Kind, Outbox

if TYPE_CHECKING:
    from hps_keras.server.update import ServerOptimizer

logger = logging.getLogger("hps_keras")


class Agreements:
    """Carries completed gathers out.

    Args:
        cluster: This rank's cluster.
        line: Receives what workers send.
        outbox: Sends the replies.
        coordinator: Knows the workers.
        books: Where an epoch and a `fit` begin.

    Attributes:
        groups: The optimizers of the present `fit`, in the workers' order.
        served: Whether a `fit` has begun since :meth:`begin_serving`.
        twins: Notices workers that train on the same data.
        heard: What roots have broadcast since this server's script began to listen, by the collective's name.
        listens: The collective that this server's script waits in, or None.
    """

    def __init__(
        self, cluster: Cluster, line: wire.Wire, outbox: Outbox, coordinator: Coordinator, books: Books
    ) -> None:
        self._wire, self._cluster, self._outbox = line, cluster, outbox
        self._coordinator, self._books = coordinator, books
        self.groups: list[ServerOptimizer] = []
        self.twins = Twins()
        self.heard: dict[str, list[tuple[dict[str, Any], np.ndarray]]] = {}
        self.listens: str | None = None
        self._known: dict[str, ServerOptimizer] = {}
        self._moving = aligned_zeros(0, np.uint8)
        self._final: list[np.ndarray] = []
        self._returns = self.served = False
        self._seed = 0

    def begin_serving(self, returns: bool) -> None:
        """Notes whether this server's own `fit` returns after the workers' next one."""
        self._returns, self.served = returns, False
        self.heard.clear()

    def complete(self, done: Complete) -> None:
        """Carries a gather out and answers its members."""
        headers = {rank: header for rank, (header, _) in done.contributions.items()}
        values = {rank: value for rank, (_, value) in done.contributions.items()}
        handler: Callable[..., None] | None = {
            "enter": self._entered,
            "weights": self._weights,
            "declare": self._declared,
            "pause": self._paused,
            "resume": self._resumed,
            "end": self._ended,
        }.get(done.name)
        if handler is not None:
            handler(headers, values)
        elif is_collective(done.name):
            self._collected(done.name, headers, values)
        else:
            self._reply(done.members, consensus(values))

    def _reply(self, members: Sequence[int], body: Any, payload: Sequence[np.ndarray] = ()) -> None:
        for rank in members:
            self._outbox.post(self._cluster.workers[rank], Header(Kind.REPLY), body, payload)

    def _collected(self, name: str, headers: dict[int, Header], values: dict[int, Any]) -> None:
        def take(rank: int) -> np.ndarray:
            return as_array(values[rank], self._wire.bytes_of(self._cluster.workers[rank], headers[rank]))

        results = combine(name, values, take)
        root = values[min(values)].get("root_rank")
        for rank, result in results.items():
            self._reply([rank], described(result), [] if rank == root else [result])
        if self.listens and root is not None:
            self.heard.setdefault(name, []).append((values[root], results[root]))

    # -- the beginning of a fit --

    def _entered(self, headers: dict[int, Header], values: dict[int, Any]) -> None:
        if self.listens:
            raise ProtocolError(
                f"all workers have entered fit, but the parameter server's script waits in {self.listens!r}, which "
                "they have not called: let it take the same way as theirs"
            )
        self.served = True
        self._books.begin_fit()
        chief = min(values)
        missing = sorted(set(range(len(self._cluster.workers))) - set(values))
        if missing:
            raise ProtocolError(
                f"worker {missing[0]} ended its script without the fit that workers {list(values)} have entered; let "
                "the scripts of all workers come to the same fits"
            )
        for rank, value in values.items():
            if value["epochs"] != values[chief]["epochs"]:
                raise ConfigurationError(
                    f"worker {rank} fits {value['epochs']} epochs, worker {chief} {values[chief]['epochs']}: give all "
                    "workers the same"
                )
        self._offer(values)
        looks = {rank: value["looks"] for rank, value in values.items()}
        self.twins.begin(looks, lent=values[chief]["data"] is not None)
        self.groups, self._final = [], []
        ready = [rank for rank, value in values.items() if value["overlap"]]
        overlap = self._coordinator.overlap = len(ready) == len(values)
        self._coordinator.patient = all(value["ends_with_process"] for value in values.values())
        if ready and not overlap:
            logger.warning("overlap=True on workers %s but not on all: all wait for their answers", ready)
        body = {
            "chief": chief,
            "initial_epoch": values[chief]["initial_epoch"],
            "returns": self._returns,
            "overlap": overlap,
        }
        self._reply(list(values), body | {"seed": self._seed, "leases": self._begin_pass()})

    def _offer(self, values: dict[int, Any]) -> None:
        """Lends the samples of an ElasticDataset, if the workers have one."""
        chief = min(values)
        offers = {rank: value["data"] for rank, value in values.items()}
        for rank, offer in offers.items():
            mine, theirs = (o and o["samples"] for o in (offers[chief], offer))
            if mine != theirs:
                said = [f"an ElasticDataset of {n} samples" if n else "ordinary data" for n in (theirs, mine)]
                raise ConfigurationError(
                    f"worker {rank} fits {said[0]}, worker {chief} {said[1]}: give all workers the same, whole data set"
                )
            for name, reason in _ALIKE:
                if offer and offer[name] != offers[chief][name]:
                    raise ConfigurationError(
                        f"{name}={offer[name]} of the ElasticDataset of worker {rank}, {name}={offers[chief][name]} of "
                        f"worker {chief}: {reason}"
                    )
            if offer and offer["resizing"] != offers[chief]["resizing"]:
                raise ConfigurationError(
                    f"worker {rank} has {_resizer(offer)}, worker {chief} {_resizer(offers[chief])}: the sizes of all "
                    "batches are chosen together; list the same hps.callbacks.BatchResizer on all, or on none"
                )
        if offers[chief]:
            self._seed = offers[chief]["seed"]
            sizes = {rank: offer["batch_size"] for rank, offer in offers.items()}
            self._coordinator.offer(offers[chief]["samples"], sizes, _adapting(offers, sizes))

    def _begin_pass(self) -> dict[str, Any] | None:
        leases = self._coordinator.begin_pass()
        if not leases:
            return None
        first, ahead = (
            [[rank, *lease] for rank, lease in lent.items()] for lent in (leases, self._coordinator.lend_ahead())
        )
        return {"number": self._coordinator.passes, "first": first, "ahead": ahead}

    def _weights(self, headers: dict[int, Header], values: dict[int, Any]) -> None:
        chief = min(values)
        for rank in values:
            different = shapes_difference(values[chief], values[rank])
            if different:
                raise ConfigurationError(
                    f"the models of worker {chief} ('here') and worker {rank} ('there') differ: {different}"
                )
        if not headers[chief].payload and values[chief]:
            raise ConfigurationError(
                "worker 0 (the chief) ended its epoch without a training step: give every worker a batch"
            )
        memory = self._wire.bytes_of(self._cluster.workers[chief], headers[chief])
        self._reply([chief], None)
        self._reply([rank for rank in values if rank != chief], None, [memory])

    def _declared(self, headers: dict[int, Header], values: dict[int, Any]) -> None:
        chief = min(values)
        descriptions = values[chief]["groups"]
        if not descriptions:
            raise ConfigurationError(
                "the first training step applied no gradient: does the model have trainable weights?"
            )
        self._compare(chief, values)
        self._known = {t: g for t, g in self._known.items() if t in values[chief]["living"]}
        self.groups = self._make_groups(self._cluster.workers[chief], headers[chief], values[chief])
        model = Consistency.from_json(descriptions[0]["consistency"])
        summed = [index for index, d in enumerate(descriptions) if d["summed"]]
        self._coordinator.define([g.version for g in self.groups], model, summed)
        if isinstance(model, BSP) and model.compensation and not self._coordinator.overlap:
            logger.warning(
                "%s: without overlap=True no gradient of BSP is late, so there is nothing to compensate", model
            )
        self._books.follows(model, self._coordinator.overlap)
        coded = [tensor for g in self.groups for tensor in coded_tensors(g.layout)]
        self._books.begin_updates([g.version for g in self.groups], sum(g.layout.nbytes for g in self.groups), coded)
        self._begin_groups(values[chief]["bits"])
        answer = {
            "versions": [g.version for g in self.groups],
            "tokens": [d["token"] for d in descriptions],
            "loaded": [None if d["state"] is None else [d["steps"], d["rate"]] for d in descriptions],
            "bits": values[chief]["bits"],
        }
        self._tell_declared(values, answer)

    def _make_groups(self, source: int, header: Header, declared: dict[str, Any]) -> list[ServerOptimizer]:
        """The optimizers that the chief has declared: those of an earlier `fit`, or new ones.

        Args:
            source: The chief's rank on the wire.
            header: Of its declaration; parameters and slots follow it.
            declared: What it declares.
        """
        adopt_backend(declared["backend"])  # before the next line imports Keras
        from hps_keras.server.update import ServerOptimizer

        descriptions = declared["groups"]
        layouts = [ParameterLayout.from_json(d["layout"]) for d in descriptions]
        parameters = [layout.allocate() for layout in layouts]
        slots = [aligned_zeros(wire.bundle_bytes(d["state"] or []), np.uint8) for d in descriptions]
        self._wire.receive(source, header, [*parameters, *slots])
        groups = []
        for description, layout, values_given, memory in zip(descriptions, layouts, parameters, slots):
            token, state = description["token"], description["state"]
            group = self._known.get(token)
            new = group is None or group.layout != layout
            if group is None or new:
                group = self._known[token] = ServerOptimizer(description, values_given)
            else:
                group.load(values_given)
            group.momentum_correction = description["momentum_correction"]
            if new or state is not None:
                loaded = None if state is None else wire.unbundle(state, memory)
                group.write_state(description["iterations"], loaded)
            groups.append(group)
        return groups

    def _begin_groups(self, bits: Sequence[int]) -> None:
        """A `fit` begins with these optimizers, and these widths."""
        self._set_widths(bits)
        for group in self.groups:
            group.begin(self._coordinator.consistency.synchronous, self._coordinator.overlap)
        self._follow(self._coordinator.consistency)

    def _tell_declared(self, values: dict[int, Any], answer: dict[str, Any]) -> None:
        self._reply(list(values), answer)

    def _compare(self, chief: int, values: dict[int, Any]) -> None:
        for rank, value in values.items():
            mine, theirs = values[chief]["groups"], value["groups"]
            if len(mine) != len(theirs):
                raise ConfigurationError(
                    f"worker {rank} has {len(theirs)} distributed optimizers, worker {chief} {len(mine)}"
                )
            for a, b in zip(mine, theirs):
                different = _untrained(a, b) or shapes_difference(a["layout"], b["layout"])
                if different:
                    raise ConfigurationError(
                        f"workers {chief} ('here') and {rank} ('there') train different variables: {different}; is a "
                        "layer frozen on one of them only?"
                    )
                if a["consistency"] != b["consistency"]:
                    raise ConfigurationError(
                        f"worker {rank} asks for consistency {str(Consistency.from_json(b['consistency']))!r}, worker "
                        f"{chief} for {str(Consistency.from_json(a['consistency']))!r}: give all the same "
                        "(consistency= or HPS_CONSISTENCY)"
                    )

    def switched(self, switch: Switch) -> None:
        """The consistency model is another one from now on."""
        logger.info("%s", switch.text)
        self._books.note("model", switch.text)
        self._follow(switch.model)

    def _follow(self, model: Consistency) -> None:
        for group in self.groups:
            group.compensation = getattr(model, "compensation", 0.0)
            group.regroup(model.synchronous, self._coordinator.in_fit)
            if not isinstance(model, Asynchronous):
                group.correct_momentum(1, "as_given")
            if group.coder.empty:
                self._all_hold(group)
        self.workers_changed()

    def _set_widths(self, bits: Sequence[int]) -> None:
        """Answers have another width from now on. All workers hold the present parameters, or will be told they do."""
        push, pull = bits
        for group in self.groups:
            group.coder.bits = pull
        self._books.widths(push, pull)

    def workers_changed(self) -> None:
        """Chooses the momentum anew: how much asynchrony adds depends on the number of workers."""
        model, workers = self._coordinator.consistency, len(self._coordinator.in_fit)
        if not isinstance(model, Asynchronous) or not self._coordinator.trains:
            return
        for group in self.groups:
            chosen = group.correct_momentum(workers, model.momentum)
            if chosen is not None:
                logger.info("%s", chosen)
                self._books.note("momentum", chosen)

    def all_hold(self) -> None:
        """All workers hold the present parameters."""
        for group in self.groups:
            self._all_hold(group)

    def _all_hold(self, group: ServerOptimizer) -> None:
        for rank in self._coordinator.in_fit:
            group.hold(rank)

    # -- the ends of epochs --

    def _paused(self, headers: dict[int, Header], values: dict[int, Any]) -> None:
        chief = min(values)
        described = values[chief]["extras"]
        samples = {rank: headers[rank].samples for rank in values}
        total = sum(samples.values())
        means: list[np.ndarray] = []
        for rank, value in values.items():  # ascending, so that the sums repeat bit for bit
            if value["extras"] != described:
                raise ConfigurationError(f"workers {chief} and {rank} differ in their non-trainable weights")
            arrays = wire.unbundle(described, self._receive_moving(rank, rank == chief, headers[rank]))
            share = samples[rank] / total if total else 1 / len(values)
            if rank == chief:
                first = arrays
                # float64, so that the mean of equal float32 values is that value again
                means = [a.astype(np.float64) * share if _is_float(a) else a for a in arrays]
            else:
                means = [m + a.astype(np.float64) * share if _is_float(a) else m for m, a in zip(means, arrays)]
        averaged = [np.asarray(m).astype(a.dtype) for m, a in zip(means, first)]
        _, memory = wire.bundle(averaged)
        self._outbox.flush()
        self._moving = memory
        self.all_hold()
        coding = [value["coding"] for value in values.values()]
        metrics = self._books.end_epoch(coding, self._squares())
        body = {"versions": [g.version for g in self.groups], "metrics": metrics}
        self._reply(list(values), body, self._state())

    def _squares(self) -> list[Any]:
        """Of the answers since the last epoch's end, see :meth:`Books.end_epoch`."""
        return [g.coder.take_squares() for g in self.groups]

    def _receive_moving(self, rank: int, is_chief: bool, header: Header) -> np.ndarray:
        """Receives a worker's moving statistics."""
        return self._wire.bytes_of(self._cluster.workers[rank], header)

    def _state(self) -> list[np.ndarray]:
        """What all workers have in common at an epoch's end: parameters and moving statistics."""
        return [g.parameters for g in self.groups] + [self._moving]

    def _resumed(self, headers: dict[int, Header], values: dict[int, Any]) -> None:
        stop = any(value["stop"] for value in values.values())
        bits = values[min(values)]["bits"]
        if stop or any(value["last"] for value in values.values()):
            self._coordinator.finish()
            leases = None
        else:
            leases = self._begin_pass()
        self._share_changes(headers, values, {"stop": stop, "leases": leases, "bits": bits})
        self._set_widths(bits)
        self.all_hold()

    def _ended(self, headers: dict[int, Header], values: dict[int, Any]) -> None:
        self._share_changes(headers, values, {})

    def _share_changes(self, headers: dict[int, Header], values: dict[int, Any], body: dict[str, Any]) -> None:
        """Gives the chief's weights to all if callbacks have changed them, else to those that have changed theirs."""
        chief = min(values)
        changed = [rank for rank, value in values.items() if value["changed"]]
        takers = changed
        if chief in changed:
            flats = [g.layout.allocate() for g in self.groups]
            self._wire.receive(self._cluster.workers[chief], headers[chief], [*flats, self._moving])
            self._outbox.flush()
            for group, flat in zip(self.groups, flats):
                group.load(flat)
            self.all_hold()
            takers = [rank for rank in values if rank != chief]
        elif changed:
            logger.warning(
                "callbacks on workers %s have changed weights, and none on worker %d: its weights stand; give such a "
                "callback to all workers, or to the chief",
                changed,
                chief,
            )
        self._reply([rank for rank in values if rank not in takers], body | {"take": False})
        if takers:
            self._reply(takers, body | {"take": True}, self._state())

    # -- what else workers ask for --

    def send_slots(self, dest: int, token: str) -> None:
        """Sends the slots of an optimizer."""
        if token not in self._known:
            raise ProtocolError(
                f"{self._cluster.name(dest)} asks for the slots of an optimizer that this server never had"
            )
        arrays = self._known[token].read_state()
        described, memory = wire.bundle(arrays)
        self._outbox.post(dest, Header(Kind.REPLY), {"slots": described}, [memory] if memory.nbytes else ())

    def keep_final(self, described: Any, memory: np.ndarray) -> None:
        """Keeps the weights with which the chief has left `fit`."""
        self._final = wire.unbundle(described, memory)

    def into_model(self, model: Any) -> None:
        """Writes the workers' final weights into this process's own model (a server that returns)."""
        weights = model.weights
        if not self._final:
            return
        if [tuple(w.shape) for w in weights] != [a.shape for a in self._final]:
            raise ConfigurationError(
                "return_on_server=True: this process's model has not the workers' weights to fill; build it before "
                "fit (call it once on a batch), as on the workers"
            )
        for variable, value in zip(weights, self._final):
            variable.assign(np.array(value))


def _untrained(mine: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Says which weights of the model only one of two workers trains, or returns None when both train the same."""
    for these, those, where in ((mine, theirs, "here"), (theirs, mine, "there")):
        only = [row[0] for row, place in zip(these["layout"], these["places"]) if place not in those["places"]]
        if only:
            return f"{', '.join(map(repr, only))} only {where}"
    return None


def _is_float(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" or "float" in array.dtype.name


_ALIKE = (
    ("shuffle", "they would not train on the same order of samples; give all the same"),
    (
        "order",
        "the same seed would give them different orders of the samples; give all the same kind of x with the same "
        "sizes, and install the same numpy",
    ),
)
"""What must be the same in all workers' ElasticDataset, why, and what to do if it is not."""


def _resizer(offer: Mapping[str, Any]) -> str:
    """Names the BatchResizer of a worker."""
    described = offer["resizing"]
    if described is None:
        return "no hps.callbacks.BatchResizer"
    arguments = [f"{name}={value!r}" for name, value in described.items() if name != "unit"]  # which the server chooses
    return f"hps.callbacks.BatchResizer({', '.join(arguments)})"


def _adapting(offers: Mapping[int, Mapping[str, Any]], sizes: Mapping[int, int]) -> BatchSizes | None:
    """What changes the sizes of the workers' batches, when they have asked for it."""
    described = offers[min(offers)]["resizing"]
    if described is None:
        return None
    resizing = Resizing.from_json(described)
    if any(offer["compiles"] for offer in offers.values()):  # for each new size: few of them, then
        resizing = replace(resizing, unit=max(resizing.unit, round(sum(sizes.values()) / len(sizes) / 8)))
    limits, memory = ({rank: offer[name] for rank, offer in offers.items()} for name in ("limit", "memory"))
    return BatchSizes(resizing, sizes, limits, memory)

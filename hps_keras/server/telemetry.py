"""What a run did, in a form for people and files: the summary table, the epoch's logs, a record to simulate from."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hps_keras.consistency import BSP, AllReduce, Consistency
from hps_keras.coordination.accounts import WorkerStatistics
from hps_keras.quantization.fidelity import Fidelity, Squares, line, tensor_groups

if TYPE_CHECKING:
    from hps_keras.coordination.coordinator import Coordinator
    from hps_keras.layout import Tensor
    from hps_keras.wire import Wire

Totals = tuple[WorkerStatistics, int, int]
"""What a worker did since the server started, the bytes that came from it, and those that went to it."""


@dataclass(frozen=True)
class Summary:
    """What the workers did in one `fit`; ``print`` it for a table, :meth:`save` it to simulate from.

    Attributes:
        consistency: The consistency model.
        updates: Parameter updates, per optimizer.
        workers: One mapping per worker:

            - ``worker``: its rank
            - ``steps``, ``samples``: how many it trained
            - ``batch_size``: mean samples of a step
            - ``samples_per_second``: while it trained, waiting for others included; the first step, which compiles, and
              the waiting at the ends of epochs left out
            - ``compute_seconds``: time in Keras's step and between steps (data, callbacks), on the worker's clock, the
              first step left out
            - ``waiting_seconds``: time from its pushes to their answers, on the server's clock, the first left out;
              for a push that travels while the next step computes, the time that the worker then still waits, on its
              clock
            - ``sync_seconds``, ``syncs``: the part of it in forced syncs, and their number
            - ``epoch_wait_seconds``: time at the ends of epochs until the last worker had ended its own
            - ``mean_staleness``, ``max_staleness``, ``staleness``: updates between the parameters that a gradient was
              computed on and those that it was applied to; how many gradients had which
            - ``mean_weight``: mean staleness weight
            - ``step_seconds``, ``step_seconds_std``: mean and standard deviation of the time from an answer to the next
              push, on the server's clock
            - ``bytes_up``, ``bytes_down``: to and from the server
            - ``fitted_fixed_seconds``, ``fitted_sample_seconds``, ``fitted_jitter``, ``given_batch_size``: only where
              batches followed the speed (:class:`hps_keras.callbacks.BatchResizer`): the time of computing a step of b
              samples, fixed + sample b, its relative scatter, and the batch size that the user gave
        server: ``push_seconds``: mean time that the server is busy with a push; ``pushes``; ``parameters_bytes``.
        notes: What was chosen for this run, e.g. the corrected momentum.
        epochs: Epochs that were trained.
        coding: Only where something travelled in fewer than 32 bits:

            - ``push_bits``, ``pull_bits``: the widths that were used
            - ``compression_up``, ``compression_down``: how many times fewer bytes than float32 the gradients took, and
              the parameters in answers, forced syncs included
            - ``push_error``, ``push_errors``, ``pull_error``: relative error (RMS) of all coded gradients, of those of
              each group of tensors, and of the coded answers
    """

    consistency: str
    updates: tuple[int, ...]
    workers: tuple[Mapping[str, Any], ...]
    server: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    epochs: int = 0
    coding: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Summary:
        """Reads what the server sent, or :meth:`save` wrote."""
        updates, workers, notes = (tuple(raw[name]) for name in ("updates", "workers", "notes"))
        coding = raw.get("coding", {})  # files of the first versions have none
        return cls(raw["consistency"], updates, workers, raw["server"], notes, raw["epochs"], coding)

    @classmethod
    def alone(cls, epochs: int = 0) -> Summary:
        """What there is to say of a process that trained alone, without a parameter server."""
        return cls("", (), (), epochs=epochs)

    def save(self, path: str | Path) -> None:
        """Writes everything to a JSON file, from which ``hpsrun simulate --from`` can predict other settings."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @property
    def samples_per_second(self) -> float:
        """All workers together."""
        return float(sum(w["samples_per_second"] for w in self.workers))

    def __str__(self) -> str:
        if not self.consistency:
            return "one process alone trained as plain Keras: there was no parameter server and no exchange"
        columns: list[tuple[str, str, str]] = [
            ("worker", "worker", "d"),
            ("steps", "steps", "d"),
            ("batch", "batch_size", ".4g"),
            ("samples/s", "samples_per_second", ".0f"),
            ("compute s", "compute_seconds", ".1f"),
            ("waiting s", "waiting_seconds", ".1f"),
            ("epoch end s", "epoch_wait_seconds", ".1f"),
            ("staleness", "mean_staleness", ".2f"),
            ("max", "max_staleness", "d"),
            ("weight", "mean_weight", ".3f"),
        ]
        syncs = max((w["syncs"] for w in self.workers), default=0)
        if syncs:
            columns.insert(6, ("in syncs", "sync_seconds", ".1f"))
        rows = [[head for head, _, _ in columns] + ["MB up", "MB down"]]
        for w in self.workers:
            cells = [format(w[name], form) for _, name, form in columns]
            rows.append(cells + [f"{w[name] / 1e6:.1f}" for name in ("bytes_up", "bytes_down")])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        updates = " + ".join(str(u) for u in self.updates)
        return "\n".join(
            [
                f"{_capitals(self.consistency)}, {len(self.workers)} workers, {updates} updates, "
                f"{self.samples_per_second:.0f} samples/s together" + (f", {syncs} forced syncs" if syncs else ""),
                *("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows),
                *self._histogram(),
                *([line(self.coding)] if self.coding else []),
                *self.notes,
            ]
        )

    def _histogram(self) -> list[str]:
        """How stale the gradients of all workers were, in at most eight classes; nothing when none was stale."""
        counts: Counter[int] = Counter()
        for w in self.workers:
            counts.update({int(tau): n for tau, n in w["staleness"].items()})
        total, oldest = sum(counts.values()), max(counts, default=0)
        if not oldest:
            return []
        width = -(-(oldest + 1) // 8)
        parts = []
        for start in range(0, oldest + 1, width):
            end = min(start + width - 1, oldest)
            share = sum(counts[tau] for tau in range(start, end + 1)) / total
            parts.append(f"{start if start == end else f'{start}-{end}'}: {share:.0%}")
        return ["staleness of the gradients  " + "  ".join(parts)]


def _capitals(consistency: str) -> str:
    name, comma, options = consistency.partition(",")
    return name.upper() + comma + options


def row(worker: int, now: Totals, before: Totals) -> dict[str, Any]:
    """Returns one of :attr:`Summary.workers`.

    Args:
        worker: The worker's rank.
        now: What it did since the server started.
        before: The same at the beginning of this `fit`.
    """
    (s, received, sent), (b, received_before, sent_before) = now, before
    staleness = s.staleness - b.staleness
    applied = sum(staleness.values())
    steps, samples = s.pushes - b.pushes, s.samples - b.samples
    seconds = s.training_seconds - b.training_seconds
    timed = s.steps_timed - b.steps_timed
    mean = (s.step_seconds - b.step_seconds) / timed if timed else 0.0
    square = (s.step_squares - b.step_squares) / timed if timed else 0.0
    return {
        "worker": worker,
        "steps": steps,
        "samples": samples,
        "samples_per_second": (s.timed_samples - b.timed_samples) / seconds if seconds else 0.0,
        "batch_size": samples / steps if steps else 0.0,
        "compute_seconds": s.compute_seconds - b.compute_seconds,
        "waiting_seconds": s.waiting_seconds - b.waiting_seconds,
        "sync_seconds": s.sync_seconds - b.sync_seconds,
        "syncs": s.syncs - b.syncs,
        "epoch_wait_seconds": s.epoch_seconds - b.epoch_seconds,
        "mean_staleness": sum(age * n for age, n in staleness.items()) / applied if applied else 0.0,
        "max_staleness": max(staleness, default=0),
        "staleness": {str(tau): n for tau, n in sorted(staleness.items())},
        "mean_weight": (s.weights - b.weights) / applied if applied else 0.0,
        "step_seconds": mean,
        "step_seconds_std": math.sqrt(max(0.0, square - mean * mean)),
        "bytes_up": received - received_before,
        "bytes_down": sent - sent_before,
    }


def epoch_logs(rows: Sequence[Mapping[str, Any]], synchronous: bool) -> dict[str, float]:
    """Returns what Keras's logs of an epoch tell of the exchange, over all workers; seconds are means per worker."""
    workers = max(len(rows), 1)

    def mean(name: str) -> float:
        return float(sum(w[name] for w in rows) / workers)

    logs = {
        "hps/waiting_seconds": mean("waiting_seconds"),
        "hps/epoch_wait_seconds": mean("epoch_wait_seconds"),
        "hps/batch_size": sum(w["samples"] for w in rows) / max(sum(w["steps"] for w in rows), 1),
        "hps/megabytes_up": sum(w["bytes_up"] for w in rows) / 1e6,
        "hps/megabytes_down": sum(w["bytes_down"] for w in rows) / 1e6,
    }
    if synchronous:
        return logs
    applied = [sum(w["staleness"].values()) for w in rows]
    total = max(sum(applied), 1)
    return logs | {
        "hps/sync_seconds": mean("sync_seconds"),
        "hps/syncs": float(max((w["syncs"] for w in rows), default=0)),
        "hps/staleness": float(sum(n * w["mean_staleness"] for n, w in zip(applied, rows)) / total),
        "hps/weight": float(sum(n * w["mean_weight"] for n, w in zip(applied, rows)) / total),
    }


class Books:
    """Keeps, on the server, the totals at the beginning of a `fit` and of an epoch, and what came since.

    Args:
        coordinator: Counts what the workers do.
        wire: Counts the bytes.
        workers: The workers' ranks on the wire.
    """

    def __init__(self, coordinator: Coordinator, wire: Wire, workers: Sequence[int]) -> None:
        self._coordinator, self._wire, self._workers = coordinator, wire, workers
        self.begin_fit()

    def begin_fit(self) -> None:
        """A `fit` begins."""
        self._before = self._epoch = self._totals()
        self._first_versions: list[int] = []
        self._bytes, self._busy, self._pushes, self._epochs = 0, 0.0, 0, 0
        self._notes: dict[str, str] = {}
        self._model, self._overlap = self._coordinator.consistency, False
        self._widths, self._coded = (32, 32), False
        self._groups: list[str] = []
        self._told, self._fidelity = Fidelity(), Fidelity()  # the epochs that have ended, and the present one

    def follows(self, model: Consistency, overlap: bool) -> None:
        """The consistency model that the user asked for, and whether steps compute while pushes travel."""
        self._model, self._overlap = model, overlap
        if overlap:
            self.note("overlap", "overlap: pushes travel while the next step computes, on parameters one answer older")

    def begin_updates(self, versions: Sequence[int], nbytes: int, coded: Sequence[Tensor] = ()) -> None:
        """The optimizers of this `fit` are known.

        Args:
            versions: Of each.
            nbytes: Of the parameters of all.
            coded: The tensors that fewer bits quantize, optimizer after optimizer.
        """
        self._first_versions, self._bytes = list(versions), nbytes
        self._groups = tensor_groups([(t.name, t.size) for t in coded])
        self._told, self._fidelity = Fidelity(self._groups), Fidelity(self._groups)

    def widths(self, push: int, pull: int) -> None:
        """Gradients and parameters travel with so many bits from now on."""
        self._widths = push, pull
        self._coded |= min(push, pull) < 32

    def pushed(self, nbytes: int, float32: int) -> None:
        """A gradient came in so many bytes, where float32 needs `float32`."""
        self._fidelity.up.add(nbytes, float32)

    def answered(self, nbytes: int, float32: int) -> None:
        """Parameters went out in so many bytes, where float32 needs `float32`."""
        self._fidelity.down.add(nbytes, float32)

    def busy(self, seconds: float) -> None:
        """The server was busy with a push."""
        self._busy += seconds
        self._pushes += 1

    def note(self, about: str, text: str) -> None:
        """Keeps a line for the summary; a later one about the same replaces it."""
        self._notes[about] = text

    def end_epoch(self, coding: Sequence[Mapping[str, Any]], pulled: Sequence[Squares] = ()) -> dict[str, float]:
        """Returns the logs of the epoch that ends, and begins the next.

        Args:
            coding: Of each worker: ``squares``, for each optimizer and each of its quantized tensors, see
                :meth:`hps_keras.quantization.coding.GradientCoder.take_squares`; ``refused``, gradients that were not
                finite.
            pulled: The squares of the answers, for each optimizer.
        """
        now = self._totals()
        self._epochs += 1
        rows = [row(n, *both) for n, both in enumerate(zip(now, self._epoch))]
        self._epoch = now
        logs = epoch_logs(rows, isinstance(self._model, (BSP, AllReduce)) and not self._overlap)
        push, pull = self._widths
        ended = self._end_fidelity(coding, pulled)
        if self._coded:
            logs |= {"hps/push_bits": float(push), "hps/pull_bits": float(pull)} | ended.logs()
            logs["hps/refused"] = float(sum(worker["refused"] for worker in coding))
        return logs

    def _end_fidelity(self, coding: Sequence[Mapping[str, Any]], pulled: Sequence[Squares]) -> Fidelity:
        """Returns what the epoch that ends has sent, and begins that of the next."""
        ended, self._fidelity = self._fidelity, Fidelity(self._groups)
        ended.push_widths, ended.pull_widths = {self._widths[0]}, {self._widths[1]}
        for worker in coding:
            ended.pushed(itertools.chain.from_iterable(worker["squares"]))
        for squares in pulled:
            ended.pulled(squares)
        self._told.merge(ended)
        return ended

    def summary(self) -> dict[str, Any]:
        """What each worker did in this `fit`; see :class:`Summary`."""
        versions = [self._coordinator.version(g) for g in range(len(self._first_versions))]
        return {
            "consistency": str(self._model),
            "updates": [version - first for version, first in zip(versions, self._first_versions)],
            "workers": [row(n, *both) | self._fitted(n) for n, both in enumerate(zip(self._totals(), self._before))],
            "server": {
                "push_seconds": self._busy / self._pushes if self._pushes else 0.0,
                "pushes": self._pushes,
                "parameters_bytes": self._bytes,
            },
            "notes": list(self._notes.values()),
            "epochs": self._epochs,
            "coding": self._told.data(),
        }

    def _fitted(self, worker: int) -> dict[str, float]:
        """What was fitted to a worker's steps: where sizes change, their mean time and its scatter do not tell it."""
        found = self._coordinator.fitted(worker)
        if found is None:
            return {}
        return {
            "fitted_fixed_seconds": found.fixed,
            "fitted_sample_seconds": found.per_sample,
            "fitted_jitter": found.jitter,
            "given_batch_size": found.batch_size,
        }

    def _totals(self) -> list[Totals]:
        received, sent = self._wire.bytes_received, self._wire.bytes_sent
        return [
            (copy.deepcopy(self._coordinator.statistics(rank)), received.get(world_rank, 0), sent.get(world_rank, 0))
            for rank, world_rank in enumerate(self._workers)
        ]

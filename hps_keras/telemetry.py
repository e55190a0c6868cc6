"""What a run did, in a form for people: the summary table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hps_keras.coordinator import WorkerStatistics


@dataclass(frozen=True)
class Summary:
    """What the workers did in one `fit`; ``print`` it for a table.

    Attributes:
        consistency: Name of the consistency model.
        updates: Parameter updates, per optimizer.
        workers: One mapping per worker:

            - ``worker``: its rank
            - ``steps``, ``samples``: how many it trained
            - ``batch_size``: mean samples of a step
            - ``samples_per_second``: while it trained, waiting for rounds included; the first step, which compiles, and
              the waiting at the ends of epochs left out
            - ``compute_seconds``: time in Keras's step, on the worker's clock, the first left out
            - ``waiting_seconds``: time from its pushes to their answers, on the server's clock, the first left out
            - ``mean_staleness``, ``max_staleness``: updates between the parameters that a gradient was computed on and
              those that it was applied to
            - ``bytes_up``, ``bytes_down``: to and from the server
    """

    consistency: str
    updates: tuple[int, ...]
    workers: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Summary:
        """Reads what the server sent."""
        return cls(raw["consistency"], tuple(raw["updates"]), tuple(raw["workers"]))

    @property
    def samples_per_second(self) -> float:
        """All workers together."""
        return float(sum(w["samples_per_second"] for w in self.workers))

    def __str__(self) -> str:
        head = (
            "worker",
            "steps",
            "batch",
            "samples/s",
            "compute s",
            "waiting s",
            "staleness",
            "max",
            "MB up",
            "MB down",
        )
        rows = [
            (
                str(w["worker"]),
                str(w["steps"]),
                f"{w['batch_size']:.4g}",
                f"{w['samples_per_second']:.0f}",
                f"{w['compute_seconds']:.1f}",
                f"{w['waiting_seconds']:.1f}",
                f"{w['mean_staleness']:.2f}",
                str(w["max_staleness"]),
                f"{w['bytes_up'] / 1e6:.1f}",
                f"{w['bytes_down'] / 1e6:.1f}",
            )
            for w in self.workers
        ]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in [head, *rows]]
        updates = " + ".join(str(u) for u in self.updates)
        return "\n".join(
            [
                f"{self.consistency.upper()}, {len(self.workers)} workers, {updates} updates, "
                f"{self.samples_per_second:.0f} samples/s together",
                *lines,
            ]
        )


def row(
    worker: int, now: tuple[WorkerStatistics, int, int], before: tuple[WorkerStatistics, int, int]
) -> dict[str, Any]:
    """Returns one of :attr:`Summary.workers`.

    Args:
        worker: The worker's rank.
        now: What it did since the server started, the bytes that came from it, and those that went to it.
        before: The same at the beginning of this `fit`.
    """
    (s, received, sent), (b, received_before, sent_before) = now, before
    staleness = s.staleness - b.staleness
    applied = sum(staleness.values())
    steps, samples = s.pushes - b.pushes, s.samples - b.samples
    seconds = s.training_seconds - b.training_seconds
    return {
        "worker": worker,
        "steps": steps,
        "samples": samples,
        "samples_per_second": (s.timed_samples - b.timed_samples) / seconds if seconds else 0.0,
        "batch_size": samples / steps if steps else 0.0,
        "compute_seconds": s.compute_seconds - b.compute_seconds,
        "waiting_seconds": s.waiting_seconds - b.waiting_seconds,
        "mean_staleness": sum(age * n for age, n in staleness.items()) / applied if applied else 0.0,
        "max_staleness": max(staleness, default=0),
        "bytes_up": received - received_before,
        "bytes_down": sent - sent_before,
    }

"""What a run did, in a form for people: the summary table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Summary:
    """What the workers of a job did, over all its `fit` so far; ``print`` it for a table.

    Attributes:
        consistency: Name of the consistency model.
        updates: Parameter updates, per optimizer.
        workers: One mapping per worker: ``worker``, ``steps``, ``samples``, ``samples_per_second`` and ``batch_size``
            (the first step of each `fit`, which compiles, left out), ``compute_seconds``, ``waiting_seconds``,
            ``mean_staleness``, ``max_staleness``, ``bytes_up``, ``bytes_down``.
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
                str(w["batch_size"]),
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

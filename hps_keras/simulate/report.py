"""What a simulated run was like: numbers, tables that compare several, JSON, and a picture."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hps_keras.errors import ConfigurationError

WAITS = ("rounds", "bounds", "syncs", "ends")
"""What a worker can wait in: a BSP round, SSP's bound, a forced sync, the end of an epoch."""

_FULL = 0.8  # load from which queues grow long
_PARTS = ("compute", "exchange", *WAITS)
_COLORS = ("#4c9f70", "#9db4c0", "#d1495b", "#edae49", "#8f5aa8", "#66645e")


@dataclass(frozen=True)
class Report:
    """One simulated run. Times are virtual seconds; ``print`` it for a table.

    Attributes:
        consistency: The model, as :func:`hps_keras.consistency.parse` reads it.
        resize: How batch sizes followed the speed: ``no``, ``cap`` or ``accumulate``.
        widths: What decided the widths of gradients and answers: ``8/16 bits``, or the name of a policy.
        bits: These widths in each epoch.
        servers: Number of servers.
        overlap: Whether workers compute while their pushes travel.
        server_overlap: Whether servers receive while they update.
        seconds: The whole run.
        epoch_seconds: Each epoch.
        updates: Updates of the parameters.
        syncs: Forced syncs.
        mean_weight: Mean staleness weight of an update.
        workers: One mapping per worker: ``worker``, ``steps``, ``samples``, ``compute_seconds``, ``exchange_seconds``
            (network, and queues and work of the servers), ``waiting_seconds`` (see :data:`WAITS`), ``staleness``
            (updates between the parameters that a gradient was computed on and those that it was applied to, and how
            many gradients had that), ``bytes_up``, ``bytes_down``, ``lost``.
        busy_seconds: How long the servers were ``receiving``, ``sending`` and ``updating``.
        total_speed: sum(v): samples per second of all workers if none ever waited.
        bound: What can be won over BSP with the same batches; with equal ones sum(v) / (N min(v)).
        history: What the parameters were worth, in numeric mode: ``seconds``, ``epoch``, ``updates``, and metrics.
        notes: What the coordinator had to say.
    """

    consistency: str
    resize: str
    widths: str
    bits: tuple[tuple[int, int], ...]
    servers: int
    overlap: bool
    server_overlap: bool
    seconds: float
    epoch_seconds: tuple[float, ...]
    updates: int
    syncs: int
    mean_weight: float
    workers: tuple[Mapping[str, Any], ...]
    busy_seconds: Mapping[str, float]
    total_speed: float
    bound: float
    history: tuple[Mapping[str, float], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Samples that were trained on."""
        return sum(w["samples"] for w in self.workers)

    @property
    def samples_per_second(self) -> float:
        """Of all workers together, from the beginning to the end."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def staleness(self) -> dict[int, int]:
        """How many gradients had which staleness."""
        counts: Counter[int] = Counter()
        for worker in self.workers:
            counts.update(worker["staleness"])
        return dict(sorted(counts.items()))

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of the gradients."""
        counts = self.staleness
        return sum(tau * n for tau, n in counts.items()) / max(1, sum(counts.values()))

    @property
    def max_staleness(self) -> int:
        """Largest staleness of a gradient."""
        return max(self.staleness, default=0)

    @property
    def bytes_up(self) -> int:
        """Bytes to the servers."""
        return sum(w["bytes_up"] for w in self.workers)

    @property
    def bytes_down(self) -> int:
        """Bytes from the servers."""
        return sum(w["bytes_down"] for w in self.workers)

    @property
    def utilisation(self) -> dict[str, float]:
        """Share of the time in which the servers were receiving, sending and updating."""
        return {name: busy / self.seconds if self.seconds else 0.0 for name, busy in self.busy_seconds.items()}

    @property
    def bottleneck(self) -> tuple[str, float]:
        """What the servers do most, and for which share of the time."""
        load = self.utilisation
        if not self.server_overlap:  # these two are one after the other
            load = {"receiving and updating": load["receiving"] + load["updating"], "sending": load["sending"]}
        return max(load.items(), key=lambda item: item[1])

    @property
    def parts(self) -> dict[str, float]:
        """What the workers' time went into, as shares: computing, the exchange, and each kind of waiting."""
        sums = {
            "compute": math.fsum(w["compute_seconds"] for w in self.workers),
            "exchange": math.fsum(w["exchange_seconds"] for w in self.workers),
            **{kind: math.fsum(w["waiting_seconds"][kind] for w in self.workers) for kind in WAITS},
        }
        total = sum(sums.values())
        return {name: value / total if total else 0.0 for name, value in sums.items()}

    def time_to(self, metric: str, value: float) -> float | None:
        """Returns the virtual second at which a metric first was as good as `value`; None if never.

        A loss is good when it is small, everything else when it is large.
        """
        for entry in self.history:
            if metric in entry and (entry[metric] <= value if "loss" in metric else entry[metric] >= value):
                return entry["seconds"]
        return None

    def to_json(self) -> dict[str, Any]:
        """Everything, with what follows from it, for `json.dump`."""
        derived = (
            "samples",
            "samples_per_second",
            "staleness",
            "mean_staleness",
            "max_staleness",
            "bytes_up",
            "bytes_down",
            "utilisation",
            "parts",
        )
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    def save(self, path: str | Path) -> None:
        """Writes :meth:`to_json` to a file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    def __str__(self) -> str:
        return table([self])


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(w) if not i else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
        for row in [head, *rows]
    ]


def _baseline(report: Report, reports: Sequence[Report]) -> Report | None:
    """The BSP run that a report is to be compared with: of the same workers and servers."""

    def fits(other: Report) -> bool:
        same = len(other.workers) == len(report.workers) and other.total_speed == report.total_speed
        return other.consistency == "bsp" and other.resize == "no" and same and other.servers == report.servers

    return min(filter(fits, reports), key=lambda other: other.overlap, default=None)  # without, where there is one


def _resized(report: Report) -> str:
    """What changes the batches beside the model: shares in rounds; memory alone in asynchronous models."""
    model = report.consistency.partition(":")[0].partition(",")[0]
    what = {"bsp": " + shares", "auto": ""}.get(model, " + limits")  # "auto" has its shares without being told
    return {"no": "", "cap": what}.get(report.resize, f"{what}, {report.resize}")


def label(report: Report, reports: Sequence[Report]) -> str:
    """Names a report among others: its model, and its widths, workers and servers where they differ."""
    text = report.consistency + _resized(report) + (" + overlap" if report.overlap else "")
    if len({r.widths for r in reports}) > 1:
        text += f" {report.widths}"
    if len({len(r.workers) for r in reports}) > 1:
        text += f" {len(report.workers)}w"
    if len({r.servers for r in reports}) > 1:
        text += f" {report.servers}ps"
    return text


def table(reports: Sequence[Report], targets: Sequence[tuple[str, float]] = ()) -> str:
    """Returns reports side by side, as text.

    Args:
        reports: One or more.
        targets: Metrics of numeric mode, each with a value of it whose time is of interest.
    """
    names = [label(r, reports) for r in reports]
    speed_head = ["model", "s/epoch", "samples/s", "of sum(v)", "over bsp", "bound"]
    speed_head += ["staleness", "max", "weight", "updates", "syncs", "MB up", "MB down"]
    time_head = ["of the time, %", *_PARTS, "", "receiving", "sending", "updating"]
    speeds, times = [], []
    for name, r in zip(names, reports):
        base = _baseline(r, reports)
        speeds.append(
            [
                name,
                f"{sum(r.epoch_seconds) / len(r.epoch_seconds):.4g}",
                f"{r.samples_per_second:.4g}",
                f"{r.samples_per_second / r.total_speed:.1%}",
                "-" if base is None else f"{r.samples_per_second / base.samples_per_second:.2f}",
                f"{r.bound:.2f}",
                f"{r.mean_staleness:.2f}",
                str(r.max_staleness),
                f"{r.mean_weight:.3f}",
                str(r.updates),
                str(r.syncs),
                f"{r.bytes_up / 1e6:.1f}",
                f"{r.bytes_down / 1e6:.1f}",
            ]
        )
        load = [f"{100 * share:.1f}" for share in r.utilisation.values()]
        times.append([name, *(f"{100 * share:.1f}" for share in r.parts.values()), "|", *load])
    workers = sorted({len(r.workers) for r in reports})
    servers = sorted({r.servers for r in reports})
    epochs = [len(reports[0].epoch_seconds)]
    lines = [f"{_series(workers, 'worker')}, {_series(servers, 'server')}, {_series(epochs, 'epoch')}", ""]
    lines += _lines(speed_head, speeds)
    lines += ["", *_lines(time_head, times)]
    metrics = list(dict.fromkeys(name for r in reports for entry in r.history for name in entry))
    metrics = [m for m in metrics if m not in ("epoch", "seconds", "updates")]
    if metrics:
        lines += ["", *_lines(["at the end", *metrics], [[n, *_last(r, metrics)] for n, r in zip(names, reports)])]
    if targets:
        head = ["seconds to", *(f"{name} {value:g}" for name, value in targets)]
        found = [[r.time_to(name, value) for name, value in targets] for r in reports]
        rows = [[n, *("never" if t is None else f"{t:.4g}" for t in row)] for n, row in zip(names, found)]
        lines += ["", *_lines(head, rows)]
    for name, r in zip(names, reports):
        lines += [f"{name}: {note}" for note in [*_bottlenecks(r), *r.notes]]
    return "\n".join(lines)


def _bottlenecks(report: Report) -> list[str]:
    busy, share = report.bottleneck
    if share < _FULL:
        return []
    return [f"the servers are {busy} {share:.0%} of the time: more of them, or fewer bytes, would be faster"]


def _series(numbers: Sequence[int], what: str) -> str:
    return f"{', '.join(map(str, numbers))} {what}{'s' if numbers[-1] != 1 else ''}"


def _last(report: Report, metrics: Sequence[str]) -> list[str]:
    values = [next((e[m] for e in reversed(report.history) if m in e), None) for m in metrics]
    return ["-" if value is None else f"{value:.4f}" for value in values]


def save(reports: Sequence[Report], path: str) -> None:
    """Writes reports to one JSON file: a list.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps([r.to_json() for r in reports], indent=1) + "\n")
    except OSError as error:
        raise ConfigurationError(f"--json {path!r} cannot be written: {error}; give another path") from None


def plot(reports: Sequence[Report], path: str) -> None:
    """Draws reports side by side: speed, what the time went into, the servers' load, staleness, and what was learnt.

    Args:
        reports: One or more.
        path: The picture; its ending decides the format (.png, .svg, .pdf).

    Raises:
        ConfigurationError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError("--plot needs matplotlib: pip install 'hps_keras[simulate]'") from None
    metric = _metric(reports)
    names = [label(r, reports) for r in reports]
    count = 5 if metric else 4
    figure = Figure(figsize=(4.2 * count, 1.6 + 0.5 * len(reports) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    speed, time, load, stale, *learnt = figure.subplots(1, count)
    places = list(range(len(reports)))[::-1]

    speed.barh(places, [r.samples_per_second for r in reports], color=_COLORS[0])
    speed.plot([r.total_speed for r in reports], places, "|", color="black", markersize=18, label="sum(v)")
    speed.set_title("samples per second")
    speed.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize="small")

    left = [0.0] * len(reports)
    for part, color in zip(_PARTS, _COLORS):
        widths = [100 * r.parts[part] for r in reports]
        time.barh(places, widths, left=left, color=color, label=part if part not in WAITS else f"waiting: {part}")
        left = [a + b for a, b in zip(left, widths)]
    time.set_title("time of the workers, %")
    time.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize="small")

    for i, name in enumerate(("receiving", "sending", "updating")):
        heights = [100 * r.utilisation[name] for r in reports]
        load.barh([p + 0.27 * (1 - i) for p in places], heights, 0.25, color=_COLORS[i + 1], label=name)
    load.set_xlim(0, 100)
    load.set_title("load of the servers, %")
    load.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, fontsize="small")
    for axes in (speed, time, load):
        axes.set_yticks(places, names)

    for name, r in zip(names, reports):
        counts = r.staleness
        total = max(1, sum(counts.values()))
        stale.plot(list(counts), [100 * n / total for n in counts.values()], marker=".", label=name)
    stale.set_title("staleness, % of the gradients")
    stale.set_xlabel("updates")
    stale.legend(fontsize="small")

    for axes in learnt:
        for name, r in zip(names, reports):
            entries = [e for e in r.history if metric in e]
            axes.plot([e["seconds"] for e in entries], [e[metric] for e in entries], marker=".", label=name)
        axes.set_title(metric)
        axes.set_xlabel("virtual seconds")
        axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--plot {path!r} cannot be written: {error}; give a path such as out.png") from None


def _metric(reports: Sequence[Report]) -> str:
    """The metric to draw: validation accuracy rather than anything else; empty when there is none."""
    names = list(dict.fromkeys(n for r in reports for e in r.history for n in e if n not in ("epoch", "seconds")))
    names = [n for n in names if n != "updates"]
    ranked = sorted(names, key=lambda n: ("acc" not in n, not n.startswith("val_"), "loss" in n))
    return ranked[0] if ranked else ""

"""Where scenarios come from: flags, a YAML file, a recorded run, or several of them at once.

All three give *settings*, by the names of :data:`SETTINGS`; a flag wins over the file, the file over the recorded run.
Values that stand for each worker may be several (in text, separated by commas); the workers take them in turn, so
that ``speeds: 1,1,0.5,0.25`` fits 4 workers and 256.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from hps_keras.batches.shares import Resizing
from hps_keras.consistency import Auto, Consistency, parse
from hps_keras.errors import ConfigurationError
from hps_keras.simulate.scenario import (
    BYTES_PER_PARAMETER,
    CODING_RATE,
    Link,
    Scenario,
    Server,
    Worker,
)
from hps_keras.simulate.units import (
    Bad,
    Cost,
    cost,
    count,
    failure,
    number,
    policy_name,
    rate,
    resizing,
    seconds,
    slowdown,
    yes_or_no,
)


class Setting(NamedTuple):
    """How a setting is read.

    Attributes:
        read: From text.
        many: ``one`` value; ``each``: several, with commas between them; ``list``: the setting again and again.
        shown: What the help shows for a value.
        help: What it means.
    """

    read: Callable[[str], Any]
    many: str
    shown: str
    help: str


SETTINGS: Mapping[str, Setting] = {
    "workers": Setting(count, "each", "N[,N]", "number of workers; several are compared"),
    "consistency": Setting(str, "list", "RULE", "bsp, asp, ssp:3, wasp:50,weight=inverse, ...; repeat to compare"),
    "step_seconds": Setting(seconds, "each", "S[,S]", "mean time of a full step at speed 1, without communication"),
    "speeds": Setting(number, "each", "V[,V]", "relative speeds: 1,1,0.5,0.25; a step takes step-seconds / speed"),
    "fixed_seconds": Setting(seconds, "each", "S[,S]", "the part of step-seconds that the batch size does not change"),
    "jitter": Setting(number, "each", "J[,J]", "standard deviation of a step's time over its mean, 0.05 unless given"),
    "batch_size": Setting(count, "each", "B[,B]", "samples of a full step, 64 unless given"),
    "samples": Setting(count, "one", "N", "samples of a pass, leased to the workers as by hps.data.ElasticDataset"),
    "steps": Setting(count, "each", "N[,N]", "instead of samples: steps per epoch of a worker with a shard of its own"),
    "epochs": Setting(count, "one", "N", "epochs, 1 unless given"),
    "parameters": Setting(count, "one", "N", "trainable parameters, e.g. 44.5M; decides the bytes of a push"),
    "bandwidth": Setting(rate, "each", "RATE[,RATE]", "of a worker's link, e.g. 1gbit; not limited unless given"),
    "latency": Setting(seconds, "each", "S[,S]", "of a worker's link, one way, e.g. 50us"),
    "servers": Setting(count, "each", "N[,N]", "number of parameter servers, 1 unless given; several are compared"),
    "server_bandwidth": Setting(rate, "one", "RATE", "of one server's interface; as the fastest link unless given"),
    "push_seconds": Setting(cost, "one", "S", "a server's time to take one gradient in, e.g. 2ms or 0.2ns/byte"),
    "update_seconds": Setting(cost, "one", "S", "a server's time for one update of the parameters, as push-seconds"),
    "overlap": Setting(yes_or_no, "each", "YES|NO", "whether workers compute while pushes travel; no,yes: compared"),
    "server_overlap": Setting(yes_or_no, "one", "YES|NO", "whether servers receive beside updates; no, as the real"),
    "slow": Setting(slowdown, "list", "W:A-B:F", "worker W runs at F times its speed from second A to B; can repeat"),
    "fail": Setting(failure, "list", "W@S", "worker W is lost at second S (W@S+T: noticed T later); can repeat"),
    "resize": Setting(resizing, "list", "MODE", "batch sizes by speed: no, cap, accumulate; repeat to compare"),
    "limit": Setting(count, "each", "B[,B]", "most samples in a batch that a worker's memory holds; 0 for no bound"),
    "push_bits": Setting(count, "each", "N[,N]", "width of gradients: 1, 2, 4, 8, 16, or 32, the default; compared"),
    "pull_bits": Setting(count, "each", "N[,N]", "width of parameters in answers, as push-bits"),
    "policy": Setting(policy_name, "list", "NAME", "how widths follow accuracy: plateau, descending:8:2, ...; repeat"),
    "pull_policy": Setting(policy_name, "one", "NAME", "the policy of answers, as policy unless given"),
    "monitor": Setting(str, "one", "METRIC", "what policies follow, val_accuracy unless given"),
    "coding_rate": Setting(rate, "each", "RATE[,RATE]", "float32 that a worker encodes in a second, 6GB unless given"),
    "server_coding_rate": Setting(rate, "one", "RATE", "the same of a server, 6GB unless given"),
    "seed": Setting(count, "one", "N", "of the jitter, 0 unless given"),
}


_PER_WORKER = (
    "step_seconds",
    "speeds",
    "fixed_seconds",
    "jitter",
    "batch_size",
    "steps",
    "bandwidth",
    "latency",
    "limit",
    "coding_rate",
)


class Given(NamedTuple):
    """A setting's value, and how the user named it; `recorded` values go round any number of workers."""

    value: Any
    label: str
    recorded: bool = False


def from_file(path: str) -> dict[str, Given]:
    """Reads settings from a YAML file: the names of :data:`SETTINGS`, with ``-`` or ``_``.

    Raises:
        ConfigurationError: The file cannot be read, or a name in it is unknown.
    """
    try:
        import yaml
    except ImportError:
        raise ConfigurationError("--file needs PyYAML: pip install 'hps_keras[simulate]'") from None
    try:
        loaded = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--file {path!r} cannot be read: {error}; give a YAML file of settings") from None
    if not isinstance(loaded, dict):
        raise ConfigurationError(f"--file {path!r} holds no settings: write lines such as `workers: 4`")
    settings = {}
    for name, value in loaded.items():
        key = str(name).replace("-", "_")
        if key not in SETTINGS:
            raise ConfigurationError(f"{name!r} in {path!r} is no setting: use {', '.join(SETTINGS)}")
        settings[key] = Given(value, f"{name!r} in {path!r}")
    return settings


def from_run(path: str) -> dict[str, Given]:
    """Fits settings to a recorded run, the JSON file of ``Summary.save``; see :func:`from_summary`."""
    where = f"--from {path!r}"
    try:
        run = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{where} cannot be read: {error}; give a file of ps.summary.save(...)") from None
    return from_summary(run, where)


def from_summary(run: Mapping[str, Any], where: str) -> dict[str, Given]:
    """Fits settings to what ``Summary.save`` has written.

    The network is inside the recorded times, so that links cost nothing and must not be given again; nor do coders. Of
    widths that changed in the run the largest is taken. With overlap, the recorded times are those of computing alone.
    The run's samples are those of all its epochs, unless `samples` or `epochs` are given. Where batches followed the
    speed, each worker has the batch size that the user gave it and the time that was fitted; else no part of a step's
    time is fixed.

    Args:
        run: What was written.
        where: Its name, for errors.

    Raises:
        ConfigurationError: Something is missing in it.
    """
    try:
        rows = [w for w in run["workers"] if w["steps"]]
        if not rows:
            raise ConfigurationError(
                f"{where} holds no worker that trained: one process alone has no parameter server; record a run of "
                "several, e.g. hpsrun -np 3 train.py, one epoch is enough"
            )
        model, machines = run["consistency"], [_machine(w) for w in rows]
        fitted: dict[str, Any] = {
            "workers": len(rows),
            "consistency": model,
            "step_seconds": [m.step_seconds for m in machines],
            "jitter": [m.jitter for m in machines],
            "batch_size": [m.batch_size for m in machines],
            "samples": sum(w["samples"] for w in rows) // max(1, run["epochs"]),
            "epochs": max(1, run["epochs"]),
            "parameters": run["server"]["parameters_bytes"] // BYTES_PER_PARAMETER,
            "push_seconds": run["server"]["push_seconds"],
            "coding_rate": math.inf,  # the recorded times hold the coders' work
            "server_coding_rate": math.inf,
        }
        if any(note.startswith("overlap:") for note in run.get("notes", ())):
            fitted["overlap"] = True
        for name in ("push_bits", "pull_bits"):
            fitted[name] = max(run.get("coding", {}).get(name, [32]))
        if any(m.fixed_seconds for m in machines):
            fitted["fixed_seconds"] = [m.fixed_seconds for m in machines]
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        missing = f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"{where} is no recorded run ({missing}); save one by ps.summary.save(...)") from None
    return {name: Given(value, f"{name} of {where}", recorded=True) for name, value in fitted.items()}


def _machine(row: Mapping[str, Any]) -> Worker:
    """A worker as it was recorded, its network in its steps."""
    mean = row["step_seconds"]
    if "given_batch_size" not in row:
        jitter = min(1.0, row["step_seconds_std"] / mean)
        return Worker(mean, max(1, round(row["batch_size"])), jitter=jitter)
    # The first step, which compiles, is in no sum of seconds. What the server's clock saw beside computing is exchange.
    exchange = max(0.0, mean - row["compute_seconds"] / max(1, row["steps"] - 1))
    batch_size, fixed = row["given_batch_size"], row["fitted_fixed_seconds"] + exchange
    whole = fixed + row["fitted_sample_seconds"] * batch_size
    return Worker(whole, batch_size, fixed, min(1.0, row["fitted_jitter"]))


def merge(run: Mapping[str, Given], file: Mapping[str, Given], flags: Mapping[str, Given]) -> dict[str, Given]:
    """Puts settings of several sources together.

    Raises:
        ConfigurationError: They contradict each other.
    """
    over = {**file, **flags}
    if run:
        for name in ("bandwidth", "latency", "server_bandwidth"):
            if name in over:
                raise ConfigurationError(
                    f"{over[name].label} with --from: the recorded times hold the network already; leave it out"
                )
    merged = {**run, **over}
    if "steps" in over and "samples" not in over:
        merged.pop("samples", None)
    if "policy" in over:
        for name in {"push_bits", "pull_bits"} - over.keys():
            merged.pop(name, None)
    if "step_seconds" in over and "fixed_seconds" not in over:
        merged.pop("fixed_seconds", None)  # a part of other times
    return merged


def scenarios(settings: Mapping[str, Given]) -> list[Scenario]:
    """Makes a scenario of each number of workers, number of servers and consistency model that is named.

    Raises:
        ConfigurationError: A setting is missing, cannot be read, or cannot be.
    """
    read = {name: _read(name, given) for name, given in settings.items()}
    if "step_seconds" not in read:
        raise ConfigurationError("step_seconds is missing: give the time of a step, e.g. --step-seconds 50ms")
    longest = max((len(v) for n, v in read.items() if n in _PER_WORKER), default=1)
    if longest == 1 and "workers" not in read:
        raise ConfigurationError("workers is missing: give their number, e.g. --workers 4")
    label = settings["consistency"].label if "consistency" in settings else "consistency"
    models = [parse(text, label) for text in read.get("consistency", ["bsp"])]
    modes = read.get("resize", [None])
    settled = [one | {"overlap": overlap} for overlap in read.get("overlap", [False]) for one in _widths(read)]
    runs = product(read.get("workers", [longest]), read.get("servers", [1]), models, modes, settled)
    try:
        return [
            _scenario(settings, read, workers, servers, model, resize, more)
            for workers, servers, model, resize, more in runs
            if not _repeats(model, resize, modes)
        ]
    except ConfigurationError as error:  # say it by the name under which it was given
        wrong = str(error).partition("=")[0]
        raise ConfigurationError(f"{settings[wrong].label}: {error}" if wrong in settings else str(error)) from None


def _widths(read: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The widths to compare: all pairs of fixed ones that are named, then the policies."""
    chosen: list[dict[str, Any]] = []
    if "policy" not in read or "push_bits" in read or "pull_bits" in read:
        pairs = product(read.get("push_bits", [32]), read.get("pull_bits", [32]))
        chosen += [{"push_bits": push, "pull_bits": pull} for push, pull in pairs]
    more = {name: read[name] for name in ("pull_policy", "monitor") if name in read}
    if "policy" not in read:
        return [one | more for one in chosen]
    return chosen + [{"policy": name} | more for name in read["policy"]]


def _repeats(model: Consistency, resize: Resizing | None, modes: Sequence[Resizing | None]) -> bool:
    """Whether this is the run of another mode: "auto" always resizes, so that "no" and "cap" are the same."""
    return isinstance(model, Auto) and resize is None and Resizing() in modes


def _scenario(
    settings: Mapping[str, Given],
    read: Mapping[str, Any],
    workers: int,
    servers: int,
    model: Consistency,
    resize: Resizing | None,
    more: Mapping[str, Any],
) -> Scenario:
    def each(name: str, default: Any) -> list[Any]:
        """The values of all workers."""
        values, given = read.get(name, [default]), settings.get(name)
        if given and not given.recorded and max(workers, 1) % len(values):
            raise ConfigurationError(
                f"{given.label}: {len(values)} values do not go round {workers} workers; give one for all, or one for "
                "each, or so many that the workers are a multiple of them"
            )
        return [values[rank % len(values)] for rank in range(workers)]

    speeds = each("speeds", 1.0)
    if not all(0 < v < math.inf for v in speeds):
        raise ConfigurationError(f"speeds={read['speeds']}: give numbers above 0, e.g. 1,1,0.5,0.25")
    links = [Link(*both) for both in zip(each("bandwidth", math.inf), each("latency", 0.0))]
    machines = [
        Worker(step / speed, batch_size, fixed / speed, jitter, link, steps, limit, coding)
        for speed, step, batch_size, fixed, jitter, link, steps, limit, coding in zip(
            speeds,
            each("step_seconds", None),
            each("batch_size", 64),
            each("fixed_seconds", 0.0),
            each("jitter", 0.05),
            links,
            each("steps", None),
            each("limit", 0),
            each("coding_rate", CODING_RATE),
        )
    ]
    parameters = read.get("parameters", 0)
    nbytes = BYTES_PER_PARAMETER * parameters
    fastest = max((link.bandwidth for link in links), default=math.inf)
    return Scenario(
        workers=tuple(machines),
        consistency=model,
        server=Server(
            count=servers,
            bandwidth=read.get("server_bandwidth", fastest),
            push_seconds=read.get("push_seconds", Cost()).of(nbytes),
            update_seconds=read.get("update_seconds", Cost()).of(nbytes),
            overlap=read.get("server_overlap", False),
            coding_rate=read.get("server_coding_rate", CODING_RATE),
        ),
        parameters=parameters,
        samples=read.get("samples"),
        epochs=read.get("epochs", 1),
        slowdowns=tuple(read.get("slow", ())),
        failures=tuple(read.get("fail", ())),
        resizing=resize,
        **more,
        seed=read.get("seed", 0),
    )


def _read(name: str, given: Given) -> Any:
    """Reads a setting's value: text, a number, or a list of them."""
    setting = SETTINGS[name]
    values: Sequence[Any] = given.value if isinstance(given.value, (list, tuple)) else [given.value]
    if setting.many == "each":
        values = [word for v in values for word in (v.split(",") if isinstance(v, str) else [v])]
    if not values or (setting.many == "one" and len(values) > 1):
        raise ConfigurationError(f"{given.label}: {given.value!r}: give one value")
    try:
        for value in values:
            known = isinstance(value, (str, int, float))
            if not known or (isinstance(value, bool) and setting.read is not yes_or_no):
                raise Bad(f"give {setting.shown}: {setting.help}")
        read = [setting.read(value if isinstance(value, str) else repr(value)) for value in values]
    except Bad as error:
        raise ConfigurationError(f"{given.label}: {given.value!r} cannot be read: {error}") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{given.label}: {error}") from None
    return read[0] if setting.many == "one" else read

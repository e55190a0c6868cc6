"""`hpsrun simulate`: what a run would be like, before node hours are spent on it."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hps_keras.errors import ConfigurationError
from hps_keras.simulate.engine import simulate
from hps_keras.simulate.inputs import SETTINGS, Given, from_file, from_run, merge, scenarios
from hps_keras.simulate.report import Report, plot, save, table
from hps_keras.simulate.units import yes_or_no

if TYPE_CHECKING:
    from hps_keras.simulate.scenario import Scenario

_DESCRIPTION = """\
Run a training in virtual time, with the very code that decides real ones, and report speed, staleness and waiting.

  hpsrun simulate --workers 4 --speeds 1,1,0.5,0.25 --step-seconds 50ms --samples 60000 \\
      --parameters 61706 --bandwidth 1gbit --latency 50us \\
      --consistency bsp --consistency asp --consistency wasp:50
  hpsrun simulate --from run.json --workers 4,16,64 --servers 1,2      a recorded run: ps.summary.save("run.json")
  hpsrun simulate --file scenario.yaml --model model.keras --data mnist.npz --target val_accuracy=0.985

All options of the first group can stand in the YAML file too (`step_seconds: 50ms`); an option wins over the file.
"""
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of `hpsrun simulate`."""
    parser = argparse.ArgumentParser(
        prog="hpsrun simulate",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what is simulated")
    for name, setting in SETTINGS.items():
        flag = "--" + name.replace("_", "-")
        action = "append" if setting.many == "list" else "store"
        alone: dict[str, Any] = {"nargs": "?", "const": "yes"} if setting.read is yes_or_no else {}
        what.add_argument(flag, dest=name, action=action, metavar=setting.shown, help=setting.help, **alone)
    add = parser.add_argument_group("where from, where to").add_argument
    add("--file", metavar="YAML", help="a file of the settings above")
    add("--from", dest="run", metavar="JSON", help="a recorded run, written by ps.summary.save(...)")
    add("--json", metavar="OUT", help="write everything to a JSON file")
    add("--plot", metavar="OUT", help="draw it: .png, .svg or .pdf")
    add = parser.add_argument_group("numeric mode: a real model trains").add_argument
    add("--model", metavar="KERAS", help="a compiled model, saved by model.save(...)")
    add("--data", metavar="NPZ", help=f"arrays {', '.join(_ARRAYS)}; the last two may lack")
    add("--evaluate-every", type=int, default=0, metavar="N", help="evaluate after every N updates too")
    add("--target", action="append", default=[], metavar="M=V", help="say when metric M has reached V; can repeat")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs `hpsrun simulate`; returns its exit code."""
    options = make_parser().parse_args(arguments)
    targets = [_target(text) for text in options.target]
    flags = {
        name: Given(value, "--" + name.replace("_", "-"))
        for name in SETTINGS
        if (value := getattr(options, name)) is not None
    }
    file = from_file(options.file) if options.file else {}
    run = from_run(options.run) if options.run else {}
    settings = merge(run, file, flags)
    for line in _unseen(run, {*file, *flags}):
        print(f"{options.run}: {line}", file=sys.stderr)
    numeric = None
    if options.model or options.data:
        numeric = _Training(options.model, options.data, options.evaluate_every, settings)
    elif targets:
        raise ConfigurationError("--target: nothing is learnt without --model and --data; give both, or leave it out")
    planned = scenarios(settings)
    reports: list[Report] = []
    for scenario in planned:
        if len(planned) > 1:
            print(
                f"{scenario.consistency}, {len(scenario.workers)} workers, {scenario.widths}"
                + (", overlap ..." if scenario.overlap else " ..."),
                file=sys.stderr,
                flush=True,
            )
        reports.append(simulate(scenario) if numeric is None else numeric.run(scenario))
    print(table(reports, targets))
    if options.json:
        save(reports, options.json)
    if options.plot:
        plot(reports, options.plot)
    return 0


def _unseen(run: Mapping[str, Given], over: set[str]) -> list[str]:
    """What the times of a recorded run do not tell of the settings that are given over it."""
    if not run:
        return []
    said = []
    if {"push_bits", "pull_bits", "policy"} & over:
        said.append(
            "its times hold the network at the widths that it had; other widths change bytes and accuracy here, not "
            "times"
        )
    if "overlap" in run:
        said.append("it had overlap: its times are those of computing, and an exchange that took longer is not in them")
    elif "overlap" in over:
        said.append("its times hold the network, so overlap changes staleness and accuracy here, not times")
    return said


def _target(text: str) -> tuple[str, float]:
    metric, equals, value = text.partition("=")
    try:
        if metric and equals:
            return metric, float(value)
    except ValueError:
        pass  # said below, as for a missing sign
    raise ConfigurationError(f"--target {text!r}: give a metric and a value, e.g. val_accuracy=0.985")


class _Training:
    """Numeric mode of the command: each scenario trains the saved model anew.

    Args:
        model: Path of the saved model.
        data: Path of the arrays.
        every: Updates between evaluations, 0 for none but at the ends of epochs.
        settings: Gain what model and data say: the parameters and the samples of a pass.
    """

    def __init__(self, model: str | None, data: str | None, every: int, settings: dict[str, Given]) -> None:
        if not (model and data):
            missing = "--data" if model else "--model"
            raise ConfigurationError(f"{missing} is missing: numeric mode needs a compiled model and its data")
        self._path, self._every = model, every
        self._arrays = _load(data)
        loaded = self._model()
        parameters = sum(math.prod(v.shape) for v in loaded.trainable_variables)
        settings.setdefault("parameters", Given(parameters, "--model"))
        if "samples" in settings and not settings["samples"].recorded:
            samples = len(self._arrays["x_train"])
            raise ConfigurationError(
                f"{settings['samples'].label}: a pass holds the {samples} samples of x_train; leave it out"
            )
        if "steps" not in settings:
            settings["samples"] = Given(len(self._arrays["x_train"]), "--data")

    def _model(self) -> Any:
        import keras

        try:
            with warnings.catch_warnings():
                # A model that was saved before any training has no slots yet: that is how a run begins.
                warnings.filterwarnings("ignore", "Skipping variable loading for optimizer", UserWarning)
                return keras.models.load_model(self._path)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(f"--model {self._path!r} cannot be loaded: {error}") from error

    def run(self, scenario: Scenario) -> Report:
        """Trains as the scenario says."""
        from hps_keras.simulate.numeric import Numeric

        arrays = self._arrays
        validation = (arrays["x_test"], arrays["y_test"]) if "x_test" in arrays else None
        numeric = Numeric(
            self._model(),
            (arrays["x_train"], arrays["y_train"]),
            len(scenario.workers),
            scenario.consistency,
            seed=scenario.seed,
            validation_data=validation,
            evaluate_every=self._every,
        )
        return simulate(scenario, numeric)


def _load(path: str) -> dict[str, Any]:
    import numpy as np

    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in _ARRAYS if name in file}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--data {path!r} cannot be read: {error}; give an .npz file") from None
    missing = [name for name in _ARRAYS[:2] if name not in arrays]
    if missing or ("x_test" in arrays) != ("y_test" in arrays):
        raise ConfigurationError(f"--data {path!r} holds {sorted(arrays)}: it needs {', '.join(_ARRAYS)}")
    return arrays

"""The pipeline in virtual time: what overlap saves, how stale it makes gradients, and that the rules of a pass hold."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest
from ranks import run

from hps_keras.batches.shares import Resizing
from hps_keras.consistency import ASP, BSP, SSP, WASP, parse
from hps_keras.errors import ConfigurationError
from hps_keras.server.telemetry import Summary
from hps_keras.simulate import Failure, Link, Scenario, Server, Worker, engine, inputs, simulate
from hps_keras.simulate.cli import main
from hps_keras.simulate.engine import NoArithmetic
from hps_keras.simulate.traffic import message_bytes

SPEEDS = (1, 1, 0.5, 0.25)
MODELS = (BSP(), ASP(), SSP(1), WASP(1), WASP(5), parse("auto:5"))


class Witness(NoArithmetic):
    """Sees to it that gradients are of parameters that their workers had, and not of any from before a common point."""

    def __init__(self):
        self.told, self.version, self.lost, self.late = False, 0, set(), 0
        self.held, self.before, self.common, self.last = {}, {}, {}, {}
        self.leases = []

    def overlap(self):
        self.told = True

    def begin_pass(self, number):
        self.leases.append([])

    def take(self, push, factor, first, lease):
        held = self.held.get(push.worker, 0)
        assert push.version in (held, self.before.get(push.worker, held)), "parameters that the worker has not"
        assert push.version >= self.common.get(push.worker, 0), "stale after a forced sync or an epoch's end"
        assert lease is None or lease.samples == push.samples
        self.late += push.version != held
        self.last[push.worker] = push
        self.leases[-1].append(lease)

    def update(self, decision):
        self.version = decision.version

    def answer(self, worker, exact):
        if self.held.get(worker, 0) != self.version:
            self.before[worker], self.held[worker] = self.held.get(worker, 0), self.version
        if exact:
            self.common[worker] = self.version

    def leave(self, worker):
        self.lost.add(worker)

    def epoch_end(self, epoch, now):
        assert {v for worker, v in self.held.items() if worker not in self.lost} == {self.version}
        assert not any(push.travels for worker, push in self.last.items() if worker not in self.lost)


def crew(speeds=SPEEDS, jitter=0.0, step=0.05, **more):
    return tuple(Worker(step / v, jitter=jitter, **more) for v in speeds)


def both(workers, model=None, **more):
    """A scenario without and with overlap."""
    plain = Scenario(workers, model or BSP(), **more)
    return plain, dataclasses.replace(plain, overlap=True)


# Times


@pytest.mark.parametrize("compute", [0.1, 0.202, 0.4])
@pytest.mark.parametrize("model", [BSP(), ASP(), SSP(2)], ids=str)
def test_a_step_takes_the_longer_of_computing_and_exchange(model, compute):
    steps, down, exchange = 50, 0.1 + 0.001, 2 * (0.1 + 0.001)
    workers = (Worker(compute, jitter=0.0, link=Link(1e6, 0.001)),)
    plain, overlapped = (simulate(s) for s in both(workers, model, parameters=25_000, samples=64 * steps))
    end = down + 0.001  # of the epoch: the last parameters
    assert plain.seconds == pytest.approx(steps * (compute + exchange) + end)
    # The first two wait, the third has nothing to go beside, and nothing goes beside the last exchange.
    waits = 2 * (compute + exchange) + compute + exchange
    assert overlapped.seconds == pytest.approx(waits + (steps - 3) * max(compute, exchange) + end)
    assert overlapped.workers[0]["compute_seconds"] == pytest.approx(steps * compute)
    assert (overlapped.bytes_up, overlapped.bytes_down) == (plain.bytes_up, plain.bytes_down)


def test_where_computing_and_exchange_are_equal_overlap_halves_a_step():
    """Two workers in rounds: the server receives over one slow link after the other, and sends to both at once."""
    exchange = 2 * 0.1 + 0.1
    workers = crew((1, 1), step=exchange, link=Link(1e6))
    plain, overlapped = (
        simulate(s)
        for s in both(workers, server=Server(bandwidth=1e9), parameters=25_000, samples=2 * 64 * 200, overlap=False)
    )
    assert plain.seconds / 200 == pytest.approx(2 * exchange, rel=0.01)
    assert overlapped.seconds / 200 == pytest.approx(exchange, rel=0.03)


def test_the_worker_encodes_before_its_next_step_and_decodes_beside_it():
    def seconds(compute, steps):
        worker = Worker(compute, jitter=0.0, link=Link(1e9), coding_rate=1e9)
        widths = {"push_bits": 8, "pull_bits": 8}
        server = Server(1, 1e9, coding_rate=math.inf)
        return simulate(Scenario((worker,), ASP(), server, 10**7, 64 * steps, overlap=True, **widths)).seconds

    travel, encode, decode = message_bytes(10**7, 8) / 1e9, 0.04, 0.04 / 3
    for compute in (0.01, 0.3):
        step = (seconds(compute, 60) - seconds(compute, 20)) / 40
        assert step == pytest.approx(encode + max(compute, 2 * travel + decode))


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_workers_time_adds_up(model):
    workers = crew(jitter=0.2, link=Link(1e7, 1e-4))
    given = {"parameters": 25_000, "samples": 64 * 150, "epochs": 2, "push_bits": 8}
    plain, overlapped = (simulate(s) for s in both(workers, model, **given))
    for row in overlapped.workers:
        parts = row["compute_seconds"] + row["exchange_seconds"] + sum(row["waiting_seconds"].values())
        assert parts == pytest.approx(overlapped.seconds)
        assert min(row["exchange_seconds"], *row["waiting_seconds"].values()) > -1e-9
    assert overlapped.parts["exchange"] < 0.9 * plain.parts["exchange"]


# The rules


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_every_sample_once_a_pass_and_versions_are_true(model, seed):
    samples = (7, 64 * 11 + 5, 64 * 60 + 17)[seed % 3]
    workers = crew(SPEEDS[: 1 + seed % 4], jitter=0.3, link=Link(1e7, 1e-3))
    resizing = Resizing() if seed == 5 else None
    given = {"parameters": 10_000, "samples": samples, "epochs": 3, "seed": seed, "resizing": resizing}
    witness = Witness()
    report = simulate(Scenario(workers, model, overlap=True, **given), witness)
    assert witness.told and len(report.epoch_seconds) == 3
    for leases in witness.leases:
        used = sorted(p for lease in leases for p in range(lease.start, sum(lease)))
        assert used == list(range(samples)), "each sample once"
    assert sum(report.staleness.values()) == sum(w["steps"] for w in report.workers), "every gradient was applied"
    if isinstance(model, BSP):
        assert set(report.staleness) <= {0, 1}
    assert samples < 100 or report.max_staleness, "even where a worker is alone"
    assert samples < 100 or witness.late or str(model) == "wasp:1", "on parameters from before the last answer"


def test_rounds_are_stale_as_on_real_ranks():
    """What tests/test_overlap.py sees of real workers: the first two steps, and the first to travel of each epoch."""
    workers = crew((1, 1, 1), jitter=0.1, steps=7)
    report = simulate(Scenario(workers, epochs=2, overlap=True))
    assert [w["staleness"] for w in report.workers] == [{0: 3 + 1, 1: 4 + 6}] * 3
    leased = simulate(Scenario(crew((1, 1, 1)), samples=64 * 3 * 7, epochs=2, overlap=True))
    assert [w["staleness"] for w in leased.workers] == [{0: 3 + 1, 1: 4 + 6}] * 3


def test_forced_syncs_still_come_and_leave_nothing_stale():
    """The last is what the witness sees to; here that there was something to see."""
    witness = Witness()
    report = simulate(Scenario(crew(jitter=0.1), WASP(3), samples=64 * 300, overlap=True), witness)
    assert report.syncs >= 15 and witness.late > 100
    assert max(witness.common.values()) > 250


def test_as_many_first_steps_wait_as_on_real_ranks():
    from hps_keras.worker import pushes

    assert engine.FIRST_WAIT == pushes.FIRST_WAIT


@pytest.mark.parametrize("model", [BSP(), ASP(), SSP(1), WASP(2)], ids=str)
@pytest.mark.parametrize("noticed", [0.0, 0.3])
def test_a_lost_worker_costs_no_sample(model, noticed):
    """Losses at many instants: while computing, while a push travels, while one waits."""
    for at in [0.31 + 0.037 * n for n in range(12)]:
        witness = Witness()
        workers = crew((1, 1, 0.5), link=Link(1e6, 0.002))
        losses = (Failure(1, at, noticed), Failure(2, 2 * at))
        given = {"parameters": 10_000, "samples": 64 * 60, "epochs": 2, "failures": losses}
        report = simulate(Scenario(workers, model, overlap=True, **given), witness)
        assert [w["lost"] for w in report.workers] == [False, True, True] and witness.lost == {1, 2}
        for leases in witness.leases:
            used = Counter(p for lease in leases for p in range(lease.start, sum(lease)))
            assert used == Counter(range(64 * 60))


def test_losing_everybody_is_said():
    losses = tuple(Failure(w, 0.5 + w / 10) for w in range(4))
    with pytest.raises(ConfigurationError, match="fail: all workers are lost"):
        simulate(Scenario(crew(), ASP(), samples=64 * 400, failures=losses, overlap=True))


def test_what_bsp_cannot_compensate_is_said():
    plain, overlapped = (simulate(s) for s in both(crew((1,)), parse("bsp,compensation=0.1"), samples=640))
    assert any("nothing to compensate" in note for note in plain.notes) and not overlapped.notes
    with pytest.raises(ConfigurationError, match="overlap='maybe': give True or False"):
        Scenario(crew(), samples=640, overlap="maybe")


# Where it is given, and what is shown

COMMON = ["--workers", "2", "--step-seconds", "50ms", "--jitter", "0", "--samples", "1280", "--parameters", "25k"]


def made(tmp_path, text="", *arguments):
    file = tmp_path / "s.yaml"
    file.write_text("workers: 2\nstep-seconds: 50ms\nsamples: 640\n" + text)
    flags = {name: inputs.Given(value, f"--{name}") for name, value in zip(arguments[::2], arguments[1::2])}
    return inputs.scenarios(inputs.merge({}, inputs.from_file(str(file)), flags))


def test_overlap_is_a_setting(tmp_path):
    assert [s.overlap for s in made(tmp_path)] == [False]
    assert [s.overlap for s in made(tmp_path, "overlap: true\n")] == [True]
    assert [s.overlap for s in made(tmp_path, "overlap: [no, yes]\n")] == [False, True]
    assert [s.overlap for s in made(tmp_path, "overlap: true\n", "overlap", "no")] == [False]
    (apart,) = made(tmp_path, "server-overlap: yes\n")
    assert apart.server.overlap and not apart.overlap
    with pytest.raises(ConfigurationError, match="'perhaps' cannot be read: give yes or no"):
        made(tmp_path, "overlap: perhaps\n")


def test_the_command_compares_overlap_with_none(capsys):
    main([*COMMON, "--bandwidth", "1MB", "--consistency", "bsp", "--overlap", "no,yes"])
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()[3:5]]
    names, over = [row[0] for row in rows], [[w.strip() for w in row if w][4] for row in rows]
    assert names == ["bsp", "bsp + overlap"] and over[0] == "1.00" and float(over[1]) > 1.05
    main([*COMMON, "--overlap", "--consistency", "asp"])
    assert "\nasp + overlap " in capsys.readouterr().out


def test_a_recorded_run_says_whether_it_had_overlap(tmp_path, capsys):
    row = {"steps": 100, "samples": 6400, "batch_size": 64.0, "step_seconds": 0.05, "step_seconds_std": 0.0}
    served = {"push_seconds": 0.0, "parameters_bytes": 4000, "pushes": 100}
    notes = ("overlap: pushes travel while the next step computes, on parameters one answer older",)
    path = str(tmp_path / "run.json")
    plain = Summary("asp", (100,), (row, row), served, epochs=1)
    dataclasses.replace(plain, notes=notes).save(path)
    assert [s.overlap for s in inputs.scenarios(inputs.from_run(path))] == [True]
    main(["--from", path])
    shown = capsys.readouterr()
    assert "it had overlap: its times are those of computing" in shown.err and "asp + overlap" in shown.out
    plain.save(path)
    assert [s.overlap for s in inputs.scenarios(inputs.from_run(path))] == [False]
    main(["--from", path, "--overlap"])
    assert "overlap changes staleness and accuracy here, not times" in capsys.readouterr().err


# Numeric mode, in a process of its own

RULES, WIDTHS = ("bsp", "asp", "ssp:1", "wasp:2", "auto:5"), (32, 16, 4)


def _linear(rate):
    import keras

    layer = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


def _data(count):
    import numpy as np

    x = np.random.default_rng(3).normal(size=(count, 4)).astype("float32")
    return x, x[:, :1] * x[:, 1:2]


def delayed():
    """Three workers in rounds: the weights, and those of stochastic gradient descent with a delay, by hand."""
    import numpy as np

    from hps_keras.coordination.scheduling import permutation
    from hps_keras.data.dataset import ElasticDataset
    from hps_keras.simulate.numeric import train

    x, y = _data(84)
    found = {}
    for compensation in (0.0, 0.5):
        model = _linear(0.05)
        workers = [Worker(1.0, batch_size=4, jitter=0.0, link=Link(100.0))] * 3
        rule = f"bsp,compensation={compensation}" if compensation else "bsp"
        report = train(model, ElasticDataset(x, y, batch_size=4, seed=9), workers, rule, epochs=2, overlap=True)
        now = before = np.ones((4, 1))
        late, steps = np.ones((4, 1)), 0  # without the delay, to see that there is one
        for number in (1, 2):
            order = permutation(84, 9, number)
            for start in range(0, 84, 12):
                steps += 1
                a, b = (v[order[start : start + 12]].astype("float64") for v in (x, y))
                gradient = 2 * a.T @ (a @ before - b) / 12
                gradient = gradient + compensation * gradient * gradient * (now - before)
                step = now - 0.05 * gradient
                # The first two wait for their answers; from then on the next step begins before this one's has come.
                before, now = (step if steps <= 2 else now), step
                late = late - 0.05 * 2 * a.T @ (a @ late - b) / 12
            before = now
        weights = np.asarray(model.get_weights()[0], "float64")
        found[rule] = {
            "apart": float(np.abs(weights - now).max()),
            "undelayed": float(np.abs(late - now).max()),
            "staleness": report.staleness,
        }
    return found


def followed():
    """Whether each gradient is of what its worker had at the version that its push names, in all rules and widths."""
    import keras
    import numpy as np

    from hps_keras.simulate.numeric import Numeric

    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 16)).astype("float32")
    data = x, (x @ rng.normal(size=(16, 3))).argmax(1).astype("int32")
    # Steps that vary: "auto" takes WASP, and then rounds again.
    workers = crew(jitter=0.3, step=1.0, batch_size=8, link=Link(2e4))
    found = {}
    for rule in RULES:
        for bits in WIDTHS:
            keras.utils.set_random_seed(7)
            layers = [keras.Input((16,)), keras.layers.Dense(96, "tanh"), keras.layers.Dense(3)]
            model = keras.Sequential(layers)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.05), loss)
            numeric = Numeric(model, data, 4, parse(rule), seed=4)
            had, seen = _had(numeric), []
            gradient, take = numeric._gradient, numeric.take

            def watched(parameters, batch, into, gradient=gradient, seen=seen):
                seen.append(parameters.copy())
                return gradient(parameters, batch, into)

            def taken(push, *rest, take=take, seen=seen, had=had):
                take(push, *rest)
                present = max(version for worker, version in had if worker == push.worker)
                seen[-1] = (np.array_equal(seen[-1], had[push.worker, push.version]), push.version < present)

            watched.present = None
            numeric._gradient, numeric.take = watched, taken
            scenario = Scenario(
                workers, parse(rule), parameters=1923, samples=600, epochs=2, pull_bits=bits, overlap=True
            )
            report = simulate(scenario, numeric)
            numeric.finish()
            found[f"{rule} {bits}"] = {
                "wrong": sum(not right for right, _ in seen),
                "late": sum(late for _, late in seen),
                "steps": len(seen),
                "notes": list(report.notes),
                "memory": len(numeric._holdings._free) + len(numeric._holdings._earlier),
            }
    return found


def _had(numeric):
    """What each worker was given, by its version."""
    holdings, had = numeric._holdings, {}
    give = holdings.give

    def given(worker, exact):
        give(worker, exact)
        for one in holdings.workers:  # under 32 bits in rounds one copy is everybody's
            if one == worker or (holdings._bits < 32 and holdings._shared):
                version = numeric._server.version
                had[one, version] = holdings.of(one, version).copy()

    holdings.give = given
    for worker in holdings.workers:
        had[worker, 0] = holdings.of(worker, 0).copy()
    return had


numerically = [pytest.mark.slow, pytest.mark.timeout(900)]


def numeric(function):
    for mark in numerically:
        function = mark(function)
    return function


@pytest.fixture(scope="module")
def found():
    """What the functions above returned, in one process."""
    ended = run([delayed, followed], 1, init={"skip": True}, timeout=800)
    return {name: by_rank[0] for name, by_rank in ended.results.items()}


@numeric
@pytest.mark.parametrize("rule", ["bsp", "bsp,compensation=0.5"])
def test_rounds_are_gradient_descent_with_a_delay(found, rule):
    seen = found["delayed"][rule]
    assert seen["apart"] < 1e-5 < 1e-3 < seen["undelayed"]
    assert seen["staleness"] == {"0": 3 * 4, "1": 3 * 10}


@numeric
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_of_what_workers_had_when_they_began(found, rule, bits):
    seen = found["followed"][f"{rule} {bits}"]
    assert seen["late"] > 30 and (seen["steps"] == 2 * 75 or rule == "auto:5"), "auto changes batches"
    assert seen["wrong"] == 0, "gradients of parameters that their worker did not have"
    assert seen["memory"] <= 2 * len(SPEEDS), "memory is used again"
    if rule == "auto:5":
        taken = [note.partition(":")[0] for note in seen["notes"] if note.startswith("auto takes")]
        assert taken == ["auto takes wasp", "auto takes bsp"]

"""Sizes and models that follow measurements, in virtual time: the coordinator decides as it does for real workers."""

import random
from collections import Counter

import pytest

from hps_keras.batches.shares import Proportional, Resizing, solve
from hps_keras.consistency import ASP, BSP, WASP, Auto
from hps_keras.simulate import Failure, Scenario, Server, Slowdown, Worker, simulate
from hps_keras.simulate.engine import NoArithmetic

SPEEDS = (1.0, 1.0, 0.5, 0.25)


class Notes(NoArithmetic):
    """Notes each push: its worker and its lease; and each change of the model."""

    def __init__(self):
        self.pushes, self.models, self.passes = [], [], []

    def begin_pass(self, number):
        self.passes.append(Counter())

    def take(self, push, factor, first, lease):
        self.pushes.append((push.worker, lease.samples))
        self.passes[-1].update(range(lease.start, lease.start + lease.samples))

    def switch(self, model):
        self.models.append((len(self.pushes), str(model)))


def machines(jitter, speeds=SPEEDS, **more):
    return tuple(Worker(0.02 / speed, 32, jitter=jitter, **more) for speed in speeds)


def run(scenario):
    notes = Notes()
    return simulate(scenario, notes), notes


def ideal(speeds, total=128):
    everyone = range(len(speeds))
    times = {w: Proportional(1 / speeds[w]) for w in everyone}
    return solve(times, total, dict.fromkeys(everyone, 1), dict.fromkeys(everyone, total))


def sizes_of_round(notes, number):
    return dict(notes.pushes[len(SPEEDS) * number : len(SPEEDS) * (number + 1)])


def test_shares_reach_most_of_the_bound_from_unknown_speeds():
    equal, _ = run(Scenario(machines(0.05), BSP(), samples=60_000, epochs=2, seed=1))
    shares, notes = run(Scenario(machines(0.05), BSP(), samples=60_000, epochs=2, seed=1, resizing=Resizing()))
    assert shares.samples_per_second / equal.samples_per_second > 0.9 * 2.75
    assert sizes_of_round(notes, 0) == dict.fromkeys(range(4), 32)
    for number in range(30, 400):
        assert sum(sizes_of_round(notes, number).values()) == 128
        for worker, size in sizes_of_round(notes, number).items():
            assert abs(size - ideal(SPEEDS)[worker]) <= max(2, 0.1 * ideal(SPEEDS)[worker])
    assert shares.notes and "to finish together" in shares.notes[0]


@pytest.mark.parametrize("worker", range(4))
@pytest.mark.parametrize(("number", "seed"), [(60, 0), (100, 1), (130, 2), (200, 3)])
def test_a_worker_that_gets_slower_is_followed_within_thirty_steps(worker, number, seed):
    """A co-tenant takes half of a worker's CPU."""
    before = Scenario(machines(0.05), BSP(), samples=60_000, seed=seed, resizing=Resizing())
    seconds = 0.03 * number
    _, notes = run(Scenario(before.workers, BSP(), samples=60_000, slowdowns=(Slowdown(worker, seconds, 1e9, 0.5),),
                            seed=seed, resizing=Resizing()))  # fmt: skip
    speeds = [v * (0.5 if rank == worker else 1) for rank, v in enumerate(SPEEDS)]
    wanted, begun = ideal(speeds), int(seconds / 0.0315)
    reached = sizes_of_round(notes, begun + 34)  # the round in which it began is known to a few
    for rank, size in reached.items():
        assert abs(size - wanted[rank]) <= max(1.0, 0.1 * wanted[rank]), (reached, wanted)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", [BSP(), ASP(), WASP(5), Auto()], ids=str)
@pytest.mark.parametrize("shares", ["auto", "always"])
def test_each_sample_is_seen_once_a_pass_although_a_worker_leaves(model, shares, seed):
    """Four workers of random speeds and sizes; one is lost in the second pass."""
    rng = random.Random(seed)
    workers = tuple(Worker(rng.uniform(0.01, 0.1), rng.randint(1, 9), jitter=0.3) for _ in range(4))
    resizing = Resizing(shares=shares)
    whole, _ = run(Scenario(workers, model, samples=997, epochs=3, seed=seed, resizing=resizing))
    lost = Failure(rng.randrange(4), whole.epoch_seconds[0] + 0.5 * whole.epoch_seconds[1])
    report, notes = run(Scenario(workers, model, samples=997, epochs=3, failures=(lost,), seed=seed, resizing=resizing))
    assert [row["lost"] for row in report.workers].count(True) == 1
    assert notes.passes == [Counter(dict.fromkeys(range(997), 1))] * 3


def test_limits_bound_every_batch_and_the_others_take_the_rest():
    workers = [*machines(0.05, SPEEDS[1:]), Worker(0.02, 32, limit=10)]
    _, notes = run(Scenario(tuple(workers), BSP(), samples=6_000, resizing=Resizing()))
    rounds = [sizes_of_round(notes, number) for number in range(40)]
    assert all(sizes[3] <= 10 and sum(sizes.values()) == 128 for sizes in rounds)


def test_accumulating_workers_take_their_share_in_pieces():
    workers = [*machines(0.05, SPEEDS[1:]), Worker(0.02, 32, limit=10)]
    _, notes = run(Scenario(tuple(workers), BSP(), samples=30_000, resizing=Resizing(mode="accumulate")))
    assert sizes_of_round(notes, 100)[3] > 40


@pytest.mark.parametrize(("jitter", "expected"), [(0.0, "bsp"), (0.4, "wasp:50")])
def test_auto_takes_what_suits_the_jitter_and_says_why(jitter, expected):
    report, notes = run(Scenario(machines(jitter), Auto(), samples=30_000, seed=1))
    assert [name for _, name in notes.models] == ([] if expected == "bsp" else [expected])
    why = [note for note in report.notes if "samples/s with bsp" in note]
    assert why and why[0].startswith("auto takes " + expected.partition(":")[0])


@pytest.mark.parametrize("push_seconds", [0.0, 1e-3])
@pytest.mark.parametrize("jitter", [0.05, 0.4])
def test_auto_comes_within_five_percent_of_the_better_model(jitter, push_seconds):
    server = Server(push_seconds=push_seconds)

    def speed(model, resizing=None):
        scenario = Scenario(machines(jitter), model, server, samples=60_000, epochs=3, seed=2, resizing=resizing)
        report, notes = run(scenario)
        return (notes, report) if isinstance(model, Auto) else report.samples_per_second

    better = max(speed(BSP(), Resizing()), speed(WASP(50)))
    notes, report = speed(Auto())
    # The first 30 steps, in which it measures, apart: what the other epochs took.
    later = 2 * 60_000 / sum(report.epoch_seconds[1:])
    assert later > 0.95 * better, (later, better, notes.models)


def test_auto_changes_its_mind_only_at_syncs_and_epoch_ends():
    """Half the machines' scatter goes away in the middle of the run: back to BSP, at a forced sync."""
    slow = tuple(Slowdown(1, start, start + 0.04, 0.3) for start in [0.2 * n for n in range(60)])
    report, notes = run(Scenario(machines(0.4), Auto(WASP(10)), samples=60_000, epochs=2, slowdowns=slow, seed=3))
    assert notes.models[0][1] == "wasp:10"
    assert notes.models[0][0] % 4 == 0, "at a round's end"
    assert len(notes.models) <= 3, "it does not flip to and fro"
    assert report.samples == 120_000

"""Sizes add up, stay within bounds, finish together, and move when there is a reason, seldom otherwise."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps_keras.batches.shares import BatchSizes, Proportional, Resizing, solve
from hps_keras.errors import ConfigurationError

ANY = 10**9
SPEEDS = (1.0, 1.0, 0.5, 0.25)

bounded = st.lists(
    st.tuples(
        st.floats(0, 5),  # fixed
        st.floats(1e-3, 10),  # per sample
        st.integers(0, 3),  # least
        st.integers(0, 40),  # beyond it
    ),
    min_size=1,
    max_size=6,
)


def longest(times: Mapping[int, Proportional], sizes: Mapping[int, int]) -> float:
    return max(times[w].fixed + times[w].per_sample * n for w, n in sizes.items())


# -- the solver --


@settings(deadline=None)
@given(bounded, st.floats(0, 1))
def test_sizes_add_up_within_bounds_and_repeat(machines, where: float) -> None:
    times = {w: Proportional(c, a) for w, (a, c, _, _) in enumerate(machines)}
    least = {w: low for w, (_, _, low, _) in enumerate(machines)}
    most = {w: low + more for w, (_, _, low, more) in enumerate(machines)}
    total = round(sum(least.values()) + where * (sum(most.values()) - sum(least.values())))
    sizes = solve(times, total, least, most)
    assert sum(sizes.values()) == total
    assert all(least[w] <= sizes[w] <= most[w] for w in times)
    again = solve(dict(reversed(times.items())), total, least, most)
    assert again == sizes


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 10), st.integers(1, 8)), min_size=1, max_size=4), st.data())
def test_no_division_is_better_by_more_than_a_sample(machines, data) -> None:
    times = {w: Proportional(c, a) for w, (a, c, _) in enumerate(machines)}
    most = {w: n for w, (_, _, n) in enumerate(machines)}
    total = data.draw(st.integers(len(machines), sum(most.values())))
    sizes = solve(times, total, dict.fromkeys(times, 1), most)
    choices = itertools.product(*(range(1, n + 1) for n in most.values()))
    best = min(longest(times, dict(enumerate(c))) for c in choices if sum(c) == total)
    assert longest(times, sizes) <= best + max(t.per_sample for t in times.values()) + 1e-9


def test_without_a_fixed_part_sizes_are_proportional_to_speed() -> None:
    times = {w: Proportional(1 / v) for w, v in enumerate((4.0, 2.0, 1.0, 1.0))}
    assert solve(times, 256, dict.fromkeys(times, 1), dict.fromkeys(times, 256)) == {0: 128, 1: 64, 2: 32, 3: 32}


def test_a_fixed_part_is_taken_off_first() -> None:
    times = {0: Proportional(1.0), 1: Proportional(1.0, fixed=10.0)}
    assert solve(times, 50, {0: 1, 1: 1}, {0: 50, 1: 50}) == {0: 30, 1: 20}


def test_a_bound_passes_samples_on_in_proportion() -> None:
    times = {w: Proportional(1 / v) for w, v in enumerate((4.0, 2.0, 2.0))}
    assert solve(times, 80, dict.fromkeys(times, 1), {0: 20, 1: 80, 2: 80}) == {0: 20, 1: 30, 2: 30}


def test_ties_go_to_the_lower_rank() -> None:
    times = {w: Proportional(1.0) for w in (3, 1, 2)}
    assert solve(times, 8, dict.fromkeys(times, 1), dict.fromkeys(times, 8)) == {1: 3, 2: 3, 3: 2}


@pytest.mark.parametrize("total, least, most", [(1, 1, 5), (11, 1, 5), (8, 6, 5)])
def test_bounds_that_cannot_hold_the_total_are_refused(total: int, least: int, most: int) -> None:
    times = {0: Proportional(1.0), 1: Proportional(1.0)}
    with pytest.raises(ValueError, match="do not fit"):
        solve(times, total, dict.fromkeys(times, least), dict.fromkeys(times, most))


# -- options --


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mode": "grow"}, "mode='grow': use one of 'cap', 'accumulate'"),
        ({"shares": "often"}, "shares='often'.*'never'"),
        ({"dead_band": 1.0}, "dead_band=1.0.*from 0 to below 1"),
        ({"dead_band": -0.1}, "dead_band=-0.1"),
        ({"dead_band": float("nan")}, "dead_band=nan"),
        ({"dead_band": "wide"}, "dead_band='wide'"),
        ({"settle": 0}, "settle=0.*1 or more"),
        ({"settle": 2.5}, "settle=2.5"),
        ({"unit": True}, "unit=True"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Resizing(**options)


def test_options_travel() -> None:
    options = Resizing(mode="accumulate", shares="never", dead_band=0.1, settle=3, unit=8)
    assert Resizing.from_json(options.to_json()) == options


# -- rounds --


class Machines:
    """Workers whose steps take fixed + samples / (100 speed) seconds, with noise."""

    def __init__(self, sizes: BatchSizes, speeds: Sequence[float], jitter: float, seed: int = 0, fixed: float = 0.0):
        self.sizes, self.speeds, self.jitter, self.fixed = sizes, list(speeds), jitter, fixed
        self._random = np.random.default_rng(seed)

    def seconds(self, worker: int, samples: int) -> float:
        return self.fixed + samples / self.speeds[worker] / 100

    def work(self, given: Mapping[int, int]) -> None:
        for worker, samples in given.items():
            factor = max(0.05, 1 + self.jitter * self._random.standard_normal())
            self.sizes.observe(worker, samples, self.seconds(worker, samples) * factor)

    def rounds(self, count: int, workers: Iterable[int] | None = None) -> list[dict[int, int]]:
        present = list(range(len(self.speeds)) if workers is None else workers)
        seen = []
        for _ in range(count):
            seen.append(self.sizes.round(present, ANY))
            self.work(seen[-1])
        return seen

    def right(self, workers: Iterable[int] | None = None) -> dict[int, int]:
        present = range(len(self.speeds)) if workers is None else workers
        times = {w: Proportional(1 / self.speeds[w] / 100, self.fixed) for w in present}
        return solve(times, self.sizes.total, dict.fromkeys(times, 1), dict.fromkeys(times, self.sizes.total))

    def efficiency(self, given: Mapping[int, int]) -> float:
        """Time of the right sizes over the time of these."""
        right = self.right(given)
        best, found = (max(self.seconds(w, n) for w, n in s.items()) for s in (right, given))
        return best / found


def four(jitter: float = 0.05, seed: int = 0, fixed: float = 0.0, **options) -> Machines:
    sizes = BatchSizes(Resizing(**options), dict.fromkeys(range(4), 64))
    return Machines(sizes, SPEEDS, jitter, seed, fixed)


def moves(rounds: Sequence[Mapping[int, int]]) -> int:
    return sum(a != b for a, b in itertools.pairwise(rounds))


def near(found: Mapping[int, int], right: Mapping[int, int], share: float) -> bool:
    return all(abs(found[w] - n) <= max(share * n, 1) for w, n in right.items())


@pytest.mark.parametrize("fixed", [0.0, 0.2])
@pytest.mark.parametrize("jitter, share, worth", [(0.0, 0.02, 0.98), (0.05, 0.06, 0.95), (0.4, 0.25, 0.8)])
def test_unknown_speeds_are_found_in_thirty_rounds(jitter: float, share: float, worth: float, fixed: float) -> None:
    gained = []
    for seed in range(10):
        machines = four(jitter, seed, fixed)
        assert machines.rounds(1) == [dict.fromkeys(range(4), 64)]
        found = machines.rounds(60)[-1]
        assert near(found, machines.right(), share), (seed, found)
        gained.append(machines.efficiency(found))
    assert np.mean(gained) > worth


def test_sizes_come_closer_to_the_right_ones_with_time() -> None:
    machines = [four(0.05, seed) for seed in range(20)]
    early = [m.efficiency(m.rounds(8)[-1]) for m in machines]
    late = [m.efficiency(m.rounds(142)[-1]) for m in machines]
    assert np.mean(late) > max(0.99, np.mean(early) + 0.005)  # within the dead band both
    assert min(late) > 0.96


def test_sizes_hardly_move_once_they_are_right() -> None:
    moved = []
    for seed in range(10):
        machines = four(0.05, seed)
        machines.rounds(100)
        rounds = machines.rounds(500)
        moved.append(moves(rounds))
        assert all(near(r, machines.right(), 0.1) for r in rounds), seed
    assert max(moved) <= 4 and np.mean(moved) <= 2, moved


def test_the_dead_band_is_the_users() -> None:
    for dead_band, factor, moving in ((0.05, 0.85, True), (0.2, 0.85, False), (0.2, 0.6, True)):
        machines = four(0.0, dead_band=dead_band)
        machines.rounds(200)
        machines.speeds[0] *= factor
        assert (moves(machines.rounds(60)) > 0) is moving, (dead_band, factor)


def test_what_noise_explains_moves_nothing() -> None:
    # Equal machines: what five steps each tell apart at 40 % jitter is chance.
    kept = 0
    for seed in range(20):
        sizes = BatchSizes(Resizing(), dict.fromkeys(range(4), 64))
        kept += moves(Machines(sizes, (1.0,) * 4, 0.4, seed).rounds(8)) == 0
    assert kept >= 14


def test_small_batches_do_not_flicker_between_two_sizes() -> None:
    sizes = BatchSizes(Resizing(), dict.fromkeys(range(4), 4))
    machines = Machines(sizes, (1.0, 0.83, 0.6, 0.45), 0.05)
    machines.rounds(100)
    assert moves(machines.rounds(500)) <= 3


@pytest.mark.parametrize("worker, factor", [(0, 0.5), (2, 0.5), (3, 2.0)])
def test_a_change_of_speed_is_followed_within_thirty_steps(worker: int, factor: float) -> None:
    for seed in range(10):
        machines = four(0.05, seed)
        machines.rounds(100)
        machines.speeds[worker] *= factor
        found = machines.rounds(30)[-1]
        assert near(found, machines.right(), 0.1), (seed, found)


def test_nothing_moves_before_enough_steps_were_seen() -> None:
    machines = four(0.0, settle=8)
    assert moves(machines.rounds(8)) == 0
    assert machines.rounds(1)[0] == machines.right()


def test_outliers_move_nothing() -> None:
    machines = four(0.02)
    machines.rounds(100)
    before = machines.sizes.round(range(4), ANY)
    for worker in (0, 3):
        machines.sizes.observe(worker, before[worker], 100 * machines.seconds(worker, before[worker]))
        assert machines.rounds(30)[-1] == before


def test_a_round_costs_little_for_many_workers_too() -> None:
    speeds = np.random.default_rng(0).uniform(0.2, 1, 64)
    machines = Machines(BatchSizes(Resizing(), dict.fromkeys(range(64), 32)), speeds, 0.05)
    found = machines.rounds(40)[-1]
    assert sum(found.values()) == 64 * 32
    assert machines.efficiency(found) > 0.85
    lines = machines.sizes.news()
    assert lines and all(len(line) < 200 and "on 64 workers" in line for line in lines)


def test_a_size_that_makes_a_worker_slower_is_given_up() -> None:
    machines = four(0.05)
    slow = machines.seconds
    # Beyond 75 samples worker 0 pages: each costs six times as much.
    machines.seconds = lambda w, n: slow(w, n) if w or n <= 75 else slow(w, 75 + 6 * (n - 75))  # type: ignore
    sizes = [r[0] for r in machines.rounds(100)]
    assert max(sizes) > 75  # it was tried
    assert all(n <= 80 for n in sizes[40:])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from(["auto", "always", "never"]), st.sampled_from([1, 8]))
def test_whatever_happens_sizes_add_up_within_limits(seed: int, shares: str, unit: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 6))
    given_sizes = {w: int(random.integers(1, 65)) for w in range(count)}
    sizes = BatchSizes(Resizing(shares=shares, unit=unit), given_sizes)
    machines = Machines(sizes, random.uniform(0.1, 1, count), float(random.uniform(0, 0.4)), seed)
    limits: dict[int, int] = {}
    for _ in range(60):
        present = sorted(random.choice(count, int(random.integers(1, count + 1)), replace=False).tolist())
        if random.random() < 0.3:
            worker = int(random.integers(count))
            limits[worker] = int(random.integers(sizes.total, 2 * sizes.total))
            if random.random() < 0.5:
                limits[worker] = int(random.integers(1, sizes.total + 1))
            firmly(sizes, worker, limits[worker], 2**30)
        room = {w: min(limits.get(w, sizes.total), sizes.total) for w in present}
        left = int(random.integers(1, 3 * sizes.total))
        if sum(room.values()) < sizes.total and len(present) == count:
            with pytest.raises(ConfigurationError):
                sizes.round(present, left)
            limits.pop(worker)
            sizes.limit(worker, 0, 0)
            continue
        found = sizes.round(present, left)
        assert list(found) == present
        assert sum(found.values()) == min(sizes.total, sum(room.values()), left)
        assert all(n <= room[w] for w, n in found.items())
        assert all(found.values()) or left < len(present) or sizes.total < len(present)
        machines.work(found)
        assert 1 <= sizes.alone(present[0], left) <= left


# -- last rounds, those who come and go --


def test_a_last_round_is_divided_like_a_full_one() -> None:
    machines = four(0.0)
    machines.rounds(20)
    full = machines.sizes.round(range(4), ANY)
    half = machines.sizes.round(range(4), 128)
    assert sum(half.values()) == 128
    assert near(half, {w: round(n / 2) for w, n in full.items()}, 0.05)
    assert machines.sizes.round(range(4), ANY) == full  # and is no new size
    assert machines.sizes.round(range(4), 4) == dict.fromkeys(range(4), 1)
    assert machines.sizes.round(range(4), 2) == {0: 1, 1: 1, 2: 0, 3: 0}


def test_the_global_batch_stays_when_workers_leave_and_come_back() -> None:
    machines = four(0.02)
    machines.rounds(60)
    machines.sizes.news()
    without = machines.rounds(1, [0, 1, 3])[0]
    assert sum(without.values()) == 256
    assert near(without, machines.right([0, 1, 3]), 0.05)
    assert "worker 2 left" in "; ".join(machines.sizes.news())
    back = machines.rounds(1)[0]
    assert near(back, machines.right(), 0.05)
    assert "worker 2 came" in "; ".join(machines.sizes.news())


def test_a_newcomer_counts_with_the_mean_speed_of_the_others() -> None:
    sizes = BatchSizes(Resizing(), dict.fromkeys(range(4), 64))
    machines = Machines(sizes, (*SPEEDS, 0.1), 0.0)
    machines.rounds(20, range(4))
    first = machines.rounds(1)[0]
    mean = sum(SPEEDS) / 4
    assert near(first, {w: round(256 * v / (5 * mean)) for w, v in enumerate((*SPEEDS, mean))}, 0.03)
    assert near(machines.rounds(30)[-1], machines.right(), 0.05)


def test_what_is_left_when_those_with_memory_have_gone_is_smaller_and_said() -> None:
    sizes = BatchSizes(Resizing(), {0: 64, 1: 64}, limits={1: 80}, memory={1: 2**29})
    assert sizes.round([0, 1], ANY) == {0: 64, 1: 64}
    assert sizes.round([1], ANY) == {1: 80}
    assert "80 together instead of 128" in "; ".join(sizes.news())
    sizes.limit(1, 100, 2**29)
    assert sizes.round([1], ANY) == {1: 100}
    sizes.limit(1, 1000, 2**32)
    assert sizes.round([1], ANY) == {1: 128}
    assert sizes.round([0], ANY) == {0: 128}


# -- memory --


def test_a_limit_bounds_the_first_round_and_says_why() -> None:
    sizes = BatchSizes(Resizing(), dict.fromkeys(range(3), 60), limits={2: 20}, memory={2: 3 * 2**20})
    assert sizes.round(range(3), ANY) == {0: 80, 1: 80, 2: 20}
    line = "; ".join(sizes.news())
    assert line and "worker 2 has room for 20 samples in 3,145,728 bytes (3 MiB)" in line
    assert sizes.news() == []


def test_a_limit_that_falls_takes_effect_at_once_and_one_that_rises_is_used() -> None:
    machines = four(0.0)
    machines.rounds(20)
    machines.sizes.limit(0, 90, 2**30)  # within the dead band
    found = machines.rounds(1)[0]
    assert found[0] == 90 and sum(found.values()) == 256
    machines.sizes.limit(0, 40, 2**29)
    found = machines.rounds(1)[0]
    assert found[0] == 40 and sum(found.values()) == 256
    machines.sizes.limit(0, 200, 2**31)
    assert near(machines.rounds(10)[-1], machines.right(), 0.02)


def test_a_limit_that_trembles_is_obeyed_and_not_told_each_time() -> None:
    machines, lines = four(0.02), []
    for step in range(200):
        limit = 60 - step % 3
        machines.sizes.limit(0, limit, 2**30 + step)
        assert machines.rounds(1)[0][0] <= limit
        lines += machines.sizes.news()
    assert 1 <= len(lines) <= 6


def firmly(sizes: BatchSizes, worker: int, limit: int, memory: int) -> None:
    """Tells a limit so often that it is no guess any more."""
    for _ in range(sizes.resizing.settle):
        sizes.limit(worker, limit, memory)


def test_limits_that_are_guesses_refuse_nothing() -> None:
    """Before steps have shown what a batch needs, a worker trains in pieces what it has no room for."""
    sizes = BatchSizes(Resizing(), {1: 64, 2: 64, 3: 64}, limits={1: 50, 2: 15, 3: 50})
    assert sizes.round([1, 2, 3], ANY) == {1: 64, 2: 64, 3: 64}
    for worker, limit in ((1, 200), (2, 30), (3, 200)):
        firmly(sizes, worker, limit, 2**30)
    assert sizes.round([1, 2, 3], ANY) == {1: 81, 2: 30, 3: 81}


def test_limits_that_cannot_hold_the_global_batch_are_refused_with_the_remedy() -> None:
    sizes = BatchSizes(Resizing(), {1: 64, 2: 64, 3: 64})
    for worker, limit in ((1, 70), (2, 15), (3, 80)):
        firmly(sizes, worker, limit, 800 * 2**20)
    with pytest.raises(ConfigurationError) as raised:
        sizes.round([1, 2, 3], ANY)
    text = str(raised.value)
    assert "worker 2 has room for 15 samples in 838,860,800 bytes (800 MiB)" in text
    assert "165 samples together" in text and "192" in text
    assert "smaller batch_size" in text and "mode='accumulate'" in text and "more memory" in text


def test_where_batches_are_accumulated_limits_bound_no_share() -> None:
    sizes = BatchSizes(Resizing(mode="accumulate"), {0: 64, 1: 64}, limits={0: 8, 1: 8})
    assert sizes.round([0, 1], ANY) == {0: 64, 1: 64}
    assert sizes.alone(0, ANY) == 64


def test_without_shares_sizes_stay_as_given_within_limits() -> None:
    sizes = BatchSizes(Resizing(shares="never"), {0: 32, 1: 64, 2: 64})
    machines = Machines(sizes, (1.0, 0.1, 1.0), 0.0)
    assert machines.rounds(50)[-1] == {0: 32, 1: 64, 2: 64}
    sizes.limit(1, 16, 2**30)
    assert sizes.round(range(3), ANY) == {0: 48, 1: 16, 2: 96}


# -- compiled sizes --


def test_sizes_are_multiples_where_each_costs_a_compilation() -> None:
    sizes = BatchSizes(Resizing(unit=8), {0: 64, 1: 64, 2: 64, 3: 67})
    machines = Machines(sizes, SPEEDS, 0.05)
    rounds = machines.rounds(200)
    assert all(sum(r.values()) == 259 for r in rounds)
    assert all(r[w] % 8 == 0 for r in rounds for w in (0, 1, 2)) and all(r[3] % 8 == 3 for r in rounds)
    assert all(len({r[w] for r in rounds}) <= 5 for w in range(4))
    assert machines.efficiency(rounds[-1]) > 0.75


@pytest.mark.parametrize("unit, moving", [(1, True), (8, False)])
def test_only_sizes_that_cost_no_compilation_are_put_right_within_the_dead_band(unit: int, moving: bool) -> None:
    machines = Machines(BatchSizes(Resizing(unit=unit, dead_band=0.3), {0: 64, 1: 64}), (1.0, 0.8), 0.0)
    assert (moves(machines.rounds(100)) > 0) is moving


def test_a_unit_that_does_not_fit_is_given_up() -> None:
    sizes = BatchSizes(Resizing(unit=64), {0: 30, 1: 30})
    assert sizes.round([0, 1], ANY) == {0: 30, 1: 30}


# -- asynchronous models --


def test_asynchronous_batches_stay_as_given_within_limits() -> None:
    sizes = BatchSizes(Resizing(), {0: 64, 1: 64}, limits={1: 20}, memory={1: 2**20})
    machines = Machines(sizes, (1.0, 0.1), 0.0)
    for _ in range(20):
        machines.work({w: sizes.alone(w, ANY) for w in (0, 1)})
    assert (sizes.alone(0, ANY), sizes.alone(1, ANY), sizes.alone(0, 7)) == (64, 20, 7)
    assert sizes.news() == ["batches of 20 instead of 64: worker 1 has room for 20 samples in 1,048,576 bytes (1 MiB)"]
    assert sizes.news() == []
    sizes.limit(1, 0, 0)
    assert sizes.alone(1, ANY) == 64


def test_asynchronous_batches_follow_speed_for_those_who_ask() -> None:
    sizes = BatchSizes(Resizing(shares="always"), {0: 64, 1: 64}, limits={1: 40})
    machines = Machines(sizes, (1.0, 0.25), 0.0)
    for _ in range(20):
        machines.work({w: sizes.alone(w, ANY) for w in (0, 1)})
    assert sizes.alone(0, ANY) == pytest.approx(102, abs=1)
    assert sizes.alone(1, ANY) == pytest.approx(26, abs=1)
    sizes.limit(0, 10, 2**20)  # no room for the sum: each stays within its own
    for _ in range(3):
        assert sizes.alone(0, ANY) == 10
        assert 1 <= sizes.alone(1, ANY) <= 40


def test_looking_ahead_moves_nothing() -> None:
    machines = four(0.0)
    machines.rounds(4)
    before = machines.sizes.round(range(4), ANY)
    machines.work(before)
    assert machines.sizes.ideal(range(4)) == machines.right()
    assert machines.sizes.equal(range(4)) == dict.fromkeys(range(4), 64)
    assert machines.sizes.mean == 64


def test_short_batches_of_a_last_round_are_not_measured() -> None:
    sizes = BatchSizes(Resizing(), {0: 40, 1: 40})
    for _ in range(20):
        sizes.round([0, 1], 10**6)
        sizes.observe(0, 40, 0.4)
        sizes.observe(1, 40, 0.4)
        sizes.round([0, 1], 8)
        sizes.observe(0, 4, 0.2)  # they would say that a step costs 0.18 s whatever its size
        sizes.observe(1, 4, 0.04)
    assert sizes.times[0].fixed == sizes.times[1].fixed == 0
    assert sizes.round([0, 1], 10**6) == {0: 40, 1: 40}


def test_what_was_not_tried_yet_is_no_lack_of_memory() -> None:
    """A pass of few samples never shows more than a small batch."""
    sizes = BatchSizes(Resizing(), {0: 128, 1: 128})
    for worker in (0, 1):
        for _ in range(9):
            sizes.limit(worker, 66, 2**33, capacity=10_000)
    assert sizes.round([0, 1], 100) == {0: 50, 1: 50}
    assert sizes.round([0, 1], ANY) == {0: 128, 1: 128}


def test_news_of_several_workers_is_told_of_each_but_not_of_each_tremble() -> None:
    sizes = BatchSizes(Resizing(), {0: 64, 1: 64}, limits={0: 20, 1: 30})
    sizes.alone(0, ANY)
    sizes.alone(1, ANY)
    assert [line[:26] for line in sizes.news()] == ["batches of 20 instead of 6", "batches of 30 instead of 6"]
    for step in range(100):
        sizes.limit(0, 20 + step % 2, 0)
        sizes.alone(0, ANY)
    assert sizes.news() == []


def test_a_worker_whose_time_hangs_little_on_its_batch_is_named() -> None:
    machines = four(0.0)
    whole = machines.seconds
    machines.seconds = lambda w, n: 10.0 + 0.001 * n if w == 3 else whole(w, n)  # type: ignore
    machines.rounds(40)
    assert any("all wait for worker 3" in line and "WASP" in line for line in machines.sizes.news())


def test_sizes_do_not_wander_where_nothing_is_won() -> None:
    machines = four(0.01)
    machines.seconds = lambda w, n: 10.0 + 0.0001 * n  # type: ignore
    sizes = machines.rounds(300)
    assert all(round_ == sizes[0] for round_ in sizes)

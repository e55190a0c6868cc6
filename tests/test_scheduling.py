"""Leases of one shuffled stream: every sample of a pass is trained once, whoever is fast, slow or gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from referee import Referee

from hps_keras.consistency import ASP, BSP, SSP, WASP
from hps_keras.coordination.decisions import Answer, Grant, Log
from hps_keras.coordination.scheduling import Lease, Leases, permutation
from hps_keras.errors import ConfigurationError


def positions(leases):
    return Counter(p for lease in leases for p in range(lease.start, lease.start + lease.samples))


# -- the order --


@given(st.integers(0, 300), st.integers(0, 2**32), st.integers(1, 50))
def test_the_order_is_a_permutation(samples, seed, number):
    order = permutation(samples, seed, number)
    assert order.shape == (samples,) and order.dtype == np.int32
    assert sorted(order.tolist()) == list(range(samples))


def test_each_pass_and_each_seed_has_an_order_of_its_own():
    orders = {tuple(permutation(100, seed, number)) for seed in range(5) for number in range(1, 6)}
    assert len(orders) == 25


def test_the_order_is_the_same_in_every_process():
    """Each worker makes it for itself: they must agree on what stands at a position."""
    code = "from hps_keras.coordination.scheduling import permutation; print(*permutation(50, 7, 3))"
    environ = {**os.environ, "PYTHONHASHSEED": "1"}
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environ)
    assert there.stdout.split() == [str(i) for i in permutation(50, 7, 3)], there.stderr


def test_the_order_does_not_change_from_release_to_release():
    """A run that goes on after an update, and ranks with different versions of NumPy, must see the same order."""
    assert permutation(12, 3, 1).tolist() == GOLDEN


GOLDEN = [5, 9, 0, 2, 11, 8, 4, 1, 3, 7, 6, 10]


# -- lending --


@st.composite
def sizes(draw):
    return draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))


@settings(max_examples=200)
@given(st.data(), sizes(), st.integers(1, 3))
def test_every_sample_is_trained_once_in_a_pass(data, sizes, passes):
    """Workers of any speed push, skip pushing, return what they will not train on, or are gone with all they have."""
    samples = data.draw(st.integers(len(sizes), 60))
    leases = Leases(samples, dict(enumerate(sizes)))
    present = list(range(len(sizes)))
    for number in range(1, passes + 1):
        first = leases.begin(present)
        assert leases.number == number and sorted(first) == present
        assert all(1 <= lease.samples <= sizes[w] for w, lease in first.items())
        lent = {w: [lease] for w, lease in first.items()}  # not pushed yet
        trained: list[Lease] = []
        working = list(present)
        while working:
            worker = data.draw(st.sampled_from(working))
            act = data.draw(st.sampled_from(["push"] * 6 + ["skip", "return", "go"]))
            if act == "go" and len(present) > 1:
                expected = sum(lease.samples for lease in lent[worker])
                assert leases.give_back(worker, None) == expected
                lent[worker] = []
                working.remove(worker)
                present.remove(worker)
                continue
            if act == "return":
                assert leases.give_back(worker, 1) == lent[worker].pop().samples
                working.remove(worker)
                continue
            if act == "push":
                leases.pushed(worker)
                trained += lent[worker]
                lent[worker] = []
            lease = leases.take(worker)
            if lease is None:
                assert leases.left == 0, "nobody hears that a pass is over while it is not"
                working.remove(worker)
            else:
                assert 1 <= lease.samples <= sizes[worker]
                lent[worker].append(lease)
        used = positions([*trained, *(lease for some in lent.values() for lease in some)])
        assert set(used.values()) <= {1} and set(used) <= set(range(samples))
        assert len(used) + leases.left == samples


def test_the_first_leases_are_for_all():
    """A pass shorter than one batch of each is shared out: a worker without a step could not end its epoch."""
    leases = Leases(10, {0: 64, 1: 64, 2: 2})
    assert leases.begin([0, 1, 2]) == {0: Lease(0, 3), 1: Lease(3, 3), 2: Lease(6, 2)}
    assert leases.left == 2 and leases.take(1) == Lease(8, 2) and leases.take(0) is None


def test_a_last_batch_is_as_long_as_what_is_left():
    leases = Leases(7, {0: 4})
    assert leases.begin([0]) == {0: Lease(0, 4)}
    assert leases.take(0) == Lease(4, 3)
    assert leases.take(0) is None and leases.take(0) is None


def test_what_comes_back_is_lent_first_and_in_pieces_that_fit():
    leases = Leases(20, {0: 8, 1: 3})
    assert leases.begin([0, 1]) == {0: Lease(0, 8), 1: Lease(8, 3)}
    assert leases.give_back(0, None) == 8
    assert leases.left == 17
    taken = [leases.take(1) for _ in range(7)]
    assert [*map(tuple, taken[:6])] == [(0, 3), (3, 3), (6, 2), (11, 3), (14, 3), (17, 3)] and taken[6] is None


def test_only_the_last_lease_of_a_worker_that_pauses_comes_back():
    """Those before it were trained on, although there was no gradient to push."""
    leases = Leases(9, {0: 3})
    leases.begin([0])
    leases.take(0)
    assert leases.give_back(0, 1) == 3
    assert leases.take(0) == Lease(3, 3)


def test_a_new_pass_forgets_what_is_open_of_the_last():
    leases = Leases(4, {0: 2, 1: 2})
    leases.begin([0, 1])  # the last steps of both have nothing to push
    assert leases.take(0) is None and leases.take(1) is None
    second = leases.begin([0, 1])
    leases.pushed(1)
    assert leases.give_back(0, None) == 2
    assert leases.take(1) == second[0] and leases.take(1) is None


@pytest.mark.parametrize(("samples", "workers"), [(0, 1), (2, 3)])
def test_fewer_samples_than_workers_are_refused(samples, workers):
    with pytest.raises(
        ConfigurationError, match=f"the ElasticDataset holds {samples} samples for {workers} workers: each needs one"
    ):
        Leases(samples, dict.fromkeys(range(workers), 8))


# -- through the coordinator; the referee keeps a ledger of all samples --


def lent(workers, samples, sizes, model=None, groups=1):
    job = Referee(workers, model or ASP(), groups=[groups] * 9, offers=[(samples, sizes)] * 9)
    job.begin()
    return job


def step(job, worker, **more):
    """Trains on what is in hand; returns the lease for the next step."""
    job.push(worker, job.ledger.hand[worker].samples, wants_lease=True, **more)
    return job.ledger.hand[worker]


def of_type(decisions, kind):
    return [d for d in decisions if isinstance(d, kind)]


def logs(decisions):
    return [d.text for d in of_type(decisions, Log)]


@pytest.mark.parametrize("model", [ASP(), SSP(3), WASP(2)], ids=str)
def test_a_fast_worker_takes_more_of_a_pass(model):
    job = lent(2, 60, [4, 4], model)
    for turn in range(40):
        for worker in [0, 0, 0, 1][: 4 if turn % 2 else 3]:
            if worker in job.idle and job.ledger.hand[worker]:
                step(job, worker)
    assert job.ledger.free == 0 and job.samples[0] + job.samples[1] == 60
    assert job.samples[0] > job.samples[1]


def test_a_round_shares_a_pass_out():
    job = lent(3, 20, [3, 3, 3], BSP())
    for _ in range(2):
        for worker in (2, 1, 0):
            job.push(worker, 3, wants_lease=True)
    assert [job.ledger.hand[w] for w in range(3)] == [Lease(18, 2), None, None]


def test_an_epoch_begins_with_a_lease_for_each_and_a_new_number():
    job = lent(2, 8, [2, 2])
    for epoch in (1, 2, 3):
        assert job.coordinator.passes == epoch and all(job.ledger.hand.values())
        for worker in (0, 1, 0, 1):
            step(job, worker)
        for name in ("pause", "resume"):
            for worker in (0, 1):
                job.gather(worker, name)
    assert job.passes == 4


def test_nothing_is_lent_after_the_last_epoch():
    job = lent(2, 8, [4, 4])
    for worker in (0, 1):
        step(job, worker)
    for name in ("pause", "resume"):
        for worker in (0, 1):
            job.gather(worker, name, name == "resume")
    assert job.passes == 1 and set(job.where) == {"paused"}


def test_each_fit_has_samples_of_its_own():
    job = Referee(2, ASP(), groups=[1, 1, 1], offers=[(8, [2, 2]), None, (30, [5, 1])])
    seen = []
    for _ in range(3):
        job.begin()
        seen.append((job.coordinator.passes, job.ledger and job.ledger.samples))
        for worker in (0, 1):
            job.exit(worker)
    assert seen == [(1, 8), (0, None), (1, 30)]


def test_a_worker_asks_for_samples_when_it_has_nothing_to_push():
    job = lent(2, 8, [2, 2])
    assert job.ask_lease(0) == [Grant(0, Lease(4, 2), stop=False)]
    assert step(job, 0) == Lease(6, 2)
    assert step(job, 0) is None
    assert job.ask_lease(1) == [Grant(1, None, stop=False)]
    assert job.ledger.trained.sum() == 6, "what worker 1 has trained on without a gradient stays its own"


def test_samples_are_asked_for_in_training_alone():
    job = lent(3, 8, [2, 2, 2])
    job.gather(0, "pause")
    assert "worker 0 asks for samples while it is paused" in job.coordinator.ask_lease(0, 0.0)[0].text
    job.gather(1, "logs")
    assert "worker 1 asks for samples while it is training and waits in 'logs'" in (
        job.coordinator.ask_lease(1, 0.0)[0].text
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_what_a_worker_has_that_goes_is_lent_to_others(groups):
    job = lent(2, 12, [3, 2], groups=groups)
    assert step(job, 1) == Lease(5, 2)
    for group in range(1, groups):
        job.push(1, 2, group=group)
    job.exit(1)
    assert [step(job, 0) for _ in range(4)] == [Lease(5, 2), Lease(7, 3), Lease(10, 2), None]


@pytest.mark.parametrize("groups", [1, 2])
def test_unused_samples_are_told_of(groups):
    job = lent(2, 12, [2, 2], groups=groups)
    step(job, 0)
    for group in range(1, groups):
        job.push(0, 2, group=group)
    job.ask_stop()
    assert step(job, 1) is None, "who is to stop gets no more"
    job.return_leases(0)
    job.gather(0, "pause")
    assert logs(job.gather(1, "pause")) == ["pass 1 ends with 8 of 12 samples unused: a worker asked to stop"]


def test_unused_samples_of_one_that_has_gone_are_told_of():
    job = lent(2, 6, [3, 3])
    assert step(job, 0) is None
    job.gather(0, "pause")
    assert logs(job.exit(1)) == ["pass 1 ends with 3 of 6 samples unused"]


def test_a_pass_that_is_used_up_is_no_news():
    job = lent(2, 6, [3, 3])
    for worker in (0, 1):
        step(job, worker)
    job.gather(0, "pause")
    assert logs(job.gather(1, "pause")) == []


def test_the_answer_to_the_first_push_of_a_step_alone_brings_samples():
    job = lent(1, 6, [2], groups=2)
    (first,) = of_type(job.push(0, 2, group=0, wants_lease=True), Answer)
    (second,) = of_type(job.push(0, 2, group=1), Answer)
    assert first.lease == Lease(2, 2) and second.lease is None

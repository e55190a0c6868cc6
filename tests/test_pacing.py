"""Who waits for whom under SSP and WASP, forced syncs, and what is said of waiting, in situations of a few lines."""

from __future__ import annotations

import sys

import pytest
from referee import Referee, Refused

from hps_keras.consistency import ASP, BSP, SSP, WASP
from hps_keras.coordination.coordinator import Coordinator
from hps_keras.coordination.decisions import Answer, Fail, Log, Push, Update, Wait


def training(workers, model, groups=1, timeout=600.0, offers=()):
    referee = Referee(workers, model, timeout, [groups] * 9, offers)
    referee.begin()
    return referee


def answered(decisions):
    return [d.push.worker for d in decisions if isinstance(d, Answer)]


def synced(decisions):
    return [d.push.worker for d in decisions if isinstance(d, Answer) and d.sync]


def logs(decisions):
    return [d.text for d in decisions if isinstance(d, Log)]


def pushes(job, *workers):
    """Lets workers push in turn; returns who was answered at each push."""
    return [answered(job.push(worker)) for worker in workers]


def epoch_ends(job, workers=(0, 1)):
    for name in ("pause", "resume"):
        for worker in workers:
            job.gather(worker, name)


# -- the weight of an update --


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        (ASP(), [1, 1, 1, 1]),
        (ASP(weight="inverse"), [1, 1, 1 / 3, 1]),
        (SSP(5, weight="polynomial:1"), [1, 1, 1 / 3, 1]),
        (WASP(), [1, 1, 1 / 3, 1]),
        (WASP(weight="constant"), [1, 1, 1, 1]),
        (WASP(weight=lambda tau: 4.0 if tau == 2 else 0.0), [0, 0, 4, 0]),
    ],
    ids=str,
)
def test_the_weight_scales_the_rate_and_not_the_gradient(model, weights):
    job = training(2, ASP())
    job.coordinator.define([0], model)
    updates = []
    for worker, version in ((0, 0), (0, 1), (1, 0), (1, 3)):
        decisions = job.coordinator.push(Push(worker, 0, version, 8, 0.2), 0.0)
        updates += [d for d in decisions if isinstance(d, Update)]
    assert [u.weight for u in updates] == pytest.approx(weights)
    assert [u.rate for u in updates] == pytest.approx([0.2 * w for w in weights])
    assert {u.scale for u in updates} == {1.0}
    assert job.coordinator.statistics(0).weights == pytest.approx(weights[0] + weights[1])
    assert job.coordinator.statistics(1).weights == pytest.approx(weights[2] + weights[3])


def test_a_weighted_update_counts_its_samples_too():
    job = training(2, WASP())
    job.push(0, samples=30, rate=0.3)
    (update,) = [d for d in job.push(1, samples=10, rate=0.4) if isinstance(d, Update)]
    assert update.rate == pytest.approx(0.4 * (1 / 2) * 10 / 20)


# -- SSP --


def test_a_worker_waits_that_is_too_far_ahead():
    job = training(2, SSP(2))
    assert pushes(job, 0, 0) == [[0], [0]]
    assert pushes(job, 0) == [[]], "three steps ahead of worker 1"
    assert sorted(answered(job.push(1))) == [0, 1]
    assert pushes(job, 0) == [[]]


def test_bound_zero_keeps_workers_within_a_step():
    job = training(3, SSP(0))
    assert pushes(job, 2, 0) == [[], []]
    assert sorted(pushes(job, 1)[0]) == [0, 1, 2]
    assert pushes(job, 0, 1) == [[], []]


def test_the_update_does_not_wait():
    job = training(2, SSP(0))
    assert [type(d) for d in job.push(0)][-1] is Update
    assert job.coordinator.version(0) == 1


@pytest.mark.parametrize("go", ["pause", "exit"])
def test_nobody_waits_for_one_that_does_not_train(go):
    job = training(3, SSP(1))
    assert pushes(job, 0, 1, 0, 1) == [[0], [1], [], []]
    decisions = job.gather(2, "pause") if go == "pause" else job.exit(2)
    assert sorted(answered(decisions)) == [0, 1]


def test_a_step_without_a_gradient_is_a_step():
    job = training(2, SSP(0))
    assert pushes(job, 0) == [[]]
    assert sorted(answered(job.push(1, samples=0))) == [0, 1]


def test_a_step_counts_once_for_all_its_optimizers():
    job = training(2, SSP(1), groups=2)
    assert answered(job.push(0, group=0)) == [0] and answered(job.push(0, group=1)) == [0]
    assert answered(job.push(0, group=1)) == [], "its second step, which passes optimizer 0 over"
    assert sorted(answered(job.push(1, group=0))) == [0, 1]


def test_clocks_begin_anew_with_an_epoch():
    job = training(2, SSP(1))
    pushes(job, 0, 1, 1)
    job.gather(0, "pause")  # so that nobody is too far behind
    pushes(job, 1, 1, 1)
    job.gather(1, "pause")
    for worker in (0, 1):
        job.gather(worker, "resume")
    assert pushes(job, 1, 1) == [[1], []]
    assert sorted(answered(job.push(0))) == [0, 1]


def test_who_waits_at_the_bound_is_told_for_whom():
    job = training(3, SSP(0))
    pushes(job, 2, 0)
    job.now += 10
    assert job.coordinator.tick(job.now) == [Wait(0, (1,)), Wait(2, (1,))]
    job.now += 50
    (said,) = logs(job.coordinator.tick(job.now))
    assert said == "the staleness bound of optimizer 0 has waited 60 s for worker 1 (training)"


def test_the_bound_and_an_agreement_contradict_each_other():
    job = training(2, SSP(0))
    job.push(0)
    with pytest.raises(Refused, match=r"worker 0 in the staleness bound of optimizer 0, worker 1 in 'logs' number 1"):
        job.gather(1, "logs")


# -- forced syncs --


def test_a_sync_holds_each_answer_until_all_have_pushed():
    job = training(3, WASP(2))
    assert pushes(job, 0, 0, 0, 1, 0) == [[0], [0], [0], [1], [0]]
    sixth = job.push(0)  # 2 x 3 pushes
    assert [type(d) for d in sixth][-1] is Update, "it is applied, and its answer held"
    assert pushes(job, 2) == [[]]
    last = job.push(1)
    assert synced(last) == [0, 1, 2] and {d.version for d in last if isinstance(d, Answer)} == {8}
    assert job.syncs_of_fit == [8] and all(job.versions[w] == [8] for w in range(3))
    assert pushes(job, 1) == [[1]] and job.staleness[1][0] == 1


def test_one_worker_syncs_with_itself():
    job = training(1, WASP(3))
    decisions = [job.push(0) for _ in range(7)]
    assert [synced(d) for d in decisions] == [[], [], [0], [], [], [0], []]


def test_every_step_can_be_a_sync():
    job = training(2, WASP(1))
    assert pushes(job, 0, 0) == [[0], []]
    assert synced(job.push(1)) == [0, 1]
    assert job.syncs_of_fit == [3]


def test_without_a_number_there_is_no_sync():
    job = training(2, WASP(None))
    assert all(pushes(job, *[0] * 300)) and not job.syncs_of_fit


def test_steps_without_a_gradient_do_not_count_but_are_held():
    job = training(2, WASP(1))
    for _ in range(5):
        assert answered(job.push(0, samples=0)) == [0]
    pushes(job, 0, 0)
    assert synced(job.push(1, samples=0)) == [0, 1]
    assert job.syncs_of_fit == [2]


@pytest.mark.parametrize("go", ["pause", "exit"])
def test_a_sync_ends_without_one_that_goes(go):
    job = training(3, WASP(1))
    pushes(job, 0, 0, 0)
    pushes(job, 1)
    assert synced(job.gather(2, "pause") if go == "pause" else job.exit(2)) == [0, 1]


def test_a_sync_does_not_wait_for_one_that_waits_for_those_it_holds():
    job = training(3, WASP(1))
    job.gather(2, "logs")
    pushes(job, 0, 0, 0)
    assert synced(job.push(1)) == [0, 1]
    job.gather(0, "logs")
    job.gather(1, "logs")
    assert job.idle == [0, 1, 2]


def test_a_period_counts_those_who_began_it_and_the_next_needs_fewer_pushes():
    """Else the end of an epoch, at which workers pause one after the other, would be a shower of syncs."""
    job = training(3, WASP(4))
    job.gather(2, "pause")
    assert all(pushes(job, *[0] * 11))
    assert pushes(job, 0) == [[]]
    assert synced(job.push(1)) == [0, 1]
    assert all(pushes(job, *[0] * 7))
    assert pushes(job, 0) == [[]]
    assert synced(job.push(1)) == [0, 1]


def test_an_epochs_end_counts_as_a_sync():
    job = training(2, WASP(3))
    pushes(job, 0, 0, 1, 0, 1)
    epoch_ends(job)
    assert pushes(job, 0, 0, 1, 0, 1) == [[0], [0], [1], [0], [1]]
    assert pushes(job, 0) == [[]]
    assert not any(job.syncs)


def test_an_epoch_that_ends_in_a_sync_ends_it():
    """Worker 1 has no more steps; the sync that waited for it lets worker 0 come to the end too."""
    job = training(2, WASP(1))
    pushes(job, 1, 0)
    assert synced(job.gather(1, "pause")) == [0]
    job.gather(0, "pause")
    for worker in (0, 1):
        job.gather(worker, "resume")
    assert pushes(job, 0) == [[0]]


def test_the_next_fit_begins_with_nothing_counted():
    job = training(2, WASP(2))
    pushes(job, 0, 0, 1)
    for worker in (0, 1):
        job.exit(worker)
    job.begin()
    assert pushes(job, 0, 0, 1) == [[0], [0], [1]]


def test_all_optimizers_leave_a_sync_together():
    job = training(2, WASP(1), groups=2)
    job.push(0, group=0)
    job.push(0, group=1)
    job.push(0, group=0)  # triggers
    last = job.push(1, group=0)
    assert synced(last) == [0, 1]
    assert job.versions[0] == job.versions[1] == [3, 1], "the parameters of all come with it"
    (update,) = [d for d in job.push(1, group=1) if isinstance(d, Update)]
    assert update.weight == 1


def test_a_worker_that_is_silent_in_a_sync_fails_and_holds_nobody_up_for_ever():
    job = training(2, WASP(2))
    pushes(job, 1, 1, 0, 0)
    job.now += 10
    assert job.coordinator.tick(job.now) == [Wait(0, (1,))]
    job.now += 591
    decisions = job.coordinator.tick(job.now)
    (fail,) = [d for d in decisions if isinstance(d, Fail)]
    assert fail.silent and "worker 1 fell silent" in fail.text and "waiting for it: workers [0]" in fail.text
    assert logs(decisions) == ["a forced sync of optimizer 0 has waited 601 s for worker 1 (training)"]


def test_time_in_syncs_is_told_from_other_waiting():
    job = training(2, WASP(2))
    pushes(job, 0, 1)  # the first steps compile, and are not timed
    job.now = 5.0
    pushes(job, 0)
    pushes(job, 0)  # the fourth: a sync
    job.now = 12.0
    pushes(job, 1)
    first, second = job.coordinator.statistics(0), job.coordinator.statistics(1)
    assert (first.syncs, first.sync_seconds, first.waiting_seconds) == (1, 7.0, 7.0)
    assert (second.syncs, second.sync_seconds, second.waiting_seconds) == (1, 0.0, 0.0)


def test_waiting_at_the_bound_is_no_time_in_syncs():
    job = training(2, SSP(0))
    pushes(job, 0, 1, 0)
    job.now += 3
    pushes(job, 1)
    assert job.coordinator.statistics(0).waiting_seconds == 3
    assert job.coordinator.statistics(0).sync_seconds == job.coordinator.statistics(0).syncs == 0


# -- the number of a ForcedSync callback --


def test_the_chief_sets_the_number_at_once():
    job = training(2, WASP(50))
    assert pushes(job, 1, 1, 1) == [[1], [1], [1]]
    assert answered(job.push(0, sync_every=2)) == [], "the fourth of two each"
    assert job.coordinator.sync_every == 2
    assert synced(job.push(1)) == [0, 1]
    assert pushes(job, 1, 1, 1) == [[1], [1], [1]], "it stays, and needs not be said again"
    assert pushes(job, 1) == [[]]


def test_the_number_of_others_is_ignored():
    job = training(2, WASP(50))
    for _ in range(4):
        assert answered(job.push(1, sync_every=1)) == [1]
    assert job.coordinator.sync_every == 50


def test_the_chief_is_the_first_of_those_in_fit():
    job = Referee(3, WASP(50), groups=[1, 1])
    job.leave(0)
    job.begin()
    job.push(2, sync_every=3)
    assert job.coordinator.sync_every == 50
    job.push(1, sync_every=3)
    assert job.coordinator.sync_every == 3


def test_the_chief_can_end_syncs_but_not_leave_one():
    job = training(2, WASP(1))
    pushes(job, 1, 1)
    assert synced(job.push(0, sync_every=-1)) == [0, 1]
    assert job.coordinator.sync_every is None
    assert all(pushes(job, *[1] * 20)) and job.syncs_of_fit == [3]


def test_the_number_of_a_fit_ends_with_it():
    job = training(2, WASP(7))
    job.push(0, sync_every=2)
    epoch_ends(job)
    assert job.coordinator.sync_every == 2
    for worker in (0, 1):
        job.exit(worker)
    job.begin()
    assert job.coordinator.sync_every == 7


@pytest.mark.parametrize("model", [ASP(), SSP(3)], ids=str)
def test_other_asynchronous_models_can_be_forced_to_sync(model):
    job = training(2, model)
    assert answered(job.push(0, sync_every=1)) == [0]
    assert pushes(job, 0) == [[]]
    assert synced(job.push(1)) == [0, 1]


def test_all_stand_together_after_a_forced_sync():
    """Else worker 0, which leaves it with the others, would be further ahead of worker 2 than the bound allows."""
    job = training(3, SSP(2))
    job.gather(2, "logs")
    job.push(0, sync_every=1)
    assert pushes(job, 0, 0) == [[0], []]
    assert synced(job.push(1)) == [0, 1]
    assert pushes(job, 0, 0, 0) == [[0], [0], []]


def test_rounds_know_no_forced_sync():
    job = training(2, BSP())
    job.push(0, sync_every=1)
    assert [d.sync for d in job.push(1, sync_every=1) if isinstance(d, Answer)] == [False, False]
    assert job.coordinator.sync_every is None


# -- waiting at an epoch's end --


def uneven_epoch(job, seconds=100.0, wait=50.0):
    """Worker 1 is done `wait` seconds before worker 0; returns what is said when the epoch ends."""
    pushes(job, 0, 1)
    job.now += seconds - wait
    job.gather(1, "pause")
    job.now += wait
    return logs(job.gather(0, "pause"))


@pytest.mark.parametrize("model", [ASP(), SSP(3), WASP(50)], ids=str)
def test_a_long_wait_for_fixed_shards_is_told_with_the_remedy(model):
    job = training(2, model)
    assert uneven_epoch(job) == [
        "worker 1 waited 50.0 s of 100.0 s at the end of the epoch, for worker 0: with hps.data.ElasticDataset all end "
        "it together"
    ]
    assert [job.coordinator.statistics(w).epoch_seconds for w in (0, 1)] == [0.0, 50.0]


def test_the_times_at_epoch_ends_add_up():
    job = training(2, ASP())
    for wait in (10.0, 20.0):
        uneven_epoch(job, wait=wait)
        job.now += 1000.0  # validation, which nobody waits for
        for worker in (0, 1):
            job.gather(worker, "resume")
    assert [job.coordinator.statistics(w).epoch_seconds for w in (0, 1)] == [0.0, 30.0]


@pytest.mark.parametrize(
    ("model", "seconds", "wait"),
    [(ASP(), 100.0, 9.0), (ASP(), 4.0, 1.0), (ASP(), 100.0, 0.0), (BSP(), 100.0, 50.0)],
    ids=["a small part", "a short time", "none", "rounds"],
)
def test_other_waits_at_an_epochs_end_need_no_word(model, seconds, wait):
    assert uneven_epoch(training(2, model), seconds, wait) == []


def test_lent_samples_need_no_hint():
    job = training(2, ASP(), offers=[(2, [1, 1])])
    for worker in (0, 1):
        job.push(worker, 1, wants_lease=True)
    job.now += 50
    job.gather(1, "pause")
    job.now += 50
    assert logs(job.gather(0, "pause")) == []


# -- cost --


def work_per_push(model, workers, count):
    """Lines of Python that the coordinator runs for one push in steady state, all workers equally fast."""
    coordinator = Coordinator(workers, model, 600.0, 0.0)
    for name in ("enter", "declare"):
        for rank in range(workers):
            coordinator.gather(rank, name, 1, None, 0.0)
    coordinator.define([0], model)
    known, lines = [0] * workers, 0

    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    for number in range(count * workers):
        push = Push(number % workers, 0, known[number % workers], 8, 0.1)
        sys.settrace(trace)
        try:
            decisions = coordinator.push(push, 0.0)
        finally:
            sys.settrace(before)
        for decision in decisions:
            if isinstance(decision, Answer):
                known[decision.push.worker] = decision.version
    return lines / (count * workers)


@pytest.mark.parametrize("model", [BSP(), ASP(), SSP(0), SSP(3), WASP(2)], ids=str)
def test_a_push_among_many_workers_costs_no_more_than_among_few(model):
    assert work_per_push(model, 256, 4) < 1.5 * work_per_push(model, 16, 4)

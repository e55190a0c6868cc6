"""What the coordinator decides in situations that take a few lines to tell; properties are in a file of their own."""

from __future__ import annotations

import numpy as np
import pytest
from referee import Referee, Refused

from hps_keras.consistency import ASP, BSP
from hps_keras.coordination.attendance import State
from hps_keras.coordination.coordinator import Coordinator
from hps_keras.coordination.decisions import Answer, Complete, Fail, Log, Push, Take, Update, Wait


def kinds(decisions):
    return [type(d).__name__ for d in decisions]


def training(workers, model, groups=1, timeout=600.0):
    referee = Referee(workers, model, timeout, [groups] * 9)
    referee.begin()
    return referee


def of_type(decisions, kind):
    return [d for d in decisions if isinstance(d, kind)]


# -- synchronous rounds --


def test_a_round_ends_with_the_last_push_and_adds_in_rank_order():
    job = training(3, BSP())
    assert kinds(job.push(2)) == []
    assert kinds(job.push(0)) == ["Take"]  # payloads are taken as soon as their turn has come
    last = job.push(1)
    assert kinds(last) == ["Take", "Take", "Update", "Answer", "Answer", "Answer"]
    assert [d.push.worker for d in of_type(last, Take)] == [1, 2]
    assert [d.push.worker for d in of_type(last, Answer)] == [0, 1, 2]
    assert [p.worker for p in last[2].pushes] == [0, 1, 2]


def test_a_round_is_the_mean_over_samples():
    job = training(3, BSP())
    decisions = job.push(0, samples=4) + job.push(1, samples=2) + job.push(2, samples=10)
    takes, (update,) = of_type(decisions, Take), of_type(decisions, Update)
    np.testing.assert_allclose([t.factor * update.scale for t in takes], [4 / 16, 2 / 16, 10 / 16], rtol=1e-15)
    assert [t.first for t in takes] == [True, False, False]


def test_equal_batches_are_added_without_a_multiplication():
    job = training(4, BSP())
    decisions = [d for w in range(4) for d in job.push(w, samples=24)]
    assert [t.factor for t in of_type(decisions, Take)] == [1.0] * 4
    assert of_type(decisions, Update)[0].scale == 0.25


def test_a_step_without_a_gradient_counts_in_the_round_but_moves_nothing():
    job = training(3, BSP())
    decisions = job.push(0, samples=0, rate=9.0) + job.push(1, samples=5, rate=0.5) + job.push(2, samples=5, rate=0.25)
    assert [t.push.worker for t in of_type(decisions, Take)] == [1, 2]
    (update,) = of_type(decisions, Update)
    assert update.rate == 0.5, "the rate is that of the first worker that brought a gradient"
    assert all(a.fresh and a.version == 1 for a in of_type(decisions, Answer))


def test_a_round_without_any_gradient_keeps_the_version():
    job = training(2, BSP())
    decisions = job.push(0, samples=0) + job.push(1, samples=0)
    assert kinds(decisions) == ["Answer", "Answer"]
    assert not any(a.fresh for a in decisions) and job.coordinator.version(0) == 0


def test_each_optimizer_has_rounds_and_versions_of_its_own():
    job = training(2, BSP(), groups=2)
    for worker in (0, 1):
        job.push(worker, group=0)
    job.push(0, group=1)
    assert [job.coordinator.version(g) for g in (0, 1)] == [1, 0]
    job.push(1, group=1)
    assert [job.coordinator.version(g) for g in (0, 1)] == [1, 1]
    assert [job.coordinator.statistics(w).pushes for w in (0, 1)] == [1, 1], "optimizers of one step are one push"


@pytest.mark.parametrize("go", ["pause", "exit"])
@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_round_ends_without_a_worker_that_goes(who, go):
    job = training(3, BSP())
    stay = [w for w in range(3) if w != who]
    for worker in stay:
        job.push(worker)
    decisions = job.gather(who, "pause") if go == "pause" else job.exit(who)
    assert [a.push.worker for a in of_type(decisions, Answer)] == stay
    assert [p.worker for u in of_type(decisions, Update) for p in u.pushes] == stay


def test_unequal_numbers_of_steps_end_an_epoch():
    job = training(3, BSP())
    for step in range(4):
        for worker in range(3):
            if step < worker + 2:  # 2, 3 and 4 steps
                job.push(worker)
            elif step == worker + 2:
                job.gather(worker, "pause")
    assert job.coordinator.version(0) == 4
    (done,) = job.gather(2, "pause")
    assert isinstance(done, Complete) and done.members == (0, 1, 2)


# -- asynchronous updates --


def test_a_push_is_applied_and_answered_at_once():
    job = training(2, ASP())
    assert kinds(job.push(1)) == ["Take", "Update", "Answer"]
    assert kinds(job.push(1)) == ["Take", "Update", "Answer"]
    (_, update, answer) = job.push(0)  # on version 0 still
    assert (update.version, answer.version, answer.fresh) == (3, 3, True)
    assert job.coordinator.statistics(0).staleness == {2: 1}
    assert job.coordinator.statistics(1).staleness == {0: 2}


def test_the_rate_is_scaled_by_the_batch_against_the_usual_batch():
    job = training(2, ASP())
    assert job.push(0, samples=30, rate=0.3)[1].rate == pytest.approx(0.3)  # alone so far: its batch is the usual one
    assert job.push(1, samples=10, rate=0.3)[1].rate == pytest.approx(0.3 * 10 / 20)
    assert job.push(0, samples=30, rate=0.3)[1].rate == pytest.approx(0.3 * 30 / 20)
    assert job.push(0, samples=15, rate=0.3)[1].rate == pytest.approx(0.3 * 15 / 20), "a short last batch weighs less"


def test_an_asynchronous_step_without_a_gradient_fetches_what_is_new():
    job = training(2, ASP())
    (same,) = job.push(0, samples=0)
    assert (same.fresh, same.version) == (False, 0)
    job.push(1)
    (new,) = job.push(0, samples=0)
    assert (new.fresh, new.version) == (True, 1)
    assert job.coordinator.statistics(0).staleness == {}


# -- agreements --


def test_fit_begins_when_all_have_entered():
    job = Referee(3, BSP())
    assert job.gather(2, "enter", "c") == [] and job.gather(0, "enter", "a") == []
    assert job.coordinator.state(0) is State.JOINING
    (done,) = job.gather(1, "enter", "b")
    assert done == Complete("enter", 1, (0, 1, 2), {0: "a", 1: "b", 2: "c"}, stop=False)
    assert list(done.contributions) == [0, 1, 2], "in rank order, whatever the order of arrival"
    assert {job.coordinator.state(w) for w in range(3)} == {State.TRAINING}


def test_fit_begins_without_a_worker_that_left():
    job = Referee(3, BSP())
    job.gather(0, "enter")
    job.gather(2, "enter")
    (done,) = job.leave(1)
    assert done.members == (0, 2)


def test_inside_fit_only_those_inside_are_waited_for():
    job = training(3, BSP())
    job.gather(0, "logs")
    job.gather(1, "logs")
    (done,) = job.exit(2)
    assert (done.name, done.members) == ("logs", (0, 1))


def test_outside_fit_all_are_waited_for():
    job = training(3, BSP())
    for worker in range(3):
        job.exit(worker)
    job.gather(0, "mean of something")
    job.gather(1, "mean of something")
    (done,) = job.gather(2, "mean of something")
    assert done.members == (0, 1, 2)


def test_who_enters_the_next_fit_early_is_not_waited_for_in_this_one():
    job = training(3, BSP())
    job.exit(0)
    job.gather(0, "enter")
    assert job.coordinator.in_fit == (1, 2), "a server that returns from fit must not serve on into the next one"
    job.push(1)
    assert of_type(job.push(2), Update)
    job.gather(1, "pause")
    assert [d.members for d in job.gather(2, "pause")] == [(1, 2)]
    job.exit(1)
    job.exit(2)
    job.gather(1, "enter")
    assert [d.members for d in job.gather(2, "enter")] == [(0, 1, 2)]


def test_one_fit_after_another_counts_on_from_the_versions_given():
    job = training(2, BSP())
    job.push(0)
    job.push(1)
    for worker in (0, 1):
        job.exit(worker)
    job.begin()
    assert job.coordinator.version(0) == 1
    job.push(0)
    assert [a.version for a in of_type(job.push(1), Answer)] == [2, 2]


def test_a_stop_reaches_all_and_is_forgotten_by_the_next_fit():
    job = training(2, ASP())
    assert job.push(0)[-1].stop is False
    job.ask_stop()
    assert job.push(0)[-1].stop and job.push(1)[-1].stop
    for worker in (0, 1):
        job.exit(worker)
    job.begin()
    assert job.push(0)[-1].stop is False


def test_all_left_only_when_the_last_has_left():
    job = Referee(2, BSP())
    job.leave(0)
    assert not job.coordinator.all_left
    job.leave(1)
    assert job.coordinator.all_left


# -- contradictions --


def refused(call):
    with pytest.raises(Refused) as error:
        call()
    return str(error.value)


def test_workers_that_wait_for_different_things_are_told_so():
    job = training(3, BSP())
    job.gather(0, "pause")
    job.gather(1, "logs")
    text = refused(lambda: job.gather(2, "other"))
    assert "worker 0 in 'pause' number 1" in text and "worker 1 in 'logs' number 1" in text
    assert "worker 2 in 'other' number 1" in text
    assert "is the script the same on all, with as many steps on each?" in text


def test_a_round_and_an_agreement_contradict_each_other():
    job = training(2, BSP())
    job.push(0)
    text = refused(lambda: job.gather(1, "weights"))
    assert "worker 0 in a round of optimizer 0" in text and "worker 1 in 'weights'" in text


def test_rounds_of_different_optimizers_contradict_each_other():
    job = training(2, BSP(), groups=2)
    job.push(0, group=0)
    assert "a round of optimizer 1" in refused(lambda: job.push(1, group=1))


def test_the_same_agreement_of_different_numbers_is_a_contradiction():
    job = training(2, BSP())
    job.sequences[0]["logs"] = 4
    job.gather(0, "logs")
    assert "'logs' number 5" in refused(lambda: job.gather(1, "logs"))


def test_a_contradiction_shows_when_the_last_free_worker_goes():
    job = Referee(3, BSP())
    job.gather(0, "this")
    job.gather(1, "that")
    assert "different things" in refused(lambda: job.leave(2))


# -- events that no worker in good order sends --


def after(*events):
    """A coordinator of two workers and one optimizer, after events written as `worker name`."""
    job = Referee(2, BSP())
    for event in events:
        if event == "begin":
            job.begin()
            continue
        worker, name = event.split()
        worker = int(worker)
        if name == "push":
            job.push(worker)
        elif name in ("exit", "leave"):
            getattr(job, name)(worker)
        else:
            job.gather(worker, name)
    return job.coordinator


def push(version=0, group=0, worker=0):
    return lambda c: c.push(Push(worker, group, version, 1, 0.1), 0.0)


def ask(name, worker=0):
    return lambda c: c.gather(worker, name, 77, None, 0.0)


PAUSED = ["begin", "0 pause", "1 pause"]
WRONG = {
    "push outside fit": ([], push(), "outside fit"),
    "push while joining": (["0 enter"], push(), "joining"),
    "push before the optimizers are known": (["0 enter", "1 enter"], push(), "optimizer 0 of 0"),
    "push of the next fit before its optimizers are known": (
        ["begin", "0 exit", "1 exit", "0 enter", "1 enter"],
        push(),
        "optimizer 0 of 0",
    ),
    "push for an optimizer that is not there": (["begin"], push(group=1), "optimizer 1 of 1"),
    "push twice in a round": (["begin", "0 push"], push(), "a round of optimizer 0"),
    "push while asking": (["begin", "0 weights"], push(), "'weights' number 1"),
    "push while paused": (PAUSED, push(), "paused"),
    "push while pausing": (["begin", "0 pause"], push(), "paused"),
    "push on an old version in a round": (["begin", "0 push", "1 push"], push(version=0), "version 0"),
    "push on a version that is not there yet": (["begin"], push(version=1), "version 1"),
    "push after leaving": (["0 leave"], push(), "left"),
    "enter twice": (["0 enter"], ask("enter"), "joining"),
    "enter while training": (["begin"], ask("enter"), "training"),
    "enter while paused": (PAUSED, ask("enter"), "paused"),
    "enter after leaving": (["0 leave"], ask("enter"), "left"),
    "pause outside": ([], ask("pause"), "outside fit"),
    "pause twice": (PAUSED, ask("pause"), "paused"),
    "pause with a push unanswered": (["begin", "0 push"], ask("pause"), "a round of optimizer 0"),
    "resume while training": (["begin"], ask("resume"), "training"),
    "resume outside": ([], ask("resume"), "outside fit"),
    "weights outside": ([], ask("weights"), "outside fit"),
    "declare while paused": (PAUSED, ask("declare"), "paused"),
    "ask twice": (["0 this"], ask("that"), "'this' number 1"),
    "ask after leaving": (["0 leave"], ask("this"), "left"),
    "exit outside": ([], lambda c: c.exit(0, 0.0), "outside fit"),
    "exit while joining": (["0 enter"], lambda c: c.exit(0, 0.0), "joining"),
    "exit with a push unanswered": (["begin", "0 push"], lambda c: c.exit(0, 0.0), "a round"),
    "exit with a question unanswered": (["begin", "0 logs"], lambda c: c.exit(0, 0.0), "'logs'"),
    "exit after leaving": (["0 leave"], lambda c: c.exit(0, 0.0), "left"),
    "leave inside fit": (["begin"], lambda c: c.leave(0, 0.0), "training"),
    "leave while paused": (PAUSED, lambda c: c.leave(0, 0.0), "paused"),
    "leave while joining": (["0 enter"], lambda c: c.leave(0, 0.0), "joining"),
    "leave with a question unanswered": (["0 this"], lambda c: c.leave(0, 0.0), "'this' number 1"),
    "leave twice": (["0 leave"], lambda c: c.leave(0, 0.0), "left"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_event_ends_the_job_and_names_the_worker_and_its_state(case):
    events, act, part = WRONG[case]
    decisions = act(after(*events))
    assert kinds(decisions) == ["Fail"]
    assert "worker 0 " in decisions[0].text and part in decisions[0].text
    assert not decisions[0].silent


def test_a_refused_push_changes_no_books():
    coordinator = after("begin")
    push(version=3)(coordinator)
    assert coordinator.statistics(0).pushes == coordinator.statistics(0).samples == 0


# -- time-outs --


def fails(decisions):
    return [d for d in decisions if isinstance(d, Fail)]


def later(job, seconds):
    """What a tick would say so much later; on the job's own clock."""
    job.now += seconds
    return job.coordinator.tick(job.now)


def steps(job, count, workers=(0, 1)):
    for _ in range(count):
        for worker in workers:
            job.push(worker)


@pytest.mark.parametrize("model", [BSP(), ASP()], ids=str)
@pytest.mark.parametrize("done", [0, 1])
def test_no_time_out_before_the_second_push(model, done):
    """The first step compiles, and may take as long as it likes."""
    job = training(2, model)
    steps(job, done)
    assert not fails(later(job, 1e6))


def test_a_silent_worker_is_named_with_what_it_owes():
    job = training(3, BSP(), groups=2)
    for group in (0, 1, 0, 1):
        for worker in range(3):
            job.push(worker, group=group)
    job.push(0)
    job.push(2)
    assert not fails(later(job, 600.0))
    (fail,) = fails(later(job, 1.0))
    assert fail.silent
    for part in (
        "worker 1 fell silent",
        "601 s",
        "push number 2 of this fit",
        "version 2 of optimizer 0, version 2 of optimizer 1",
        "workers [0, 2]",
        "HPS_TIMEOUT (now 600 s)",
    ):
        assert part in fail.text


def test_all_who_are_silent_are_named():
    job = training(3, ASP())
    steps(job, 2, (0, 1, 2))
    job.now += 601
    job.push(1)
    assert [f.text[:8] for f in fails(later(job, 0))] == ["worker 0", "worker 2"]


def test_with_patience_a_silent_worker_has_failed_only_when_others_wait():
    """A worker that `train_on_batch` trains may have no more batches, which it tells at its process's end only."""
    job = training(2, BSP())
    job.coordinator.patient = True
    steps(job, 2)
    assert not fails(later(job, 5000))
    job.push(0)
    assert not fails(later(job, 599))
    (fail,) = fails(later(job, 2))
    assert "worker 1 fell silent" in fail.text


def test_each_push_begins_a_new_wait():
    job = training(1, ASP())
    steps(job, 2, (0,))
    for _ in range(5):
        assert not fails(later(job, 599))
        job.push(0)


def test_a_worker_that_the_server_holds_owes_nothing():
    job = training(2, BSP())
    steps(job, 2)
    job.push(0)
    (fail,) = fails(later(job, 1000))
    assert "worker 1 fell" in fail.text


def test_the_wait_begins_with_the_answer_and_not_with_the_push():
    job = training(2, BSP())
    steps(job, 2)
    job.push(0)
    job.now += 599
    job.push(1)
    assert not fails(later(job, 599))
    assert len(fails(later(job, 2))) == 2


def test_no_time_out_while_paused():
    job = training(2, BSP())
    steps(job, 3)
    for worker in (0, 1):
        job.gather(worker, "pause")
    assert not fails(later(job, 1e6)), "validation may take hours"
    job.gather(0, "resume")
    assert not fails(later(job, 1e6))
    job.gather(1, "resume")
    assert not fails(later(job, 599)), "the next epoch begins a new wait"
    assert len(fails(later(job, 2))) == 2


def test_no_time_out_after_the_last_epoch():
    """What other callbacks do at the end of training, saving and evaluating, takes as long as it takes."""
    job = training(2, BSP())
    steps(job, 3)
    for name in ("pause", "resume"):
        for worker in (0, 1):
            job.gather(worker, name, name == "resume")
    assert not fails(later(job, 1e6))
    job.exit(1)
    assert not fails(later(job, 1e6))
    job.exit(0)
    job.leave(0)
    job.leave(1)


def test_no_time_out_outside_fit_nor_in_the_first_step_of_another():
    job = training(2, BSP())
    steps(job, 3)
    for worker in (0, 1):
        job.exit(worker)
    assert not fails(later(job, 1e6))
    job.begin()
    assert not fails(later(job, 1e6))
    steps(job, 1)
    assert not fails(later(job, 1e6))
    steps(job, 1)
    assert len(fails(later(job, 601))) == 2


# -- what people and waiting workers are told --


def test_those_who_wait_are_told_whom_for():
    job = training(3, BSP())
    steps(job, 2, (0, 1, 2))
    job.push(0)
    assert of_type(later(job, 9), Wait) == []
    assert of_type(later(job, 1), Wait) == [Wait(0, (1, 2))]
    job.push(2)
    assert of_type(later(job, 9), Wait) == []
    assert of_type(later(job, 1), Wait) == [Wait(0, (1,)), Wait(2, (1,))]
    job.push(1)
    assert of_type(later(job, 100), Wait) == []


def test_those_who_wait_for_an_agreement_are_told_whom_for():
    job = training(3, BSP())
    job.gather(1, "pause")
    assert of_type(later(job, 10), Wait) == [Wait(1, (0, 2))]
    assert of_type(later(job, 1), Wait) == []
    assert of_type(later(job, 9), Wait) == [Wait(1, (0, 2))], "again and again"


def test_reminders_come_often_enough_for_a_short_patience():
    job = training(2, BSP(), timeout=4.0)
    job.push(0)
    assert of_type(later(job, 1.0), Wait) == [Wait(0, (1,))], "a worker gives up after `timeout` without a word"


def logs(decisions):
    return [d.text for d in decisions if isinstance(d, Log)]


def test_a_long_wait_for_an_agreement_is_logged_once_a_minute():
    job = training(3, BSP())
    job.gather(0, "pause")
    job.now += 30
    job.gather(2, "pause")
    assert logs(later(job, 29)) == []
    assert logs(later(job, 1)) == ["'pause' has waited 60 s for worker 1 (training)"]
    assert logs(later(job, 59)) == []
    assert logs(later(job, 1)) == ["'pause' has waited 120 s for worker 1 (training)"]


def test_a_long_wait_for_a_first_step_is_logged():
    """No time-out is due while a worker may still compile, so the log must say why nothing goes on."""
    job = training(2, BSP())
    job.push(1)
    assert logs(later(job, 61)) == ["a round of optimizer 0 has waited 61 s for worker 0 (training)"]


def test_short_waits_are_not_worth_a_line():
    job = training(2, BSP())
    job.now += 59
    job.gather(0, "pause")
    assert logs(later(job, 2)) == []
    job.gather(1, "pause")
    assert logs(later(job, 100)) == []


def test_the_log_names_those_who_have_not_begun():
    job = Referee(3, BSP())
    assert logs(later(job, 59)) == []
    assert logs(later(job, 1)) == ["waiting for workers [0, 1, 2], which are outside fit"]
    job.gather(1, "enter")
    assert logs(later(job, 60)) == ["'enter' has waited 60 s for worker 0 (outside fit), worker 2 (outside fit)"]


def test_a_worker_that_has_just_left_fit_is_not_awaited_yet():
    job = training(2, BSP())
    job.now += 100
    job.exit(0)
    job.exit(1)
    assert logs(later(job, 1)) == []
    assert logs(later(job, 60)) == ["waiting for workers [0, 1], which are outside fit"]


# -- statistics --


def test_statistics_tell_computing_from_waiting_and_leave_compilation_out():
    job = training(2, BSP())
    job.now = 100.0
    for worker in (0, 1):  # the first step, which compiles
        job.push(worker, samples=8, seconds=50.0)
    job.now = 110.0
    job.push(0, samples=8, seconds=1.5)
    job.now = 114.0
    job.push(1, samples=6, seconds=5.0)
    job.now = 120.0
    for worker in (0, 1):
        job.gather(worker, "pause")
    first, second = job.coordinator.statistics(0), job.coordinator.statistics(1)
    assert (first.pushes, first.samples, first.timed_samples, first.last_batch) == (2, 16, 8, 8)
    assert (second.pushes, second.samples, second.timed_samples, second.last_batch) == (2, 14, 6, 6)
    assert (first.compute_seconds, first.waiting_seconds, first.training_seconds) == (1.5, 4.0, 20.0)
    assert (second.compute_seconds, second.waiting_seconds, second.training_seconds) == (5.0, 0.0, 20.0)
    assert first.staleness == second.staleness == {0: 2}


def test_pauses_are_not_training_time():
    job = training(1, ASP())
    for _epoch in range(2):
        for _ in range(3):
            job.now += 10.0
            job.push(0)
        job.gather(0, "pause")
        job.now += 1000.0  # validation
        job.gather(0, "resume")
    job.now += 1000.0  # what other callbacks do at the end
    job.exit(0)
    assert job.coordinator.statistics(0).training_seconds == 20.0 + 30.0
    assert job.coordinator.statistics(0).timed_samples == 5 * 8


def test_a_step_without_a_gradient_does_not_change_the_batch_size_shown():
    job = training(1, ASP())
    job.push(0, samples=32)
    job.push(0, samples=0)
    assert job.coordinator.statistics(0).last_batch == 32


def test_a_coordinator_of_one_worker_never_waits():
    coordinator = Coordinator(1, BSP(), 600.0, 0.0)
    for name in ("enter", "declare"):
        assert kinds(coordinator.gather(0, name, 1, None, 0.0)) == ["Complete"]
    coordinator.define([0], BSP())
    assert kinds(coordinator.push(Push(0, 0, 0, 8, 0.1), 0.0)) == ["Take", "Update", "Answer"]

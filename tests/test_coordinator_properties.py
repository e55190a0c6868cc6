"""What holds in every job, whatever the order of events: generated jobs, and workers that do anything at any time."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from referee import NEVER, Offer, Referee, Refused

from hps_keras.consistency import ASP, BSP, SSP, WASP, Consistency
from hps_keras.coordination.coordinator import Coordinator
from hps_keras.coordination.decisions import Decision, Fail, Push, Wait

MODELS = [
    BSP(),
    ASP(),
    ASP(weight="inverse"),
    SSP(0),
    SSP(2),
    WASP(1),
    WASP(3),
    WASP(None),
    WASP(2, weight="polynomial:1.5"),
]
INDEX = st.integers(0, 5)


def _push(coordinator: Coordinator, worker: int, referee: Referee) -> list[Decision]:
    """Pushes once more what the worker waits for, or what it could push were its state another one."""
    group = next((g for w, g in referee.open if w == worker), 0)
    version = referee.groups[group].version if referee.groups else 0
    return coordinator.push(Push(worker, group, version, 1, 0.1), referee.now)


WRONG: dict[str, tuple[tuple[str, ...], Callable[[Coordinator, int, Referee], list[Decision]]]] = {
    # event: the states in which a worker that waits for nothing may send it, and how
    "enter": (("outside",), lambda c, w, r: c.gather(w, "enter", 99, None, r.now)),
    "weights": (("training",), lambda c, w, r: c.gather(w, "weights", 99, None, r.now)),
    "declare": (("training",), lambda c, w, r: c.gather(w, "declare", 99, None, r.now)),
    "push": (("training",), _push),
    "ask_lease": (("training",), lambda c, w, r: c.ask_lease(w, r.now)),
    "pause": (("training",), lambda c, w, r: c.gather(w, "pause", 99, None, r.now)),
    "resume": (("paused",), lambda c, w, r: c.gather(w, "resume", 99, None, r.now)),
    "logs": (("outside", "training", "paused"), lambda c, w, r: c.gather(w, "logs", 99, None, r.now)),
    "exit": (("training", "paused"), lambda c, w, r: c.exit(w, r.now)),
    "leave": (("outside",), lambda c, w, r: c.leave(w, r.now)),
}
QUICK = settings(max_examples=120)


# -- jobs as scripts write them: each worker follows its own plan, and all must reach the end --


@dataclass(frozen=True)
class Plan:
    """What a job does. `steps[fit][epoch][worker]` holds, per step, the samples of each push (None: no push).

    Where samples are lent, it only says which steps push what; how many there are follows from the leases.
    """

    model: Consistency
    workers: int
    groups: list[int]
    steps: list[list[list[list[list[int | None]]]]]
    fits_of: list[int]  # a worker leaves after so many fits
    stopper: tuple[int, int, int, int]  # fit, epoch and worker that asks all to stop, after so many steps
    deserter: tuple[int, int, int, int]  # likewise, that leaves fit in the middle of an epoch
    forced: list[int]  # what each worker's ForcedSync asks for, in every other step
    offers: list[Offer | None]  # of each fit


@st.composite
def plans(draw: Callable[..., Any]) -> Plan:
    model = draw(st.sampled_from(MODELS))
    workers, fits, epochs = draw(st.integers(1, 6)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    groups = [draw(st.integers(1, 3)) for _ in range(fits)]
    # Only without rounds may a step pass an optimizer over; in rounds such a step pushes 0 samples.
    samples = st.integers(0, 4) if model.synchronous else st.none() | st.integers(0, 4)
    steps = [
        [
            [
                draw(st.lists(st.lists(samples, min_size=groups[fit], max_size=groups[fit]), max_size=4))
                for _ in range(workers)
            ]
            for _ in range(epochs)
        ]
        for fit in range(fits)
    ]
    fits_of = [fits, *(draw(st.integers(1, fits)) for _ in range(workers - 1))]
    moment = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, workers - 1), st.integers(0, 5))
    forced = [draw(st.sampled_from([0, 0, 0, 1, 2, -1])) for _ in range(workers)]
    sizes = st.lists(st.integers(1, 4), min_size=workers, max_size=workers)
    offers = [draw(st.none() | st.tuples(st.integers(workers, 20), sizes)) for _ in range(fits)]
    return Plan(model, workers, groups, steps, fits_of, draw(moment), draw(moment), forced, offers)


def script(plan: Plan, me: int, referee: Referee) -> Generator[tuple[Any, ...], Any, None]:
    """The requests of one worker, in order; it is sent what each of them was answered."""
    for fit in range(plan.fits_of[me]):
        for name in ("enter", "weights", "declare"):
            yield "gather", name, None
        for epoch in range(len(plan.steps[fit])):
            ending = yield from training(plan, me, referee, fit, epoch)
            if ending == "deserts":
                break
            stop = ending == "stops"
            if stop:
                yield ("ask_stop",)
            if referee.ledger and referee.ledger.hand[me]:
                yield ("return_leases",)
            yield "gather", "pause", stop
            yield "gather", "logs", None
            done = yield "gather", "resume", stop or epoch + 1 == len(plan.steps[fit])
            if any(done.contributions.values()):
                break
        yield ("exit",)
        if fit == 0:
            yield "gather", "between", None
        if ending == "deserts":  # it has taken part in fewer agreements than the others, and cannot go on with them
            break
    yield ("leave",)


def training(
    plan: Plan, me: int, referee: Referee, fit: int, epoch: int
) -> Generator[tuple[Any, ...], Any, str | None]:
    """One worker's epoch; returns what ends it before its time."""
    steps = plan.steps[fit][epoch][me]
    lent = referee.ledger is not None
    for number in itertools.count():
        if plan.deserter == (fit, epoch, me, number):
            return "deserts"
        if plan.stopper == (fit, epoch, me, number):
            return "stops"
        if lent:
            assert referee.ledger
            lease = referee.ledger.hand[me]
            if lease is None:
                return None
            pattern = steps[number % len(steps)] if steps else [1] * plan.groups[fit]
            step = [s and lease.samples for s in pattern]
        elif number < len(steps):
            step = steps[number]
        else:
            return None
        asks = lent  # the first push of a step asks for the samples of the next
        stop = False
        for group, samples in enumerate(step):
            if samples is not None:
                forced = plan.forced[me] if number % 2 else 0
                answer = yield "push", samples, 0.1 * (me + 1), group, asks, forced
                asks, stop = False, stop or answer.stop
        if asks:
            answer = yield ("ask_lease",)
            stop = answer.stop
        if stop:
            return "stops"
    raise AssertionError


def play(
    plan: Plan, data: st.DataObject, timeout: float = NEVER, look: Callable[[Referee], None] = lambda referee: None
) -> Referee:
    """Runs all workers to their ends; which of those that can act is next, and what time passes, is drawn."""
    referee = Referee(plan.workers, plan.model, timeout, plan.groups, plan.offers)
    scripts = [script(plan, rank, referee) for rank in range(plan.workers)]
    begun: set[int] = set()
    while referee.idle:
        idle = referee.idle
        rank = idle[data.draw(st.integers(0, len(idle) - 1))] if len(idle) > 1 else idle[0]
        referee.now += data.draw(st.sampled_from([0.0, 1.0, 7.0]))
        request, *arguments = scripts[rank].send(referee.answers[rank] if rank in begun else None)
        begun.add(rank)
        if request == "ask_stop":
            referee.ask_stop()
        elif request == "push":
            samples, rate, group, asks, forced = arguments
            referee.push(rank, samples, rate, group, wants_lease=asks, sync_every=forced)
        else:
            getattr(referee, request)(rank, *arguments)
        look(referee)
    return referee


@QUICK
@given(plans(), st.data())
def test_every_job_reaches_its_end_and_counts_every_gradient_once(plan, data):
    """The referee checks each decision; here, that nobody is left over and that the books agree at the end."""
    referee = play(plan, data, look=lambda r: data.draw(st.integers(0, 7)) or r.tick())
    coordinator = referee.coordinator
    assert coordinator.all_left and not referee.open and not referee.waits
    for rank in range(plan.workers):
        statistics = coordinator.statistics(rank)
        assert statistics.pushes == referee.pushes[rank] and statistics.samples == referee.samples[rank]
        assert statistics.staleness == referee.staleness[rank]
        assert math.isclose(statistics.weights, referee.weights[rank], rel_tol=1e-9, abs_tol=1e-12)
        assert statistics.syncs == referee.syncs[rank]
        assert 0 <= statistics.sync_seconds <= statistics.waiting_seconds
    assert {id(p) for p in referee.kept if p.samples} == referee.applied
    assert all(coordinator.version(i) == group.version for i, group in enumerate(referee.groups))


@QUICK
@given(plans(), st.data())
def test_only_a_training_worker_that_owes_a_push_can_time_out(plan, data):
    """After some events an hour passes on a copy: who is paused, outside, held or still compiling is not blamed."""

    def look(referee: Referee) -> None:
        if data.draw(st.integers(0, 2)):  # copies take time
            return
        later = copy.deepcopy(referee.coordinator).tick(referee.now + 3600)
        blamed = [re.match(r"worker (\d+) fell silent", d.text) for d in later if isinstance(d, Fail) and d.silent]
        owing = {w for w in referee.idle if referee.where[w] == "training" and referee.steps[w] >= 2}
        assert {int(b.group(1)) for b in blamed if b} == owing and len(blamed) == len(owing)
        assert {d.worker for d in later if isinstance(d, Wait)} == set(referee.waits)

    play(plan, data, timeout=600.0, look=look)


# -- workers that do anything at any time --


class AnythingGoes(RuleBasedStateMachine):
    """Each worker that waits for nothing may do whatever its state allows, in agreement with the others or not.

    The referee fails the test when all wait and the job has not ended: a contradiction must be said, it never hangs.
    """

    @initialize(
        workers=st.integers(1, 4),
        model=st.sampled_from(MODELS),
        groups=st.integers(1, 3),
        lent=st.none() | st.integers(4, 30),
        begun=st.booleans(),
    )
    def start(self, workers: int, model: Consistency, groups: int, lent: int | None, begun: bool) -> None:
        offer = lent and (lent, [2, 1, 5, 3])
        self.referee = Referee(workers, model, groups=[groups] * 100, offers=[offer or None] * 100)
        self.ended = False
        if begun:
            self.referee.begin()

    def _worker(self, index: int, *where: str) -> int | None:
        """One of the workers that can act and are in such a state."""
        able = [w for w in self.referee.idle if self.referee.where[w] in where]
        return able[index % len(able)] if able else None

    def _do(self, index: int, where: Sequence[str], act: Callable[[int], Any]) -> None:
        worker = None if self.ended else self._worker(index, *where)
        if worker is not None:
            self._try(lambda: act(worker))

    def _try(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except Refused as refused:
            # Nobody did what his state forbids, so the only fault can be that all wait for different things.
            assert self.referee.stuck and "wait for different things" in str(refused)
            assert all(f"worker {w}" in str(refused) for w in self.referee.waits)
            self.ended = True

    @rule(index=INDEX)
    def enter(self, index: int) -> None:
        self._do(index, ["outside"], lambda w: self.referee.gather(w, "enter"))

    @rule(index=INDEX, name=st.sampled_from(["weights", "declare"]))
    def begin(self, index: int, name: str) -> None:
        self._do(index, ["training"], lambda w: self.referee.gather(w, name))

    @rule()
    def begin_together(self) -> None:
        if not self.ended and all(w == "outside" for w in self.referee.where) and not self.referee.waits:
            self._try(self.referee.begin)

    @rule(
        index=INDEX,
        samples=st.integers(0, 3),
        group=st.integers(0, 2),
        first=st.booleans(),
        every=st.sampled_from([0, 0, 0, 0, 1, 2, -1]),
    )
    def push(self, index: int, samples: int, group: int, first: bool, every: int) -> None:
        def act(worker: int) -> None:
            if group < len(self.referee.versions.get(worker, [])):
                lent = self.referee.ledger and self.referee.ledger.hand[worker]
                asks = bool(first and lent)
                self.referee.push(worker, samples, group=group, wants_lease=asks, sync_every=every)

        self._do(index, ["training"], act)

    @rule(index=INDEX)
    def ask_lease(self, index: int) -> None:
        self._do(index, ["training"], lambda w: self.referee.ask_lease(w))

    @rule(late=INDEX, samples=st.integers(0, 3))
    def push_all_but_one(self, late: int, samples: int) -> None:
        for worker, where in enumerate(self.referee.where):
            able = where == "training" and worker in self.referee.idle and self.referee.versions.get(worker)
            if able and worker != late and not self.ended:
                self._try(lambda w=worker: self.referee.push(w, samples))

    @rule(index=INDEX)
    def pause(self, index: int) -> None:
        def act(worker: int) -> None:
            if self.referee.ledger and self.referee.ledger.hand[worker]:
                self.referee.return_leases(worker)
            self.referee.gather(worker, "pause")

        self._do(index, ["training"], act)

    @rule(index=INDEX, last=st.booleans())
    def resume(self, index: int, last: bool) -> None:
        self._do(index, ["paused"], lambda w: self.referee.gather(w, "resume", last))

    @rule(index=INDEX, name=st.sampled_from(["logs", "other"]))
    def agree(self, index: int, name: str) -> None:
        self._do(index, ["outside", "training", "paused"], lambda w: self.referee.gather(w, name))

    @rule(index=INDEX)
    def exit(self, index: int) -> None:
        self._do(index, ["training", "paused"], self.referee.exit)

    @rule(index=INDEX, sure=st.integers(0, 3))
    def leave(self, index: int, sure: int) -> None:
        if not sure:
            self._do(index, ["outside"], self.referee.leave)

    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0, 100.0]))
    def wait(self, seconds: float) -> None:
        if not self.ended:
            self.referee.tick(seconds)

    @rule()
    def do_all_that_is_not_allowed(self) -> None:
        """On a copy, because a refused event ends the job."""
        if self.ended:
            return
        copied = copy.deepcopy(self.referee.coordinator)
        for worker, where in enumerate(self.referee.where):
            for allowed, act in WRONG.values():
                if where not in allowed or worker in self.referee.waits:
                    decisions = act(copied, worker, self.referee)
                    assert [type(d) for d in decisions] == [Fail]
                    assert f"worker {worker} " in decisions[0].text and where in decisions[0].text


TestAnythingGoes = AnythingGoes.TestCase
TestAnythingGoes.settings = settings(max_examples=150, stateful_step_count=60)

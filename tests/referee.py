"""Plays the server for a coordinator under test, and checks each of its decisions against the rules.

The referee keeps books of its own: where each worker is, which request of it is unanswered, what was pushed, taken and
applied. It carries decisions out on small vectors, so that an update can be compared with what its pushes say.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hps_keras.consistency import SSP, WASP, Asynchronous, Consistency
from hps_keras.coordination.coordinator import Coordinator
from hps_keras.coordination.decisions import Answer, Complete, Decision, Fail, Grant, Log, Push, Take, Update, Wait
from hps_keras.coordination.scheduling import Lease
from hps_keras.staleness import Weight

NEVER = 1e8  # a time-out that no test reaches

Offer = tuple[int, Sequence[int]]
"""Samples of a pass, and of one lease of each worker."""


def weight_by_the_book(text: str, tau: int) -> float:
    """The definitions of the staleness weights, written down a second time."""
    name, *numbers = text.split(":")
    if name == "polynomial":
        return 1 / (1 + tau) ** float(numbers[0] if numbers else 0.5)
    return {"constant": 1.0, "inverse": 1 / (1 + tau)}[name]


class Refused(Exception):
    """The coordinator ended the job."""


class Group:
    """The server's half of one optimizer, on vectors of three numbers."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.updates = 0
        self.taken: list[Push] = []
        self.buffer = np.zeros(3)
        self.largest: dict[int, int] = {}
        self.since_sync = 0
        self.steps: Counter[int] = Counter()  # pushes of each worker since all stood together


class Ledger:
    """Where the samples of a pass are: each is free, lent to one worker, or trained, and never again anything else.

    Attributes:
        lent: What each worker has been lent and has not pushed the gradient of, oldest first.
        hand: What each worker has not trained on yet.
    """

    def __init__(self, offer: Offer, workers: Iterable[int]) -> None:
        self.samples, self.sizes = offer
        self.trained = np.zeros(self.samples, bool)
        self.lent: dict[int, list[Lease]] = {w: [] for w in workers}
        self.hand: dict[int, Lease | None] = dict.fromkeys(self.lent)

    def lend(self, worker: int, lease: Lease) -> None:
        assert lease.start >= 0 and 0 < lease.samples <= self.sizes[worker]
        assert lease.start + lease.samples <= self.samples
        assert not np.any(self.taken()[self._of(lease)]), f"{lease} is not free"
        self.lent[worker].append(lease)
        self.hand[worker] = lease

    def push(self, worker: int) -> None:
        for lease in self.lent[worker]:
            self.trained[self._of(lease)] = True
        self.lent[worker], self.hand[worker] = [], None

    def taken(self) -> np.ndarray:
        """Which samples nobody may be given."""
        taken = self.trained.copy()
        for lease in (lease for leases in self.lent.values() for lease in leases):
            assert not np.any(taken[self._of(lease)]), f"{lease} is in use twice"
            taken[self._of(lease)] = True
        return taken

    @property
    def free(self) -> int:
        return int(self.samples - self.taken().sum())

    @staticmethod
    def _of(lease: Lease) -> slice:
        return slice(lease.start, lease.start + lease.samples)


class Referee:
    """Sends events to a coordinator and judges what it decides.

    Attributes:
        answers: What each worker was answered last: an `Answer`, a `Grant`, a `Complete`, or None while it waits.
        where: The state of each worker, by the referee's own book.
        ledger: Of the present pass, when its samples are lent.
        every: Steps between forced syncs, None for none.
        syncing: Whether a forced sync is under way.
        syncs_of_fit: The applied pushes of each forced sync of this fit, by its optimizer that had most.
    """

    def __init__(
        self,
        workers: int,
        consistency: Consistency,
        timeout: float = NEVER,
        groups: Sequence[int] = (1, 1),
        offers: Sequence[Offer | None] = (),
    ) -> None:
        self.coordinator = Coordinator(workers, consistency, timeout, 0.0)
        self.consistency = consistency
        self.now = 0.0
        self.where = ["outside"] * workers
        self.answers: list[Answer | Grant | Complete | None] = [None] * workers
        self.waits: dict[int, Any] = {}
        self.sequences: list[Counter[str]] = [Counter() for _ in range(workers)]
        self.groups: list[Group] = []
        self.groups_of_fits = list(groups)  # how many optimizers each fit has
        self.versions: dict[int, list[int]] = {}  # what each worker knows of each group
        self.open: dict[tuple[int, int], Push] = {}  # pushes without an answer, by worker and group
        self.applied: set[int] = set()  # by identity, since two steps can push equal headers
        self.gradients: dict[int, np.ndarray] = {}
        self.kept: list[Push] = []  # keeps the identities alive
        self.stop = False
        self.steps = [0] * workers  # pushes since the worker entered fit
        self.pushes = [0] * workers
        self.samples = [0] * workers
        self.staleness: list[Counter[int]] = [Counter() for _ in range(workers)]
        self.weights = [0.0] * workers
        self.syncs = [0] * workers
        self.random = np.random.default_rng(len(self.where))
        self.offers = list(offers)  # of each fit
        self.ledger: Ledger | None = None
        self.passes = 0
        self.chief = 0
        self.every: int | None = None
        self.syncing = False
        self.steady = True  # since all stood together, no worker has come or gone, and nobody has changed `every`
        self.syncs_of_fit: list[int] = []

    # -- events --

    def push(self, worker: int, samples: int = 8, rate: float = 0.1, group: int = 0, **more: Any) -> list[Decision]:
        version = more.pop("version", None)
        if version is None:
            version = self.versions[worker][group]
        push = Push(worker, group, version, samples, rate, **more)
        self.kept.append(push)
        self.open[worker, group] = push
        self.gradients[id(push)] = self.random.normal(size=3)
        self._ask(worker, push)
        self.groups[group].steps[worker] += 1
        if self.ledger and push.wants_lease:
            self.ledger.push(worker)
        if push.sync_every and worker == self.chief and isinstance(self.consistency, Asynchronous):
            self.every = push.sync_every if push.sync_every > 0 else None
            self.steady = False
        if not group:
            self.steps[worker] += 1
            self.pushes[worker] += 1
            self.samples[worker] += samples
        if samples:
            largest = self.groups[group].largest
            largest[worker] = max(samples, largest.get(worker, 0))
        return self._judge(self.coordinator.push(push, self.now))

    def ask_lease(self, worker: int) -> list[Decision]:
        """The worker has trained on what it was lent, and there is no gradient."""
        self._ask(worker, "samples")
        if self.ledger:
            self.ledger.hand[worker] = None
        return self._judge(self.coordinator.ask_lease(worker, self.now))

    def return_leases(self, worker: int) -> None:
        """The worker will pause, and has not trained on what it was lent last."""
        if self.ledger:
            assert self.ledger.hand[worker] is self.ledger.lent[worker].pop()
            self.ledger.hand[worker] = None
        self.coordinator.return_leases(worker)

    def gather(self, worker: int, name: str, contribution: Any = None) -> list[Decision]:
        self.sequences[worker][name] += 1
        key = name, self.sequences[worker][name]
        self._ask(worker, key)
        if name == "enter":
            self.where[worker], self.steps[worker] = "joining", 0
        elif name == "pause":
            self.where[worker], self.steady = "paused", False
        return self._judge(self.coordinator.gather(worker, *key, contribution, self.now))

    def exit(self, worker: int) -> list[Decision]:
        self.where[worker], self.steady = "outside", False
        if self.ledger:
            self.ledger.lent[worker], self.ledger.hand[worker] = [], None
        return self._judge(self.coordinator.exit(worker, self.now))

    def leave(self, worker: int) -> list[Decision]:
        self.where[worker] = "left"
        return self._judge(self.coordinator.leave(worker, self.now))

    def tick(self, seconds: float = 0.0) -> list[Decision]:
        self.now += seconds
        return self._judge(self.coordinator.tick(self.now))

    def ask_stop(self) -> None:
        self.coordinator.ask_stop()
        self.stop = True

    # -- shortcuts --

    def begin(self, workers: Iterable[int] | None = None) -> None:
        """Brings workers (all that have not left) to training."""
        who = [w for w in range(len(self.where)) if self.where[w] != "left"] if workers is None else list(workers)
        for name in ("enter", "declare"):
            for worker in who:
                self.gather(worker, name)
        assert all(self.where[w] == "training" for w in who)

    @property
    def idle(self) -> list[int]:
        """Workers that wait for nothing and have not left."""
        return [w for w, where in enumerate(self.where) if where != "left" and w not in self.waits]

    @property
    def stuck(self) -> bool:
        """Nobody can do anything any more, although not all have left."""
        return not self.idle and any(where != "left" for where in self.where)

    # -- judging --

    def _ask(self, worker: int, what: Any) -> None:
        self.waits[worker] = what
        self.answers[worker] = None

    def _judge(self, decisions: list[Decision]) -> list[Decision]:
        answered = [d.push for d in decisions if isinstance(d, Answer)]
        judged = not answered
        for decision in decisions:
            if isinstance(decision, Fail):
                raise Refused(decision.text)
            if isinstance(decision, Answer) and not judged:
                judged = True
                self._may_go(answered, [d.sync for d in decisions if isinstance(d, Answer)])
            if isinstance(decision, Take):
                self._take(decision)
            elif isinstance(decision, Update):
                self._update(decision)
            elif isinstance(decision, Answer):
                self._answer(decision)
            elif isinstance(decision, Grant):
                assert self.waits.pop(decision.worker) == "samples" and decision.stop == self.stop
                self._lent(decision.worker, decision.lease)
                self.answers[decision.worker] = decision
            elif isinstance(decision, Complete):
                self._complete(decision)
            elif isinstance(decision, Wait):
                assert decision.worker in self.waits and decision.worker not in decision.awaited and decision.awaited
            else:
                assert isinstance(decision, Log) and decision.text
                said = re.match(r"pass (\d+) ends with (\d+) of (\d+) samples unused", decision.text)
                if said:
                    assert self.ledger
                    assert [int(n) for n in said.groups()] == [self.passes, self.ledger.free, self.ledger.samples]
        if self.ledger and any(isinstance(d, Complete) and d.name == "pause" for d in decisions):
            said_so = any(isinstance(d, Log) and "unused" in d.text for d in decisions)
            assert said_so == bool(self.ledger.free), "samples that nobody used are told of"
        self._nothing_is_overdue()
        self._clocks_are_close()
        assert not self.stuck, f"deadlock: {self.where}, {self.waits}"
        assert self.coordinator.sync_every == self.every
        for worker, where in enumerate(self.where):
            assert self.coordinator.state(worker).value.startswith(where)
        return decisions

    def _take(self, take: Take) -> None:
        push = take.push
        group = self.groups[push.group]
        assert self.open[push.worker, push.group] is push and push.samples > 0
        assert all(p is not push for p in group.taken) and id(push) not in self.applied
        assert take.first == (not group.taken)
        part = take.factor * self.gradients[id(push)]
        group.buffer = part if take.first else group.buffer + part
        group.taken.append(push)

    def _update(self, update: Update) -> None:
        group = self.groups[update.group]
        assert len(update.pushes) == len(group.taken) > 0
        assert all(a is b for a, b in zip(update.pushes, group.taken))
        group.updates += 1
        group.version += 1
        assert update.version == group.version
        total = sum(p.samples for p in update.pushes)
        mean = sum(p.samples * self.gradients[id(p)] for p in update.pushes) / total
        np.testing.assert_allclose(update.scale * group.buffer, mean, rtol=1e-12)
        ranks = [p.worker for p in update.pushes]
        if self.consistency.synchronous:
            assert ranks == sorted(set(ranks))
            assert all(p.version == update.version - 1 for p in update.pushes)
            assert update.rate == update.pushes[0].rate
            trains = {w for w, where in enumerate(self.where) if where == "training"}
            assert trains <= {w for w, g in self.open if g == update.group}
        else:
            (push,) = update.pushes
            sizes = self.lent_sizes if self.ledger else list(group.largest.values())
            typical = sum(sizes) / len(sizes)
            weight = self._weight(update.version - 1 - push.version)
            assert update.scale == 1 and math.isclose(update.weight, weight, rel_tol=1e-12)
            assert math.isclose(update.rate, push.rate * weight * push.samples / typical, rel_tol=1e-12)
            self._count_for_sync(group)
        for push in update.pushes:
            self.staleness[push.worker][update.version - 1 - push.version] += 1
            self.weights[push.worker] += update.weight
            self.applied.add(id(push))
        group.taken = []

    def _weight(self, tau: int) -> float:
        assert isinstance(self.consistency, Asynchronous) and isinstance(self.consistency.weight, Weight)
        return weight_by_the_book(self.consistency.weight.text, tau)

    # -- who may go on --

    @property
    def _training(self) -> list[int]:
        return [w for w, where in enumerate(self.where) if where == "training"]

    @property
    def _computing(self) -> list[int]:
        return [w for w in self._training if w not in self.waits]

    def _clock(self, worker: int) -> int:
        """The most pushes in any group: a step may pass one over."""
        return max((group.steps[worker] for group in self.groups), default=0)

    def _count_for_sync(self, group: Group) -> None:
        group.since_sync += 1
        if self.every is not None and group.since_sync >= self.every * self.crew:
            self.syncing = True

    def _stand_together(self) -> None:
        """All have the same parameters: a forced sync, or an epoch, ends."""
        self.syncing, self.steady = False, True
        self.crew = len(self._training)  # N of the period that begins
        for group in self.groups:
            group.since_sync, group.steps = 0, Counter()

    def _held(self, push: Push) -> bool:
        """Whether an asynchronous push has a reason to wait."""
        if self.syncing:
            return bool(self._computing)
        bound = self.consistency.bound if isinstance(self.consistency, SSP) else None
        return bound is not None and self._clock(push.worker) > bound + min(map(self._clock, self._training))

    def _may_go(self, answered: list[Push], syncs: list[bool]) -> None:
        if self.consistency.synchronous:
            assert not any(syncs)
            return
        assert not any(self._held(push) for push in answered)
        assert all(sync == self.syncing for sync in syncs)
        if not self.syncing:
            return
        assert {id(p) for p in answered} == {id(p) for p in self.open.values()}, "all leave a forced sync together"
        if self.steady:
            assert self.every is not None
            least, workers = self.every * len(self._training), len(self._training)
            most = max(group.since_sync for group in self.groups)
            assert least <= most <= least + workers - 1
        self.syncs_of_fit.append(max(group.since_sync for group in self.groups))
        for push in answered:
            self.syncs[push.worker] += 1
        self._stand_together()

    def _clocks_are_close(self) -> None:
        if isinstance(self.consistency, SSP) and self._training:
            clocks = [self._clock(w) for w in self._training]
            assert max(clocks) - min(clocks) <= self.consistency.bound + 1

    # -- answers --

    def _lent(self, worker: int, lease: Lease | None) -> None:
        """A worker that asked for samples is answered."""
        if self.ledger and lease:
            assert not self.stop, "who is asked to stop needs no samples"
            self.ledger.lend(worker, lease)
        else:
            assert not lease
            assert self.stop or not self.ledger or not self.ledger.free, "there are samples left"

    def _answer(self, answer: Answer) -> None:
        push = answer.push
        assert self.open.pop((push.worker, push.group)) is push, "two answers to one push"
        assert bool(push.samples) == (id(push) in self.applied), "answered before it was applied"
        version = self.groups[push.group].version
        assert answer.version == version and answer.stop == self.stop
        assert answer.fresh == (answer.sync or version != push.version)
        self.versions[push.worker][push.group] = version
        if answer.sync:  # the parameters of all groups come with it
            self.versions[push.worker] = [g.version for g in self.groups]
        if push.wants_lease:
            self._lent(push.worker, answer.lease)
        else:
            assert answer.lease is None
        del self.waits[push.worker]
        self.answers[push.worker] = answer

    def _complete(self, done: Complete) -> None:
        key = done.name, done.sequence
        given = {w for w, what in self.waits.items() if what == key}
        assert done.members == tuple(sorted(given)) == tuple(done.contributions)
        assert self._required(done.name, given) <= given, "completed although somebody is missing"
        if done.name == "enter":
            self.stop, self.chief, self.every = False, min(given), None
            self.ledger, self.passes = None, 0
            self._stand_together()
        assert done.stop == self.stop
        ends = done.name == "resume" and any(done.contributions.values())
        if ends:  # a worker says that this was the last epoch, or that it wants to stop
            self.coordinator.finish()
        for worker in given:
            del self.waits[worker]
            self.answers[worker] = done
            if done.name in ("enter", "resume"):
                self.where[worker] = "training"
            if ends:
                self.where[worker] = "paused"
            if done.name == "enter":
                self.versions[worker] = []  # until the optimizers of this fit are declared
        if done.name == "declare":
            before = [g.version for g in self.groups]  # an optimizer keeps its version from one fit to the next
            versions = (before + [0] * 9)[: self.groups_of_fits.pop(0)]
            self.coordinator.define(versions, self.consistency)
            self.groups = [Group(v) for v in versions]
            self.every = self.consistency.sync_every if isinstance(self.consistency, WASP) else None
            self.syncs_of_fit = []
            self._stand_together()
        if done.name == "resume" and not ends:
            self._stand_together()
        if done.name == "enter":
            offer = self.offers.pop(0) if self.offers else None
            if offer:
                self.ledger = Ledger(offer, given)
                self.lent_sizes = [offer[1][w] for w in given]
                self.coordinator.offer(offer[0], {w: offer[1][w] for w in given})
        if done.name in ("enter", "resume") and not ends:
            self._begin_pass(given)
        for worker in given:
            if done.name == "declare" or (done.name == "pause" and self.versions[worker]):
                self.versions[worker] = [g.version for g in self.groups]

    def _begin_pass(self, workers: set[int]) -> None:
        leases = self.coordinator.begin_pass()
        if not self.ledger:
            assert not leases and not self.coordinator.passes
            return
        self.passes += 1
        assert self.coordinator.passes == self.passes and set(leases) == workers, "nobody goes without"
        self.ledger = Ledger((self.ledger.samples, self.ledger.sizes), workers)
        for worker, lease in leases.items():
            self.ledger.lend(worker, lease)

    def _required(self, name: str, given: set[int]) -> set[int]:
        if name in ("weights", "declare"):
            return {w for w, where in enumerate(self.where) if where == "training"}
        inside = {w for w, where in enumerate(self.where) if where in ("training", "paused")}
        if name == "enter" or not inside & given:
            return {w for w, where in enumerate(self.where) if where != "left"}
        return inside

    def _nothing_is_overdue(self) -> None:
        """Whatever could be answered has been answered: no push and no gather waits without somebody to wait for."""
        for what in self.waits.values():
            if isinstance(what, tuple):
                given = {w for w, other in self.waits.items() if other == what}
                assert not self._required(what[0], given) <= given, f"{what} is complete, but was not answered"
            elif self.consistency.synchronous:
                assert set(self._training) - {w for w, g in self.open if g == what.group}, f"{what} waits for nobody"
            else:
                assert self._held(what), f"{what} waits for nobody"

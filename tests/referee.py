"""Plays the server for a coordinator under test, and checks each of its decisions against the rules.

The referee keeps books of its own: where each worker is, which request of it is unanswered, what was pushed, taken and
applied. It carries decisions out on small vectors, so that an update can be compared with what its pushes say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hps_keras.consistency import Consistency
from hps_keras.coordinator import Coordinator
from hps_keras.decisions import Answer, Complete, Decision, Fail, Log, Push, Take, Update, Wait

NEVER = 1e8  # a time-out that no test reaches


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


class Referee:
    """Sends events to a coordinator and judges what it decides.

    Attributes:
        answers: What each worker was answered last: an `Answer`, a `Complete`, or None while it waits.
        where: The state of each worker, by the referee's own book.
    """

    def __init__(
        self, workers: int, consistency: Consistency, timeout: float = NEVER, groups: Sequence[int] = (1, 1)
    ) -> None:
        self.coordinator = Coordinator(workers, consistency, timeout, 0.0)
        self.consistency = consistency
        self.now = 0.0
        self.where = ["outside"] * workers
        self.answers: list[Answer | Complete | None] = [None] * workers
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
        self.random = np.random.default_rng(len(self.where))

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
        if not group:
            self.steps[worker] += 1
            self.pushes[worker] += 1
            self.samples[worker] += samples
        if samples:
            largest = self.groups[group].largest
            largest[worker] = max(samples, largest.get(worker, 0))
        return self._judge(self.coordinator.push(push, self.now))

    def gather(self, worker: int, name: str, contribution: Any = None) -> list[Decision]:
        self.sequences[worker][name] += 1
        key = name, self.sequences[worker][name]
        self._ask(worker, key)
        if name == "enter":
            self.where[worker], self.steps[worker] = "joining", 0
        elif name == "pause":
            self.where[worker] = "paused"
        return self._judge(self.coordinator.gather(worker, *key, contribution, self.now))

    def exit(self, worker: int) -> list[Decision]:
        self.where[worker] = "outside"
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
        for decision in decisions:
            if isinstance(decision, Fail):
                raise Refused(decision.text)
            if isinstance(decision, Take):
                self._take(decision)
            elif isinstance(decision, Update):
                self._update(decision)
            elif isinstance(decision, Answer):
                self._answer(decision)
            elif isinstance(decision, Complete):
                self._complete(decision)
            elif isinstance(decision, Wait):
                assert decision.worker in self.waits and decision.worker not in decision.awaited and decision.awaited
            else:
                assert isinstance(decision, Log) and decision.text
        self._nothing_is_overdue()
        assert not self.stuck, f"deadlock: {self.where}, {self.waits}"
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
            typical = sum(group.largest.values()) / len(group.largest)
            assert update.scale == 1 and np.isclose(update.rate, push.rate * push.samples / typical, rtol=1e-12)
        for push in update.pushes:
            self.staleness[push.worker][update.version - 1 - push.version] += 1
            self.applied.add(id(push))
        group.taken = []

    def _answer(self, answer: Answer) -> None:
        push = answer.push
        assert self.open.pop((push.worker, push.group)) is push, "two answers to one push"
        assert bool(push.samples) == (id(push) in self.applied), "answered before it was applied"
        version = self.groups[push.group].version
        assert answer.version == version and answer.fresh == (version != push.version) and answer.stop == self.stop
        self.versions[push.worker][push.group] = version
        del self.waits[push.worker]
        self.answers[push.worker] = answer

    def _complete(self, done: Complete) -> None:
        key = done.name, done.sequence
        given = {w for w, what in self.waits.items() if what == key}
        assert done.members == tuple(sorted(given)) == tuple(done.contributions)
        assert self._required(done.name, given) <= given, "completed although somebody is missing"
        if done.name == "enter":
            self.stop = False
        assert done.stop == self.stop
        ends = any(done.contributions.values())
        if done.name == "resume" and ends:  # a worker says that this was the last epoch, or that it wants to stop
            self.coordinator.finish()
        for worker in given:
            del self.waits[worker]
            self.answers[worker] = done
            if done.name in ("enter", "resume"):
                self.where[worker] = "training"
            if done.name == "resume" and ends:
                self.where[worker] = "paused"
            if done.name == "enter":
                self.versions[worker] = []  # until the optimizers of this fit are declared
        if done.name == "declare":
            before = [g.version for g in self.groups]  # an optimizer keeps its version from one fit to the next
            versions = (before + [0] * 9)[: self.groups_of_fits.pop(0)]
            self.coordinator.define(versions, self.consistency)
            self.groups = [Group(v) for v in versions]
        for worker in given:
            if done.name == "declare" or (done.name == "pause" and self.versions[worker]):
                self.versions[worker] = [g.version for g in self.groups]

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
            else:
                assert self.consistency.synchronous, "an asynchronous push waits"
                trains = {w for w, where in enumerate(self.where) if where == "training"}
                assert trains - {w for w, g in self.open if g == what.group}, f"{what} waits for nobody"

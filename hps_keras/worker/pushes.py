"""What a worker sends after every step, and what it takes from the answers.

A step's gradient is pushed when it has been computed. Then either the worker waits for the answer, or, with
``overlap=True``, the push travels while the next step computes, and the answer is taken when that has been done::

    waits      | compute t | exchange t | compute t+1 | exchange t+1 |
    overlap    | compute t | compute t+1 | compute t+2 |
                           | exchange t  | exchange t+1|

So the parameters that a step computes on are one answer older. Every push says of which version they were. One errand
travels at a time, and the server is spoken to by one thread at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hps_keras import backends
from hps_keras.coordination.decisions import FIRST_WAIT
from hps_keras.coordination.scheduling import Lease
from hps_keras.errors import HpsError
from hps_keras.quantization.precision import EXACT
from hps_keras.wire import Flag, Header, Kind
from hps_keras.worker.group import Group
from hps_keras.worker.link import Link
from hps_keras.worker.training import Training

if TYPE_CHECKING:
    from hps_keras.worker.averaging import Averaging

logger = logging.getLogger("hps_keras")

Came = tuple[Header, Sequence[int] | None]  # an answer, and the versions of the groups whose parameters it brought


class Pushes:
    """The exchange of one `fit`.

    Args:
        link: The line to the server.
        training: What has computed the gradients.
        rank: This worker's rank.
        averaging: This worker's part in the averages, where there is no server.

    Attributes:
        bits: Widths of gradients and of parameters, the same on all workers.
        wait: Whether the next push waits all the same, as before a checkpoint.
        synchronous: Whether the consistency model is.
        stop_asked: Whether somebody wants to end the training.
        epoch_over: Whether this worker has come to the end of the pass.
        bad: Gradients of this epoch that were not finite.
    """

    def __init__(self, link: Link, training: Training, rank: int, averaging: Averaging | None = None) -> None:
        self._link, self._training, self._rank = link, training, rank
        self._averaging = averaging
        self.bits = (EXACT, EXACT)
        self.wait, self.synchronous = False, True
        self.stop_asked = self.epoch_over = False
        self.bad = 0
        self._steps = 0
        self._waited = 0.0
        self._travelling: Future[Any] | None = None
        self._no_more = False  # what was heard last when asking for samples
        self._drain = False  # a forced sync has begun

    def begin_pass(self, ahead: bool) -> None:
        """A pass begins. `ahead` says whether the second batch of it was lent as well."""
        self.epoch_over, self._no_more = False, self._training.overlap and not ahead

    def exchange(self, step: backends.Step, seconds: float) -> None:
        """Pushes what a step has computed.

        Args:
            step: The step; parameters that have come are assigned to it.
            seconds: Time that it took.
        """
        groups, feed = self._training.groups, self._training.feed
        versions = [group.version for group in groups]  # on which it was computed
        self.land(step)
        self._steps += 1
        last = feed is not None and self._no_more and not feed.unused
        waits = self.wait or self._drain or self.stop_asked or last or self._steps <= FIRST_WAIT
        travels = self._training.overlap and not waits
        asks = feed is not None  # for the samples of a later step, with the first push
        errands = []
        for group, version in zip(groups, versions):
            flags = (Flag.LEASE if asks else 0) | (Flag.TRAVELS if travels else 0)
            push = self._push(group, step, Header(Kind.PUSH, flags, group.index, version, seconds=seconds))
            if push is None:
                continue
            if travels:
                errands.append((group, push, asks))
            else:
                self._take(group, push(), step, asks)
            asks = False
        if errands:
            self._travelling = self._link.travel(lambda: [(g, push(), a) for g, push, a in errands])
        elif asks:
            self._take_lease(self._link.request(Header(Kind.LEASE))[0])
        self.epoch_over = feed is not None and self._no_more and not feed.unused

    def land(self, step: backends.Step | None) -> None:
        """Waits for what travels, and takes it.

        Args:
            step: What the parameters are assigned to; None where others follow before the next step.

        Raises:
            HpsError: What went wrong on the way.
        """
        if self._travelling is None:
            return
        began = time.perf_counter()
        taken, self._travelling = self._travelling.result(), None
        self._waited = time.perf_counter() - began
        for group, answer, asked in taken:
            self._take(group, answer, step, asked)

    def _take(self, group: Group, came: Came, step: backends.Step | None, asked: bool) -> None:
        """Takes an answer in: parameters, samples, flags."""
        answer, versions = came
        for fresh, version in zip(self._fresh(group, answer), versions or [answer.version]):
            fresh.version = version
            if step is not None:
                step.assign(fresh.optimizer, fresh.variables, fresh.layout, fresh.into)
        if answer.flags & Flag.SYNC:
            self._drain = False
        elif answer.flags & Flag.DRAIN:
            self._drain = True
        if asked:
            self._take_lease(answer)
        if answer.flags & Flag.STOP:
            self.stop_asked = True

    def _take_lease(self, answer: Header) -> None:
        self._no_more = not answer.batch_size
        if answer.batch_size:
            self._training.feed.grant(Lease(answer.lease, answer.batch_size))
        if answer.flags & Flag.STOP:
            self.stop_asked = True

    def _push(self, group: Group, step: backends.Step, header: Header) -> Callable[[], Came] | None:
        """Prepares the push of an optimizer's gradient.

        Returns:
            What sends it, reads the answer's parameters and returns its head; None where there is nothing to push.
        """
        stash, applied = group.applied(step)
        accumulates = bool(group.optimizer.gradient_accumulation_steps)
        group.samples += step.samples
        samples = group.samples if applied else 0
        if applied or not accumulates:  # a step that applied nothing (an inf gradient) has no part in the next push
            group.samples = 0
        # A round waits for everybody's push. Accumulating workers of one optimizer are in phase, those of several need
        # not be.
        if not applied and (not self.synchronous or (accumulates and len(self._training.groups) == 1)):
            return None
        body = None
        payload: tuple[np.ndarray, ...] = ()
        present = stash.present
        if samples and self._averaging is None:
            step.gradients(group.optimizer, group.variables, present, group.out_views)
        elif samples and self._averaging is not None:
            self._averaging.gradients(step, group, present)
        if group.pieces.samples:
            samples, present = group.pieces.finish(group.out, samples, present)
        message = group.coder.encode(group.out, self.bits[0]) if samples else None
        if samples and message is None:
            self._refused(group)
            samples = 0
        if message is not None:
            payload = (message,)
            if len(present) < len(group.variables):
                body = [group.place[v] for v in present if v in group.place]
        headroom: Any = self._training.headroom
        header = header._replace(
            flags=header.flags | (0 if self._training.timed else Flag.UNTIMED),
            samples=samples,
            rate=stash.rate,
            sync_every=group.optimizer.__dict__["_hps"].sync_every,
            limit=self._training.limit,
            capacity=int(headroom.capacity) if headroom else 0,
            memory=headroom.memory if headroom else 0,
            bits=self.bits[0],
            ahead=self._training.feed.unused if self._training.feed is not None else 0,
            waited=self._waited,
        )
        self._waited = 0.0

        def push() -> Came:
            if self._averaging is not None:
                return self._averaging.push(group, header, body), None
            answer, versions, _ = self._link.request(header, body, payload, into=partial(self._memory, group))
            for fresh in self._fresh(group, answer):
                fresh.decode(answer.bits)
            return answer, versions

        return push

    def _fresh(self, group: Group, answer: Header) -> list[Group]:
        """The groups whose parameters come with an answer to one group's push: all at the end of a forced sync."""
        if answer.flags & Flag.SYNC:
            return self._training.groups
        return [group] if answer.flags & Flag.FRESH else []

    def _memory(self, group: Group, answer: Header) -> list[np.ndarray]:
        return [fresh.room(answer.bits) for fresh in self._fresh(group, answer)]

    def idle(self, stop: bool) -> None:
        """Without a server: takes part in the others' rounds until all have ended the epoch, as this worker has.

        Args:
            stop: Whether this worker wants all to end the training.
        """
        assert self._averaging is not None
        over, flags = False, Flag.IDLE | (Flag.STOP if stop else 0)
        while not over:
            for group in self._training.groups:
                answer = self._averaging.push(group, Header(Kind.PUSH, flags, group.index, group.version))
                group.version = answer.version
                over = bool(answer.flags & Flag.IDLE)

    def _refused(self, group: Group) -> None:
        """A gradient holds NaN or infinities: it is not sent."""
        self.bad += 1
        if group.coder.refused == 1:
            logger.warning(
                "worker %d: a gradient of optimizer %r holds NaN or infinities and is not sent",
                self._rank,
                group.optimizer.name,
            )
        most = group.optimizer.__dict__["_hps"].max_bad_pushes
        if group.coder.refused >= most:
            raise HpsError(
                f"worker {self._rank}: {most} gradients in a row hold NaN or infinities (max_bad_pushes={most}): lower "
                "the learning rate, clip gradients, or look at this worker's data"
            )

    def begin_epoch(self) -> None:
        """All stand together: what was begun before that is over."""
        self._drain, self.bad = False, 0

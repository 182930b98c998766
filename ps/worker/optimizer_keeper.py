"""When a worker sends the state of its optimizer to the server, and what happens to the state that an earlier one sent.

The worker sends it after a commit that the server has acknowledged, so the state belongs to work that counts. A later
attempt at the partition, or the same one after the server went back to a snapshot, begins with it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

from distkeras.ps.protocol.messages import (
    FetchRequest,
    KeepRequest,
    OptimizerState,
    Reply,
    Request,
    TakenRequest,
    Welcome,
)
from distkeras.ps.rules.base import Rule

#: The share of a worker's time that sending states may take.
SHARE = 0.02
#: Seconds from one state to the next, at least; and from a worker's beginning to its first state.
SHORTEST = 1.0
#: How many of the latest states' times count: one that took long for another reason does not.
_COUNTED = 3


class SaveInterval:
    """When the next state is due: sending them takes at most ``share`` of the time, as measured.

    Args:
        share: of the time, in (0, 1).
        now: clock, seconds.
    """

    def __init__(self, share: float = SHARE, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._share = share
        self._took: list[float] = []
        self._due = now() + SHORTEST

    @classmethod
    def of(cls, rule: Rule, workers: int, now: Callable[[], float] = time.monotonic) -> SaveInterval:
        """That of one of ``workers`` under ``rule``: in rounds, all wait while one of them sends its state."""
        return cls(SHARE / workers if rule.traits.synchronous else SHARE, now)

    @property
    def seconds(self) -> float:
        """From the end of sending one state to the beginning of the next."""
        if not self._took:
            return SHORTEST
        return max(SHORTEST, statistics.median_low(self._took) * (1.0 - self._share) / self._share)

    def due(self) -> bool:
        """Return whether a state is to be sent now."""
        return self.now() >= self._due

    def sent(self, seconds: float) -> None:
        """A state was read and sent, which took ``seconds``."""
        self._took = [*self._took, seconds][-_COUNTED:]
        self._due = self.now() + self.seconds


class StatefulReplica(Protocol):
    """A replica whose optimizer has a state."""

    def read_optimizer(self) -> OptimizerState | None:
        """Return the state of the optimizer; None if it has none that is worth keeping."""

    def load_optimizer(self, state: OptimizerState | None, example: Any) -> str | None:
        """Set the state of the optimizer, before the first step.

        Args:
            state: None: none is kept.
            example: a mini-batch of the shapes to come.

        Returns:
            None if the optimizer has no state; "" if it has the given one now; else why not.
        """


_Steps = Generator[Request, Reply | None, None]


class OptimizerKeeper:
    """The part of the worker's loop that is about its optimizer.

    Args:
        interval: when a state is due; of the attempt, whose loop may begin again.
        welcome: where the partition stands.
        at_end: send the state at the end of the data, too, for the data to come.
    """

    def __init__(
        self, replica: StatefulReplica, interval: SaveInterval, welcome: Welcome, *, at_end: bool = False
    ) -> None:
        self._replica, self._interval, self._at_end = replica, interval, at_end
        #: The state is that of the last commit of the data before, which is nothing to report.
        self._usual = at_end and (welcome.epoch, welcome.batch) == (0, 0) and welcome.optimizer == welcome.sequence
        #: Whether a loop has trained this partition before, and whether the server has a state of its optimizer.
        self._continues, self._kept = welcome.sequence > 0, welcome.optimizer > 0
        self._captured: OptimizerState | None = None
        self._took = 0.0

    def begin(self, example: Any) -> _Steps:
        """Take over the state that an earlier loop has sent; before the first step, whose mini-batch is ``example``."""
        if not self._continues:
            return
        state: OptimizerState | None = None
        if self._kept:
            reply = yield FetchRequest()
            assert reply is not None
            state = reply.optimizer
        problem = self._replica.load_optimizer(state, example)
        if problem is not None and not (self._usual and not problem):
            yield TakenRequest(problem)

    def capture(self) -> None:
        """Read the state, if it is time: no step is taken between this and the commit that it belongs to."""
        if self._interval.due():
            began = self._interval.now()
            self._captured = self._replica.read_optimizer()
            self._took = self._interval.now() - began
            if self._captured is None:
                self._interval.sent(self._took)

    def send(self) -> _Steps:
        """Send what was captured, now that the commit that it belongs to is applied."""
        if self._captured is not None:
            state, self._captured = self._captured, None
            began = self._interval.now()
            yield KeepRequest(state)
            self._interval.sent(self._took + self._interval.now() - began)

    def end(self) -> _Steps:
        """Send the state after the last commit, which is applied, if the data to come begin with it."""
        if self._at_end and (state := self._replica.read_optimizer()) is not None:
            yield KeepRequest(state)

"""The transfer of optimizer states: when a worker sends its state to the server, and how it takes over an earlier one.

The worker sends its state after an acknowledged commit, so the state contains only committed steps. A later attempt at
the partition, or the same attempt after the server was restored from a snapshot, begins with it.
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
#: The shortest time between two states, and from a worker's start to its first state, in seconds.
STATE_SECONDS_MIN = 1.0
#: How many of the latest durations are considered; their median ignores a single outlier.
_COUNTED = 3


class SaveInterval:
    """Decides when the next state is due, so that sending states takes at most ``share`` of the measured time.

    Args:
        share: of the time, in (0, 1).
        now: clock, seconds.
    """

    def __init__(self, share: float = SHARE, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._share = share
        self._took: list[float] = []
        self._due = now() + STATE_SECONDS_MIN

    @classmethod
    def of(cls, rule: Rule, workers: int, now: Callable[[], float] = time.monotonic) -> SaveInterval:
        """Return the interval for one of ``workers`` under ``rule``."""
        # In rounds, all workers wait while one of them sends its state.
        return cls(SHARE / workers if rule.traits.synchronous else SHARE, now)

    @property
    def seconds(self) -> float:
        """The pause after sending one state, in seconds."""
        if not self._took:
            return STATE_SECONDS_MIN
        return max(STATE_SECONDS_MIN, statistics.median_low(self._took) * (1.0 - self._share) / self._share)

    def due(self) -> bool:
        """Return whether a state is due now."""
        return self.now() >= self._due

    def sent(self, seconds: float) -> None:
        """Record that reading and sending a state took ``seconds``."""
        self._took = [*self._took, seconds][-_COUNTED:]
        self._due = self.now() + self.seconds


class StatefulReplica(Protocol):
    """A replica whose optimizer has a state."""

    def read_optimizer(self) -> OptimizerState | None:
        """Return the state of the optimizer; None if it has none that must be kept."""

    def load_optimizer(self, state: OptimizerState | None, example: Any) -> str | None:
        """Set the state of the optimizer, before the first step.

        Args:
            state: the kept state; None: the server has none.
            example: a mini-batch, for the shapes.

        Returns:
            None if the optimizer has no state; "" if the given state was loaded; else the reason why it was not.
        """


_Steps = Generator[Request, Reply | None, None]


class OptimizerKeeper:
    """The part of the worker's loop that concerns its optimizer.

    Args:
        interval: decides when a state is due; one for all loops of an attempt.
        welcome: the partition's progress.
        at_end: also send the state at the end of the data, for the stream's next micro-batch.
    """

    def __init__(
        self, replica: StatefulReplica, interval: SaveInterval, welcome: Welcome, *, at_end: bool = False
    ) -> None:
        self._replica, self._interval, self._at_end = replica, interval, at_end
        #: The kept state is that of the previous micro-batch's last commit, so taking it over is not reported.
        self._usual = at_end and (welcome.epoch, welcome.batch) == (0, 0) and welcome.optimizer == welcome.sequence
        #: Whether a loop has trained this partition before, and whether the server has a state of its optimizer.
        self._continues, self._kept = welcome.sequence > 0, welcome.optimizer > 0
        self._captured: OptimizerState | None = None
        self._took = 0.0

    def begin(self, example: Any) -> _Steps:
        """Take over the state that an earlier loop has sent, before the first step; its mini-batch is ``example``."""
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
        """Read the state, if it is due; the caller takes no step between this and the commit to which it belongs."""
        if self._interval.due():
            began = self._interval.now()
            self._captured = self._replica.read_optimizer()
            self._took = self._interval.now() - began
            if self._captured is None:
                self._interval.sent(self._took)

    def send(self) -> _Steps:
        """Send the captured state, after its commit is acknowledged."""
        if self._captured is not None:
            state, self._captured = self._captured, None
            began = self._interval.now()
            yield KeepRequest(state)
            self._interval.sent(self._took + self._interval.now() - began)

    def end(self) -> _Steps:
        """Send the state after the last commit, if the next micro-batch begins with it."""
        if self._at_end and (state := self._replica.read_optimizer()) is not None:
            yield KeepRequest(state)

"""The transfer of optimizer states: when a worker sends its state to the server, and how it takes over an earlier one.

The rule's own vectors of a worker (`Traits.history`) travel with the state of its optimizer.

The worker sends its state after an acknowledged commit, so the state contains only committed steps. A later attempt at
the partition, or the same attempt after the server was restored from a snapshot, begins with it.
"""

from __future__ import annotations

import json
import statistics
import time
import zlib
from collections.abc import Callable, Generator
from typing import Any, Protocol

import numpy as np

from distkeras.ps.protocol.loop import NO_BYTES, FetchRequest, KeepRequest, OptimizerState, Reply, Request, TakenRequest
from distkeras.ps.protocol.messages import Welcome
from distkeras.ps.rules.base import Replica, Rule, WorkerState

#: The share of a worker's time that sending states may take.
SHARE = 0.02
#: The shortest time between two states, and from a worker's start to its first state, in seconds.
STATE_SECONDS_MIN = 1.0
#: How many of the latest durations are considered; their median ignores a single outlier.
_COUNTED = 3


class SaveInterval:
    """Decides when the next state is due, so that sending states takes at most ``share`` of the measured time."""

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


class StatefulReplica(Replica, Protocol):
    """A replica whose optimizer has a state."""

    def read_optimizer(self) -> OptimizerState | None:
        """Return the state of the optimizer; None if it has none that must be kept."""

    def load_optimizer(self, state: OptimizerState | None, example: Any) -> str | None:
        """Set the kept state of the optimizer, if any, before the first step.

        Return None if the optimizer has no state; "" if the state was loaded; else the reason why it was not.
        """


_Steps = Generator[Request, Reply | None, None]


def is_kept(rule: Rule) -> bool:
    """Return whether a worker under ``rule`` has a state of its own: with `gradient` alone, the server takes steps."""
    return bool(rule.traits.history) or not rule.traits.gradient


def with_history(rule: Rule, state: WorkerState, optimizer: OptimizerState | None) -> OptimizerState | None:
    """Return the state of the optimizer with the rule's own vectors before it; None if there is neither."""
    names = rule.traits.history
    if not names:
        return optimizer
    vectors = [state.vectors[name] for name in names]
    if not all(np.isfinite(vector).all() for vector in vectors):
        return None
    kinds = [[name, vector.dtype.str, vector.size] for name, vector in zip(names, vectors, strict=True)]
    layout = json.dumps([kinds, state.used_learning_rate, optimizer and optimizer.layout])
    bytes_of = [np.ascontiguousarray(vector).view(np.uint8) for vector in vectors]
    content = np.concatenate([*bytes_of, NO_BYTES if optimizer is None else optimizer.content])
    return OptimizerState(layout, content, zlib.crc32(content.data))


def load_history(
    rule: Rule, replica: Replica, state: WorkerState, kept: OptimizerState
) -> tuple[str, OptimizerState | None]:
    """Let the rule continue from what `with_history` returned; return why not, or "", and the optimizer's state."""
    if kept.damaged:
        return f"its {kept.content.nbytes} bytes have another checksum than {kept.checksum:#010x}", None
    try:
        kinds, rate, layout = json.loads(kept.layout)
        rate = float(rate)
    except (TypeError, ValueError):
        return f"it must have the rule's vectors {list(rule.traits.history)}. Received: {kept.layout[:80]!r}", None
    expected = [[name, state.sent.dtype.str, state.sent.size] for name in rule.traits.history]
    of_history = sum(state.sent.nbytes for _ in expected)
    if kinds != expected or kept.content.nbytes < of_history:
        return f"its vectors must be {expected}. Received: {kinds}, and {kept.content.nbytes} bytes", None
    # A copy, because the rule changes its vectors, and views need aligned memory.
    own = np.frombuffer(kept.content[:of_history].tobytes(), state.sent.dtype)
    history = [vector.copy() for vector in np.split(own, len(expected))]
    rule.continue_from(replica, state, history, rate)
    if layout is None:
        return "", None
    rest = kept.content[of_history:].copy()  # aligned
    return "", OptimizerState(str(layout), rest, zlib.crc32(rest.data))


class OptimizerKeeper:
    """The part of the worker's loop that concerns its optimizer, and what its rule takes from window to window.

    Args:
        interval: decides when a state is due; one for all loops of an attempt.
        at_end: also send the state at the end of the data, for the stream's next micro-batch.
    """

    def __init__(
        self, rule: Rule, replica: StatefulReplica, interval: SaveInterval, welcome: Welcome, *, at_end: bool = False
    ) -> None:
        self._rule, self._replica, self._interval, self._at_end = rule, replica, interval, at_end
        #: The state of the rule, which `begin` is given.
        self._state: WorkerState | None = None
        #: The kept state is that of the previous micro-batch's last commit, so taking it over is not reported.
        self._usual = at_end and (welcome.epoch, welcome.batch) == (0, 0) and welcome.optimizer == welcome.sequence
        #: Whether a loop has trained this partition before, and whether the server has a state of its optimizer.
        self._continues, self._kept = welcome.sequence > 0, welcome.optimizer > 0
        self._captured: OptimizerState | None = None
        self._took = 0.0

    def begin(self, example: Any, own: WorkerState) -> _Steps:
        """Take over the state that an earlier loop has sent, before the first step; ``own`` is the rule's."""
        self._state = own
        if not self._continues:
            return
        state: OptimizerState | None = None
        if self._kept:
            reply = yield FetchRequest()
            assert reply is not None
            state = reply.optimizer
        problem = self._load(state, example, own)
        if problem is not None and not (self._usual and not problem):
            yield TakenRequest(problem)

    def _load(self, state: OptimizerState | None, example: Any, own: WorkerState) -> str | None:
        """Load ``state``; return "" if that succeeded, the reason why it did not, or None if nothing is kept."""
        if not self._rule.traits.history:
            return self._replica.load_optimizer(state, example)
        if state is None:
            return "none is kept"
        problem, optimizer = load_history(self._rule, self._replica, own, state)
        if problem or self._rule.traits.gradient:
            return problem
        return self._replica.load_optimizer(optimizer, example) or ""

    def _read(self) -> OptimizerState | None:
        assert self._state is not None
        optimizer = None if self._rule.traits.gradient else self._replica.read_optimizer()
        return with_history(self._rule, self._state, optimizer)

    def capture(self) -> None:
        """Read the state, if it is due; the caller takes no step between this and the commit to which it belongs."""
        if self._interval.due():
            began = self._interval.now()
            self._captured = self._read()
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

    def end(self, *, leaving: bool) -> _Steps:
        """Send the state after the last commit, if the next micro-batch begins with it, or the next attempt now."""
        if (self._at_end or leaving) and (state := self._read()) is not None:
            yield KeepRequest(state)

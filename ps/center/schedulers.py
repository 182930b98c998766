"""Schedulers, which release the reply to a worker at once, when a round ends, or when it is not too far ahead; rounds.

A scheduler is a plain state machine; its caller waits, with a deadline, until `ready` returns True.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from distkeras.ps.center.buffers import Buffer
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.messages import Commit
from distkeras.ps.rules.base import Rule
from distkeras.ps.validate import require_integer


class Scheduler:
    """Asynchronous: every reply goes out at once; with ``gather``, not before all n workers have joined."""

    #: Whether the reply to a commit is always sent before the next commit is applied.
    at_once: ClassVar[bool] = True

    def __init__(self, workers: int, *, gather: bool = False) -> None:
        self.workers = workers
        self.gather = gather
        self.active: set[int] = set()
        self._seen: set[int] = set()

    def joined(self, worker: int) -> None:
        """Record that ``worker`` has a lease; a later attempt joins again under the same number."""
        self.active.add(worker)
        self._seen.add(worker)

    def finished(self, worker: int) -> None:
        """Record that ``worker`` has no more data and will not return."""
        self.active.discard(worker)

    def committed(self, worker: int) -> None:
        """Record that a commit of ``worker`` was applied."""

    def missing(self) -> set[int]:
        """Return the workers that have not joined yet, if all must join before the first reply."""
        return set(range(self.workers)) - self._seen if self.gather else set()

    def _gathered(self) -> bool:
        return not self.gather or len(self._seen) == self.workers

    def ready(self, worker: int) -> bool:
        """Return whether ``worker`` may be sent the center now."""
        return self._gathered()

    def waiting_for(self, worker: int) -> set[int]:
        """Return the workers that ``worker`` waits for, for the text of a DeadlineError."""
        return self.missing()

    def describe_wait(self, worker: int) -> str:
        """Return a description of what ``worker`` waits for, for the text of a DeadlineError."""
        missing = self.missing()
        if not missing:
            return f"workers {sorted(self.waiting_for(worker))} to commit"
        running = self.workers - len(missing)
        return (
            f"all workers to run at once, as this rule needs: {running} of {self.workers} got a slot; "
            f"missing: {sorted(missing)}"
        )

    def progress(self) -> dict[int, int]:
        """Return one number per worker that a snapshot must keep; workers may be left out."""
        return {}

    def restore(self, progress: dict[int, int], *, seen: set[int], active: set[int]) -> None:
        """Restore a snapshot: ``active`` are the workers with data left, ``seen`` those that need not join again."""
        self._seen, self.active = set(seen), set(active)


class Synchronous(Scheduler):
    """Rounds: a round ends when every active worker has committed once, and all replies are then released.

    A worker that has died is still active: the round waits for its next attempt, until the deadline. A worker whose
    data has ended is not active.
    """

    at_once = False

    def __init__(self, workers: int) -> None:
        super().__init__(workers, gather=True)
        self.arrived: set[int] = set()

    def committed(self, worker: int) -> None:
        self.arrived.add(worker)

    def round_complete(self) -> bool:
        return bool(self.arrived) and self.active <= self.arrived

    def next_round(self) -> None:
        self.arrived.clear()

    def ready(self, worker: int) -> bool:
        return worker not in self.arrived and self._gathered()

    def waiting_for(self, worker: int) -> set[int]:
        return self.missing() or self.active - self.arrived

    def progress(self) -> dict[int, int]:
        return dict.fromkeys(self.arrived, 1)

    def restore(self, progress: dict[int, int], *, seen: set[int], active: set[int]) -> None:
        super().restore(progress, seen=seen, active=active)
        self.arrived = set(progress)


class BoundedStaleness(Scheduler):
    """Stale synchronous: a worker may start its iteration i only if i - min_j i_j <= bound; with 0, as in rounds.

    Reference: Hermans 2017, Section 2.4.1.
    """

    at_once = False

    def __init__(self, workers: int, bound: int) -> None:
        super().__init__(workers, gather=True)
        self.bound = bound
        self.iterations = dict.fromkeys(range(workers), 0)
        self._slowest = 0  # iterations of the slowest active worker; cached, because `ready` is called often

    def joined(self, worker: int) -> None:
        super().joined(worker)
        self._find_slowest()

    def finished(self, worker: int) -> None:
        super().finished(worker)
        self._find_slowest()

    def committed(self, worker: int) -> None:
        self.iterations[worker] += 1
        if self.iterations[worker] == self._slowest + 1:
            self._find_slowest()

    def _find_slowest(self) -> None:
        furthest = max(self.iterations.values())
        self._slowest = min((self.iterations[other] for other in self.active), default=furthest)

    def ready(self, worker: int) -> bool:
        return self.iterations[worker] - self._slowest <= self.bound and self._gathered()

    def waiting_for(self, worker: int) -> set[int]:
        limit = self.iterations[worker] - self.bound
        return self.missing() or {other for other in self.active if self.iterations[other] < limit}

    def progress(self) -> dict[int, int]:
        return dict(self.iterations)

    def restore(self, progress: dict[int, int], *, seen: set[int], active: set[int]) -> None:
        super().restore(progress, seen=seen, active=active)
        self.iterations |= progress
        self._find_slowest()


@dataclass
class Round:
    """The current round. `Center` ends it, with the rule's kernel.

    Args:
        moving_statistics: sum of the contributed statistics, each weighted by its steps.
        total: sum of the payloads; None before the first.
        steps: sum of the weights of the moving statistics.
        skipped: workers that have arrived, but whose commits were skipped for a NaN or infinity.
        began, previous_began: clock at the beginning of this round and of the previous one.
        stopping: the job was already ending early at the end of the previous round.
    """

    moving_statistics: np.ndarray
    total: Buffer | None = None
    steps: int = 0
    skipped: int = 0
    began: int = 0
    previous_began: int = 0
    stopping: bool = False

    def contribute(self, part: Buffer) -> None:
        """Add a payload, and take over its buffer."""
        if self.total is None:
            self.total = part
        else:
            self.total.array += part.array
            part.drop()

    def contribute_moving_statistics(self, commit: Commit) -> None:
        """Add the moving statistics of ``commit``, weighted by its steps."""
        self.moving_statistics += commit.moving_statistics * commit.steps
        self.steps += commit.steps

    def take_moving_statistics(self) -> np.ndarray:
        """Return the weighted mean of the moving statistics, and reset them."""
        mean = self.moving_statistics / self.steps
        self.moving_statistics = np.zeros_like(self.moving_statistics)
        self.steps = 0
        return mean

    def end(self, clock: int) -> None:
        """Begin the next round at ``clock``, without contributions."""
        self.total = None
        self.previous_began, self.began = self.began, clock


def scheduler_for(
    rule: Rule, workers: int, staleness_bound: int | None = None, *, rounds: bool = False, gather: bool = False
) -> Scheduler:
    """Return a scheduler for ``rule``, or for ``staleness_bound`` iterations ahead of the slowest worker.

    ``rounds`` and ``gather`` ask for rounds, and to wait for all workers, also where the rule needs neither.
    """
    if staleness_bound is None and not rounds:
        gather = gather or rule.traits.fixed_workers
        return Synchronous(workers) if rule.traits.synchronous else Scheduler(workers, gather=gather)
    if staleness_bound is not None:
        staleness_bound = require_integer("staleness_bound", staleness_bound, 0)
    if rounds and staleness_bound is not None:
        raise ConfigurationError(
            f"either `rounds` or `staleness_bound` must be given. Received: both ({staleness_bound})"
        )
    if rule.traits.pull_first:
        raise ConfigurationError(
            f"`rounds` and `staleness_bound` hold back the center, with which rule {rule.name!r} does not answer a "
            f"commit. Received: rounds={rounds}, staleness_bound={staleness_bound}"
        )
    if staleness_bound is None:
        if rule.window_by_speed is not None:
            raise ConfigurationError(
                f"`rounds` need the same window at all workers. Received: rule {rule.name!r}, window={rule.window!r}"
            )
        return Synchronous(workers)
    if rule.traits.synchronous:
        raise ConfigurationError(
            f"`staleness_bound` is for rules without rounds; rule {rule.name!r} must run in rounds. "
            f"Received: staleness_bound={staleness_bound}"
        )
    return BoundedStaleness(workers, staleness_bound)

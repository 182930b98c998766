"""Schedulers, which release the reply to a worker at once, when a round ends, or when it is not too far ahead.

A scheduler is a plain state machine; its caller waits, with a deadline, until `ready` returns True.
"""

from __future__ import annotations

from typing import ClassVar

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules.base import Rule
from distkeras.ps.validate import require_integer


class Scheduler:
    """Asynchronous: every reply goes out at once.

    Args:
        gather: no worker is sent the center before all n workers have joined.
    """

    #: Whether nothing can come between a commit and its reply.
    at_once: ClassVar[bool] = True

    def __init__(self, workers: int, *, gather: bool = False) -> None:
        self.workers = workers
        self.gather = gather
        self.active: set[int] = set()
        self._seen: set[int] = set()

    def joined(self, worker: int) -> None:
        """``worker`` has a lease; a successor joins again under the same number."""
        self.active.add(worker)
        self._seen.add(worker)

    def finished(self, worker: int) -> None:
        """``worker`` has no more data and will not come back."""
        self.active.discard(worker)

    def committed(self, worker: int) -> None:
        """A commit of ``worker`` was applied."""

    def missing(self) -> set[int]:
        """Workers that a gathering still waits for."""
        return set(range(self.workers)) - self._seen if self.gather else set()

    def _gathered(self) -> bool:
        return not self.gather or len(self._seen) == self.workers

    def ready(self, worker: int) -> bool:
        """Return whether ``worker`` may be sent the center now."""
        return self._gathered()

    def waiting_for(self, worker: int) -> set[int]:
        """Whom ``worker`` waits for: names for a deadline's error."""
        return self.missing()

    def awaited(self, worker: int) -> str:
        """What ``worker`` waits for, for a deadline's error."""
        missing = self.missing()
        if not missing:
            return f"workers {sorted(self.waiting_for(worker))} to commit"
        running = self.workers - len(missing)
        return (
            f"all workers to run at once, as this rule needs: {running} of {self.workers} got a slot; "
            f"missing: {sorted(missing)}"
        )

    def progress(self) -> dict[int, int]:
        """Return what a snapshot must keep in addition to the active workers: a number for some workers."""
        return {}

    def restore(self, progress: dict[int, int], *, seen: set[int], active: set[int]) -> None:
        """Takes a snapshot's place: ``active`` are those with data left, ``seen`` those that need not join again."""
        self._seen, self.active = set(seen), set(active)


class Synchronous(Scheduler):
    """Rounds: a round ends when every active worker has committed once, and then releases all.

    A worker that died still counts until its successor commits or the wait's deadline passes; one whose data ended
    no longer does.
    """

    at_once = False

    def __init__(self, workers: int) -> None:
        super().__init__(workers, gather=True)
        self.arrived: set[int] = set()

    def committed(self, worker: int) -> None:
        """``worker`` has arrived in this round."""
        self.arrived.add(worker)

    def round_complete(self) -> bool:
        """Return whether there are contributions and no active worker is missing."""
        return bool(self.arrived) and self.active <= self.arrived

    def next_round(self) -> None:
        """Releases everybody."""
        self.arrived.clear()

    def ready(self, worker: int) -> bool:
        """Return whether the round that ``worker`` arrived in has ended."""
        return worker not in self.arrived and self._gathered()

    def waiting_for(self, worker: int) -> set[int]:
        """Who has not joined; else, who has not arrived in this round."""
        return self.missing() or self.active - self.arrived

    def progress(self) -> dict[int, int]:
        """A 1 for each worker that has arrived."""
        return dict.fromkeys(self.arrived, 1)

    def restore(self, progress: dict[int, int], *, seen: set[int], active: set[int]) -> None:
        """Restore the active workers and the unfinished round."""
        super().restore(progress, seen=seen, active=active)
        self.arrived = set(progress)


class BoundedStaleness(Scheduler):
    """Stale synchronous: a worker may start its iteration i only if i - min_j i_j <= bound.

    Args:
        bound: s, at least 0; 0 paces like rounds, a large one is asynchronous.

    Reference: Hermans 2017, Section 2.4.1.
    """

    at_once = False

    def __init__(self, workers: int, bound: int) -> None:
        super().__init__(workers, gather=True)
        self.bound = bound
        self.iterations = dict.fromkeys(range(workers), 0)
        self._slowest = 0  # iterations of the slowest active worker: `ready` is asked for everyone who waits

    def joined(self, worker: int) -> None:
        """``worker`` counts among those that the others wait for."""
        super().joined(worker)
        self._find_slowest()

    def finished(self, worker: int) -> None:
        """Let no one wait for ``worker`` any more."""
        super().finished(worker)
        self._find_slowest()

    def committed(self, worker: int) -> None:
        """``worker`` has ended an iteration."""
        self.iterations[worker] += 1
        if self.iterations[worker] == self._slowest + 1:
            self._find_slowest()

    def _find_slowest(self) -> None:
        everyone = self.iterations.values()
        self._slowest = min((self.iterations[other] for other in self.active), default=max(everyone))

    def ready(self, worker: int) -> bool:
        """Return whether ``worker`` is not too far ahead."""
        return self.iterations[worker] - self._slowest <= self.bound and self._gathered()

    def waiting_for(self, worker: int) -> set[int]:
        """Who has not joined; else, who is too far behind ``worker``."""
        limit = self.iterations[worker] - self.bound
        return self.missing() or {other for other in self.active if self.iterations[other] < limit}

    def progress(self) -> dict[int, int]:
        """The iterations of each worker."""
        return dict(self.iterations)

    def restore(self, progress: dict[int, int], *, seen: set[int], active: set[int]) -> None:
        """Restore the active workers and the iterations."""
        super().restore(progress, seen=seen, active=active)
        self.iterations |= progress
        self._find_slowest()


def scheduler_for(
    rule: Rule, workers: int, staleness_bound: int | None = None, *, rounds: bool = False, gather: bool = False
) -> Scheduler:
    """The scheduler that ``rule`` runs under.

    Args:
        staleness_bound: iterations that a worker may be ahead of the slowest; None: no bound.
        rounds: hold a barrier around a rule that has none.
        gather: workers begin together, also under a rule that does not need it.

    Raises:
        ConfigurationError: the rule does not go with such a scheduler.
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

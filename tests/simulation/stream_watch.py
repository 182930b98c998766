"""Checks, under any fault, that each of a stream's micro-batches counts once and none is omitted."""

from __future__ import annotations

from typing import Any

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.center.micro_batches import number_of
from distkeras.ps.protocol.messages import Commit
from simulation.plan import Layout, Plan
from simulation.reference import Standing
from simulation.scheduler import Finding


class StreamWatch:
    """A record of the micro-batch of each commit, and of the micro-batches that Spark no longer sends.

    Args:
        plan: plan of the run.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        #: The micro-batch of each commit, by incarnation, partition, attempt and number.
        self._micro_batches: dict[tuple[int, ...], int] = {}
        #: The last micro-batch that Spark has recorded as done, and the clock after it.
        self.noted, self._clock = -1, 0

    def sent(self, layout: Layout, commit: Commit) -> None:
        """Record that a worker sends a commit of the rows of ``layout``."""
        who = commit.incarnation, commit.worker, commit.attempt, commit.sequence
        self._micro_batches[who] = layout.micro_batch

    def layout_of(self, row: Any) -> Layout:
        """Return the layout of the rows that a record's commit was computed from."""
        who = tuple([int(row[name]) for name in ("incarnation", "worker", "attempt", "sequence")])
        return self._plan.micro_batch(self._micro_batches[who])

    def present_layout(self, center: Center) -> Layout:
        """Return the layout of the rows that the leases of ``center`` concern."""
        return self._plan.micro_batch(max(0, number_of(center)))

    def note(self, number: int, clock: int) -> None:
        """Record that a micro-batch is done with the clock at ``clock``, so that Spark does not send it again."""
        if number != self.noted + 1:
            raise Finding("noted", f"micro-batch {self.noted + 1} must be noted next. Received: {number}")
        self.noted, self._clock = number, clock

    def require_covered(self, center: Center) -> None:
        """Check that a server that comes up has all rows that Spark does not send again, and no older clock."""
        number = number_of(center)
        if self.noted >= 0 and (number < self.noted or (number == self.noted and not center.leases.complete)):
            raise Finding(
                "not covered",
                f"micro-batch {self.noted} is noted and must be covered. Received: a center at micro-batch {number}",
            )
        if center.clock < self._clock:
            raise Finding("clock", f"the clock must be {self._clock} at least. Received: {center.clock}")

    def check_begin(self, center: Center, elements: Center, before: Standing) -> None:
        """Check that a micro-batch begins after the previous one has counted completely, and changes neither the center
        nor the rule's state of a partition.

        ``elements`` is the center that has the vectors.
        """
        last = before.numbers["micro_batch"]
        number, due = number_of(center), 0 if last is None else last.number + 1
        if number != due:
            raise Finding("micro-batch", f"micro-batch {due} must begin. Received: {number}")
        if last is not None and before.finished != frozenset(range(center.workers)):
            text = f"micro-batch {last.number} must end before the next one. Received: {sorted(before.finished)}"
            raise Finding("micro-batch", text)
        same = np.array_equal(before.center, elements.current.array) and before.numbers["clock"] == center.clock
        if not (same and np.array_equal(before.statistics, center.moving_statistics)):
            raise Finding("micro-batch", f"the center must stay as micro-batch {number} begins. Received: another one")
        for worker, vectors in before.workers.items():  # they continue, as a worker's optimizer does
            now = elements.leases[worker].vectors
            if len(now) != len(vectors) or not all(map(np.array_equal, vectors, now)):
                text = f"the rule's state of partition {worker} must continue in micro-batch {number}"
                raise Finding("micro-batch", f"{text}. Received: another one")
        at = {worker: (lease.epoch, lease.batch) for worker, lease in center.leases.items()}
        if any(place != (0, 0) for place in at.values()):
            raise Finding("micro-batch", f"partitions must begin with their first rows. Received: {at}")

    def require_states(self, center: Center) -> None:
        """Check that a partition's optimizer continues in the next micro-batch after its last commit in this one.

        This holds only without faults: a worker may die between its last commit and its state.
        """
        for worker, lease in center.leases.items():
            after = 0 if lease.optimizer is None else lease.optimizer.sequence
            if after != lease.sequence:
                text = f"partition {worker} must continue with the state after commit {lease.sequence}"
                raise Finding("state", f"{text}. Received: that behind commit {after}")

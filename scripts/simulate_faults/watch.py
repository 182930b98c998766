"""What must hold after every step of a run, whatever strikes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import NO_ATTEMPT
from simulate_faults.plan import Layout, Plan
from simulate_faults.scheduler import Finding, Process
from simulate_faults.world import Surroundings, VirtualChild

#: Rules whose windows begin with what the worker was sent last.
_PLAIN = ("downpour", "asgd", "dana_zero")


@dataclass
class _Standing:
    """How far a partition had come when it was looked at last, and who spoke for it."""

    position: tuple[int, int] = (0, 0)
    sequence: int = 0
    attempt: int = NO_ATTEMPT
    peer: Any = None


@dataclass
class _Life:
    """A server's center as it was looked at last."""

    center: Center
    standings: dict[int, _Standing]
    #: Of its ledger.
    rows: int
    holders: dict[int, Any]


class Watch:
    """Looks at the server that serves.

    Args:
        plan: of the run.
        surroundings: likewise.
        tell: takes what a story is made of.
    """

    def __init__(self, plan: Plan, surroundings: Surroundings, tell: Callable[[str], None]) -> None:
        self._plan, self._surroundings, self._tell = plan, surroundings, tell
        self._lives: dict[int, _Life] = {}
        #: When a commit was applied last.
        self.progressed = 0.0
        #: What each partition was told outlives the server, by the numbers of layout and partition; and who was let go.
        self.durable: dict[tuple[int, int], int] = {}
        self.let_go: set[tuple[int, int]] = set()
        #: Whether a driver has ended the job early.
        self.ends_early = False
        #: Whether a snapshot was damaged: then the one before it is gone on from.
        self.damaged = False
        #: The layout that the server of an incarnation deals out.
        self.layouts: dict[int, Layout] = {}
        #: The clock of the center that each attempt's present window began from, by port, partition and attempt.
        self.began: dict[tuple[int, int, int], int] = {}
        #: Whether the leases say what the ledger counts: nothing is skipped, and all partitions stay as they were.
        self._plain = not plan.skipped and not plan.resized

    @property
    def size(self) -> int:
        """Elements of the center: one a mini-batch, one at least."""
        return max(1, self._plan.epochs * sum(self._plan.batches))

    def promise(self, layout: Layout, worker: int, sequence: int) -> None:
        """A worker was told that a commit outlives the server."""
        who = layout.number, worker
        if sequence > self.durable.get(who, 0):
            self.durable[who] = sequence
            owner = self._owner()
            if owner is not None:
                self._require_has(owner, who)

    def _owner(self) -> Center | None:
        """That of the server with the highest claim; None where that is not known: two may claim at one moment."""
        highest = max((life.center.incarnation for life in self._lives.values()), default=0)
        found = {pid: life.center for pid, life in self._lives.items() if life.center.incarnation == highest}
        if len(found) > 1:
            alive = {child.pid for child in self._surroundings.servers if child.process.alive}
            found = {pid: center for pid, center in found.items() if pid in alive}
        return next(iter(found.values())) if len(found) == 1 else None

    def _require_has(self, center: Center, who: tuple[int, int]) -> None:
        layout, worker = who
        if layout == self.layouts[center.incarnation].number:
            has = center.leases[worker].sequence if worker in center.leases else 0
        else:  # other partitions go on; its commits are in the records
            has = max((int(row["sequence"]) for row in self._rows(center, *who)), default=0)
        if has < self.durable[who]:
            raise Finding(
                "lost",
                f"commit {self.durable[who]} of partition {worker} was told to outlive its server. "
                f"Received: one that has {has}",
            )

    def _rows(self, center: Center, layout: int, worker: int) -> list[Any]:
        """The ledger's of one partition."""
        return [
            row
            for row in center.log.commits(0)
            if row["worker"] == worker and self.layouts[int(row["incarnation"])].number == layout
        ]

    def step(self, process: Process) -> None:
        """After each step of a server's process."""
        child = self._surroundings.child_of[process]
        if process.alive and child.server is not None:
            center = child.server.center
            if center is not None:
                self._look_at(child, center)

    def _look_at(self, child: VirtualChild, center: Center) -> None:
        life = self._lives.get(child.pid)
        if life is None:
            self._watch_server(child, center)
            life = self._lives[child.pid]
        rows, now = center.clock + center.log.skipped, self._surroundings.scheduler.now
        if rows != life.rows:
            life.rows, self.progressed = rows, now
            self._check_rows(center, life.standings, child.server.address[1])
            self._check_center(center)
        holders = child.server.dispatcher.holders
        if holders != life.holders:  # whoever gets a lease is one
            life.holders = dict(holders)
            for worker, lease in center.leases.items():
                standing = life.standings.setdefault(worker, _Standing())
                if lease.attempt != standing.attempt:
                    self._check_takeover(worker, standing)
                    standing.attempt = lease.attempt
                    self._tell(f"attempt {lease.attempt} has partition {worker}")
                standing.peer = holders.get(worker)

    def _watch_server(self, child: VirtualChild, center: Center) -> None:
        standings = {
            worker: _Standing((lease.epoch, lease.batch), lease.sequence) for worker, lease in center.leases.items()
        }
        self._lives[child.pid] = _Life(center, standings, center.clock + center.log.skipped, {})
        layout = self.layouts[center.incarnation] = self._surroundings.layouts[child.driver]
        self._tell(f"{child.process.name} serves, incarnation {center.incarnation}, from clock {center.clock}")
        self.progressed = self._surroundings.scheduler.now
        if center is not self._owner():
            return  # it comes late, and will find the higher claim
        if self.damaged:
            self._forget(center)
        for who in self.durable:
            self._require_has(center, who)
        for number, worker in () if self.ends_early else self.let_go:  # else whoever goes on has data left
            if number == layout.number and layout.batches[worker]:
                lease = center.leases.get(worker)
                if lease is None or not lease.finished:
                    raise Finding("let go", f"partition {worker} was let go and must be finished. Received: it is not")
        self._check_center(center)

    def _forget(self, center: Center) -> None:
        """What the snapshot before a damaged one does not have may be lost."""
        for who in self.durable:
            lease = center.leases.get(who[1])
            self.durable[who] = min(self.durable[who], 0 if lease is None else lease.sequence)
        finished = {worker for worker, lease in center.leases.items() if lease.finished}
        self.let_go = {who for who in self.let_go if who[1] in finished}

    def _check_rows(self, center: Center, standings: dict[int, _Standing], port: int) -> None:
        """The latest row continues its partition, and the lease stands behind it."""
        for worker, lease in center.leases.items():
            standing = standings.setdefault(worker, _Standing())
            if lease.sequence == standing.sequence:
                continue
            row = center.log.commits(len(center.log) - 1)[0]
            if row["worker"] != worker:
                text = f"the commit of partition {worker} must be the ledger's last. Received: one of {row['worker']}"
                raise Finding("ledger", text)
            begins = (int(row["epoch"]), int(row["first_batch"]))
            if begins != standing.position or not lease.sequence == standing.sequence + 1 == row["sequence"]:
                raise Finding(
                    "ledger",
                    f"partition {worker} must go on at {standing.position} with commit {standing.sequence + 1}. "
                    f"Received: {begins} with commit {row['sequence']}, lease at {lease.sequence}",
                )
            if row["attempt"] != lease.attempt:
                raise Finding(
                    "two owners",
                    f"attempt {lease.attempt} has partition {worker}. Received: a commit of attempt {row['attempt']}",
                )
            began = self.began.get((port, worker, lease.attempt), 0)
            if self._plan.rule in _PLAIN and not self._plan.overlap and int(row["clock"]) - began != row["staleness"]:
                raise Finding(
                    "staleness",
                    f"the window of partition {worker} began at clock {began}. "
                    f"Received: staleness {row['staleness']} at clock {row['clock']}",
                )
            if row["incarnation"] != center.incarnation:
                raise Finding(
                    "incarnation",
                    f"a commit must be of incarnation {center.incarnation}. Received: one of {row['incarnation']}",
                )
            self._tell(
                f"commit {lease.sequence} of partition {worker} by attempt {lease.attempt}: epoch {row['epoch']}, "
                f"mini-batches {row['first_batch']}-{row['last_batch']}, clock {row['clock']}, "
                f"incarnation {center.incarnation}"
            )
            standing.position, standing.sequence = (lease.epoch, lease.batch), lease.sequence

    def _check_center(self, center: Center) -> None:
        """Its elements say what was applied."""
        if not self._plan.shows:
            return
        expected = self._by_leases(center) if self._plain else self.by_ledger(center.log.commits(0))
        if self._plan.sums:
            right = np.array_equal(center.current.array, expected)
        else:  # what the present round has is not in it yet
            right = not np.any(center.current.array[expected == 0.0])
        if not right:
            raise Finding(
                "center",
                f"the center must be the sum of the ledger {expected.astype(int).tolist()}. "
                f"Received: {center.current.array.tolist()} at clock {center.clock}",
            )

    def _by_leases(self, center: Center) -> np.ndarray:
        """How often each mini-batch counts, where the leases say so."""
        counts, layout = np.zeros(self.size, np.float32), self.layouts[center.incarnation]
        for worker, lease in center.leases.items():
            for epoch in range(lease.epoch + 1):
                first = layout.element(worker, epoch, 0)
                counts[first : first + (layout.batches[worker] if epoch < lease.epoch else lease.batch)] = 1.0
        return counts

    def by_ledger(self, rows: np.ndarray) -> np.ndarray:
        """How often each mini-batch counts."""
        counts = np.zeros(self.size, np.float32)
        for row in rows:
            if not row["skipped"]:
                element = self.layouts[int(row["incarnation"])].element
                first, last = (
                    element(int(row["worker"]), int(row["epoch"]), int(row[name]))
                    for name in ("first_batch", "last_batch")
                )
                counts[first : last + 1] += 1.0
        return counts

    def _check_takeover(self, worker: int, standing: _Standing) -> None:
        """Nobody loses a partition while it is there and heard."""
        peer = standing.peer
        if peer is None or standing.attempt == NO_ATTEMPT or peer.hung_up():
            return
        stream = peer.channel.stream
        here, there, lease = stream.process, stream.peer.process, self._plan.deadlines.lease
        since = max(here.continued, there.continued, stream.link.disturbed_until)
        disturbed = stream.link.vanished is not None or stream.peer.closed or stream.peer.shut
        if disturbed or not there.alive or there.stopped or self._surroundings.scheduler.now - since < lease:
            return
        text = f"attempt {standing.attempt} is there and has partition {worker}. Received: another one has it"
        raise Finding("takeover", text)

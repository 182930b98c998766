"""What must hold after every step of a run, whatever strikes it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import NO_ATTEMPT
from simulate_faults.plan import Plan
from simulate_faults.scheduler import Finding
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


class Watch:
    """Looks at the server that serves.

    Args:
        plan: of the run.
        surroundings: likewise.
        tell: takes what a story is made of.
    """

    def __init__(self, plan: Plan, surroundings: Surroundings, tell: Callable[[str], None]) -> None:
        self._plan, self._surroundings, self._tell = plan, surroundings, tell
        self._lives: dict[int, tuple[Center, dict[int, _Standing]]] = {}
        self._clocks: dict[int, int] = {}
        #: When a commit was applied last.
        self.progressed = 0.0
        #: What each partition was told outlives the server, by its number; and who was let go.
        self.durable: dict[int, int] = {}
        self.let_go: set[int] = set()
        #: The clock of the center that each attempt's present window began from, by port, partition and attempt.
        self.began: dict[tuple[int, int, int], int] = {}
        self._offsets = [0, *itertools.accumulate(count * plan.epochs for count in plan.batches)]

    @property
    def size(self) -> int:
        """Elements of the center: one a mini-batch, one at least."""
        return max(1, self._offsets[-1])

    def element(self, worker: int, epoch: int, batch: int) -> int:
        """The element that counts a mini-batch."""
        return self._offsets[worker] + epoch * self._plan.batches[worker] + batch

    def promise(self, worker: int, sequence: int) -> None:
        """A worker was told that a commit outlives the server."""
        if sequence > self.durable.get(worker, 0):
            self.durable[worker] = sequence
            owner = self._owner()
            if owner is not None:
                self._require_has(owner, worker)

    def _owner(self) -> Center | None:
        """That of the server with the highest claim; None where that is not known: two may claim at one moment."""
        highest = max((center.incarnation for center, _ in self._lives.values()), default=0)
        found = {pid: center for pid, (center, _) in self._lives.items() if center.incarnation == highest}
        if len(found) > 1:
            alive = {child.pid for child in self._surroundings.servers if child.process.alive}
            found = {pid: center for pid, center in found.items() if pid in alive}
        return next(iter(found.values())) if len(found) == 1 else None

    def _require_has(self, center: Center, worker: int) -> None:
        has = center.leases[worker].sequence if worker in center.leases else 0
        if has < self.durable[worker]:
            raise Finding(
                "lost",
                f"commit {self.durable[worker]} of partition {worker} was told to outlive its server. "
                f"Received: one that has {has}",
            )

    def step(self) -> None:
        """After each step of the run."""
        for child in self._surroundings.servers:
            if child.process.alive and child.server is not None and child.server.center is not None:
                self._look_at(child, child.server.center)

    def _look_at(self, child: VirtualChild, center: Center) -> None:
        life = self._lives.get(child.pid)
        if life is None:
            self._watch_server(child, center)
            life = self._lives[child.pid]
        standings = life[1]
        if center.clock != self._clocks[child.pid]:
            self._clocks[child.pid] = center.clock
            self.progressed = self._surroundings.scheduler.now
            self._check_rows(center, standings, child.server.address[1])
            self._check_center(center)
        holders = child.server.dispatcher.holders
        for worker, lease in center.leases.items():
            standing = standings.setdefault(worker, _Standing())
            if lease.attempt != standing.attempt:
                self._check_takeover(worker, standing)
                standing.attempt = lease.attempt
                self._tell(f"attempt {lease.attempt} has partition {worker}")
            standing.peer = holders.get(worker)

    def _watch_server(self, child: VirtualChild, center: Center) -> None:
        standings = {
            worker: _Standing((lease.epoch, lease.batch), lease.sequence) for worker, lease in center.leases.items()
        }
        self._lives[child.pid] = (center, standings)
        self._tell(f"{child.process.name} serves, incarnation {center.incarnation}, from clock {center.clock}")
        self._clocks[child.pid] = center.clock
        self.progressed = self._surroundings.scheduler.now
        if center is not self._owner():
            return  # it comes late, and will find the higher claim
        for worker in self.durable:
            self._require_has(center, worker)
        for worker in self.let_go:
            if self._plan.batches[worker] and (worker not in center.leases or not center.leases[worker].finished):
                raise Finding("let go", f"partition {worker} was let go and must be finished. Received: it is not")
        self._check_center(center)

    def _check_rows(self, center: Center, standings: dict[int, _Standing], port: int) -> None:
        """The latest row continues its partition, and the lease stands behind it."""
        for worker, lease in center.leases.items():
            standing = standings.setdefault(worker, _Standing())
            if lease.sequence == standing.sequence:
                continue
            latest = center.log.commits(max(0, len(center.log) - 4))
            row = next(row for row in reversed(latest) if row["worker"] == worker)
            begins = (int(row["epoch"]), int(row["first_batch"]))
            if begins != standing.position or lease.sequence != standing.sequence + 1 != int(row["sequence"]):
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
        """Its elements say what was applied; the leases say what the ledger counts."""
        if not self._plan.shows:
            return
        expected = np.zeros(self.size, np.float32)
        for worker, lease in center.leases.items():
            expected[self._offsets[worker] : self.element(worker, lease.epoch, lease.batch)] = 1.0
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

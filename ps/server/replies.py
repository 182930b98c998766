"""What the server answers, made from the center's state; the caller holds its lock."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np

from distkeras.ps.center.center import Center, Released
from distkeras.ps.center.leases import NO_ATTEMPT, PartitionLease
from distkeras.ps.protocol.messages import Ack, CenterReply, Drain, Records, Status, Welcome, WorkerTable


def ack(center: Center | None, sequence: int, durable: int, *, skipped: bool = False) -> Ack:
    """Commit ``sequence`` is applied, or something without a number noted."""
    if center is None:
        return Ack(0, 0, sequence, durable)
    return Ack(center.incarnation, center.clock, sequence, durable, skipped, center.stopping is not None)


def center_reply(center: Center, released: Released, durable: int) -> CenterReply:
    """The version that ``released`` has."""
    return CenterReply(
        incarnation=center.incarnation,
        clock=released.clock,
        sequence=released.sequence,
        durable=durable,
        learning_rate=released.learning_rate,
        center=released.buffer.array,
        moving_statistics=released.moving_statistics,
        stopping=center.stopping is not None,
    )


def welcome(center: Center, lease: PartitionLease, durable: int, *, held: bool) -> Welcome:
    """Where the partition of ``lease`` stands; ``held``: this attempt had it already, and nobody else since."""
    return Welcome(
        incarnation=center.incarnation,
        clock=center.clock,
        sequence=lease.sequence,
        durable=durable,
        epoch=lease.epoch,
        batch=lease.batch,
        finished=lease.finished,
        held=held,
        checksum=lease.checksum,
        skipped=lease.skipped,
        stopping=center.stopping is not None,
    )


def status(center: Center | None, saved: tuple[int, float]) -> Status:
    """How far the job has come, and its latest snapshot: the clock that this has, and its age."""
    if center is None:
        return Status(0, 0, 0, 0, 0, math.nan, math.nan)
    leases: Collection[PartitionLease] = center.leases.values()
    # Of partitions that have no rows nothing is to come.
    empty = sum(lease.finished and not lease.sequence for lease in leases)
    return Status(
        clock=center.clock,
        joined=len(leases),
        finished=sum(lease.finished for lease in leases),
        batches=center.log.batches,
        samples=center.log.samples,
        loss=center.log.loss,
        staleness=center.log.staleness,
        epochs=sum(lease.epoch + lease.passed for lease in leases) / max(1, center.workers - empty),
        saved_clock=saved[0],
        saved_seconds=saved[1],
    )


def records(center: Center, request: Drain) -> Records:
    """The commit records that ``request`` asks for."""
    commits, _, history = center.log.read(request.start, request.count)
    return Records(len(center.log), center.log.missing, center.metrics, commits.view(np.uint8), history)


def worker_table(leases: Mapping[int, PartitionLease], waiting: Collection[int], now: float) -> WorkerTable:
    """Who is silent since when, at ``now`` (seconds since the epoch); nobody in ``waiting``, who is owed an answer."""
    rows = [
        (worker, lease.attempt, lease.sequence, 0.0 if worker in waiting else now - lease.active_at)
        for worker, lease in leases.items()
        if not lease.finished and lease.attempt != NO_ATTEMPT
    ]
    return WorkerTable(np.array(rows, np.float64).reshape(-1, 4))

"""The micro-batches of a stream: each is trained like the data of a job, and the center goes on with the next one.

Rules:

1. A micro-batch begins when every partition of the one before has ended, and their numbers rise by one. So none is left
   out, and none counts twice.
2. Commits of a partition go on counting over micro-batches; its mini-batches begin with 0 of epoch 0 in each.
3. No attempt of an earlier micro-batch gets a lease any more: see `Hello.micro_batch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from distkeras.ps.center.leases import NO_ATTEMPT, LeaseState
from distkeras.ps.errors import DifferentJobError, LeaseLostError

if TYPE_CHECKING:
    from distkeras.ps.center.center import Center
    from distkeras.ps.center.schedulers import Scheduler

#: The number of a job that trains no stream.
NO_MICRO_BATCH = -1


class MicroBatch(NamedTuple):
    """What the leases are of.

    Args:
        number: of the micro-batch, from 0.
        skipped: commits that were left out for their numbers before it began.
    """

    stream: str
    number: int
    skipped: int


def is_complete(center: Center) -> bool:
    """Return whether every partition of the present micro-batch has ended."""
    leases = center.leases
    return len(leases) == center.workers and all(lease.finished for lease in leases.values())


def begin_micro_batch(center: Center, stream: str, number: int, scheduler: Scheduler) -> bool:
    """Let the partitions begin with micro-batch ``number`` of ``stream``; the present one goes on where it stands.

    Args:
        center: of the stream so far.
        number: the present micro-batch, or the next one.
        scheduler: a new one, for the next micro-batch.

    Returns:
        Whether it begins now; False if it had begun before.

    Raises:
        DifferentJobError: the center is of another stream or of none, there are micro-batches in between, or the
            present one has not ended.
    """
    _require_stream(center, number)
    present = center.micro_batch
    if present is not None and present.stream != stream:
        raise DifferentJobError(
            f"the stream must be the one that the checkpoint covers, {present.stream!r}. Received: stream {stream!r}"
        )
    if present is not None and present.number == number:
        return False
    due = 0 if present is None else present.number + is_complete(center)
    if number != due:
        covered = due - 1
        what = f"covers micro-batches up to {covered}" if covered >= 0 else "covers no micro-batch"
        raise DifferentJobError(f"micro-batch {due} must come next, because the checkpoint {what}. Received: {number}")
    center.micro_batch = MicroBatch(stream, number, center.log.skipped)
    center.began = center.clock, 0
    center.scheduler = scheduler
    for lease in center.leases.values():
        lease.attempt, lease.epoch, lease.batch, lease.checksum, lease.passed = NO_ATTEMPT, 0, 0, -1, 0.0
        lease.skipped, lease.refusals, lease.speed, lease.steps = False, 0, None, 0
        lease.require_pull()
        lease.vectors = center.leases.make_vectors()  # what its rule kept for it was given up when it left
        lease.move(LeaseState.FREE)
    return True


def commits_before(center: Center) -> int:
    """Return the number of the log's first commit that is of the present micro-batch."""
    skipped = 0 if center.micro_batch is None else center.micro_batch.skipped
    own = center.clock - center.began[0] + center.log.skipped - skipped
    return max(0, len(center.log) - own)


def number_of(center: Center) -> int:
    """Return the number of the present micro-batch."""
    return NO_MICRO_BATCH if center.micro_batch is None else center.micro_batch.number


def require_present(center: Center, number: int, worker: int) -> bool:
    """Return whether micro-batch ``number`` has begun.

    Raises:
        LeaseLostError: a later one has: ``worker`` is of an attempt that Spark no longer counts on.
        DifferentJobError: the job trains no stream, and ``worker`` does.
    """
    _require_stream(center, number)
    present = number_of(center)
    if number < present:
        raise LeaseLostError(f"micro-batch {number} has ended, and the present one is {present}", worker=worker)
    return number == present


def _require_stream(center: Center, number: int) -> None:
    """Raise a DifferentJobError if ``number`` is of a micro-batch and the job trains no stream.

    The first micro-batch of a stream begins before any partition has a lease.
    """
    if number != NO_MICRO_BATCH and center.micro_batch is None and center.leases:
        raise DifferentJobError(f"the job must train a stream to have micro-batches. Received: micro-batch {number}")

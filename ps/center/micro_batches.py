"""The micro-batches of a stream: each is trained like the data of a job, and the center is kept for the next one.

Rules:

1. A micro-batch begins when every partition of the previous one has ended, and their numbers rise by one. So none is
   left out, and none counts twice.
2. Sequence numbers of a partition continue over micro-batches; its mini-batches begin with 0 of epoch 0 in each.
3. An attempt of an earlier micro-batch is not granted a lease: see `Hello.micro_batch`.
"""

from __future__ import annotations

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import NO_ATTEMPT, LeaseState, MicroBatch
from distkeras.ps.center.schedulers import Scheduler
from distkeras.ps.errors import DifferentJobError, LeaseLostError

#: The micro-batch number of a job that trains no stream.
NO_MICRO_BATCH = -1


def begin_micro_batch(center: Center, stream: str, number: int, scheduler: Scheduler) -> bool:
    """Begin micro-batch ``number`` of ``stream``, under a new scheduler; return False if it has begun before."""
    _require_stream(center, number)
    present = center.micro_batch
    if present is not None and present.stream != stream:
        raise DifferentJobError(
            f"the stream must be the one that the checkpoint covers, {present.stream!r}. Received: stream {stream!r}"
        )
    if present is not None and present.number == number:
        return False
    due = 0 if present is None else present.number + center.leases.complete
    if number != due:
        covered = due - 1
        what = f"covers micro-batches up to {covered}" if covered >= 0 else "covers no micro-batch"
        raise DifferentJobError(f"micro-batch {due} must come next, because the checkpoint {what}. Received: {number}")
    center.micro_batch = MicroBatch(stream, number, center.log.skipped)
    center.began = center.clock, 0
    center.scheduler = scheduler
    for lease in center.leases.values():  # the rule's vectors of a worker continue, as its optimizer does
        lease.attempt, lease.epoch, lease.batch, lease.checksum, lease.passed = NO_ATTEMPT, 0, 0, -1, 0.0
        lease.skipped, lease.refusals, lease.speed, lease.steps = False, 0, None, 0
        lease.require_pull()
        lease.move(LeaseState.FREE)
    center.take_back()
    return True


def commits_before(center: Center) -> int:
    """Return the position in the log of the first commit of the current micro-batch."""
    skipped = 0 if center.micro_batch is None else center.micro_batch.skipped
    own = center.clock - center.began[0] + center.log.skipped - skipped
    before = max(0, len(center.log) - own)
    if center.log.missing:  # where these are of the present one, as many of earlier ones would be read in their place
        before += int(np.searchsorted(center.log.commits(before)["clock"], center.began[0]))
    return before


def number_of(center: Center) -> int:
    return NO_MICRO_BATCH if center.micro_batch is None else center.micro_batch.number


def require_present(center: Center, number: int, worker: int) -> bool:
    """Return whether micro-batch ``number`` has begun."""
    _require_stream(center, number)
    present = number_of(center)
    if number < present:
        raise LeaseLostError(f"micro-batch {number} has ended, and the present one is {present}", worker=worker)
    return number == present


def _require_stream(center: Center, number: int) -> None:
    """Raise a DifferentJobError if ``number`` is that of a micro-batch and the job trains no stream."""
    # A stream's first micro-batch begins before any partition has a lease.
    if number != NO_MICRO_BATCH and center.micro_batch is None and center.leases:
        raise DifferentJobError(f"the job must train a stream to have micro-batches. Received: micro-batch {number}")

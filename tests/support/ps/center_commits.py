"""A center and its commits, built without a server."""

from __future__ import annotations

from typing import Any

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import PartitionLease
from distkeras.ps.protocol.loop import NO_FLOATS
from distkeras.ps.protocol.messages import Commit
from distkeras.ps.rules import make
from support.present import present


def center_of(name: str = "downpour", workers: int = 2, size: int = 3, **options: Any) -> Center:
    return Center(make(name, **options.pop("hyper", {})), np.zeros(size, np.float32), workers=workers, **options)


def commit_of(
    worker: int = 0,
    attempt: int = 0,
    sequence: int = 1,
    epoch: int = 0,
    first: int = 0,
    last: int = 0,
    *,
    value: float = 1.0,
    size: int = 3,
    **fields: Any,
) -> Commit:
    defaults: dict[str, Any] = {
        "worker": worker,
        "attempt": attempt,
        "sequence": sequence,
        "epoch": epoch,
        "first": first,
        "last": last,
        "incarnation": 1,
        "epoch_end": False,
        "wants_center": True,
        "learning_rate": 0.1,
        "scale": 1.0,
        "waited": 0.0,
        "moving_statistics": NO_FLOATS,
        "history": np.zeros((last - first + 1, 3)),
    }
    parts = (np.full(size, value, np.float32),)
    return Commit(parts=parts, **defaults | fields)


def send(center: Center, commit: Commit) -> bool:
    return center.commit(commit, [center.pool.adopt(part) for part in commit.parts])


def joined(center: Center, worker: int = 0, attempt: int = 0) -> PartitionLease:
    lease = present(center.join(worker, attempt))
    center.release(worker, attempt)
    return lease

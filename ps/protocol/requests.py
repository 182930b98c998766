"""What a worker's loop asks of its driver, a socket client or a simulation, and what it is answered.

A `CommitRecord` wants its payload applied, and a `Reply`, with the center if ``wants_center``.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distkeras.ps.protocol.messages import NO_FLOATS, CommitRecord
from distkeras.ps.rules.base import Vector


@dataclass(frozen=True, eq=False)
class PullRequest:
    """Wants a `Reply` with the center."""


class PostRequest(NamedTuple):
    """Wants ``commit`` under way, and to go on at once; a `CollectRequest` gets its reply."""

    commit: CommitRecord


@dataclass(frozen=True, eq=False)
class CollectRequest:
    """Wants the `Reply` to the commit that was posted last."""


@dataclass(frozen=True, eq=False)
class ProbeRequest:
    """Wants to know, in a `Reply`, whether the server is occupied."""


class Compute(NamedTuple):
    """``steps`` local steps are about to be taken; wants to go on. A simulation lets their time pass first."""

    steps: int


class Reply(NamedTuple):
    """What came back. ``center`` is None for a bare acknowledgement, and immutable otherwise.

    ``occupied`` answers a `ProbeRequest`. ``stopping`` asks the loop to end, once what it has computed is committed.
    """

    learning_rate: float = 0.0
    center: Vector | None = None
    moving_statistics: np.ndarray = NO_FLOATS
    occupied: bool = False
    stopping: bool = False


Request = PullRequest | CommitRecord | PostRequest | CollectRequest | ProbeRequest | Compute
Loop = Generator[Request, Reply | None, None]

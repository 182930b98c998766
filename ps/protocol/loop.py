"""The requests that a worker's loop yields, and their replies: what drives the loop turns them into messages."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distkeras.ps.protocol.messages import NO_FLOATS, NO_ROWS, CommitRecord, OptimizerState
from distkeras.ps.protocol.tables import Ids
from distkeras.ps.rules.base import Vector


@dataclass(frozen=True, eq=False)
class PullRequest:
    """Requests a `Reply` with the center, and the rows ``wants`` of each table."""

    wants: tuple[Ids, ...] = ()


class PostRequest(NamedTuple):
    """Begins to send ``commit``; its answer is None at once, and a later `CollectRequest` gets the `Reply`."""

    commit: CommitRecord


class CollectRequest:
    """Requests the `Reply` to the commit that was posted last."""


class ProbeRequest:
    """Requests a `Reply` whose ``occupied`` is set."""


class KeepRequest(NamedTuple):
    """Sends ``state``, that after the latest commit (``ahead``: the next one), to be kept; its answer is None."""

    state: OptimizerState
    ahead: bool = False


class FetchRequest:
    """Requests a `Reply` with the kept state of the optimizer."""


class TakenRequest(NamedTuple):
    """Reports that the kept state was loaded or, if ``problem`` is not empty, why it was not; its answer is None."""

    problem: str


class Compute(NamedTuple):
    """Announces that ``steps`` local steps follow, so that a simulation can advance its clock; its answer is None."""

    steps: int


class Reply(NamedTuple):
    """The answer to a request. ``center`` is None for an acknowledgement, and immutable otherwise.

    ``occupied`` answers a `ProbeRequest`. ``stopping`` asks the loop to end after it has committed its steps.
    ``optimizer`` answers a `FetchRequest`; None: no state is kept.
    ``refused``: the commit was refused, and its window must be computed again, from ``center``.
    ``window`` is the steps of the next window, if above 0.
    ``rows`` are the requested rows of each table, flat.
    ``values`` are the numbers that the driver has set, if ``version`` is above 0; see `SetValues`.
    """

    learning_rate: float = 0.0
    center: Vector | None = None
    moving_statistics: np.ndarray = NO_FLOATS
    occupied: bool = False
    stopping: bool = False
    optimizer: OptimizerState | None = None
    refused: bool = False
    window: int = 0
    rows: tuple[np.ndarray, ...] = ()
    version: int = 0
    values: np.ndarray = NO_ROWS


Request = (
    PullRequest
    | CommitRecord
    | PostRequest
    | CollectRequest
    | ProbeRequest
    | Compute
    | KeepRequest
    | FetchRequest
    | TakenRequest
)
Loop = Generator[Request, Reply | None, None]

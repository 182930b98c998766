"""The requests of a worker's loop, with commits and optimizer states: what drives the loop turns them into messages."""

from __future__ import annotations

import zlib
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np

from distkeras.ps.protocol.tables import Ids
from distkeras.ps.rules.base import Vector

#: Arrays of any length. Both ends refuse an array of another dtype.
Bytes = Annotated[np.ndarray, np.dtype("u1")]
Floats = Annotated[np.ndarray, np.dtype("<f4")]
Rows = Annotated[np.ndarray, np.dtype("<f8"), "rows"]  # of two dimensions

NO_FLOATS = np.empty(0, np.float32)
NO_ROWS = np.empty((0, 0), np.float64)
NO_BYTES = np.empty(0, np.uint8)

#: History columns that every row has, before the metrics: seconds since the epoch (UTC), and samples.
FIXED_HISTORY = ("timestamp", "samples")


def column(name: str) -> dict[str, str]:
    """Return the metadata of a commit's field that is column ``name`` of a record, `commit_log.COMMIT`."""
    return {"column": name}


@dataclass(frozen=True, eq=False)
class CommitRecord:
    """A payload, and the mini-batches ``first``…``last`` of ``epoch`` from which it was computed.

    Args:
        epoch_end: whether ``last`` is the epoch's last mini-batch.
        wants_center: whether the reply is the center, and not only an acknowledgement.
        learning_rate: the worker optimizer's; 0 for gradient rules.
        scale: mean scale factor that the worker's half of the rule applied.
        parts, moving_statistics: the payload, and the replica's moving statistics; float32.
        history: float64 ``(steps, columns)``, one row for each mini-batch: `FIXED_HISTORY`, then the metrics; or
            `NO_ROWS`.
        checksum: of all rows up to the last mini-batch.
        overlapped: whether it was computed while the previous commit was in flight.
        touched: the rows that the window touched, an array for each table, strictly ascending.
        moved: the payload for those rows, flat float32 ``(rows * width,)``, an array for each table.
        wants: the rows that the reply must contain, those of the next window; an array for each table.
    """

    epoch: int = field(metadata=column("epoch"))
    first: int = field(metadata=column("first_batch"))
    last: int = field(metadata=column("last_batch"))
    epoch_end: bool
    wants_center: bool
    learning_rate: float
    scale: float
    parts: tuple[Floats, ...]
    moving_statistics: Floats = field(default_factory=lambda: NO_FLOATS)
    history: Rows = field(default_factory=lambda: NO_ROWS)
    checksum: int = 0
    overlapped: bool = False
    touched: tuple[Ids, ...] = ()
    moved: tuple[Floats, ...] = ()
    wants: tuple[Ids, ...] = ()

    @property
    def steps(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """The state of a worker's optimizer: the bytes of its variables, and their CRC-32.

    Only an optimizer of the same ``layout``, which names it and its variables, can load the state.
    """

    layout: str
    content: Bytes
    checksum: int

    @property
    def damaged(self) -> bool:
        """Return whether the checksum is not that of the content."""
        return zlib.crc32(self.content.data) != self.checksum


@dataclass(frozen=True, eq=False)
class PullRequest:
    """Requests a `Reply` with the center, and the rows ``wants`` of each table."""

    wants: tuple[Ids, ...] = ()


#: Epoch and number of a mini-batch: the position of the next one.
Position = tuple[int, int]


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

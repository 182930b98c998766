"""What a worker says of a commit, and the arrays that it says it with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

#: Arrays of any length. One of another dtype is refused by both ends.
Bytes = Annotated[np.ndarray, np.dtype("u1")]
Floats = Annotated[np.ndarray, np.dtype("<f4")]
Rows = Annotated[np.ndarray, np.dtype("<f8"), "rows"]  # of two dimensions

NO_FLOATS = np.empty(0, np.float32)
NO_ROWS = np.empty((0, 0), np.float64)
NO_BYTES = np.empty(0, np.uint8)

#: History columns that every row has, before the metrics: seconds since the epoch (UTC), and samples.
FIXED_HISTORY = ("timestamp", "samples")


@dataclass(frozen=True, eq=False)
class CommitRecord:
    """What a worker says of a commit: a payload, and the mini-batches ``first``…``last`` of ``epoch`` behind it.

    Args:
        epoch_end: whether ``last`` is the epoch's last mini-batch.
        wants_center: whether the reply is the center, and not a bare acknowledgement.
        learning_rate: the worker optimizer's; 0 where the server has it.
        scale: mean scale factor that the worker's half of the rule applied.
        parts, moving_statistics: the payload, and the replica's moving statistics; float32.
        history: float64 ``(steps, columns)``, a row a mini-batch: `FIXED_HISTORY`, then each metric; or `NO_ROWS`.
        checksum: of the rows up to the last mini-batch.
        overlapped: computed while the commit before this one travelled, from the reply to the one before that.
    """

    epoch: int
    first: int
    last: int
    epoch_end: bool
    wants_center: bool
    learning_rate: float
    scale: float
    parts: tuple[Floats, ...]
    moving_statistics: Floats = field(default_factory=lambda: NO_FLOATS)
    history: Rows = field(default_factory=lambda: NO_ROWS)
    checksum: int = 0
    overlapped: bool = False

    @property
    def steps(self) -> int:
        """Local steps behind the payload."""
        return self.last - self.first + 1

"""The description of the data: the columns of a DataFrame, and their division into mini-batches.

`DataSpec` travels to the executors inside the task; importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.data.columns import Column, ColumnArrays
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import check_fields, count, flag


@dataclass(frozen=True)
class DataSpec:
    """The data plane's part of a job.

    Args:
        features: the model's inputs, in its order; at least one.
        labels: the model's targets, in its order; empty for a model that brings its own loss.
        sample_weight: one number per row that scales its loss, or None.
        batch_size: rows per mini-batch and worker; the last one of an epoch may be shorter.
        epochs: passes over the data.
        seed: of the row order, not negative. It decides as well which rows share a partition.
        shuffle: use a new order for every epoch, or the order of arrival for all.
        spool_bytes: memory in which one worker may keep rows for its later epochs. More rows go to a memory-mapped
            file.
        rewindable: keep the rows of a single epoch too, for a rewind of the worker.
    """

    features: tuple[Column, ...]
    labels: tuple[Column, ...] = ()
    sample_weight: Column | None = None
    batch_size: int = count(32)
    epochs: int = count(1)
    seed: int = count(0, 0)
    shuffle: bool = flag(True)
    spool_bytes: int = count(256 << 20, 0)
    rewindable: bool = flag(False)

    def __post_init__(self) -> None:
        if not self.features:
            raise ConfigurationError("`features` must name at least one column. Received: features=()")
        check_fields(self)
        if self.sample_weight is not None and self.sample_weight.shape != ():
            raise ConfigurationError(
                f"`sample_weight` must be one number per row. Received: shape={self.sample_weight.shape}",
                column=self.sample_weight.name,
            )

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return every column once, in the order of first use: an autoencoder's target is its input."""
        weight = () if self.sample_weight is None else (self.sample_weight,)
        # Of equal columns the last one counts, which is the label: it says what to check.
        return tuple({column: column for column in self.features + self.labels + weight}.values())

    def sides(self, arrays: ColumnArrays) -> tuple[ColumnArrays, ColumnArrays, np.ndarray | None]:
        """Return inputs, targets and sample weights, from one array for each of `columns`."""
        by_column = dict(zip(self.columns, arrays, strict=True))
        weight = None if self.sample_weight is None else by_column[self.sample_weight]
        return tuple(by_column[c] for c in self.features), tuple(by_column[c] for c in self.labels), weight

    @property
    def encoded(self) -> frozenset[str]:
        """Return the names of the columns that executors decode."""
        return frozenset(column.name for column in self.columns if column.decode is not None)

    @property
    def whole(self) -> frozenset[str]:
        """Return the names of the columns that the model expects as integers."""
        return frozenset(column.name for column in self.columns if np.dtype(column.dtype).kind != "f")

    @property
    def doubles(self) -> frozenset[str]:
        """Return the names of the columns that hold numbers which float32 rounds."""
        return self.whole | {column.name for column in self.columns if column.dtype == "float64"}

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row."""
        return sum(column.row_bytes for column in self.columns)

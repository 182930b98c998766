"""The description of the data: the columns of a DataFrame, and their division into mini-batches.

`DataSpec` travels to the executors inside the task; importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.data.batches import Weight, absent, as_weight
from distkeras.data.columns import Column, ColumnArrays
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import check_fields, count, flag


@dataclass(frozen=True)
class DataSpec:
    """The data plane's part of a job.

    Args:
        features: the model's inputs, in its order; at least one.
        labels: the labels of each output, in the model's order, None for an output without; empty if no output has
            labels.
        sample_weight: weights that scale the loss, one number per row or one for each time step; one column for all
            outputs, one for each, of which None has no weights, or None.
        batch_size: rows per mini-batch and worker; the last one of an epoch may be shorter.
        epochs: passes over the data.
        seed: of the row order, not negative. It decides as well which rows share a partition.
        shuffle: use a new order for every epoch, or the order of arrival for all.
        spool_bytes: memory in which one worker may keep rows for its later epochs. More rows go to a memory-mapped
            file.
        rewindable: keep the rows of a single epoch too, for a rewind of the worker.
    """

    features: tuple[Column, ...]
    labels: tuple[Column | None, ...] = ()
    sample_weight: Column | tuple[Column | None, ...] | None = None
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

    @property
    def targets(self) -> tuple[Column, ...]:
        """Return the columns of labels, of the outputs that have any."""
        return tuple(label for label in self.labels if label is not None)

    @property
    def weights(self) -> tuple[Column | None, ...]:
        """Return the columns of weights: none, one for all outputs, or one for each."""
        given = self.sample_weight
        return () if given is None else given if isinstance(given, tuple) else (given,)

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return every column once, in the order of first use: an autoencoder's target is its input."""
        weights = tuple(weight for weight in self.weights if weight is not None)
        # Of equal columns the last one counts, which is the label: it says what to check.
        return tuple({column: column for column in self.features + self.targets + weights}.values())

    def sides(self, arrays: ColumnArrays) -> tuple[ColumnArrays, ColumnArrays, Weight]:
        """Return inputs, targets and sample weights as in `Batch`, from one array for each of `columns`.

        The arrays may have further axes in front of that of the rows, all the same ones.
        """
        columns = self.columns
        by_column: dict[Column | None, np.ndarray] = dict(zip(columns, arrays, strict=True))
        by_column[None] = absent(arrays[0].shape[: arrays[0].ndim - len(columns[0].shape)])
        x, y, weights = (tuple(by_column[c] for c in side) for side in (self.features, self.labels, self.weights))
        return x, y, as_weight(weights)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the DataFrame's columns, of assembled ones those that they were assembled from."""
        parts = [[part.name for part in column.parts] or [column.name] for column in self.columns]
        return tuple(dict.fromkeys(name for names in parts for name in names))

    @property
    def encoded(self) -> frozenset[str]:
        """Return the names of the columns that executors decode."""
        return frozenset(column.name for column in self.columns if column.decode is not None)

    @property
    def whole(self) -> frozenset[str]:
        """Return the names of the columns that the model expects as integers."""
        return frozenset(column.name for column in self.columns if column.whole)

    @property
    def doubles(self) -> frozenset[str]:
        """Return the names of the columns that hold numbers which float32 rounds."""
        return self.whole | {column.name for column in self.columns if column.dtype == "float64"}

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row."""
        return sum(column.row_bytes for column in self.columns)

"""What to read, how to cut it into mini-batches, and how the driver lays it out over the workers.

`DataSpec` travels to the executors inside the task; importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distkeras.data.columns import Column, arrow_ready
from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The column that `partitioned` adds: a hash of the row's values, from which a worker knows the rows again.
ROW_HASH = "distkeras_row_hash"


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
        shuffle: a new order for every epoch, or the order of arrival for all.
        classes: integer labels must be in [0, classes). One number for all labels, or one for each (None
            where a label is not a class), or None for no check.
        spool_bytes: memory that one worker may keep rows in for its later epochs. More than that goes to a
            memory-mapped file.
        rewindable: keep the rows of a single epoch too, for a worker may be told to go back.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    features: tuple[Column, ...]
    labels: tuple[Column, ...] = ()
    sample_weight: Column | None = None
    batch_size: int = 32
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    classes: int | tuple[int | None, ...] | None = None
    spool_bytes: int = 256 << 20
    rewindable: bool = False

    def __post_init__(self) -> None:
        if not self.features:
            raise ConfigurationError("`features` must name at least one column. Received: features=()")
        for name, least in (("batch_size", 1), ("epochs", 1), ("seed", 0), ("spool_bytes", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(f"`{name}` must be an integer of at least {least}. Received: {name}={value!r}")
        if self.sample_weight is not None and self.sample_weight.shape != ():
            raise ConfigurationError(
                f"`sample_weight` must be one number per row. Received: shape={self.sample_weight.shape}",
                column=self.sample_weight.name,
            )
        limits = self.class_limits
        if len(limits) != len(self.labels) or any(n is not None and n < 1 for n in limits):
            raise ConfigurationError(
                "`classes` must be a positive integer, or one (or None) for each label. "
                f"Received: classes={self.classes!r} with {len(self.labels)} labels"
            )

    @property
    def columns(self) -> tuple[Column, ...]:
        """Every column once, in the order of first use: an autoencoder's target is its input."""
        weight = () if self.sample_weight is None else (self.sample_weight,)
        return tuple(dict.fromkeys(self.features + self.labels + weight))

    @property
    def class_limits(self) -> tuple[int | None, ...]:
        """The number of classes of each label, None where a label is not checked."""
        if isinstance(self.classes, tuple):
            return self.classes
        return (self.classes,) * len(self.labels)


def partitioned(df: DataFrame, spec: DataSpec, workers: int, *, partitioned_already: bool = False) -> DataFrame:
    """The columns of `spec` and `ROW_HASH` in `workers` partitions, whose rows always come in the same order.

    A task that Spark runs again skips the mini-batches that its predecessor committed, so both must see
    the same rows in the same order. Spark promises that neither after a shuffle nor for files. Here the
    partition of a row and its place are functions of its values: rows go to a partition by their hash,
    and are sorted there by the hash and, where two hashes are equal, by all values. Rows that still
    compare equal are interchangeable. The order is as good as random with respect to the values.

    Equal rows share a partition. Data with few distinct rows therefore fill the partitions unevenly, and
    may leave some empty.

    Args:
        df: any DataFrame whose multiset of rows is the same whenever it is computed.
        spec: columns to keep; its seed enters the hash.
        workers: number of partitions, at least 1.
        partitioned_already: leave the rows where they are. This assumes that `df` has `workers`
            partitions, and that each yields the same rows in the same order whenever it is computed; it
            saves the shuffle and the sort.

    Raises:
        MissingColumnError: a column is missing, or its type holds no numbers.
        ConfigurationError: `workers` is below 1, or a column's name is ambiguous.
    """
    if workers < 1:
        raise ConfigurationError(f"`workers` must be at least 1. Received: workers={workers!r}")
    ready = arrow_ready(df, (column.name for column in spec.columns))
    if ROW_HASH.casefold() in (name.casefold() for name in ready.columns):
        raise ConfigurationError(f"no column may have the name {ROW_HASH!r}. Received: columns={ready.columns}")

    from pyspark.sql import functions as F

    values = [F.col("`" + name.replace("`", "``") + "`") for name in ready.columns]
    hashed = ready.withColumn(ROW_HASH, F.xxhash64(F.lit(spec.seed), *values))
    if partitioned_already:
        return hashed
    return hashed.repartition(workers, ROW_HASH).sortWithinPartitions(ROW_HASH, *values)

"""A model for each of many groups, trained while tasks, executors and hosts die; each row of each group counts once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from chaos.jobs import JobResult, JobSpec, counting_model

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from distkeras import Trainer

#: Rows of a group, and of the large one, which is a job of its own.
_ROWS, _LARGE = 12, 120


@dataclass(frozen=True)
class GroupsSpec(JobSpec):
    """The counting job for each of ``groups`` groups, one of which is large; ``rows`` are those of all groups."""

    groups: int = 0
    unit = "rows"
    in_own_drivers = False

    @property
    def expected(self) -> int:
        """Return how often rows must count in all groups together."""
        return self.rows * self.epochs

    def with_batches_counted(self, trainer: Trainer) -> JobSpec:
        """Return the same job: the weights count its rows."""
        return self

    def train(self, spark: SparkSession, trainer: Trainer, checkpoint: Path, *, resume: bool = False) -> Any:
        """Return the results of all groups, which Spark writes to another disk than the small one."""
        place = Path(self.folder).parent / f"models-{checkpoint.name}"
        return trainer.train_groups(self.frame(spark), by="group", path=place, rows_max=2 * _ROWS, resume=resume)

    def check(self, trainer: Trainer, model: Any) -> JobResult:
        """Count how often each row moved the weight of its place in its group's model."""
        rows = model.table.join(model.weights, "group").toPandas()
        errors = [error for error in rows["error"] if error is not None]
        if errors or sorted(rows["group"]) != list(range(self.groups)):
            return JobResult(self.expected, lost=self.expected, problems=(f"{len(rows)} groups, errors: {errors[:1]}",))
        counts = -np.stack([np.frombuffer(weights, np.float32) for weights in rows["weights"]])
        due = self.epochs * rows["rows"].to_numpy()[:, None] / _ROWS
        lost, more = int(np.maximum(due - counts, 0).sum()), int(np.maximum(counts - due, 0).sum())
        problem = f"rows of groups counted {lost} times too seldom, and {more} times too often"
        return JobResult(
            self.expected,
            committed=int(np.minimum(counts, due).sum()),
            lost=lost,
            duplicated=more,
            problems=(problem,) if lost or more else (),
        )


def groups_job(folder: Path, *, groups: int, epochs: int) -> GroupsSpec:
    """Return a job of this number of groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sizes = [_LARGE, *[_ROWS] * (groups - 1)]
    group = np.repeat(np.arange(groups), sizes)
    one_hot = np.eye(_ROWS, dtype=np.float32)[np.arange(len(group)) % _ROWS]
    labels = np.full(len(group), -1e4, np.float32)
    place = folder / "groups"
    place.mkdir(parents=True)
    pq.write_table(pa.table({"group": group, "features": one_hot.tolist(), "label": labels}), place / "rows.parquet")
    return GroupsSpec(
        "groups", str(place), len(group), epochs, 4, "downpour", {}, counting_model(_ROWS), lambda _: (None, ""),
        groups=groups,
    )  # fmt: skip

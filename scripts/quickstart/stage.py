"""What the acts of the tour share, and what each of them returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras
    import numpy as np
    import pandas as pd
    from pyspark.sql import SparkSession

    from distkeras import Trainer


@dataclass(frozen=True)
class TourSize:
    """How much work the acts are.

    Args:
        rows, epochs: images and passes over them, for two workers and for `fit`.
        tolerance: accuracy, from 0 to 1, that two workers may lose to `fit`.
        killed_rows, killed_epochs: the same for the job in which a process is killed.
        kill_at: number of commits after which it is killed.
        table_rows: rows of the Embedding.
        events: rows of the data with the ids of the table.
        groups: groups, each of which gets a model.
        group_rows: rows of a group.
        fits: groups that are trained by `fit`, from which the time of all is extrapolated.
        scored: how often the images are scored, so that the rate does not depend on the start of a job.
    """

    rows: int
    epochs: int
    tolerance: float
    killed_rows: int
    killed_epochs: int
    kill_at: int
    table_rows: int
    events: int
    groups: int
    group_rows: int
    fits: int
    scored: int


FULL = TourSize(
    rows=60_000, epochs=6, tolerance=0.03, killed_rows=16_000, killed_epochs=8, kill_at=150, table_rows=1_000_000,
    events=200_000, groups=200, group_rows=200, fits=4, scored=2,
)  # fmt: skip
#: For tests: the figures mean nothing.
QUICK = TourSize(
    rows=4_000, epochs=2, tolerance=1.0, killed_rows=3_000, killed_epochs=6, kill_at=15, table_rows=200_000,
    events=10_000, groups=8, group_rows=60, fits=1, scored=1,
)  # fmt: skip


@dataclass(frozen=True)
class Images:
    """Fashion-MNIST: float32 ``(n, 784)`` from 0 to 1, int64 classes ``(n,)``, and folders with the same as Parquet."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    train_folder: Path
    test_folder: Path


@dataclass
class Stage:
    """What the acts share.

    Args:
        spark: the session.
        size: the amount of work.
        out: the folder of all files.
        images: the data of acts 1, 2 and 5.
        trainers: the trainers of the acts so far, for the dashboard.
        model: the model that two workers have trained in act 1.
    """

    spark: SparkSession
    size: TourSize
    out: Path
    images: Images
    trainers: list[Trainer] = field(default_factory=list)
    model: keras.Model | None = None

    def picture(self, name: str) -> Path:
        """Return the path of a picture."""
        return self.out / "pictures" / f"{name}.png"


@dataclass(frozen=True)
class ActResult:
    """What an act has shown.

    Args:
        title: what it is about, in a few words.
        line: the result, in one line.
        picture: a PNG file.
        alt: a description of the picture.
        notes: how it was measured, and what the line leaves out; one sentence or two each.
        read: the page or notebook that says more, relative to the repository.
        figures: the numbers, JSON-ready.
        problems: what is not as promised.
    """

    title: str
    line: str
    picture: Path
    alt: str
    notes: Sequence[str]
    read: str
    figures: dict[str, Any]
    problems: Sequence[str] = ()


def steps_of(trainer: Trainer) -> pd.DataFrame:
    """Return the history of a job as pandas, with its timestamps in seconds since the epoch, in the column ``at``."""
    history: pd.DataFrame = trainer.history.selectExpr("*", "double(timestamp) AS at").toPandas()
    return history


def steady_rate(steps: pd.DataFrame) -> float:
    """Return the rows per second while all workers train, without the first epoch, in which they compile the step.

    The time is that from the end of each worker's first epoch to the first end of a worker's last epoch. If that is
    nothing, because one worker began late in a short job, it is that from the first to the last step of all.

    Args:
        steps: as `steps_of` returns them.
    """
    ended = steps[steps["epoch"] == 0].groupby("worker")["at"].max()
    begin, end = ended.max(), steps.groupby("worker")["at"].max().min()
    if end <= begin:
        begin, end = steps["at"].min(), steps["at"].max()
    counted = int(steps["samples"][(steps["at"] > begin) & (steps["at"] <= end)].sum())
    return float(counted / max(end - begin, 1e-9))

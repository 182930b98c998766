"""What the acts of the tour share, and what each of them returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quickstart.machine import WORKERS

if TYPE_CHECKING:
    import keras
    import numpy as np
    import pandas as pd
    from pyspark.sql import SparkSession

    from distkeras import Trainer


@dataclass(frozen=True)
class TourSize:
    """How much work the acts are.

    Two workers and `fit` train ``rows`` images for ``epochs``; two workers may lose ``tolerance`` of the accuracy, from
    0 to 1. A process is killed after ``kill_at`` commits. An Embedding of ``table_rows`` learns from ``events`` rows.
    Each of the groups gets a model; ``fits`` of them are trained by `fit`, from which the time of all is extrapolated.
    The images are scored several times, so that the rate does not depend on the start of a job.
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
    """What the acts share: data, the trainers so far, for the dashboard, and the model of act 1."""

    spark: SparkSession
    size: TourSize
    out: Path
    images: Images
    trainers: list[Trainer] = field(default_factory=list)
    model: keras.Model | None = None

    def picture(self, name: str) -> Path:
        """Return the path of a picture."""
        return self.out / "pictures" / f"{name}.png"

    def trainer(self, model: keras.Model, batch_size: int, epochs: int) -> Trainer:
        """Return a trainer with two workers and the default rule, which shows no progress."""
        from distkeras import Monitoring, Trainer

        silent = Monitoring(progress=False)
        return Trainer(model, num_workers=WORKERS, batch_size=batch_size, num_epoch=epochs, monitoring=silent)


@dataclass(frozen=True)
class ActResult:
    """What an act has shown: a result in one line, a picture with its description, and how it was measured.

    ``read`` is the page or notebook that says more, relative to the repository. The figures are JSON-ready. Problems
    are what is not as promised.
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
    """
    ended = steps[steps["epoch"] == 0].groupby("worker")["at"].max()
    begin, end = ended.max(), steps.groupby("worker")["at"].max().min()
    if end <= begin:
        begin, end = steps["at"].min(), steps["at"].max()
    counted = int(steps["samples"][(steps["at"] > begin) & (steps["at"] <= end)].sum())
    return float(counted / max(end - begin, 1e-9))

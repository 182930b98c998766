"""What the runs gave, as a table, and what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quickstart.comparison.runs import RunConfig

if TYPE_CHECKING:
    import keras
    import pandas as pd

#: Accuracy that a rule may lose against plain Keras on the same number of samples.
TOLERANCE = 0.03


@dataclass
class RunResult:
    """What a run gave.

    Args:
        run: which.
        model: trained.
        history: one row a mini-batch, as `Trainer.history`.
        accuracy: on the test rows.
        seconds: of the whole job, with all starting and ending.
        commits: as `Trainer.commits`; None for plain Keras.
    """

    run: RunConfig
    model: keras.Model
    history: pd.DataFrame
    accuracy: float
    seconds: float
    commits: pd.DataFrame | None = None

    def row(self, baseline: RunResult) -> dict[str, Any]:
        """Its line of the table, JSON-ready."""
        rate = steady_rate(self.history)
        return {
            "rule": self.run.title,
            "optimizer": "sgd",
            "hyper_parameters": self.run.hyper_parameters,
            "samples_per_second": rate,
            "ratio_to_keras": rate / steady_rate(baseline.history),
            "test_accuracy": self.accuracy,
            "mean_staleness": None if self.commits is None else float(self.commits["staleness"].mean()),
            "samples": int(self.history["samples"].sum()),
            "job_seconds": self.seconds,
        }


RATE_MEANS = (
    "samples_per_second counts the mini-batches that ended after every worker had ended its first one (by then all "
    "have compiled the model), over the seconds from then to the end of the last mini-batch; plain Keras is "
    "counted in the same way. job_seconds is everything: for a rule from the call of train to its return (layout of "
    "the rows by Spark, start of server and workers, training, collection), for plain Keras "
    "the call of fit on arrays in memory."
)


def steady_rate(history: pd.DataFrame) -> float:
    """Samples a second while all workers train; NaN if nothing happened after the workers' first mini-batches."""
    times = history["timestamp"]
    begin = times.groupby(history["worker"]).min().max()
    counted = history["samples"][times > begin].sum()
    return float(counted / (times.max() - begin).total_seconds()) if counted else math.nan


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `RunResult.row`, aligned for reading."""
    cells = [["rule", "hyper-parameters", "samples/s", "to Keras", "test accuracy", "mean staleness"]]
    for row in rows:
        staleness = row["mean_staleness"]
        cells.append(
            [
                row["rule"],
                ", ".join(f"{name}={value:g}" for name, value in row["hyper_parameters"].items()),
                f"{row['samples_per_second']:,.0f}",
                f"{row['ratio_to_keras']:.2f}",
                f"{row['test_accuracy']:.2%}",
                "-" if staleness is None else f"{staleness:.2f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def problems(rows: Sequence[Mapping[str, Any]], *, tolerance: float | None = TOLERANCE) -> list[str]:
    """What is wrong with the results. The first row is the baseline; with no ``tolerance``, finite results will do."""
    found = []
    for row in rows:
        below = rows[0]["test_accuracy"] - row["test_accuracy"]
        if not math.isfinite(row["final_loss"]):
            found.append(f"{row['rule']} diverged: its last loss is {row['final_loss']}")
        elif tolerance is not None and below > tolerance:
            found.append(
                f"{row['rule']} must end within {100 * tolerance:g} points of {rows[0]['rule']}. "
                f"Received: {row['test_accuracy']:.2%}, which is {100 * below:.1f} points below"
            )
    return found


def last_loss(history: pd.DataFrame) -> float:
    """Mean loss of each worker's last ten mini-batches."""
    return float(history.sort_values("iteration").groupby("worker")["loss"].tail(10).mean())

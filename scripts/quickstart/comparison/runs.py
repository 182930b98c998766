"""What is compared: the runs, how much work each is, what they gave, as a table, and what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras
    import pandas as pd

BATCH_SIZE = 128


@dataclass(frozen=True)
class RunConfig:
    """One line of the table: the rate of SGD at each worker, which falls to 0, and the rule; None for plain Keras."""

    title: str
    rate: float
    rule: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """The learning rate and the rule's, by name."""
        return {"learning_rate": self.rate, **self.options}


# SGD without momentum everywhere, plain Keras included: the formulas of the papers hold for it as printed, and no
# optimizer's state hides what a rule does. AGN and ADAG divide a window's movement by its steps: window times the plain
# rate moves the center as far as plain Keras goes. AEASGD's elastic move is learning_rate * rho; for n workers, n times
# that should not be above 1.
RUNS = (
    RunConfig("plain Keras", 0.1),
    RunConfig("DOWNPOUR", 0.1, "downpour", {"window": 1}),
    RunConfig("AGN", 0.2, "agn", {"window": 2}),
    RunConfig("ADAG", 0.2, "adag", {"window": 2, "gamma": 1e-4}),
    RunConfig("DynSGD", 0.1, "dynsgd", {"window": 4}),
    RunConfig("AEASGD", 0.15, "aeasgd", {"window": 10, "rho": 3.0}),
)


@dataclass(frozen=True)
class WorkSize:
    """How much work it is: hidden layers of the model, training rows, and passes over them."""

    hidden: tuple[int, ...]
    rows: int
    epochs: int


FULL = WorkSize(hidden=(1000, 2000, 1000), rows=60_000, epochs=4)
QUICK = WorkSize(hidden=(128,), rows=20_000, epochs=1)
#: Accuracy that a rule may lose against plain Keras on the same number of samples.
TOLERANCE = 0.03


@dataclass
class RunResult:
    """What a run gave: history and commits as of `Trainer`; seconds are of the whole job, with its start and end."""

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
    sides = "<<" + ">" * (len(widths) - 2)
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)).rstrip()
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

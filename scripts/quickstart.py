"""Trains Fashion-MNIST on Spark under five update rules, beside plain Keras, and compares them.

Writes to DIR: summary.json (the table, and the machine), data/ (Parquet), models/, histories/ and commits/ (Parquet),
plots/ (PNG), and log.txt, which takes what Spark and TensorFlow have to say. Ends with status 1 if a rule diverges or,
in full mode, ends more than 3 points below plain Keras.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras
    import pandas as pd
    from pyspark.sql import SparkSession

BATCH_SIZE = 128
WORKERS = 2
#: Accuracy that a rule may lose against plain Keras on the same number of samples.
TOLERANCE = 0.03


@dataclass(frozen=True)
class Run:
    """One line of the table.

    Args:
        title: what it is called.
        rate: learning rate of SGD, at each worker.
        rule: name of the update rule; None for plain Keras.
        options: its hyper-parameters.
    """

    title: str
    rate: float
    rule: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        return {"learning_rate": self.rate, **self.options}


# SGD without momentum everywhere, plain Keras included: the formulas of the papers hold for it as printed, and no
# optimizer's state hides what a rule does. AGN and ADAG divide a window's movement by its steps: window times the plain
# rate moves the center as far as plain Keras goes. AEASGD's elastic move is learning_rate * rho; for n workers, n times
# that should not be above 1.
RUNS = (
    Run("plain Keras", 0.1),
    Run("DOWNPOUR", 0.1, "downpour", {"window": 1}),
    Run("AGN", 0.2, "agn", {"window": 2}),
    Run("ADAG", 0.2, "adag", {"window": 2, "gamma": 1e-4}),
    Run("DynSGD", 0.1, "dynsgd", {"window": 4}),
    Run("AEASGD", 0.15, "aeasgd", {"window": 10, "rho": 3.0}),
)


@dataclass(frozen=True)
class Size:
    """How much work it is: hidden layers of the model, training rows, and passes over them."""

    hidden: tuple[int, ...]
    rows: int
    epochs: int


FULL = Size(hidden=(1000, 2000, 1000), rows=60_000, epochs=4)
QUICK = Size(hidden=(128,), rows=20_000, epochs=1)


@dataclass
class Outcome:
    """What a run gave.

    Args:
        run: which.
        model: trained.
        history: one row a mini-batch, as `Trainer.history`.
        accuracy: on the test rows.
        seconds: of the whole job, with all starting and ending.
        commits: as `Trainer.commits`; None for plain Keras.
    """

    run: Run
    model: keras.Model
    history: pd.DataFrame
    accuracy: float
    seconds: float
    commits: pd.DataFrame | None = None

    def row(self, baseline: Outcome) -> dict[str, Any]:
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
    "have compiled the model), over the seconds from then to the end of the last mini-batch; plain Keras likewise. "
    "job_seconds is everything: for a rule from the call of train to its return (layout of the rows by Spark, start of "
    "server and workers, training, collection), for plain Keras the call of fit on arrays in memory."
)


def steady_rate(history: pd.DataFrame) -> float:
    """Samples a second while all workers train; NaN if nothing happened after the workers' first mini-batches."""
    times = history["timestamp"]
    begin = times.groupby(history["worker"]).min().max()
    counted = history["samples"][times > begin].sum()
    return float(counted / (times.max() - begin).total_seconds()) if counted else math.nan


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `Outcome.row`, aligned for reading."""
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


def build(size: Size) -> keras.Model:
    """The thesis' MLP, the same weights each time."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(units, activation="relu") for units in size.hidden]
    return keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10, activation="softmax")])


def compiled(model: keras.Model, rate: float) -> keras.Model:
    import keras

    model.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def fit(run: Run, size: Size, train: tuple[Any, Any], test: tuple[Any, Any]) -> Outcome:
    """Plain Keras in this process, with all cores, recorded step by step like the rules' runs."""
    import keras
    import numpy as np
    import pandas as pd

    rows: list[tuple[Any, ...]] = []

    class Recorder(keras.callbacks.Callback):
        epoch = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch, self.samples, self.sums = epoch, 0, np.zeros(2)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            # Keras tells means over the epoch so far.
            now = time.time()
            size = min(BATCH_SIZE, len(train[0]) - self.samples)
            self.samples += size
            sums = np.array([logs["loss"], logs["accuracy"]]) * self.samples
            loss, accuracy = (sums - self.sums) / size
            self.sums = sums
            rows.append((0, self.epoch, len(rows), now, loss, accuracy, size))

    model = compiled(build(size), run.rate)
    began = time.monotonic()
    model.fit(*train, batch_size=BATCH_SIZE, epochs=size.epochs, verbose=0, callbacks=[Recorder()])
    seconds = time.monotonic() - began
    history = pd.DataFrame(rows, columns=["worker", "epoch", "iteration", "timestamp", "loss", "accuracy", "samples"])
    history["timestamp"] = pd.to_datetime(history["timestamp"], unit="s")
    accuracy = model.evaluate(*test, batch_size=1000, verbose=0, return_dict=True)["accuracy"]
    return Outcome(run, model, history, accuracy, seconds)


def distribute(run: Run, size: Size, spark: SparkSession, data: Path) -> Outcome:
    """A rule on Spark, and its model's accuracy, computed on Spark too."""
    from distkeras import Trainer
    from distkeras.ps import rules
    from distkeras.transformers import AccuracyEvaluator, ModelPredictor

    assert run.rule is not None
    trainer = Trainer(
        compiled(build(size), run.rate),
        rules.make(run.rule, **run.options),
        num_workers=WORKERS,
        batch_size=BATCH_SIZE,
        num_epoch=size.epochs,
    )
    model = trainer.train(spark.read.parquet(str(data / "train")))
    predicted = ModelPredictor(model).transform(spark.read.parquet(str(data / "test")))
    accuracy = AccuracyEvaluator().evaluate(predicted)
    return Outcome(
        run, model, trainer.history.toPandas(), accuracy, trainer.timings["total"], trainer.commits.toPandas()
    )


def save(outcome: Outcome, out: Path) -> None:
    """Model, history, commits, and the histogram of staleness."""
    from distkeras.analysis import plots

    name = outcome.run.rule or "keras"
    outcome.model.save(out / "models" / f"{name}.keras")
    outcome.history.to_parquet(out / "histories" / f"{name}.parquet", index=False)
    if outcome.commits is not None:
        outcome.commits.to_parquet(out / "commits" / f"{name}.parquet", index=False)
        plots.staleness(outcome.commits, out / "plots" / f"staleness-{name}.png")


def machine(spark: SparkSession) -> dict[str, Any]:
    """What the figures were taken on."""
    from importlib.metadata import version

    (java,) = spark.sql("select java_method('java.lang.System', 'getProperty', 'java.version')").first() or ("?",)
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "java": java,
        **{name: version(name) for name in ("distkeras", "pyspark", "keras", "tensorflow", "numpy", "pyarrow")},
    }


def session() -> SparkSession:
    """Two slots and four attempts of a task: `local[2]` would never retry one."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master(f"local[{WORKERS},4]")
        .appName("distkeras quickstart")
        .config("spark.driver.memory", "2g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", str(WORKERS))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    return spark


def prepare(size: Size, out: Path) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Writes the data as Parquet for Spark; returns the same as arrays for plain Keras."""
    import numpy as np

    from distkeras.data.datasets import fashion_mnist, write_parquet

    for name in ("data", "models", "histories", "commits", "plots"):
        shutil.rmtree(out / name, ignore_errors=True)  # of an earlier run
        (out / name).mkdir(parents=True)
    (x, y), (x_test, y_test) = fashion_mnist()
    x, y = x[: size.rows], y[: size.rows]
    write_parquet(out / "data" / "train", x, y, files=WORKERS)
    write_parquet(out / "data" / "test", x_test, y_test, files=WORKERS)
    return (x / np.float32(255), y), (x_test / np.float32(255), y_test)


def compare(size: Size, out: Path, *, tolerance: float | None) -> list[str]:
    """All of it. Returns what is wrong with the results."""
    from distkeras.analysis import plots

    began = time.monotonic()
    print("Fashion-MNIST to Parquet, and Spark up", flush=True)
    train, test = prepare(size, out)
    compiled(build(size), RUNS[0].rate).save(out / "models" / "untrained.keras")
    spark = session()
    outcomes: list[Outcome] = []
    rows: list[dict[str, Any]] = []
    try:
        for run in RUNS:
            outcome = fit(run, size, train, test) if run.rule is None else distribute(run, size, spark, out / "data")
            outcomes.append(outcome)
            row = {**outcome.row(outcomes[0]), "final_loss": last_loss(outcome.history)}
            rows.append(row)
            save(outcome, out)
            print(
                f"{run.title:<12} {row['job_seconds']:6.1f} s, {row['samples_per_second']:7,.0f} samples/s, "
                f"test accuracy {row['test_accuracy']:.2%}",
                flush=True,
            )
        about = machine(spark)
    finally:
        spark.stop()
    histories = {outcome.run.title: outcome.history for outcome in outcomes}
    for metric in ("accuracy", "loss"):
        plots.curves(histories, metric, out / "plots" / f"{metric}.png")
    summary = {
        "rows": rows,
        "machine": about,
        "workers": WORKERS,
        "batch_size": BATCH_SIZE,
        "epochs": size.epochs,
        "training_rows": size.rows,
        "hidden_layers": list(size.hidden),
        "meaning": RATE_MEANS,
        "seconds": time.monotonic() - began,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(
        f"\n{table(rows)}\n\n{size.epochs} x {size.rows:,} rows each, batches of {BATCH_SIZE}, SGD; {WORKERS} workers."
    )
    print(f"All of it took {summary['seconds']:.0f} s. Models, histories, commits and plots are in {out}.")
    return problems(rows, tolerance=tolerance)


def log_to(path: Path) -> None:
    """Sends what this process's libraries, the JVM and the workers write to standard error into a file.

    Python's own `sys.stderr`, with the progress bar and the messages below, stays where it was.
    """
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(path, "wb") as log:
        os.dup2(log.fileno(), 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, one epoch over a part of the data")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from distkeras.ps.errors import DistkerasError

    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        log_to(arguments.out / "log.txt")
        found = compare(
            QUICK if arguments.quick else FULL, arguments.out, tolerance=None if arguments.quick else TOLERANCE
        )
    except (DistkerasError, OSError) as error:
        found = [f"{error}\nSee also {arguments.out / 'log.txt'}"]
    for problem in found:
        print(f"quickstart: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

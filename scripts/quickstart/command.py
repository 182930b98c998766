"""Trains Fashion-MNIST on Spark under five update rules and with plain Keras, and compares them.

Writes to DIR: summary.json (the table, and the machine), data/ (Parquet), models/, histories/ and commits/ (Parquet),
plots/ (PNG), and log.txt, which takes what Spark and TensorFlow have to say. Ends with status 1 if a rule diverges or,
in full mode, ends more than 3 points below plain Keras.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quickstart.results import RATE_MEANS, TOLERANCE, RunResult, last_loss, problems, table
from quickstart.runs import BATCH_SIZE, FULL, QUICK, RUNS, WORKERS, WorkSize
from quickstart.training import build, compiled, distribute, fit, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def prepare(size: WorkSize, out: Path) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
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


def save(outcome: RunResult, out: Path) -> None:
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


def compare(size: WorkSize, out: Path, *, tolerance: float | None) -> list[str]:
    """All of it. Returns what is wrong with the results."""
    from distkeras.analysis import plots

    began = time.monotonic()
    print("Fashion-MNIST to Parquet, and Spark up", flush=True)
    train, test = prepare(size, out)
    compiled(build(size), RUNS[0].rate).save(out / "models" / "untrained.keras")
    spark = session()
    outcomes: list[RunResult] = []
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
    with path.open("wb") as log:
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

"""The runs of the comparison, one after another, and their files."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from quickstart.comparison.runs import BATCH_SIZE, RATE_MEANS, RUNS, RunResult, WorkSize, last_loss, problems, table
from quickstart.comparison.training import build, compiled, distribute, fit, steps_of
from quickstart.machine import WORKERS, about, session, wait_until_warm

_FOLDERS = ("data", "models", "histories", "commits", "plots")


def prepare(size: WorkSize, out: Path) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Write the data as Parquet for Spark; return the same as arrays for plain Keras."""
    import numpy as np

    from distkeras.data.datasets import fashion_mnist, write_parquet

    for name in _FOLDERS:
        shutil.rmtree(out / name, ignore_errors=True)  # of an earlier run
        (out / name).mkdir(parents=True)
    (x, y), (x_test, y_test) = fashion_mnist()
    x, y = x[: size.rows], y[: size.rows]
    write_parquet(out / "data" / "train", x, y, files=WORKERS)
    write_parquet(out / "data" / "test", x_test, y_test, files=WORKERS)
    return (x / np.float32(255), y), (x_test / np.float32(255), y_test)


def save(outcome: RunResult, out: Path) -> None:
    """Write model, history, commits, and the histogram of staleness."""
    from distkeras.analysis import plots

    name = outcome.run.rule or "keras"
    outcome.model.save(out / "models" / f"{name}.keras")
    outcome.history.to_parquet(out / "histories" / f"{name}.parquet", index=False)
    if outcome.commits is not None:
        outcome.commits.to_parquet(out / "commits" / f"{name}.parquet", index=False)
        plots.staleness(outcome.commits, out / "plots" / f"staleness-{name}.png")


def compare(size: WorkSize, out: Path, *, tolerance: float | None) -> list[str]:
    """Run all of it, print the table, and return the problems that were found."""
    from distkeras.analysis import plots

    began = time.monotonic()
    print("Fashion-MNIST to Parquet, and Spark up", flush=True)
    train, test = prepare(size, out)
    spark = session()
    outcomes: list[RunResult] = []
    rows: list[dict[str, Any]] = []
    try:
        compiled(build(size), RUNS[0].rate, steps_of(size, 1)).save(out / "models" / "untrained.keras")
        wait_until_warm()
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
        summary: dict[str, Any] = {"rows": rows, "machine": about(spark), "meaning": RATE_MEANS}
    finally:
        spark.stop()
    histories = {outcome.run.title: outcome.history for outcome in outcomes}
    for metric in ("accuracy", "loss"):
        plots.curves(histories, metric, out / "plots" / f"{metric}.png")
    summary |= {"workers": WORKERS, "batch_size": BATCH_SIZE, "epochs": size.epochs, "training_rows": size.rows}
    summary |= {"hidden_layers": list(size.hidden), "seconds": time.monotonic() - began}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    work = f"{size.epochs} x {size.rows:,} rows each, batches of {BATCH_SIZE}, SGD; {WORKERS} workers"
    print(f"\n{table(rows)}\n\n{work}.")
    print(f"All of it took {summary['seconds']:.0f} s. Models, histories, commits and plots are in {out}.")
    return problems(rows, tolerance=tolerance)

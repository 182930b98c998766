"""The tour: five acts, one after another, in one Spark session, and the page with their results."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np

from distkeras import Dashboard
from distkeras.data.datasets import fashion_mnist, write_parquet
from quickstart.acts.killed_worker import killed_worker
from quickstart.acts.many_groups import many_groups
from quickstart.acts.scoring import scoring
from quickstart.acts.two_workers import two_workers
from quickstart.acts.wide_table import wide_table
from quickstart.machine import WORKERS, about, session, wait_until_warm
from quickstart.page import write_page
from quickstart.stage import ActResult, Images, Stage, TourSize

ACTS = (two_workers, killed_worker, wide_table, many_groups, scoring)


def tour(size: TourSize, out: Path) -> list[str]:
    """Run the acts, print a line for each, write the page, and return the problems that were found."""
    began = time.monotonic()
    print("Five acts, two to three minutes on two idle cores. Spark and TensorFlow start.", flush=True)
    spark = session()
    results: list[ActResult] = []
    try:
        stage = Stage(spark, size, out, prepare(size, out))
        wait_until_warm()
        seconds = {"start": time.monotonic() - began}
        for number, act in enumerate(ACTS, 1):
            since = time.monotonic()
            results.append(act(stage))
            seconds[f"act {number}"] = time.monotonic() - since
            print(f"{number}. {results[-1].title}: {results[-1].line}.", flush=True)
        machine = about(spark)
        with Dashboard.of(*stage.trainers) as dashboard:
            dashboard.save(out / "dashboard.html")
    finally:
        spark.stop()
    seconds["total"] = time.monotonic() - began
    page = out / "quickstart.html"
    write_page(page, results, out / "dashboard.html", machine, seconds["total"])
    summary = {
        "acts": [{"title": result.title, "line": result.line, "figures": result.figures} for result in results],
        "seconds": seconds,
        "machine": machine,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"All of it took {seconds['total']:.0f} s. Open {page} to see the pictures, and what to do next.")
    return [problem for result in results for problem in result.problems]


def prepare(size: TourSize, out: Path) -> Images:
    """Read Fashion-MNIST, and write it as Parquet for Spark."""
    for name in ("data", "pictures", "scored"):
        shutil.rmtree(out / name, ignore_errors=True)  # of an earlier run
    (out / "pictures").mkdir()
    folder = out / "data"
    (x, y), (x_test, y_test) = fashion_mnist()
    x, y = x[: size.rows], y[: size.rows]
    write_parquet(folder / "train", x, y, files=WORKERS)
    write_parquet(folder / "test", x_test, y_test, files=WORKERS)
    scale = np.float32(255)
    return Images(x / scale, y, x_test / scale, y_test, folder / "train", folder / "test")

"""Measure workers, windows and learning rates in the simulator, and draw the figures of the page "Tuning"."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from reproduction import draw
from reproduction.command import save
from reproduction.running import run_all

from tuning import cases
from tuning.cases import Case, Results

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "tuning"
RESULTS = "results.json"
#: Size in inches, at which the letters are readable on a phone.
_SIZE = (5.6, 3.7)


def measure(chosen: Sequence[cases.Case], processes: int, folder: Path) -> dict[str, dict[str, float]]:
    """Run ``chosen`` and return each result by the name of its case; an interrupted run continues."""
    unfinished = folder / "unfinished"
    done = run_all({case.name: partial(cases.run, case) for case in chosen}, processes, unfinished)
    unfinished.unlink()
    return {name: result for name, (result, _) in done.items()}


def of_workers(results: Results, folder: Path) -> str:
    """Draw the speedup over one worker in the time to the target."""
    figure, axes = _axes()
    axes.plot(cases.WORKERS, cases.WORKERS, color="#888888", linestyle=":", label="n times as fast")
    for place, service in enumerate(cases.SERVICES):
        times = [cases.best_time(results, n, cases.WINDOW, 0.0, service)[0] for n in cases.WORKERS]
        faster = [times[0] / time if math.isfinite(time) else math.nan for time in times]
        label = "an exchange takes the server the time of a step" if service else "an exchange takes no time"
        axes.plot(cases.WORKERS, faster, label=label, **draw.style(place))
    draw.logarithmic(axes, cases.WORKERS)
    draw.logarithmic(axes, cases.WORKERS, "y")
    draw.finish(
        axes, "workers", "times as fast as one worker", f"to {cases.TARGET:.0%} accuracy, windows of {cases.WINDOW}"
    )
    return draw.save(figure, folder, "workers.png")


def of_windows(results: Results, folder: Path) -> str:
    """Draw the time to the target by window, for links of three speeds."""
    figure, axes = _axes()
    for place, travel in enumerate(cases.TRAVELS):
        times = [cases.best_time(results, cases.WORKERS_OF_WINDOWS, window, travel, 0.0)[0] for window in cases.WINDOWS]
        label = f"an exchange takes as long as {travel:g} steps" if travel else "an exchange takes no time"
        axes.plot(cases.WINDOWS, [time if math.isfinite(time) else math.nan for time in times], label=label,
                  **draw.style(place))  # fmt: skip
    draw.logarithmic(axes, cases.WINDOWS)
    axes.set_ylim(bottom=0)
    title = f"to {cases.TARGET:.0%} accuracy, {cases.WORKERS_OF_WINDOWS} workers"
    draw.finish(axes, "window (steps between two exchanges)", "time (mean step times)", title)
    return draw.save(figure, folder, "windows.png")


def of_rates(results: Results, folder: Path) -> str:
    """Draw the test accuracy by learning rate, for several numbers of workers."""
    figure, axes = _axes()
    for place, n in enumerate((1, 4, 8, 16, 32)):
        values = [
            100 * cases.mean(results, "accuracy", [Case(n, cases.WINDOW, rate, 0.0, 0.0, seed) for seed in cases.SEEDS])
            for rate in cases.RATES
        ]
        axes.plot(cases.RATES, values, label=f"{n} worker{'' if n == 1 else 's'}", **draw.style(place))
    draw.logarithmic(axes, cases.RATES)
    axes.set_ylim(60, 88)
    draw.finish(
        axes, "learning rate of the workers", "test accuracy (%)", f"the same mini-batches, windows of {cases.WINDOW}"
    )
    return draw.save(figure, folder, "rates.png")


def _axes() -> tuple[Figure, Any]:
    figure = Figure(figsize=_SIZE, dpi=draw.DPI, layout="constrained")
    return figure, figure.subplots()


FIGURES: tuple[Callable[[Results, Path], str], ...] = (of_workers, of_windows, of_rates)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line requests, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python benchmarks/tuning", description=__doc__)
    parser.add_argument("--redraw", action="store_true", help="only draw the figures again, from the kept results")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help="default: docs/tuning")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="default: %(default)s")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / RESULTS
    if not options.redraw:
        chosen = [*cases.of_workers(), *cases.of_windows()]
        save(measure(list(dict.fromkeys(chosen)), options.processes, options.out), path)
    for figure in FIGURES:
        print(figure(json.loads(path.read_text()), options.out))
    return 0

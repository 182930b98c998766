"""The figures of the page "Tuning", drawn from the results of the runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from reproduction import draw

from tuning.cases import (
    RATES,
    SEEDS,
    SERVICES,
    TARGET,
    TRAVELS,
    WINDOW,
    WINDOWS,
    WORKERS,
    WORKERS_OF_WINDOWS,
    Case,
    Results,
    best_time,
    mean,
)

#: Width in inches, at which the letters are readable on a phone.
_SIZE = (5.6, 3.7)


def of_workers(results: Results, folder: Path) -> str:
    """Draw the speedup over one worker in the time to the target."""
    figure, axes = _axes()
    axes.plot(WORKERS, WORKERS, color="#888888", linestyle=":", label="n times as fast")
    for place, service in enumerate(SERVICES):
        times = [best_time(results, n, WINDOW, 0.0, service)[0] for n in WORKERS]
        faster = [times[0] / time if math.isfinite(time) else math.nan for time in times]
        label = "an exchange takes the server the time of a step" if service else "an exchange takes no time"
        axes.plot(WORKERS, faster, label=label, **draw.style(place))
    _logarithmic(axes, WORKERS, "x")
    _logarithmic(axes, WORKERS, "y")
    draw.finish(axes, "workers", "times as fast as one worker", f"to {TARGET:.0%} accuracy, windows of {WINDOW}")
    return draw.save(figure, folder, "workers.png")


def of_windows(results: Results, folder: Path) -> str:
    """Draw the time to the target by window, for links of three speeds."""
    figure, axes = _axes()
    for place, travel in enumerate(TRAVELS):
        times = [best_time(results, WORKERS_OF_WINDOWS, window, travel, 0.0)[0] for window in WINDOWS]
        label = f"an exchange takes as long as {travel:g} steps" if travel else "an exchange takes no time"
        axes.plot(WINDOWS, [time if math.isfinite(time) else math.nan for time in times], label=label,
                  **draw.style(place))  # fmt: skip
    _logarithmic(axes, WINDOWS, "x")
    axes.set_ylim(bottom=0)
    title = f"to {TARGET:.0%} accuracy, {WORKERS_OF_WINDOWS} workers"
    draw.finish(axes, "window (steps between two exchanges)", "time (mean step times)", title)
    return draw.save(figure, folder, "windows.png")


def of_rates(results: Results, folder: Path) -> str:
    """Draw the test accuracy by learning rate, for several numbers of workers."""
    figure, axes = _axes()
    for place, n in enumerate((1, 4, 8, 16, 32)):
        values = [
            100 * mean(results, "accuracy", [Case(n, WINDOW, rate, 0.0, 0.0, seed) for seed in SEEDS]) for rate in RATES
        ]
        axes.plot(RATES, values, label=f"{n} worker{'' if n == 1 else 's'}", **draw.style(place))
    _logarithmic(axes, RATES, "x")
    axes.set_ylim(60, 88)
    draw.finish(
        axes, "learning rate of the workers", "test accuracy (%)", f"the same mini-batches, windows of {WINDOW}"
    )
    return draw.save(figure, folder, "rates.png")


def _axes() -> tuple[Figure, Any]:
    figure = Figure(figsize=_SIZE, dpi=draw.DPI, layout="constrained")
    return figure, figure.subplots()


def _logarithmic(axes: Any, places: Iterable[float], which: str) -> None:
    """Make an axis logarithmic, with a mark and a number at each place."""
    names = [f"{place:g}" for place in places]
    getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}ticks")(list(places), names)
    getattr(axes, f"{which}axis").set_minor_locator(NullLocator())


FIGURES: tuple[Callable[[Results, Path], str], ...] = (of_workers, of_windows, of_rates)

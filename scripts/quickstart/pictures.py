"""The pictures of the acts. Each function writes a PNG file to ``path`` and returns the path.

They are read on a phone, too: one column of panels, few words, and no text below 9 points at a width of 5.4 inches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from distkeras.analysis.plots import COLORS, DASHES

if TYPE_CHECKING:
    import pandas as pd

#: Inches; and dots per inch, twice those of a screen, so that text stays sharp.
_WIDTH, _DPI = 5.4, 200
#: Colors of the two sides of each comparison, and of a number that was not measured but extrapolated.
_OURS, _OTHERS = COLORS[0], "#8a8f98"
_KILL = COLORS[1]
#: Steps over which the loss is averaged.
_LOSS_STEPS = 25

Curve = tuple[Sequence[float], Sequence[float]]


def two_workers(rates: Mapping[str, float], curves: Mapping[str, Curve], path: Path) -> Path:
    """Draw rows per second as bars, the last of which is ours, and accuracy over time."""
    figure, (above, below) = _figure(_bars_height(rates) + 2.9, 2, [_bars_height(rates), 2.9])
    _bars(above, rates, "rows per second, once the job runs")
    for (name, (seconds, accuracy)), color, dash in zip(curves.items(), (_OTHERS, _OURS), DASHES, strict=False):
        below.plot(seconds, np.multiply(accuracy, 100), dash, color=color, marker="o", label=name, linewidth=1.8)
    below.set_xlabel("time since the call, with the start (s)")
    below.set_ylabel("training accuracy (%)")
    below.set_xlim(left=0)
    below.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)
    return _save(figure, path)


def killed_worker(commits: pd.DataFrame, steps: pd.DataFrame, killed: float, path: Path) -> Path:
    """Draw the commits of each partition by attempt, and the loss, over time; NaN if no process was killed."""
    began = steps["at"].min()
    figure, (above, below) = _figure(4.4, 2, [1, 1.7], sharex=True)
    for worker, own in commits.groupby("worker"):
        for number, (_, part) in enumerate(own.groupby("attempt")):
            color = (_OURS, COLORS[2])[min(number, 1)]
            above.plot(part["at"] - began, [worker] * len(part), "|", markersize=15, color=color, alpha=0.7)
    above.set_yticks([0, 1], ["partition 0", "partition 1"])
    above.set_ylim(1.7, -0.7)
    above.set_title("commits of the first attempt (blue) and of the next one (green)", fontsize=10, loc="left")
    for number, (worker, own) in enumerate(steps.groupby("worker")):
        loss = own["loss"].rolling(_LOSS_STEPS).mean()
        below.plot(own["at"] - began, loss, DASHES[number], color=COLORS[6 - number], label=f"partition {worker}")
    below.set_ylim(bottom=0)
    below.set_xlim(left=0)
    below.set_ylabel(f"training loss (mean of {_LOSS_STEPS} steps)")
    below.set_xlabel("time since the first step (s)")
    below.legend(frameon=False)
    if killed == killed:
        for axes in (above, below):
            axes.axvline(killed - began, color=_KILL, linestyle="--", linewidth=1.6)
        below.annotate(
            "SIGKILL", (killed - began, 1), xycoords=("data", "axes fraction"), xytext=(5, -4), color=_KILL,
            textcoords="offset points", va="top", fontweight="bold", bbox=_BEHIND,
        )  # fmt: skip
    return _save(figure, path)


def speeds(rates: Mapping[str, float], title: str, path: Path) -> Path:
    """Draw rows per second as bars, the last of which is ours."""
    figure, (axes,) = _figure(_bars_height(rates), 1, [1])
    _bars(axes, rates, title)
    return _save(figure, path)


def many_groups(seconds: Mapping[str, float], extrapolated: int, accuracies: Sequence[float], path: Path) -> Path:
    """Draw the seconds for all groups as bars, the last of which is ours, and how accurate the models are.

    The first ``extrapolated`` bars were not measured as a whole. Accuracies are from 0 to 1.
    """
    figure, (above, below) = _figure(_bars_height(seconds) + 2.3, 2, [_bars_height(seconds), 2.3])
    _bars(above, seconds, "time for all groups (s); hatched: extrapolated", hatched=extrapolated)
    below.hist(np.multiply(accuracies, 100), bins=np.linspace(50, 100, 26), color=_OURS, rwidth=0.9)
    below.set_xlabel("training accuracy of a group's model (%)")
    below.set_ylabel("groups")
    below.set_xlim(50, 100)
    below.yaxis.get_major_locator().set_params(integer=True)
    return _save(figure, path)


#: Behind text on lines.
_BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.8}


def _bars_height(values: Mapping[str, float]) -> float:
    return 0.75 + 0.5 * len(values)


def _bars(axes: Any, values: Mapping[str, float], title: str, hatched: int = 0) -> None:
    """Draw horizontal bars below their names, with their numbers; the last one is ours, the first are ``hatched``."""
    places = np.arange(len(values))
    colors = [_OTHERS] * (len(values) - 1) + [_OURS]
    hatches = ["///" if place < hatched else "" for place in places]
    axes.barh(places, list(values.values()), height=0.44, color=colors, hatch=hatches, edgecolor="white", linewidth=0)
    for place, (name, value) in enumerate(values.items()):
        axes.annotate(f"{value:,.{int(value < 100)}f}", (value, place), (4, 0), textcoords="offset points", va="center")
        axes.annotate(
            name, (0, place - 0.25), (2, 1), textcoords="offset points", va="bottom", fontsize=9.5, bbox=_BEHIND
        )
    axes.set_yticks([])
    axes.set_ylim(len(values) - 0.65, -0.75)
    axes.set_xlim(0, 1.2 * max(values.values()))
    axes.set_title(title, fontsize=10, loc="left")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.locator_params(axis="x", nbins=5)


def _figure(height: float, rows: int, ratios: Sequence[float], *, sharex: bool = False) -> tuple[Any, Any]:
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, 1, sharex=sharex, squeeze=False, height_ratios=ratios)[:, 0]
    for axes in grid:
        axes.set_axisbelow(True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, format="png")
    return path

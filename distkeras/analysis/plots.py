"""Pictures of runs: each function writes a PNG file to ``path``, and returns that path.

Histories and commits are Spark or pandas DataFrames by the names that the legend or the panels have; a simulation's
trace may stand for commits. All functions raise ConfigurationError where there is no run or matplotlib is not
installed, EmptyDataError where a run has no row, and MissingColumnError where it lacks a column.

Colors are Okabe and Ito's, which people with any common color blindness can tell apart; lines differ in style as well,
for print in gray.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from typing import Any

import pandas as pd

from distkeras.analysis import metrics
from distkeras.ps.errors import ConfigurationError, MissingColumnError

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
DPI = 120

#: Above this many workers, a panel for each is too small to read, and `staleness` draws a map instead.
PANELS_MAX = 12


#: What the axis of a measure says, with its unit.
_LABELS = {
    "staleness": "staleness (commits by others since the pull)",
    "gap": "gap, RMS over the parameters (units of a parameter)",
    "normalized_gap": "gap over the payload's norm (dimensionless)",
    "scale": "mean scale factor of a payload (dimensionless)",
}


def curves(
    histories: Mapping[str, Any], metric: str, path: str | os.PathLike[str], *, every: float | None = None
) -> str:
    """Draw a metric against time, one line a run.

    Args:
        histories: history by name, such as the rule's.
        metric: column to draw.
        path: file to write.
        every: seconds over which the steps of all workers are averaged; a hundredth of the longest run if None.

    Raises:
        ConfigurationError: ``every`` is not positive.
    """
    _check_not_empty(histories, "histories")
    frames = {name: metrics.per_worker(history) for name, history in histories.items()}
    for name, frame in frames.items():
        if metric not in frame.columns:
            raise MissingColumnError(
                f"The history of {name!r} must have this metric. Received: columns={list(frame.columns)}", column=metric
            )
    if every is None:
        every = max(frame["seconds"].max() for frame in frames.values()) / 100 or 1.0
    figure, ((axes,),) = _figure(8, 5)
    for place, (name, frame) in enumerate(frames.items()):
        line = metrics.averaged(frame.drop(columns="seconds"), every)
        _draw_line(axes, line["seconds"], line[metric], name, place)
    axes.set_xlabel("time since the first step (s)")
    axes.set_ylabel(f"training {metric.replace('_', ' ')} (mean over {every:.2g} s, all workers)")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(title=None, frameon=False)
    return _save(figure, path)


def staleness(commits: Any, path: str | os.PathLike[str]) -> str:
    """Draw how stale each worker's commits were: a panel each, with the mean; a map, where there are many workers."""
    counts = metrics.staleness_histogram(commits)
    shares = counts / counts.sum() * 100
    return _save(
        _staleness_panels(counts, shares) if len(counts.columns) <= PANELS_MAX else _staleness_map(shares), path
    )


def measure(runs: Mapping[str, Any], measure: metrics.Measure, path: str | os.PathLike[str]) -> str:
    """Draw a measure of the commits against their number: a line a run, for the mean over stretches of commits, in a
    band from the tenth to the ninetieth percentile.

    Args:
        runs: commits by name.
        measure: one of `metrics.MEASURES`; see `metrics.values`.
        path: file to write.

    Raises:
        ConfigurationError: another measure, or one that was not measured.
    """
    _check_not_empty(runs, "runs")
    lines = {name: metrics.over_commits(commits, measure) for name, commits in runs.items()}
    figure, ((axes,),) = _figure(8, 5)
    for place, (name, line) in enumerate(lines.items()):
        color = COLORS[place % len(COLORS)]
        axes.fill_between(line["commit"], line["low"], line["high"], color=color, alpha=0.15, linewidth=0)
        _draw_line(axes, line["commit"], line["mean"], name, place)
    axes.set_xlabel("commit (updates of the center)")
    axes.set_ylabel(_LABELS[measure])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(title="mean; band: 10th to 90th percentile", framealpha=0.8, edgecolor="none")
    return _save(figure, path)


def _check_not_empty(runs: Mapping[Any, Any], name: str) -> None:
    if not runs:
        raise ConfigurationError(f"`{name}` must hold at least one run. Received: none")


def _staleness_panels(counts: pd.DataFrame, shares: pd.DataFrame) -> Any:
    columns = min(4, len(counts.columns))
    rows = math.ceil(len(counts.columns) / columns)
    figure, grid = _figure(max(5, 2.6 * columns), 0.8 + 2.5 * rows, rows=rows, columns=columns)
    for worker, axes in itertools.zip_longest(counts.columns, grid.ravel()):
        if worker is None:
            axes.set_visible(False)
            continue
        axes.set_axisbelow(True)
        axes.grid(axis="y", alpha=0.3)
        axes.tick_params(labelbottom=True)
        mean = float((counts.index * counts[worker]).sum() / counts[worker].sum())
        axes.bar(counts.index, shares[worker], width=0.85, color=COLORS[0])
        axes.axvline(mean, color=COLORS[1], linestyle="--", linewidth=1.8)
        axes.set_title(f"worker {worker}\nmean {mean:.2f}, {counts[worker].sum()} commits", fontsize=10)
        axes.set_xlim(-0.6, max(4, len(counts)) - 0.4)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.supxlabel("staleness (commits by others since the worker's pull); dashed: mean", fontsize=10)
    figure.supylabel("share of commits (%)", fontsize=10)
    return figure


def _staleness_map(shares: pd.DataFrame) -> Any:
    figure, ((axes,),) = _figure(8, max(4, 1.5 + 0.18 * len(shares.columns)))
    edges = [-0.5, len(shares) - 0.5, len(shares.columns) - 0.5, -0.5]
    image = axes.imshow(shares.T, aspect="auto", cmap="cividis", interpolation="nearest", extent=edges)
    ticks = range(0, len(shares.columns), max(1, len(shares.columns) // 16))
    axes.set_yticks(list(ticks), [str(shares.columns[tick]) for tick in ticks])
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("staleness (commits by others since the worker's pull)")
    axes.set_ylabel("worker")
    figure.colorbar(image, label="share of the worker's commits (%)")
    return figure


def _draw_line(axes: Any, x: pd.Series, y: pd.Series, name: str, place: int) -> None:
    axes.plot(
        x,
        y,
        label=name,
        color=COLORS[place % len(COLORS)],
        linestyle=DASHES[place % len(DASHES)],
        linewidth=1.8,
        marker="o" if len(x) < 3 else None,
    )


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    # A Figure of its own draws with Agg and leaves pyplot's state, and a notebook's backend, alone.
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(f"Plots need matplotlib: pip install 'distkeras[plots]'. Received: {error}") from error
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)


def _save(figure: Any, path: str | os.PathLike[str]) -> str:
    figure.savefig(path, format="png")
    return os.fspath(path)

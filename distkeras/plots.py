"""Pictures of runs, written as PNG files.

Colors are Okabe and Ito's, which people with any common color blindness can tell apart; lines differ in style as well,
for print in gray.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import pandas as pd

from distkeras import metrics
from distkeras.ps.errors import ConfigurationError, MissingColumnError

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
DPI = 120

#: Above this many workers, a panel for each is too small to read, and `staleness` draws a map instead.
MOST_PANELS = 12


def curves(
    histories: Mapping[str, Any], metric: str, path: str | os.PathLike[str], *, every: float | None = None
) -> str:
    """Draws a metric against time, one line a run.

    Args:
        histories: history (Spark or pandas DataFrame) by the name it has in the legend, such as the rule's.
        metric: column to draw.
        path: PNG file to write.
        every: seconds over which the steps of all workers are averaged; a hundredth of the longest run if None.

    Returns:
        The path.

    Raises:
        ConfigurationError: there is no history, ``every`` is not positive, or matplotlib is not installed.
        EmptyDataError, MissingColumnError: a history has no row, or not this metric.
    """
    if not histories:
        raise ConfigurationError("`histories` must hold at least one run. Received: none")
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
        axes.plot(
            line["seconds"],
            line[metric],
            label=name,
            color=COLORS[place % len(COLORS)],
            linestyle=DASHES[place % len(DASHES)],
            linewidth=1.8,
            marker="o" if len(line) < 3 else None,
        )
    axes.set_xlabel("time since the first step (s)")
    axes.set_ylabel(f"training {metric.replace('_', ' ')} (mean over {every:.2g} s, all workers)")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(title=None, frameon=False)
    return _save(figure, path)


def staleness(commits: Any, path: str | os.PathLike[str]) -> str:
    """Draws how stale each worker's commits were.

    A panel a worker, with a bar for each staleness and a dashed line at the mean; for many workers a map, with a row
    for each.

    Args:
        commits: the run's commits (Spark or pandas DataFrame).
        path: PNG file to write.

    Returns:
        The path.

    Raises:
        ConfigurationError: matplotlib is not installed.
        EmptyDataError, MissingColumnError: there is no commit, or no staleness column.
    """
    counts = metrics.staleness_histogram(commits)
    shares = counts / counts.sum() * 100
    return _save(_panels(counts, shares) if len(counts.columns) <= MOST_PANELS else _map(shares), path)


def _panels(counts: pd.DataFrame, shares: pd.DataFrame) -> Any:
    workers = list(counts.columns)
    wide = min(4, len(workers))
    high = math.ceil(len(workers) / wide)
    figure, grid = _figure(max(5, 2.6 * wide), 0.8 + 2.5 * high, rows=high, columns=wide)
    cells = grid.ravel()
    for worker, axes in zip(workers, cells, strict=False):
        mean = float((counts.index * counts[worker]).sum() / counts[worker].sum())
        axes.bar(counts.index, shares[worker], width=0.85, color=COLORS[0])
        axes.axvline(mean, color=COLORS[1], linestyle="--", linewidth=1.8)
        axes.set_title(f"worker {worker}\nmean {mean:.2f}, {counts[worker].sum()} commits", fontsize=10)
        axes.set_xlim(-0.6, max(4, len(counts)) - 0.4)
        axes.set_axisbelow(True)
        axes.grid(axis="y", alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(labelbottom=True)
    for axes in cells[len(workers) :]:
        axes.set_visible(False)
    figure.supxlabel("staleness (commits by others since the worker's pull); dashed: mean", fontsize=10)
    figure.supylabel("share of commits (%)", fontsize=10)
    return figure


def _map(shares: pd.DataFrame) -> Any:
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

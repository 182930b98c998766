"""Pictures of the report, in one style, with colors that are distinct for people with common color blindness."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from distkeras.analysis.plots import COLORS as COLORS
from distkeras.analysis.plots import DASHES
from reproduction.spreads import Spread

mpl.use("Agg")
#: The README's column is about 830 pixels wide; larger pictures would be scaled down and unreadable.
WIDTH, DPI = 8.3, 110
MARKERS = "osD^vPX*h"
PALETTE = (*COLORS, "#888888", "#7B3F00")  # one for each marker


def panels(columns: int, rows: int = 1, height: float = 3.4, **options: Any) -> tuple[Figure, np.ndarray]:
    """Return a figure and its axes, shape ``(rows, columns)``."""
    figure = Figure(figsize=(WIDTH, height * rows), dpi=DPI, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def style(place: int) -> dict[str, Any]:
    """Return color, dashes and marker of the ``place``-th line."""
    return {
        "color": PALETTE[place % len(PALETTE)],
        "linestyle": DASHES[(place + place // len(PALETTE)) % len(DASHES)],
        "marker": MARKERS[place % len(MARKERS)],
        "markersize": 4.5,
        "linewidth": 1.6,
    }


def spreads(axes: Any, x: Sequence[float], y: Sequence[Spread], place: int, label: str, factor: float = 1.0) -> None:
    """Draw means with bars of one standard deviation."""
    means, sds = [value.mean * factor for value in y], [value.sd * factor for value in y]
    axes.errorbar(x, means, np.nan_to_num(sds), label=label, capsize=2.5, **style(place))


def until_infinite(axes: Any, x: Sequence[float], y: Sequence[Spread], place: int, label: str) -> None:
    """Draw the medians up to the first infinite one; such a line ends with a large cross."""
    medians = [float(np.median(value.values)) for value in y]
    finite = [number for number, value in enumerate(medians) if np.isfinite(value)]
    axes.plot([x[number] for number in finite], [medians[number] for number in finite], label=label, **style(place))
    if finite and len(finite) < len(x):
        look = {**style(place), "marker": "x", "markersize": 11, "markeredgewidth": 2}
        axes.plot(x[finite[-1]], medians[finite[-1]], **look)


def curve(axes: Any, curves: Sequence[Sequence[Sequence[float]]], place: int, label: str) -> None:
    """Draw the mean training accuracy over the seeds in percent, against time in mean step times."""
    time, values = (np.mean([one[part] for one in curves], axis=0) for part in (0, 1))
    axes.plot(time / 128, 100 * values, label=label, **{**style(place), "marker": None})


def logarithmic(axes: Any, places: Iterable[float], which: str = "x") -> None:
    """Make an axis logarithmic, with a mark and a number at each place."""
    getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}ticks")(list(places), [f"{place:g}" for place in places])
    getattr(axes, f"{which}axis").set_minor_locator(NullLocator())


def finish(axes: Any, x: str, y: str, title: str = "", legend: bool = True) -> None:
    """Add labels, grid and legend."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    if legend:
        axes.legend(frameon=False, fontsize=8)


def legend_below(figure: Figure, axes: Any, columns: int) -> None:
    """Add one legend for all panels, with the lines of ``axes``."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, ncols=columns, loc="outside lower center", frameon=False, fontsize=8)


def save(figure: Figure, folder: Path, name: str) -> str:
    """Write the PNG; its bytes depend only on the picture."""
    figure.savefig(folder / name, metadata={"Software": None})
    return name

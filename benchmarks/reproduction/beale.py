"""Beale's function, on which the pictures of the thesis are drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from distkeras.ps import rules
from distkeras.ps.simulation.simulate import simulate
from distkeras.ps.simulation.timing import Gamma
from reproduction import draw
from reproduction.claims import Results

MINIMUM = (3.0, 0.5)
RULES = {"downpour": "DOWNPOUR", "agn": "AGN", "adag": "ADAG"}
#: Clock of the straggler's commit.
LATE = 40
STRAGGLER_START, STRAGGLER_RATE = (1.0, 1.5), 0.002
TRAJECTORY_START, TRAJECTORY_RATE, TRAJECTORY_WORKERS, TRAJECTORY_WINDOW, TRAJECTORY_COMMITS = (
    (-1.0, -1.5),
    0.005,
    10,
    5,
    1500,
)
NOISE = 1.0


def value(x: Any, y: Any) -> Any:
    """Return Beale's function at ``(x, y)``; 0 at `MINIMUM`."""
    return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2


def gradient(theta: np.ndarray) -> np.ndarray:
    """Return the gradient of `value`, shape ``(2,)``."""
    x, y = theta  # These are numpy scalars, which overflow to infinity where floats would raise.
    a, b, c = 1.5 - x + x * y, 2.25 - x + x * y**2, 2.625 - x + x * y**3
    return np.array(
        [
            2 * (a * (y - 1) + b * (y**2 - 1) + c * (y**3 - 1)),
            2 * x * (a + 2 * y * b + 3 * y**2 * c),
        ]
    )


def noisy(deviation: float, seed: int) -> Callable[[np.ndarray, int], np.ndarray]:
    """Return a gradient function with normal noise."""
    rng = np.random.default_rng([seed, 3])
    return lambda theta, worker: gradient(theta) + rng.normal(0, deviation, 2)


def make(rule: str, window: int) -> rules.Rule:
    """Return the rule with windows of ``window``."""
    return rules.make(rule, window=window)


def straggler(rule: str) -> dict[str, Any]:
    """Run workers 1 to 3, which commit in turn, and worker 0, which commits once, late; from three close starts."""
    displacement, ways = [], []
    for shift in (0.0, 0.05, -0.05):
        start = np.array(STRAGGLER_START) + shift
        trace = simulate(
            make(rule, 1),
            start,
            lambda theta, worker: gradient(theta),
            workers=4,
            learning_rate=STRAGGLER_RATE,
            schedule=[1 + number % 3 for number in range(LATE)] + [0] + [1 + number % 3 for number in range(LATE)],
            keep_centers=True,
        )
        assert trace.centers is not None
        way = np.vstack([start, trace.centers])
        displacement.append(float(np.linalg.norm(way[LATE + 1] - way[LATE])))
        ways.append(way.round(5).tolist())
    return {"displacement": displacement, "way": ways[0]}


def _contours(ax: Any, x: tuple[float, float], y: tuple[float, float]) -> None:
    grid = np.meshgrid(np.linspace(*x, 200), np.linspace(*y, 200))
    ax.contour(*grid, np.log10(value(*grid) + 1e-3), levels=18, cmap="Greys", linewidths=0.6)
    ax.plot(*MINIMUM, "*", color=draw.COLORS[4], markersize=12, markeredgecolor="black", zorder=4)
    ax.set_xlim(x)
    ax.set_ylim(y)


def trajectories(folder: Path) -> str:
    """Draw the center's path under each rule with noisy gradients; every commit is of a window of steps."""
    figure, axes = draw.panels(3, 1, 3.1, sharey=True)
    for place, (ax, (rule, title)) in enumerate(zip(axes.flat, RULES.items(), strict=True)):
        with np.errstate(over="ignore", invalid="ignore"):
            trace = simulate(
                make(rule, TRAJECTORY_WINDOW),
                np.array(TRAJECTORY_START),
                noisy(NOISE, 0),
                workers=TRAJECTORY_WORKERS,
                learning_rate=TRAJECTORY_RATE,
                timing=Gamma(),
                steps=TRAJECTORY_COMMITS,
                seed=0,
                keep_centers=True,
            )
        assert trace.centers is not None
        path = np.vstack([TRAJECTORY_START, trace.centers])
        good = np.isfinite(path).all(axis=1) & (np.abs(path) < 50).all(axis=1)
        kept = path[: int(np.argmin(good))] if not good.all() else path
        _contours(ax, (-4.5, 4.5), (-4.5, 4.5))
        ax.plot(*kept.T, color=draw.COLORS[place], linewidth=1.2, zorder=3)
        ax.plot(*TRAJECTORY_START, "s", color="black", markersize=5, zorder=4)
        ends = f"f = {value(*path[-1]):.2g} at the end" if good.all() else f"diverges at commit {len(kept)}"
        draw.finish(ax, "x", "y", f"{title}: {ends}", legend=False)
        ax.label_outer()
    return draw.save(figure, folder, "beale.png")


def stragglers(results: Results, folder: Path) -> str:
    """Draw the center before, at and after the straggler's commit."""
    figure, axes = draw.panels(2, 1, 3.3, sharey=True)
    ways = {rule: np.array(results[f"straggler/{rule}"]["way"]) for rule in ("downpour", "adag")}
    for place, (ax, (rule, path)) in enumerate(zip(axes.flat, ways.items(), strict=True)):
        color = draw.COLORS[2 * place]
        _contours(ax, (0.3, 3.3), (-0.4, 1.8))
        ax.plot(*path[: LATE + 1].T, ".-", color=color, linewidth=1, markersize=3)
        ax.plot(*path[LATE + 1 :].T, ".:", color=color, linewidth=1, markersize=3)
        ax.plot(*path[0], "s", color="black", markersize=6)
        moved = np.linalg.norm(path[LATE + 1] - path[LATE])
        if moved > 0.05:
            ax.annotate("", path[LATE + 1], path[LATE], arrowprops={"arrowstyle": "->", "color": "#D55E00", "lw": 2})
        else:  # An arrow's head would be longer than the path.
            ax.plot(*path[LATE], "x", color="#D55E00", markersize=9, markeredgewidth=2, zorder=4)
        draw.finish(ax, "x", "y", f"{RULES[rule]}: the straggler moves the center by {moved:.3f}", legend=False)
    return draw.save(figure, folder, "straggler.png")

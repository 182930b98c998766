from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.cases import rest_slow

from distkeras.analysis import plots
from distkeras.ps.errors import ConfigurationError, MissingColumnError
from distkeras.ps.simulation.simulate import simulate
from distkeras.ps.simulation.timing import Memoryless
from distkeras.ps.simulation.virtual_job import Trace


def history(speed: float, workers: int = 4, steps: int = 150, seed: int = 0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    parts = []
    for worker in range(workers):
        at = np.cumsum(draw.gamma(10, 0.02 / speed, steps))
        accuracy = np.clip(0.9 - 0.8 * np.exp(-at / 6) + draw.normal(0, 0.04, steps), 0, 1)
        parts.append(
            pd.DataFrame(
                {
                    "worker": worker,
                    "epoch": np.arange(steps) // 50,
                    "iteration": np.arange(steps),
                    "timestamp": pd.Timestamp("2026-01-01") + pd.to_timedelta(at, unit="s"),
                    "loss": 1 - accuracy,
                    "accuracy": accuracy,
                    "samples": 128,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def commits(workers: int, each: int = 120) -> pd.DataFrame:
    draw = np.random.default_rng(1)
    return pd.DataFrame(
        {"worker": np.repeat(np.arange(workers), each), "staleness": draw.poisson(workers - 1, workers * each)}
    )


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(data) > 5000
    return struct.unpack(">II", data[16:24])


def test_curves_are_written_as_a_png(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    runs = {name: history(speed, seed=place) for place, (name, speed) in enumerate({"AGN": 1, "AEASGD": 0.7}.items())}
    assert plots.curves(runs, "accuracy", path) == str(path)
    assert png_size(path) == (8 * plots.DPI, 5 * plots.DPI)
    plots.curves({"single step": runs["AGN"][:1]}, "loss", path, every=0.5)
    assert png_size(path) == (8 * plots.DPI, 5 * plots.DPI)


def test_curves_refuse_invalid_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="histories"):
        plots.curves({}, "accuracy", tmp_path / "none.png")
    with pytest.raises(MissingColumnError, match="AGN") as caught:
        plots.curves({"AGN": history(1, steps=3)}, "recall", tmp_path / "none.png")
    assert caught.value.column == "recall"
    with pytest.raises(ConfigurationError, match="every"):
        plots.curves({"AGN": history(1, steps=3)}, "loss", tmp_path / "none.png", every=-1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("workers", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 7)), 20])
def test_the_histogram_of_staleness_is_written_as_a_png(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "staleness.png"
    plots.staleness(commits(workers), path)
    width, height = png_size(path)
    assert 400 <= width <= 1600
    assert 300 <= height <= 1600


def trace(rule: str, steps: int = 200, measure_gap: bool = True) -> Trace:
    return simulate(
        rule,
        np.ones(30),
        lambda theta, worker: theta,
        workers=4,
        learning_rate=0.05,
        timing=Memoryless(),
        steps=steps,
        measure_gap=measure_gap,
    )


@pytest.mark.parametrize("measure", rest_slow(["staleness", "gap", "normalized_gap", "scale"], "staleness", "gap"))
def test_a_measure_is_written_as_a_png(tmp_path: Path, measure: Any) -> None:
    path = tmp_path / "measure.png"
    runs = {name: trace(name) for name in ("asgd", "dana_zero", "adag")}
    assert plots.measure(runs, measure, path) == str(path)
    assert png_size(path) == (8 * plots.DPI, 5 * plots.DPI)


def test_a_measure_accepts_a_job_and_a_short_run(tmp_path: Path) -> None:
    log = commits(2).rename_axis("clock").reset_index()
    plots.measure({"job": log, "one commit": trace("asgd", steps=1)}, "staleness", tmp_path / "measure.png")
    png_size(tmp_path / "measure.png")


def test_a_measure_refuses_invalid_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="`runs`"):
        plots.measure({}, "gap", tmp_path / "none.png")
    with pytest.raises(ConfigurationError, match="measure_gap=True"):
        plots.measure({"asgd": trace("asgd", measure_gap=False)}, "gap", tmp_path / "none.png")
    assert not list(tmp_path.iterdir())


def test_plots_do_not_import_pyplot(tmp_path: Path) -> None:
    # pyplot would choose a backend for the whole process and keep figures alive.
    loaded = "matplotlib.pyplot" in sys.modules
    plots.staleness(commits(2), tmp_path / "staleness.png")
    assert ("matplotlib.pyplot" in sys.modules) == loaded

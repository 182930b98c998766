from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from distkeras import plots
from distkeras.ps.errors import ConfigurationError, MissingColumnError


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


def test_curves(tmp_path):
    path = tmp_path / "curves.png"
    runs = {name: history(speed, seed=place) for place, (name, speed) in enumerate({"AGN": 1, "AEASGD": 0.7}.items())}
    assert plots.curves(runs, "accuracy", path) == str(path)
    assert png_size(path) == (8 * plots.DPI, 5 * plots.DPI)
    plots.curves({"single step": runs["AGN"][:1]}, "loss", path, every=0.5)
    assert png_size(path) == (8 * plots.DPI, 5 * plots.DPI)


def test_curves_refuse_what_they_cannot_draw(tmp_path):
    with pytest.raises(ConfigurationError, match="histories"):
        plots.curves({}, "accuracy", tmp_path / "none.png")
    with pytest.raises(MissingColumnError, match="AGN") as caught:
        plots.curves({"AGN": history(1, steps=3)}, "recall", tmp_path / "none.png")
    assert caught.value.column == "recall"
    with pytest.raises(ConfigurationError, match="every"):
        plots.curves({"AGN": history(1, steps=3)}, "loss", tmp_path / "none.png", every=-1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("workers", [1, 4, 7, 20])
def test_staleness(tmp_path, workers):
    path = tmp_path / "staleness.png"
    plots.staleness(commits(workers), path)
    width, height = png_size(path)
    assert 400 <= width <= 1600
    assert 300 <= height <= 1600


def test_pyplot_stays_out(tmp_path):
    # pyplot would choose a backend for the whole process and keep figures alive.
    loaded = "matplotlib.pyplot" in sys.modules
    plots.staleness(commits(2), tmp_path / "staleness.png")
    assert ("matplotlib.pyplot" in sys.modules) == loaded

"""Tests of the figures of the page "Tuning": how they are chosen from the runs, and that all runs are kept."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from tuning import cases, command
from tuning.cases import SEEDS, Case

KEPT = Path(__file__).parents[2] / "docs" / "tuning"


def test_the_best_rate_has_the_shortest_mean_time() -> None:
    times = {0.05: (300.0, 100.0, 200.0), 0.1: (100.0, 110.0, 120.0), 0.2: (50.0, 50.0, math.inf)}
    results = {
        Case(4, 10, rate, seed=seed).name: {"time": time}
        for rate, row in times.items()
        for seed, time in zip(SEEDS, row, strict=True)
    }
    assert cases.best_time(results, 4, 10, 0.0, 0.0) == (110.0, 0.1)


def test_the_runs_of_the_figures_are_kept() -> None:
    results = json.loads((KEPT / "results.json").read_text())
    assert set(results) == {case.name for case in [*cases.of_workers(), *cases.of_windows()]}


def test_the_figures_can_be_drawn_from_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(KEPT / "results.json", tmp_path)
    assert command.main(["--redraw", "--out", str(tmp_path)]) == 0
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {path.name for path in KEPT.glob("*.png")} == set(capsys.readouterr().out.split())

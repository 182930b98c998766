from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from quickstart.results import problems, steady_rate, table
from quickstart.runs import QUICK, RUNS
from support.patience import patience

from distkeras.ps import rules

SCRIPT = Path(__file__).parents[2] / "scripts" / "quickstart"


def history(*steps: tuple[int, float, int]) -> pd.DataFrame:
    """Return a history from steps of (worker, second, samples)."""
    frame = pd.DataFrame(steps, columns=["worker", "timestamp", "samples"])
    frame["timestamp"] = pd.to_datetime(frame["timestamp"], unit="s")
    return frame.assign(iteration=frame.groupby("worker").cumcount(), loss=0.5)


def row(rule: str = "AGN", **changes: Any) -> dict[str, Any]:
    return {
        "rule": rule,
        "hyper_parameters": {"learning_rate": 0.1, "window": 4},
        "samples_per_second": 12345.6,
        "ratio_to_keras": 1.25,
        "test_accuracy": 0.8612,
        "mean_staleness": 0.98,
        "final_loss": 0.4,
        **changes,
    }


def test_the_rate_is_measured_after_every_workers_first_step() -> None:
    steps = history((0, 1.0, 10), (0, 2.0, 10), (1, 3.0, 10), (0, 4.0, 10), (1, 5.0, 7))
    assert steady_rate(steps) == pytest.approx((10 + 7) / 2)


def test_a_run_without_a_second_step_has_no_rate() -> None:
    assert math.isnan(steady_rate(history((0, 1.0, 10), (1, 2.0, 10))))


def test_the_table_is_aligned_and_complete() -> None:
    lines = table([row("plain Keras", mean_staleness=None), row()]).splitlines()
    assert [lines[0].split()[0], set(lines[1])] == ["rule", {"-"}]
    assert lines[2].endswith(" -")
    assert lines[3].split() == ["AGN", "learning_rate=0.1,", "window=4", "12,346", "1.25", "86.12%", "0.98"]
    assert lines[2].index("12,346") == lines[3].index("12,346")


def test_errors_in_results_are_reported() -> None:
    baseline = row("plain Keras", test_accuracy=0.88)
    assert problems([baseline, row(test_accuracy=0.8501)]) == []
    (problem,) = problems([baseline, row(test_accuracy=0.84)])
    assert problem.startswith("AGN must end within 3 points of plain Keras. Received: 84.00%")
    assert problems([baseline, row(test_accuracy=0.1)], tolerance=None) == []
    (problem,) = problems([baseline, row(final_loss=math.nan)], tolerance=None)
    assert "AGN diverged" in problem


def test_every_rule_of_the_table_can_be_created() -> None:
    assert RUNS[0].rule is None, "the first run is the baseline"
    for run in RUNS[1:]:
        assert run.rule is not None
        assert rules.make(run.rule, **run.options).name == run.rule


@pytest.mark.slow  # The notebook's test and that of spark-submit cover the same path.
@pytest.mark.timeout(600)
def test_the_quick_mode_trains_and_prints_its_table(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick", "--out", out],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patience(540),
    )
    assert done.returncode == 0, done.stderr + (out / "log.txt").read_text()[-5000:]
    assert not done.stderr, "libraries write to log.txt"
    summary = json.loads((out / "summary.json").read_text())
    assert table(summary["rows"]) in done.stdout
    assert summary["machine"]["cores"] >= 1
    assert [line["rule"] for line in summary["rows"]] == [run.title for run in RUNS]
    for line, run in zip(summary["rows"], RUNS, strict=True):
        assert line["samples"] == QUICK.rows * QUICK.epochs
        assert line["test_accuracy"] > 0.5
        name = run.rule or "keras"
        assert (out / "models" / f"{name}.keras").stat().st_size
        assert pd.read_parquet(out / "histories" / f"{name}.parquet")["samples"].sum() == line["samples"]
        if run.rule:
            staleness = pd.read_parquet(out / "commits" / f"{name}.parquet")["staleness"]
            assert staleness.mean() == pytest.approx(line["mean_staleness"])
            assert (out / "plots" / f"staleness-{name}.png").stat().st_size
    assert {"accuracy.png", "loss.png"} <= {path.name for path in (out / "plots").iterdir()}

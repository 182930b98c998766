from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from quickstart import stage
from quickstart.acts import killed_worker, many_groups, scoring, two_workers
from quickstart.comparison.runs import QUICK, RUNS, problems, steady_rate, table
from quickstart.page import write_page
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


# ---- the tour


def ledger(*ranges: tuple[int, int, int, int]) -> pd.DataFrame:
    """Return a ledger from ranges of (worker, epoch, first batch, last batch)."""
    return pd.DataFrame(ranges, columns=["worker", "epoch", "first_batch", "last_batch"]).assign(applied=True)


EXACT = ((0, 0, 0, 1), (0, 0, 2, 2), (1, 0, 0, 2), (0, 1, 0, 2), (1, 1, 0, 1), (1, 1, 2, 2))


def test_a_ledger_with_each_mini_batch_once_is_exact() -> None:
    found = killed_worker.count(ledger(*EXACT), samples=180, rows=90, epochs=2)
    assert (found.counted, found.twice, found.missing, found.exact) == (12, 0, 0, True)


@pytest.mark.parametrize(
    ("ranges", "samples", "twice", "missing"),
    [
        ((*EXACT, (1, 1, 2, 2)), 180, 1, 0),
        (EXACT[1:], 180, 0, 2),
        (EXACT[:-1], 180, 0, 1),
        (EXACT[:4], 180, 0, 3),
        (EXACT, 160, 0, 0),
    ],
    ids=["counted twice", "the first is missing", "the last is missing", "an epoch is missing", "rows are missing"],
)
def test_a_ledger_with_an_error_is_not_exact(ranges: Any, samples: int, twice: int, missing: int) -> None:
    found = killed_worker.count(ledger(*ranges), samples, rows=90, epochs=2)
    assert (found.twice, found.missing, found.exact) == (twice, missing, False)


def test_the_attempt_after_the_kill_is_found() -> None:
    commits = pd.DataFrame({"worker": [0, 1, 0, 1], "attempt": [3, 4, 5, 4], "at": [1.0, 1.5, 9.0, 9.5]})
    assert killed_worker.resumed_after(commits, killed=2.0) == 7.0
    assert killed_worker.resumed_after(commits[:2], killed=2.0) is None


def test_the_rate_of_two_workers_leaves_out_the_first_epoch() -> None:
    steps = [(0, 0, 1.0), (0, 1, 2.0), (1, 0, 3.0), (0, 1, 4.0), (1, 1, 5.0), (0, 1, 6.0), (1, 1, 7.0)]
    frame = pd.DataFrame(steps, columns=["worker", "epoch", "at"]).assign(samples=10)
    assert stage.steady_rate(frame) == pytest.approx(30 / 3), "from 3 to 6 s"
    apart = pd.DataFrame([(0, 0, 1.0), (0, 1, 2.0), (1, 0, 3.0), (1, 1, 5.0)], columns=["worker", "epoch", "at"])
    assert stage.steady_rate(apart.assign(samples=10)) == pytest.approx(30 / 4), "they did not train together"


def test_a_broken_promise_of_an_act_is_reported() -> None:
    assert two_workers.accuracy_problems(0.85, 0.87, 0.03) == []
    (problem,) = two_workers.accuracy_problems(0.83, 0.87, 0.03)
    assert problem.endswith("Received: 83.0%, which is 4.0 points below")
    assert many_groups.problems(200, 200) == []
    assert many_groups.problems(199, 200) == ["each of 200 groups must have a model. Received: 199"]
    assert scoring.problems(1e-6) == []
    assert "Received: a difference of inf" in scoring.problems(math.inf)[0]


def test_predictions_are_compared_in_any_order() -> None:
    expected = np.array([[0.1, 0.9], [0.6, 0.4]])
    twice = np.concatenate([expected[::-1], expected])
    assert scoring.difference(twice, expected, 2) == 0
    assert scoring.difference(twice[1:], expected, 2) == math.inf
    assert scoring.difference(twice + np.array([0.0, 0.25]), expected, 2) == pytest.approx(0.25)


def test_the_page_needs_no_other_file(tmp_path: Path) -> None:
    picture, dashboard = tmp_path / "act.png", tmp_path / "dashboard.html"
    picture.write_bytes(b"a picture")
    dashboard.write_text('<script>"</script>')
    act = stage.ActResult("A <title>", "a & line", picture, "an alt", ["a note"], "page.md", {}, ["a problem"])
    machine = {"cores": 2, "platform": "Linux", "python": "3.11", "keras": "3", "tensorflow": None, "pyspark": "4"}
    write_page(tmp_path / "page.html", [act], dashboard, machine, 100.0)
    page = (tmp_path / "page.html").read_text()
    assert "A &lt;title&gt;" in page
    assert "Not as promised: a problem." in page
    assert "data:image/png;base64,YSBwaWN0dXJl" in page
    assert 'srcdoc="&lt;script&gt;&quot;&lt;/script&gt;"' in page


def output_of(folder: Path, *arguments: str) -> str:
    """Run the program in ``folder``, writing to its folder ``out``; return its output."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick", "--out", "out", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=patience(540),
    )
    assert done.returncode == 0, done.stderr + (folder / "out" / "log.txt").read_text()[-5000:]
    assert not done.stderr, "libraries write to log.txt"
    return done.stdout


@pytest.mark.slow  # Other tests cover each of these paths with less work.
@pytest.mark.timeout(600)
def test_the_tour_prints_five_lines_and_writes_its_page(tmp_path: Path) -> None:
    output = output_of(tmp_path)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    lines = [f"{number}. {act['title']}: {act['line']}." for number, act in enumerate(summary["acts"], 1)]
    assert len(lines) == 5
    assert [line for line in output.splitlines() if line[0].isdigit()] == lines
    assert summary["acts"][1]["figures"]["rows"] == stage.QUICK.killed_rows * stage.QUICK.killed_epochs
    page = (tmp_path / "out" / "quickstart.html").read_text()
    assert page.count("data:image/png;base64,") == 5
    assert "act_2_killed_worker" in page, "the dashboard shows the jobs"


@pytest.mark.slow  # The notebook's test and that of spark-submit cover the same path.
@pytest.mark.timeout(600)
def test_the_comparison_trains_and_prints_its_table(tmp_path: Path) -> None:
    out, output = tmp_path / "out", output_of(tmp_path, "--rules")
    summary = json.loads((out / "summary.json").read_text())
    assert table(summary["rows"]) in output
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

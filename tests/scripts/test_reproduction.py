from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from reproduction import command, draw, network, running, throughput
from reproduction.claims import Check, Count
from reproduction.report import count
from reproduction.runs import Run, climb, history, reached, simulated
from reproduction.spreads import Spread, every
from support.patience import patience

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "reproduction"


def batch(rows: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.random((rows, 784)), rng.integers(0, 10, rows)


def test_the_gradient_is_that_of_the_loss() -> None:
    theta = network.initial(0).astype(np.float64)
    x, y = batch()
    gradient, loss, accuracy = network.gradient(theta, x, y)
    hidden, logits = network.forward(theta, x)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert loss == pytest.approx(-np.log(probabilities[np.arange(5), y]).mean(), rel=1e-12)
    assert accuracy == np.mean(probabilities.argmax(axis=1) == y)
    assert (hidden > 0).any()
    assert (hidden == 0).any(), "both sides of the kink"
    ends = np.cumsum([0, 784 * 32, 32, 320, 10])
    rng = np.random.default_rng(4)
    for start, stop in pairwise(ends):  # These are some of the weights and biases of every layer.
        for place in rng.integers(start, stop, 12):
            step = np.zeros_like(theta)
            step[place] = 1e-6
            slope = (network.gradient(theta + step, x, y)[1] - network.gradient(theta - step, x, y)[1]) / 2e-6
            assert gradient[place] == pytest.approx(slope, rel=1e-5, abs=1e-9)


def test_single_precision_gives_the_same_gradient() -> None:
    theta, (x, y) = network.initial(0), batch(32)
    single, *_ = network.gradient(theta, x.astype(np.float32), y)
    double, *_ = network.gradient(theta.astype(np.float64), x, y)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, double, atol=2e-6)


def test_batches_depend_only_on_the_seed_and_the_worker() -> None:
    theta = network.initial(0)
    first, second, other = network.Batches(1), network.Batches(1), network.Batches(2)
    one, two = first(theta, 0), first(theta, 1)
    assert not np.array_equal(one, two)
    np.testing.assert_array_equal(second(theta, 1), two)
    np.testing.assert_array_equal(second(theta, 0), one)
    assert not np.array_equal(other(theta, 0), one)


def test_a_repeated_mini_batch_replaces_its_figures() -> None:
    theta, other = network.initial(0), network.initial(1)
    plain, again = network.Batches(1), network.Batches(1)
    for number in range(3):
        np.testing.assert_array_equal(again.numbered(theta, 0, number), plain(theta, 0))
    assert again.loss == plain.loss
    assert not np.array_equal(again.numbered(other, 0, 1), again.numbered(theta, 0, 1)), (
        "the same rows at another place"
    )
    again.numbered(other, 0, 1)
    assert again.worker == [0, 0, 0]
    assert (again.loss[0], again.loss[2]) == (plain.loss[0], plain.loss[2])
    assert again.loss[1] != plain.loss[1]


def test_a_refused_window_counts_once_in_the_history() -> None:
    run = Run("ringmaster", 8, 0.05, 160, "one slow worker", (("window", 1),))
    trace, batches = simulated(run, 0)
    assert len(trace.refused) > 0
    assert set(trace.refused[:, 0]) == {0}, "only the slow worker is late"
    steps = history(trace, batches)
    assert len(steps) == 160
    assert np.isfinite(steps["loss"]).all()
    own = steps[steps["worker"] == 0]
    np.testing.assert_allclose(own["seconds"], trace.time[trace.worker == 0])


@pytest.mark.slow
def test_windows_that_follow_the_speeds_cover_the_run() -> None:
    run = Run("downpour", 8, 0.01, 800, "one slow worker", (("window", "by_speed"), ("window_max", 8)))
    trace, batches = simulated(run, 0)
    assert len(trace.worker) == run.commits == 100
    first, *later = trace.steps[trace.worker == 0]
    assert first == 8, "the worker's speed is not known yet"
    assert set(later) == {1, 2}, "a quarter of 8, or slightly less if another worker was fast by chance"
    assert len(history(trace, batches)) == trace.steps.sum()


def test_the_search_for_a_rate_moves_to_the_better_neighbor() -> None:
    tried = []

    def score(rate: float) -> float:
        tried.append(rate)
        return {8.0: 0.0, 4.0: 0.0, 2.0: 0.3, 1.0: 0.5, 0.5: 0.5, 0.25: 0.2, 0.125: 0.9}[rate]

    assert climb(score, (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125), 8.0) == 0.5, "the lower of two equal rates"
    assert tried == [8.0, 4.0, 2.0, 1.0, 0.5, 0.25], "each rate is measured once, and none beyond a worse neighbor"


def test_a_diverged_model_has_the_accuracy_of_guessing() -> None:
    assert network.evaluate(np.full(network.SIZE, np.nan, np.float32)) == (np.inf, 0.1)


def test_the_steps_of_a_window_share_its_time_equally() -> None:
    run = Run("agn", 2, 0.05, 40, options=(("window", 5),))
    trace, batches = simulated(run, 0)
    steps = history(trace, batches)
    assert len(steps) == trace.steps.sum() == 40
    for worker in range(2):
        own = steps[steps["worker"] == worker]
        ends = own["seconds"].to_numpy()[4::5]
        np.testing.assert_allclose(ends, trace.time[trace.worker == worker])
        losses = [loss for loss, who in zip(batches.loss, batches.worker, strict=True) if who == worker]
        np.testing.assert_array_equal(own["loss"], losses[: len(own)])
        np.testing.assert_allclose(np.diff(own["seconds"])[:4], ends[0] / 5)


def test_a_spread_is_a_mean_and_a_sample_deviation() -> None:
    assert Spread.of([0.80, 0.81, 0.82]).percent == "81.0 ± 1.0"
    assert Spread.of([1.0, np.inf]).show() == "not finite"


def test_an_interval_decides_a_comparison_or_leaves_it_open() -> None:
    """Four values with mean 1 and standard deviation 0.2; Student's quantile for 3 degrees of freedom is 3.182."""
    spread = Spread.of(1 + 0.2 * np.sqrt(0.75) * np.array([-1, -1, 1, 1]))
    assert spread.sd == pytest.approx(0.2)
    assert spread.error == pytest.approx(3.182 * 0.2 / 2)
    edges = (spread.mean - spread.error, spread.mean + spread.error)
    assert [spread.above(edge + shift) for edge in edges for shift in (-0.01, 0.01)] == [True, None, None, False]
    assert [spread.below(edge + shift) for edge in edges for shift in (-0.01, 0.01)] == [False, None, None, True]
    assert Spread.of([10.0, 10.0, 10.0]).above(10.0) is None, "equal values are not above"
    assert Spread.of([1.0, np.inf]).above(0) is None
    assert Spread.of([3.0]).above(0) is None, "a single value has no spread"
    assert every([True, None]) is None
    assert every([None, False]) is False
    assert every([True, True]) is True


def test_differences_are_taken_seed_by_seed() -> None:
    lead = Spread.of([0.81, 0.71, 0.61]) - Spread.of([0.80, 0.70, 0.60])
    assert lead.above(0) is True
    assert lead.interval(1) == "+1.0 [+1.0, +1.0]"


def test_the_time_to_an_accuracy_lies_between_the_points_of_a_curve() -> None:
    curve = [[10.0, 20.0, 30.0], [0.5, 0.7, 0.8]]
    assert reached(curve, 0.75) == pytest.approx(25.0)
    assert reached(curve, 0.4) == 10.0
    assert reached(curve, 0.9) == np.inf


def test_a_curve_that_ends_early_is_marked_with_a_cross() -> None:
    _, axes = draw.panels(1)
    values = [Spread.of([1.0, 2.0, 3.0]), Spread.of([1.0, 2.0, np.inf]), Spread.of([1.0, np.inf, np.inf])]
    draw.until_infinite(axes[0, 0], (8, 16, 32), values, 0, "a rule")
    line, cross = axes[0, 0].get_lines()
    np.testing.assert_array_equal(line.get_xdata(), [8, 16])
    assert cross.get_marker() == "x"
    np.testing.assert_array_equal(cross.get_xydata(), [[16, 2]])


@pytest.mark.slow
def test_an_interrupted_reproduction_continues(tmp_path: Path) -> None:
    path = tmp_path / "unfinished"
    first, second = (partial(throughput.throughput, rule, "homogeneous", 2, 5, 1) for rule in ("asgd", "ssgd"))
    (done,) = running.run_all({"one": first}, 1, path).values()
    with path.open("a") as file:
        file.write('["cut off he')
    marked = path.read_text().replace(json.dumps(done[0]), '"kept"')
    path.write_text(marked)
    results = running.run_all({"one": first, "two": second, "again": second}, 1, path)
    assert results["one"][0] == "kept", "a finished run is not repeated"
    assert results["two"][0] == second()
    assert len(running.kept(path)) == 2


def test_verdicts_are_counted() -> None:
    checks = [Check("", "", "", holds) for holds in (True, False, None, True)]
    assert count(checks) == Count(2, 4, 1)
    assert str(count(checks) + Count(1, 1)) == "3 of 5, 1 undecided"
    assert str(Count(3, 3)) == "3 of 3"


@pytest.mark.slow
def test_a_claim_is_run_and_reported(tmp_path: Path) -> None:
    options = ["--scale", "tiny", "--only", "throughput", "--out", str(tmp_path)]
    command_line = [sys.executable, str(SCRIPT), *options, "--processes", "1"]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=patience(240))
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("*.unfinished"))
    text, results = (tmp_path / "README.md").read_text(), json.loads((tmp_path / "results.json").read_text())
    assert "--scale tiny --only throughput" in text
    (picture,) = re.findall(r"\]\(([\w-]+\.png)\)", text)
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")

    ours, others = (np.array(results["throughput"]["heterogeneous/64"][rule]) for rule in ("asgd", "ssgd"))
    assert f" | {(ours / others).mean():.2f} ± {(ours / others).std(ddof=1):.2f} |\n" in text, "the row ends with it"

    # The text is generated from the file, so a changed figure changes the text and the verdict.
    criterion = r"^\| \d \| revised \| K = 16, homogeneous: OrMo's .* \| (.*) \| (.*) \|$"
    for rule, time in (("ormo", 10.0), ("ssgdm", 20.0)):
        results["throughput"][rule]["homogeneous"] = [time + seed for seed in range(3)]
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert command.main([*options, "--redraw"]) == 0
    assert re.findall(criterion, (tmp_path / "README.md").read_text(), re.M) == [
        ("+10.0 [+10.0, +10.0] mean step times earlier", "yes")
    ]


@pytest.mark.slow
def test_the_report_in_the_docs_follows_from_its_figures(tmp_path: Path) -> None:
    committed = SCRIPT.parents[1] / "docs" / "reproduction"
    for path in committed.glob("*.json"):
        shutil.copy(path, tmp_path)
    assert command.main(["--redraw", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "README.md").read_text() == (committed / "README.md").read_text()
    assert {path.name for path in tmp_path.glob("*.png")} == {path.name for path in committed.glob("*.png")}

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from reproduction import beale, command, network
from reproduction.claims import Spread
from reproduction.runs import Run, history, simulated
from support.patience import patience

SCRIPT = Path(__file__).parents[2] / "scripts" / "reproduction"


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
    for start, stop in pairwise(ends):  # some of every layer's weights and biases
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


def test_batches_depend_on_the_seed_and_the_worker_alone() -> None:
    theta = network.initial(0)
    first, second, other = network.Batches(1), network.Batches(1), network.Batches(2)
    one, two = first(theta, 0), first(theta, 1)
    assert not np.array_equal(one, two)
    np.testing.assert_array_equal(second(theta, 1), two)
    np.testing.assert_array_equal(second(theta, 0), one)
    assert not np.array_equal(other(theta, 0), one)


def test_a_model_that_blew_up_guesses() -> None:
    assert network.evaluate(np.full(network.SIZE, np.nan, np.float32)) == (np.inf, 0.1)


def test_beale() -> None:
    assert beale.value(*beale.MINIMUM) == 0
    np.testing.assert_array_equal(beale.gradient(np.array(beale.MINIMUM)), 0)
    point, step = np.array([0.7, -1.3]), 1e-6
    slopes = [(beale.value(*(point + d)) - beale.value(*(point - d))) / (2 * step) for d in step * np.eye(2)]
    np.testing.assert_allclose(beale.gradient(point), slopes, rtol=1e-7)


def test_steps_of_a_window_share_its_time() -> None:
    run = Run("agn", 2, 0.05, 40, options=(("window", 5),))
    trace, batches = simulated(run, 0)
    steps = history(trace, batches)
    assert len(steps) == trace.steps.sum() == 40
    for worker in range(2):
        own = steps[steps["worker"] == worker]
        ends = own["seconds"].to_numpy()[4::5]
        np.testing.assert_allclose(ends, trace.time[trace.worker == worker])
        asked = [loss for loss, who in zip(batches.loss, batches.worker, strict=True) if who == worker]
        np.testing.assert_array_equal(own["loss"], asked[: len(own)])
        np.testing.assert_allclose(np.diff(own["seconds"])[:4], ends[0] / 5)


def test_a_spread_is_a_mean_and_a_sample_deviation() -> None:
    assert Spread.of([0.80, 0.81, 0.82]).percent == "81.0 ± 1.0"
    assert Spread.of([1.0, np.inf]).show() == "not finite"


def test_a_claim_from_end_to_end(tmp_path: Path) -> None:
    options = ["--tiny", "--only", "staleness", "--out", str(tmp_path)]
    command_line = [sys.executable, str(SCRIPT), *options, "--processes", "1"]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=patience(240))
    assert done.returncode == 0, done.stderr
    text, results = (tmp_path / "README.md").read_text(), json.loads((tmp_path / "results.json").read_text())
    assert "--tiny --only staleness" in text
    pictures = re.findall(r"\]\(([\w-]+\.png)\)", text)
    assert len(pictures) == 2
    for picture in pictures:
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")

    mean = np.mean([results["staleness"][f"memoryless/20/{seed}"]["mean"] for seed in (1, 2, 3)])
    sd = np.mean([results["staleness"][f"memoryless/20/{seed}"]["sd"] for seed in (1, 2, 3)])
    assert f" | {mean:.2f} ± {sd:.2f} |\n" in text, "the table's row for 20 workers ends with it"

    # The text is made of the file: another figure there is another figure, and another verdict, here.
    for seed in (1, 2, 3):
        results["staleness"][f"memoryless/20/{seed}"].update(mean=12.34, off=1)
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert command.main([*options, "--redraw"]) == 0
    again = (tmp_path / "README.md").read_text()
    assert f"12.34 ± {sd:.2f} |\n" in again
    assert "largest difference: 0 | yes" in text
    assert "largest difference: 1 | **no**" in again


def test_an_unknown_claim_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        command.main(["--only", "p=np"])
    assert stopped.value.code == 2
    assert "staleness" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

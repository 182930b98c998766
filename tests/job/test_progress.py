"""The bar: what it shows, and when it is silent."""

from __future__ import annotations

import math

import pytest

from distkeras.job.progress import Progress
from distkeras.ps.protocol.messages import Status


def status(batches: int, samples: int = 640, loss: float = 0.1234, staleness: float = 1.26) -> Status:
    return Status(clock=batches, joined=2, finished=0, batches=batches, samples=samples, loss=loss, staleness=staleness)


def test_it_shows_batches_rate_loss_and_staleness(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(True) as progress:
        progress.update(status(20))
        progress.update(status(50))
    shown = capsys.readouterr().err
    assert "50batch" in shown.replace(" ", "")
    assert "loss 0.1234" in shown
    assert "staleness 1.3" in shown
    assert "samples/s" in shown


def test_before_the_first_commit(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(True) as progress:
        progress.update(status(0, 0, math.nan, math.nan))
    assert "loss nan" in capsys.readouterr().err


@pytest.mark.parametrize("shown", [False, None])
def test_silent_where_nobody_watches(capsys: pytest.CaptureFixture[str], shown: bool | None) -> None:
    """Under pytest, standard error is no terminal."""
    with Progress(shown) as progress:
        progress.update(status(20))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_terminal_is_watched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Progress() as progress:
        progress.update(status(20))
    assert "training" in capsys.readouterr().err


def test_nothing_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(True) as progress:
        progress.update(status(20))
    assert capsys.readouterr().out == ""

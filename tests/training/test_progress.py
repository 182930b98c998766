"""The progress bar and the lines of the log: what they show, and when nothing is shown."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap

import nbformat
import pytest
from nbclient import NotebookClient
from support.logs import texts
from support.patience import patience

from distkeras.ps.protocol.driver_messages import Status
from distkeras.training.progress import Progress

BEGIN = Status(0, 0, 0, 0, 0, math.nan, math.nan)


def status(epochs: float, samples: int, joined: int = 2, finished: int = 0) -> Status:
    return Status(samples // 32, joined, finished, samples // 32, samples, 0.1234, 1.26, epochs)


class Clock:
    """A manual clock."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def bar_text(captured: pytest.CaptureFixture[str]) -> str:
    return captured.readouterr().err.split("\r")[-1]


class TestBar:
    def test_the_bar_appears_at_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        with Progress(2, 2, True):
            assert re.search(r"training: +0%\|.*waiting for workers", capsys.readouterr().err)

    def test_the_bar_shows_how_many_workers_have_joined(self, capsys: pytest.CaptureFixture[str]) -> None:
        with Progress(2, 3, True) as progress:
            progress.update(BEGIN)
            assert "0 of 3 workers are there" in bar_text(capsys)

    def test_the_bar_shows_a_total_a_percentage_and_the_time_left(
        self, capsys: pytest.CaptureFixture[str], clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("LINES", "50")
        with Progress(4, 2, True, clock=clock) as progress:
            progress.update(status(0.5, 64))
            clock.now += 20.0
            progress.update(status(1.5, 3264))
            text = bar_text(capsys)
        assert re.search(r"training: +38%\|", text)
        assert "epoch 1.50 of 4, 160 samples/s, loss 0.1234, staleness 1.3, 2 workers, 0:00:50 left" in text

    def test_the_bar_shows_no_time_left_if_the_progress_is_unknown(self, capsys: pytest.CaptureFixture[str]) -> None:
        with Progress(1, 2, True) as progress:
            progress.update(status(0.0, 64))
            progress.update(status(0.0, 128))
        assert " left" not in capsys.readouterr().err

    @pytest.mark.parametrize("shown", [False, None])
    def test_there_is_no_bar_without_a_terminal(self, capsys: pytest.CaptureFixture[str], shown: bool | None) -> None:
        """Under pytest, standard error is not a terminal."""
        with Progress(1, 2, shown) as progress:
            progress.update(status(0.5, 64))
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", "")

    def test_nothing_goes_to_standard_output(self, capsys: pytest.CaptureFixture[str]) -> None:
        with Progress(1, 2, True) as progress:
            progress.update(status(0.5, 64))
        assert capsys.readouterr().out == ""


def on_a_terminal(program: str) -> str:
    """Return what ``program`` writes to its standard error, which is a terminal."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], stderr=its, timeout=patience(60), check=True
    )
    os.close(its)
    assert done.returncode == 0
    written = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # everything was read, and the writer has ended
            break
        if not part:
            break
        written += part
    os.close(ours)
    return written.decode()


def test_the_bar_is_below_sparks_own_bar() -> None:
    """The bar is drawn one line below, and the cursor returns to Spark's line; without Spark's bar it is not."""
    program = """
        from distkeras.training.progress import Progress
        with Progress(1, 2, below={below}):
            pass
    """
    with_sparks, alone = (on_a_terminal(program.format(below=below)) for below in (True, False))
    assert re.search(r"\n[^\n]*training:[^\n]*\x1b\[A", with_sparks)
    assert "training:" in alone
    assert "\x1b[A" not in alone


IN_A_NOTEBOOK = """
import math
from distkeras.ps.protocol.driver_messages import Status
from distkeras.training.progress import Progress

with Progress(4, 2, below=True) as progress:
    for step in range(1, 41):
        progress.update(Status(step, 2, 0, step, step * 32, 0.1234, 1.26, step / 10))
"""


def test_a_job_leaves_one_output_in_a_notebook() -> None:
    """The notebook is executed without a browser, which would show an output for each update of a terminal's bar."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(IN_A_NOTEBOOK)])
    NotebookClient(notebook, timeout=int(patience(60)), kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs
    assert re.match(r"training: 100%\|.*epoch 4\.00 of 4", output["data"]["text/plain"])


class TestLog:
    def lines(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return texts(caplog, "distkeras.training.progress")

    @pytest.fixture(autouse=True)
    def at_info(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "distkeras")

    def test_one_line_is_logged_per_interval_and_one_at_the_end(
        self, caplog: pytest.LogCaptureFixture, clock: Clock
    ) -> None:
        with Progress(4, 2, every=30.0, clock=clock) as progress:
            progress.update(BEGIN)
            progress.tick()
            assert self.lines(caplog) == []
            progress.update(status(0.0, 64))
            progress.update(status(0.5, 128))
            clock.now += 29.0
            progress.tick()
            assert self.lines(caplog) == []
            clock.now += 1.0
            progress.tick()
            assert len(self.lines(caplog)) == 1
            progress.update(status(0.5, 128))
        assert self.lines(caplog)[-1] == (
            "training: epoch 0.50 of 4, 2 samples/s, loss 0.1234, staleness 1.3, 2 workers, 0:03:30 left"
        )
        assert len(self.lines(caplog)) == 2

    def test_no_line_is_logged_with_a_bar(
        self, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with Progress(1, 2, True, every=30.0) as progress:
            progress.update(status(0.5, 64))
        assert self.lines(caplog) == []

    def test_no_line_is_logged_without_an_interval(self, caplog: pytest.LogCaptureFixture) -> None:
        with Progress(1, 2) as progress:
            progress.update(status(0.5, 64))
        assert self.lines(caplog) == []

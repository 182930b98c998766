"""The progress of a job: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import importlib
import logging
import math
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
from tqdm.std import tqdm

from distkeras.ps.events import Events
from distkeras.ps.protocol.driver_messages import Status

log = logging.getLogger(__name__)


class StallDetector:
    """Finds workers without a commit for ``after`` seconds in the server's tables of workers."""

    def __init__(self, after: float, events: Events) -> None:
        self.after = after
        #: Seconds from one table to the next.
        self.interval = max(1.0, after / 10)
        self._events = events
        self._reported: dict[int, tuple[int, int]] = {}

    def check(self, workers: np.ndarray) -> None:
        """Report the stalls of a `WorkerTable` message: float64 rows of worker, attempt, last commit, its age."""
        for *numbers, seconds in workers[workers[:, 3] >= self.after].tolist():
            worker, attempt, sequence = map(int, numbers)
            silence = (attempt, sequence)
            if self._reported.get(worker) == silence:
                continue
            self._reported[worker] = silence
            since = f"its commit {sequence}" if sequence else "it joined"
            text = "worker %d (attempt %d) has been silent for %.0f s, since %s"
            self._events.report(log, "stall", text, worker, attempt, seconds, since, worker=worker, attempt=attempt)


_BAR = "{desc}: {percentage:3.0f}%|{bar}|{postfix}"


#: Characters of the bar in a notebook.
_NOTEBOOK_COLUMNS = 120


class _CellOutput:
    """A file of which a notebook's cell shows the last line, as one output."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._output: Any = None

    def write(self, text: str) -> None:
        """Show ``text``, unless it only moves the cursor."""
        line = text.strip()
        if not line:
            return
        display = importlib.import_module("IPython.display")  # a notebook has it
        if self._output is None:
            self._output = display.display(display.Pretty(line), display_id=True)
        else:
            self._output.update(display.Pretty(line))

    def flush(self) -> None:
        """Do nothing: each line is shown at once."""


class Progress:
    """Shows epochs, samples a second, loss, staleness, workers and the time left while a job runs.

    Without a bar, it logs the same every `every` seconds after the first commits, and at the end, as a line of level
    INFO. In a notebook, the bar is one output, which is updated in its place, also in a notebook that is executed
    without a browser; tqdm's own bar would leave an output for each update there.

    Args:
        shown: show a bar: True, False, or None: on a terminal and in a notebook.
        below: show the bar on the second line, because Spark shows its own on the first.
    """

    def __init__(
        self,
        epochs: int,
        workers: int,
        shown: bool | None = None,
        *,
        every: float | None = None,
        below: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        notebook = _in_notebook()
        if shown is None:
            shown = sys.stderr.isatty() or notebook
        self._epochs, self._workers = epochs, workers
        self._every, self._clock = None if shown else every, clock
        self._began: tuple[float, Status] | None = None
        self._status: Status | None = None
        self._logged: Status | None = None
        self._line_due = -math.inf
        self._bar: tqdm = tqdm(
            total=epochs,
            file=_CellOutput() if notebook else None,
            desc="training",
            bar_format=_BAR,
            postfix="waiting for workers",
            position=1 if below and not notebook else None,
            leave=True,
            dynamic_ncols=not notebook,
            ncols=_NOTEBOOK_COLUMNS if notebook else None,
            disable=not shown,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if self._every is not None and self._began is not None and kind is None and self._status is not self._logged:
            self._log()
        self._bar.close()

    def update(self, status: Status) -> None:
        """Show a new status of the server."""
        self._status = status
        if self._began is None and status.batches:
            self._began = self._clock(), status
            self._line_due = self._clock() + (self._every or 0.0)
        if not self._bar.disable:
            self._bar.n = min(status.epochs, self._epochs)
            self._bar.set_postfix_str(self._text(status), refresh=False)
            self._bar.refresh()
        self.tick()

    def tick(self) -> None:
        """Log a line if one is due; call it about every second, also without a new status."""
        if self._every is not None and self._began is not None and self._clock() >= self._line_due:
            self._line_due = self._clock() + self._every
            self._log()

    def _log(self) -> None:
        assert self._status is not None, "a status has arrived"
        self._logged = self._status
        log.info("training: %s", self._text(self._status))

    def _text(self, status: Status) -> str:
        if self._began is None:
            return f"{status.joined} of {self._workers} workers are there"
        since, first = self._began
        seconds = self._clock() - since
        parts = [f"epoch {min(status.epochs, self._epochs):.2f} of {self._epochs}"]
        if seconds > 0 and status.samples > first.samples:
            parts.append(f"{(status.samples - first.samples) / seconds:,.0f} samples/s")
        parts += [f"loss {status.loss:.4f}", f"staleness {status.staleness:.1f}"]
        parts.append(f"{status.joined - status.finished} workers")
        passed = status.epochs - first.epochs
        if passed > 0:
            left = max(0.0, (self._epochs - status.epochs) * seconds / passed)
            parts.append(f"{timedelta(seconds=round(left))} left")
        return ", ".join(parts)


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    instance = shell.get_ipython() if shell is not None and hasattr(shell, "get_ipython") else None
    return instance is not None and "IPKernelApp" in instance.config

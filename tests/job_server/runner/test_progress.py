from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.patience import patience

from distkeras.callbacks import CallbackContext, TrainingSetup
from distkeras.job_server.runner.files import EventLines, JobFolder, ProgressLines, read_progress
from distkeras.ps.events import report
from distkeras.ps.protocol.driver_messages import Status


def rows(path: Path) -> list[dict[str, Any]]:
    return read_progress(path, 0)[0]


def context(clock: int, loss: float = 0.5, *, final: bool = False) -> CallbackContext:
    status = Status(clock, 2, 0, 3 * clock, 48 * clock, loss, 1.5, 0.25)
    return CallbackContext(status, 7.0, lambda: None, lambda: None, lambda _: None, final=final)  # type: ignore[arg-type, return-value]  # not called asks for the center


def test_a_job_reports_its_start_progress_and_outcome(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    path, lines = folder.progress, ProgressLines(folder, 2)
    lines.on_begin(TrainingSetup(("loss", "accuracy"), lambda: None, lambda *_: None))  # type: ignore[arg-type, return-value]  # not called
    lines.on_center(context(0, math.nan))
    lines.on_center(context(4))
    lines.on_center(context(4))  # There is nothing new to report.
    lines.on_end(context(9, final=True))
    begun, first, second, last = rows(path)
    assert folder.working(2).exists()
    assert (begun["kind"], begun["attempt"], begun["metrics"]) == ("training", 2, ["loss", "accuracy"])
    assert (first["clock"], first["loss"]) == (0, None)
    assert (second["clock"], second["samples"], second["staleness"], second["final"]) == (4, 192, 1.5, False)
    assert (last["clock"], last["final"]) == (9, True)
    assert path.stat().st_mode & 0o077 == 0


def test_only_events_are_written_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    log = logging.Logger("test")
    log.addHandler(EventLines(path))
    log.warning("no event")
    report(log, "takeover", "worker %d continues", 3, worker=3, attempt=7)
    (row,) = rows(path)
    assert {name: row[name] for name in ("kind", "event", "text", "worker", "attempt")} == {
        "kind": "event",
        "event": "takeover",
        "text": "worker 3 continues",
        "worker": 3,
        "attempt": 7,
    }


def test_a_driver_reports_why_its_job_failed(tmp_path: Path) -> None:
    """The archive is invalid, so the job fails before Spark starts."""
    description = {"rule": "agn", "data": "/nowhere"}
    order = {"kind": "train", "description": description, "data": "file:///nowhere", "master": "local[1]", "config": {}}
    (tmp_path / "order-1.json").write_text(json.dumps(order))
    (tmp_path / "sent.keras").write_bytes(b"nothing")
    command = [sys.executable, "-m", "distkeras.job_server.driver", str(tmp_path), "1"]
    done = subprocess.run(command, input=b"go\n", timeout=patience(120), capture_output=True)
    assert done.returncode == 1
    result = json.loads((tmp_path / "result-1.json").read_text())
    assert (result["state"], result["type"]) == ("failed", "DescriptionError")
    assert "an archive that Keras saved" in result["error"]
    assert b"Traceback" in done.stderr  # The traceback is in the job's log.

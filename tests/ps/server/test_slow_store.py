"""A server may take long to read its snapshots from a slow store, as long as it makes progress."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.patience import PATIENT, brief, patience, until

from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import DeadlineError
from distkeras.ps.rules import make
from distkeras.ps.server import process
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient

pytestmark = pytest.mark.slow
PIECES = 50


def server(folder: Path, *, resume: bool) -> ServerProcess:
    checkpoint = Checkpoint(str(folder))
    return ServerProcess(
        ServerSettings(make("downpour"), workers=1, deadlines=PATIENT, checkpoint=checkpoint), resume=resume
    )


class SlowFile:
    """A FIFO in place of a file: its content arrives in pieces with pauses, and completely only if ``whole``."""

    def __init__(self, path: Path, *, whole: bool) -> None:
        content = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        size = -(-len(content) // PIECES)
        pieces = [content[first : first + size] for first in range(0, len(content), size)]
        self._path, self._pieces, self._whole = path, pieces if whole else pieces[:3], whole
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        with self._path.open("wb", buffering=0) as pipe:
            for piece in self._pieces:
                pipe.write(piece)
                time.sleep(brief(0.2))
            if not self._whole:
                self._over.wait(patience(60))

    def __enter__(self) -> SlowFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join(patience(60))


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with server(tmp_path, resume=False) as first:
        driver = DriverClient(first.address, PATIENT)
        driver.publish(np.arange(1000, dtype=np.float32))
        until(lambda: list(tmp_path.glob("snapshot-*.dks")))
        driver.close()
    monkeypatch.setattr(process, "_START", brief(5))  # This is shorter than reading all pieces takes.
    return max(tmp_path.glob("snapshot-*.dks"))


def test_the_deadline_of_a_start_is_extended_while_it_makes_progress(tmp_path: Path, snapshot: Path) -> None:
    with SlowFile(snapshot, whole=True), server(tmp_path, resume=True) as second:
        driver = DriverClient(second.address, PATIENT)
        assert driver.center().center.tolist() == list(range(1000))
        driver.close()


def test_a_start_without_progress_misses_its_deadline(tmp_path: Path, snapshot: Path) -> None:
    with SlowFile(snapshot, whole=False), pytest.raises(DeadlineError, match="for the parameter server to start"):
        server(tmp_path, resume=True).start()

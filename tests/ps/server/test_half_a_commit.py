"""Commits whose arithmetic fails partway: the center is corrupt and must not receive the commit again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, brief, patience
from support.ps import forgetful_server
from support.ps.running_server import KEY, Running
from support.ps.toy_model import toy_client
from support.ps.worker_thread import running_worker

from distkeras.ps.errors import LocalProtocolError, NodeError, ServerLostError
from distkeras.ps.rules import make
from distkeras.ps.server.process import StartReport
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.worker.loop import run_worker


def failing_once(error: Exception, whole: Any) -> Any:
    """Return ``whole``, wrapped so that its first call raises ``error``."""
    errors = [error]

    def call(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return whole(*arguments)

    return call


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError("no room for a row"), NodeError),
        (OSError(12, "no room"), NodeError),
        (KeyError(1), LocalProtocolError),
    ],
    ids=["memory", "an errno", "a mistake"],
)
def test_without_a_checkpoint_the_job_ends(error: Exception, expected: type[Exception]) -> None:
    with Running(make("downpour", window=1), workers=1) as running:
        center = running.server.center
        assert center is not None
        center.log.add = failing_once(error, center.log.add)
        thread, errors = running_worker(running, 0, [np.ones(1, np.float32)])
        thread.join(patience(30))
        assert [type(found) for found in errors] == [expected]
        with pytest.raises(expected, match=r"no room|KeyError"):
            running.driver.observe(10, 0.0)
        assert center.corrupt
        assert len(center.log) == center.clock == 0


def test_a_server_without_a_supervisor_ends(tmp_path: Path) -> None:
    """The user who started it may start it again."""
    (tmp_path / "key").write_text(KEY.hex())
    options = ["--rule", "downpour", "--workers", "1", "--host", "127.0.0.1", "--key-file", str(tmp_path / "key")]
    command = [sys.executable, forgetful_server.__file__, "distkeras.ps", "serve", *options]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONSAFEPATH": "1"}
    command += ["--checkpoint", str(tmp_path / "saved")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        report = StartReport.from_json(server.stdout.readline())
        address = Address(report.host, report.port, KEY)
        driver = DriverClient(address, PATIENT)
        driver.publish(np.zeros(3, np.float32))
        driver.close()
        patient = replace(PATIENT, reconnect=brief(1))
        rule, values = make("downpour", window=1), [1.0] * 9
        client, welcome, begin = toy_client(address, rule, values, worker=0, size=3, deadlines=patient)
        with contextlib.closing(client), pytest.raises(ServerLostError):
            run_worker(client, welcome, begin)
        assert server.wait(patience(30)) == 1
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()

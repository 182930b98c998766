"""A server in a process of its own."""

from __future__ import annotations

import os
import select
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
from support.patience import PATIENT, patience

from distkeras.ps.errors import (
    ConfigurationError,
)
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient


class TestProcess:
    def test_it_serves_and_frees_its_port(self) -> None:
        with ServerProcess(ServerSettings(make("agn", window=3), workers=1)) as process:
            driver = DriverClient(process.address, PATIENT)
            driver.publish(np.zeros(4, np.float32))
            assert driver.center().center.tolist() == [0, 0, 0, 0]
            driver.close()
            where = (process.address.host, process.address.port)
        assert not process.alive()
        with socket.create_server(where):
            pass

    def test_it_dies_with_its_driver(self) -> None:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # a driver that is killed before it can close anything
            process = ServerProcess(ServerSettings(make("downpour"), workers=1))
            process.start()
            os.write(writer, f"{process.pid} {process.address.port}\n".encode())
            signal.pause()
        os.close(writer)
        with os.fdopen(reader) as lines:
            pid, port = map(int, lines.readline().split())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pidfd = os.pidfd_open(pid) if Path(f"/proc/{pid}").exists() else None
        if pidfd is not None:
            readable, _, _ = select.select([pidfd], [], [], patience(10))
            os.close(pidfd)
            assert readable
        with socket.create_server(("127.0.0.1", port)):
            pass

    def test_the_key_is_neither_in_its_arguments_nor_in_its_environment(self) -> None:
        with ServerProcess(ServerSettings(make("downpour"), workers=1)) as process:
            for name in ("cmdline", "environ"):
                shown = Path(f"/proc/{process.pid}/{name}").read_bytes()
                assert process.address.key.hex().encode() not in shown
            assert process.address.key.hex() not in repr(process.address)

    def test_a_taken_port_is_an_error_at_once(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigurationError, match="in use"):
            ServerProcess(ServerSettings(make("downpour"), workers=1, port=taken.getsockname()[1])).start()

    def test_a_gradient_rule_without_a_learning_rate_is_an_error_at_once(self) -> None:
        with pytest.raises(ConfigurationError, match="`learning_rate` must be given"):
            ServerSettings(make("asgd"), workers=1)

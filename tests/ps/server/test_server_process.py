"""A server in a process of its own."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
from support.patience import PATIENT, patience

from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess, spawn_server
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient


def fork_and_pause() -> int:
    """Fork a child that keeps all of the driver's descriptors open, as multiprocessing does; return its process id."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    return child


class TestProcess:
    def test_a_server_process_serves_and_frees_its_port(self) -> None:
        with ServerProcess(ServerSettings(make("agn", window=3), workers=1)) as process:
            driver = DriverClient(process.address, PATIENT)
            driver.publish(np.zeros(4, np.float32))
            assert driver.center().center.tolist() == [0, 0, 0, 0]
            driver.close()
            where = (process.address.host, process.address.port)
        assert not process.alive()
        with socket.create_server(where):
            pass

    @pytest.mark.parametrize("dead", [False, True])
    def test_a_process_that_was_spawned_ahead_is_used_if_it_lives(self, dead: bool) -> None:
        ahead = spawn_server()
        if dead:
            ahead.kill()
            assert ahead.wait(patience(10))
        with ServerProcess(ServerSettings(make("agn", window=3), workers=1), ahead=ahead) as process:
            assert (process.pid == ahead.pid) is not dead
            DriverClient(process.address, PATIENT).close()
        assert not process.alive()
        ahead.close()

    @pytest.mark.parametrize(
        ("forked", "descriptors"),
        [(False, True), (True, True), (True, False)],
        ids=["alone", "with a forked child", "with a forked child, on a system without descriptors of processes"],
    )
    def test_a_server_process_dies_with_its_driver(
        self, forked: bool, descriptors: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not descriptors:
            monkeypatch.setattr("distkeras.ps.world.processes._process_descriptor", lambda _: None)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # A driver that is killed before it can close anything.
            try:
                process = ServerProcess(ServerSettings(make("downpour"), workers=1))
                process.start()
                grandchild = fork_and_pause() if forked else 0
                os.write(writer, f"{process.pid} {process.address.port} {grandchild}\n".encode())
                signal.pause()
            finally:
                os._exit(1)  # Even after an error, the fork does not continue as a second copy of the tests.
        os.close(writer)
        with os.fdopen(reader) as lines:
            pid, port, grandchild = map(int, lines.readline().split())
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            with contextlib.suppress(ProcessLookupError):  # It has ended already.
                pidfd = os.pidfd_open(pid)
                readable, _, _ = select.select([pidfd], [], [], patience(10))
                os.close(pidfd)
                assert readable
            with socket.create_server(("127.0.0.1", port)):
                pass
        finally:
            if grandchild:
                os.kill(grandchild, signal.SIGKILL)

    @pytest.mark.parametrize("saving", [False, True], ids=["", "with a checkpoint"])
    def test_a_closed_server_process_ends_by_itself_although_the_driver_has_forked(
        self, saving: bool, tmp_path: Path
    ) -> None:
        checkpoint = Checkpoint(str(tmp_path)) if saving else None
        with ServerProcess(ServerSettings(make("downpour"), workers=1, checkpoint=checkpoint)) as process:
            child = fork_and_pause()
        try:
            assert process.exit_code == 0  # It was not killed at the deadline.
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def test_a_server_process_outlives_a_forked_child_that_closes_its_copy(self) -> None:
        with ServerProcess(ServerSettings(make("downpour"), workers=1)) as process:
            child = os.fork()
            if child == 0:
                process.close()
                os._exit(0)
            os.waitpid(child, 0)
            driver = DriverClient(process.address, PATIENT)
            driver.publish(np.zeros(4, np.float32))
            driver.close()
            assert process.alive()

    @pytest.mark.parametrize("path", [None, "", ":"], ids=["", "empty path", "path with an empty entry"])
    def test_a_server_process_imports_nothing_from_the_current_directory(
        self, path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("numpy", "json", "distkeras"):
            (tmp_path / f"{name}.py").write_text("raise SystemExit('from the current directory')")
        if path is not None:
            monkeypatch.setenv("PYTHONPATH", path)
        monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
        monkeypatch.chdir(tmp_path)
        with ServerProcess(ServerSettings(make("downpour"), workers=1)) as process:
            assert process.alive()

    def test_the_key_is_neither_in_the_arguments_nor_in_the_environment_of_the_process(self) -> None:
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

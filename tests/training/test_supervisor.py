"""The supervisor: it survives broken connections, and servers that die while they restart."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.patience import PATIENT, brief, patience, until
from support.present import present
from support.processes import descendants
from support.ps.clocks import LateWorld
from support.ps.running_server import socket_of

from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import DeadlineError, ServerLostError
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.training.supervisor import Supervisor

pytestmark = pytest.mark.timeout(120)
START = np.arange(7, dtype=np.float32)


def publish(driver: DriverClient) -> None:
    driver.publish(START)


def center(driver: DriverClient) -> list[float]:
    return driver.center().center.tolist()


def stop(pid: int) -> None:
    """Suspend a process, and return once it is suspended and not only signaled."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


@pytest.mark.slow
def test_the_driver_reconnects_after_the_server_closed_an_idle_connection() -> None:
    """The driver sends nothing while the workers train, which may take longer than the server's receive timeout."""
    with ServerProcess(
        ServerSettings(make("downpour"), workers=1, deadlines=replace(PATIENT, silence=brief(1.5)))
    ) as process:
        with Supervisor(process, publish) as server:
            peeked = server.ask(lambda driver: socket_of(present(driver.channel)).recv(1, socket.MSG_PEEK))
            assert peeked == b""  # the server has closed the connection
            assert server.ask(center) == START.tolist()
        assert server.restarts == 0


@pytest.mark.slow
def test_a_request_without_an_answer_is_repeated_only_until_its_deadline() -> None:
    """The deadline of the call expires during the second attempt; no other clock is involved."""
    world = LateWorld()
    with (
        ServerProcess(ServerSettings(make("downpour"), workers=1, deadlines=PATIENT)) as process,
        Supervisor(process, publish, world=world) as server,
    ):
        calls = []

        def lost(driver: DriverClient) -> None:
            calls.append(driver)
            world.ahead += PATIENT.reply
            raise ServerLostError(f"call {len(calls)} must be answered. Received: nothing")

        with pytest.raises(ServerLostError, match="call 1 "):
            server.ask(lost)
        assert len(calls) == 2


@pytest.mark.slow
def test_the_driver_reconnects_if_the_connection_breaks_while_it_publishes() -> None:
    """The server has received the center, but its reply is lost: the driver sends the same center again."""
    cut: list[DriverClient] = []

    def publish_over_a_breaking_connection(driver: DriverClient) -> None:
        driver.publish(START)
        if not cut:
            cut.append(driver)
            present(driver.channel).hang_up()
            driver.publish(START)

    with (
        ServerProcess(ServerSettings(make("downpour"), workers=1, deadlines=PATIENT)) as process,
        Supervisor(process, publish_over_a_breaking_connection) as server,
    ):
        assert cut
        assert server.ask(center) == START.tolist()
        assert server.restarts == 0


class TestSuspendedServer:
    """A server that is suspended by SIGSTOP: the kernel still accepts connections, so the handshake times out."""

    def process(self, checkpoint: Path | None, **deadlines: float) -> ServerProcess:
        settings = ServerSettings(
            make("downpour"),
            workers=1,
            deadlines=replace(PATIENT, **deadlines),
            checkpoint=None if checkpoint is None else Checkpoint(str(checkpoint), every=1),
        )
        return ServerProcess(settings)

    @pytest.mark.slow
    @pytest.mark.parametrize("saving", [False, True], ids=["", "with a checkpoint"])
    def test_a_request_to_a_suspended_server_is_repeated_and_nothing_is_lost(
        self, saving: bool, tmp_path: Path
    ) -> None:
        """Only the handshake of the suspended server has a short deadline."""
        failed: list[ServerLostError] = []

        def publish_to_the_suspended(driver: DriverClient) -> None:
            driver.deadlines = PATIENT if failed else replace(PATIENT, handshake=brief(0.5))
            if not failed:
                stop(process.pid)
            try:
                driver.publish(START)
            except ServerLostError as error:
                failed.append(error)
                os.kill(process.pid, signal.SIGCONT)
                raise

        with (
            self.process(tmp_path if saving else None) as process,
            Supervisor(process, publish_to_the_suspended) as server,
        ):
            assert len(failed) == 1
            assert server.ask(center) == START.tolist()
            assert server.restarts == 0

    def test_a_suspended_server_with_a_checkpoint_is_killed_at_its_deadline_and_restarted(self, tmp_path: Path) -> None:
        """The deadline expires during the request to the first process; it does not apply to a slow second process."""
        world = LateWorld()
        with self.process(tmp_path, handshake=brief(0.5)) as process:
            first = process.pid

            def center_after_deadline(driver: DriverClient) -> list[float]:
                try:
                    return center(driver)
                except ServerLostError:
                    world.ahead += PATIENT.standstill if process.pid == first else 0.0
                    raise

            with Supervisor(process, publish, world=world) as server:
                server.ask(lambda driver: driver.close())
                stop(first)
                assert server.ask(center_after_deadline) == START.tolist()
                assert server.restarts == 1
                assert not psutil.pid_exists(first)

    @pytest.mark.slow
    def test_a_server_that_is_suspended_between_requests_is_restarted(self, tmp_path: Path) -> None:
        world = LateWorld()
        deadlines = {"handshake": brief(0.5)}
        with self.process(tmp_path, **deadlines) as process, Supervisor(process, publish, world=world) as server:
            stop(process.pid)
            world.ahead = PATIENT.standstill
            until(lambda: server.watch() or server.restarts)
            assert server.ask(center) == START.tolist()

    def test_a_server_is_not_restarted_after_the_driver_was_suspended(self, tmp_path: Path) -> None:
        """The driver itself was suspended, so it received nothing from the server."""
        with self.process(tmp_path, standstill=1e-6) as process, Supervisor(process, publish) as server:
            first = process.pid
            server.watch()
            assert process.pid == first
            assert server.restarts == 0

    @pytest.mark.slow
    def test_without_a_checkpoint_the_error_names_the_call(self) -> None:
        deadlines = {"handshake": brief(0.5), "reply": brief(1)}
        with self.process(None, **deadlines) as process, Supervisor(process, publish) as server:
            stop(process.pid)
            try:
                with pytest.raises(DeadlineError, match="EndEarly"):
                    server.end_early("enough")
            finally:
                os.kill(process.pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_server_that_dies_while_it_restarts_is_restarted(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path), every=1)
    process = ServerProcess(ServerSettings(make("downpour"), workers=1, deadlines=PATIENT, checkpoint=checkpoint))
    with process, Supervisor(process, publish) as server:
        os.kill(process.pid, signal.SIGKILL)
        assert process.exited(patience(10))
        killed: list[int] = []
        first, over = process.pid, threading.Event()

        def kill_the_next_at_once() -> None:
            while not killed and not over.is_set():
                if process.pid != first:
                    killed.append(process.pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(killed[0], signal.SIGKILL)

        thread = threading.Thread(target=kill_the_next_at_once)
        thread.start()
        try:
            assert server.ask(center) == START.tolist()
        finally:
            over.set()
            thread.join()
        assert len(killed) == 1
        assert process.pid not in (first, *killed)


@pytest.mark.slow
def test_a_store_that_is_briefly_unreachable_costs_only_a_restart(tmp_path: Path) -> None:
    """The second server finds a file in place of the checkpoint; the third server finds the checkpoint."""
    place, real, other = (tmp_path / name for name in ("place", "real", "other"))
    real.mkdir()
    other.write_text("")
    place.symlink_to(real)
    process = ServerProcess(
        ServerSettings(make("downpour"), workers=1, deadlines=PATIENT, checkpoint=Checkpoint(str(place)))
    )
    with process, Supervisor(process, publish) as server:
        until(lambda: list(real.glob("snapshot-*.dks")))
        first = process.pid
        os.kill(first, signal.SIGKILL)
        assert process.exited(patience(10))
        (tmp_path / "next").symlink_to(other)
        (tmp_path / "next").replace(place)
        seen: set[int] = set()

        def put_back() -> None:
            until(lambda: seen.add(process.pid) or len(seen - {first}) > 1)
            (tmp_path / "next").symlink_to(real)
            (tmp_path / "next").replace(place)

        thread = threading.Thread(target=put_back)
        thread.start()
        try:
            assert server.ask(center) == START.tolist()
        finally:
            thread.join()
        assert process.resumed is not None


def test_a_server_that_dies_before_it_was_ready_is_restarted(tmp_path: Path) -> None:
    killed: list[int] = []
    over = threading.Event()

    def kill_the_first_at_once() -> None:
        while not killed and not over.is_set():
            for child in descendants("distkeras.ps"):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
                    killed.append(child.pid)

    thread = threading.Thread(target=kill_the_first_at_once)
    thread.start()
    try:
        process = ServerProcess(
            ServerSettings(make("downpour"), workers=1, deadlines=PATIENT, checkpoint=Checkpoint(str(tmp_path)))
        )
        with process, Supervisor(process, publish) as server:
            assert server.ask(center) == START.tolist()
            assert process.pid not in killed
    finally:
        over.set()
        thread.join()
    assert len(killed) == 1


def test_a_dead_server_without_a_checkpoint_is_an_error() -> None:
    with (
        ServerProcess(ServerSettings(make("downpour"), workers=1, deadlines=PATIENT)) as process,
        Supervisor(process, publish) as server,
    ):
        os.kill(process.pid, signal.SIGKILL)
        assert process.exited(patience(10))
        with pytest.raises(ServerLostError, match="checkpoint"):
            server.ask(center)

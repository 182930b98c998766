"""The driver's hold on the server: over broken connections, and over a server that dies while it comes back."""

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
from support.ps.sockets import socket_of

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
    """A process stands still when this returns, and not only once its signal has reached it."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


@pytest.mark.slow
def test_a_connection_that_the_server_has_given_up_is_made_again() -> None:
    """The driver has nothing to say for as long as the workers train; that may be longer than a server listens."""
    with ServerProcess(
        ServerSettings(make("downpour"), workers=1, deadlines=replace(PATIENT, silence=brief(1.5)))
    ) as process:
        with Supervisor(process, publish) as server:
            peeked = server.ask(lambda driver: socket_of(present(driver.channel)).recv(1, socket.MSG_PEEK))
            assert peeked == b""  # it has hung up
            assert server.ask(center) == START.tolist()
        assert server.restarts == 0


def test_a_server_that_does_not_answer_is_not_asked_forever() -> None:
    """As long as a call may take passes with the second one: no other clock has a part in it."""
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


def test_a_connection_that_is_cut_while_it_publishes_is_made_again() -> None:
    """The server has the center, and its answer is lost: the same center comes once more."""
    cut: list[DriverClient] = []

    def publish_over_a_line_that_breaks(driver: DriverClient) -> None:
        driver.publish(START)
        if not cut:
            cut.append(driver)
            present(driver.channel).hang_up()
            driver.publish(START)

    with (
        ServerProcess(ServerSettings(make("downpour"), workers=1, deadlines=PATIENT)) as process,
        Supervisor(process, publish_over_a_line_that_breaks) as server,
    ):
        assert cut
        assert server.ask(center) == START.tolist()
        assert server.restarts == 0


class TestAServerThatStandsStill:
    """SIGSTOP; a handshake's deadline passes, for the kernel takes connections in its stead."""

    def process(self, checkpoint: Path | None, **deadlines: float) -> ServerProcess:
        settings = ServerSettings(
            make("downpour"),
            workers=1,
            deadlines=replace(PATIENT, **deadlines),
            checkpoint=None if checkpoint is None else Checkpoint(str(checkpoint), every=1),
        )
        return ServerProcess(settings)

    @pytest.mark.parametrize(
        "saving", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "with a checkpoint"]
    )
    def test_it_is_asked_again_and_loses_nothing(self, saving: bool, tmp_path: Path) -> None:
        """Only the handshake of the stopped server has a short deadline."""
        failed: list[ServerLostError] = []

        def publish_to_the_stopped(driver: DriverClient) -> None:
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
            Supervisor(process, publish_to_the_stopped) as server,
        ):
            assert len(failed) == 1
            assert server.ask(center) == START.tolist()
            assert server.restarts == 0

    def test_with_a_checkpoint_it_is_killed_at_its_deadline_and_comes_back(self, tmp_path: Path) -> None:
        """The deadline passes while the first process is asked, and not for the next one, however slow that is."""
        world = LateWorld()
        with self.process(tmp_path, handshake=brief(0.5)) as process:
            first = process.pid

            def asked(driver: DriverClient) -> list[float]:
                try:
                    return center(driver)
                except ServerLostError:
                    world.ahead += PATIENT.standstill if process.pid == first else 0.0
                    raise

            with Supervisor(process, publish, world=world) as server:
                server.ask(lambda driver: driver.close())
                stop(first)
                assert server.ask(asked) == START.tolist()
                assert server.restarts == 1
                assert not psutil.pid_exists(first)

    @pytest.mark.slow
    def test_one_that_stands_still_between_requests_is_found(self, tmp_path: Path) -> None:
        world = LateWorld()
        deadlines = {"handshake": brief(0.5)}
        with self.process(tmp_path, **deadlines) as process, Supervisor(process, publish, world=world) as server:
            stop(process.pid)
            world.ahead = PATIENT.standstill
            until(lambda: server.watch() or server.restarts)
            assert server.ask(center) == START.tolist()

    def test_one_that_is_only_not_listened_to_is_left_alone(self, tmp_path: Path) -> None:
        """The driver stood still itself."""
        with self.process(tmp_path, standstill=1e-6) as process, Supervisor(process, publish) as server:
            first = process.pid
            server.watch()
            assert process.pid == first
            assert server.restarts == 0

    def test_without_a_checkpoint_the_error_names_the_call(self) -> None:
        deadlines = {"handshake": brief(0.5), "reply": brief(1)}
        with self.process(None, **deadlines) as process, Supervisor(process, publish) as server:
            stop(process.pid)
            try:
                with pytest.raises(DeadlineError, match="EndEarly"):
                    server.end_early("enough")
            finally:
                os.kill(process.pid, signal.SIGCONT)


def test_a_server_that_dies_while_it_comes_back_comes_back(tmp_path: Path) -> None:
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


def test_a_store_that_is_out_of_reach_for_a_moment_costs_a_restart_and_no_job(tmp_path: Path) -> None:
    """The second server finds something else where the checkpoint was, and the third one finds it again."""
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


def test_a_server_that_dies_before_it_was_up_is_started_again(tmp_path: Path) -> None:
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


def test_without_a_checkpoint_a_dead_server_stays_dead() -> None:
    with (
        ServerProcess(ServerSettings(make("downpour"), workers=1, deadlines=PATIENT)) as process,
        Supervisor(process, publish) as server,
    ):
        os.kill(process.pid, signal.SIGKILL)
        assert process.exited(patience(10))
        with pytest.raises(ServerLostError, match="checkpoint"):
            server.ask(center)

"""Several attempts to serve one job: one serves, and the others wait as standbys while it lives."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, brief, patience, until
from support.present import present
from support.ps.announced_server import AnnouncedServer
from support.ps.running_server import WorkerThread
from support.ps.toy_model import toy_client
from support.ps.watched_files import before_access

from distkeras.ps.center.commit_log import COMMIT, CommitLog
from distkeras.ps.checkpoint.checkpointer import Checkpoint, StartMode
from distkeras.ps.checkpoint.ownership import AnnouncedAddress, owner_of
from distkeras.ps.checkpoint.snapshots import SnapshotDirectory
from distkeras.ps.errors import DeadlineError, OwnershipLostError, ServerLostError
from distkeras.ps.protocol.framing import encode
from distkeras.ps.rules import make
from distkeras.ps.server import announced
from distkeras.ps.server.announced import Standby, serve_announced
from distkeras.ps.server.process import StartRequest
from distkeras.ps.server.start_report import NotStarted, ServedToTheEnd, StartReport
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.driver_client import DriverClient, publication
from distkeras.ps.world.streams import Listener
from distkeras.ps.world.world import REAL, World

KEY = bytes(range(32))
SIZE = 5
VALUES = [float(number + 1) for number in range(12)]
CENTER = b"".join(encode(publication(np.zeros(SIZE, np.float32), model=b"the model")))


def request(
    folder: Path, *, fresh: bool = True, token: str = "0000000a", epochs: int = 1, **deadlines: float
) -> StartRequest:
    settings = ServerSettings(
        make("downpour", window=1),
        workers=1,
        deadlines=replace(PATIENT, **deadlines),
        checkpoint=Checkpoint(str(folder), every=1),
    )
    return StartRequest(settings, KEY, None, StartMode(fresh=fresh, same_attempts=False, epochs=epochs), {}, token)


class CallbackBetweenChecks(World):
    """The system's world, except that a callback runs once, between an attempt's two checks of the claims."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self._happens = [happens]

    def listen(self, host: str, port: int) -> Listener:
        if self._happens:
            self._happens.pop()()
        return super().listen(host, port)


def lost(report: StartReport | None) -> bool:
    """Return whether a server could not start because another job owns the checkpoint."""
    return isinstance(report, NotStarted) and isinstance(report.to_error(), OwnershipLostError)


class Attempt(threading.Thread):
    """An attempt that runs in a thread of this process."""

    def __init__(self, start_request: StartRequest, number: int, world: World = REAL) -> None:
        super().__init__(daemon=True)
        self._request, self._number, self._world = start_request, number, world
        self._report: StartReport | None = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._report = serve_announced(self._request, CENTER, attempt=self._number, world=self._world)
        except Exception as error:  # noqa: BLE001 - `returned` raises it
            self._error = error

    def returned(self) -> StartReport | None:
        self.join(patience(60))
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
        return self._report


class Worker(WorkerThread):
    """The job's worker, which waits for `go` at the step number ``held``."""

    def __init__(self, folder: Path, held: int = -1, epochs: int = 1, deadlines: Deadlines = PATIENT) -> None:
        self._held, self._steps = held, 0
        self.reached, self.go = threading.Event(), threading.Event()
        address = AnnouncedAddress("", 0, KEY, uri=str(folder))
        options: dict[str, Any] = {"size": SIZE, "eta": 1.0, "epochs": epochs, "deadlines": deadlines}
        super().__init__(
            lambda: toy_client(
                address, make("downpour", window=1), VALUES, worker=0, gradient=self._gradient, **options
            )
        )

    def _gradient(self, theta: np.ndarray, value: Any) -> np.ndarray:
        if self._steps == self._held:
            self.reached.set()
            assert self.go.wait(patience(60))
        self._steps += 1
        return np.ones(SIZE, np.float32)

    def finish(self) -> None:
        self.go.set()
        assert self.ended() is None


@contextmanager
def driver(folder: Path) -> Iterator[DriverClient]:
    client = DriverClient(AnnouncedAddress("", 0, KEY, uri=str(folder)), PATIENT)
    try:
        yield client
    finally:
        client.close()


def check_exact(folder: Path, epochs: int = 1) -> list[int]:
    """Check that each mini-batch counts once; return the incarnations that have commits."""
    with driver(folder) as client:
        commits = client.drain().commits.view(COMMIT)
        assert commits["first_batch"].tolist() == epochs * list(range(len(VALUES)))
        assert client.center().center.tolist() == [-float(epochs * len(VALUES))] * SIZE
    return sorted(set(commits["incarnation"].tolist()))


def goodbye(folder: Path) -> None:
    with driver(folder) as client:
        client.goodbye()


def incarnation(folder: Path) -> int:
    """Return the incarnation of the announced owner, or 0 if none is announced."""
    owner = owner_of(str(folder))
    return 0 if owner is None or owner.announced is None else owner.claim.incarnation


def waits(caplog: pytest.LogCaptureFixture) -> Callable[[], bool]:
    """Return a function that reports whether an attempt of this process waits as a standby."""
    caplog.set_level("INFO", "distkeras.ps.server.announced")
    return lambda: "waits as its standby" in caplog.text


def test_an_attempt_waits_while_another_attempt_serves_and_ends_successfully_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = waits(caplog)
    owner = Attempt(request(tmp_path), 0)
    until(lambda: incarnation(tmp_path))
    worker = Worker(tmp_path, held=3)
    assert worker.reached.wait(patience(30))
    other = Attempt(request(tmp_path), 1)
    until(waiting)
    worker.finish()
    assert check_exact(tmp_path) == [1]
    goodbye(tmp_path)
    assert owner.returned() is None
    assert other.returned() == ServedToTheEnd()
    assert len(list(tmp_path.glob("owner-*"))) == 1


@pytest.mark.slow
def test_an_attempt_that_is_overtaken_before_it_claims_waits_for_the_owner(tmp_path: Path) -> None:
    """Since the job is fresh, the other attempt's snapshot is no reason to refuse the directory."""
    owners = []

    def serve() -> None:
        owners.append(Attempt(request(tmp_path), 0))
        until(lambda: incarnation(tmp_path) and list(tmp_path.glob("snapshot-*")))

    other = Attempt(request(tmp_path), 1, CallbackBetweenChecks(serve))
    until(lambda: owners and incarnation(tmp_path))
    Worker(tmp_path).finish()
    assert check_exact(tmp_path) == [1]
    goodbye(tmp_path)
    assert owners[0].returned() is None
    assert other.returned() == ServedToTheEnd()


def test_a_late_attempt_of_a_dead_driver_does_not_take_the_job_from_the_next_driver(tmp_path: Path) -> None:
    first, newer = (SnapshotDirectory(str(tmp_path), token=token) for token in ("0000000b", "0000000a"))

    def claim() -> None:
        first.take_over(attempt=0)
        newer.take_over(attempt=0)

    late = Attempt(request(tmp_path, fresh=False, token="0000000b"), 1, CallbackBetweenChecks(claim))
    assert lost(late.returned())
    newer.require_owned()


def test_a_standby_takes_over_from_a_dead_owner(tmp_path: Path) -> None:
    place = tmp_path / "place"
    with ExitStack() as stack:
        owner = stack.enter_context(AnnouncedServer(tmp_path / "owner", request(place), CENTER))
        until(lambda: incarnation(place))
        worker = Worker(place, held=5)
        assert worker.reached.wait(patience(30))
        other = Attempt(request(place, standstill=patience(300)), 1)
        owner.kill()
        until(lambda: incarnation(place) == 2)
        worker.finish()
        assert check_exact(place)[-1] == 2
        goodbye(place)
        assert other.returned() is None


@pytest.mark.slow
def test_a_suspended_owner_is_replaced_and_ends_when_it_resumes(tmp_path: Path) -> None:
    place = tmp_path / "place"
    impatient = request(place, standstill=brief(1), handshake=brief(0.5))
    with AnnouncedServer(tmp_path / "owner", request(place), CENTER) as owner:
        until(lambda: incarnation(place))
        worker = Worker(place, held=5)
        assert worker.reached.wait(patience(30))
        owner.stop()
        other = Attempt(impatient, 1)
        until(lambda: incarnation(place) == 2)
        owner.go_on()
        worker.finish()
        assert check_exact(place)[-1] == 2
        goodbye(place)
        assert other.returned() is None
        assert owner.returned() == ServedToTheEnd()


@pytest.mark.slow
def test_a_worker_that_waits_for_a_suspended_owner_continues_with_its_successor(tmp_path: Path) -> None:
    place = tmp_path / "place"
    with AnnouncedServer(tmp_path / "owner", request(place), CENTER) as owner:
        until(lambda: incarnation(place))
        worker = Worker(place, held=5, deadlines=replace(PATIENT, gather=brief(1), reply=patience(300)))
        assert worker.reached.wait(patience(30))
        owner.stop()
        worker.go.set()
        other = Attempt(request(place, standstill=brief(1), handshake=brief(0.5)), 1)
        worker.finish()  # The first owner is still suspended.
        assert check_exact(place)[-1] == 2
        goodbye(place)
        assert other.returned() is None


@pytest.mark.slow
def test_a_standby_does_not_wait_for_an_owner_that_the_driver_has_given_up(tmp_path: Path) -> None:
    place = tmp_path / "place"
    patient = request(place, standstill=patience(300))
    with AnnouncedServer(tmp_path / "owner", patient, CENTER) as owner:
        until(lambda: incarnation(place))
        owner.stop()
        with AnnouncedServer(tmp_path / "next", patient, CENTER, attempt=64, given_up=1) as other:
            until(lambda: incarnation(place) == 65)
            worker = Worker(place)
            worker.finish()
            assert check_exact(place) == [65]
            goodbye(place)
            assert other.returned() is None


def test_a_newer_driver_takes_the_job_from_the_owner_and_from_its_standby(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = waits(caplog)
    owner = Attempt(request(tmp_path), 0)
    until(lambda: incarnation(tmp_path) == 1)
    with driver(tmp_path) as older:
        older.ping()
        worker = Worker(tmp_path, held=5)
        assert worker.reached.wait(patience(30))
        other = Attempt(request(tmp_path), 1)
        until(waiting)
        newer = Attempt(request(tmp_path, fresh=False, token="0000000b"), 0)
        until(lambda: incarnation(tmp_path) == 2)
        worker.go.set()
        with pytest.raises(OwnershipLostError):
            until(lambda: older.observe(1000, 0.1) is None)
        older.goodbye()
    assert owner.returned() is None
    assert lost(other.returned())
    goodbye(tmp_path)
    assert newer.returned() is None


@pytest.mark.slow
def test_a_resumed_job_with_more_epochs_keeps_them_when_its_first_attempt_dies(tmp_path: Path) -> None:
    """The first attempt dies before it has saved anything, so the next attempt finds the shorter job's snapshots."""
    place = tmp_path / "place"
    first = Attempt(request(place), 0)
    until(lambda: incarnation(place))
    Worker(place).finish()
    goodbye(place)
    assert first.returned() is None
    longer = request(place, fresh=False, token="0000000b", epochs=2)
    with AnnouncedServer(tmp_path / "longer", longer, CENTER) as server:
        until(lambda: list(place.glob("snapshot-*-0000000b-*.dks")))
        server.kill()
    for path in place.glob("snapshot-*-0000000b-*.dks"):
        path.unlink()
    again = Attempt(longer, 1)
    until(lambda: incarnation(place) == 3)
    Worker(place, epochs=2).finish()
    assert check_exact(place, epochs=2) == [1, 3]
    goodbye(place)
    assert again.returned() is None


def test_a_resumed_job_whose_first_attempt_died_before_it_claimed_is_served_by_the_next(tmp_path: Path) -> None:
    """The next attempt finds only what the earlier job saved, because no worker was served by its own job yet."""
    first = Attempt(request(tmp_path), 0)
    until(lambda: incarnation(tmp_path))
    Worker(tmp_path).finish()
    goodbye(tmp_path)
    assert first.returned() is None
    again = Attempt(request(tmp_path, fresh=False, token="0000000b", epochs=2), 1)
    until(lambda: incarnation(tmp_path) > 1)
    Worker(tmp_path, epochs=2).finish()
    goodbye(tmp_path)
    assert again.returned() is None


def test_an_attempt_of_a_superseded_job_claims_nothing(tmp_path: Path) -> None:
    """The attempt's own claims were removed meanwhile, as if it had never made one."""
    for token in ("0000000a", "0000000b", "0000000c"):
        later = SnapshotDirectory(str(tmp_path), token=token)
        later.take_over()
        for path in tmp_path.glob("*.dks"):
            if token not in path.name:
                path.unlink()
    assert lost(Attempt(request(tmp_path, fresh=False, token="0000000a"), 1).returned())


@pytest.mark.parametrize("number", [0, 1])
def test_an_attempt_claims_again_if_another_job_claims_at_the_same_moment(tmp_path: Path, number: int) -> None:
    """The other job's driver may be dead; a server next to its driver behaves in the same way."""
    world = before_access("write", "owner-", SnapshotDirectory(str(tmp_path), token="ffffffff").take_over)
    attempt = Attempt(request(tmp_path, fresh=False), number, world)
    until(lambda: incarnation(tmp_path) or not attempt.is_alive())
    assert attempt.is_alive()
    goodbye(tmp_path)
    assert attempt.returned() is None


def test_an_owner_that_has_lost_the_job_to_another_job_ends_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The announced address is the other job's server, where a driver would otherwise retry forever."""
    monkeypatch.setattr(announced, "_REFUSE_SECONDS", brief(0.2))
    owner = Attempt(request(tmp_path), 0)
    until(lambda: incarnation(tmp_path) == 1)
    worker = Worker(tmp_path, held=5)
    assert worker.reached.wait(patience(30))
    newer = Attempt(request(tmp_path, fresh=False, token="0000000b"), 0)
    until(lambda: incarnation(tmp_path) == 2)
    worker.go.set()
    assert lost(owner.returned())
    goodbye(tmp_path)
    assert newer.returned() is None


def test_an_owner_with_a_corrupt_center_ends_so_that_another_attempt_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, errors = CommitLog.add, [MemoryError("no room for a row")]

    def failing_once(log: CommitLog, *arguments: Any) -> None:
        if errors:
            raise errors.pop()
        add(log, *arguments)

    monkeypatch.setattr(CommitLog, "add", failing_once)
    owner, worker = Attempt(request(tmp_path), 0), Worker(tmp_path)
    with pytest.raises(ServerLostError, match="the center of this server is corrupt"):
        owner.returned()
    second = Attempt(request(tmp_path), 1)
    worker.finish()
    assert check_exact(tmp_path) == [2]
    goodbye(tmp_path)
    assert second.returned() is None


def test_an_owner_whose_driver_and_workers_are_gone_ends(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match="for a request to the server"):
        Attempt(request(tmp_path, silence=brief(0.5)), 0).returned()


class TestStandby:
    """What a standby concludes from the owner's files and port; the tests play the owner."""

    @contextmanager
    def owner(self, folder: Path, *, listens: bool, **announced: Any) -> Iterator[SnapshotDirectory]:
        with socket.create_server(("127.0.0.1", 0)) as port:
            address = list(port.getsockname())
            if not listens:
                port.close()
            snapshots = SnapshotDirectory(str(folder), token="0000000a")
            snapshots.take_over(attempt=0, place={"address": address})
            if announced:
                snapshots.announce({"host": address[0], "port": address[1], **announced})
            yield snapshots

    @pytest.mark.slow
    def test_a_closed_port_of_an_ending_owner_does_not_count_as_its_death(self, tmp_path: Path) -> None:
        with self.owner(tmp_path, listens=False, state="ending") as owner:
            found: list[bool] = []
            thread = threading.Thread(
                target=lambda: found.append(Standby(request(tmp_path)).wait_until_needed()), daemon=True
            )
            thread.start()
            thread.join(brief(0.5))
            assert thread.is_alive()
            owner.announce({"host": "127.0.0.1", "port": 1, "state": "ended"})
            thread.join(patience(30))
            assert found == [False]

    def test_an_owner_that_died_before_it_announced_itself_is_replaced(self, tmp_path: Path) -> None:
        with self.owner(tmp_path, listens=False):
            assert Standby(request(tmp_path, standstill=patience(300))).wait_until_needed()

    @pytest.mark.slow
    def test_an_owner_that_still_reads_its_snapshot_gets_more_time(self, tmp_path: Path) -> None:
        with self.owner(tmp_path, listens=True):
            standby = Standby(request(tmp_path, handshake=brief(0.2), standstill=brief(0.2), publish=patience(300)))
            thread = threading.Thread(target=standby.wait_until_needed, daemon=True)
            thread.start()
            thread.join(brief(1.5))
            assert thread.is_alive()

    def test_a_stranger_at_the_owners_port_is_not_taken_for_the_owner(self, tmp_path: Path) -> None:
        settings = request(tmp_path / "other", token="0000000c")
        stranger = Attempt(replace(settings, key=bytes(32)), 0)
        until(lambda: incarnation(tmp_path / "other"))
        place = present(present(owner_of(str(tmp_path / "other"))).address)
        snapshots = SnapshotDirectory(str(tmp_path / "own"), token="0000000a")
        snapshots.take_over(attempt=0, place={"address": list(place)})
        assert Standby(request(tmp_path / "own", standstill=patience(300))).wait_until_needed()
        client = DriverClient(AnnouncedAddress("", 0, bytes(32), uri=str(tmp_path / "other")), PATIENT)
        client.goodbye()
        client.close()
        assert stranger.returned() is None

    @pytest.mark.slow
    def test_the_wait_for_a_job_without_progress_has_a_deadline(self, tmp_path: Path) -> None:
        owner = Attempt(request(tmp_path), 0)
        until(lambda: incarnation(tmp_path))
        with pytest.raises(DeadlineError, match="for a commit, as the standby"):
            Standby(request(tmp_path, silence=brief(0.5))).wait_until_needed()
        goodbye(tmp_path)
        assert owner.returned() is None

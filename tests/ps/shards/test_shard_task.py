"""Shards that find their sequencer by themselves, as tasks of a cluster: each mini-batch counts once."""

from __future__ import annotations

import contextlib
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
from support.ps.toy_model import ToyReplica, batches

from distkeras.ps.checkpoint.checkpointer import Checkpoint, StartMode
from distkeras.ps.checkpoint.ownership import AnnouncedAddress, Owner, owner_of
from distkeras.ps.checkpoint.snapshots import SnapshotDirectory
from distkeras.ps.errors import DeadlineError, JobStoppedError, NonFiniteError, ServerLostError
from distkeras.ps.protocol.framing import encode
from distkeras.ps.protocol.loop import Loop
from distkeras.ps.protocol.messages import Ack, Welcome
from distkeras.ps.protocol.shard_messages import AskRole, RegisterShard, Role, TakeTickets, Tickets
from distkeras.ps.rules import make
from distkeras.ps.server.announced import serve_announced
from distkeras.ps.server.process import StartRequest, build_server
from distkeras.ps.settings import ServerSettings
from distkeras.ps.shards import shard_task
from distkeras.ps.shards.sequencer_server import SequencerDispatcher
from distkeras.ps.shards.shard import Shard
from distkeras.ps.shards.shard_task import DividedAmongTasks, ShardTask
from distkeras.ps.shards.spread_client import SpreadWorkerClient
from distkeras.ps.shards.spread_driver import SpreadDriverClient
from distkeras.ps.shards.tickets import Ticket
from distkeras.ps.transport.client import Client
from distkeras.ps.transport.driver_client import publication
from distkeras.ps.worker.loop import run_worker, work
from distkeras.ps.world.world import REAL

KEY, TOKEN = bytes(range(32)), "0000000a"
SIZE, STEPS, RATE = 64 * 1024 + 5, 24, 0.5
RULE = make("downpour", window=2)
CENTER = b"".join(encode(publication(np.zeros(SIZE, np.float32), model=b"the model")))


def request(folder: Path, token: str = TOKEN, **deadlines: float) -> StartRequest:
    settings = ServerSettings(
        RULE,
        workers=1,
        deadlines=replace(PATIENT, **deadlines),
        checkpoint=Checkpoint(str(folder), every=3),
        shards=2,
    )
    return StartRequest(settings, KEY, None, StartMode(fresh=True, same_attempts=False, epochs=1), {}, token)


class Part(threading.Thread):
    """A part of the server in a thread, until it ends by itself or `leave` is set."""

    def __init__(self, run: Callable[[Callable[[], bool]], object]) -> None:
        super().__init__(daemon=True)
        self.leave = threading.Event()
        self.error: Exception | None = None
        self._serve = run
        self.start()

    def run(self) -> None:
        try:
            self._serve(self.leave.is_set)
        except Exception as error:  # noqa: BLE001 - `ended` returns it
            self.error = error

    def ended(self) -> Exception | None:
        self.join(patience(60))
        assert not self.is_alive()
        return self.error


def sequencer(made: StartRequest, attempt: int = 0, given_up: int = 0) -> Part:
    kind = DividedAmongTasks(made)
    return Part(
        lambda ending: serve_announced(made, CENTER, attempt=attempt, given_up=given_up, ending=ending, kind=kind)
    )


def shard(made: StartRequest, number: int, require_driver: Callable[[], None] = lambda: None) -> Part:
    return Part(lambda ending: ShardTask(made, number, require_driver, ending).serve())


@contextmanager
def built(made: StartRequest, kind: DividedAmongTasks | None = None) -> Iterator[SequencerDispatcher]:
    """Run a sequencer that is not published, and announces nothing."""
    listener = REAL.listen("127.0.0.1", 0)
    server, _ = build_server(made, listener=listener, attempt=0, kind=kind or DividedAmongTasks(made))
    with server:
        assert isinstance(server.dispatcher, SequencerDispatcher)
        yield server.dispatcher


def values() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(-8, 8, SIZE).astype(np.float32) for _ in range(STEPS)]


class Worker(threading.Thread):
    """The job's worker, which waits at mini-batch ``pause`` until `go` is set."""

    def __init__(self, folder: Path, pause: int = -1) -> None:
        super().__init__(daemon=True)
        address = AnnouncedAddress("", 0, KEY, uri=str(folder))
        self._client = SpreadWorkerClient(address, worker=0, attempt=0, size=SIZE, deadlines=PATIENT)
        self.go, self.waits, self._pause = threading.Event(), threading.Event(), pause
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with contextlib.closing(self._client):
                run_worker(self._client, self._client.join(), self._begin)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def _begin(self, welcome: Welcome) -> Loop:
        replica = ToyReplica(SIZE, RATE, None, np.float32)
        return work(RULE, replica, self._batches(welcome), lambda: self._client.payload(1))

    def _batches(self, welcome: Welcome) -> Iterator[Any]:
        for batch in batches(values(), start=(welcome.epoch, welcome.batch)):
            if batch.index == self._pause:
                self.waits.set()
                assert self.go.wait(patience(60))
            yield batch

    def finish(self) -> None:
        self.go.set()
        self.join(patience(120))
        assert not self.is_alive()
        assert self.error is None


@contextmanager
def driver(folder: Path) -> Iterator[SpreadDriverClient]:
    client = SpreadDriverClient(AnnouncedAddress("", 0, KEY, uri=str(folder)), PATIENT)
    try:
        yield client
    finally:
        client.close()


def serving(folder: Path, above: int = 0) -> Owner:
    """Return the announced owner, once its incarnation is above ``above``."""
    found: list[Owner] = []

    def is_there() -> bool:
        owner = owner_of(str(folder))
        if owner is not None and owner.announced is not None and owner.claim.incarnation > above:
            found.append(owner)
        return bool(found)

    until(is_there)
    return found[0]


def claimed(folder: Path) -> Owner:
    """Return the owner once there is one."""
    until(lambda: owner_of(str(folder)) is not None)
    return present(owner_of(str(folder)))


def check_exact(folder: Path) -> None:
    """Check that each mini-batch counts once, and end the job."""
    with driver(folder) as client:
        np.testing.assert_array_equal(client.center().center, -RATE * np.sum(values(), axis=0))
        assert client.ping().batches == STEPS
        client.goodbye()


def test_a_job_ends_with_its_shards_and_with_a_copy_that_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = request(tmp_path)
    parts = [shard(made, 1), sequencer(made), shard(made, 0)]
    serving(tmp_path)
    copies = [shard(made, 0), sequencer(made, attempt=1)]
    worker = Worker(tmp_path, pause=10)
    assert worker.waits.wait(patience(60))
    worker.finish()
    assert serving(tmp_path).claim.incarnation == 1
    check_exact(tmp_path)
    assert [part.ended() for part in parts + copies] == [None] * 5
    assert not [record for record in caplog.records if getattr(record, "event", None) in ("restart", "standstill")]


@pytest.mark.parametrize(
    "victim",
    [
        "sequencer",
        "shard",
        pytest.param("shard with a copy", marks=pytest.mark.slow),
        pytest.param("stopped shard", marks=pytest.mark.slow),
        pytest.param("stopped sequencer", marks=pytest.mark.slow),
    ],
)
def test_a_killed_task_loses_nothing(victim: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    stopped = victim.startswith("stopped")
    made = request(folder, standstill=brief(1)) if stopped else request(folder)

    with ExitStack() as stack:

        def start(name: str, number: int | None, attempt: int = 0) -> AnnouncedServer:
            return stack.enter_context(AnnouncedServer(tmp_path / name, made, CENTER, attempt, shard=number))

        processes = {"sequencer": start("sequencer", None), "shard": start("shard-0", 0)}
        start("shard-1", 1)
        first = serving(folder).claim.incarnation
        if victim.endswith("copy"):
            start("copy", 0)
        worker = Worker(folder, pause=14)
        assert worker.waits.wait(patience(60))
        process = processes["sequencer" if "sequencer" in victim else "shard"]
        process.stop() if stopped else process.kill()
        if victim in ("shard", "shard with a copy", "stopped shard"):
            # The sequencer ends with the shard, and Spark runs the tasks again.
            processes["sequencer"].process.wait(patience(60))
            assert processes["sequencer"].process.returncode != 0
        if victim in ("shard", "stopped shard"):
            start("shard-0 again", 0, 1)
        start("sequencer again", None, 1)
        assert serving(folder, first).claim.incarnation > first
        worker.finish()
        check_exact(folder)


@pytest.mark.slow
def test_shards_leave_a_sequencer_that_another_one_has_replaced(tmp_path: Path) -> None:
    """The earlier one runs on: it has not saved since, and so has not found the claim of the other one."""
    made = request(tmp_path)
    earlier, shards = sequencer(made), [shard(made, number) for number in range(2)]
    first = serving(tmp_path).claim.incarnation
    later = sequencer(made, attempt=1, given_up=first)
    assert serving(tmp_path, first).claim.incarnation > first
    worker = Worker(tmp_path)
    worker.finish()
    check_exact(tmp_path)
    assert [part.ended() for part in (later, *shards)] == [None] * 3
    assert isinstance(earlier.ended(), ServerLostError)


@pytest.mark.slow
def test_a_shard_that_must_end_lets_the_sequencer_save_all_commits(tmp_path: Path) -> None:
    made = request(tmp_path)
    first, shards = sequencer(made), [shard(made, number) for number in range(2)]
    incarnation = serving(tmp_path).claim.incarnation
    worker = Worker(tmp_path, pause=14)
    assert worker.waits.wait(patience(60))
    with driver(tmp_path) as client:
        clock = client.ping().clock
    shards[0].leave.set()
    errors = [first.ended(), shards[0].ended()]
    assert [type(error) for error in errors] == [ServerLostError] * 2
    again = [sequencer(made, attempt=1), shard(made, 0)]
    serving(tmp_path, incarnation)
    with driver(tmp_path) as client:
        assert client.ping().clock == clock
    worker.finish()
    check_exact(tmp_path)
    assert [part.ended() for part in (*again, shards[1])] == [None] * 3


@pytest.mark.slow
def test_a_shard_looks_for_a_server_of_its_own_job_until_a_deadline(tmp_path: Path) -> None:
    made = request(tmp_path, rows=brief(2))
    other = request(tmp_path, token="0000000b")
    running = sequencer(other)
    claimed(tmp_path)
    error = shard(made, 0).ended()
    assert isinstance(error, DeadlineError)
    assert "for a server of this job that needs shard 0" in error.message
    running.leave.set()
    assert isinstance(running.ended(), ServerLostError)


def test_a_shard_of_a_dead_driver_ends(tmp_path: Path) -> None:
    def require_driver() -> None:
        raise ServerLostError("the driver has ended")

    error = shard(request(tmp_path), 0, require_driver).ended()
    assert isinstance(error, ServerLostError)
    assert error.message == "the driver has ended"


def test_a_shard_of_an_ended_job_ends(tmp_path: Path) -> None:
    snapshots = SnapshotDirectory(str(tmp_path), token=TOKEN)
    snapshots.take_over()
    snapshots.announce({"host": "127.0.0.1", "port": 1, "report": "", "state": "ended"})
    assert shard(request(tmp_path), 0).ended() is None


@pytest.mark.slow
def test_a_copy_waits_while_the_last_snapshot_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark would kill the process that writes it if the copy had succeeded."""
    snapshots = SnapshotDirectory(str(tmp_path), token=TOKEN)
    snapshots.take_over()
    place = {"host": "127.0.0.1", "port": 1, "report": ""}
    snapshots.announce(place | {"state": "ending"})
    looks = list[None]()
    copy = shard(request(tmp_path), 0, lambda: looks.append(None))
    until(lambda: len(looks) >= 3)
    assert copy.is_alive()
    snapshots.announce(place | {"state": "ended"})
    assert copy.ended() is None
    snapshots.announce(place | {"state": "ending"})
    monkeypatch.setattr(shard_task, "END_SAVING", brief(0.1))
    assert shard(request(tmp_path), 0).ended() is None


@pytest.mark.slow
def test_a_shard_that_cannot_restore_asks_the_sequencer_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = request(tmp_path)
    with built(made) as dispatcher:
        role = dispatcher.role
        dispatcher.role = replace(role, snapshot="000001-0000000a-00000001")
        shards = [shard(made, number) for number in range(2)]
        until(lambda: "leaves its sequencer: shard 1 cannot restore" in caplog.text)
        dispatcher.role = role
        assert dispatcher.wait_for_shards(patience(60))
        for part in shards:
            part.leave.set()
    assert [type(part.ended()) for part in shards] == [ServerLostError] * 2


@pytest.mark.slow
def test_a_shard_that_still_writes_for_a_replaced_sequencer_joins_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = request(tmp_path)
    hasty = replace(made, settings=replace(made.settings, deadlines=replace(PATIENT, close=brief(0.2))))
    writes, go, save = threading.Event(), threading.Event(), SnapshotDirectory.save_part

    def save_part(*arguments: Any) -> str:
        if not writes.is_set():
            writes.set()
            assert go.wait(patience(120))
        return save(*arguments)

    monkeypatch.setattr(SnapshotDirectory, "save_part", save_part)
    earlier, shards = sequencer(made), [shard(hasty, number) for number in range(2)]
    first = serving(tmp_path).claim.incarnation
    worker = Worker(tmp_path)
    assert writes.wait(patience(60))
    later = sequencer(made, attempt=1, given_up=first)
    assert serving(tmp_path, first).claim.incarnation > first
    go.set()
    worker.finish()
    check_exact(tmp_path)
    assert [part.ended() for part in (later, *shards)] == [None] * 3
    # It has lost its shards, or has found the new claim first, and was the standby of the later one.
    assert earlier.ended() is None or isinstance(earlier.error, ServerLostError)


@pytest.mark.slow
def test_a_sequencer_without_driver_and_workers_ends_although_it_has_shards(tmp_path: Path) -> None:
    made = request(tmp_path, silence=brief(3))
    running, shards = sequencer(made), [shard(made, number) for number in range(2)]
    until(lambda: not running.is_alive(), 15)
    assert isinstance(running.error, DeadlineError)
    assert "for a request to the server" in running.error.message
    for part in shards:
        part.leave.set()
    assert [type(part.ended()) for part in shards] == [ServerLostError] * 2


@pytest.mark.slow
def test_a_shard_leaves_when_a_job_ends_that_failed_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no tickets any more from which it would see that the job is over."""
    monkeypatch.setattr(shard_task, "_END", patience(600))  # the sequencer waits for its shards

    def apply(self: Shard, ticket: Ticket) -> None:
        if threading.current_thread().name == "shard-0-tickets":
            raise NonFiniteError("the center is not finite")
        whole(self, ticket)

    whole = Shard.apply
    monkeypatch.setattr(Shard, "apply", apply)
    made = request(tmp_path)
    parts = [sequencer(made), shard(made, 0), shard(made, 1)]
    serving(tmp_path)
    worker = Worker(tmp_path)
    worker.join(patience(120))
    assert isinstance(worker.error, (JobStoppedError, NonFiniteError))
    with driver(tmp_path) as client:
        client.goodbye()
    until(lambda: not any(part.is_alive() for part in parts), 15)
    assert [part.error for part in parts] == [None] * 3


def test_a_sequencer_that_starts_without_a_snapshot_sends_the_name_of_none(tmp_path: Path) -> None:
    """One kind makes all servers of a task."""
    made = request(tmp_path / "saved")
    parts = [sequencer(made), shard(made, 0), shard(made, 1)]
    serving(tmp_path / "saved")
    Worker(tmp_path / "saved").finish()
    check_exact(tmp_path / "saved")
    assert [part.ended() for part in parts] == [None] * 3
    kind = DividedAmongTasks(made)
    names = list[str]()
    for again in (
        replace(request(tmp_path / "saved", "0000000b"), mode=StartMode(epochs=2)),
        request(tmp_path / "empty"),
    ):
        with built(again, kind) as dispatcher:
            names.append(dispatcher.role.snapshot)
    assert [bool(name) for name in names] == [True, False]


def test_a_process_without_the_role_of_a_shard_is_sent_away(tmp_path: Path) -> None:
    made = request(tmp_path)
    running = sequencer(made)
    address = made.address_at(*present(claimed(tmp_path).address))
    with ExitStack() as stack:
        first, second = (stack.enter_context(contextlib.closing(Client(address, PATIENT))) for _ in range(2))
        role = first.request(AskRole(0, 1), Role)
        assert (role.incarnation, role.claim, role.snapshot, role.epochs) == (1, f"000001-{TOKEN}", "", 1)
        assert isinstance(second.request(AskRole(0, 2), (Role, Ack)), Ack)
        for message in (RegisterShard(0, "127.0.0.1", 1, 1, 2), TakeTickets(0, 0, 0.0, 1, process=2)):
            with pytest.raises(ServerLostError, match=r"shard 0 must be process 1\. Received: process 2"):
                second.request(message, (Ack, Tickets))
        first.close()  # before it has registered: nothing is lost
        until(lambda: isinstance(second.request(AskRole(0, 2), (Role, Ack)), Role))
        second.request(RegisterShard(0, "127.0.0.1", 1, 1, 2), Ack)
    error = running.ended()
    assert isinstance(error, ServerLostError)
    assert "another one starts from the latest snapshot" in error.message


@pytest.mark.slow
def test_shards_that_do_not_come_are_waited_for_until_a_deadline(tmp_path: Path) -> None:
    error = sequencer(request(tmp_path, rows=brief(1))).ended()
    assert isinstance(error, DeadlineError)
    assert "for the shards: each needs a slot" in error.message

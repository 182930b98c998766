"""A killed server process continues from its snapshots: nothing is lost, and nothing is counted twice."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, brief, patience, until
from support.present import present
from support.ps.forgetful_server import Forgetful
from support.ps.frames import some_commit
from support.ps.running_server import WorkerThread
from support.ps.served_job import ServedJob, batches_in
from support.ps.toy_model import toy_client

from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import (
    ConfigurationError,
    DifferentJobError,
    JobStoppedError,
    OwnershipLostError,
    ServerLostError,
)
from distkeras.ps.protocol.messages import CenterReply
from distkeras.ps.rules import Rule, make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.training.supervisor import Supervisor

SIZE = 501
#: Whole numbers, so that every order of addition gives the same sums in float32.
VALUES = [float(number + 1) for number in range(40)]


class Job(ServedJob):
    """A job of two workers that add whole numbers; ``options`` are those of a worker or of the server's process."""

    def __init__(
        self,
        folder: Path,
        rule: Rule | None = None,
        *,
        workers: int = 2,
        every: int = 3,
        eta: float = 1.0,
        epochs: int = 1,
        **options: Any,
    ) -> None:
        self.rule = rule or make("downpour", window=2)
        self._options: dict[str, Any] = {"eta": eta, "epochs": epochs}
        self._options |= {name: options.pop(name) for name in ("overlap", "wire_format") if name in options}
        rate = eta if self.rule.traits.gradient else None
        checkpoint = Checkpoint(str(folder), every=every)
        settings = ServerSettings(
            self.rule, workers=workers, learning_rate=rate, deadlines=PATIENT, checkpoint=checkpoint
        )
        super().__init__(settings, epochs=epochs, **options)

    def publish(self, driver: DriverClient) -> None:
        driver.publish(np.zeros(SIZE, np.float32), model=b"the model")

    def start(self, worker: int, values: Sequence[float] = VALUES, **options: Any) -> WorkerThread:
        """Start a worker; ``options`` are those of `toy_client`."""
        options |= {"size": SIZE, "deadlines": PATIENT, **self._options}
        started = WorkerThread(lambda: toy_client(self.process.address, self.rule, values, worker=worker, **options))
        self.workers.append(started)
        return started


def check_exact(job: Job, workers: int = 2, epochs: int = 1) -> None:
    """Check that the ledger and, by its sum, the center contain every mini-batch once."""
    commits = job.commits()
    assert commits["clock"].tolist() == list(range(len(commits)))
    for worker in range(workers):
        assert job.batches_of(worker) == [(epoch, batch) for epoch in range(epochs) for batch in range(len(VALUES))]
    if job.rule.name == "downpour":
        expected = np.full(SIZE, -epochs * workers * sum(VALUES), np.float32)
        np.testing.assert_array_equal(job.driver.center().center, expected)


def gated(gate: threading.Event, due: Callable[[float], bool]) -> Callable[..., Any]:
    """Return a worker's gradient function that waits for ``gate`` at the mini-batches that are ``due``.

    A restarted server repeats mini-batches, so that a number of steps would not say where a worker is.
    """

    def gradient(theta: np.ndarray, value: float) -> np.ndarray:
        assert not due(value) or gate.wait(patience(60))
        return np.full(theta.shape, value)

    return gradient


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(
            pytest.param(rule, {}, marks=pytest.mark.slow)
            for rule in ("dana_zero", "ssgd", "downpour", "aeasgd", "ormo", "easgd")
        ),
        *(pytest.param(rule, {"overlap": True}, marks=pytest.mark.slow) for rule in ("downpour", "asgd")),
        # bfloat16 represents the whole numbers up to 256 exactly.
        pytest.param("downpour", {"wire_format": "bfloat16"}, marks=pytest.mark.slow),
        ("asgd", {"wire_format": "int8"}),
    ],
)
def test_every_batch_counts_once_after_two_restarts(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    rule = make(name) if make(name).traits.gradient else make(name, window=1)
    gate = threading.Event()
    with Job(tmp_path, rule, every=7, eta=1.0 if rule.name == "downpour" else 0.1, **options) as job:
        for worker in range(2):
            job.start(worker, gradient=gated(gate, lambda value: value > 30))
        job.at_clock(10)
        job.kill()
        job.revive()
        job.at_clock(25)
        job.kill()
        job.revive()
        gate.set()
        job.join()
        check_exact(job)
        status = job.driver.observe(-1, 0.0)
        assert (status.saved_clock, status.saved_seconds >= 0.0) == (status.clock, True)
        assert max(job.commits()["incarnation"]) == 3


def test_a_server_that_dies_before_its_first_snapshot_starts_over(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.kill()
        for path in tmp_path.iterdir():
            path.unlink()
        job.start(0)
        job.revive()
        assert job.process.resumed is None
        job.start(1)
        job.join()
        check_exact(job)
        assert set(job.commits()["incarnation"]) == {2}


@pytest.mark.slow
def test_a_running_job_ignores_a_late_snapshot_of_an_older_server(tmp_path: Path) -> None:
    """The older server wrote before it found the higher claim; the newer one dies before its first snapshot."""
    place = tmp_path / "place"
    with Job(tmp_path / "older", job={"batch_size": 4}) as older:
        at_snapshot(tmp_path / "older")
        older.kill()
        with Job(place, job={"batch_size": 8}) as job:
            job.kill()
            for path in place.glob("snapshot-*.dks"):
                path.unlink()
            late = next(iter((tmp_path / "older").glob("snapshot-*.dks")))
            late.rename(place / late.name)
            job.revive()
            assert job.process.resumed is None
            for worker in range(2):
                job.start(worker)
            job.join()
            check_exact(job)


def test_a_damaged_snapshot_is_skipped(tmp_path: Path) -> None:
    gate = threading.Event()
    with Job(tmp_path, every=5) as job:
        for worker in range(2):
            job.start(worker, gradient=gated(gate, lambda value: value > 30))
        until(lambda: len(list(tmp_path.glob("snapshot-*.dks"))) >= 2)
        job.kill()
        gate.set()
        latest = sorted(tmp_path.glob("snapshot-*.dks"))[-1]
        content = bytearray(latest.read_bytes())
        content[len(content) // 2] ^= 1
        latest.write_bytes(content)
        job.revive()
        assert present(job.process.resumed).clock < int(latest.stem.split("-")[-1])
        job.join()
        check_exact(job)


def test_a_worker_ends_once_a_snapshot_covers_its_last_commit(tmp_path: Path) -> None:
    with Job(tmp_path, workers=1, every=1000) as job:
        job.start(0)
        job.join()
        job.kill()
        job.revive()
        assert present(job.process.resumed).clock == 20
        check_exact(job, workers=1)
        client, welcome, _ = toy_client(job.process.address, job.rule, VALUES, worker=0, attempt=1, size=SIZE)
        assert welcome.finished
        client.close()


def test_a_reply_contains_the_number_of_the_last_durable_commit(tmp_path: Path) -> None:
    with Job(tmp_path, workers=1, every=1000) as job:
        at_snapshot(tmp_path)
        client = WorkerClient(job.process.address, worker=0, attempt=0, size=SIZE, deadlines=PATIENT)
        client.join()
        client.pull()
        reply = client.request(some_commit(np.ones(SIZE, np.float32)), CenterReply)
        assert (reply.sequence, reply.durable) == (1, 0)
        client.close()


@pytest.mark.slow
def test_workers_do_not_end_before_a_snapshot_can_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    with Job(folder, workers=1, every=1000) as job:
        at_snapshot(folder)
        folder.rename(tmp_path / "away")  # Like on a full disk, nothing can be written.
        thread = job.start(0)
        until(lambda: job.driver.observe(-1, 1.0).finished == 1)
        # The partition has ended for the successor, too, only once a snapshot covers it.
        successor = job.start(0, attempt=1)
        for waiting in (thread, successor):
            waiting.join(brief(0.5))
            assert waiting.is_alive()
        (tmp_path / "away").rename(folder)
        job.join()
        check_exact(job, workers=1)


def test_a_job_without_snapshots_ends_with_its_server() -> None:
    with ServerProcess(ServerSettings(make("downpour"), workers=1, deadlines=PATIENT)) as process:
        os.kill(process.pid, signal.SIGKILL)
        assert process.exited(patience(10))
        with pytest.raises(ServerLostError, match="no `checkpoint` to restart it from"):
            process.restart()


class TestResume:
    """Resuming with another driver, other attempts, another port and key, from the same snapshots."""

    def interrupted(self, folder: Path, **options: Any) -> int:
        """Run a job that ends with its driver during the second epoch; return the clock of its last snapshot."""
        gate = threading.Event()
        with Job(folder, epochs=2, **options) as job:
            for worker in range(2):
                taken = itertools.count()
                due = lambda _, taken=taken: next(taken) >= 60  # noqa: E731 - a name makes no shorter test
                job.start(worker, attempt=100 + worker, gradient=gated(gate, due))
            job.at_clock(60)
            job.process.close()
            gate.set()
            clock = max(int(path.stem.split("-")[-1]) for path in folder.glob("snapshot-*.dks"))
        return clock

    def test_a_job_with_the_same_number_of_workers_resumes_exactly(self, tmp_path: Path) -> None:
        clock = self.interrupted(tmp_path)
        with Job(tmp_path, resume=True, epochs=2) as job:
            assert present(job.process.resumed).exact
            assert present(job.process.resumed).clock == clock == 60
            for worker in range(2):
                job.start(worker, attempt=worker)
            job.join()
            check_exact(job, epochs=2)
            assert set(job.commits()["incarnation"]) == {1, 2}

    @pytest.mark.slow
    def test_a_job_with_another_number_of_workers_resumes_with_the_first_epoch_that_has_not_ended(
        self, tmp_path: Path
    ) -> None:
        clock = self.interrupted(tmp_path)
        with Job(tmp_path, workers=3, resume=True, epochs=2) as job:
            resumed = present(job.process.resumed)
            assert (resumed.exact, resumed.clock, resumed.epoch) == (False, clock, 1)
            for worker in range(3):
                job.start(worker)
            job.join()
            commits = job.commits()
            assert len(commits) > clock
            for worker in range(3):
                new = batches_in(commits[clock:][commits[clock:]["worker"] == worker])
                assert new == [(1, batch) for batch in range(len(VALUES))]

    @pytest.mark.slow
    def test_a_resumed_job_with_more_epochs_trains_them(self, tmp_path: Path) -> None:
        with Job(tmp_path, make("dana_zero"), eta=0.1) as job:
            for worker in range(2):
                job.start(worker)
            job.join()
        with Job(tmp_path, make("dana_zero"), eta=0.1, resume=True, epochs=2) as job:
            for worker in range(2):
                job.start(worker)
            job.join()
            check_exact(job, epochs=2)

    def test_a_restarted_server_trains_the_number_of_epochs_of_its_start(self, tmp_path: Path) -> None:
        """The server of the longer job dies before it saves anything, so only the shorter job's snapshots remain."""
        with Job(tmp_path, every=1) as job:
            for worker in range(2):
                job.start(worker, attempt=100 + worker)
            job.join()
        shorter = set(tmp_path.glob("snapshot-*.dks"))
        with Job(tmp_path, resume=True, epochs=2) as job:
            at_snapshot(tmp_path, beside=shorter)
            job.kill()
            for path in set(tmp_path.glob("snapshot-*.dks")) - shorter:
                path.unlink()
            job.revive()
            for worker in range(2):
                job.start(worker, attempt=worker)
            job.join()
            check_exact(job, epochs=2)

    @pytest.mark.slow
    def test_a_partition_without_rows_stays_ended_after_a_restart(self, tmp_path: Path) -> None:
        """The partition's task has returned; if the partition were open again, a round would wait for it forever."""
        with Job(tmp_path, make("ssgd"), eta=0.1) as job:
            job.start(1, [])
            job.start(0)
            job.join()
        with Job(tmp_path, make("ssgd"), eta=0.1, resume=True, epochs=2) as job:
            gate = threading.Event()
            empty = job.start(1, [])
            job.start(0, gradient=gated(gate, lambda value: value > 5))
            assert empty.ended() is None
            job.kill()
            job.revive()
            gate.set()
            job.join()
            assert job.batches_of(0) == [(epoch, batch) for epoch in range(2) for batch in range(len(VALUES))]

    @pytest.mark.slow
    def test_snapshots_of_another_job_are_refused(self, tmp_path: Path) -> None:
        with Job(tmp_path, job={"batch_size": 4}):
            at_snapshot(tmp_path)
        with pytest.raises(ConfigurationError, match="must be an empty directory"):
            Job(tmp_path)
        with pytest.raises(DifferentJobError, match="`batch_size` must be 4, as in the job"):
            Job(tmp_path, resume=True, job={"batch_size": 8})
        with pytest.raises(DifferentJobError, match=r"`rule\.name` must be 'downpour'"):
            Job(tmp_path, make("agn"), resume=True, job={"batch_size": 4})


class TestTwoDrivers:
    """Two drivers continue one job, because a cluster manager has started the second while the first still lives."""

    def test_the_newer_driver_owns_the_job_and_the_older_driver_receives_an_error(self, tmp_path: Path) -> None:
        gate = threading.Event()
        with Job(tmp_path, every=1) as older:
            for worker in range(2):
                older.start(worker, attempt=100 + worker, gradient=gated(gate, lambda value: value > 20))
            older.at_clock(8)
            with Job(tmp_path, every=1, resume=True) as newer:
                gate.set()  # The older job's workers continue to the end of their data.
                with pytest.raises(OwnershipLostError, match=f"of process {newer.process.pid} on .*, since"):
                    until(lambda: older.driver.observe(1000, 0.1) is None)
                # No worker has ended successfully.
                assert [type(worker.ended()) for worker in older.workers] == [JobStoppedError] * 2
                older.kill()
                with pytest.raises(OwnershipLostError, match=f"of process {newer.process.pid} on .*, since"):
                    older.process.restart()
                for worker in range(2):
                    newer.start(worker)
                newer.join()
                check_exact(newer)


def at_snapshot(folder: Path, beside: Collection[Path] = ()) -> None:
    """Wait for the first snapshot that is not one of ``beside``."""
    until(lambda: set(folder.glob("snapshot-*.dks")) - set(beside))


def test_a_commit_that_is_applied_in_part_is_not_in_the_result(tmp_path: Path) -> None:
    with Job(tmp_path, every=2, world=Forgetful()) as job, Supervisor(job.process, job.publish) as server:
        for worker in range(2):
            job.start(worker)
        while any(thread.is_alive() for thread in job.workers):
            server.watch()
            job.workers[0].join(0.05)
        job.join()
        job.driver.close()  # It was connected to the previous server.
        check_exact(job)
        assert server.restarts == 1

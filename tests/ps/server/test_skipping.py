"""Commits that are skipped, refused, or fail partway, and a job that ends early."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from support.patience import PATIENT, brief, patience
from support.ps import forgetful_server
from support.ps.running_server import KEY, Running, WorkerThread
from support.ps.toy_model import Connected, Gradient, toy_client

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import JobStoppedError, LocalProtocolError, NodeError, NonFiniteError, ServerLostError
from distkeras.ps.protocol.compression import FORMATS, WorkerFormat
from distkeras.ps.protocol.layout import Layout
from distkeras.ps.rules import Rule, center_rules, make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.server.start_report import started_from_json
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import run_worker
from distkeras.training.supervisor import Supervisor

SIZE = 11
#: Names of the arrays that the toy vector is made of.
LAYOUTS = (Layout(("first/kernel", "first/bias"), ((2, 4), (3,))), Layout((), ()))


def gradient_with_nan(theta: np.ndarray, value: float) -> np.ndarray:
    """Return the batch's absolute value as the gradient, with NaN in its ninth element if the value is negative."""
    gradient = np.full(theta.shape, abs(value))
    if value < 0:
        gradient[8] = np.nan
    return gradient


def train(running: Running, data: list[list[float]], eta: float = 1.0) -> list[Any]:
    """Train a worker on each list in ``data``; return the errors."""
    workers = [
        running.train(worker, values, size=SIZE, eta=eta, gradient=gradient_with_nan)
        for worker, values in enumerate(data)
    ]
    return [error for error in (worker.ended() for worker in workers) if error is not None]


def running(name: str, workers: int, max_skipped: int, **hyper: Any) -> Running:
    return Running(
        make(name, **hyper),
        workers=workers,
        size=SIZE,
        deadlines=PATIENT,
        eta=1.0,
        max_skipped=max_skipped,
        layouts=LAYOUTS,
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", list(center_rules()))
def test_every_rule_continues_after_a_skipped_commit(name: str) -> None:
    """This includes rounds that wait for a worker whose contribution is skipped, and rounds without contributions."""
    with running(name, 2, 10) as server:
        if not server.rule.traits.gradient:
            server.rule = make(name, window=1)
        assert train(server, [[1.0, -1.0, 1.0, -1.0], [1.0, 1.0, 1.0, -1.0]], eta=0.1) == []
        commits = server.driver.drain().commits.view(COMMIT)
        for worker, skipped in ((0, [0, 1, 0, 1]), (1, [0, 0, 0, 1])):
            own = commits[commits["worker"] == worker]
            assert own["first_batch"].tolist() == own["last_batch"].tolist() == [0, 1, 2, 3]
            assert own["skipped"].tolist() == skipped
            assert own["sequence"].tolist() == [1, 2, 3, 4]
        applied = commits[commits["skipped"] == 0]
        assert applied["clock"].tolist() == list(range(5))
        center = server.driver.center()
        assert center.clock == 5
        assert np.isfinite(center.center).all()
        assert np.abs(center.center).max() > 0


@pytest.mark.timeout(60)
def test_a_skipped_commit_does_not_change_the_center() -> None:
    with running("downpour", 1, 1, window=1) as server:
        assert train(server, [[1.0, 2.0, -4.0, 8.0]]) == []
        np.testing.assert_array_equal(server.driver.center().center, np.full(SIZE, -11.0))


@pytest.mark.timeout(60)
def test_a_round_is_divided_by_the_number_of_contributions() -> None:
    with running("ssgd", 2, 1) as server:
        assert train(server, [[1.0, -2.0], [3.0, 5.0]]) == []
        np.testing.assert_array_equal(server.driver.center().center, np.full(SIZE, -(1.0 + 3.0) / 2 - 5.0))


@pytest.mark.timeout(60)
def test_one_skip_too_many_ends_the_job_and_names_the_array() -> None:
    with running("downpour", 1, 2) as server:
        (error,) = train(server, [[1.0, -1.0, -1.0, -1.0, 1.0]])
        assert type(error) is NonFiniteError
        assert (error.worker, error.step) == (0, 3)
        assert "nan in first/bias (element 8)" in error.message
        assert "after 2 commits that were skipped" in error.message
        with pytest.raises(NonFiniteError):
            server.driver.observe(-1, 0.0)


@pytest.mark.timeout(60)
def test_no_commit_is_skipped_by_default() -> None:
    with running("downpour", 2, 0) as server:
        errors = train(server, [[-1.0], [1.0] * 1000])
        assert {type(error) for error in errors} <= {NonFiniteError, JobStoppedError}
        assert NonFiniteError in {type(error) for error in errors}
        np.testing.assert_array_equal(server.driver.drain().commits.view(COMMIT)["skipped"], 0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["downpour", "aeasgd"])
def test_a_worker_whose_reply_is_lost_does_not_take_its_skipped_commit_for_applied(name: str) -> None:
    """The welcome over the new connection reports that the commit was skipped."""
    with running(name, 1, 5, window=1) as server:
        client, welcome, begin = toy_client(
            server.address,
            server.rule,
            [1.0, -1.0, 1.0],
            worker=0,
            size=SIZE,
            eta=0.1,
            gradient=gradient_with_nan,
            deadlines=PATIENT,
        )
        began = []
        cut: list[bool] = []
        call = client.request

        def call_and_lose(message: Any, *args: Any) -> Any:
            answer = call(message, *args)
            if getattr(answer, "skipped", False) and type(message).__name__ == "Commit" and not cut:
                cut.append(True)
                client.close()
                raise ServerLostError("the answer never arrives")
            return answer

        client.request = cast("Any", call_and_lose)
        run_worker(client, welcome, lambda place: began.append(place.batch) or begin(place))
        client.close()
        assert cut == [True]
        assert began == [0, 2]
        assert server.driver.drain().commits.view(COMMIT)["skipped"].tolist() == [0, 1, 0]


REFUSED_SIZE = 4


def negative(taken: list[float]) -> Gradient:
    """Return a gradient function that adds each value to ``taken``, and returns minus the value."""

    def gradient(theta: np.ndarray, value: float) -> np.ndarray:
        taken.append(value)
        return np.full(theta.shape, -value)

    return gradient


@pytest.mark.parametrize("wire_format", FORMATS)
def test_the_mini_batches_of_a_refused_commit_are_computed_again_and_counted_once(wire_format: str) -> None:
    rule = make("ringmaster", window=2, threshold=1, patience=None)
    with Running(rule, workers=2, size=REFUSED_SIZE, start=np.zeros(REFUSED_SIZE)) as running:
        taken: list[float] = []
        values = [[1.0, 2.0, 4.0, 8.0], [16.0, 32.0, 64.0, 128.0]]
        slow, fast = (
            running.turns(
                worker,
                own,
                size=REFUSED_SIZE,
                eta=1.0,
                gradient=negative([] if worker else taken),
                wire_format=wire_format,
            )
            for worker, own in enumerate(values)
        )
        turns = [fast, slow, fast, slow, slow, slow]
        assert [worker.turn().refused for worker in turns] == [False, True, False, True, False, False]
        assert taken == [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 4.0, 8.0]
        np.testing.assert_allclose(running.driver.center().center, 255.0, rtol=0.02 if wire_format != "float32" else 0)
        rows = running.driver.drain().commits.view(COMMIT)
        assert rows[["worker", "sequence", "first_batch"]].tolist() == [(1, 1, 0), (1, 2, 2), (0, 3, 0), (0, 4, 2)]
        fast.client.close()


def test_the_residual_after_a_refusal_equals_the_residual_before_the_commit() -> None:
    rng = np.random.default_rng(1)
    first, refused, again = (rng.normal(size=300).astype(np.float32) for _ in range(3))
    disturbed, plain = WorkerFormat("int8", 300), WorkerFormat("int8", 300)
    for one in (disturbed, plain):
        one.encode((first,))
    disturbed.encode((refused,))
    disturbed.restore_residuals((refused,))
    np.testing.assert_allclose(disturbed._residuals[0], plain._residuals[0], atol=1e-6)  # noqa: SLF001 - the residual
    assert np.abs(disturbed._residuals[0]).max() > 1e-3  # noqa: SLF001 - the residual
    np.testing.assert_array_equal(disturbed.encode((again,))[0], plain.encode((again,))[0])


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
        assert isinstance(running.train(0, [np.ones(1, np.float32)]).ended(), expected)
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
        report = started_from_json(server.stdout.readline())
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


ENDLESS = [1.0] * 100_000


def endless(address: Address, rule: Rule, worker: int, **options: Any) -> Connected:
    """Connect a worker that has more data than it will ever train on."""
    return toy_client(address, rule, ENDLESS, worker=worker, size=SIZE, deadlines=PATIENT, **options)


class Workers:
    """Workers in threads, each with more data than it will ever train on."""

    def __init__(self, address: Address, rule: Rule, numbers: list[int], **options: Any) -> None:
        self.clients: list[WorkerClient] = []

        def connect(number: int) -> Connected:
            connected = endless(address, rule, number, **options)
            self.clients.append(connected[0])
            return connected

        self.workers = [WorkerThread(functools.partial(connect, number)) for number in numbers]

    def join(self) -> None:
        assert [worker.ended() for worker in self.workers] == [None] * len(self.workers)
        assert all(client.stopping for client in self.clients)


def assert_prefixes(driver: DriverClient, workers: int) -> np.ndarray:
    """Check that each worker's commits cover its first mini-batches without gap or repetition; return all commits."""
    commits = driver.drain(count=10**6).commits.view(COMMIT)
    for worker in range(workers):
        own = commits[commits["worker"] == worker]
        ranges = [b for row in own for b in range(row["first_batch"], row["last_batch"] + 1)]
        assert ranges == list(range(len(ranges)))
    return commits


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["downpour", "aeasgd", "averaging", "ssgd", "dana_zero"])
def test_workers_leave_after_their_current_commit(name: str) -> None:
    rule = make(name) if make(name).traits.gradient else make(name, window=2)
    with Running(rule, workers=2, size=SIZE, deadlines=PATIENT) as running:
        workers = Workers(running.address, rule, [0, 1])
        while running.driver.observe(20, 1.0).clock <= 20:
            pass
        running.driver.finish("enough")
        workers.join()
        status = running.driver.observe(-1, 0.0)
        assert (status.joined, status.finished) == (2, 2)
        commits = assert_prefixes(running.driver, 2)
        assert len(commits) == status.clock < 50_000
        late = running.client(worker=0, attempt=7, size=SIZE)
        welcome = late.join()  # A task that Spark retries ends at once.
        assert welcome.finished
        assert welcome.stopping
        late.close()


@pytest.mark.timeout(60)
def test_workers_that_wait_for_others_to_join_end() -> None:
    """Two of three workers have a slot, and the deadline for the third to join is far away."""
    rule = make("averaging", window=2)
    with Running(rule, workers=3, size=SIZE, deadlines=PATIENT) as running:
        workers = Workers(running.address, rule, [0, 1])
        while running.driver.observe(-1, 0.0).joined < 2:
            pass
        running.driver.finish("enough")
        workers.join()
        Workers(running.address, rule, [2]).join()
        assert running.driver.observe(-1, 0.0).finished == 3
        assert len(running.driver.drain().commits) == 0


@pytest.mark.timeout(60)
def test_a_round_ends_when_the_successor_of_a_dead_worker_leaves() -> None:
    """Worker 0 waits in a round; worker 1 dies, and its successor leaves at once, which ends the round."""
    rule = make("ssgd")
    with Running(rule, workers=2, size=SIZE, deadlines=PATIENT) as running:
        dying, welcome, _ = endless(running.address, rule, 1)
        workers = Workers(running.address, rule, [0])
        assert not welcome.finished
        dying.pull()
        while running.driver.observe(0, 1.0).clock < 1:
            pass
        running.driver.finish("enough")
        dying.close()
        successor = Workers(running.address, rule, [1], attempt=3)
        successor.join()
        workers.join()
        commits = assert_prefixes(running.driver, 2)
        assert commits["worker"].tolist() == [0]
        np.testing.assert_allclose(running.driver.center().center, -0.1)  # This is the mean over the only contribution.


@pytest.mark.timeout(60)
def test_workers_under_bounded_staleness_end() -> None:
    rule = make("downpour")
    with Running(rule, workers=2, size=SIZE, deadlines=PATIENT, staleness_bound=0) as running:
        workers = Workers(running.address, rule, [0, 1])
        while running.driver.observe(10, 1.0).clock <= 10:
            pass
        running.driver.finish("enough")
        workers.join()
        assert_prefixes(running.driver, 2)


@pytest.mark.timeout(60)
def test_the_early_end_is_sent_to_a_restarted_server_too(tmp_path: Path) -> None:
    rule = make("downpour")
    with ServerProcess(
        ServerSettings(rule, workers=1, deadlines=PATIENT, checkpoint=Checkpoint(str(tmp_path), every=1))
    ) as process:
        start = np.zeros(SIZE, np.float32)
        with Supervisor(process, lambda driver: driver.publish(start)) as server:
            server.end_early("enough")
            os.kill(process.pid, signal.SIGKILL)
            assert process.exited(patience(10))
            server.ask(lambda driver: driver.center())
            assert server.restarts == 1
            workers = Workers(process.address, rule, [0])
            workers.join()
            assert server.ask(lambda driver: driver.observe(-1, 0.0)).finished == 1

"""The whole of it once: a server in a process of its own, its client, a driver, and Spark."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from support.patience import patience, until
from support.present import present
from support.spark_jobs import accuracy, blobs, wrong_model
from support.standalone import daemon, said

from distkeras.data.datasets import write_parquet
from distkeras.jobs import Client, RemoteJob
from distkeras.jobs.cli import main
from distkeras.jobs.errors import JobFailedError
from distkeras.jobs.runner.processes import ProcessId
from distkeras.jobs.states import JobState
from distkeras.jobs.store.accounts import ADMIN, Account
from distkeras.jobs.store.jobs import JobStore
from distkeras.jobs.store.tables import open_database

SPARSE = "sparse_categorical_crossentropy"


class Server:
    """``distkeras serve`` in a folder, to be stopped and started."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self._options = folder, options or ("--master", "local[2,2]")
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> None:
        command = [sys.executable, "-m", "distkeras.jobs", "serve", "--folder", str(self.folder / "server")]
        command += ["--data", str(self.folder), "--port", "0", "--output", str(self.folder / "output")]
        command += self._options
        log = self.folder / "server.log"
        log.write_text("")
        with log.open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, text=True)
        until(lambda: "listens at" in log.read_text() or present(self._process).poll() is not None)
        found = re.search(r"listens at (\S+)", log.read_text())
        assert found, log.read_text()
        self.url = found[1]

    def stop(self, name: signal.Signals = signal.SIGTERM) -> int:
        assert self._process is not None
        self._process.send_signal(name)
        return self._process.wait(patience(60))

    @property
    def token(self) -> str:
        return (self.folder / "server" / "admin.token").read_text().strip()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("JDK_JAVA_OPTIONS", os.environ["JDK_JAVA_OPTIONS"])
    server = Server(tmp_path)
    server.start()
    yield server
    server.stop(signal.SIGKILL)


def submit(server: Server, epochs: int) -> RemoteJob:
    """A job on two clouds of points, about nearly all of which its model is wrong."""
    points, labels = blobs()
    data = server.folder / "train.parquet"
    if not data.exists():
        write_parquet(data, points, labels.astype(np.int64))
    return Client(server.url, server.token).submit(
        wrong_model(),
        "downpour",
        data=str(data),
        hyper_parameters={"window": 2},
        worker_optimizer={"class_name": "sgd", "config": {"learning_rate": 0.05}},
        loss=SPARSE,
        metrics=["accuracy"],
        num_workers=2,
        batch_size=16,
        num_epoch=epochs,
        checkpoint_every=1,
    )


def commits(job: RemoteJob) -> int:
    return max((row["clock"] for row in job.metrics() if row["kind"] == "status"), default=0)


def test_submit_wait_fetch_predict(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server dies while the job runs; the next one goes on with it; the model has learned."""
    points, labels = blobs()
    assert accuracy(wrong_model(), points, labels) < 0.5
    assert (tmp_path / "server" / "admin.token").stat().st_mode & 0o077 == 0
    job = submit(server, 4)
    until(lambda: job.refresh().state not in (JobState.QUEUED, JobState.STARTING))
    server.stop(signal.SIGKILL)
    server.start()
    job = Client(server.url, server.token).job(job.id).wait(patience(120), progress=False)
    trained = job.model()
    assert accuracy(trained, points, labels) > 0.9
    assert isinstance(trained, keras.Model)
    assert job.told["attempt"] == 1
    history = job.history()
    assert history["samples"].sum() == 4 * len(labels)
    assert set(job.commits()["worker"]) == {0, 1}
    kinds = [row["kind"] for row in job.metrics()]
    assert kinds[0] == "training"
    assert "status" in kinds
    (tmp_path / "token").write_text(server.token)
    where = ["--url", server.url, "--token-file", str(tmp_path / "token")]
    assert main(["jobs", "fetch", job.id, *where, "--out", str(tmp_path / "fetched.keras")]) == 0
    assert main(["jobs", "list", *where]) == 0
    assert f"{job.id}  done" in capsys.readouterr().out
    assert keras.saving.load_model(tmp_path / "fetched.keras").count_params() == trained.count_params()
    assert server.stop() == 0


@pytest.mark.slow
def test_a_driver_that_is_killed_and_a_job_that_is_cancelled(server: Server) -> None:
    """The first job goes on from its checkpoint in a new driver; of the second one nothing is left, nor of its JVM."""
    job = submit(server, 40)
    until(lambda: commits(job) > 10)
    before = driver_of(server, job)
    os.kill(before.pid, signal.SIGKILL)
    job.wait(patience(240), progress=False)
    assert job.told["attempt"] == 2
    assert "goes on at clock" in job.log()
    assert before.session() == []
    history = job.history()
    assert history["samples"].sum() == 40 * 256  # each row of each epoch counts once, over both
    job = submit(server, 100_000)
    until(lambda: commits(job) > 10)
    driver = driver_of(server, job)
    names = {psutil.Process(pid).name() for pid in driver.session()}
    assert "java" in names
    job.cancel()
    with pytest.raises(JobFailedError, match="cancelled"):
        job.wait(patience(120), progress=False)
    assert driver.session() == []


@dataclass
class Cluster:
    """A cluster of Spark's own, and a job server that sends its jobs there; executors are no children of its."""

    server: Server
    worker: psutil.Process

    def executors(self) -> list[psutil.Process]:
        found = []
        for process in self.worker.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if any("CoarseGrainedExecutorBackend" in part for part in process.cmdline()):
                    found.append(process)
        return found


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("JDK_JAVA_OPTIONS", os.environ["JDK_JAVA_OPTIONS"])
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    with contextlib.ExitStack() as stack:
        own = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        stack.enter_context(daemon(tmp_path / "master", "org.apache.spark.deploy.master.Master", *own))
        url = said(tmp_path / "master", "Starting Spark master at ")
        options = ("--host", "127.0.0.1", "--cores", "2", "--memory", "2g", "--webui-port", "0", url)
        worker = stack.enter_context(daemon(tmp_path / "worker", "org.apache.spark.deploy.worker.Worker", *options))
        said(tmp_path / "worker", "Successfully registered with master ")
        each = ("spark.executor.cores=1", "spark.executor.memory=1g")
        server = Server(tmp_path, "--master", url, *(word for setting in each for word in ("--conf", setting)))
        server.start()
        stack.callback(server.stop, signal.SIGKILL)
        yield Cluster(server, psutil.Process(worker.pid))


@pytest.mark.slow
def test_an_executor_is_killed_a_job_cancelled_and_anothers_model_predicts(cluster: Cluster, tmp_path: Path) -> None:
    server, (_, labels) = cluster.server, blobs()
    job = submit(server, 60)
    until(lambda: commits(job) > 10)
    driver = driver_of(server, job)
    until(lambda: len(cluster.executors()) == 2)
    cluster.executors()[0].kill()
    until(lambda: any(row["kind"] == "event" and row["event"] == "takeover" for row in job.metrics()))
    assert driver_of(server, job) == driver  # whom the loss of an executor does not concern
    job.wait(patience(240), progress=False)
    assert job.history()["samples"].sum() == 60 * 256
    until(lambda: not cluster.executors())

    other = submit(server, 100_000)
    until(lambda: commits(other) > 10)
    gone = driver_of(server, other)
    assert cluster.executors()
    other.cancel()
    with pytest.raises(JobFailedError, match="cancelled"):
        other.wait(patience(120), progress=False)
    assert gone.session() == []
    until(lambda: not cluster.executors())

    client = Client(server.url, server.token)
    where = {"data": str(server.folder / "train.parquet"), "output": str(tmp_path / "output" / "admin" / "scored")}
    scored = client.predict(job, **where).wait(patience(240), progress=False)
    assert scored.told["kind"] == "predict"
    assert [row["rows"] for row in scored.metrics() if row["kind"] == "predicted"] == [len(labels)]
    table = pq.read_table(where["output"]).to_pandas()
    rows = np.stack(table["features"].to_list())
    expected = job.model().predict(rows, verbose=0)
    np.testing.assert_allclose(np.stack(table["prediction"].to_list()), expected, rtol=1e-5, atol=1e-6)
    assert (expected.argmax(-1) == table["label"]).mean() > 0.9
    with pytest.raises(JobFailedError, match="where nothing is yet"):
        client.predict(job, **where).wait(patience(240), progress=False)


def driver_of(server: Server, job: RemoteJob) -> ProcessId:
    """As the database has it."""
    engine = open_database(f"sqlite:///{server.folder / 'server' / 'jobs.sqlite'}")
    found = JobStore(engine).get(Account(0, "test", ADMIN), job.id)
    engine.dispose()
    return present(ProcessId.parse(found.driver))

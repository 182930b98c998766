"""Tests of the whole job server: a server in its own process, its client, a driver, and Spark."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from support.browser import chromium, ink
from support.job_server.process import Server
from support.patience import patience, until
from support.present import present
from support.processes import descendants
from support.training.spark_jobs import accuracy, blobs, wrong_model
from support.training.standalone import daemon, said

from distkeras.commands.main import main
from distkeras.data.datasets import write_parquet
from distkeras.job_server import Client, RemoteJob
from distkeras.job_server.driver import link_to_run
from distkeras.job_server.errors import DescriptionError, JobFailedError, JobState
from distkeras.job_server.runner.processes import ProcessId
from distkeras.job_server.store.accounts import ADMIN, Account
from distkeras.job_server.store.jobs import JobStore, StoredJob
from distkeras.job_server.store.tables import open_database

SPARSE = "sparse_categorical_crossentropy"
#: The states of a job whose driver has not started to train.
BEFORE = (JobState.QUEUED, JobState.STARTING)
#: Epochs of a job that still runs when a test observes it.
EPOCHS = 400


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("JDK_JAVA_OPTIONS", os.environ["JDK_JAVA_OPTIONS"])
    server = Server(tmp_path)
    server.start()
    yield server
    server.stop(signal.SIGKILL)


def submit(server: Server, epochs: int, name: str = "") -> RemoteJob:
    """Submit a job on two clouds of points; its initial model misclassifies nearly all of them."""
    points, labels = blobs()
    data = server.folder / "train.parquet"
    if not data.exists():
        write_parquet(data, points, labels.astype(np.int64))
    return Client(server.url, server.token).submit(
        wrong_model(),
        "downpour",
        data=str(data),
        name=name,
        hyper_parameters={"window": 2},
        worker_optimizer={"class_name": "sgd", "config": {"learning_rate": 0.05}},
        loss=SPARSE,
        metrics=["accuracy"],
        num_workers=2,
        batch_size=16,
        num_epoch=epochs,
        checkpoint_every=1,
        early_stopping={"data": str(data), "monitor": "accuracy", "every_seconds": 1.0},
    )


def commits(job: RemoteJob) -> int:
    return max((row["clock"] for row in job.metrics() if row["kind"] == "status"), default=0)


@pytest.mark.slow
def test_a_job_survives_the_death_of_its_server(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server dies while the job runs and the next server continues it; the fetched model predicts well."""
    points, labels = blobs()
    assert accuracy(wrong_model(), points, labels) < 0.5
    assert (tmp_path / "server" / "admin.token").stat().st_mode & 0o077 == 0
    assert (tmp_path / "server" / ".gitignore").read_text() == "*\n"
    for place in (tmp_path / "server" / "admin.token", tmp_path):
        with pytest.raises(DescriptionError, match="own folder"):
            Client(server.url, server.token).submit(wrong_model(), "downpour", data=str(place), loss=SPARSE)
    job = submit(server, 4)
    # The addresses of the whole time before training, which may be over when the state is read.
    addresses: set[str] = set()
    until(lambda: addresses.update(listening(server, job)) or job.refresh().state not in BEFORE)
    assert addresses | listening(server, job) == {"127.0.0.1"}
    server.stop(signal.SIGKILL)
    server.start()
    job = Client(server.url, server.token).job(job.id).wait(patience(120), progress=False)
    trained = job.model()
    assert accuracy(trained, points, labels) > 0.9
    assert isinstance(trained, keras.Model)
    assert job.record["attempt"] == 1
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
def test_a_killed_driver_has_a_successor_and_a_cancelled_job_leaves_no_process(server: Server) -> None:
    """The first job continues from its checkpoint in a new driver; of the second one no process is left, not even its
    JVM.
    """
    job = submit(server, 40)
    until(lambda: commits(job) > 10)
    before = driver_of(server, job)
    os.kill(before.pid, signal.SIGKILL)
    job.wait(patience(240), progress=False)
    assert job.record["attempt"] == 2
    assert "continues at clock" in job.log()
    assert before.session() == []
    history = job.history()
    assert history["samples"].sum() == 40 * 256  # Each row of each epoch counts once, over both drivers.
    job = submit(server, 100_000)
    until(lambda: commits(job) > 10)
    driver = driver_of(server, job)
    names = {psutil.Process(pid).name() for pid in driver.session()}
    assert "java" in names
    job.cancel()
    with pytest.raises(JobFailedError, match="cancelled"):
        job.wait(patience(120), progress=False)
    assert driver.session() == []
    (server.folder / "notes.parquet").write_text("no Parquet")
    damaged = Client(server.url, server.token).submit(
        wrong_model(), "downpour", data=str(server.folder / "notes.parquet"), loss=SPARSE, worker_optimizer="sgd"
    )
    with pytest.raises(JobFailedError, match="is not a Parquet file"):
        damaged.wait(patience(120), progress=False)


@dataclass
class Cluster:
    """A Spark cluster and a job server that uses it; the executors are not children of the server."""

    server: Server
    worker: psutil.Process

    def executors(self) -> list[psutil.Process]:
        return list(descendants("CoarseGrainedExecutorBackend", self.worker))


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


@pytest.fixture
def page(cluster: Cluster) -> Iterator[Any]:
    """Return the job server's page in a browser, signed in."""
    with chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(1000 * patience(60))
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{cluster.server.url}/dashboard")
        page.get_by_label("Your token").fill(cluster.server.token)
        page.keyboard.press("Enter")
        page.get_by_text("No jobs yet").wait_for()
        yield page
        assert problems == []


def shown(page: Any, name: str) -> Any:
    """Have the page show a job; return the job's element."""
    page.get_by_role("checkbox", name=f"show {name}").check()
    return page.locator("article", has=page.get_by_role("heading", name=name))


@pytest.mark.slow
def test_the_page_shows_an_executors_death_and_the_jobs_end(cluster: Cluster, page: Any, tmp_path: Path) -> None:
    server, (_, labels) = cluster.server, blobs()
    job = submit(server, EPOCHS, "first")
    first = shown(page, "first")
    first.locator(".state[data-state=training]").wait_for()
    seen: set[int] = set()
    until(lambda: seen.add(ink(page)) or len(seen) > 3)  # The curves are updated.
    assert "takeover" not in first.locator("table.events tbody").inner_text()
    driver = driver_of(server, job)
    until(lambda: len(cluster.executors()) == 2)
    cluster.executors()[0].kill()
    first.locator("table.events .kind", has_text="takeover").first.wait_for()
    first.get_by_text("center, evaluated").wait_for()
    page.locator("[role=status]", has_text="takeover").first.wait_for(state="attached")
    assert int(first.locator(".tiles div", has_text="Retries").locator(".value").inner_text()) >= 1
    # The picture is kept for a person who inspects the results.
    page.screenshot(path=tmp_path / "takeover.png", full_page=True)
    assert driver_of(server, job) == driver  # The loss of an executor does not affect the other job.
    job.wait(patience(240), progress=False)
    first.locator(".state[data-state=done]").wait_for()
    assert job.history()["samples"].sum() == EPOCHS * len(labels)
    until(lambda: not cluster.executors())

    other = submit(server, 100_000, "second")
    second = shown(page, "second")
    second.locator(".state[data-state=training]").wait_for()
    until(lambda: commits(other) > 10)
    gone = driver_of(server, other)
    assert cluster.executors()
    other.cancel()
    second.locator(".state[data-state=cancelled]").wait_for()
    with pytest.raises(JobFailedError, match="cancelled"):
        other.wait(patience(120), progress=False)
    assert gone.session() == []
    until(lambda: not cluster.executors())

    require_predictions(server, job, str(tmp_path / "output" / "admin" / "scored"), len(labels))
    states = page.locator(".list tbody tr")
    for name, state in (("first", "done"), ("second", "cancelled"), ("third", "done"), ("fourth", "failed")):
        states.filter(has_text=name).locator("td", has_text=state).wait_for()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # MLflow's store
def test_all_drivers_of_a_job_log_to_one_run_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.setenv("JDK_JAVA_OPTIONS", os.environ["JDK_JAVA_OPTIONS"])
    uri = f"sqlite:///{tmp_path / 'runs.sqlite'}"
    server = Server(tmp_path, "--master", "local[2,2]", "--mlflow", uri)
    server.start()
    try:
        job = submit(server, 30, "logged")
        until(lambda: commits(job) > 10)
        until(lambda: job.refresh().state is JobState.TRAINING)
        link = job.record["mlflow_run"]
        driver_of(server, job).kill_session()
        job.wait(patience(240), progress=False)
    finally:
        server.stop(signal.SIGKILL)
    assert job.record["attempt"] == 2
    assert job.record["mlflow_run"] == link
    (run,) = mlflow.MlflowClient(uri).search_runs(["0"])
    assert link == f"runs:/{run.info.run_id}"
    assert (run.info.run_name, run.info.status) == ("logged", "FINISHED")
    assert run.data.params["rule.window"] == "2"
    assert run.data.metrics["epochs"] == 30


@pytest.mark.parametrize(
    ("uri", "link"),
    [
        ("https://ann:secret@mlflow:5000/base/", "https://mlflow:5000/base/#/experiments/7/runs/ab"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000/#/experiments/7/runs/ab"),
        ("sqlite:////data/runs.sqlite", "runs:/ab"),
    ],
)
def test_the_link_to_a_run_has_no_password(uri: str, link: str) -> None:
    assert link_to_run(uri, "7", "ab") == link


def require_predictions(server: Server, job: RemoteJob, output: str, rows: int) -> None:
    """Check that a predict job with an earlier job's model writes the model's predictions and never overwrites data."""
    client = Client(server.url, server.token)
    where = {"data": str(server.folder / "train.parquet"), "output": output}
    scored = client.predict(job, name="third", **where).wait(patience(240), progress=False)
    assert scored.record["kind"] == "predict"
    assert [row["rows"] for row in scored.metrics() if row["kind"] == "predicted"] == [rows]
    table = pq.read_table(output).to_pandas()
    expected = job.model().predict(np.stack(table["features"].to_list()), verbose=0)
    np.testing.assert_allclose(np.stack(table["prediction"].to_list()), expected, rtol=1e-5, atol=1e-6)
    assert (expected.argmax(-1) == table["label"]).mean() > 0.9
    with pytest.raises(JobFailedError, match="must not exist yet"):
        client.predict(job, name="fourth", **where).wait(patience(240), progress=False)


def listening(server: Server, job: RemoteJob) -> set[str]:
    """Return the addresses at which processes of a job listen."""
    found = set()
    driver = stored(server, job).driver
    for pid in [] if driver is None else present(ProcessId.parse(driver)).session():
        with contextlib.suppress(psutil.Error):
            sockets = psutil.Process(pid).net_connections("tcp")
            found |= {one.laddr.ip.removeprefix("::ffff:") for one in sockets if one.status == psutil.CONN_LISTEN}
    return found


def stored(server: Server, job: RemoteJob) -> StoredJob:
    """Return the job as the database has it."""
    engine = open_database(f"sqlite:///{server.folder / 'server' / 'jobs.sqlite'}")
    found = JobStore(engine).get(Account(0, "test", ADMIN), job.id)
    engine.dispose()
    return found


def driver_of(server: Server, job: RemoteJob) -> ProcessId:
    return present(ProcessId.parse(stored(server, job).driver))

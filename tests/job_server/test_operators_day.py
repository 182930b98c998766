"""A day of an operator: two servers behind nginx, an upgrade, a backup, a restore, a drain, users and a lost token."""

from __future__ import annotations

import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import keras
import numpy as np
import pytest
from job_server.store.test_tables import old_database
from support.job_server import nginx
from support.job_server.process import Server
from support.patience import patience, until
from support.training.spark_jobs import blobs, wrong_model

from distkeras.data.datasets import write_parquet
from distkeras.job_server import Client, RemoteJob
from distkeras.job_server.errors import JobState, NotFoundError, UnauthorizedError

pytestmark = [pytest.mark.slow, nginx.needs_nginx]


class Site:
    """Two servers of one database and one folder of files, behind nginx."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.database = folder, folder / "files", folder / "jobs.sqlite"
        shared = ("--database", f"sqlite:///{self.database}", "--files", str(self.files), "--master", "local[2,2]")
        self.shared = (*shared, "--data", str(folder / "data"), "--trusted-proxy", "127.0.0.1", "--log-format", "json")
        self.servers = [Server(folder / name, *self.shared) for name in ("one", "two")]
        for server in self.servers:
            server.folder.mkdir()
        points, labels = blobs()
        self.data = folder / "data"
        write_parquet(self.data, points, labels.astype(np.int64))

    def start(self) -> None:
        for server in self.servers:
            server.start()

    def stop(self) -> None:
        for server in self.servers:
            server.stop(signal.SIGKILL)

    def client(self, token: str) -> Client:
        return Client(self.servers[0].url, token)

    def gateway(self) -> nginx.Gateway:
        ports = [int(server.url.rpartition(":")[2]) for server in self.servers]
        return nginx.gateway(self.folder / "nginx", ports)

    def new_admin_token(self) -> str:
        folder = self.folder / "rescue"
        command = [sys.executable, "-m", "distkeras", "serve", "--folder", str(folder), "--new-admin-token"]
        subprocess.run([*command, *self.shared], check=True, timeout=patience(60))
        return (folder / "admin.token").read_text().strip()

    def submit(self, client: Client, epochs: int = 1) -> RemoteJob:
        return client.submit(
            wrong_model(), "downpour", data=str(self.data), hyper_parameters={"window": 2}, num_workers=2,
            worker_optimizer={"class_name": "sgd", "config": {"learning_rate": 0.05}}, batch_size=16,
            loss="sparse_categorical_crossentropy", metrics=["accuracy"], num_epoch=epochs, checkpoint_every=1,
        )  # fmt: skip


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    old_database(tmp_path, "0.3.0")
    site.start()  # which migrates the tables; one of the two servers is first
    yield site
    site.stop()


def working(job: RemoteJob) -> bool:
    return any(row["kind"] == "status" and row["clock"] for row in job.metrics())


def test_a_day_of_an_operator(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with ExitStack() as stack:
        port, certificate = stack.enter_context(site.gateway())
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))

        def client(token: str) -> Client:
            return Client(f"https://127.0.0.1:{port}", token)

        # The administrator of the old database has lost the token; the job of that time is still there.
        admin = client(site.new_admin_token())
        assert [(job.id, job.state) for job in admin.jobs()] == [("a", JobState.DONE)]
        admin.add_user("ann")
        first = admin.new_token(user="ann")
        second = client(first).new_token()

        # One server is killed while a job runs: the other one takes it over.
        job = site.submit(client(first), epochs=3)
        until(lambda: working(job), 120)
        site.servers[0].stop(signal.SIGKILL)
        done = job.wait(patience(300), progress=False)
        summary = done.record["summary"]
        assert (summary["last_epoch"]["epoch"], summary["stopped"]) == (3, None)
        assert 0.0 <= summary["last_epoch"]["accuracy"] <= 1.0
        site.servers[0].start()

    # A backup while the servers run: the database first, then the files.
    with sqlite3.connect(site.database) as live, sqlite3.connect(tmp_path / "backup.sqlite") as backup:
        live.backup(backup)
    shutil.copytree(site.files, tmp_path / "backup", dirs_exist_ok=True)

    later = site.submit(site.client(second)).wait(patience(300), progress=False)
    weights = later.model().get_weights()

    # A removed user's tokens stay revoked when the user is reinstated.
    admin = site.client(site.new_admin_token())
    admin.remove_user("ann")
    admin.reinstate_user("ann")
    for old in (first, second):
        with pytest.raises(UnauthorizedError):
            list(site.client(old).jobs())
    ann = site.client(admin.new_token(user="ann"))
    assert [known.id for known in ann.jobs()] == [later.id, job.id]

    # Drained servers end by themselves after their jobs; another job waits for the next server.
    running = site.submit(ann, epochs=20)
    until(lambda: working(running), 120)
    for server in site.servers:
        server.process.send_signal(signal.SIGUSR1)
    waiting = site.submit(ann)
    assert [server.ended() for server in site.servers] == [0, 0]
    assert_restored(site, tmp_path, job, later, waiting, weights)


def assert_restored(
    site: Site, tmp_path: Path, job: RemoteJob, later: RemoteJob, waiting: RemoteJob, weights: list[np.ndarray]
) -> None:
    site.start()
    admin = site.client(site.new_admin_token())
    assert admin.job(waiting.id).wait(patience(300), progress=False).state is JobState.DONE
    for server in site.servers:
        assert server.stop() == 0

    # An older database with the files of today: what it does not have stays on the disk.
    for suffix in ("-wal", "-shm"):
        site.database.with_name(site.database.name + suffix).unlink(missing_ok=True)
    shutil.copy(tmp_path / "backup.sqlite", site.database)
    site.start()
    admin = site.client(site.new_admin_token())
    assert [known.id for known in admin.jobs()] == [job.id, "a"]
    with pytest.raises(NotFoundError):
        admin.job(later.id)
    kept = keras.models.load_model(site.files / "jobs" / later.id / "model.keras").get_weights()
    for one, other in zip(kept, weights, strict=True):
        np.testing.assert_array_equal(one, other)
    assert admin.job(job.id).model().count_params() == wrong_model().count_params()
    log = (site.servers[0].folder / "server.log").read_text()
    assert re.search(r'"time": "\d{4}-\d\d-\d\dT.*files of \d jobs that the database does not have', log)

    # Another database with these files is refused.
    site.stop()
    shutil.copy(tmp_path / "backup.sqlite", tmp_path / "other.sqlite")
    with sqlite3.connect(tmp_path / "other.sqlite") as renamed:
        renamed.execute("UPDATE distkeras_meta SET id = 'other'")
    command = [sys.executable, "-m", "distkeras", "serve", "--folder", str(tmp_path / "third"), "--port", "0"]
    command += ["--database", f"sqlite:///{tmp_path / 'other.sqlite'}", "--files", str(site.files)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience(60))
    assert refused.returncode == 2
    assert "must be the one of the jobs' files" in refused.stderr
    assert (site.files / "jobs" / job.id / "model.keras").exists()
    site.start()

"""Tests of the runner with real processes and signals; the processes train nothing."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from job_server.conftest import ManualClock
from job_server.runner.conftest import RunnerHarness
from support.job_server import runner_process
from support.patience import brief, patience, until
from support.present import present

from distkeras.job_server.driver import main as drive
from distkeras.job_server.errors import FINAL, JobState
from distkeras.job_server.runner import processes
from distkeras.job_server.runner.files import read_progress
from distkeras.job_server.runner.processes import ProcessId, process_namespace
from distkeras.job_server.runner.runner import JobRunner
from distkeras.job_server.settings import Settings
from distkeras.job_server.store.jobs import StoredJob
from distkeras.ps.errors import ConfigurationError

#: Seconds of a lease that only a test's clock measures, so that it ends on no machine by itself.
LEASE = 30.0


def test_a_finished_job_is_done(office: RunnerHarness) -> None:
    job = office.ended(office.add("train"))
    assert (job.state, job.attempt, job.error) == (JobState.DONE, 1, None)
    assert job.summary == {"last_epoch": {"epoch": 2, "loss": 0.5}}
    assert job.bytes == office.folder(job).size() > 0
    assert present(job.started) <= present(job.ended)


def test_a_job_is_training_once_its_driver_reports_it(office: RunnerHarness) -> None:
    job = office.add("wait")
    office.waits(job)
    office.tick_until(lambda: office.look(job).state is JobState.TRAINING)
    office.go_on(job)
    assert office.ended(job).state is JobState.DONE


def test_a_predict_job_receives_its_order_and_reports_that_it_predicts(office: RunnerHarness) -> None:
    job = office.add("wait", kind="predict")
    office.waits(job)
    office.tick_until(lambda: office.look(job).state is JobState.PREDICTING)
    order = json.loads(office.folder(job).order(1).read_text())
    assert order == {
        "description": {"name": "wait"},
        "kind": "predict",
        "data": "file:///nowhere",
        "master": "local[*,4]",
        "config": {},
        "mlflow": None,
    }
    office.go_on(job)
    assert office.ended(job).state is JobState.DONE


@pytest.mark.parametrize(
    ("todo", "state", "outcomes", "error"),
    [
        ("fail", JobState.FAILED, ["ShapeError: the rows must fit"], "ShapeError: the rows must fit"),
        ("once", JobState.DONE, ["died with exit status -9", "done"], ""),
        ("die", JobState.LOST, ["died with exit status -9"] * 3, "3 drivers died .* exit status -9"),
        ("linger", JobState.DONE, ["done"], ""),  # It is killed, as its job has ended.
    ],
)
def test_a_job_has_the_outcome_of_its_drivers(
    office: RunnerHarness, todo: str, state: JobState, outcomes: list[str], error: str
) -> None:
    job = office.ended(office.add(todo))
    assert job.state is state
    assert re.match(error, job.error or "")
    assert [one.outcome for one in office.store.attempts(job)] == outcomes


def test_a_driver_that_cannot_be_started_is_an_error(office: RunnerHarness) -> None:
    runner = office.open(driver_command=("/nowhere/python",))
    job = office.ended(office.add("train"), runner)
    assert job.state is JobState.FAILED
    assert "could not be started" in present(job.error)


def test_as_many_jobs_run_as_there_are_slots(office: RunnerHarness) -> None:
    jobs = [office.add("wait") for _ in range(3)]
    runner = office.open(slots=2)
    office.tick_until((office.folder(jobs[1]).path / "waits").exists, runner)
    assert [office.look(job).state is JobState.QUEUED for job in jobs] == [False, False, True]
    for job in jobs:
        office.go_on(job)
    assert {office.ended(job, runner).state for job in jobs} == {JobState.DONE}


def processes_of(job: StoredJob) -> list[int]:
    return present(ProcessId.parse(job.driver)).session()


def test_a_cancelled_job_leaves_no_process(office: RunnerHarness) -> None:
    """Neither the driver, which ignores the request to end, nor its child in a process group of its own remains."""
    job = office.add("stubborn children wait")
    office.waits(job)
    child = int((office.folder(job).path / "child").read_text())
    found = office.look(job)
    assert set(processes_of(found)) == {child, present(ProcessId.parse(found.driver)).pid}
    office.store.request_cancel(office.ann, job.id)
    assert office.ended(job).state is JobState.CANCELLED
    assert processes_of(found) == []  # A zombie does not count; init reaps it at any time.


def test_a_driver_has_a_grace_period_to_end(office: RunnerHarness) -> None:
    job = office.add("stubborn wait")
    runner = office.open(grace=patience(600))
    office.tick_until((office.folder(job).path / "waits").exists, runner)
    office.tick_until(lambda: office.look(job).state is JobState.TRAINING, runner)
    office.store.request_cancel(office.ann, job.id)
    for _ in range(3):
        runner.tick()
    assert office.look(job).state is JobState.TRAINING
    office.go_on(job)  # The job was done before the request to end, so its state is done.
    assert office.ended(job, runner).state is JobState.DONE


def test_a_cancelled_job_is_not_tried_again(office: RunnerHarness) -> None:
    job = office.add("wait")
    office.waits(job)
    office.store.request_cancel(office.ann, job.id)
    present(ProcessId.parse(office.look(job).driver)).kill_session()
    job = office.ended(job)
    assert (job.state, job.attempt) == (JobState.CANCELLED, 1)


def test_no_job_starts_while_the_disk_is_nearly_full(office: RunnerHarness) -> None:
    job = office.add("train")
    full = office.open(reserve=1 << 60)
    full.tick()
    assert office.look(job).state is JobState.QUEUED
    assert office.ended(job).state is JobState.DONE


def test_a_driver_receives_no_secret_of_the_server(office: RunnerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISTKERAS_JOBS_DATABASE", "DISTKERAS_TOKEN"):
        monkeypatch.setenv(name, "secret")
    job = office.add("environment")
    office.ended(job)
    given = json.loads((office.folder(job).path / "environment").read_text())
    assert "PATH" in given
    assert "secret" not in given.values()


# ---- death of a server


@pytest.fixture
def server_arguments(office: RunnerHarness, tmp_path: Path) -> list[str]:
    """Return the program of a server of the office's jobs, and its arguments."""
    return [runner_process.__file__, f"sqlite:///{tmp_path / 'jobs.sqlite'}", str(tmp_path / "files")]


@pytest.fixture
def other_server(server_arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server in a process of its own."""
    server = subprocess.Popen([sys.executable, *server_arguments])
    yield server
    server.kill()
    server.wait(patience(20))


def test_two_servers_of_one_database_run_no_job_twice_and_one_continues_the_others_jobs(
    office: RunnerHarness, server_arguments: list[str]
) -> None:
    """Each server is a process whose runner claims, starts and watches drivers; then one of the servers dies."""
    servers = [subprocess.Popen([sys.executable, *server_arguments, "30", "2"]) for _ in range(2)]
    jobs = [office.add("wait") for _ in range(4)]
    try:
        # There are as many jobs as both servers have slots.
        until(lambda: all((office.folder(job).path / "waits").exists() for job in jobs))
        until(lambda: all(office.look(job).state is JobState.TRAINING for job in jobs))
        before = [office.look(job) for job in jobs]
        assert sorted(Counter(job.server for job in before).values()) == [2, 2]
        kill(servers[0])
        until(lambda: len({office.look(job).server for job in jobs}) == 1)
        after = [office.look(job) for job in jobs]
        assert [(job.state, job.driver) for job in after] == [(JobState.TRAINING, job.driver) for job in before]
        for job in jobs:
            office.go_on(job)
        until(lambda: all(office.look(job).state in FINAL for job in jobs))
    finally:
        for server in servers:
            kill(server)
    assert {(job.state, job.attempt) for job in map(office.look, jobs)} == {(JobState.DONE, 1)}
    begun = [sorted(path.name for path in office.folder(job).path.glob("begun-*")) for job in jobs]
    assert begun == [["begun-1"]] * len(jobs)


def kill(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGKILL)
    server.wait(patience(20))


@pytest.mark.slow  # The test above covers the first case with processes.
@pytest.mark.parametrize("end", ["continue", "die", "done meanwhile"])
def test_the_next_server_determines_the_state_of_jobs_that_ran(
    office: RunnerHarness, other_server: subprocess.Popen[bytes], end: str
) -> None:
    """The driver outlived its server, died with it, or ended while no server ran."""
    job = office.add("children wait")
    until((office.folder(job).path / "waits").exists)
    until(lambda: office.look(job).state is JobState.TRAINING)
    office.runner.tick()  # A second runner leaves the job alone while the first one lives.
    before = office.look(job)
    assert before.server != office.runner.name
    kill(other_server)
    driver = present(ProcessId.parse(before.driver))
    assert driver.alive()
    if end == "die":
        driver.kill_session()
    elif end == "done meanwhile":
        office.go_on(job)
        until(lambda: not driver.alive())
    else:
        office.runner.tick()
        after = office.look(job)
        assert (after.state, after.driver, after.server) == (JobState.TRAINING, before.driver, office.runner.name)
    if end == "die":
        office.runner.tick()
        until(lambda: office.look(job).attempt == 2 or office.runner.tick())
    office.go_on(job)
    ended = office.ended(job)
    assert (ended.state, ended.attempt) == (JobState.DONE, 2 if end == "die" else 1)
    assert driver.session() == []  # The processes that a driver has left are ended with it.


def test_a_claimed_job_that_was_not_started_is_started_by_the_next_server(office: RunnerHarness) -> None:
    job = office.add("train")
    mine = office.runner.name.split("/")
    gone = present(office.store.claim(f"{mine[0]}/{ProcessId(os.getpid(), 1, process_namespace())}/gone"))
    assert gone.id == job.id
    job = office.ended(job)
    assert (job.state, job.attempt) == (JobState.DONE, 2)


ELSEWHERE = f"elsewhere/{ProcessId(1, 1, 16 * '0')}/x"


def test_a_job_of_another_host_is_left_alone_while_that_renews_its_lease(office: RunnerHarness) -> None:
    job, lease = office.add("train"), ManualClock()
    office.store.claim(ELSEWHERE)
    runner = office.open(lease, lease=LEASE)
    for _ in range(5):
        lease.now += LEASE
        office.store.renew(ELSEWHERE)
        runner.tick()
        assert office.look(job).server == ELSEWHERE
    lease.now += LEASE - 1.0
    runner.tick()
    assert office.look(job).server == ELSEWHERE
    lease.now += 1.0  # The other host has been silent for the length of a lease.
    runner.tick()
    assert office.look(job).server == runner.name
    assert office.ended(job, runner).state is JobState.DONE


def test_one_of_two_servers_claims_a_job_whose_lease_has_ended(office: RunnerHarness) -> None:
    office.add("wait")
    job = present(office.store.claim(ELSEWHERE))
    assert office.store.adopt(job, "one")
    assert not office.store.adopt(job, "other")
    office.store.renew(ELSEWHERE)  # The first server resumes and finds that the job is no longer its own.
    assert not office.store.move(job, JobState.FAILED)
    assert office.look(job).server == "one"


def unseen(office: RunnerHarness, monkeypatch: pytest.MonkeyPatch, todo: str) -> tuple[StoredJob, ProcessId]:
    """Return a job whose driver its server cannot see, such as one in another container."""
    job = office.add(todo)
    office.waits(job)
    office.tick_until(lambda: office.look(job).state is JobState.TRAINING)
    driver = present(ProcessId.parse(office.look(job).driver))
    until(lambda: office.folder(job).beat(1).exists())
    monkeypatch.setattr(ProcessId, "visible", property(lambda _process: False))
    return job, driver


def after_a_lease(runner: JobRunner, lease: ManualClock, driver: ProcessId, status: str) -> None:
    """Let ``runner`` observe that a driver that has ended sent no heartbeat for the length of a lease."""
    until(lambda: psutil.Process(driver.pid).status() == status)
    runner.tick()
    lease.now += LEASE
    runner.tick()


def with_a_heartbeat(office: RunnerHarness, job: StoredJob, runner: JobRunner, lease: ManualClock) -> None:
    """Let ``runner`` observe a driver's heartbeat within a lease in which the driver's server was silent."""
    runner.tick()
    beat = office.folder(job).beat(1)
    seen = beat.read_text()
    lease.now += LEASE
    until(lambda: beat.read_text() not in ("", seen))
    runner.tick()
    assert office.look(job).server == runner.name
    assert office.look(job).state is JobState.TRAINING


@pytest.mark.slow
def test_an_invisible_driver_is_alive_while_it_sends_heartbeats(
    office: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, driver = unseen(office, monkeypatch, "wait")
    lease = ManualClock()
    runner = office.open(lease, lease=LEASE)
    for _ in range(4):
        with_a_heartbeat(office, job, runner, lease)
    office.go_on(job)
    after_a_lease(runner, lease, driver, psutil.STATUS_ZOMBIE)
    ended = office.look(job)
    assert (ended.state, ended.attempt) == (JobState.DONE, 1)
    monkeypatch.undo()
    office.tick_until(lambda: not psutil.pid_exists(driver.pid))  # The first runner is the parent of the process.


@pytest.mark.slow
@pytest.mark.parametrize("end", ["dies", "suspended", "cancelled"])
def test_an_invisible_driver_is_never_started_twice(
    office: RunnerHarness, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    job, driver = unseen(office, monkeypatch, "wait")
    lease = ManualClock()
    runner = office.open(lease, lease=LEASE)
    if end == "cancelled":
        office.store.request_cancel(office.ann, job.id)
        with_a_heartbeat(office, job, runner, lease)  # The driver's fence ends it.
    else:
        os.kill(driver.pid, signal.SIGKILL if end == "dies" else signal.SIGSTOP)
    after_a_lease(runner, lease, driver, psutil.STATUS_STOPPED if end == "suspended" else psutil.STATUS_ZOMBIE)
    found = office.look(job)
    assert (found.state, found.attempt) == ((JobState.CANCELLED, 1) if end == "cancelled" else (JobState.STARTING, 2))
    assert processes.first_allowed(office.folder(job).fence) == 2
    if end == "suspended":
        os.kill(driver.pid, signal.SIGCONT)
    monkeypatch.undo()
    office.tick_until(lambda: not psutil.pid_exists(driver.pid))  # The first runner is the parent of the process.
    if end != "cancelled":
        office.go_on(job)
        ended = office.ended(job, runner)
        assert (ended.state, ended.attempt) == (JobState.DONE, 2)


def drivers_of(folder: Path) -> int:
    """Return how many drivers of jobs in ``folder`` are alive, in all namespaces."""
    return sum(
        any("stub_driver" in argument for argument in line) and any(str(folder) in argument for argument in line)
        for line in (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    )


@pytest.mark.slow  # The test of two servers of one database is above.
def test_two_containers_with_one_name_and_one_database_run_no_job_twice(
    office: RunnerHarness, server_arguments: list[str], tmp_path: Path
) -> None:
    """Each server has its own PID namespace; the second one detects the first one's death only by its expired lease."""
    isolated = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*isolated, "true"], capture_output=True, timeout=patience(20), check=False).returncode:
        pytest.skip("this machine does not let us make PID namespaces")
    lease = str(brief(4.0))
    servers = [subprocess.Popen([*isolated, sys.executable, *server_arguments, lease]) for _ in range(2)]
    try:
        jobs = [office.add("wait") for _ in range(8)]
        until(lambda: all((office.folder(job).path / "waits").exists() for job in jobs))
        until(lambda: all(office.look(job).state is JobState.TRAINING for job in jobs))
        time.sleep(2 * float(lease))  # Neither server is considered dead, however long the start takes.
        assert {office.look(job).attempt for job in jobs} == {1}
        owners = {office.look(job).server for job in jobs}
        assert len(owners) == 2
        kill(servers[0])  # This also ends all processes of the server's namespace.
        until(lambda: drivers_of(tmp_path) == 4)
        for job in jobs:
            office.go_on(job)
        until(lambda: all(office.look(job).state in FINAL for job in jobs))
    finally:
        for process in servers:
            kill(process)
    ended = [office.look(job) for job in jobs]
    assert {job.state for job in ended} == {JobState.DONE}
    assert sorted(job.attempt for job in ended) == [1, 1, 1, 1, 2, 2, 2, 2]


#: A server whose clock was set ahead while the driver ran: psutil adds the time of the boot, which the step changes.
STEPPED = """
import runpy, sys, time
import psutil
step, now, created = 3600.0, time.time, psutil.Process.create_time
time.time = lambda: now() + step
psutil.Process.create_time = lambda process: created(process) + step
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_server_whose_clock_was_set_finds_the_living_driver(
    office: RunnerHarness, other_server: subprocess.Popen[bytes], server_arguments: list[str]
) -> None:
    """The server neither starts a second driver nor considers the previous server dead while that lives."""
    job = office.add("wait")
    until((office.folder(job).path / "waits").exists)
    until(lambda: office.look(job).state is JobState.TRAINING)
    before = office.look(job)
    stepped = subprocess.Popen([sys.executable, "-c", STEPPED, *server_arguments])
    try:
        witness = office.add("train")
        until(lambda: office.look(witness).state is JobState.DONE)
        others = [office.add("wait") for _ in range(4)]  # These are more jobs than the first server has free slots.
        until(lambda: len({office.look(one).server for one in [job, *others]} - {None}) == 2)
        assert office.look(job).server == before.server
        kill(other_server)
        until(lambda: office.look(job).server != before.server)
        for one in [job, *others]:
            office.go_on(one)
        until(lambda: all(office.look(one).state in FINAL for one in [job, *others]))
    finally:
        kill(stepped)
    after = office.look(job)
    assert (after.state, after.attempt, after.driver) == (JobState.DONE, 1, before.driver)


def test_a_step_of_the_clock_does_not_change_the_identity_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    me = ProcessId.of(os.getpid())
    created = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: created(process) + 2.0)
    assert me.alive()
    assert ProcessId.of(os.getpid()) == me


@pytest.mark.parametrize("said", [b"", b"no\n"])
def test_a_driver_without_permission_to_start_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said)))
    assert drive([str(tmp_path), "1"]) == 3
    assert list(tmp_path.iterdir()) == []


# ---- retention


def test_jobs_are_removed_after_their_retention(office: RunnerHarness) -> None:
    old, running = office.add("train"), office.add("wait")
    office.ended(old)
    office.waits(running)
    office.open(slots=0, retention=1e12).tick()
    assert office.folder(old).path.exists()
    office.open(slots=0, retention=1e-6).tick()
    assert not office.folder(old).path.exists()
    assert [job.id for job in office.store.page(office.ann)] == [running.id]
    office.go_on(running)
    office.ended(running)


def test_only_old_uploads_are_removed(office: RunnerHarness) -> None:
    """The folder of a job that the database does not have stays: the database may be an older backup."""
    job = office.ended(office.add("train"))
    upload, unknown, fresh = office.files.incoming(), office.files.of("0" * 32), office.files.incoming()
    unknown.path.mkdir()
    for folder in (upload, unknown, office.folder(job)):
        os.utime(folder.path, (0, 0))
    office.open().tick()
    assert not upload.path.exists()
    assert all(folder.path.exists() for folder in (unknown, fresh, office.folder(job)))


def test_files_belong_to_one_database(office: RunnerHarness, caplog: pytest.LogCaptureFixture) -> None:
    job = office.add("train")
    with pytest.raises(ConfigurationError, match="belong to unknown, with jobs that this one does not have"):
        office.files.bind("other", lambda job_id: False)
    office.files.bind("ours", office.store.is_known)
    office.files.bind("ours", office.store.is_known)
    assert not caplog.records
    with pytest.raises(ConfigurationError, match="Received: other, where the files belong to ours"):
        office.files.bind("other", office.store.is_known)
    office.files.bind("ours", lambda job_id: False)  # an older backup of the database
    assert f"files of 1 jobs that the database does not have, such as {job.id}; they stay" in caplog.text
    assert office.folder(job).path.is_dir()


def test_a_server_that_drains_starts_and_takes_over_nothing(office: RunnerHarness) -> None:
    running = office.add("wait")
    office.waits(running)
    waiting, drained = office.add("train"), []
    office.runner.drain(lambda: drained.append(office.look(running).state))
    office.runner.tick()
    assert not drained
    office.go_on(running)
    assert office.ended(running).state is JobState.DONE
    office.tick_until(lambda: drained)
    assert set(drained) == {JobState.DONE}
    assert office.look(waiting).state is JobState.QUEUED
    assert office.ended(waiting, office.open()).state is JobState.DONE


def test_a_progress_file_is_read_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    assert read_progress(path, 0) == ([], 0)
    path.write_bytes(b'{"a": 1}\n{"cut\n[1]\n{"b": 2}\n{"half')
    rows, following = read_progress(path, 0)
    assert rows == [{"a": 1}, {"b": 2}]
    assert path.read_bytes()[following:] == b'{"half'
    for beyond in (10**6, 2**53):  # No file system holds a file of the latter size.
        assert read_progress(path, beyond) == ([], beyond)


def test_no_signal_is_sent_to_a_process_that_reuses_the_process_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of a session is found and ends, and another process has its id before the signal is sent."""
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        gone = ProcessId(2**22 + 1, 1, process_namespace())
        monkeypatch.setattr(ProcessId, "session", lambda _self: [bystander.pid])
        assert not gone.kill_session()
        with pytest.raises(subprocess.TimeoutExpired):
            bystander.wait(brief(0.2))
    finally:
        bystander.kill()
        bystander.communicate(timeout=patience(20))


def test_two_processes_with_the_same_id_are_distinguished() -> None:
    me = ProcessId.of(os.getpid())
    assert me.alive()
    assert ProcessId.parse(str(me)) == me
    for other in (ProcessId(me.pid, me.started - 1, me.place), ProcessId(me.pid, me.started, 16 * "0")):
        assert not other.alive()
        assert other.session() == []
    assert ProcessId.parse("nothing") is None
    with pytest.raises(ProcessLookupError):
        ProcessId.of(2**22 + 1)


@pytest.mark.parametrize(
    "options", [{"slots": -1}, {"attempts_max": 0}, {"grace": -1}, {"retention": 0}, {"run_max": 0}, {"log_max": 1}]
)
def test_impossible_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Settings(**options)

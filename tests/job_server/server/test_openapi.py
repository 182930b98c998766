"""Tests of the server against its own description: Schemathesis generates valid and invalid requests from it.

``pytest -m slow -s tests/job_server/server/test_openapi.py -k server_error --requests-seconds 600`` does so for ten
minutes and prints the number of requests.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.job_server.service import JobService
from support.patience import patience
from support.training.recorded_job import RecordedJob, write_journal

from distkeras.job_server.errors import JobState
from distkeras.job_server.server.app import FailureLimit

#: Conditions that a schema cannot express, such as where data may lie, are refused with 422.
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "401", "403", "404", "409", "422"]
"""
#: The program cannot guess a job's id, without which a job's endpoints would answer only 404.
KNOWN = """
[parameters]
"path.job" = "{job}"
"""
#: The operations of a job, except the one that removes it.
OF_A_JOB = (
    *("show_job", "cancel_job", "read_metrics", "read_log", "follow_job", "save_page"),
    *("fetch_model", "fetch_history", "fetch_commits"),
)

#: Requests that run together. Those that end tokens come last, because a revoked token tests nothing. Schemathesis
#: 4.32
#: cannot generate the cases of its phase "coverage" for the upload's schema, which has conditions.
ENDS = ("revoke_token", "remove_user")
REQUEST_GROUPS = {
    "most": [word for name in ("submit_job", *ENDS) for word in ("--exclude-operation-id", name)],
    "a job": [word for name in OF_A_JOB for word in ("--include-operation-id", name)],
    "submit": ["--include-operation-id", "submit_job", "--phases", "fuzzing"],
    "ends": [word for name in ENDS for word in ("--include-operation-id", name)],
}


def done_job(service: JobService, model: bytes) -> str:
    """Return a finished job that has everything a job can have."""
    job = str(service.submit("ann", model).json["id"])
    assert service.finish(job) is JobState.DONE
    write_journal(service.files.of(job).journal, RecordedJob(2, 10.0), state="done")
    for name in ("history", "commits"):
        (service.files.of(job).path / f"{name}.parquet").write_bytes(b"of Parquet")
    return job


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="Schemathesis is missing: `openapi`"),
]


def draw(service: JobService, config: Path, words: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run Schemathesis as the administrator."""
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config)]
    command += ["run", f"{service.url}/openapi.json", "--header", f"Authorization: Bearer {service.tokens['admin']}"]
    return subprocess.run(
        [*command, *words],
        capture_output=True,
        text=True,
        timeout=patience(seconds),
        env=os.environ | {"NO_COLOR": "1"},
        cwd=config.parent,
    )


@pytest.mark.parametrize("group", REQUEST_GROUPS)
def test_every_answer_matches_its_description(folder: Path, model: bytes, group: str) -> None:
    config = folder / "schemathesis.toml"
    with JobService(folder, failures=FailureLimit(most=10**9)) as service:
        job = done_job(service, model)
        config.write_text(CONFIG + (KNOWN.format(job=job) if group == "a job" else ""))
        words = ["--checks", "all", "--max-examples", "20", "--seed", "1", *REQUEST_GROUPS[group]]
        done = draw(service, config, words, 200)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert group == "ends" or "Authentication failed" not in done.stdout
    assert group != "a job" or "404 Not Found" not in done.stdout


@pytest.mark.parametrize("known", [True, False], ids=["a job that is done", "any job"])
def test_no_request_causes_a_server_error(folder: Path, model: bytes, pytestconfig: pytest.Config, known: bool) -> None:
    """Jobs start and end meanwhile; half of the time the requests have the id of an existing job."""
    config, seconds = folder / "schemathesis.toml", pytestconfig.getoption("requests_seconds") // 2
    stop = threading.Event()

    def run_jobs() -> None:
        while not stop.wait(0.5):
            service.runner.tick()

    with JobService(folder, failures=FailureLimit(most=10**9)) as service:
        job = done_job(service, model)
        config.write_text(CONFIG + (KNOWN.format(job=job) if known else ""))
        left_out = [*ENDS, *(["remove_job"] if known else [])]
        words = ["--checks", "not_a_server_error", "--max-time", str(seconds), "--continue-on-failure"]
        words += ["--max-examples", "100000", "--phases", "coverage,fuzzing,stateful", "--suppress-health-check", "all"]
        words += [word for name in left_out for word in ("--exclude-operation-id", name)]
        runner = threading.Thread(target=run_jobs, daemon=True)
        runner.start()
        try:
            done = draw(service, config, words, seconds + 100)
        finally:
            stop.set()
            runner.join(patience(60))
            for waiting in service.client("admin").jobs("queued"):
                waiting.cancel()
            service.tick_until(lambda: not service.store.active())
    print(done.stdout.partition("SUMMARY")[2])  # noqa: T201 - `-s` shows how many requests there were
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]

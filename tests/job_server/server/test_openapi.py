"""The server against its own description: Schemathesis makes up requests from it, good ones and bad ones."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.job_server.service import JobService
from support.patience import patience
from support.training.recorded_job import RecordedJob, write_journal

from distkeras.job_server.server.services import FailureLimit
from distkeras.job_server.states import JobState

#: What a schema cannot say, such as where data may lie, is refused with 422.
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "401", "403", "404", "409", "422"]
"""
#: Nobody guesses a job's id, so that its endpoints would answer nothing but 404.
KNOWN = """
[parameters]
"path.job" = "{job}"
"""
#: Operations of a job; but for the one that has it be no more.
OF_A_JOB = (
    *("show_job", "cancel_job", "read_metrics", "read_log", "follow_job", "save_page"),
    *("fetch_model", "fetch_history", "fetch_commits"),
)

#: What is asked in one go. What ends tokens comes last: nothing is to be learned with one that does not count. Of the
#: upload's schema, which has conditions, Schemathesis 4.32 cannot make the cases of its phase "coverage".
ENDS = ("revoke_token", "remove_user")
ASKED = {
    "most": [word for name in ("submit_job", *ENDS) for word in ("--exclude-operation-id", name)],
    "a job": [word for name in OF_A_JOB for word in ("--include-operation-id", name)],
    "submit": ["--include-operation-id", "submit_job", "--phases", "fuzzing"],
    "ends": [word for name in ENDS for word in ("--include-operation-id", name)],
}


def done_job(service: JobService, model: bytes) -> str:
    """One that has whatever a job can have."""
    job = str(service.submit("ann", model).json["id"])
    assert service.finish(job) is JobState.DONE
    write_journal(service.files.of(job).journal, RecordedJob(2, 10.0), state="done")
    for path in (service.files.of(job).history, service.files.of(job).commits):
        path.write_bytes(b"of Parquet")
    return job


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="Schemathesis is not installed: `openapi`")
def test_every_answer_is_as_it_is_described(folder: Path, model: bytes, asked: str) -> None:
    config = folder / "schemathesis.toml"
    with JobService(folder, failures=FailureLimit(most=10**9)) as service:
        job = done_job(service, model)
        config.write_text(CONFIG + (KNOWN.format(job=job) if asked == "a job" else ""))
        words = ["--config-file", str(config), "run", f"{service.url}/openapi.json", "--checks", "all"]
        words += ["--header", f"Authorization: Bearer {service.tokens['admin']}", "--max-examples", "20", "--seed", "1"]
        words += ASKED[asked]
        done = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", *words],
            capture_output=True,
            text=True,
            timeout=patience(200),
            env=os.environ | {"NO_COLOR": "1"},
            cwd=folder,
        )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert asked == "ends" or "Authentication failed" not in done.stdout
    assert asked != "a job" or "404 Not Found" not in done.stdout

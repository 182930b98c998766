"""Dynamic allocation: a job begins with the available executors, and later executors join it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from support.patience import patience, until
from support.training import cluster_job
from support.training.standalone import master, said, worker

CONF = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.executor.cores": "1",
    "spark.driver.host": "127.0.0.1",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_late_executor_joins_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker waits in the middle of its rows until the second one trains in another executor."""
    monkeypatch.setenv("PYTHONPATH", cluster_job.PYTHONPATH)  # the executors use it as well
    with ExitStack() as stack:
        url = stack.enter_context(master(tmp_path))
        stack.enter_context(worker(tmp_path / "first", url))
        options = " ".join(f"--conf {name}={value}" for name, value in CONF.items())
        folder = tmp_path / "job"
        folder.mkdir()
        driver = cluster_job.start(
            folder, "classic", url, "meeting@driver", PYSPARK_SUBMIT_ARGS=f"{options} pyspark-shell"
        )
        said(tmp_path / "master", "Registered app .* with ID ")
        until(lambda: driver.poll() is not None or any(folder.glob("marker of *")))
        stack.enter_context(worker(tmp_path / "second", url))
        found = cluster_job.outcomes(driver, patience(200))["meeting@driver"]
    assert (found["attempts"], found["incarnations"], found["events"]) == ([1, 1], 1, [])

"""Stage-level scheduling: what Spark gives to a worker's task."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.patience import patience
from support.training import cluster_job


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["classic", "connect"])
def test_a_worker_that_takes_two_cores(kind: str, tmp_path: Path) -> None:
    """Both cores of an executor, so that the two workers meet in two executors; each computes with two threads."""
    if kind == "connect":
        pytest.importorskip("grpc")
    started = cluster_job.start(tmp_path, kind, "local-cluster[2,2,1024]", "meeting@resources")
    found = cluster_job.outcomes(started, patience(200))["meeting@resources"]
    assert (found["threads"], found["attempts"]) == (["2", "2"], [1, 1])

"""Stage-level scheduling: the resources that Spark assigns to a worker's task."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.patience import patience
from support.training import cluster_job


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["classic", "connect"])
def test_a_worker_computes_on_two_cores(kind: str, tmp_path: Path) -> None:
    """A task takes both cores of an executor: the two workers run in two executors, with two threads each."""
    if kind == "connect":
        pytest.importorskip("grpc")
    started = cluster_job.start(tmp_path, kind, "local-cluster[2,2,1024]", "meeting@resources")
    found = cluster_job.outcomes(started, patience(200))["meeting@resources"]
    assert (found["threads"], found["attempts"]) == (["2", "2"], [1, 1])

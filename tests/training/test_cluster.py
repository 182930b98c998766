"""Jobs on two executors, of which one is killed, or a task of the server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.patience import patience
from support.training import cluster_job


# Spark computes lost blocks again in another order: each worker's rows and their order stay the same. A worker that
# outlives its executor holds the partition's lease until it ends, while Spark runs the next attempt.
@pytest.mark.parametrize("kill", ["executor", *(pytest.param(k, marks=pytest.mark.slow) for k in ("blocks", "orphan"))])
def test_a_job_on_two_executors_survives_a_killed_executor(tmp_path: Path, kill: str) -> None:
    started = cluster_job.start(tmp_path, "classic", "local-cluster[2,1,1024]", f"{kill}@driver")
    found = cluster_job.outcomes(started, patience(280))[f"{kill}@driver"]
    assert (found["lost"], found["attempts"]) == (1, [1, 2])
    if hasattr(os, "memfd_create"):
        assert found["shared"] > 2  # the workers of two executors, and a next attempt


# Six slots: for the sequencer, two shards, two workers, and the driver's requests.
@pytest.mark.slow
@pytest.mark.parametrize("kill", ["shard", "server", "shard_executor", "server_executor"])
def test_a_job_with_shards_in_the_cluster_survives_kills(tmp_path: Path, kill: str) -> None:
    started = cluster_job.start(tmp_path, "classic", "local-cluster[2,3,1024]", f"{kill}@shards")
    found = cluster_job.outcomes(started, patience(280))[f"{kill}@shards"]
    assert found["incarnations"] == 2


@pytest.mark.slow
def test_shards_that_spark_does_not_retry_are_started_again_by_the_driver(tmp_path: Path) -> None:
    started = cluster_job.start(tmp_path, "classic", "local[6]", "shard@shards")
    found = cluster_job.outcomes(started, patience(280))["shard@shards"]
    assert ["driver", "restart"] in found["events"]

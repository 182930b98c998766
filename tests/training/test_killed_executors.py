"""Executors, servers and workers that are killed in the midst of a job: on real executors, classic and under Connect.

A process has classic Spark or Connect, and one context at most, so drivers are processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import cluster_job
from support.patience import patience

EXECUTORS = "local-cluster[2,2,1024]"
TESTS = Path(__file__).parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def run(folder: Path, kind: str, *names: str) -> dict[str, dict[str, Any]]:
    """What became of each job of `support.cluster_job`, by its name; that each was exact."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, cluster_job.__file__, str(folder), kind, EXECUTORS, *names],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_TESTING": "1",  # Connect: any free port
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=patience(450),
    )
    told = [line for line in done.stderr.splitlines() if not line.lstrip().startswith("at ")]  # the JVM's frames
    assert done.returncode == 0, "\n".join(told[-80:])
    found = {one["name"]: one for one in map(json.loads, filter(_is_outcome, done.stdout.splitlines()))}
    assert list(found) == list(names)
    for one in found.values():
        assert one["fired"]
        assert one["counts"] == [cluster_job.EPOCHS]
        assert one["exact"]
        assert one["samples"] == cluster_job.EPOCHS * cluster_job.ROWS
    return found


def _is_outcome(line: str) -> bool:
    return line.startswith("{")


@pytest.mark.parametrize("kind", ["classic", "connect"])
def test_the_server_is_a_task_in_the_cluster(kind: str, tmp_path: Path) -> None:
    if kind == "connect":
        pytest.importorskip("grpc")
    kills = ("nothing", "worker", "executor", "server", "server_executor")
    found = run(tmp_path, kind, *(f"{kill}@cluster" for kill in kills))
    assert (found["nothing@cluster"]["attempts"], found["nothing@cluster"]["incarnations"]) == ([1, 1], 1)
    assert max(found["worker@cluster"]["attempts"]) == 2
    executor = found["executor@cluster"]  # which the server may have been in as well
    assert max(executor["attempts"]) == 2 or ["server", "restart"] in executor["events"]
    for kill in ("server", "server_executor"):
        assert found[f"{kill}@cluster"]["incarnations"] == 2
        assert ["server", "restart"] in found[f"{kill}@cluster"]["events"]


def test_connect_and_the_server_beside_its_client(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    found = run(tmp_path, "connect", "worker@driver", "executor@driver", "worker@estimator", "executor@estimator")
    for one in found.values():
        assert (one["attempts"], one["incarnations"]) == ([1, 2], 1)

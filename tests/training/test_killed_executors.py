"""Executors, servers and workers that are killed during a job, on a cluster of executors and under Connect."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.patience import patience
from support.training import cluster_job
from support.training.standalone import master, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def run(folder: Path, kind: str, *names: str, executors: str = "local-cluster[2,2,1024]") -> dict[str, dict[str, Any]]:
    """Run `cluster_job.outcomes` in a process of its own and return the outcomes by name."""
    found = cluster_job.outcomes(cluster_job.start(folder, kind, executors, *names), patience(450))
    assert list(found) == list(names)
    return found


KILLS = ("nothing", "worker", "executor", "server", "server_executor")
IN_CLUSTER = [f"{kill}@cluster" for kill in KILLS]


@pytest.mark.parametrize("kind", ["classic", "connect"])
def test_a_job_with_its_server_in_the_cluster_survives_kills(kind: str, tmp_path: Path) -> None:
    if kind == "connect":
        pytest.importorskip("grpc")
    require_survived(run(tmp_path, kind, *IN_CLUSTER))


def test_a_job_with_its_server_on_a_standalone_master_survives_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", cluster_job.PYTHONPATH)  # the executors use it as well
    folder = tmp_path / "job"
    folder.mkdir()
    with ExitStack() as stack:
        url = stack.enter_context(master(tmp_path))
        for number in range(2):
            stack.enter_context(worker(tmp_path / f"worker-{number}", url, cores=2))
        found = run(folder, "classic", *IN_CLUSTER, executors=url)
    require_survived(found)


def require_survived(found: dict[str, dict[str, Any]]) -> None:
    """Assert that a server's task that died ran again and that other attempts took over the workers' partitions."""
    assert (found["nothing@cluster"]["attempts"], found["nothing@cluster"]["incarnations"]) == ([1, 1], 1)
    assert max(found["worker@cluster"]["attempts"]) == 2
    executor = found["executor@cluster"]  # the server may have run in the killed executor as well
    assert max(executor["attempts"]) == 2 or ["server", "restart"] in executor["events"]
    for kill in ("server", "server_executor"):
        assert found[f"{kill}@cluster"]["incarnations"] == 2
        assert ["server", "restart"] in found[f"{kill}@cluster"]["events"]


def test_a_connect_job_with_its_server_at_the_client_survives_kills(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    found = run(tmp_path, "connect", "worker@driver", "executor@driver", "worker@estimator", "executor@estimator")
    for one in found.values():
        assert (one["attempts"], one["incarnations"]) == ([1, 2], 1)

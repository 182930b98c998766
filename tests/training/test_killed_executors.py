"""Executors, servers and workers that are killed in the middle of a job, on real executors; under Connect, too."""

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
    """See `cluster_job.outcomes`."""
    found = cluster_job.outcomes(cluster_job.start(folder, kind, executors, *names), patience(450))
    assert list(found) == list(names)
    return found


KILLS = ("nothing", "worker", "executor", "server", "server_executor")
IN_CLUSTER = [f"{kill}@cluster" for kill in KILLS]


@pytest.mark.parametrize("kind", ["classic", "connect"])
def test_the_server_is_a_task_in_the_cluster(kind: str, tmp_path: Path) -> None:
    if kind == "connect":
        pytest.importorskip("grpc")
    require_survived(run(tmp_path, kind, *IN_CLUSTER))


def test_the_server_is_a_task_on_a_standalone_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", cluster_job.PYTHONPATH)  # of the executors, too
    folder = tmp_path / "job"
    folder.mkdir()
    with ExitStack() as stack:
        url = stack.enter_context(master(tmp_path))
        for number in range(2):
            stack.enter_context(worker(tmp_path / f"worker-{number}", url, cores=2))
        found = run(folder, "classic", *IN_CLUSTER, executors=url)
    require_survived(found)


def require_survived(found: dict[str, dict[str, Any]]) -> None:
    """That the server's task was run again where it died, and workers were taken over."""
    assert (found["nothing@cluster"]["attempts"], found["nothing@cluster"]["incarnations"]) == ([1, 1], 1)
    assert max(found["worker@cluster"]["attempts"]) == 2
    executor = found["executor@cluster"]  # which the server may have been in as well
    assert max(executor["attempts"]) == 2 or ["server", "restart"] in executor["events"]
    for kill in ("server", "server_executor"):
        assert found[f"{kill}@cluster"]["incarnations"] == 2
        assert ["server", "restart"] in found[f"{kill}@cluster"]["events"]


def test_connect_and_the_server_at_its_client(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    found = run(tmp_path, "connect", "worker@driver", "executor@driver", "worker@estimator", "executor@estimator")
    for one in found.values():
        assert (one["attempts"], one["incarnations"]) == ([1, 2], 1)

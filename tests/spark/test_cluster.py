"""Facts that a session reports, and the Python interpreter of its tasks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from distkeras.data.schema import map_in_arrow
from distkeras.spark import cluster as sessions
from distkeras.spark.cluster import SparkFacts


def interpreters(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in records:
        yield pa.RecordBatch.from_pydict({"python": [sys.executable]})


# Like a function of a notebook: workers cannot import this module and receive the function by value.
interpreters.__module__ = "__main__"


def pythons(spark: SparkSession) -> list[str]:
    return [row["python"] for row in map_in_arrow(spark.range(1), interpreters, "python string").collect()]


class TestDriversPython:
    @pytest.fixture(autouse=True)
    def no_python_on_the_path(self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
        """Undo the interpreter settings that this session was started with."""
        monkeypatch.delenv("PYSPARK_PYTHON")
        monkeypatch.setattr(sessions, "_DEFAULT_PYTHON", "no-such-python", raising=True)
        monkeypatch.setattr(spark.sparkContext, "pythonExec", "no-such-python")

    def test_tasks_run_on_the_drivers_python_by_default(self, spark: SparkSession) -> None:
        assert pythons(spark) == [sys.executable]
        assert spark.sparkContext.pythonExec == "no-such-python"  # other functions keep their interpreter

    @pytest.mark.parametrize("chosen", ["PYSPARK_PYTHON", "pythonExec"])
    def test_a_chosen_python_is_not_changed(
        self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, chosen: str
    ) -> None:
        if chosen == "PYSPARK_PYTHON":
            monkeypatch.setenv(chosen, "no-such-python")
        else:
            monkeypatch.setattr(spark.sparkContext, chosen, "another-python")
        with pytest.raises(Exception, match=r"Cannot run program .*-python"):
            pythons(spark)

    def test_the_python_of_a_cluster_is_not_changed(self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(spark.sparkContext, "master", "spark://somewhere:7077")
        with pytest.raises(Exception, match="Cannot run program"):
            pythons(spark)


def session(master: str, parallelism: int = 0, **settings: Any) -> Any:
    """Return an object with the attributes of a session that determine its slots."""
    values = {"spark.master": master, **{name.replace("_", "."): str(value) for name, value in settings.items()}}
    context = SimpleNamespace(
        master=master, defaultParallelism=parallelism, getConf=lambda: SimpleNamespace(contains=values.__contains__)
    )
    return SimpleNamespace(conf=SimpleNamespace(getAll=values), sparkContext=context)


EXECUTORS: dict[str, Any] = {"spark_executor_instances": "3", "spark_executor_cores": "5"}


@pytest.mark.parametrize(
    ("found", "slots"),
    [
        (session("local"), 1),
        (session("local[4]"), 4),
        (session("local[4,2]"), 4),
        (session("local[ 4, 2 ]"), 4),
        (session("local[*]", 6), 6),
        (session("local[*,3]", 6), 6),
        (session("local[*]", 6, spark_default_parallelism="6"), None),
        (session("local[4]", spark_task_cpus="2"), 2),
        (session("local-cluster[2,3,1024]"), 6),
        (session("local-cluster[2,3,1024]", spark_task_cpus="2"), 2),
        (session("yarn"), None),
        (session("yarn", **EXECUTORS), 15),
        (session("yarn", **EXECUTORS, spark_task_cpus="2"), 6),
        (session("yarn", **EXECUTORS, spark_dynamicAllocation_enabled="true"), None),
        (session("k8s://https://host:443", spark_executor_cores="5"), None),
    ],
)
def test_the_number_of_slots_follows_from_the_settings(found: Any, slots: int | None) -> None:
    assert SparkFacts.of(found).slots() == ({} if slots is None else {"cores": slots})


#: Executors with 5 cores and 4 GPUs.
WITH_GPUS = {**EXECUTORS, "spark_executor_resource_gpu_amount": "4"}


@pytest.mark.parametrize(("amount", "slots"), [("1", 12), ("2", 6), ("3", 3), ("0.5", 24), ("0.3", 36)])
def test_the_number_of_slots_follows_from_the_gpus(amount: str, slots: int) -> None:
    facts = SparkFacts.of(session("yarn", **WITH_GPUS, spark_task_resource_gpu_amount=amount))
    assert facts.slots() == {"cores": 15, "gpu": slots}


def test_the_number_of_slots_follows_from_the_resources_of_tasks() -> None:
    profile: Any = SimpleNamespace(executorResources={}, taskResources={"cpus": SimpleNamespace(amount=2.0)})
    assert SparkFacts.of(session("local-cluster[3,5,1024]", spark_task_cpus="1")).slots(profile) == {"cores": 6}
    profile.taskResources = {"gpu": SimpleNamespace(amount=2.0)}
    found = session("yarn", **WITH_GPUS, spark_task_cpus="2", spark_task_resource_gpu_amount="1")
    assert SparkFacts.of(found).slots(profile) == {"cores": 6, "gpu": 6}
    assert SparkFacts.of(session("yarn", **EXECUTORS)).slots(profile) == {"cores": 15, "gpu": 0}
    profile.executorResources = {"cores": SimpleNamespace(amount=8.0)}
    assert SparkFacts.of(session("yarn", **EXECUTORS)).slots(profile) == {}


def test_a_later_builder_does_not_change_the_slots() -> None:
    """`getOrCreate` writes its settings into a running session, which keeps its master."""
    found = session("local[2]")
    found.conf.getAll["spark.master"] = "local[8]"
    assert SparkFacts.of(found).slots() == {"cores": 2}


def test_the_number_of_slots_of_a_running_session_is_found(spark: SparkSession) -> None:
    assert SparkFacts.of(spark).slots() == {"cores": 2}

"""A warm session, whose Python workers start with Keras imported; it is the session of all tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import psutil
import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession
from support.patience import patience, until
from support.processes import descendants

from distkeras.ps.errors import ConfigurationError
from distkeras.spark import session
from distkeras.spark.daemon import without_traces


def end_workers() -> None:
    """Kill the Python workers, so that Spark forks new ones without a TensorFlow runtime for the next job."""
    found = list(descendants("distkeras.spark.daemon"))
    daemons = {process.pid for process in found}  # forked workers have the daemon's command line
    killed = []
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):  # Spark may have ended an idle worker
            if process.ppid() in daemons:
                process.kill()
                killed.append(process)
    until(lambda: not any(process.is_running() for process in killed))


@pytest.mark.slow
def test_workers_are_forked_with_keras_imported(spark: SparkSession) -> None:
    def probe(rows: Iterable[int]) -> Iterator[dict[str, Any]]:
        # These imports come before any import of the task itself.
        import os
        import sys
        from pathlib import Path

        yield {name: name in sys.modules for name in ("keras", "pandas", "pyarrow", "distkeras.training.task")} | {
            "backend": sys.modules["keras"].config.backend() if "keras" in sys.modules else None,
            "threads": len(list(Path("/proc/self/task").iterdir())),
            "parent": os.getppid(),
            "torch": os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"),
        }

    def probed() -> list[dict[str, Any]]:
        try:
            return spark.sparkContext.parallelize(range(2), 2).mapPartitions(probe).collect()
        except Py4JJavaError as error:
            if "Stream closed" in str(error):  # Spark has given a task an idle worker that was killed
                return []
            raise

    end_workers()
    found: list[dict[str, Any]] = []
    until(lambda: found.extend(probed()) or found)
    import keras

    for worker in found:
        assert worker["keras"]
        assert worker["pandas"]
        assert worker["pyarrow"]
        assert worker["distkeras.training.task"]
        assert worker["backend"] == keras.config.backend()
        assert worker["torch"] == "1", "PyTorch must not start CUDA before the fork"
        assert worker["threads"] == 1, "a runtime must not have started threads before the fork"
    assert len({worker["parent"] for worker in found}) == 1


def test_a_reader_that_has_enough_rows_is_no_error() -> None:
    def worker(code: int) -> int:
        if code == 0:
            raise BrokenPipeError
        return code

    assert [without_traces(worker)(code) for code in (0, 7)] == [1, 7]


def test_workers_of_rdds_and_of_queries_share_one_daemon(spark: SparkSession) -> None:
    """Otherwise the session would import Keras again when rows are created from a Python list."""

    def probe(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        list(batches)
        yield pa.RecordBatch.from_pydict({"parent": [os.getppid()]})

    of_rdd = spark.sparkContext.parallelize([0], 1).map(lambda _: os.getppid()).collect()
    of_query = spark.range(1, numPartitions=1).mapInArrow(probe, "parent long").collect()
    assert of_rdd == [row.parent for row in of_query]


def test_workers_have_the_environment_that_keras_reads(spark: SparkSession) -> None:
    assert spark.conf.get("spark.executorEnv.TF_CPP_MIN_LOG_LEVEL") == "2"


def test_a_running_session_is_returned(spark: SparkSession) -> None:
    assert session() is spark


def test_a_running_session_with_other_settings_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigurationError, match=r"spark\.python\.daemon\.module.* Received: a running session"):
        session("local[2]", config={"spark.python.daemon.module": "pyspark.daemon"})


SESSION = """
import logging, sys
logging.basicConfig(format="%(message)s")
from distkeras.spark import session
assert "keras" not in sys.modules
spark = session("local[1]", config={{"spark.ui.enabled": "false", "spark.log.level": "ERROR"}}, warm_up={warm_up})
print("keras" in sys.modules, spark.range(3).count())
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("warm_up", "backend", "found", "logged"),
    [
        (True, None, True, ""),
        (False, None, False, ""),
        (True, "unknown", False, "Keras could not be imported"),
    ],
)
def test_the_driver_has_imported_keras_when_the_session_is_returned(
    monkeypatch: pytest.MonkeyPatch, warm_up: bool, backend: str | None, found: bool, logged: str
) -> None:
    if backend is not None:
        monkeypatch.setenv("KERAS_BACKEND", backend)
    command = [sys.executable, "-c", SESSION.format(warm_up=warm_up)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120), check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(found), "3"]
    # The session may end before its warm-up, which then logs other lines.
    warnings = [line for line in done.stderr.splitlines() if "could not be" in line]
    assert len(warnings) == bool(logged)
    assert all(line.startswith(logged) for line in warnings)

"""A session whose workers begin with Keras imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from support.patience import patience

from distkeras.ps.errors import ConfigurationError
from distkeras.spark import CONFIG, session

PROGRAM = """
import json, os, sys
from distkeras.spark import session

def probe(rows):
    # Before anything of the task's own is imported.
    yield {name: name in sys.modules for name in ("keras", "pandas", "pyarrow", "distkeras.job.task")} | {
        "backend": sys.modules["keras"].config.backend() if "keras" in sys.modules else None,
        "threads": len(os.listdir("/proc/self/task")), "parent": os.getppid()}

spark = session("local[2,2]", config={"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1"})
assert session() is spark
found = spark.sparkContext.parallelize(range(2), 2).mapPartitions(probe).collect()
spark.stop()
print(json.dumps(found))
"""


def test_workers_are_forked_with_keras_imported(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "KERAS_BACKEND": "tensorflow"},
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for worker in found:
        assert worker["keras"]
        assert worker["pandas"]
        assert worker["pyarrow"]
        assert worker["distkeras.job.task"]
        assert worker["backend"] == "tensorflow"
        assert worker["threads"] == 1, "nothing of a runtime may have started before the fork"
    assert len({worker["parent"] for worker in found}) == 1


def test_a_session_that_started_otherwise_is_not_taken_for_one(spark: SparkSession) -> None:
    assert spark.conf.get("spark.python.daemon.module", None) not in CONFIG.values()
    with pytest.raises(ConfigurationError, match=r"spark\.python\.daemon\.module"):
        session("local[2]")

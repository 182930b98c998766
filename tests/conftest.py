"""For all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from support.patience import patience

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# How long an example takes depends on who else computes; nothing here asserts times.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

#: Folders of tests that start whole programs. Last, one of them would keep one process busy while another idles.
LONGEST = ("notebooks", "scripts", "docs", "training", "transformers")

# A Java process lives for seconds here, too short for its second compiler to pay; that of a subprocess too.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first; and each test's limit is longer on a slow machine."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.parent.name, len(ranks)))
    for item in items:
        marker = item.get_closest_marker("timeout")
        seconds = marker.args[0] if marker else float(config.getoption("timeout") or config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(patience(seconds)), append=False)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One for all tests of a process, since starting it takes longer than most of them.

    Two cores, and a second attempt of a failed task: `local[2]` would never retry one, and more show nothing new.
    """
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    session = (
        SparkSession.builder.master("local[2,2]")
        .appName("distkeras tests")
        .config("spark.driver.memory", "2g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.python.daemon.module", "warm_daemon")
        .config("spark.executorEnv.PYTHONPATH", str(Path(__file__).parent / "support" / "worker_path"))
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")  # the failures here are meant
    yield session
    session.stop()

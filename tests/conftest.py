"""Settings, order and Spark session of all tests."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from support.patience import patience

from distkeras import chatter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The time of an example depends on the load of the machine; no test asserts a time.
UNTIMED = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
# Each run has the same examples, so a failure is repeatable; `--hypothesis-profile=explore` draws others. The default
# suite draws a fourth of the examples of "thorough"; `support.cases.examples` scales the tests' own numbers with it.
hypothesis.settings.register_profile("explore", UNTIMED)
hypothesis.settings.register_profile("thorough", UNTIMED, derandomize=True)
hypothesis.settings.register_profile("repeatable", UNTIMED, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("repeatable")

TESTS = Path(__file__).parent
#: Folders of tests that start whole programs or jobs. They run first, so that no process idles at the end.
LONGEST = (
    "notebooks",
    "training",
    "docs",
    "ml",
    "scripts",
    "faults",
    "transformers",
    "compat",
    "job_server",
    "conventions",
    "packaging",
)

# Modules and test items are never freed, so the garbage collector does not search them, now or later.
gc.disable()

# All processes of the tests have what is set here, and not what the package's import has filled in for a user.
chatter.end()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# A Java process lives for seconds, including those of subprocesses: too short for its second compiler, or the
# verification of Spark's bytecode, to be worth its time.
os.environ.setdefault(
    "JDK_JAVA_OPTIONS",
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote",
)


if "slipcover" in sys.modules:
    from support.coverage import let_probes_travel

    let_probes_travel()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for the length of the randomized tests."""
    parser.addoption("--pairs", type=int, default=None, help="pairs of jobs that a differential test draws")
    parser.addoption("--requests-seconds", type=int, default=30, help="seconds that a job server is sent requests")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute the files over the processes so that only some of them start Spark."""
    from support.distribution import SparkApart

    return SparkApart(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the longest files first, and extend each test's time limit on a slow machine."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(Path(os.path.relpath(item.path, TESTS)).parts[0], len(ranks)))
    for item in items:
        marker = item.get_closest_marker("timeout")
        seconds = marker.args[0] if marker else float(config.getoption("timeout") or config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(patience(seconds)), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Enable the garbage collector for the objects that tests create."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Yield the session of all tests of a process, because starting it takes longer than most tests.

    It has two cores and retries a failed task once: `local[2]` would never retry one, and more cores find no more.
    """
    from distkeras.spark import session

    os.environ["PYSPARK_PYTHON"] = sys.executable
    config = {
        "spark.driver.memory": "2g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    started = session("local[2,2]", app_name="distkeras tests", config=config)
    started.sparkContext.setLogLevel("OFF")  # failures in these tests are intended
    for thread in threading.enumerate():
        if thread.name == "distkeras-warm-up":
            thread.join(patience(120))
    yield started
    started.stop()

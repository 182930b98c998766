"""The Spark session of all programs of the quickstart, and the facts about the machine that their figures depend on."""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

WORKERS = 2
#: Seconds that the start of the Python workers may take.
_WARM_UP_SECONDS = 300.0
_LIBRARIES = ("distkeras", "pyspark", "keras", "tensorflow", "numpy", "pyarrow")


def session() -> SparkSession:
    """Return a session with two slots and four attempts of a task: `local[2]` would never retry one."""
    from distkeras.spark import session as ready_session

    os.environ["PYSPARK_PYTHON"] = sys.executable
    return ready_session(
        f"local[{WORKERS},4]",
        app_name="distkeras quickstart",
        config={
            "spark.driver.memory": "2g",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": str(WORKERS),
            "spark.sql.execution.arrow.pyspark.enabled": "true",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
        },
    )


def wait_until_warm() -> None:
    """Wait until the session's Python workers have imported Keras, which would take time from what is measured."""
    for thread in threading.enumerate():
        if thread.name == "distkeras-warm-up":
            thread.join(_WARM_UP_SECONDS)


def about(spark: SparkSession) -> dict[str, Any]:
    """Return the facts about machine and libraries, JSON-ready."""
    from importlib.metadata import PackageNotFoundError, version

    def version_of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:  # such as distkeras itself, when it runs from a checkout
            return None

    (java,) = spark.sql("select java_method('java.lang.System', 'getProperty', 'java.version')").first() or ("?",)
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "java": java,
        **{name: version_of(name) for name in _LIBRARIES},
    }


def log_to(path: Path) -> None:
    """Redirect the standard error of this process' libraries, the JVM and the workers into a file.

    Python's own `sys.stderr`, with the program's messages, stays where it was.
    """
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    path.write_bytes(b"")
    with path.open("ab") as log:  # Several processes append to it, and Python's loggers.
        os.dup2(log.fileno(), 2)
    logging.basicConfig(filename=path, format="%(asctime)s %(name)s: %(message)s")

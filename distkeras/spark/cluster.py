"""A Spark session's facts about its cluster, also under Spark Connect, and the Python interpreter of its tasks.

Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession

#: The interpreter that PySpark runs tasks on by default.
_DEFAULT_PYTHON = "python3"
_LOCAL = re.compile(r"local(?:\[\s*(\d+|\*)\s*(?:,\s*\d+\s*)?\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]")
#: The settings of Spark that are read.
_SETTINGS = (
    "spark.master", "spark.driver.host", "spark.driver.port", "spark.task.cpus", "spark.executor.instances",
    "spark.executor.cores", "spark.dynamicAllocation.enabled", "spark.ui.showConsoleProgress",
)  # fmt: skip
#: Guards `SparkContext.pythonExec` while it is replaced.
_python_lock = threading.Lock()


def is_local(master: str) -> bool:
    """Return whether Spark runs as one process under this ``spark.master``."""
    return _LOCAL.fullmatch(master) is not None


def context_of(session: SparkSession) -> SparkContext | None:
    """Return the session's Spark context; None under Spark Connect, which has none."""
    from pyspark.errors import PySparkException

    try:
        return session.sparkContext
    except PySparkException:
        return None


def is_stopped(session: SparkSession) -> bool:
    """Return whether a session has ended, and its DataFrames with it."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    context = context_of(session)
    if context is None:
        return bool(getattr(session, "is_stopped", False))
    try:
        return context.defaultParallelism < 1  # a stopped context raises, or returns 0
    except (AttributeError, OSError, Py4JError, PySparkException):
        return True


@dataclass(frozen=True)
class SparkFacts:
    """The facts that a Spark session knows about its cluster, read once.

    Args:
        connect: it is a session of Spark Connect, which hides the rest.
        master: the running master; a later builder may have overwritten the session's own setting.
        parallelism: Spark's default; None under Spark Connect.
        cores_known: the default parallelism of ``local[*]`` is the number of its cores.
        settings: those of `_SETTINGS` that are set.
    """

    connect: bool
    master: str
    parallelism: int | None
    cores_known: bool
    settings: Mapping[str, str]

    @classmethod
    def of(cls, session: SparkSession) -> SparkFacts:
        """Read the facts of ``session``."""
        context = context_of(session)
        values = {name: session.conf.get(name, None) for name in _SETTINGS}
        settings = {name: str(value) for name, value in values.items() if value is not None}
        if context is None:
            return cls(True, settings.get("spark.master", "local"), None, False, settings)
        cores_known = not context.getConf().contains("spark.default.parallelism")
        return cls(False, str(context.master), context.defaultParallelism, cores_known, settings)

    @property
    def local(self) -> bool:
        """Return whether tasks run within the driver's own process."""
        return is_local(self.master)

    def default_workers(self) -> int:
        """Return Spark's default parallelism; raise ConfigurationError under Spark Connect, which hides it."""
        if self.parallelism is None:
            raise ConfigurationError("`num_workers` must be given under Spark Connect. Received: None")
        return self.parallelism

    def driver_host(self) -> str:
        """Return the driver's address for executors; raise ConfigurationError under Spark Connect, which hides it."""
        if self.local:
            return "127.0.0.1"
        if self.connect:
            raise ConfigurationError(
                "`host` must be given under Spark Connect: the parameter server runs next to this client, at an "
                "address that executors can reach. Received: None"
            )
        return self.settings.get("spark.driver.host", "127.0.0.1")

    @property
    def console_bar(self) -> bool:
        """Return whether Spark shows its own progress bar on the console, as it does in shells."""
        return self.settings.get("spark.ui.showConsoleProgress") == "true"

    @property
    def driver_address(self) -> tuple[str, int] | None:
        """The address at which every executor can reach Spark's driver; None if it is unknown."""
        host, port = self.settings.get("spark.driver.host"), self.settings.get("spark.driver.port", "")
        return (host, int(port)) if host and port.isdecimal() and int(port) else None

    def server_host(self) -> str:
        """Return the address that a server in the cluster binds: loopback for a local master, else "" for any."""
        return "127.0.0.1" if self.local and not self.connect else ""

    def slots(self, resources: ResourceProfile | None = None) -> int | None:
        """Return how many tasks Spark can run at once; None if that is unknown before the job."""
        each_task = int(self.settings.get("spark.task.cpus", "1"))
        if resources is not None:
            if resources.executorResources:  # Spark starts new executors for these
                return None
            request = resources.taskResources.get("cpus")
            each_task = int(request.amount) if request else each_task
        if (local := _LOCAL.fullmatch(self.master)) is not None:
            return self._local_cores(local[1]) // each_task or None
        if (cluster := _LOCAL_CLUSTER.fullmatch(self.master)) is not None:
            return int(cluster[1]) * (int(cluster[2]) // each_task) or None
        if self.settings.get("spark.dynamicAllocation.enabled", "false") == "false":
            instances = self.settings.get("spark.executor.instances", "")
            cores = self.settings.get("spark.executor.cores", "")
            if instances.isdecimal() and cores.isdecimal():
                return int(instances) * (int(cores) // each_task)
        return None

    def _local_cores(self, number: str | None) -> int:
        """Return the cores of ``local[number]``; 0 if they are unknown."""
        if number != "*":
            return int(number or 1)
        return self.parallelism if self.cores_known and self.parallelism is not None else 0


@contextmanager
def drivers_python(df: DataFrame) -> Iterator[None]:
    """Make tasks on this machine use this Python interpreter, unless the user has chosen one.

    PySpark would use the first ``python3`` of the path, which is another one if a virtual environment is not activated.
    This applies only to functions that Spark receives within the context, also in a session that runs already.
    """
    context = context_of(df.sparkSession)
    if context is None or not str(context.master).startswith("local") or _python_chosen(context):
        yield
        return
    with _python_lock:
        before, context.pythonExec = context.pythonExec, sys.executable
        try:
            yield
        finally:
            context.pythonExec = before


def tasks_python(session: SparkSession) -> str:
    """Return a text that names the Python interpreter of tasks; Spark Connect hides it."""
    context = context_of(session)
    if context is None:
        return "the Python of the Spark Connect server"
    return repr(context.pythonExec if _python_chosen(context) else sys.executable)


def _python_chosen(context: SparkContext) -> bool:
    return context.pythonExec != _DEFAULT_PYTHON or "PYSPARK_PYTHON" in os.environ or not sys.executable

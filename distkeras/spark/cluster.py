"""What a Spark session says of its cluster, under Spark Connect too, and which Python its tasks run on.

Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession

#: What PySpark runs tasks on where nobody says.
_DEFAULT_PYTHON = "python3"
_LOCAL = re.compile(r"local(?:\[\s*(\d+|\*)\s*(?:,\s*\d+\s*)?\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]")
#: Guards `SparkContext.pythonExec` while it is another one.
_python_lock = threading.Lock()


def context_of(session: SparkSession) -> SparkContext | None:
    """The session's Spark context; None under Spark Connect, which has none."""
    from pyspark.errors import PySparkException

    try:
        return session.sparkContext
    except PySparkException:
        return None


def is_stopped(session: SparkSession) -> bool:
    """Whether a session has ended, and its DataFrames with it."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    context = context_of(session)
    if context is None:
        return bool(getattr(session, "is_stopped", False))
    try:
        return context.defaultParallelism < 1  # whatever a stopped context refuses to tell
    except (AttributeError, OSError, Py4JError, PySparkException):
        return True


def default_workers(session: SparkSession) -> int:
    """Spark's default parallelism.

    Raises:
        ConfigurationError: Spark Connect hides it.
    """
    context = context_of(session)
    if context is None:
        raise ConfigurationError("`num_workers` must be given under Spark Connect. Received: None")
    return context.defaultParallelism


def driver_host(session: SparkSession) -> str:
    """The driver's address for executors: loopback for a local master.

    Raises:
        ConfigurationError: Spark Connect hides it.
    """
    if is_local(session):
        return "127.0.0.1"
    if context_of(session) is None:
        raise ConfigurationError(
            "`host` must be given under Spark Connect: the parameter server runs next to this client, at an address "
            "that executors can reach. Received: None"
        )
    return _setting(session, "spark.driver.host", "127.0.0.1")


def server_host(session: SparkSession) -> str:
    """The address that a server in the cluster binds: loopback for a local master, "" for that of its executor."""
    return "127.0.0.1" if context_of(session) is not None and is_local(session) else ""


def is_local(session: SparkSession) -> bool:
    """Whether tasks run within the driver's own process."""
    return _LOCAL.fullmatch(master_of(session)) is not None


def known_slots(session: SparkSession, resources: ResourceProfile | None = None) -> int | None:
    """How many tasks Spark can run at once: on a local master, or with a fixed number of executors; else None.

    Args:
        session: Spark's.
        resources: the tasks' `ResourceProfile`, or None.
    """
    master, each_task = master_of(session), _task_cores(session)
    if resources is not None:
        if resources.executorResources:  # for executors that are not there yet
            return None
        told = resources.taskResources.get("cpus")
        each_task = int(told.amount) if told else each_task
    if (local := _LOCAL.fullmatch(master)) is not None:
        return _local_cores(session, local[1]) // each_task or None
    if (cluster := _LOCAL_CLUSTER.fullmatch(master)) is not None:
        return int(cluster[1]) * (int(cluster[2]) // each_task) or None
    if _setting(session, "spark.dynamicAllocation.enabled", "false") == "false":
        instances = _setting(session, "spark.executor.instances", "")
        each = _setting(session, "spark.executor.cores", "")
        if instances.isdecimal() and each.isdecimal():
            return int(instances) * (int(each) // each_task)
    return None


def has_console_bar(session: SparkSession) -> bool:
    """Whether Spark shows its own progress on the console: so it does in shells, and where plain Python starts it."""
    return _setting(session, "spark.ui.showConsoleProgress", "false") == "true"


@contextmanager
def drivers_python(df: DataFrame) -> Iterator[None]:
    """Let tasks run on this interpreter, where they run on this machine and no other one was chosen.

    PySpark takes the first ``python3`` of the path otherwise, which is another one wherever a virtual environment is
    not activated. It counts for the functions that Spark is handed within the context, in a session that runs already,
    too; all other functions stay where they were.
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
    """The interpreter that PySpark names to executors, in words; Spark Connect does not tell."""
    context = context_of(session)
    if context is None:
        return "the Python of the Spark Connect server"
    return repr(context.pythonExec if _python_chosen(context) else sys.executable)


def _python_chosen(context: SparkContext) -> bool:
    return context.pythonExec != _DEFAULT_PYTHON or "PYSPARK_PYTHON" in os.environ or not sys.executable


def master_of(session: SparkSession) -> str:
    """The master that runs; a session's own setting may have been written over by a later builder."""
    context = context_of(session)
    return _setting(session, "spark.master", "local") if context is None else str(context.master)


def _setting(session: SparkSession, name: str, default: str) -> str:
    return str(session.conf.get(name, default))


def _task_cores(session: SparkSession) -> int:
    return int(_setting(session, "spark.task.cpus", "1"))


def _local_cores(session: SparkSession, number: str | None) -> int:
    """The cores of ``local[number]``; 0 where they are not known."""
    if number != "*":
        return int(number or 1)
    context = context_of(session)
    if context is None or context.getConf().contains("spark.default.parallelism"):
        return 0
    return context.defaultParallelism  # of a local master: the cores that the JVM sees

"""A Spark session, also under Spark Connect: its cluster, its Python, its paths, and actions in separate threads.

Paths and URIs are texts that are not escaped for Hadoop: ``%20`` is three characters of a name there. Importing this
module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote_to_bytes, urlsplit

from distkeras.ps.errors import ConfigurationError, DeadlineError, headline
from distkeras.ps.world.files import is_uri

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
#: Those of resources such as GPUs: how many an executor has, and a task takes.
_RESOURCE = re.compile(r"spark\.(executor|task)\.resource\.(.+)\.amount")
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
        context = context_of(session)
        read = session.conf.getAll
        settings = {name: value for name, value in read.items() if name in _SETTINGS or _RESOURCE.fullmatch(name)}
        if context is None:
            return cls(True, settings.get("spark.master", "local"), None, False, settings)
        cores_known = not context.getConf().contains("spark.default.parallelism")
        return cls(False, str(context.master), context.defaultParallelism, cores_known, settings)

    @property
    def local(self) -> bool:
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

    def slots(self, resources: ResourceProfile | None = None) -> dict[str, int]:
        """Return how many tasks Spark can run at once, as each resource permits; empty if unknown before the job.

        The least of them holds. Resources are "cores", and those that a task takes, such as "gpu".
        """
        requests = {} if resources is None else resources.taskResources
        shares = {name: float(request.amount) for name, request in requests.items()}
        each_task = int(shares.pop("cpus", self.settings.get("spark.task.cpus", "1")))
        if resources is not None and resources.executorResources:  # Spark starts new executors for these
            return {}
        if (local := _LOCAL.fullmatch(self.master)) is not None:  # Spark assigns cores alone
            slots = self._local_cores(local[1]) // each_task
            return {"cores": slots} if slots else {}
        if (cluster := _LOCAL_CLUSTER.fullmatch(self.master)) is not None:
            instances, cores = cluster[1], cluster[2]
        else:
            instances = self.settings.get("spark.executor.instances", "")
            cores = self.settings.get("spark.executor.cores", "")
            if self.settings.get("spark.dynamicAllocation.enabled", "false") != "false":
                return {}
        if not (instances.isdecimal() and cores.isdecimal()):
            return {}
        each = {"cores": int(cores) // each_task}
        for name, amount in (self._amounts("task") if resources is None else shares).items():
            there = int(self._amounts("executor").get(name, 0))
            each[name] = there * int(1 / amount) if amount < 1 else there // int(amount)
        return {name: int(instances) * tasks for name, tasks in each.items()}

    def _amounts(self, of: str) -> dict[str, float]:
        """Return the amount of each resource that the session's settings give to an "executor" or a "task"."""
        found = {_RESOURCE.fullmatch(name): float(value) for name, value in self.settings.items() if ".amount" in name}
        return {name[2]: amount for name, amount in found.items() if name is not None and name[1] == of and amount > 0}

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


#: Characters of a pattern: Spark would read every folder that matches.
_PATTERN = re.compile(r"[*?\[{\\]")


def hadoop_path(spark: SparkSession, place: str, argument: str) -> str:
    """Return the path for Hadoop of a folder, an absolute path or a URI that Arrow opens too."""
    try:
        parts = urlsplit(place) if is_uri(place) else None
        path = place if parts is None else unquote_to_bytes(parts.path).decode()
        path.encode()
    except UnicodeError as error:
        raise ConfigurationError(f"`{argument}` must be in UTF-8, as Spark reads it. Received: {place!r}") from error
    if parts is not None and parts.scheme != "file":
        return f"{parts.scheme}://{parts.netloc}{path}"
    if ".." in Path(path).parts:  # Hadoop would drop the folder before it, also where that is a link
        path = str(Path(path).resolve())
    _require_java_name(spark, path, argument, place)
    # Spark would look for a path without a scheme in the cluster's default file system.
    return f"file://{path}"


def _require_java_name(spark: SparkSession, path: str, argument: str, place: str) -> None:
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - PySpark has no other way to the virtual machine
    try:
        jvm.java.io.File(path).toPath()
    except (Py4JJavaError, PySparkException) as error:  # PySpark turns some of Java's errors into its own
        raise ConfigurationError(
            f"`{argument}` must have a name that Spark's Java virtual machine can write under its locale "
            f"(`LC_ALL`, which must be one of UTF-8 when Spark starts). Received: {place!r}: "
            f"{error.java_exception.getMessage() if isinstance(error, Py4JJavaError) else headline(str(error))}"
        ) from error


def arrow_uri(path: str) -> str:
    """Return a path or URI that Spark was given as Arrow takes it, escaped."""
    if not is_uri(path):
        return path
    parts = path.partition("://") if "://" in path else path.partition(":")
    return f"{parts[0]}{parts[1]}{quote(parts[2], safe='/:@')}"


def require_no_pattern(path: str) -> str:
    """Return the argument ``path``; raise ConfigurationError if Spark takes it as a pattern when it reads."""
    if _PATTERN.search(path):
        raise ConfigurationError(
            "`path` must have none of the characters * ? [ { and \\, which Spark takes as a pattern of several paths "
            f"when it loads. Received: path={path!r}"
        )
    return path


def stage_path(spark: SparkSession, path: str) -> str:
    """Return the path of a stage that Spark writes or reads; a relative one of this machine is made absolute."""
    require_no_pattern(path)
    context = context_of(spark)
    if is_uri(path) or context is None:
        return path
    default = context._jsc.hadoopConfiguration().get("fs.defaultFS") or ""  # noqa: SLF001 - PySpark has no other way
    return str(Path(path).absolute()) if default.startswith("file:") else path


#: Seconds from one attempt to cancel a job to the next: Spark may not know the job yet.
_RETRY_SECONDS = 1.0


class SparkAction:
    """A Spark action in a separate thread, which starts at once, and calls ``on_end`` after success or failure."""

    def __init__(
        self,
        session: SparkSession,
        collect: Callable[[], list[Any]],
        name: str,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._session = session
        self._collect, self._on_end = collect, on_end
        self._tag = f"{name}-{uuid.uuid4().hex}"
        self._rows: list[Any] = []
        self._error: Exception | None = None
        self._ended = threading.Event()
        threading.Thread(target=in_callers_scope(session, self._run), name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            with tagged(self._session, self._tag):
                self._rows = self._collect()
        except Exception as error:  # noqa: BLE001 - raised again by `rows`
            self._error = error
        finally:
            self._ended.set()
            self._on_end()

    def ended(self, timeout: float = 0.0) -> bool:
        """Wait at most ``timeout`` seconds for the action to end, and return whether it has."""
        return self._ended.wait(timeout)

    def rows(self) -> list[Any]:
        """Return the rows of an action that has ended, or raise Spark's error; raise DeadlineError before its end."""
        if not self.ended():
            raise DeadlineError(
                "a Spark action must have ended before its rows are read. Received: one that still runs"
            )
        if self._error is not None:
            raise self._error
        return self._rows

    def cancel(self, seconds: float) -> None:
        """Cancel the action, and wait at most ``seconds`` until it has ended."""
        deadline = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < deadline:
            with contextlib.suppress(Exception):  # a session that has ended raises
                cancel_tagged(self._session, self._tag)
            self.ended(_RETRY_SECONDS)


def in_callers_scope(session: SparkSession, function: Callable[[], None]) -> Callable[[], None]:
    """Return ``function`` for another thread, with the calling thread's job group, pool, description and tags.

    Spark stores these per thread. Without them, ``cancelJobGroup`` and fair pools have no effect on our Spark jobs.
    """
    from pyspark import inheritable_thread_target

    wrapped: Callable[[], None] = inheritable_thread_target(session)(function)
    return wrapped


# A classic session's tags belong to one thread, and other threads cannot interrupt its jobs. So the tags of the Spark
# context are used, whose jobs any thread can cancel; Spark Connect has no context, but its session's tags are shared.


@contextlib.contextmanager
def tagged(session: SparkSession, tag: str) -> Iterator[None]:
    context = context_of(session)
    (context.addJobTag if context else session.addTag)(tag)
    try:
        yield
    finally:
        (context.removeJobTag if context else session.removeTag)(tag)


def cancel_tagged(session: SparkSession, tag: str) -> None:
    """Cancel the jobs that have a tag, from any thread."""
    context = context_of(session)
    (context.cancelJobsWithTag if context else session.interruptTag)(tag)

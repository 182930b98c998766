"""A Spark session that is warmed up: its Python workers begin with Keras imported, and so does the driver.

::

    from distkeras.spark import session

    spark = session("local[4,4]")                             # in a notebook or a script
    spark-submit --conf spark.python.daemon.module=distkeras.spark.daemon ...

This takes the settings of Spark in `CONFIG`, which must be set when a session starts. If the platform makes the
session, as a cluster's gateway does, put them into the configuration of the cluster. distkeras must be installed where
executors run; shipping it with the job does not suffice.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from distkeras import chatter
from distkeras.ps.errors import ConfigurationError
from distkeras.spark.cluster import is_stopped

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

#: Settings of Spark for workers that are forked from a daemon that has imported Keras. An executor starts another
#: daemon for each environment of its workers. Spark itself sets the variable below only for workers of SQL: without the
#: setting, rows from a Python list would get a second daemon, which imports Keras again.
CONFIG = {"spark.python.daemon.module": "distkeras.spark.daemon", "spark.executorEnv.SPARK_SIMPLIFIED_TRACEBACK": "1"}

#: Environment variables that workers get from the driver: Keras reads them only on its first import.
_ENVIRONMENT = ("KERAS_BACKEND", "KERAS_HOME", chatter.LEVEL, chatter.VARIABLE)

#: The modules that a session imports when it starts; Keras imports some of them too.
_SPARKS_OWN = ("pandas", "pyarrow", "google.protobuf", "pyspark.sql.classic.dataframe", "pyspark.sql.pandas.map_ops")
#: Seconds that the import of Keras may take after Spark has started; later imports of Keras wait for it.
_IMPORT_SECONDS = 120.0


def session(
    master: str | None = None,
    *,
    app_name: str = "distkeras",
    config: Mapping[str, Any] | None = None,
    warm_up: bool = True,
) -> SparkSession:
    """Return a Spark session whose Python workers begin with Keras and its backend imported.

    A local master runs this process' own Python interpreter, unless ``PYSPARK_PYTHON`` or ``spark.pyspark.python``
    names another one.

    Args:
        master: such as "local[4,4]" (four slots, up to four attempts of a task) or "yarn". Default: that of
            ``spark-submit`` or ``spark.master``.
        app_name: the name of the application.
        config: further settings of Spark; they override those of this function.
        warm_up: import Keras while Spark starts, so that Keras' environment variables must be set before; and start, in
            the background, everything that the first job of a session otherwise waits for: executors, the daemon on
            each of them, its imports.

    Raises:
        ConfigurationError: a session without these settings runs already, and Spark reads them only when it starts.
    """
    from pyspark.sql import SparkSession

    environment = {f"spark.executorEnv.{name}": os.environ[name] for name in _ENVIRONMENT if chatter.is_users(name)}
    settings = {**CONFIG, **environment, **(config or {})}
    running = SparkSession.getActiveSession()
    if running is not None:
        daemon = running.conf.get("spark.python.daemon.module", None)
        if daemon != settings["spark.python.daemon.module"]:
            raise ConfigurationError(
                "a session must be made before any other one: `spark.python.daemon.module` is read when Spark starts. "
                f"Received: a running session with {daemon!r} there; `stop()` it first"
            )
        return running
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
        if master.startswith("local") and "spark.pyspark.python" not in settings:
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for name, value in settings.items():
        builder = builder.config(name, value)
    with _import_keras_in_background() if warm_up else contextlib.nullcontext():
        spark = builder.getOrCreate()
    if warm_up:
        threading.Thread(target=_warm_up, args=(spark,), name="distkeras-warm-up", daemon=True).start()
    return spark


@contextlib.contextmanager
def _import_keras_in_background() -> Iterator[None]:
    """Import Keras in another thread, while this one waits for a JVM."""
    for name in _SPARKS_OWN:  # of two threads that import a module at once, one may see it half imported
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    thread = threading.Thread(target=_import_keras, name="distkeras-import", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(_IMPORT_SECONDS)


def _import_keras() -> None:
    from distkeras.spark.daemon import import_keras

    try:
        import_keras(on_driver=True)
    except Exception as error:  # noqa: BLE001 - a driver may not need Keras; a later import raises the error again
        log.warning("Keras could not be imported: %s", error)


def _warm_up(spark: SparkSession) -> None:
    """Run a job with one row per slot through Python workers: it makes Spark start executors and daemons."""

    def through(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from records

    slots = spark.sparkContext.defaultParallelism
    try:
        spark.range(slots, numPartitions=slots).mapInArrow(through, "id long").collect()
    except Exception as error:  # noqa: BLE001 - the next job raises the same error; this one only warms the workers
        if not is_stopped(spark):
            log.warning("the session could not be warmed up: %s", error)

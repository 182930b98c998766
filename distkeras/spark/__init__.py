"""A Spark session that is ready: its Python workers begin with Keras imported, and the driver has it, too.

::

    from distkeras.spark import session

    spark = session("local[4,4]")                             # in a notebook or a script
    spark-submit --conf spark.python.daemon.module=distkeras.spark.daemon ...

What makes the difference are the settings of Spark in `CONFIG`, which must be there when a session starts. Where a
session is given, as on a cluster's gateway, put them into the configuration of the cluster; distkeras must be installed
where executors run, not be shipped with the job.
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

from distkeras.ps.errors import ConfigurationError
from distkeras.spark.cluster import is_stopped

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

#: Settings of Spark for workers that are forked from a daemon that has imported Keras. An executor starts another
#: daemon for each environment of its workers; Spark adds this variable to those of SQL alone, and rows that are made of
#: a Python list would have a second daemon, which imports Keras again.
CONFIG = {
    "spark.python.daemon.module": "distkeras.spark.daemon",
    "spark.executorEnv.SPARK_SIMPLIFIED_TRACEBACK": "1",
}

#: What workers must find in their environment as it is here, since Keras reads it once, on its first import.
_ENVIRONMENT = ("KERAS_BACKEND", "KERAS_HOME", "TF_CPP_MIN_LOG_LEVEL")

#: What a session imports when it starts, some of it as Keras does.
_SPARKS_OWN = ("pandas", "pyarrow", "google.protobuf", "pyspark.sql.classic.dataframe", "pyspark.sql.pandas.map_ops")
#: Seconds for the import of Keras to end once Spark is up; later users of Keras wait for it themselves.
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
        master: such as "local[4,4]" (four slots, up to four attempts of a task) or "yarn". Default: what
            ``spark-submit`` or ``spark.master`` says.
        app_name: of the application.
        config: further settings of Spark; they win over those here.
        warm_up: import Keras here while Spark starts, so that what Keras reads of the environment must be there by
            then; and begin at once, in the background, with what the first job of a session otherwise waits for:
            executors, the daemon on each of them, its imports.

    Raises:
        ConfigurationError: a session without these settings runs already: Spark reads them when it starts.
    """
    from pyspark.sql import SparkSession

    environment = {f"spark.executorEnv.{name}": os.environ[name] for name in _ENVIRONMENT if name in os.environ}
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
    with _keras_meanwhile() if warm_up else contextlib.nullcontext():
        spark = builder.getOrCreate()
    if warm_up:
        threading.Thread(target=_warm_up, args=(spark,), name="distkeras-warm-up", daemon=True).start()
    return spark


@contextlib.contextmanager
def _keras_meanwhile() -> Iterator[None]:
    """Import Keras in another thread, while this one waits for a JVM."""
    for name in _SPARKS_OWN:  # two threads that first import the same one at once may find half of it
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    thread = threading.Thread(target=_import_keras, name="distkeras-import", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(_IMPORT_SECONDS)


def _import_keras() -> None:
    from distkeras.spark.first_import import import_keras

    try:
        import_keras(on_driver=True)
    except Exception as error:  # noqa: BLE001 - a driver may do without it; an import of it raises again
        log.warning("Keras could not be imported: %s", error)


def _warm_up(spark: SparkSession) -> None:
    """Run a job of a row a slot through a Python worker: Spark starts executors, daemons and code paths for it."""

    def through(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from records

    slots = spark.sparkContext.defaultParallelism
    try:
        spark.range(slots, numPartitions=slots).mapInArrow(through, "id long").collect()
    except Exception as error:  # noqa: BLE001 - the next job raises the same error; this one only warms the workers
        if not is_stopped(spark):
            log.warning("the session could not be warmed up: %s", error)

"""The process of one job: the job server starts it as ``python -m distkeras.job_server.driver FOLDER ATTEMPT``.

It waits for a line on its standard input before it does anything, so that a driver that its server could not record
does nothing. It outlives the server, and reports the outcome of the job by files in its folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from distkeras.callbacks import Callback, TimeBudget
from distkeras.dashboard.watch import JobWatch
from distkeras.job_server.description import JobDescription, PredictionDescription
from distkeras.job_server.errors import PREDICT
from distkeras.job_server.model_file import require_archive, require_weights
from distkeras.job_server.places import require_listed, require_no_links
from distkeras.job_server.runner.files import EventLines, JobFolder, ProgressLines, append, read_whole, write_whole
from distkeras.job_server.runner.processes import LeaseRenewal
from distkeras.keras_model import archive
from distkeras.keras_model.keras_config import applied
from distkeras.keras_model.optimizers import optimizer_of
from distkeras.mlflow_logger import MLflowLogger
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import ConfigurationError
from distkeras.results import write_files
from distkeras.settings import Monitoring
from distkeras.spark import session
from distkeras.spark.cluster import is_local
from distkeras.spark.failures import innermost
from distkeras.trainer import Trainer
from distkeras.transformers.predictor import ModelPredictor, PackedModel

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The line that the server sends after it has recorded this process.
GO = b"go\n"
#: Settings of Spark that the operator may override: Spark's own page has no access control.
_CONFIG = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
#: Further settings if Spark runs as one process on this machine: no other machine needs to reach its ports.
_LOCAL = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1", "spark.authenticate": "true"}
#: Seconds from one poll of the tasks of a predict job to the next.
_POLL_SECONDS = 1.0
#: The most characters of an error in the job's record.
_ERROR_MAX = 2000


def main(arguments: Sequence[str]) -> int:
    """Run the job, and return the exit status; the result file has the outcome."""
    folder, attempt = JobFolder(Path(arguments[0])), int(arguments[1])
    if sys.stdin.buffer.readline() != GO:
        return 3
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.umask(0o077)
    signal.signal(signal.SIGTERM, _interrupt)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    log = logging.getLogger("distkeras")
    log.setLevel(logging.INFO)
    log.addHandler(EventLines(folder.progress))
    try:
        with LeaseRenewal(folder.beat(attempt), folder.fence, attempt):
            summary = run(folder, attempt)
    except KeyboardInterrupt:
        return 128 + signal.SIGTERM  # the server knows why it sent the signal
    except Exception as error:  # noqa: BLE001 - any error fails the job, and the result file has the reason
        traceback.print_exc()
        failure = {"type": type(error).__name__, "error": innermost(error)[:_ERROR_MAX]}
        write_whole(folder.result(attempt), {"state": "failed"} | failure)
        return 1
    write_whole(folder.result(attempt), {"state": "done", "summary": summary})
    return 0


def run(folder: JobFolder, attempt: int) -> dict[str, Any]:
    """Train or predict."""
    order = json.loads(folder.order(attempt).read_text(encoding="utf-8"))
    require_archive(folder.sent_model)
    require_weights(folder.sent_model.read_bytes())
    if order["kind"] != PREDICT:
        return _train(folder, attempt, order)
    description = PredictionDescription.from_json(order["description"])
    require_no_links(order["output"])
    with _session(folder, order) as spark:
        return predict(spark, folder, description, (order["data"], order["output"]), attempt)


def predict(
    spark: SparkSession, folder: JobFolder, description: PredictionDescription, places: tuple[str, str], attempt: int
) -> dict[str, Any]:
    """Write the rows with their predictions, and return the summary: the number of rows."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    data, output = places
    model = PackedModel(folder.sent_model.read_bytes())
    rows = ModelPredictor(model, **description.keywords()).transform(_read(spark, data))
    if not folder.begun.exists():
        if _exists(spark, output):
            raise ConfigurationError(f"`output` must not exist yet. Received: {output}, which exists")
        folder.begun.touch(mode=0o600)
    append(folder.progress, {"kind": "predicting", "attempt": attempt})
    folder.working(attempt).touch(mode=0o600)
    observation, stop = Observation(), threading.Event()
    reporter = threading.Thread(target=_report_tasks, args=(spark, folder, stop), daemon=True)
    reporter.start()
    try:
        rows.observe(observation, F.count(F.lit(1)).alias("rows")).write.mode("overwrite").parquet(output)
    finally:
        stop.set()
        reporter.join(2 * _POLL_SECONDS)
    count = int(observation.get["rows"])
    append(folder.progress, {"kind": "predicted", "rows": count})
    return {"rows": count}


def _exists(spark: SparkSession, place: str) -> bool:
    """Return whether a path exists, on any file system that Spark supports."""
    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - PySpark has no other way to Hadoop's file systems
    configuration = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001 - the same
    path = jvm.org.apache.hadoop.fs.Path(place)
    return bool(path.getFileSystem(configuration).exists(path))


def _report_tasks(spark: SparkSession, folder: JobFolder, stop: threading.Event) -> None:
    """Report the number of finished Spark tasks whenever it has changed."""
    tracker, before = spark.sparkContext.statusTracker(), None
    while not stop.wait(_POLL_SECONDS):
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        progress = [(stage.numCompletedTasks, stage.numTasks) for stage in stages if stage is not None]
        if progress and progress[-1] != before:
            before = progress[-1]
            append(folder.progress, {"kind": "tasks", "done": before[0], "of": before[1]})


def _train(folder: JobFolder, attempt: int, order: Mapping[str, Any]) -> dict[str, Any]:
    """Train, from the checkpoint of the previous attempt, and write model, history and commits to the folder."""
    description = JobDescription.from_json(order["description"])
    callbacks: list[Callback] = [ProgressLines(folder, attempt), JobWatch(folder.journal)]
    if description.time_budget is not None:
        callbacks.append(TimeBudget(description.time_budget))
    trainer = trainer_of(folder.sent_model.read_bytes(), description)
    with _session(folder, order) as spark, _mlflow_run(folder, order, description.name) as logger:
        callbacks += logger
        if "validation" in order:
            stopping = description.made_early_stopping(_read(spark, order["validation"]))
            callbacks += [stopping] if stopping is not None else []
        trainer.train(
            _read(spark, order["data"]),
            callbacks=callbacks,
            checkpoint=Checkpoint(str(folder.checkpoint), description.checkpoint_every),
            resume=True,
        )
        numbers = write_files(trainer, folder.path)
        summary = {"rule": trainer.rule.name, **numbers, "stopped": trainer.stopped}
    shutil.rmtree(folder.checkpoint, ignore_errors=True)
    return summary


@contextlib.contextmanager
def _mlflow_run(folder: JobFolder, order: Mapping[str, Any], name: str) -> Iterator[list[Callback]]:
    """Yield a logger to the job's run of MLflow, which all attempts share; none without a tracking URI."""
    uri = order.get("mlflow")
    if not uri:
        yield []
        return
    import mlflow

    mlflow.set_tracking_uri(uri)
    with mlflow.start_run(read_whole(folder.mlflow).get("id"), run_name=name or folder.path.name) as run:
        run_id = run.info.run_id
        write_whole(folder.mlflow, {"id": run_id, "link": link_to_run(uri, run.info.experiment_id, run_id)})
        yield [MLflowLogger()]


def link_to_run(uri: str, experiment_id: str, run_id: str) -> str:
    """Return the page of a run on a server of MLflow, without the name and password of its URI; else ``runs:/ID``."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return f"runs:/{run_id}"
    host, path = parts.netloc.rpartition("@")[2], parts.path.rstrip("/")
    return f"{parts.scheme}://{host}{path}/#/experiments/{experiment_id}/runs/{run_id}"


def _read(spark: SparkSession, uri: str) -> DataFrame:
    """Return the rows of Parquet in a place that the server allows."""
    require_no_links(uri)
    df = spark.read.parquet(uri)
    require_listed(df.inputFiles(), uri)  # a folder may have become a link since
    return df


@contextlib.contextmanager
def _session(folder: JobFolder, order: Mapping[str, Any]) -> Iterator[SparkSession]:
    """Yield the session of the job, and stop Spark afterwards, even if a signal has interrupted a call of the JVM."""
    local = _LOCAL if is_local(order["master"]) else {}
    config = _CONFIG | local | order["config"]
    spark = session(order["master"], app_name=f"distkeras {folder.path.name}", config=config)
    try:
        yield spark
    finally:
        try:
            spark.stop()
        except Exception:  # noqa: BLE001 - the server ends the processes of this session
            traceback.print_exc()


def trainer_of(data: bytes, description: JobDescription) -> Trainer:
    """Return the trainer for a description; ``data`` is the submitted archive."""
    keywords = description.keywords()
    optimizer = keywords.get("worker_optimizer")
    if isinstance(optimizer, Mapping):
        keywords["worker_optimizer"] = optimizer_of(optimizer)
    keywords["monitoring"] = replace(keywords.get("monitoring") or Monitoring(), progress=False)
    with applied(archive.settings_of(data)):  # those of the submitting process, which the trainer keeps
        model = archive.from_bytes(data, compiled=True)
        return Trainer(model, description.build_rule(), **keywords)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """End the job as Ctrl-C does, and ignore further signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

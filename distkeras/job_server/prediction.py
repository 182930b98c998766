"""A predict job's description, and what its driver does."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from distkeras.job_server.description import require_valid
from distkeras.job_server.runner.files import JobFolder
from distkeras.job_server.runner.progress import append
from distkeras.job_server.schema import prediction_schema
from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Seconds from one look at Spark's tasks to the next.
_EVERY = 1.0


@dataclass(frozen=True)
class PredictionDescription:
    """What a predict job is to do, as it was checked.

    Args:
        data: path or URI of Parquet.
        output: path or URI of the folder to write.
        job: id of the job whose model predicts; None: one was sent.
        options: keywords of `ModelPredictor`.
        name: what its user calls it.
    """

    data: str
    output: str
    job: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @classmethod
    def from_json(cls, value: Any) -> PredictionDescription:
        """The description that ``value`` is, checked as far as it can be without model and data.

        Raises:
            DescriptionError: it is none; the error has the field.
        """
        require_valid(_validator(), value)
        return cls(**value)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; `from_json` takes it back."""
        return asdict(self)


@cache
def _validator() -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator(prediction_schema())


def predict(
    spark: SparkSession, folder: JobFolder, description: PredictionDescription, places: tuple[str, str], attempt: int
) -> dict[str, Any]:
    """Writes the rows with their predictions.

    Args:
        spark: the session.
        folder: of the job, with the model.
        description: what to do.
        places: where to read and to write, as URIs.
        attempt: which driver of the job this is. A later one writes over what those before it had begun to write.

    Returns:
        What a summary has: rows.

    Raises:
        ConfigurationError: there is something where it is to write to.
    """
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    from distkeras.transformers import ModelPredictor
    from distkeras.transformers.predictor import PackedModel

    data, output = places
    predictor = ModelPredictor(PackedModel(folder.sent_model.read_bytes()), **description.options)
    rows = predictor.transform(spark.read.parquet(data))
    if not folder.begun.exists():
        if _exists(spark, output):
            raise ConfigurationError(f"`output` must be where nothing is yet. Received: {output}, which is there")
        folder.begun.touch(mode=0o600)
    append(folder.progress, {"kind": "predicting", "attempt": attempt})
    seen, stop = Observation(), threading.Event()
    looking = threading.Thread(target=_tell_tasks, args=(spark, folder, stop), daemon=True)
    looking.start()
    try:
        rows.observe(seen, F.count(F.lit(1)).alias("rows")).write.mode("overwrite").parquet(output)
    finally:
        stop.set()
        looking.join(2 * _EVERY)
    count = int(seen.get["rows"])
    append(folder.progress, {"kind": "predicted", "rows": count})
    return {"rows": count}


def _exists(spark: SparkSession, place: str) -> bool:
    """Whether something is there, on any file system that Spark knows."""
    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - PySpark has no other way to Hadoop's file systems
    configuration = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001 - likewise
    path = jvm.org.apache.hadoop.fs.Path(place)
    return bool(path.getFileSystem(configuration).exists(path))


def _tell_tasks(spark: SparkSession, folder: JobFolder, stop: threading.Event) -> None:
    """Tells how many of Spark's tasks are done, whenever that has changed."""
    tracker, before = spark.sparkContext.statusTracker(), None
    while not stop.wait(_EVERY):
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        told = [(stage.numCompletedTasks, stage.numTasks) for stage in stages if stage is not None]
        if told and told[-1] != before:
            before = told[-1]
            append(folder.progress, {"kind": "tasks", "done": before[0], "of": before[1]})

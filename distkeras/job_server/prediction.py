"""A predict job: its description, and what its driver does."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from distkeras.job_server.description import Description, JobId, Place, model_of_options
from distkeras.job_server.runner.files import JobFolder, append
from distkeras.ps.errors import ConfigurationError
from distkeras.settings import options_of
from distkeras.transformers.predictor import ModelPredictor, PackedModel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Seconds from one look at Spark's tasks to the next.
_EVERY = 1.0


#: Keywords of `ModelPredictor` that a job cannot set: its model arrives in another way, and code does not travel.
PREDICTOR_LEFT_OUT = {"keras_model", "custom_objects", "decode"}


_OF_PREDICTOR = model_of_options(
    options_of(ModelPredictor),
    PREDICTOR_LEFT_OUT,
    {
        "batch_size": Annotated[int, Field(ge=1, le=2**53)],
        "batch_bytes": Annotated[int, Field(ge=1, le=2**53)],
        "output_type": Literal["array", "vector"],
    },
)


class PredictorOptions(_OF_PREDICTOR):  # type: ignore[misc, valid-type]  # its fields are those of `ModelPredictor`
    """Keywords of `ModelPredictor`."""


class PredictionDescription(Description):
    """A predict job."""

    output: Place = Field(
        description="Path or URI that the rows with their predictions are written to, as Parquet. It must not exist "
        "yet, and must be in your own folder, inside a folder that the server allows."
    )
    job: JobId | None = Field(
        None, description="The finished job whose model predicts. Without it, a model must be sent."
    )
    options: PredictorOptions = Field(PredictorOptions(), description="Keywords of ModelPredictor.")


def predict(
    spark: SparkSession, folder: JobFolder, description: PredictionDescription, places: tuple[str, str], attempt: int
) -> dict[str, Any]:
    """Write the rows with their predictions.

    Args:
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

    data, output = places
    predictor = ModelPredictor(
        PackedModel(folder.sent_model.read_bytes()), **description.options.model_dump(exclude_unset=True)
    )
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
    """Return whether something is there, on any file system that Spark knows."""
    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - PySpark has no other way to Hadoop's file systems
    configuration = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001 - the same
    path = jvm.org.apache.hadoop.fs.Path(place)
    return bool(path.getFileSystem(configuration).exists(path))


def _tell_tasks(spark: SparkSession, folder: JobFolder, stop: threading.Event) -> None:
    """Report how many of Spark's tasks are done, whenever that has changed."""
    tracker, before = spark.sparkContext.statusTracker(), None
    while not stop.wait(_EVERY):
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        progress = [(stage.numCompletedTasks, stage.numTasks) for stage in stages if stage is not None]
        if progress and progress[-1] != before:
            before = progress[-1]
            append(folder.progress, {"kind": "tasks", "done": before[0], "of": before[1]})

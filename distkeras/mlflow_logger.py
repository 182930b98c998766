"""A job as a run of MLflow: its options, how it went, and the model.

::

    logger = MLflowLogger(validation_df)
    trained = trainer.train(df, callbacks=[logger])
    predict = mlflow.pyfunc.spark_udf(spark, f"runs:/{logger.run_id}/model", env_manager="local")

Importing this module loads neither pyspark, Keras nor MLflow.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.callbacks import Callback, CallbackContext, TrainingSetup
from distkeras.metric_columns import columns_of
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import require_boolean, require_integer, require_text

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

    from distkeras.data.batches import Batch
    from distkeras.results import JobResults

#: The tag by which MLflow knows the run that another one belongs to.
_PARENT = "mlflow.parentRunId"
#: Params that MLflow takes in one request.
_PARAMS_AT_ONCE = 100
#: Characters of an error that a tag takes.
_ERROR_MAX = 5000


class MLflowLogger(Callback):
    """Log a job to MLflow; this needs the package mlflow-skinny or mlflow.

    ::

        logger = MLflowLogger(validation, every_seconds=10)
        trainer.train(df, callbacks=[logger])
        model = mlflow.keras.load_model(f"runs:/{logger.run_id}/model")

    Params are the trainer's keywords, those of rule and optimizer by dotted names (``rule.window``). Metrics are
    ``loss`` and ``staleness`` (means over the latest commits), ``epochs``, ``samples``, and, given ``validation`` rows,
    ``val_loss`` and ``val_`` with each metric of the center over them; their step is the clock, the number of commits.
    When the job has ended, ``epoch_loss`` and ``epoch_`` with each metric are logged with the number of the epoch: the
    workers' means over that epoch. The timings are logged as ``seconds_total`` and so on, and the tag
    ``distkeras.stopped`` has the reason if a callback has ended the job. The model that `Trainer.train` returns is
    logged as ``model``, in MLflow's Keras flavor. A stream has no values of epochs and no timings; its model is the
    last one.

    If a run is active when `Trainer.train` is called, it is used and stays open. Otherwise the logger starts a new run
    of the current experiment, within the run that was active when this object was created, if any. Each fit of a
    cross-validation therefore has its own run. A new run ends with the job: finished, failed, or killed if the job was
    interrupted. The run of a stream is not active in the thread that has called `Trainer.train_stream`.

    ``mlflow.keras.autolog()`` does not record a job, because it observes ``fit``, which is never called.

    Args:
        validation: rows to evaluate on, with the trainer's columns; None: no evaluation.
        run_name: name of a new run.
        log_model: whether to log the model.
        registered_model_name: name under which the model is also registered.
        every_commits, every_seconds: interval between two records of metrics; see `Callback`.
        max_rows: largest number of validation rows; of more, a sample is used, which is the same each time.

    Attributes:
        run_id: id of the latest job's run; None before the first job.

    Raises:
        ConfigurationError: An argument is invalid, or MLflow is not installed.
        EmptyDataError: ``validation`` has no rows.
        mlflow.exceptions.MlflowException: MLflow has failed; the job ends with this error.
    """

    def __init__(
        self,
        validation: DataFrame | None = None,
        *,
        run_name: str | None = None,
        log_model: bool = True,
        registered_model_name: str | None = None,
        every_commits: int | None = None,
        every_seconds: float | None = None,
        max_rows: int = 10_000,
    ) -> None:
        super().__init__(every_commits=every_commits, every_seconds=every_seconds)
        for name, text in (("run_name", run_name), ("registered_model_name", registered_model_name)):
            if text is not None:
                require_text(name, text, "a name, or None")
        self.run_name, self.registered_model_name = run_name, registered_model_name
        self.log_model = require_boolean("log_model", log_model)
        self.max_rows = require_integer("max_rows", max_rows)
        self.run_id: str | None = None
        active = _mlflow().active_run()
        self._parent = None if active is None else active.info.run_id
        self._validation = validation
        self._batch: Batch | None = None
        self._client: Any = None
        self._own_run = self._stream = False
        self._clock, self._latest = -1, b""

    def on_begin(self, setup: TrainingSetup) -> None:
        """Read the rows, begin the run, and log the trainer's options."""
        self._batch, self._own_run = None, False
        self._stream = setup.facts is not None and setup.facts.stream
        self._clock, self._latest = -1, b""
        if self._validation is not None:
            self._batch = setup.read_rows(self._validation, self.max_rows)
        mlflow = _mlflow()
        run = mlflow.active_run()
        if run is None:
            tags = {} if self._parent is None else {_PARENT: self._parent}
            run = mlflow.start_run(run_name=self.run_name, tags=tags)
            self._own_run = True
            if self._stream:  # which ends in another thread, when this one may have begun another run
                mlflow.end_run("RUNNING")
        self.run_id = run.info.run_id
        # The fluent functions know the run in this thread only; metrics come from the callback's own.
        self._client = mlflow.MlflowClient()
        params = [mlflow.entities.Param(name, str(value)) for name, value in setup.options.items()]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self.run_id, params=params[start : start + _PARAMS_AT_ONCE])

    def on_center(self, context: CallbackContext) -> None:
        """Log the progress of the job, unless the clock has not changed."""
        status = context.status
        values = {name: float(getattr(status, name)) for name in ("loss", "staleness", "epochs", "samples")}
        latest = self._latest
        if self._batch is not None:
            self._latest = context.center.digest()
        if self._batch is not None and self._latest != latest:
            values |= {f"val_{name}": value for name, value in context.evaluate(self._batch).items()}
        if context.clock != self._clock or self._latest != latest:  # the clock of the center, where one was fetched
            self._clock = context.clock
            self._log(values, self._clock)

    def on_end(self, context: CallbackContext) -> None:
        """Log the final state of the job."""
        self.on_center(context)

    def on_success(self, results: JobResults) -> None:
        """Log the epochs, the timings and the model, and end the run unless it is the user's."""
        if not self._stream:
            self._log_epochs(results)
        self._log({f"seconds_{name}": seconds for name, seconds in results.timings.items()}, 0)
        if results.stopped is not None:
            self._client.set_tag(self.run_id, "distkeras.stopped", results.stopped)
        if self.log_model:
            with self._active():
                _log_model(results.model, self.registered_model_name)
        self._end("FINISHED")

    def _log_epochs(self, results: JobResults) -> None:
        records = results.outcome.records
        if records is None:
            return
        names, history = columns_of(records.metrics), records.history(elements=True).to_pandas()
        epochs = history.groupby("epoch")
        totals = history[list(names.values())].mul(history["samples"], axis=0).groupby(history["epoch"]).sum()
        for epoch, means in totals.div(epochs["samples"].sum(), axis=0).iterrows():
            self._log({f"epoch_{name}": float(means[column]) for name, column in names.items()}, int(epoch))

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        """Let the run be the active one of this thread, which is not the one that began it at the end of a stream."""
        if not self._stream:
            yield
            return
        mlflow, status = _mlflow(), self._client.get_run(self.run_id).info.status
        mlflow.start_run(run_id=self.run_id)
        try:
            yield
        finally:
            mlflow.end_run(status)

    def on_failure(self, error: BaseException) -> None:
        """Tag the run with the error, and end it unless it is the user's."""
        if self._client is not None:
            text = f"{type(error).__name__}: {error}"
            self._client.set_tag(self.run_id, "distkeras.error", text[:_ERROR_MAX])
        self._end("FAILED" if isinstance(error, Exception) else "KILLED")

    def _log(self, values: Mapping[str, float], step: int) -> None:
        entities, now = _mlflow().entities, time.time_ns() // 1_000_000
        known = [(name, value) for name, value in values.items() if not math.isnan(value)]  # before the first commit
        self._client.log_batch(self.run_id, metrics=[entities.Metric(*pair, now, step) for pair in known])

    def _end(self, status: str) -> None:
        client, self._client = self._client, None
        if self._own_run:
            self._own_run = False
            if self._stream:
                client.set_terminated(self.run_id, status)
            else:
                _mlflow().end_run(status)


def _mlflow() -> Any:
    """Import MLflow, or raise ConfigurationError."""
    try:
        import mlflow
    except ImportError as error:
        raise ConfigurationError(
            f"`MLflowLogger` needs MLflow: pip install 'distkeras[mlflow]'. Received: {error}"
        ) from error
    return mlflow


def _log_model(model: keras.Model, registered_name: str | None) -> None:
    """Log a model to the active run, with its requirements: MLflow would load the model to find them."""
    import keras
    import mlflow.keras
    from mlflow.models import ModelSignature

    names = metadata.packages_distributions()  # a nightly build of Keras has another one
    signature = None
    if getattr(model, "inputs", None):  # a subclassed model has none
        signature = ModelSignature(_schema(model.inputs), _schema(model.outputs))
    mlflow.keras.log_model(
        model,
        name="model",
        signature=signature,
        registered_model_name=registered_name,
        pip_requirements=[f"{name}=={metadata.version(name)}" for name in (names["keras"][0], keras.backend.backend())],
    )


def _schema(tensors: list[Any]) -> Any:
    """Return shapes and dtypes of inputs or outputs, with the names of several."""
    from mlflow.types import Schema, TensorSpec

    return Schema(
        [
            TensorSpec(
                np.dtype(str if tensor.dtype == "string" else tensor.dtype),
                (-1, *(-1 if extent is None else extent for extent in tensor.shape[1:])),
                tensor.name if len(tensors) > 1 else None,
            )
            for tensor in tensors
        ]
    )

"""Jobs as runs of MLflow, with the package itself and a store in a folder.

These tests are not in the default suite, because MLflow may not be installed and its import takes long:
``pip install 'distkeras[mlflow]'; pytest -m slow tests/test_mlflow_logger.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import SparkSession
from support.patience import patience
from support.present import present
from support.training.spark_jobs import blobs, table

from distkeras import KerasCallbacks, KerasEstimator, MLflowLogger, Trainer, rules
from distkeras.callbacks import Callback, CallbackContext, TrainingSetup
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.driver_messages import Status

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def mlflow() -> Any:
    """Import MLflow for a test that runs."""
    return pytest.importorskip("mlflow", reason="needs the extra mlflow")


@pytest.fixture(autouse=True)
def store(mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a client of a new store in files, because mlflow-skinny has no database."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    mlflow.set_experiment("jobs")
    yield mlflow.MlflowClient()
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(before)


def network() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, "softmax")])


OPTIONS: dict[str, Any] = {
    "worker_optimizer": keras.optimizers.SGD(0.05),
    "loss": "sparse_categorical_crossentropy",
    "metrics": ["accuracy"],
    "num_workers": 2,
}


# MLflow warns about its own functions when its flavors are first used.
@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning")
def test_a_job_is_a_run_whose_model_is_a_function_of_spark(spark: SparkSession, store: Any, mlflow: Any) -> None:
    x, y = blobs()
    df = table(spark, x, y)
    logger = MLflowLogger(df, run_name="blobs", every_commits=1)
    trainer = Trainer(network(), rules.make("agn", window=4), num_epoch=2, batch_size=16, **OPTIONS)
    trained = trainer.train(df, callbacks=[logger])

    run = store.get_run(logger.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "blobs")
    assert mlflow.active_run() is None
    expected = {"rule": "agn", "rule.window": "4", "num_workers": "2", "batch_size": "16", "num_epoch": "2"}
    expected |= {"worker_optimizer": "SGD", "loss": OPTIONS["loss"], "metrics": "accuracy"}
    assert {name: run.data.params[name] for name in expected} == expected
    assert float(run.data.params["worker_optimizer.learning_rate"]) == pytest.approx(0.05)

    curve = store.get_metric_history(logger.run_id, "val_loss")
    clocks = [metric.step for metric in curve]
    assert clocks == sorted(set(clocks))
    assert clocks[-1] == trainer.commits.count()
    judged = trained.evaluate(x, y, verbose=0, return_dict=True)
    assert curve[-1].value == pytest.approx(judged["loss"], rel=1e-5)
    history = trainer.history.toPandas()
    for metric in store.get_metric_history(logger.run_id, "epoch_accuracy"):
        own = history[history.epoch == metric.step]
        assert metric.value == pytest.approx(np.average(own.accuracy, weights=own.samples))
    assert run.data.metrics["seconds_total"] == pytest.approx(trainer.timings["total"])

    uri = f"runs:/{logger.run_id}/model"
    expected_outputs = trained.predict(x, verbose=0)
    np.testing.assert_allclose(mlflow.keras.load_model(uri).predict(x, verbose=0), expected_outputs, atol=1e-6)
    predict = mlflow.pyfunc.spark_udf(spark, uri, result_type="array<float>", env_manager="local")
    rows = df.withColumn("p", predict("features")).collect()
    np.testing.assert_allclose(
        [row.p for row in rows],
        trained.predict(np.array([row.features for row in rows], np.float32), verbose=0),
        atol=1e-6,
    )


def test_each_fit_of_an_estimator_has_its_own_run(spark: SparkSession, store: Any, mlflow: Any) -> None:
    with mlflow.start_run() as parent:
        estimator = KerasEstimator(network(), callbacks=[MLflowLogger(log_model=False)], **OPTIONS)
    df = table(spark, *blobs())
    maps = [{estimator.getParam("batch_size"): size} for size in (32, 64)]
    fitted = [model for _, model in sorted(estimator.fitMultiple(df, maps))]
    loggers: list[Any] = [model.summary.callbacks[0] for model in fitted]
    runs = [store.get_run(logger.run_id) for logger in loggers]
    assert [run.data.params["batch_size"] for run in runs] == ["32", "64"]
    assert [run.data.tags["mlflow.parentRunId"] for run in runs] == [parent.info.run_id] * 2


@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning")
@pytest.mark.parametrize("own", [True, False])
def test_a_stream_is_a_run_that_ends_with_it(
    spark: SparkSession, store: Any, mlflow: Any, tmp_path: Path, own: bool
) -> None:
    df = table(spark, *blobs())
    df.write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(df.schema).parquet(str(tmp_path / "in"))
    logger = MLflowLogger(df)
    with nullcontext() if own else mlflow.start_run():
        training = Trainer(network(), "agn", **OPTIONS).train_stream(
            stream, checkpoint=tmp_path / "checkpoint", trigger={"availableNow": True}, callbacks=[logger]
        )
        assert (mlflow.active_run() is None) == own
        assert training.awaitTermination(patience(120))
        run = store.get_run(logger.run_id)
        assert (run.info.status, run.info.end_time is None) == (("FINISHED", False) if own else ("RUNNING", False))
        assert run.data.metrics["samples"] == df.count()
        curve = store.get_metric_history(logger.run_id, "val_loss")
        assert curve[-1].step == present(training.lastProgress).clock
        loaded = mlflow.keras.load_model(f"runs:/{logger.run_id}/model")
        np.testing.assert_array_equal(loaded.get_weights()[0], training.model().get_weights()[0])
        assert (mlflow.active_run() is None) == own
    assert store.get_run(logger.run_id).info.status == "FINISHED"


class Job:
    """A job that calls a logger."""

    def __init__(self, logger: MLflowLogger) -> None:
        self.logger = logger
        logger.on_begin(TrainingSetup(("loss",), _nothing, _nothing, options={"rule": "agn", "decay": None}))

    def report(self, clock: int, loss: float) -> None:
        status = Status(clock, 2, 0, 0, 16 * clock, loss, 1.0, 0.5)
        self.logger.on_center(CallbackContext(status, 1.0, _nothing, _nothing, lambda reason: None))


def _nothing(*_: Any) -> Any:
    raise AssertionError("the logger must not call this")


def test_the_metrics_and_the_error_of_a_failed_job_are_logged(store: Any, mlflow: Any) -> None:
    job = Job(MLflowLogger(log_model=False))
    for clock, loss in ((0, math.nan), (3, 2.0), (3, 2.0), (5, 1.0)):
        job.report(clock, loss)
    run_id = job.logger.run_id
    assert store.get_run(run_id).info.status == "RUNNING"
    job.logger.on_failure(ValueError("a bad row"))
    run = store.get_run(run_id)
    assert (run.info.status, run.data.tags["distkeras.error"]) == ("FAILED", "ValueError: a bad row")
    assert run.data.params == {"rule": "agn", "decay": "None"}
    assert [(one.step, one.value) for one in store.get_metric_history(run_id, "loss")] == [(3, 2.0), (5, 1.0)]
    assert [one.step for one in store.get_metric_history(run_id, "samples")] == [0, 3, 5]
    assert mlflow.active_run() is None
    interrupted = Job(job.logger)
    assert job.logger.run_id != run_id
    interrupted.logger.on_failure(KeyboardInterrupt())
    assert store.get_run(job.logger.run_id).info.status == "KILLED"


def test_an_active_run_is_used_and_stays_open(store: Any, mlflow: Any) -> None:
    with mlflow.start_run() as run:
        job = Job(MLflowLogger(log_model=False))
        assert job.logger.run_id == run.info.run_id
        job.logger.on_failure(ValueError())
        assert mlflow.active_run().info.run_id == run.info.run_id


def test_invalid_arguments_are_refused(mlflow: Any) -> None:
    with pytest.raises(ConfigurationError, match="`run_name`"):
        MLflowLogger(run_name="")
    with pytest.raises(ConfigurationError, match="MLflowLogger"):
        KerasCallbacks([mlflow.keras.MlflowCallback()])
    assert isinstance(MLflowLogger(), Callback)

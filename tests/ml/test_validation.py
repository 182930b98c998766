"""The validation curve of a fit."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from support.present import present
from support.training.spark_jobs import step_callback_layer, wait_at_step

from distkeras import Callback, CallbackContext, KerasEstimator, Trainer
from distkeras.callbacks import CenterWeights
from distkeras.data.schema import balanced
from distkeras.ps.errors import ConfigurationError, EmptyDataError

ROWS = 20_000


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    columns = [F.rand(1).alias("a"), F.rand(2).alias("b"), (F.col("id") % 4 == 0).alias("held")]
    rows = spark.range(ROWS, numPartitions=2).select("id", *columns)
    return rows.withColumn("label", (F.col("a") > F.col("b")).cast("int")).cache()


def estimator(*hooks: keras.Layer, **keywords: Any) -> KerasEstimator:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), *hooks, keras.layers.Dense(2, "softmax")])
    given = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"], "features_col": ["a", "b"]}
    options: dict[str, Any] = {"num_workers": 1, "validation_indicator_col": "held", "num_epoch": 4}
    return KerasEstimator(model, "agn", **given | options | keywords)


@pytest.mark.slow
def test_the_curve_has_a_point_for_each_epoch(df: DataFrame, tmp_path: Path) -> None:
    class Release(Callback):
        def on_center(self, context: CallbackContext) -> None:
            for number, _ in enumerate(present(context.link).evaluations, 1):
                (tmp_path / f"{number}").touch()

    steps = math.ceil(ROWS * 3 / 4 / 32)  # steps of an epoch; 30 steps later, the point at its end must exist
    waits = [wait_at_step(epoch * steps + 30, tmp_path / f"{epoch}") for epoch in (1, 2, 3)]
    hook = step_callback_layer(lambda now: [wait(now) for wait in waits])
    summary = estimator(hook, callbacks=[Release(every_seconds=0.01)], validation_rows=100).fit(df).summary
    assert {int(point["epoch"]) for point in summary.validation} == {1, 2, 3, 4}
    clocks = [point["clock"] for point in summary.validation]
    assert clocks == sorted(set(clocks))


@pytest.mark.slow
def test_the_last_point_is_computed_from_all_rows(df: DataFrame) -> None:
    fitted = estimator(validation_rows=100, num_epoch=1).fit(df)
    *sampled, last = fitted.summary.validation
    assert all(point["rows"] == 100 for point in sampled)
    assert last["rows"] == ROWS // 4
    held = df.where("held").orderBy("id")
    expected = fitted.keras_model.evaluate(
        np.array(held.select("a", "b").collect(), np.float32),
        np.array([row[0] for row in held.select("label").collect()]),
        verbose=0,
        return_dict=True,
    )
    assert {name: last[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_last_point_ignores_weights_that_a_callback_has_restored(df: DataFrame) -> None:
    class Zeros(Callback):
        def on_end(self, context: CallbackContext) -> None:
            center = context.center
            context.restore(CenterWeights(0, np.zeros_like(center.vector), center.moving_statistics))

    fitted = estimator(validation_rows=100, num_epoch=1, callbacks=[Zeros(every_epochs=1)]).fit(df)
    assert not np.any(fitted.keras_model.get_weights()[0])
    last = fitted.summary.validation[-1]
    assert (last["clock"], last["rows"]) == (fitted.summary.commits.count(), 100)
    assert last["loss"] != pytest.approx(math.log(2), abs=1e-4)  # the loss of weights of zero


@pytest.mark.slow
def test_few_rows_are_evaluated_once(df: DataFrame) -> None:
    few = df.where("id < 200")
    fitted = estimator(num_epoch=1, validation_rows=51).fit(few)
    assert fitted.summary.validation[-1]["rows"] == 50


@pytest.mark.slow
def test_points_may_be_set_by_commits(df: DataFrame, tmp_path: Path) -> None:
    evaluated = tmp_path / "evaluated"

    class Release(Callback):
        def on_center(self, context: CallbackContext) -> None:
            if present(context.link).evaluations:
                evaluated.touch()

    hook = step_callback_layer(wait_at_step(200, evaluated))  # before the 21st commit
    validation = {"validation_every_commits": 10, "validation_rows": 100}
    summary = estimator(hook, callbacks=[Release(every_seconds=0.01)], num_epoch=2, **validation).fit(df).summary
    clocks = [point["clock"] for point in summary.validation]
    commits = summary.commits.count()
    assert clocks == sorted(set(clocks))
    assert (10 <= clocks[0] <= 20, clocks[-1]) == (True, commits)
    assert len(clocks) <= 1 + commits // 10  # a center may be pulled some commits late


@pytest.mark.slow
def test_a_metric_that_does_not_add_up_is_computed_from_a_sample(
    df: DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    @keras.saving.register_keras_serializable("tests")  # within the function, so that executors receive its code
    class MeanOutput(keras.metrics.Mean):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return super().update_state(y_pred, sample_weight)

    with caplog.at_level(logging.WARNING, "distkeras"):
        fitted = estimator(validation_rows=100, num_epoch=1, metrics=[MeanOutput()]).fit(df)
    assert fitted.summary.validation[-1]["rows"] == 100
    assert "a sample" in caplog.text


@pytest.mark.slow
def test_a_trainer_takes_columns_and_rows_to_validate_on_as_the_estimator_does(df: DataFrame) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, "softmax")])
    trainer = Trainer(
        model, loss="sparse_categorical_crossentropy", metrics=["accuracy"], features_col=["a", "b"], num_workers=2,
        class_weight="balanced", epochs=2, optimizer="adam", verbose=0,
    )  # fmt: skip
    stop = keras.callbacks.EarlyStopping("val_loss", patience=5)
    trained = trainer.train(df, validation_split=0.25, callbacks=[stop])
    epochs = trainer.epochs.toPandas()
    assert list(epochs.columns) == ["epoch", "samples", "loss", "accuracy", "val_loss", "val_accuracy"]
    assert epochs["samples"].between(0.7 * ROWS, 0.8 * ROWS).all()
    assert epochs["samples"].nunique() == 1
    held = df.where(~F.col("held"))  # any rows: the last point is of those that the split has left out
    last = trainer.validation[-1]
    assert last["rows"] == ROWS - epochs["samples"][0]
    assert last["loss"] == epochs["val_loss"].iloc[-1]
    x = np.array(held.select("a", "b").head(500), np.float32)
    assert np.mean(np.argmax(trained.predict(x, verbose=0), 1) == (x[:, 0] > x[:, 1])) > 0.8
    assert "val_loss=" in repr(trainer)


def test_balanced_classes_have_the_same_weight(spark: SparkSession) -> None:
    rows = spark.createDataFrame([(0.0,)] * 6 + [(2.0,)] * 3 + [(None,)], "label double")
    assert balanced(rows, "label") == {0: 9 / 12, 2: 9 / 6}
    one_hot = spark.createDataFrame([([0.0, 1.0],)] * 3 + [([1.0, 0.0],)], "label array<double>")
    assert balanced(one_hot, "label") == {0: 4 / 2, 1: 4 / 6}


@pytest.mark.parametrize("label", [0.5, -1.0, math.nan, math.inf])
def test_numbers_that_are_no_classes_are_not_counted(spark: SparkSession, label: float) -> None:
    rows = spark.createDataFrame([(0.0,), (label,)], "label double")
    with pytest.raises(ConfigurationError, match="must be a dictionary unless labels are class numbers") as caught:
        balanced(rows, "label")
    assert caught.value.column == "label"


def test_rows_without_labels_are_refused_as_without_weights(df: DataFrame) -> None:
    empty = df.where("id < 0")
    with pytest.raises(EmptyDataError):
        estimator(class_weight="balanced", validation_indicator_col=None).fit(empty)


@pytest.mark.slow
def test_rows_to_validate_on_are_given_once(df: DataFrame) -> None:
    with pytest.raises(ConfigurationError, match="`validation_data` must not be given with `validation_split`"):
        estimator(validation_data=df).fit(df)

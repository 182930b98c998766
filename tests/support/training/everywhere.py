"""Checks for every kind of cluster: a program whose arguments say how to get a session.

``python everywhere.py FOLDER master URL`` or ``… connect URL`` prints a line of JSON that maps each check to None or
to its error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from pyspark.sql import DataFrame, SparkSession

from distkeras import KerasEstimator, KerasModel, Trainer, register_function
from distkeras.settings import grouped
from distkeras.transformers import AccuracyEvaluator, LabelIndexTransformer, ModelPredictor

ROWS = 48
X = np.random.default_rng(0).normal(size=(ROWS, 2)).astype(np.float32)


def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, "softmax")])


def rows(spark: SparkSession) -> DataFrame:
    data = [(i, x.tolist(), int(x[0] > x[1])) for i, x in enumerate(X)]
    return spark.createDataFrame(data, "id int, features array<float>, label int")


def estimator(**keywords: Any) -> KerasEstimator:
    given = {"loss": "sparse_categorical_crossentropy", "num_workers": 2, "batch_size": 8, "progress": False}
    return KerasEstimator(model(), "agn", **grouped(given | keywords))


def fitted() -> KerasModel:
    made = model()
    made.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return KerasModel(made)


def expect(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-5)


def predictions(df: DataFrame, name: str = "prediction") -> np.ndarray:
    values = [row[name] for row in df.orderBy("id").select(name).collect()]
    return np.array([value.toArray() if hasattr(value, "toArray") else value for value in values])


def train(spark: SparkSession, folder: str) -> None:
    trainer = Trainer(model(), "downpour", loss="sparse_categorical_crossentropy", num_workers=2, batch_size=8)
    trainer.train(rows(spark))
    assert sum(row["samples"] for row in trainer.history.collect()) == ROWS


def train_with_a_killed_worker(spark: SparkSession, folder: str) -> None:
    marker = f"{folder}/killed"

    def deadly(data: Any) -> np.ndarray:
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return np.asarray(data, np.float32)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    keywords = {"loss": "sparse_categorical_crossentropy", "num_workers": 2, "batch_size": 8}
    trainer = Trainer(model(), "downpour", decode=deadly, **keywords)  # type: ignore[arg-type]  # of all kinds
    trainer.train(rows(spark))
    assert Path(marker).exists()
    assert sum(row["samples"] for row in trainer.history.collect()) == ROWS


def train_with_a_checkpoint(spark: SparkSession, folder: str) -> None:
    trainer = Trainer(model(), "dynsgd", loss="sparse_categorical_crossentropy", num_workers=2)
    trainer.train(rows(spark), checkpoint=f"{folder}/checkpoint")


def predict(spark: SparkSession, folder: str) -> None:
    made = model()
    expect(predictions(ModelPredictor(made).transform(rows(spark))), made.predict(X, verbose=0))


def fit(spark: SparkSession, folder: str) -> None:
    found = estimator(num_epoch=2).fit(rows(spark))
    out = found.transform(rows(spark))
    expect(predictions(out, "probability"), found.keras_model.predict(X, verbose=0))


def evaluate(spark: SparkSession, folder: str) -> None:
    one = fitted()
    labels = (X[:, 0] > X[:, 1]).astype(int)
    expected = one.keras_model.evaluate(X, labels, verbose=0, return_dict=True)
    found = one.evaluate(rows(spark))
    expect([found[name] for name in expected], list(expected.values()))


def save_and_load(spark: SparkSession, folder: str) -> None:
    one = fitted()
    one.write().overwrite().save(f"{folder}/model")
    loaded = KerasModel.load(f"{folder}/model")
    expect(predictions(loaded.transform(rows(spark)), "probability"), one.keras_model.predict(X, verbose=0))


def save_and_load_a_pipeline(spark: SparkSession, folder: str) -> None:
    from pyspark.ml import Pipeline, PipelineModel

    found = Pipeline(stages=[estimator()]).fit(rows(spark))
    found.write().overwrite().save(f"{folder}/pipeline")
    loaded = PipelineModel.load(f"{folder}/pipeline")
    expect(predictions(loaded.transform(rows(spark))), predictions(found.transform(rows(spark))))


def save_and_load_a_predictor(spark: SparkSession, folder: str) -> None:
    ModelPredictor(model()).write().overwrite().save(f"{folder}/predictor")
    loaded = ModelPredictor.load(f"{folder}/predictor")
    expect(predictions(loaded.transform(rows(spark))), model().predict(X, verbose=0))


def cross_validate(spark: SparkSession, folder: str) -> None:
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    made = estimator(num_workers=1)
    grid = ParamGridBuilder().addGrid(made.getParam("num_epoch"), [1, 2]).build()
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    search = CrossValidator(estimator=made, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2)
    assert isinstance(search.fit(rows(spark)).bestModel, KerasModel)


def own_evaluator(spark: SparkSession, folder: str) -> None:
    out = ModelPredictor(model()).transform(rows(spark))
    indexed = LabelIndexTransformer(input_col="prediction", output_col="class").transform(out)
    assert 0 <= AccuracyEvaluator(prediction_col="class", label_col="label").evaluate(indexed) <= 1


def stream(spark: SparkSession, folder: str) -> None:
    rows(spark).write.mode("overwrite").parquet(f"{folder}/arriving")
    arriving = spark.readStream.schema(rows(spark).schema).parquet(f"{folder}/arriving")
    one = fitted()
    writer = one.transform(arriving).writeStream.format("parquet").trigger(availableNow=True)
    place = tempfile.mkdtemp(dir=folder)
    query = writer.option("checkpointLocation", f"{place}/progress").start(f"{place}/out")
    query.awaitTermination()
    found = predictions(spark.read.parquet(f"{place}/out"), "probability")
    expect(found, one.keras_model.predict(X, verbose=0))


def sql_function(spark: SparkSession, folder: str) -> None:
    made = model()
    made.compile("sgd", "sparse_categorical_crossentropy")
    register_function(spark, "predict_class", made)
    rows(spark).createOrReplaceTempView("everywhere")
    out = spark.sql("SELECT id, predict_class(features) AS prediction FROM everywhere")
    expect(predictions(out), made.predict(X, verbose=0).argmax(axis=1))


CHECKS: list[Callable[[SparkSession, str], None]] = [
    train,
    train_with_a_killed_worker,
    train_with_a_checkpoint,
    predict,
    fit,
    evaluate,
    save_and_load,
    save_and_load_a_pipeline,
    save_and_load_a_predictor,
    cross_validate,
    own_evaluator,
    stream,
    sql_function,
]


def results(spark: SparkSession, folder: str) -> dict[str, str | None]:
    """Return the outcome of each check."""
    found: dict[str, str | None] = {}
    for check in CHECKS:
        try:
            check(spark, folder)
            found[check.__name__] = None
        except Exception as error:  # noqa: BLE001 - the caller compares it with the expected outcome
            found[check.__name__] = f"{type(error).__name__}: {error}"[:600]
    return found


def main() -> None:
    """Run all checks on one kind of cluster."""
    folder, kind, url = sys.argv[1:]
    builder: Any = SparkSession.builder.config("spark.sql.shuffle.partitions", "2")
    if kind == "connect":
        builder = builder.remote(url)
    else:
        builder = builder.master(url).config("spark.ui.enabled", "false").config("spark.executor.memory", "1g")
        builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.driver.host", "127.0.0.1")
    spark = builder.getOrCreate()
    if kind != "connect":
        spark.sparkContext.setLogLevel("OFF")
    print(json.dumps(results(spark, folder)), flush=True)  # noqa: T201 - read by the test
    spark.stop()


if __name__ == "__main__":
    main()

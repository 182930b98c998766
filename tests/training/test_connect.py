"""Spark Connect: train, predict, save, load. A process has classic Spark or Connect, so the client has its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.programs import output_of
from support.training.spark_jobs import blobs, table, wrong_model

from distkeras import KerasEstimator, KerasModel
from distkeras.transformers import MinMaxTransformer, ModelPredictor

CLIENT = """
import json, sys
from pathlib import Path
import keras, numpy as np
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import SparkSession
from support.training.spark_jobs import accuracy, blobs, committed, servers, table, wrong_model
from distkeras import KerasEstimator, KerasModel, Trainer
from distkeras.transformers import AccuracyEvaluator, LossEvaluator, MinMaxTransformer, ModelPredictor

folder, report = Path(sys.argv[1]), {}
spark = (
    SparkSession.builder.remote("local[2,2]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
)
x, y = blobs(64)
df = table(spark, x, y)


def said(act):
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition(chr(10))[0]
    return None


def predictions(stage, column="prediction"):
    return [list(row[0]) for row in stage.transform(df).select(column).collect()]


options = {"loss": "sparse_categorical_crossentropy", "worker_optimizer": keras.optimizers.SGD(0.5), "num_epoch": 3}
trainer = Trainer(wrong_model(), "agn", num_workers=2, batch_size=8, **options)
trained = trainer.train(df)
report["accuracy"] = accuracy(trained, x, y)
report["batches"] = sum(len(batches) for batches in committed(trainer).values())
report["history"] = trainer.history.count()
report["samples"] = trainer.history.agg({"samples": "sum"}).first()[0]
report["events"] = [tuple(row) for row in trainer.events.collect()]
report["servers"] = servers()
report["no number of workers"] = said(lambda: Trainer(wrong_model(), "agn", **options).train(df))
stream = spark.readStream.format("rate").load()
report["stream"] = said(lambda: trainer.train_stream(stream, checkpoint=folder / "stream"))
labeled = stream.selectExpr("array(float(value), 1f) AS features", "int(value % 2) AS label")
estimator = KerasEstimator(wrong_model(), num_workers=2, **options)
report["stream of an estimator"] = said(lambda: estimator.fitStream(labeled, checkpoint=folder / "stream"))
report["begun"] = (folder / "stream").exists()

stages = {
    "predictor": (ModelPredictor(wrong_model()), ModelPredictor(trained)),
    "model": (KerasModel(wrong_model()), KerasModel(trained)),
    "estimator": (KerasEstimator(wrong_model(), num_epoch=2), KerasEstimator(trained, num_epoch=5)),
    "scaling": (MinMaxTransformer(0.0, 1.0), MinMaxTransformer(0.0, 2.0, -1.0, 1.0)),
}
for name, (first, second) in stages.items():
    path = str(folder / "connect" / name)
    first.save(path)
    if name == "predictor":
        report["again"] = said(lambda: second.save(path))
    second.write().overwrite().save(path)
trained.save(folder / "trained.keras")
model = Pipeline(stages=[ModelPredictor(trained)]).fit(df)
model.write().overwrite().save(str(folder / "connect" / "pipeline"))
for place in ("connect", "classic"):
    here = str(folder / place)
    report[place] = {
        "predictor": predictions(ModelPredictor.load(f"{here}/predictor")),
        "model": predictions(KerasModel.load(f"{here}/model"), "probability"),
        "epochs": KerasEstimator.load(f"{here}/estimator").value("num_epoch"),
        "n_min": MinMaxTransformer.load(f"{here}/scaling").getOrDefault("n_min"),
        "pipeline": predictions(PipelineModel.load(f"{here}/pipeline")),
    }
scored = ModelPredictor(trained).transform(df)
evaluators = (AccuracyEvaluator(), LossEvaluator("sparse_categorical_crossentropy"))
report["evaluators"] = [evaluator.evaluate(scored) for evaluator in evaluators]
report["evaluate"] = KerasModel(trained).evaluate(df)
spark.stop()
report["stopped"] = said(lambda: trainer.train(df))
(folder / "report.json").write_text(json.dumps(report, default=str))  # an event has a time
"""


pytestmark = pytest.mark.slow  # starts its own Spark server


def predictions(stage: Any, df: DataFrame, column: str = "prediction") -> list[list[float]]:
    return [list(row[0]) for row in stage.transform(df).select(column).collect()]


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return table(spark, *blobs(64))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, df: DataFrame) -> Path:
    """Return the folder with the files that classic Spark and the client saved, and with the client's report."""
    from pyspark.ml import Pipeline

    place = tmp_path_factory.mktemp("stages")
    model = wrong_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    stages: dict[str, Any] = {
        "predictor": ModelPredictor(model),
        "model": KerasModel(model),
        "estimator": KerasEstimator(model, num_epoch=7),
        "scaling": MinMaxTransformer(0.0, 1.0, -3.0, 3.0),
        "pipeline": Pipeline(stages=[ModelPredictor(model)]).fit(df),
    }
    for name, stage in stages.items():
        stage.write().overwrite().save(str(place / "classic" / name))
    output_of("-c", CLIENT, place, seconds=200, cwd=place, SPARK_TESTING="1")  # any free port
    return place


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


@pytest.fixture(scope="module")
def trained(folder: Path) -> keras.Model:
    return keras.models.load_model(folder / "trained.keras")


def test_a_client_trains_a_model(report: dict[str, Any]) -> None:
    assert report["accuracy"] > 0.9
    assert report["batches"] == report["history"]
    assert report["samples"] == 3 * 64
    assert [event for event in report["events"] if event[2] != "pace"] == []
    assert report["servers"] == []


def test_options_that_connect_cannot_derive_must_be_given(report: dict[str, Any]) -> None:
    assert report["no number of workers"].startswith(
        "ConfigurationError: `num_workers` must be given under Spark Connect"
    )
    for name in ("stream", "stream of an estimator"):
        assert report[name].startswith("ConfigurationError: `stream` must be of a classic session: Spark Connect runs")
    assert not report["begun"]


def test_nothing_is_overwritten_by_default(report: dict[str, Any]) -> None:
    assert "PATH_ALREADY_EXISTS" in report["again"]


LOADERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "predictor": (ModelPredictor.load, "prediction"),
    "model": (KerasModel.load, "probability"),
}


@pytest.mark.parametrize("name", ["predictor", "model"])
def test_classic_spark_and_connect_read_each_others_files(
    name: str, folder: Path, df: DataFrame, report: dict[str, Any], trained: keras.Model
) -> None:
    load, column = LOADERS[name]
    for place, model in (("connect", trained), ("classic", wrong_model())):
        found = predictions(load(str(folder / place / name)), df, column)
        assert found == report[place][name]  # to the bit
        np.testing.assert_allclose(found, model.predict_on_batch(blobs(64)[0]), rtol=1e-5)


def test_parameters_and_pipelines_are_saved_and_loaded(folder: Path, df: DataFrame, report: dict[str, Any]) -> None:
    from pyspark.ml import PipelineModel

    for place, epochs, least in (("connect", 5, -1.0), ("classic", 7, -3.0)):
        here = str(folder / place)
        assert report[place]["epochs"] == KerasEstimator.load(f"{here}/estimator").value("num_epoch") == epochs
        assert report[place]["n_min"] == MinMaxTransformer.load(f"{here}/scaling").getOrDefault("n_min") == least
        found = predictions(PipelineModel.load(f"{here}/pipeline"), df)
        assert found == report[place]["pipeline"] == report[place]["predictor"]


def test_evaluators_agree_with_keras(report: dict[str, Any], trained: keras.Model) -> None:
    x, y = blobs(64)
    scores = trained.predict_on_batch(x)
    loss = -np.log(scores[np.arange(64), y]).mean()
    np.testing.assert_allclose(report["evaluators"], [(scores.argmax(1) == y).mean(), loss], rtol=1e-4)
    assert report["evaluate"]["loss"] == pytest.approx(loss, rel=1e-4)


def test_an_ended_session_is_an_error(report: dict[str, Any]) -> None:
    assert report["stopped"].startswith("ConfigurationError: `df` must be of a running Spark session")

"""Stages that are saved in one process and loaded in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import DataFrame, SparkSession
from support.programs import output_of

from distkeras import KerasEstimator, KerasModel

#: A class and a function that are registered in each process that runs this text.
CLASSES = """
import keras

@keras.saving.register_keras_serializable("round_trips")
class Scaled(keras.layers.Layer):
    def call(self, x):
        return 0.5 * x

@keras.saving.register_keras_serializable("round_trips")
def distance(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)
"""

#: A program that loads everything, predicts, continues training, and saves the results as arrays.
PROGRAM = (
    """
import os, sys
folder, kind = sys.argv[1:]
from pyspark.sql import SparkSession
from pyspark.ml import Pipeline, PipelineModel
import numpy as np
from distkeras import KerasEstimator, KerasModel
"""
    + CLASSES
    + """
builder = SparkSession.builder.config("spark.sql.shuffle.partitions", "1")
if kind == "connect":
    spark = builder.remote("local[1,2]").getOrCreate()
else:
    spark = builder.master("local[1,2]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
raw = spark.read.parquet(f"{folder}/rows")

def predictions(model, rows):
    return np.array([row["prediction"] for row in model.transform(rows).orderBy("id").select("prediction").collect()])

def losses(model):
    return np.array([row["loss"] for row in model.summary.history.orderBy("epoch", "iteration").collect()])

fitted = PipelineModel.load(f"{folder}/fitted")
rows = fitted.stages[0].transform(raw)
again = Pipeline.load(f"{folder}/pipeline").fit(raw)
continued = KerasEstimator(KerasModel.load(f"{folder}/started").keras_model,
                           "downpour", num_workers=1, label_col="target").fit(rows)
np.savez(
    f"{folder}/{kind}.npz",
    model=predictions(KerasModel.load(f"{folder}/model"), rows),
    fitted=predictions(fitted, raw),
    estimator=predictions(KerasEstimator.load(f"{folder}/estimator").fit(rows), rows),
    pipeline=predictions(again, raw),
    continued=predictions(continued, rows),
    losses=losses(continued),
)
spark.stop()
"""
)


@pytest.fixture(scope="module")
def rows(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    draw = np.random.default_rng(5).normal(size=(64, 2))
    table = [(i, float(a), float(b), float(a - 2 * b)) for i, (a, b) in enumerate(draw)]
    path = str(tmp_path_factory.mktemp("rows") / "rows")
    spark.createDataFrame(table, "id int, a double, b double, target double").coalesce(1).write.parquet(path)
    return spark.read.parquet(path)


def predictions(model: Any, rows: DataFrame) -> np.ndarray:
    return np.array([row["prediction"] for row in model.transform(rows).orderBy("id").select("prediction").collect()])


class Saved(NamedTuple):
    """A folder of saved stages, and their predictions in the process that saved them.

    Args:
        folder: contains all saved stages.
        fitted: predictions of the fitted pipeline.
        continued: predictions after a fit that started from the original model with its optimizer's state.
        losses: losses of the mini-batches of that fit.
    """

    folder: Path
    fitted: np.ndarray
    continued: np.ndarray
    losses: np.ndarray


@pytest.fixture(scope="module")
def saved(rows: DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    space: dict[str, Any] = {"__name__": "registered_here"}
    exec(CLASSES, space)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(8, "tanh"), space["Scaled"](), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 100)), space["distance"])
    draw = np.random.default_rng(6).normal(size=(64, 2))
    model.fit(draw, draw[:, :1] - draw[:, 1:], batch_size=8, verbose=0)  # gives the optimizer a state

    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    estimator = KerasEstimator(model, "downpour", label_col="target", num_workers=1, batch_size=8, num_epoch=2)
    pipeline = Pipeline(stages=[assembler, estimator])
    started, ready = KerasModel(model), assembler.transform(rows)
    fitted = pipeline.fit(rows)
    rows.write.parquet(str(folder / "rows"))
    stages: Any = (
        ("estimator", estimator),
        ("model", fitted.stages[1]),
        ("pipeline", pipeline),
        ("fitted", fitted),
        ("started", started),
    )
    for name, stage in stages:
        stage.save(str(folder / name))
    continued = KerasEstimator(started.keras_model, "downpour", num_workers=1, label_col="target").fit(ready)
    losses = [row["loss"] for row in continued.summary.history.orderBy("epoch", "iteration").collect()]
    found = Saved(folder, predictions(fitted, rows), predictions(continued, ready), np.array(losses))
    assert np.abs(found.fitted - predictions(started, ready)).max() > 1e-2  # the fit has changed the predictions
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classic", "connect"])
def test_saved_stages_work_in_a_fresh_process(saved: Saved, kind: str) -> None:
    if kind == "connect":
        pytest.importorskip("grpc")
    output_of("-c", PROGRAM, saved.folder, kind, seconds=240)
    there = np.load(saved.folder / f"{kind}.npz")
    np.testing.assert_array_equal(there["model"], saved.fitted)
    np.testing.assert_array_equal(there["fitted"], saved.fitted)
    for name in ("estimator", "pipeline"):  # trained in that process from the same state of the optimizer
        np.testing.assert_allclose(there[name], saved.fitted, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(there["losses"], saved.losses, rtol=1e-5)
    np.testing.assert_allclose(there["continued"], saved.continued, atol=1e-6)


@pytest.mark.slow
def test_the_error_for_an_unknown_class_in_a_fresh_process_names_it(rows: DataFrame, tmp_path: Path) -> None:
    space: dict[str, Any] = {"__name__": "registered_here"}
    exec(CLASSES, space)
    KerasModel(keras.Sequential([keras.Input((2,)), space["Scaled"]()])).save(str(tmp_path / "model"))
    code = f"""
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
from distkeras import KerasModel
from distkeras.errors import ConfigurationError
try:
    KerasModel.load({str(tmp_path / "model")!r}).transform(spark.range(1))
except ConfigurationError as error:
    print(error)
spark.stop()
""".replace("from distkeras.errors", "from distkeras.ps.errors")
    printed = output_of("-c", code, seconds=120)
    assert "Scaled" in printed
    assert "register_keras_serializable" in printed

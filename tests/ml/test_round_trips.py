"""What is saved in one process and loaded in another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import DataFrame, SparkSession
from support.patience import patience

from distkeras import KerasEstimator, KerasModel

#: A class that is registered wherever this text is run.
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

#: Loads everything, predicts, trains on, and leaves what came of it in arrays.
PROGRAM = (
    """
import os, sys
folder = sys.argv[1]
from pyspark.sql import SparkSession
from pyspark.ml import Pipeline, PipelineModel
import numpy as np
from distkeras import KerasEstimator, KerasModel
"""
    + CLASSES
    + """
spark = (SparkSession.builder.master("local[1,2]").config("spark.ui.enabled", "false")
         .config("spark.sql.shuffle.partitions", "1").getOrCreate())
spark.sparkContext.setLogLevel("OFF")
raw = spark.read.parquet(f"{folder}/rows")

def predictions(model, rows):
    return np.array([row["prediction"] for row in model.transform(rows).orderBy("id").select("prediction").collect()])

fitted = PipelineModel.load(f"{folder}/fitted")
rows = fitted.stages[0].transform(raw)
again = Pipeline.load(f"{folder}/pipeline").fit(raw)
np.savez(
    f"{folder}/there.npz",
    model=predictions(KerasModel.load(f"{folder}/model"), rows),
    fitted=predictions(fitted, raw),
    estimator=predictions(KerasEstimator.load(f"{folder}/estimator").fit(rows), rows),
    pipeline=predictions(again, raw),
    continued=predictions(KerasEstimator(KerasModel.load(f"{folder}/started").keras_model,
                                         "downpour", num_workers=1, label_col="target").fit(rows), rows),
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


@pytest.mark.slow
def test_all_of_it_in_a_fresh_process(spark: SparkSession, rows: DataFrame, tmp_path: Path) -> None:
    space: dict[str, Any] = {"__name__": "registered_here"}
    exec(CLASSES, space)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(8, "tanh"), space["Scaled"](), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 100)), space["distance"])
    draw = np.random.default_rng(6).normal(size=(64, 2))
    model.fit(draw, draw[:, :1] - draw[:, 1:], batch_size=8, verbose=0)  # an optimizer with a state

    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    estimator = KerasEstimator(model, "downpour", label_col="target", num_workers=1, batch_size=8, num_epoch=2)
    pipeline = Pipeline(stages=[assembler, estimator])
    started, ready = KerasModel(model), assembler.transform(rows)
    fitted = pipeline.fit(rows)
    rows.write.parquet(str(tmp_path / "rows"))
    stages: Any = (
        ("estimator", estimator),
        ("model", fitted.stages[1]),
        ("pipeline", pipeline),
        ("fitted", fitted),
        ("started", started),
    )
    for name, stage in stages:
        stage.save(str(tmp_path / name))
    continued = KerasEstimator(started.keras_model, "downpour", num_workers=1, label_col="target").fit(ready)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=patience(240),
    )
    assert done.returncode == 0, done.stderr
    there = np.load(tmp_path / "there.npz")
    expected = predictions(fitted, rows)
    assert np.abs(expected - predictions(started, ready)).max() > 1e-2  # it has learned something
    np.testing.assert_array_equal(there["model"], expected)
    np.testing.assert_array_equal(there["fitted"], expected)
    for name in ("estimator", "pipeline"):  # trained there, from the same state of the optimizer
        np.testing.assert_allclose(there[name], expected, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(there["continued"], predictions(continued, ready), atol=1e-6)


@pytest.mark.slow
def test_an_unknown_class_is_named_in_a_fresh_process(rows: DataFrame, tmp_path: Path) -> None:
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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(120), check=True
    )
    assert "Scaled" in done.stdout
    assert "register_keras_serializable" in done.stdout

"""What is saved in one process and loaded in another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

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
    """What lies in a folder, and what it predicted where it was saved.

    Args:
        folder: of all of it.
        fitted: predictions of what was fitted.
        continued: of what was fitted from the model as it was before, with its optimizer's state.
        losses: of that fit, a mini-batch each.
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
    model.fit(draw, draw[:, :1] - draw[:, 1:], batch_size=8, verbose=0)  # an optimizer with a state

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
    assert np.abs(found.fitted - predictions(started, ready)).max() > 1e-2  # it has learned something
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classic", "connect"])
def test_all_of_it_in_a_fresh_process(saved: Saved, kind: str) -> None:
    if kind == "connect":
        pytest.importorskip("grpc")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(saved.folder), kind],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=patience(240),
    )
    assert done.returncode == 0, done.stderr
    there = np.load(saved.folder / f"{kind}.npz")
    np.testing.assert_array_equal(there["model"], saved.fitted)
    np.testing.assert_array_equal(there["fitted"], saved.fitted)
    for name in ("estimator", "pipeline"):  # trained there, from the same state of the optimizer
        np.testing.assert_allclose(there[name], saved.fitted, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(there["losses"], saved.losses, rtol=1e-5)
    np.testing.assert_allclose(there["continued"], saved.continued, atol=1e-6)


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

"""Files that `binaryFile` reads and executors decode, for training, prediction and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from distkeras import EarlyStopping, KerasEstimator, KerasModel
from distkeras.ps.errors import BadValueError, ColumnTypeError, ConfigurationError
from distkeras.transformers import ModelPredictor

SIDE = 4
IMAGES = np.random.default_rng(0).integers(0, 256, (40, SIDE, SIDE, 1), np.uint8)


@keras.saving.register_keras_serializable("decoding")  # type: ignore[untyped-decorator]  # Keras has no types
def gray(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(SIDE, SIDE, 1)


gray.__module__ = "__main__"  # like a function of a notebook, so workers receive it by value


@pytest.fixture(scope="module")
def files(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    folder: Path = tmp_path_factory.mktemp("images")
    for number, image in enumerate(IMAGES):
        (folder / f"{number:02}-{int(image.mean() > 127)}.raw").write_bytes(image.tobytes())
    read = spark.read.format("binaryFile").load(str(folder))
    name = F.element_at(F.split("path", "/"), -1)
    return read.select(
        F.substring(name, 1, 2).cast("int").alias("id"), "content", F.substring(name, 4, 1).cast("int").alias("label")
    )


def network() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(2, "softmax")]
    return keras.Sequential([keras.Input((SIDE, SIDE, 1)), *layers])


@pytest.mark.slow
def test_an_estimator_trains_on_files_and_its_model_predicts(files: DataFrame, tmp_path: Path) -> None:
    estimator = KerasEstimator(
        network(),
        "downpour",
        features_col="content",
        decode=gray,
        loss="sparse_categorical_crossentropy",
        worker_optimizer="adam",
        metrics=["accuracy"],
        num_workers=2,
        batch_size=8,
        num_epoch=2,
        callbacks=[EarlyStopping(files)],
    )
    fitted = estimator.fit(files)
    fitted.save(str(tmp_path / "fitted"))
    loaded = KerasModel.load(str(tmp_path / "fitted"))
    assert loaded.value("decode") is gray
    out = [row["probability"].toArray() for row in loaded.transform(files).orderBy("id").collect()]
    np.testing.assert_allclose(out, fitted.keras_model.predict(IMAGES, verbose=0), atol=1e-6)
    labels = np.array([row["label"] for row in files.orderBy("id").collect()])
    expected = fitted.keras_model.evaluate(IMAGES, labels, verbose=0, return_dict=True)
    assert fitted.evaluate(files) == pytest.approx(expected, rel=1e-5)
    watched: Any = fitted.summary.callbacks[0]
    assert watched.evaluations[-1]["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_the_predictor_refuses_invalid_functions(files: DataFrame, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="`decode` must be a function"):
        ModelPredictor(network(), "content", decode=3)  # type: ignore[arg-type]  # the test passes a wrong type
    with pytest.raises(ConfigurationError, match="`decode` must be of the columns"):
        ModelPredictor(network(), "content", decode={"path": gray})
    with pytest.raises(ConfigurationError, match="register_keras_serializable"):
        ModelPredictor(network(), "content", decode=np.frombuffer).save(str(tmp_path / "predictor"))
    with pytest.raises(ColumnTypeError, match="binary"):
        ModelPredictor(network(), "content").transform(files)


@pytest.mark.slow
def test_the_estimator_refuses_invalid_functions(files: DataFrame) -> None:
    def broken(data: bytes) -> np.ndarray:
        raise OSError("no image")

    made = KerasEstimator(network(), features_col="content", loss="sparse_categorical_crossentropy", num_workers=1)
    with pytest.raises(ColumnTypeError, match="binary"):
        made.fit(files)
    with pytest.raises(ConfigurationError, match="`decode` must be of the columns"):
        made.fit(files, {made.getParam("decode"): {"path": gray}})
    with pytest.raises(BadValueError, match=r"OSError: no image in row .*column 'content'"):
        made.fit(files, {made.getParam("decode"): broken})
    with pytest.raises(ConfigurationError, match="`decode`"):
        made.copy({made.getParam("decode"): broken}).save("nowhere")

"""A model as a function of Spark SQL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyspark
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession

from distkeras import KerasModel, register_function
from distkeras.ps.errors import ConfigurationError

pytest.importorskip("pyspark", "4.1")

X = np.random.default_rng(2).normal(size=(20, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    data = [(i, *map(float, x), x.tolist(), Vectors.dense(x)) for i, x in enumerate(X)]
    frame = spark.createDataFrame(data, ["id", "a", "b", "c", "list", "vector"]).repartition(2).cache()
    frame.createOrReplaceTempView("functions_rows")
    return frame


def classifier() -> keras.Model:
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def results(spark: SparkSession, call: str) -> list[Any]:
    return [row["y"] for row in spark.sql(f"SELECT id, {call} AS y FROM functions_rows ORDER BY id").collect()]


@pytest.mark.parametrize(
    "arguments", ["list", *(pytest.param(arguments, marks=pytest.mark.slow) for arguments in ("vector", "a, b, c"))]
)
def test_a_function_returns_the_models_predictions(spark: SparkSession, rows: DataFrame, arguments: str) -> None:
    model = classifier()
    register_function(spark, "class_of", model)
    expected = model.predict(X, verbose=0)
    np.testing.assert_array_equal(results(spark, f"class_of({arguments})"), expected.argmax(axis=1))
    register_function(spark, "chances", KerasModel(model, prediction_batch_size=4), "probability")
    found = [vector.toArray() for vector in results(spark, f"chances({arguments})")]
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.slow
def test_a_function_may_have_several_inputs_and_outputs(spark: SparkSession, rows: DataFrame) -> None:
    one, many = keras.Input((), name="one"), keras.Input((3,), name="many")
    total = keras.layers.Dense(1, name="total")(many)
    pair = keras.layers.Dense(2, name="pair")(many)
    shifted = keras.layers.Add(name="shifted")([total, keras.layers.Reshape((1,))(one)])
    model = keras.Model([one, many], [shifted, pair])
    register_function(spark, "both", model)
    expected = model.predict([X[:, 0], X], verbose=0)
    found = results(spark, "both(a, list)")
    np.testing.assert_allclose([row["shifted"] for row in found], expected[0][:, 0], atol=1e-6)
    np.testing.assert_allclose([row["pair"] for row in found], expected[1], atol=1e-6)


@pytest.mark.slow
def test_a_function_reads_vectors_from_parquet(spark: SparkSession, rows: DataFrame, tmp_path: Path) -> None:
    """Spark reads such a table in columnar batches."""
    rows.write.parquet(str(tmp_path / "rows"))
    spark.read.parquet(str(tmp_path / "rows")).createOrReplaceTempView("functions_table")
    model = classifier()
    register_function(spark, "chances", model, "probability")
    for argument in ("list", "vector"):
        answer = spark.sql(f"SELECT id, vector, chances({argument}) AS y FROM functions_table ORDER BY id").collect()
        assert [row["vector"] for row in answer] == [Vectors.dense(x) for x in X]
        np.testing.assert_allclose([row["y"].toArray() for row in answer], model.predict(X, verbose=0), atol=1e-6)


@pytest.mark.slow
def test_probabilities_of_several_outputs_are_arrays(spark: SparkSession, rows: DataFrame) -> None:
    x = keras.Input((3,))
    model = keras.Model(x, {name: keras.layers.Dense(2, "softmax", name=name)(x) for name in ("left", "right")})
    model.compile("sgd", "sparse_categorical_crossentropy")
    register_function(spark, "sides", model, "probability")
    expected, found = model.predict(X, verbose=0), results(spark, "sides(list)")
    for name in ("left", "right"):
        np.testing.assert_allclose([row[name] for row in found], expected[name], atol=1e-6)


def test_invalid_arguments_are_refused(spark: SparkSession, rows: DataFrame) -> None:
    number = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(ConfigurationError, match="classifier"):
        register_function(spark, "f", number, "probability")
    with pytest.raises(ConfigurationError, match="`returns`"):
        register_function(spark, "f", number, "class")
    with pytest.raises(ConfigurationError, match="`name`"):
        register_function(spark, "", number)


def test_an_older_pyspark_is_named(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distkeras.ml.functions.arrow_udf", None)
    with pytest.raises(ConfigurationError, match=f"Received: {re.escape(pyspark.__version__)}"):
        register_function(spark, "f", classifier())

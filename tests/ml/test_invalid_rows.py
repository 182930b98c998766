"""Invalid rows: they are skipped, kept without a prediction, or an error that names the user's column."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from distkeras import KerasEstimator, KerasModel, Trainer
from distkeras.data.validity import reasons
from distkeras.ml.functions import register_function
from distkeras.ps.errors import BadValueError, ConfigurationError
from distkeras.transformers import ModelPredictor

SPARSE = "sparse_categorical_crossentropy"
#: The invalid rows, by number, and their values.
BAD = {3: "null", 17: "NaN", 18: "infinity", 40: "label", 41: "label"}


def value(row: int) -> Any:
    return {3: None, 17: math.nan, 18: math.inf}.get(row, row / 60 - 0.5)


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rows = [(i, f"row {i}", value(i), -i / 60, 7 if BAD.get(i) == "label" else i % 2) for i in range(60)]
    return spark.createDataFrame(rows, "id int, key string, a double, b double, label int").repartition(2, "id").cache()


def classifier() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, "softmax")])
    model.compile("sgd", SPARSE)
    return model


def estimator(**keywords: Any) -> KerasEstimator:
    given: dict[str, Any] = {"features_col": ["a", "b"], "num_workers": 2, "batch_size": 8}
    return KerasEstimator(classifier(), "agn", **given | keywords)


def rows_of(df: DataFrame) -> dict[int, Row]:
    return {row["id"]: row for row in df.collect()}


@pytest.mark.parametrize("bad", [set(), {0}, {5}, {9}, {0, 9}, {3, 4, 5}, set(range(10))])
def test_each_invalid_row_has_its_own_reason(bad: set[int]) -> None:
    calls: list[tuple[int, int]] = []

    def convert(start: int, stop: int) -> None:
        calls.append((start, stop))
        for row in range(start, stop):
            if row in bad:
                raise BadValueError(f"bad {row}")

    assert reasons(10, convert) == [f"bad {row}" if row in bad else None for row in range(10)]
    assert bad or calls == [(0, 10)]
    assert reasons(0, convert) == []


class TestTraining:
    @pytest.mark.parametrize("handle", ["skip", pytest.param("keep", marks=pytest.mark.slow)])
    def test_invalid_rows_are_skipped_and_listed(self, df: DataFrame, handle: str) -> None:
        fitted = estimator(handle_invalid=handle, num_epoch=2).fit(df)
        counted = fitted.summary.history.agg(F.sum("samples")).first()
        assert counted is not None
        assert counted[0] == 2 * (60 - len(BAD))
        left_out = rows_of(fitted.summary.invalid_rows)
        assert left_out.keys() == BAD.keys()
        assert left_out[3]["key"] == "row 3"
        assert "null" in left_out[3]["reason"]
        assert "'a'" in left_out[3]["reason"]
        assert "labels must be integers in [0, 2)" in left_out[40]["reason"]

    @pytest.mark.slow
    def test_training_equals_training_on_the_valid_rows_alone(self, df: DataFrame) -> None:
        valid = df.where(~F.col("id").isin(*BAD))
        one = estimator(handle_invalid="skip", num_workers=1).fit(df)
        other = estimator(num_workers=1).fit(valid)
        for left, right in zip(one.keras_model.get_weights(), other.keras_model.get_weights(), strict=True):
            np.testing.assert_array_equal(left, right)
        left_out = rows_of(one.summary.invalid_rows)
        assert left_out.keys() == BAD.keys()
        assert "labels must be integers in [0, 2)" in left_out[40]["reason"]

    @pytest.mark.slow
    def test_invalid_validation_rows_are_skipped(self, df: DataFrame) -> None:
        held = df.withColumn("held", F.col("id") % 3 == 0)
        fitted = estimator(handle_invalid="skip", validation_indicator_col="held").fit(held)
        assert all(math.isfinite(point["loss"]) for point in fitted.summary.validation)

    @pytest.mark.slow
    def test_vectors_and_arrays_of_other_sizes_are_invalid(self, spark: SparkSession) -> None:
        vectors = [Vectors.dense([i, -i]) if i != 7 else None for i in range(20)]
        arrays = [[0.5] * (1 if i == 9 else 2) for i in range(20)]
        rows = list(zip(range(20), vectors, arrays, [i % 2 for i in range(20)], strict=True))
        frame = spark.createDataFrame(rows, ["id", "v", "x", "label"])
        for column, bad in (("v", 7), ("x", 9)):
            trainer = Trainer(classifier(), "agn", features_col=column, num_workers=1)
            assert rows_of(trainer.invalid_rows(frame, "why")).keys() == {bad}
            assert rows_of(trainer.valid_rows(frame)).keys() == set(range(20)) - {bad}
            assert trainer.valid_rows(frame).schema == frame.schema
            trainer.train(trainer.valid_rows(frame))

    def test_the_column_of_reasons_must_be_new(self, df: DataFrame) -> None:
        trainer = Trainer(classifier(), "agn", features_col="a", num_workers=1)
        with pytest.raises(ConfigurationError, match="'key'"):
            trainer.invalid_rows(df.select("id", "key", F.array("a", "b").alias("a"), "label"), "key")
        with pytest.raises(ConfigurationError, match="'LABEL'"):  # Spark could not tell them apart
            trainer.invalid_rows(df.select("id", F.array("a", "b").alias("a"), "label"), "LABEL")


class TestPrediction:
    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, df: DataFrame) -> dict[int, Row]:
        good = df.where(~F.col("id").isin(3, 17, 18))
        return rows_of(KerasModel(classifier(), features_col=["a", "b"]).transform(good))

    def test_an_invalid_row_is_an_error_by_default(self, df: DataFrame) -> None:
        out = KerasModel(classifier(), features_col=["a", "b"]).transform(df.where("id = 3"))
        with pytest.raises(Exception, match="must not be null") as caught:
            out.collect()
        text = str(caught.value)
        assert "[column 'a']" in text.replace("worker/partition 0, ", "").replace("worker/partition 1, ", "")
        assert "Traceback" not in text.partition("must not be null")[0]
        assert "distkeras_features" not in text

    def test_invalid_rows_are_skipped(self, df: DataFrame, expected: dict[int, Row]) -> None:
        out = KerasModel(classifier(), features_col=["a", "b"], handle_invalid="skip").transform(df)
        assert rows_of(out) == expected
        assert out.count() == 57

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "size", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(1024, marks=pytest.mark.slow)]
    )
    def test_invalid_rows_are_kept_without_a_prediction(
        self, df: DataFrame, expected: dict[int, Row], size: int
    ) -> None:
        model = KerasModel(
            classifier(), features_col=["a", "b"], handle_invalid="keep", invalid_col="why", prediction_batch_size=size
        )
        found = rows_of(model.transform(df))
        assert found.keys() == set(range(60))
        for number, row in found.items():
            values = (row["prediction"], row["rawPrediction"], row["probability"])
            if number in (3, 17, 18):
                assert values == (None, None, None)
                assert "'a'" in row["why"]
            else:
                assert row["why"] is None
                np.testing.assert_allclose(values[2], expected[number]["probability"], atol=1e-6)
                assert values[0] == expected[number]["prediction"]

    @pytest.mark.slow
    def test_a_partition_may_have_only_invalid_rows(self, df: DataFrame) -> None:
        out = KerasModel(classifier(), features_col=["a", "b"], handle_invalid="keep").transform(df.where("id = 3"))
        ((prediction, probability),) = out.select("prediction", "probability").collect()
        assert (prediction, probability) == (None, None)
        assert "why" not in out.columns

    def test_a_column_of_reasons_is_refused_unless_rows_are_kept(self, df: DataFrame) -> None:
        with pytest.raises(ConfigurationError, match="`invalid_col`"):
            KerasModel(classifier(), features_col=["a", "b"], invalid_col="why").transform(df)

    def test_an_unknown_handling_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="`handle_invalid`"):
            estimator(handle_invalid="drop")

    @pytest.mark.slow
    @pytest.mark.parametrize("output_type", ["array", pytest.param("vector", marks=pytest.mark.slow)])
    def test_the_predictor_handles_invalid_rows(self, df: DataFrame, output_type: str) -> None:
        arrays = df.withColumn("x", F.when(F.col("id") != 5, F.array("a", "b")))
        predictor = ModelPredictor(classifier(), "x", output_type=output_type, handle_invalid="keep", invalid_col="why")
        found = rows_of(predictor.transform(arrays))
        assert {number for number, row in found.items() if row["prediction"] is None} == {3, 5, 17, 18}
        assert {number for number, row in found.items() if row["why"]} == {3, 5, 17, 18}
        skipped = rows_of(
            predictor.copy({predictor.handle_invalid: "skip", predictor.invalid_col: ""}).transform(arrays)
        )
        assert skipped.keys() == set(range(60)) - {3, 5, 17, 18}

    def test_ids_that_an_embedding_lacks_are_invalid(self, df: DataFrame) -> None:
        """TensorFlow raises on a processor, and predicts from zeros on a GPU."""
        layers = [keras.layers.Embedding(57, 2), keras.layers.Flatten(), keras.layers.Dense(2, "softmax")]
        model = keras.Sequential([keras.Input((1,), dtype="int32"), *layers])
        found = rows_of(
            ModelPredictor(model, "id", handle_invalid="keep", invalid_col="why").transform(df.select("id"))
        )
        assert {number for number, row in found.items() if row["prediction"] is None} == {57, 58, 59}
        assert f"ids of {layers[0].name!r} must be in [0, 57), its rows" in found[58]["why"]

    def test_values_that_cannot_be_decoded_are_invalid(self, spark: SparkSession) -> None:
        frame = spark.createDataFrame(
            [(i, json.dumps([i, 1.0]) if i != 2 else "[") for i in range(4)], "id int, x string"
        )
        predictor = ModelPredictor(classifier(), "x", decode=json.loads, handle_invalid="keep", invalid_col="why")
        found = rows_of(predictor.transform(frame))
        assert {number for number, row in found.items() if row["prediction"] is None} == {2}
        assert "JSONDecodeError" in found[2]["why"]

    @pytest.mark.slow
    def test_evaluation_skips_invalid_rows(self, df: DataFrame) -> None:
        good = df.where(~F.col("id").isin(*BAD))
        model = KerasModel(classifier(), features_col=["a", "b"], handle_invalid="skip")
        plain = KerasModel(classifier(), features_col=["a", "b"])
        assert model.evaluate(df) == pytest.approx(plain.evaluate(good), rel=1e-6)

    @pytest.mark.parametrize("returns", ["prediction", pytest.param("probability", marks=pytest.mark.slow)])
    def test_a_function_of_sql_returns_null_for_invalid_rows(
        self, spark: SparkSession, df: DataFrame, returns: str
    ) -> None:
        model = KerasModel(classifier(), features_col=["a", "b"], handle_invalid="keep")
        register_function(spark, "scored", model, returns)
        found = rows_of(df.select("id", F.expr("scored(a, b)").alias("value")))
        assert {number for number, row in found.items() if row["value"] is None} == {3, 17, 18}

    @pytest.mark.slow
    def test_a_stream_continues_after_a_null(self, spark: SparkSession, df: DataFrame, tmp_path: Path) -> None:
        model = KerasModel(classifier(), features_col=["a", "b"], handle_invalid="keep", invalid_col="why")
        df.write.parquet(str(tmp_path / "in"))
        stream = spark.readStream.schema(df.schema).parquet(str(tmp_path / "in"))
        query = (
            model.transform(stream)
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "state"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "out"))
        )
        assert query.awaitTermination(120)
        found = rows_of(spark.read.parquet(str(tmp_path / "out")))
        assert {number for number, row in found.items() if row["why"]} == {3, 17, 18}
        assert len(found) == 60

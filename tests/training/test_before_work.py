"""Invalid arguments, which the driver reports before any job: the errors name what was expected and received."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml.feature import OneHotEncoder
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import DataFrame, SparkSession
from support.training.labeled_rows import GOOD, SCHEMA, SPARSE, frame, train
from support.training.spark_jobs import assert_no_jobs, assert_nothing_left, wrong_model

from distkeras import Executors, TimeBudget, Trainer
from distkeras.ps.errors import ColumnTypeError, ConfigurationError, MissingColumnError, ShapeError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def good(spark: SparkSession) -> DataFrame:
    return frame(spark, GOOD)


@pytest.fixture(autouse=True)
def nothing_left(spark: SparkSession) -> Iterator[None]:
    yield
    assert_nothing_left()
    assert_no_jobs(spark)


class TestBeforeAnyWork:
    """The driver finds the error and starts no job, so the error names no worker."""

    @pytest.fixture(autouse=True)
    def no_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: object, **options: Any) -> None:
            raise AssertionError("a server was started")

        monkeypatch.setattr("distkeras.training.run.ServerProcess", refuse)

    @pytest.mark.parametrize(
        "options", [{"features_col": "pixels"}, {"label_col": "pixels"}, {"sample_weight_col": "pixels"}]
    )
    def test_a_missing_column_is_refused(self, good: DataFrame, options: dict[str, str]) -> None:
        with pytest.raises(MissingColumnError, match=r"must have the column 'pixels'.*features.*label") as caught:
            train(good, **options)
        assert caught.value.column == "pixels"

    def test_a_column_of_text_is_refused(self, spark: SparkSession) -> None:
        with pytest.raises(ColumnTypeError, match=r"must hold numbers.*StringIndexer") as caught:
            train(frame(spark, [("a", 1)], "features string, label int"))
        assert caught.value.column == "features"

    def test_scalar_labels_are_refused_for_an_output_of_several_numbers(self, good: DataFrame) -> None:
        with pytest.raises(ShapeError, match=r"labels must be arrays of shape \(2,\)") as caught:
            train(good, loss="mse")
        assert caught.value.column == "label"

    def test_a_loss_that_does_not_fit_the_data_is_refused(self, good: DataFrame) -> None:
        def narrow(y_true: Any, y_pred: Any) -> Any:
            return keras.ops.matmul(y_pred, keras.ops.ones((3, 3)))

        with pytest.raises(ConfigurationError, match="loss and metrics that fit the data"):
            train(good, loss=narrow)

    def test_an_embedding_whose_ids_its_input_rounds_is_refused(self, good: DataFrame) -> None:
        table = [keras.Input((1,), dtype="bfloat16"), keras.layers.Embedding(2**8 + 1, 2), keras.layers.Flatten()]
        model = keras.Sequential([*table, keras.layers.Dense(2, "softmax")])
        with pytest.raises(ConfigurationError, match=r"must be integers.*bfloat16 for 257 rows"):
            train(good, model, features_col="label")

    def test_an_unknown_loss_is_refused(self, good: DataFrame) -> None:
        with pytest.raises(ConfigurationError, match="`loss` must be a name that Keras knows"):
            train(good.selectExpr("features", "array(label, label) as label"), loss="krossentropy")

    def test_a_number_of_columns_other_than_that_of_inputs_is_refused(self, good: DataFrame) -> None:
        with pytest.raises(ConfigurationError, match="several columns for one input of the model must hold"):
            train(good, features_col=["features", "label"])

    def test_a_class_weight_of_a_missing_class_is_refused(self, good: DataFrame) -> None:
        with pytest.raises(ConfigurationError, match=r"`class_weight` must be of classes in \[0, 2\)"):
            train(good, class_weight={2: 1.0})

    @pytest.mark.parametrize(
        ("make", "way"),
        [
            (lambda df: df.toPandas(), "`spark.createDataFrame"),
            pytest.param(lambda df: np.zeros((3, 2)), "`spark.createDataFrame", marks=pytest.mark.slow),
            pytest.param(lambda df: df.rdd, "`spark.createDataFrame", marks=pytest.mark.slow),
            pytest.param(lambda df: [(1, 2)], "`spark.createDataFrame", marks=pytest.mark.slow),
            pytest.param(lambda df: df.toArrow(), "to_pandas", marks=pytest.mark.slow),
            pytest.param(lambda df: "train.parquet", "`spark.read.parquet", marks=pytest.mark.slow),
            (lambda df: None, "Received: df of type builtins.NoneType"),
            (lambda df: df.sparkSession.readStream.format("rate").load(), "`Trainer.train_stream`"),
        ],
    )
    def test_an_argument_that_is_not_a_dataframe_is_refused(self, good: DataFrame, make: Any, way: str) -> None:
        with pytest.raises(ConfigurationError, match=f"^`df` must (be|not be a stream).*{way}"):
            train(make(good))

    @pytest.mark.parametrize(
        ("kind", "loss"),
        [
            ("one-hot arrays", SPARSE),
            pytest.param("one-hot vectors", SPARSE, marks=pytest.mark.slow),
            pytest.param(
                "vectors that an encoder has left out a class of", "categorical_crossentropy", marks=pytest.mark.slow
            ),
        ],
    )
    def test_labels_that_do_not_fit_the_loss_are_refused(self, spark: SparkSession, kind: str, loss: str) -> None:
        """The first case is found in a row, the others in the metadata of the column."""
        df = frame(spark, [(*row, [1.0, 0.0]) for row in GOOD], f"{SCHEMA}, hot array<float>")
        if "array" not in kind:
            encoder = OneHotEncoder(inputCol="label", outputCol="hot", dropLast="left out" in kind)
            df = encoder.fit(df.drop("hot")).transform(df.drop("hot"))
        with pytest.raises(ShapeError, match=rf"^labels must .*Received: .*[12] values.*loss='{loss}'") as caught:
            train(df, loss=loss, label_col="hot")
        assert caught.value.column == "hot"

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"checkpoint": "there", "resume": "yes"}, "^`resume` must be True or False"),
            ({"resume": True}, "^`resume` needs a `checkpoint` to resume from"),
            ({"checkpoint": 5}, "^`checkpoint` must be a directory"),
            pytest.param({"checkpoint": ""}, "^`checkpoint` must be a directory", marks=pytest.mark.slow),
            pytest.param({"checkpoint": True}, "^`checkpoint` must be a directory", marks=pytest.mark.slow),
        ],
    )
    def test_an_invalid_checkpoint_or_resume_is_refused(
        self, good: DataFrame, options: dict[str, Any], text: str
    ) -> None:
        with pytest.raises(ConfigurationError, match=text):
            Trainer(wrong_model(), "downpour", loss=SPARSE).train(good, **options)

    @pytest.mark.parametrize(
        ("callbacks", "text"),
        [
            ([keras.callbacks.BackupAndRestore("backup")], r"the server saves the job"),
            pytest.param(
                [keras.callbacks.SwapEMAWeights()], r"the workers have the optimizers", marks=pytest.mark.slow
            ),
            pytest.param([TimeBudget], r"made ones: not the class", marks=pytest.mark.slow),
            pytest.param(TimeBudget(3), r"a list of", marks=pytest.mark.slow),
            (["progress"], r"Received: 'progress'"),
        ],
    )
    def test_an_invalid_callback_is_refused(self, good: DataFrame, callbacks: Any, text: str) -> None:
        with pytest.raises(ConfigurationError, match=rf"^`callbacks` must be .*{text}"):
            Trainer(wrong_model(), "downpour", loss=SPARSE).train(good, callbacks=callbacks)

    def test_resources_are_refused_on_a_local_master(self, good: DataFrame) -> None:
        resources = ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build
        with pytest.raises(ConfigurationError, match=r"`resources` must be None on a local master.*local\[2,2\]"):
            train(good, executors=Executors(resources=resources))

    @pytest.mark.parametrize(
        "options",
        [
            {"rule": "ssgd"},
            *(pytest.param(o, marks=pytest.mark.slow) for o in ({"rule": "dana_zero"}, {"staleness_bound": 2})),
        ],
    )
    def test_fewer_slots_than_concurrent_workers_are_refused(self, good: DataFrame, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=r"`num_workers` must be at most 2.*local\[2,2\].*num_workers=3"):
            train(good, num_workers=3, **options)

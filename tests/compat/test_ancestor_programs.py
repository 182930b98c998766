"""Programs like dist-keras' examples: the same calls, in the same order, on a few rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler
from pyspark.ml.linalg import DenseVector, SparseVector, Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from support.present import present
from support.training.spark_jobs import assert_nothing_left

from distkeras.evaluators import *
from distkeras.ps.errors import ConfigurationError
from distkeras.trainers import *
from distkeras.transformers import *
from distkeras.utils import *

# Two modules have a ModelPredictor; the later import determines which one is used.
from distkeras.predictors import *  # type: ignore[assignment]  # isort: skip

CLASSES, SIDE = 3, 4


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert_nothing_left()


def dense(inputs: tuple[int, ...], outputs: int) -> keras.Model:
    keras.utils.set_random_seed(2)
    model = keras.Sequential()
    model.add(keras.Input(inputs))
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(16))
    model.add(keras.layers.Activation("relu"))
    model.add(keras.layers.Dense(outputs))
    model.add(keras.layers.Activation("softmax"))
    return model


class TestDigits:
    """A CSV file of pixels and a label, like the digits of the examples."""

    @pytest.fixture(scope="class")
    @classmethod
    def raw(cls, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
        numbers = np.random.default_rng(3)
        labels = numbers.integers(0, CLASSES, 96)
        pixels = numbers.integers(0, 60, (96, SIDE * SIDE))
        pixels[np.arange(96), labels] = 250
        path = Path(tmp_path_factory.mktemp("digits"), "train.csv")
        head = ",".join(["label", *(f"pixel{i}" for i in range(SIDE * SIDE))])
        rows = "\n".join(",".join(map(str, (label, *row))) for label, row in zip(labels, pixels, strict=True))
        path.write_text(f"{head}\n{rows}\n")
        return spark.read.format("csv").options(header="true", inferSchema="true").load(str(path))

    @pytest.fixture(scope="class")
    @classmethod
    def training_set(cls, raw: DataFrame) -> DataFrame:
        features = raw.columns
        features.remove("label")
        dataset = VectorAssembler(inputCols=features, outputCol="features").transform(raw)
        encoder = OneHotTransformer(CLASSES, input_col="label", output_col="label_encoded")
        dataset = encoder.transform(dataset)
        transformer = MinMaxTransformer(
            n_min=0.0, n_max=1.0, o_min=0.0, o_max=250.0, input_col="features", output_col="features_normalized"
        )
        dataset = transformer.transform(dataset)
        reshape = ReshapeTransformer("features_normalized", "matrix", (SIDE, SIDE, 1))
        dataset = reshape.transform(dataset)
        to_dense = DenseTransformer(input_col="features_normalized", output_col="features_normalized_dense")
        dataset = to_dense.transform(dataset)
        return precache(dataset, 2)

    def test_columns_have_the_old_types_and_values(self, training_set: DataFrame) -> None:
        row = present(training_set.first())
        assert isinstance(row.label_encoded, DenseVector)
        assert int(row.label_encoded.toArray().argmax()) == row.label
        assert isinstance(row.features_normalized, DenseVector | SparseVector)
        assert isinstance(row.features_normalized_dense, DenseVector)
        assert np.shape(row.matrix) == (SIDE, SIDE, 1)
        np.testing.assert_allclose(row.features_normalized.toArray(), row.features.toArray() / 250)

    @pytest.fixture(scope="class")
    @classmethod
    def trainer(cls, training_set: DataFrame) -> Any:
        trainer = AGN(
            keras_model=dense((SIDE, SIDE, 1), CLASSES),
            worker_optimizer="adam",
            loss="categorical_crossentropy",
            num_workers=2,
            batch_size=8,
            communication_window=3,
            num_epoch=10,
            features_col="matrix",
            label_col="label_encoded",
        )
        trainer.set_parallelism_factor(1)
        trainer.train(training_set)
        return trainer

    def test_the_program_trains_predicts_and_evaluates(self, trainer: Any, training_set: DataFrame) -> None:
        assert trainer.get_training_time() > 0
        predictor = ModelPredictor(keras_model=trainer.model, features_col="matrix")
        predicted = predictor.predict(training_set.select("matrix", "label"))
        assert isinstance(present(predicted.first()).prediction, DenseVector)
        indexed = LabelIndexTransformer(output_dim=CLASSES).transform(predicted)
        evaluator = AccuracyEvaluator(prediction_col="prediction_index", label_col="label")
        assert evaluator.evaluate(indexed) > 0.6

    @pytest.mark.slow
    def test_a_predictor_is_saved_and_loaded(self, trainer: Any, tmp_path: Path) -> None:
        predictor = ModelPredictor(trainer.model, "matrix", "guess")
        predictor.write().save(str(tmp_path / "predictor"))
        again = ModelPredictor.load(str(tmp_path / "predictor"))
        assert type(again) is ModelPredictor
        assert {param.name: again.getOrDefault(param) for param in again.params} == {
            param.name: predictor.getOrDefault(param) for param in predictor.params
        }

    def test_updates_are_counted(self, trainer: Any) -> None:
        assert trainer.parameter_server.num_updates == trainer.num_updates() == trainer.commits.count() > 0
        trainer.parameter_server.stop()

    def test_histories_have_the_old_indices(self, trainer: Any) -> None:
        history = trainer.get_history()
        steps = trainer.history.count()
        assert len(history) == steps
        assert {key for entry in history for key in entry} == {"history", "worker_id", "iteration", "timestamp"}
        assert history[0]["iteration"] == 1
        own = trainer.get_executor_history(1)
        assert [entry["iteration"] for entry in own] == list(range(1, len(own) + 1))
        assert len(own) + len(trainer.get_executor_history(0)) == steps
        averaged = trainer.get_averaged_history()
        longest = max(len(trainer.get_executor_history(worker)) for worker in (0, 1))
        assert averaged.shape == (longest, 2)
        first = trainer.history.where("iteration = 0").toPandas()
        np.testing.assert_allclose(averaged[0], [first.loss.mean(), first.accuracy.mean()])
        assert averaged[-5:, 0].mean() < averaged[:5, 0].mean()


class TestEvents:
    """A standardized table with a textual label, on which each trainer trains."""

    @pytest.fixture(scope="class")
    @classmethod
    def dataset(cls, spark: SparkSession) -> DataFrame:
        numbers = np.random.default_rng(4)
        signal = numbers.random(80) < 0.5
        values = numbers.normal(size=(80, 3)) + np.where(signal, 1.5, -1.5)[:, None]
        rows = [(i, *map(float, row), "s" if s else "b") for i, (row, s) in enumerate(zip(values, signal, strict=True))]
        raw = spark.createDataFrame(rows, ["EventId", "mass", "eta", "phi", "Kind"])
        features = raw.columns
        for name in ("EventId", "Kind"):
            features.remove(name)
        dataset = VectorAssembler(inputCols=features, outputCol="features").transform(raw)
        scaler = StandardScaler(inputCol="features", outputCol="features_normalized", withStd=True, withMean=True)
        dataset = scaler.fit(dataset).transform(dataset)
        dataset = StringIndexer(inputCol="Kind", outputCol="label_index").fit(dataset).transform(dataset)
        dataset = OneHotTransformer(output_dim=2, input_col="label_index", output_col="label").transform(dataset)
        return shuffle(dataset.select("features_normalized", "label_index", "label", "Kind", "mass"))

    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            pytest.param("SingleTrainer", {"batch_size": 8}, marks=pytest.mark.slow),
            pytest.param(
                "AEASGD",
                {"num_workers": 2, "batch_size": 4, "communication_window": 4, "rho": 5.0},
                marks=pytest.mark.slow,
            ),
            pytest.param(
                "DynSGD",
                {"num_workers": 2, "batch_size": 4, "communication_window": 4, "master_port": 0},
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_each_trainer_trains(self, dataset: DataFrame, kind: str, options: dict[str, Any]) -> None:
        trainer = globals()[kind](
            keras_model=dense((3,), 2),
            worker_optimizer="adagrad",
            loss="categorical_crossentropy",
            features_col="features_normalized",
            num_epoch=3,
            **options,
        )
        trained = trainer.train(dataframe=dataset, shuffle=True)
        predictor = ModelPredictor(keras_model=trained, features_col="features_normalized")
        predicted = predictor.predict(dataset.select("features_normalized", "label_index", "label"))
        indexed = LabelIndexTransformer(output_dim=2).transform(predicted)
        evaluator = MulticlassClassificationEvaluator(
            metricName="f1", predictionCol="prediction_index", labelCol="label_index"
        )
        assert 0.0 <= evaluator.evaluate(indexed) <= 1.0
        assert trainer.get_averaged_history()[:, 0].ndim == 1

    @pytest.mark.slow
    def test_a_parallelism_factor_multiplies_the_partitions(self, dataset: DataFrame) -> None:
        standing = keras.optimizers.SGD(0.0)
        trainer = DOWNPOUR(
            dense((3,), 2), standing, "categorical_crossentropy", features_col="features_normalized", batch_size=4
        )
        trainer.set_parallelism_factor(2)
        other = dense((3,), 2)
        other.set_weights([weight + 1 for weight in other.get_weights()])
        trainer.set_model(other)
        for got, expected in zip(trainer.train(dataset).get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(got, expected)
        assert {entry["worker_id"] for entry in trainer.get_history()} == {0, 1, 2, 3}
        assert trainer.get_num_workers() == 2

    @pytest.mark.slow
    def test_an_ensemble_trains(self, dataset: DataFrame) -> None:
        trainer = EnsembleTrainer(
            dense((3,), 2), "adagrad", "categorical_crossentropy", ["accuracy"], "features_normalized", "label", 8, 2
        )
        models = trainer.train(dataframe=dataset)
        assert len(models) == 2
        assert {entry["worker_id"] for entry in trainer.get_history()} == {0, 1}
        assert trainer.get_averaged_history().shape[1] == 2
        assert trainer.get_training_time() > 0

    @pytest.mark.slow
    def test_a_binary_label_is_one_hot(self, dataset: DataFrame) -> None:
        labeled = BinaryLabelTransformer("Kind", "binary", "s").transform(dataset)
        for row in labeled.select("Kind", "binary").collect():
            assert row.binary == DenseVector([1, 0] if row.Kind == "s" else [0, 1])

    @pytest.mark.slow
    def test_numbers_are_standardized_by_the_population_deviation(self, dataset: DataFrame) -> None:
        masses = np.array([row.mass for row in dataset.select("mass").collect()])
        out = StandardTransformer(["mass"]).transform(dataset)
        found = {row.mass: row.mass_normalized for row in out.select("mass", "mass_normalized").collect()}
        np.testing.assert_allclose([found[mass] for mass in masses], (masses - masses.mean()) / masses.std())

    @pytest.mark.slow
    def test_plain_numbers_are_scaled(self, dataset: DataFrame) -> None:
        scaler = MinMaxTransformer(0.0, 10.0, 0.0, 1.0, "mass", "scaled", is_vector=False)
        row = present(scaler.transform(dataset).first())
        assert row.scaled == pytest.approx(row.mass / 10)
        with pytest.raises(ConfigurationError, match="is_vector"):
            scaler.copy({scaler.is_vector: True}).transform(dataset)


@pytest.mark.slow
def test_the_default_index_is_used_if_no_score_is_above_zero(spark: SparkSession) -> None:
    rows = [(0, Vectors.dense([0.1, 0.6, 0.9])), (1, Vectors.dense([-1, 0, -2])), (2, Vectors.dense([0.1, 0.5, 0.2]))]
    df = spark.createDataFrame(rows, ["id", "prediction"])
    stage = LabelIndexTransformer(3, default_index=2, activation_threshold=0.55)
    out = stage.transform(df).orderBy("id").collect()
    assert [row.prediction_index for row in out] == [stage.get_index(scores) for _, scores in rows] == [1, 2, 1]
    largest = LabelIndexTransformer(3).transform(df).orderBy("id").collect()
    assert [row.prediction_index for row in largest] == [2, 1, 1]


def test_a_column_is_scaled_by_the_given_range(spark: SparkSession) -> None:
    df = spark.createDataFrame([(4.0,)], "label double")
    out = MinMaxTransformer(0, 250, 0, 1, "label", "y").transform(df).withColumn("y", F.round("y", 6))
    assert present(out.first()).y == 0.016


def test_a_custom_predictor_must_override_predict(spark: SparkSession) -> None:
    class Mine(Predictor):
        pass

    with pytest.raises(ConfigurationError, match="predict"):
        Mine(dense((3,), 2)).predict(spark.range(1))

"""The estimator and its model as stages of a Spark ML pipeline."""

from __future__ import annotations

import inspect
from decimal import Decimal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.errors import PySparkException
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from support.training.spark_jobs import column

from distkeras import AGN, Checkpoint, Executors, KerasEstimator, KerasModel, Trainer, rules, schedules
from distkeras.ml.params import SPARK_NAMES
from distkeras.ps.errors import ConfigurationError, EmptyDataError, MissingColumnError
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.settings import arguments_of

ROWS = 120
SPARSE = "sparse_categorical_crossentropy"


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    """Return two numbers and their vector; the label is whether the first is larger, the target the difference."""
    draw = np.random.default_rng(3).normal(size=(ROWS, 2))
    rows = [(i, float(a), float(b), int(a > b), float(a - b), 1.0 + i % 2, i % 5 == 0) for i, (a, b) in enumerate(draw)]
    frame = spark.createDataFrame(
        rows, "id int, a double, b double, label int, target double, weight double, held boolean"
    )
    return VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame).cache()


def classifier(activation: str | None = "softmax", units: int = 2) -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(units, activation)])


def estimator(model: keras.Model | None = None, **keywords: Any) -> KerasEstimator:
    given = {"worker_optimizer": keras.optimizers.SGD(0.5), "loss": SPARSE, "num_workers": 2, "num_epoch": 6}
    return KerasEstimator(model or classifier(), "agn", **given | keywords)


def outputs(model: KerasModel, df: DataFrame) -> np.ndarray:
    rows = df.orderBy("id").select("a", "b").collect()
    return np.asarray(model.keras_model.predict(np.array(rows, np.float32), verbose=0))


class TestParams:
    def test_every_keyword_of_the_trainer_is_a_parameter(self) -> None:
        made = estimator()
        for keyword in arguments_of(Trainer):
            assert made.hasParam(keyword), keyword
            assert made.getParam(keyword).name == SPARK_NAMES.get(keyword, keyword)
            assert keyword in inspect.signature(KerasEstimator).parameters

    def test_defaults_are_the_trainers(self) -> None:
        made = KerasEstimator()
        for keyword, parameter in arguments_of(Trainer).items():
            if parameter.default is not inspect.Parameter.empty:
                assert made.value(keyword) == parameter.default, keyword

    def test_setters_of_spark_and_keywords_set_the_same_values(self) -> None:
        made: Any = estimator(features_col=["a", "b"], sample_weight_col="weight", labelCol="label")
        assert (made.value("features_col"), made.getWeightCol()) == (["a", "b"], "weight")
        made.setFeaturesCol("features").setSeed(7).setParams(batch_size=64)
        assert (made.value("features_col"), made.value("seed"), made.value("batch_size")) == ("features", 7, 64)
        made.setNumEpoch(3).setWorkerLearningRate(0.5)
        assert (made.getNumEpoch(), made.getBatchSize(), made.getWorkerLearningRate()) == (3, 64, 0.5)
        assert made.setBatchSize(None).getBatchSize() == 32
        with pytest.raises(ConfigurationError, match="`batch_size`"):
            made.setBatchSize(0)

    def test_explain_params_shows_the_trainers_docstring(self) -> None:
        text = estimator(batch_size=64).explainParams()
        assert "batch_size: rows of one mini-batch of one worker" in text
        assert "current: 64" in text

    @pytest.mark.parametrize(
        ("keywords", "name"),
        [
            pytest.param({"batch_size": 0}, "batch_size", marks=pytest.mark.slow),
            pytest.param({"features_col": []}, "`features_col`", marks=pytest.mark.slow),
            pytest.param({"sample_weight_col": 5}, "`sample_weight_col`", marks=pytest.mark.slow),
            pytest.param({"seed": 1.5}, "`seed`", marks=pytest.mark.slow),
            ({"model": "model"}, "`model`"),
            ({"validation_split": 1.0}, "validation_split"),
            pytest.param({"epochs": 3}, "epochs", marks=pytest.mark.slow),
            pytest.param({"resume": "no"}, "resume", marks=pytest.mark.slow),
            ({"prediction_batch_size": True}, "prediction_batch_size"),
            pytest.param({"max_skipped": -1}, "max_skipped", marks=pytest.mark.slow),
            *(
                pytest.param({"worker_learning_rate": rate}, "`worker_learning_rate`", marks=pytest.mark.slow)
                for rate in (0, -1, float("nan"), "fast")
            ),
            *(
                pytest.param({"thresholds": given}, "`thresholds`", marks=pytest.mark.slow)
                for given in ([0.5], [0.0, 0.0], [-1.0, 1.0], [0.5, float("nan")], "half")
            ),
            *(
                pytest.param({f"validation_every_{unit}": 0}, f"`validation_every_{unit}`", marks=pytest.mark.slow)
                for unit in ("epochs", "seconds", "commits")
            ),
        ],
    )
    def test_an_invalid_value_is_refused_when_it_is_set(self, keywords: dict[str, Any], name: str) -> None:
        with pytest.raises(ConfigurationError, match=name):
            estimator(**keywords)

    def test_a_copy_has_its_own_values(self) -> None:
        made = estimator()
        other = made.copy({made.getParam("batch_size"): 5})
        assert (made.value("batch_size"), other.value("batch_size")) == (32, 5)


class TestFit:
    def test_a_classifier_has_classes_probabilities_and_scores(self, df: DataFrame) -> None:
        made = estimator()
        fitted = made.fit(df)
        assert fitted.parent is made
        assert fitted.uid == made.uid
        out = fitted.transform(df)
        expected = outputs(fitted, df)
        assert out.columns == [*df.columns, "prediction", "rawPrediction", "probability"]
        np.testing.assert_allclose(column(out, "probability"), expected, atol=1e-6)
        np.testing.assert_array_equal(column(out, "prediction"), expected.argmax(axis=1))
        assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(out) > 0.9
        loss = MulticlassClassificationEvaluator().setMetricName("logLoss")  # type: ignore[arg-type]  # the stub lacks it
        assert loss.evaluate(out) < 0.5
        assert BinaryClassificationEvaluator().evaluate(out) > 0.95

    @pytest.mark.slow
    def test_predictions_of_a_regressor_are_doubles(self, df: DataFrame) -> None:
        fitted = estimator(classifier(None, 1), loss="mse", label_col="target", worker_optimizer="adam").fit(df)
        out = fitted.transform(df)
        assert dict(out.dtypes)["prediction"] == "double"
        assert "probability" not in out.columns
        assert RegressionEvaluator(labelCol="target").evaluate(out) < 3
        np.testing.assert_allclose(column(out, "prediction"), outputs(fitted, df)[:, 0], atol=1e-6)

    def test_ids_of_several_columns_stay_exact_or_are_refused(self, spark: SparkSession) -> None:
        ids = keras.Input((2,), dtype="int64")
        model = KerasModel(keras.Model(ids, keras.ops.flip(ids, 1)), features_col=["a", "b"])
        df = spark.createDataFrame([(Decimal(2**53 + 1), 2**53 + 3)], "a decimal(18,1), b bigint")
        assert column(model.transform(df.withColumn("id", F.lit(0))), "prediction").tolist() == [[2**53 + 3, 2**53 + 1]]
        floats = spark.createDataFrame([(1.0, 2), (2.0**24 + 2, 2)], "a float, b bigint").withColumn("id", F.col("b"))
        with pytest.raises(PySparkException, match=r"from 16777216 on, where float32 rounds.*column 'a'"):
            column(model.transform(floats), "prediction")
        wide = df.select(F.col("a").cast("decimal(38,0)"), F.lit(0.5).cast("decimal(2,1)").alias("b"))
        with pytest.raises(ConfigurationError, match=r"cast them to bigint.*a decimal\(38,0\), b decimal\(2,1\)"):
            model.transform(wide)

    def test_a_vector_among_several_columns_of_one_input_is_refused(self, df: DataFrame) -> None:
        with pytest.raises(ConfigurationError, match="'features'"):
            estimator(features_col=["a", "features"]).fit(df)

    @pytest.mark.slow
    def test_validation_rows_are_evaluated_and_not_trained_on(self, df: DataFrame) -> None:
        fitted = estimator(validation_indicator_col="held", num_epoch=2, metrics=["accuracy"]).fit(df)
        trained = fitted.summary.history.agg(F.sum("samples")).first()
        assert trained is not None
        assert trained[0] == 2 * df.where("not held").count()
        (*_, last) = fitted.summary.validation
        kept = df.where("held")
        expected = fitted.keras_model.evaluate(
            np.array(kept.orderBy("id").select("a", "b").collect(), np.float32),
            np.array([row[0] for row in kept.orderBy("id").select("label").collect()]),
            verbose=0,
            return_dict=True,
        )
        assert last["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert last["accuracy"] == pytest.approx(expected["accuracy"])

    @pytest.mark.slow
    def test_a_validation_split_selects_the_same_rows_each_time(self, df: DataFrame) -> None:
        counts = {
            estimator(validation_split=0.25, num_epoch=1).fit(df).summary.history.agg(F.sum("samples")).first()
            for _ in range(2)
        }
        assert len(counts) == 1
        (count,) = counts
        assert count is not None
        assert 0.6 * ROWS < count[0] < 0.9 * ROWS

    def test_an_indicator_that_is_not_boolean_is_refused(self, df: DataFrame) -> None:
        with pytest.raises(MissingColumnError, match="validation_indicator_col"):
            estimator(validation_indicator_col="id").fit(df)

    def test_an_estimator_without_a_model_is_refused(self, df: DataFrame) -> None:
        with pytest.raises(ConfigurationError, match="`model`"):
            KerasEstimator().fit(df)

    @pytest.mark.slow
    def test_parameters_passed_to_fit_override_the_estimators(self, df: DataFrame) -> None:
        made = estimator(num_epoch=1)
        first, second = made.fit(df, [{made.getParam("batch_size"): 60}, {made.getParam("batch_size"): 20}])
        assert first.summary.history.count() < second.summary.history.count()
        assert first.uid == second.uid == made.uid


class TestEvaluate:
    # The next test has no weights.
    @pytest.mark.slow
    @pytest.mark.parametrize("weight", ["weight", pytest.param(None, marks=pytest.mark.slow)])
    def test_evaluate_returns_the_numbers_of_keras(self, df: DataFrame, weight: str | None) -> None:
        inputs = keras.Input((2,))
        hidden = keras.layers.Dense(4, "tanh", kernel_regularizer="l2")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(2, "softmax")(hidden))
        metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy()]
        model.compile(loss=SPARSE, metrics=metrics, weighted_metrics=["accuracy"])
        fitted = KerasModel(model, sample_weight_col=weight, prediction_batch_size=16)
        rows = df.orderBy("id").select("a", "b", "label", "weight").toPandas()
        expected = model.evaluate(
            rows[["a", "b"]].to_numpy(np.float32),
            rows["label"].to_numpy(),
            sample_weight=rows["weight"].to_numpy(np.float32) if weight else None,
            batch_size=16,
            verbose=0,
            return_dict=True,
        )
        found = fitted.evaluate(df.repartition(3))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-5), name

    def test_a_custom_metric_that_does_not_add_up_is_refused(self, df: DataFrame) -> None:
        model = classifier()
        model.compile(loss=SPARSE, metrics=[Latest()])
        with pytest.raises(ConfigurationError, match="latest"):
            KerasModel(model).evaluate(df)

    def test_a_model_without_a_loss_is_refused(self, df: DataFrame) -> None:
        with pytest.raises(ConfigurationError, match="loss"):
            KerasModel(classifier()).evaluate(df)

    @pytest.mark.slow
    def test_evaluating_an_empty_dataframe_is_an_error(self, df: DataFrame) -> None:
        model = classifier()
        model.compile(loss=SPARSE)
        with pytest.raises(EmptyDataError):
            KerasModel(model).evaluate(df.limit(0))


class TestPipelines:
    @pytest.mark.slow
    def test_a_pipeline_is_saved_and_loaded(self, df: DataFrame, tmp_path: Path) -> None:
        raw = df.drop("features")
        pipeline = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="features"), estimator()])
        pipeline.write().overwrite().save(str(tmp_path / "pipeline"))
        fitted = Pipeline.load(str(tmp_path / "pipeline")).fit(raw)
        fitted.write().overwrite().save(str(tmp_path / "fitted"))
        loaded = PipelineModel.load(str(tmp_path / "fitted"))
        np.testing.assert_array_equal(
            column(loaded.transform(raw), "probability"), column(fitted.transform(raw), "probability")
        )


@keras.saving.register_keras_serializable("tests")
class Latest(keras.metrics.Metric):
    """The mean of the last mini-batch, a metric whose states do not add up."""

    def __init__(self, name: str = "latest", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.latest = self.add_variable((), "zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.latest.assign(keras.ops.mean(y_pred))

    def result(self) -> Any:
        return self.latest


@keras.saving.register_keras_serializable("tests")  # type: ignore[untyped-decorator]  # Keras has no types
def distance(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


class TestPersistence:
    def test_every_kind_of_value_is_saved_and_loaded(self, df: DataFrame, tmp_path: Path) -> None:
        made = estimator(
            loss=distance,
            metrics=[keras.metrics.MeanAbsoluteError(), "mse"],
            worker_optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 10)),
            learning_rate=schedules.Cosine(0.1, 100),
            class_weight={0: 1.0, 1: 2.5},
            deadlines=Deadlines(lease=7.0),
            checkpoint=Checkpoint(str(tmp_path / "checkpoint"), every=7),
        ).setParams(rule=rules.make("adag", window=3))
        made.write().overwrite().save(str(tmp_path / "e"))
        loaded = KerasEstimator.load(str(tmp_path / "e"))
        assert loaded.uid == made.uid
        for name in ("rule", "learning_rate", "class_weight", "deadlines", "checkpoint", "loss"):
            assert loaded.value(name) == made.value(name), name
        assert loaded.value("worker_optimizer").get_config() == made.value("worker_optimizer").get_config()
        assert [type(metric) for metric in loaded.value("metrics")] == [keras.metrics.MeanAbsoluteError, str]
        for mine, theirs in zip(made.value("model").weights, loaded.value("model").weights, strict=True):
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))

    @pytest.mark.slow
    def test_resources_belong_to_the_cluster_and_are_not_saved(self, spark: SparkSession, tmp_path: Path) -> None:
        resources = ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build
        made = estimator(executors=Executors(threads=2, resources=resources))
        made.copy().write().overwrite().save(str(tmp_path / "e"))
        loaded = KerasEstimator.load(str(tmp_path / "e"))
        assert loaded.value("executors") == Executors(threads=2)
        assert loaded.value("batch_size") == made.value("batch_size")

    def test_a_file_of_keras_is_a_model(self, spark: SparkSession, tmp_path: Path) -> None:
        path = str(tmp_path / "m.keras")
        model = classifier()
        model.save(path)
        for made in (KerasModel(path), KerasModel.load(path)):
            np.testing.assert_array_equal(made.keras_model.get_weights()[0], model.get_weights()[0])

    @pytest.mark.parametrize(
        ("keywords", "name"), [({"loss": lambda y, p: p}, "loss"), ({"callbacks": [AGN]}, "callbacks")]
    )
    def test_the_error_for_a_value_that_cannot_be_saved_names_the_parameter(
        self, spark: SparkSession, keywords: dict[str, Any], name: str, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigurationError, match=f"`{name}`"):
            estimator(**keywords).save(str(tmp_path / "e"))

    def test_the_error_for_the_folder_of_another_class_names_the_class(self, df: DataFrame, tmp_path: Path) -> None:
        estimator().save(str(tmp_path / "e"))
        with pytest.raises(ConfigurationError, match="KerasEstimator"):
            KerasModel.load(str(tmp_path / "e"))

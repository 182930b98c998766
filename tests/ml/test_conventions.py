"""The conventions of Spark ML and xgboost.spark, which an estimator and its model keep."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import Vectors
from pyspark.ml.param import Param
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit, TrainValidationSplitModel
from pyspark.sql import DataFrame, SparkSession
from support.present import present
from support.training.spark_jobs import column

from distkeras import KerasEstimator, KerasModel, Trainer, rules
from distkeras.ml.model import one_row
from distkeras.ps.errors import BadValueError, ConfigurationError, ShapeError
from distkeras.training.run import KEPT_BY_TRAINER

SPARSE = "sparse_categorical_crossentropy"


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    draw = np.random.default_rng(4).normal(size=(90, 2))
    rows = [(i, float(a), float(b), float(a > b)) for i, (a, b) in enumerate(draw)]
    frame = spark.createDataFrame(rows, "id int, a double, b double, label double")
    return VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame).cache()


def network(*units: int, activation: str | None = "softmax") -> keras.Model:
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(count, "relu") for count in units[:-1]]
    return keras.Sequential([keras.Input((2,)), *hidden, keras.layers.Dense(units[-1], activation)])


def estimator(**keywords: Any) -> KerasEstimator:
    given = {"model": network(2), "worker_optimizer": "sgd", "loss": SPARSE, "num_workers": 1, "num_epoch": 1}
    return KerasEstimator(**given | keywords)


def fixed(kernel: list[list[float]], loss: str, activation: str | None) -> KerasModel:
    model = network(len(kernel[0]), activation=activation)
    model.set_weights([np.array(kernel), np.zeros(len(kernel[0]))])
    model.compile(loss=loss)
    return KerasModel(model)


class TestSearches:
    def grid(self, made: KerasEstimator) -> list[dict[Param[Any], Any]]:
        return (
            ParamGridBuilder()
            .addGrid(made.getParam("worker_optimizer"), [keras.optimizers.Adam(0.03), keras.optimizers.SGD(0.25)])
            .addGrid(made.getParam("model"), [network(2), network(3, 2)])
            .addGrid(made.getParam("rule"), [rules.make("agn", window=2)])
            .addGrid(made.getParam("class_weight"), [{0: 1.0, 1: 2.0}])
            .build()
        )

    @pytest.mark.slow
    def test_a_search_over_optimizers_models_and_rules_is_saved_and_loaded(self, df: DataFrame, tmp_path: Path) -> None:
        made = estimator()
        search = CrossValidator(
            estimator=made,
            estimatorParamMaps=self.grid(made)[
                ::3
            ],  # the first optimizer with the first model, the second with the second
            evaluator=BinaryClassificationEvaluator(),
        )
        search.save(str(tmp_path / "search"))
        loaded = CrossValidator.load(str(tmp_path / "search"))
        for was, now in zip(search.getEstimatorParamMaps(), loaded.getEstimatorParamMaps(), strict=True):
            values = {param.name: value for param, value in made.copy(was).extractParamMap().items()}
            again = {param.name: value for param, value in made.copy(now).extractParamMap().items()}
            assert again["worker_optimizer"].get_config() == values["worker_optimizer"].get_config()
            assert again["rule"] == rules.make("agn", window=2)
            assert again["class_weight"] == {0: 1.0, 1: 2.0}
            for one, other in zip(again["model"].get_weights(), values["model"].get_weights(), strict=True):
                np.testing.assert_array_equal(one, other)

    def test_the_error_for_a_value_that_cannot_be_saved_names_the_parameter(
        self, df: DataFrame, tmp_path: Path
    ) -> None:
        made = estimator()
        grid = ParamGridBuilder().addGrid(made.getParam("loss"), [lambda y, p: keras.ops.mean(p - y)]).build()
        search = CrossValidator(estimator=made, estimatorParamMaps=grid, evaluator=BinaryClassificationEvaluator())
        with pytest.raises(ConfigurationError, match="`loss`"):
            search.save(str(tmp_path / "search"))

    @pytest.mark.slow  # `test_columns_and_fits` fits several models concurrently
    def test_a_fitted_search_over_rates_and_models_is_saved_and_loaded(self, df: DataFrame, tmp_path: Path) -> None:
        made = estimator(worker_optimizer=keras.optimizers.Adam(0.1, beta_1=0.5), num_epoch=4, batch_size=8)
        grid = [
            ParamGridBuilder()
            .addGrid(made.getParam("worker_learning_rate"), [rate])
            .addGrid(made.getParam("model"), [network(*units)])
            .addGrid(made.getParam("rule"), [rules.make("agn", window=2)])
            .build()[0]
            for rate, units in ((1e-9, (2,)), (0.1, (3, 2)))
        ]
        evaluator = MulticlassClassificationEvaluator().setMetricName("logLoss")  # type: ignore[arg-type]  # the stub lacks it
        search = TrainValidationSplit(
            estimator=made, estimatorParamMaps=grid, evaluator=evaluator, collectSubModels=True
        )
        fitted = search.fit(df)
        assert fitted.validationMetrics[1] < fitted.validationMetrics[0]
        starts = [made.copy(values).value("model").get_weights() for values in grid]
        for model, start, least, most in zip(
            present(fitted.subModels), starts, (0.0, 0.1), (1e-6, np.inf), strict=True
        ):
            found: list[np.ndarray] = model.keras_model.get_weights()  # type: ignore[attr-defined]  # a KerasModel
            assert least <= max(np.abs(now - was).max() for now, was in zip(found, start, strict=True)) <= most
        optimizer = fitted.bestModel.keras_model.optimizer  # type: ignore[attr-defined]  # a KerasModel
        assert optimizer.get_config()["learning_rate"] == pytest.approx(0.1)
        assert optimizer.get_config()["beta_1"] == 0.5
        fitted.save(str(tmp_path / "search"))
        loaded = TrainValidationSplitModel.load(str(tmp_path / "search"))
        assert loaded.validationMetrics == fitted.validationMetrics
        assert [made.copy(one).value("worker_learning_rate") for one in loaded.getEstimatorParamMaps()] == [1e-9, 0.1]
        assert len(loaded.bestModel.keras_model.layers) == 2  # type: ignore[attr-defined]  # a KerasModel
        np.testing.assert_array_equal(
            column(loaded.transform(df), "probability"), column(fitted.transform(df), "probability")
        )

    def test_a_worker_learning_rate_is_refused_for_a_rule_without_steps_at_the_workers(self, df: DataFrame) -> None:
        with pytest.raises(ConfigurationError, match="`learning_rate`"):
            estimator(rule="asgd", worker_learning_rate=0.1).fit(df)

    def test_an_interrupted_fit_says_what_it_keeps(self, df: DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
        def train(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt(f"the job was interrupted. {KEPT_BY_TRAINER}.")

        monkeypatch.setattr(Trainer, "train", train)
        with pytest.raises(KeyboardInterrupt, match=r"A fit keeps its weights only in a `checkpoint`\.$"):
            estimator().fit(df)


class TestParams:
    def test_the_signature_has_each_keyword_once(self) -> None:
        shown = set(inspect.signature(KerasEstimator).parameters)
        assert {"model", "rule", "features_col", "prediction_col", "handle_invalid", "worker_learning_rate"} <= shown
        assert not {"featuresCol", "handleInvalid"} & shown

    @pytest.mark.parametrize("kind", [KerasEstimator, KerasModel])
    def test_each_parameter_has_a_setter_and_a_getter(self, kind: type[Any]) -> None:
        made = kind()
        for param in made.params:
            name = "".join(word[:1].upper() + word[1:] for word in param.name.split("_"))
            assert inspect.getdoc(getattr(made, f"get{name}")), param.name
            assert inspect.getdoc(getattr(made, f"set{name}")), param.name

    @pytest.mark.parametrize(
        ("wrong", "meant"),
        [
            ("batchSize", "batch_size"),
            ("inputCols", "features_col"),
            ("qqqqqqqq", None),
            ("predction_col", "prediction_col"),
            ("numWorkers", "num_workers"),
        ],
    )
    def test_the_error_for_a_wrong_keyword_suggests_a_similar_one(self, wrong: str, meant: str | None) -> None:
        with pytest.raises(ConfigurationError, match=f"Did you mean `{meant}`" if meant else None) as caught:
            estimator(**{wrong: 1})
        assert ("Did you mean" in str(caught.value)) == (meant is not None)

    def test_a_star_import_includes_the_predictor(self) -> None:
        names: dict[str, Any] = {}
        exec("from distkeras.transformers import *", names)
        from distkeras.transformers import ModelPredictor

        assert names["ModelPredictor"] is ModelPredictor


class TestClassifiers:
    def test_raw_predictions_are_the_logits_of_a_softmax(self, df: DataFrame) -> None:
        out = fixed([[1.0, -2.0, 0.5], [3.0, 0.0, 1.0]], SPARSE, "softmax").transform(df)
        x = column(out, "features")
        margins = x @ np.array([[1.0, -2.0, 0.5], [3.0, 0.0, 1.0]])
        raw = column(out, "rawPrediction")
        # Logits are determined up to a constant that all classes share.
        np.testing.assert_allclose(raw - raw[:, :1], margins - margins[:, :1], atol=1e-4)
        np.testing.assert_allclose(column(out, "probability"), np.exp(raw), rtol=1e-6)

    @pytest.mark.slow
    def test_raw_predictions_are_the_logits_of_a_sigmoid(self, df: DataFrame) -> None:
        out = fixed([[2.0], [-1.0]], "binary_crossentropy", "sigmoid").transform(df)
        margins = column(out, "features") @ np.array([2.0, -1.0])
        np.testing.assert_allclose(column(out, "rawPrediction"), np.stack([-margins, margins], 1), atol=1e-4)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("activation", "loss"),
        [("softmax", SPARSE), pytest.param("sigmoid", "binary_crossentropy", marks=pytest.mark.slow)],
    )
    def test_logits_are_finite_if_probabilities_are_0_or_1(self, df: DataFrame, activation: str, loss: str) -> None:
        kernel = [[1e4, -1e4], [0.0, 0.0]] if activation == "softmax" else [[1e4], [0.0]]
        out = fixed(kernel, loss, activation).transform(df)
        assert np.isfinite(column(out, "rawPrediction")).all()
        np.testing.assert_array_equal(
            column(out, "rawPrediction").argmax(1),
            np.asarray(column(out, "features")[:, 0] > 0) ^ (activation == "softmax"),
        )

    @pytest.mark.slow
    def test_thresholds_choose_the_class_that_spark_chooses(self, spark: SparkSession) -> None:
        from pyspark.ml.classification import LogisticRegression

        rows = [(i, Vectors.dense(np.random.default_rng(i).normal(size=2)), float(i % 3)) for i in range(60)]
        frame = spark.createDataFrame(rows, ["id", "features", "label"]).cache()
        spark_model = LogisticRegression(maxIter=3).fit(frame)
        ours = fixed(spark_model.coefficientMatrix.toArray().T.tolist(), SPARSE, "softmax").keras_model
        ours.set_weights([spark_model.coefficientMatrix.toArray().T, spark_model.interceptVector.toArray()])
        for thresholds in ([0.9, 0.05, 0.4], [0.0, 0.5, 0.5]):
            theirs = spark_model.copy({spark_model.thresholds: thresholds})
            expected = column(theirs.transform(frame), "prediction")
            found = column(KerasModel(ours, thresholds=thresholds).transform(frame), "prediction")
            np.testing.assert_array_equal(found, expected)
            assert len(set(expected)) == 1 or 0.0 not in thresholds

    def test_the_number_of_thresholds_must_be_that_of_classes(self, df: DataFrame) -> None:
        model: Any = fixed([[1.0, 0.0], [0.0, 1.0]], SPARSE, "softmax")
        model.setThresholds([0.1, 0.2, 0.3])
        with pytest.raises(ConfigurationError, match="2 classes"):
            model.transform(df)

    def test_a_model_has_its_numbers_of_classes_and_features(self, df: DataFrame) -> None:
        several, binary = (
            fixed([[1.0, 2.0, 3.0]] * 2, SPARSE, "softmax"),
            fixed([[1.0]] * 2, "binary_crossentropy", None),
        )
        assert (several.numClasses, several.numFeatures) == (3, 2)
        assert (binary.numClasses, binary.numFeatures) == (2, 2)
        with pytest.raises(ConfigurationError, match="numClasses"):
            fixed([[1.0]] * 2, "mse", None).numClasses  # noqa: B018 - it raises

    @pytest.mark.parametrize(
        ("kernel", "loss", "activation"),
        [
            ([[1.0, -2.0, 0.5], [3.0, 0.0, 1.0]], SPARSE, "softmax"),
            pytest.param([[1.0], [-2.0]], "binary_crossentropy", "sigmoid", marks=pytest.mark.slow),
            pytest.param([[1.0], [-2.0]], "mse", None, marks=pytest.mark.slow),
        ],
    )
    def test_the_prediction_of_a_single_row_is_that_of_transform(
        self, df: DataFrame, kernel: list[list[float]], loss: str, activation: str
    ) -> None:
        model = fixed(kernel, loss, activation)
        out = model.transform(df).orderBy("id").limit(5).collect()
        for row in out:
            assert model.predict(row["features"]) == pytest.approx(row["prediction"], abs=1e-6)
            assert model.predict(list(row["features"])) == pytest.approx(row["prediction"], abs=1e-6)
            if loss != "mse":
                np.testing.assert_allclose(model.predictProbability(row["features"]), row["probability"], atol=1e-6)
                np.testing.assert_allclose(model.predictRaw(row["features"]), row["rawPrediction"], atol=1e-4)
        with pytest.raises(ShapeError, match=r"shape \(3,\)"):
            model.predict([1.0, 2.0, 3.0])

    def test_vectors_are_computed_only_if_they_are_read(self, df: DataFrame) -> None:
        out = fixed([[1.0, 2.0]] * 2, SPARSE, "softmax").transform(df)

        def functions(frame: DataFrame) -> int:
            return str(frame._jdf.queryExecution().optimizedPlan().toString()).count("ArrowEvalPython")  # noqa: SLF001 - there is no public access

        assert functions(out.select("prediction")) == 1
        assert functions(out.select("prediction", "rawPrediction")) == 2
        assert functions(out.select("id")) == 0


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([2.7], "int32"),
        (2**31, "int32"),
        (-1, "uint8"),
        ([math.nan], "float32"),
        ([math.nan], "int64"),
        (1e39, "float32"),
    ],
)
def test_a_single_row_with_an_invalid_value_is_refused(value: Any, dtype: str) -> None:
    with pytest.raises(BadValueError, match=rf"input 'ids' must hold finite numbers that are exact as {dtype}"):
        one_row(value, (1,), dtype, "ids")

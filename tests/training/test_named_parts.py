"""Columns that are mapped to inputs and outputs by name: every entry point treats them as plain Keras does."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from pyspark.errors import PythonException
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession

from distkeras import KerasEstimator, KerasModel, Trainer
from distkeras.callbacks import EarlyStopping
from distkeras.data.batches import DataSpec
from distkeras.data.columns import Column, to_numpy
from distkeras.data.ordering import partitioned
from distkeras.ml.functions import register_function
from distkeras.ps.errors import ConfigurationError
from distkeras.transformers import ModelPredictor

#: The names are chosen so that neither the declared order nor the layers' names have the order of the keys.
INPUTS = {"user": "column_a", "item": "column_b"}
OUTPUTS = {"price": "target_a", "amount": "target_b"}
ROWS = np.arange(1.0, 9.0, dtype=np.float32)


def dense(name: str, value: float) -> layers.Dense:
    return layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Constant(value), name=name)


def named_model(**compilation: Any) -> keras.Model:
    """Return a model with price = 10 user + item and amount = user - item."""
    user, item = keras.Input((1,), name="user"), keras.Input((1,), name="item")
    price = layers.Add(name="out_1")([dense("a", 10)(user), dense("b", 1)(item)])
    amount = layers.Add(name="out_0")([dense("c", 1)(user), dense("d", -1)(item)])
    model = keras.Model({"user": user, "item": item}, {"price": price, "amount": amount})
    options = {"optimizer": keras.optimizers.SGD(0.001), "loss": {"price": "mse", "amount": "mae"}} | compilation
    model.compile(**options)
    return model


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    values = [(float(x), float(3 * x), float(20 * x), float(x)) for x in ROWS]
    return spark.createDataFrame(values, "column_a float, column_b float, target_a float, target_b float").coalesce(1)


def keras_data() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    x = ROWS.reshape(-1, 1)
    return {"user": x, "item": 3 * x}, {"price": 20 * x, "amount": x}


def weights(model: keras.Model) -> dict[str, float]:
    return {variable.path: float(np.ravel(variable)[0]) for variable in model.trainable_variables}


def fitted_by_keras() -> dict[str, float]:
    model = named_model()
    model.train_on_batch(*keras_data())
    return weights(model)


def options(**more: Any) -> dict[str, Any]:
    return {"features_col": INPUTS, "label_col": OUTPUTS, "num_workers": 1, "batch_size": 8, "num_epoch": 1} | more


@pytest.mark.parametrize(
    "loss",
    [
        {"price": "mse", "amount": "mae"},
        *(pytest.param(loss, marks=pytest.mark.slow) for loss in (["mae", "mse"], None)),
    ],
)
def test_a_mapping_trains_each_part_on_its_own_column(rows: DataFrame, loss: Any) -> None:
    """Keras itself applies the first loss of a list to the output with the first key in sorted order."""
    trained = Trainer(named_model(), "downpour", loss=loss, **options()).train(rows)
    found = weights(trained)
    for name, value in fitted_by_keras().items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"features_col": ["column_a", "column_b"]}, r"`features_col` must be a mapping, \{'item': ..., 'user': ...\}"),
        ({"label_col": ["target_a", "target_b"]}, r"`label_col` must be a mapping, \{'amount': ..., 'price': ...\}"),
        pytest.param(
            {"features_col": {"user": "column_a"}},
            r"inputs \['item', 'user'\]. Received: .*'user': 'column_a'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"features_col": {"zz": "column_a", "aa": "column_b"}}, r"inputs \['item', 'user'\]", marks=pytest.mark.slow
        ),
        pytest.param(
            {"label_col": {**OUTPUTS, "more": "target_a"}}, r"outputs \['amount', 'price'\]", marks=pytest.mark.slow
        ),
        pytest.param(
            {"label_col": ["target_a"]}, r"2 outputs of the model, \['amount', 'price'\]", marks=pytest.mark.slow
        ),
        ({"label_col": {"price": "", "amount": "x"}}, "a mapping: name of an output to its column"),
    ],
)
def test_a_name_that_the_model_does_not_have_is_refused_before_any_work(
    rows: DataFrame, columns: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Trainer(named_model(), "downpour", **options(**columns)).train(rows)


def test_predictors_read_and_write_columns_by_name(rows: DataFrame) -> None:
    expected = named_model().predict(keras_data()[0], verbose=0)
    predictor = ModelPredictor(named_model(), INPUTS, {"amount": "predicted_amount", "price": "predicted_price"})
    for row, price, amount in zip(
        predictor.transform(rows).collect(), expected["price"], expected["amount"], strict=True
    ):
        assert (row["predicted_price"], row["predicted_amount"]) == (price, amount)
    for wrong in ({"features_col": ["column_a", "column_b"]}, {"output_col": ["one", "other"]}):
        keywords: dict[str, Any] = {"features_col": INPUTS, "output_col": {"amount": "a", "price": "p"}} | wrong
        with pytest.raises(ConfigurationError, match="must be a mapping"):
            ModelPredictor(named_model(), **keywords).transform(rows)


@pytest.mark.slow
def test_an_estimator_and_its_model_use_names(spark: SparkSession, rows: DataFrame, tmp_path: Any) -> None:
    estimator = KerasEstimator(named_model(), "downpour", **options())
    fitted = estimator.fit(rows)
    for name, value in fitted_by_keras().items():
        assert weights(fitted.keras_model)[name] == pytest.approx(value, rel=1e-5)
    model = KerasModel(named_model(), features_col=INPUTS, label_col=OUTPUTS)
    model.save(str(tmp_path / "model"))
    expected = named_model().predict(keras_data()[0], verbose=0)
    for one in (model, KerasModel.load(str(tmp_path / "model"))):
        out = one.transform(rows).collect()
        np.testing.assert_array_equal([row["prediction_price"] for row in out], expected["price"].ravel())
        np.testing.assert_array_equal([row["prediction_amount"] for row in out], expected["amount"].ravel())
    found = model.evaluate(rows)
    for name, value in named_model().evaluate(*keras_data(), verbose=0, return_dict=True).items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.slow
def test_an_sql_function_takes_arguments_in_the_order_of_its_mapping(spark: SparkSession, rows: DataFrame) -> None:
    expected = named_model().predict(keras_data()[0], verbose=0)
    register_function(spark, "by_name", KerasModel(named_model(), features_col=INPUTS))
    rows.createOrReplaceTempView("named_rows")
    out = spark.sql("select by_name(column_a, column_b) as found from named_rows").collect()
    np.testing.assert_array_equal([row["found"]["price"] for row in out], expected["price"].ravel())
    with pytest.raises(ConfigurationError, match="`features_col` must"):
        register_function(spark, "unnamed", named_model())


@pytest.mark.slow
def test_callbacks_evaluate_by_name(rows: DataFrame) -> None:
    stopping = EarlyStopping(rows, every_commits=1)
    trained = Trainer(named_model(), "downpour", **options()).train(rows, callbacks=[stopping])
    expected = trained.evaluate(*keras_data(), verbose=0, return_dict=True)
    last = stopping.evaluations[-1]
    assert {name: last[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_a_list_of_inputs_keeps_its_declared_order(rows: DataFrame) -> None:
    user, item = keras.Input((1,), name="zz"), keras.Input((1,), name="aa")
    model = keras.Model([user, item], layers.Add()([dense("a", 10)(user), dense("b", 1)(item)]))
    expected = (10 * ROWS + 3 * ROWS).tolist()
    for columns in (["column_a", "column_b"], {"aa": "column_b", "zz": "column_a"}):
        found = ModelPredictor(model, columns).transform(rows).collect()
        assert [row["prediction"][0] for row in found] == expected


# Integers

ID = 2**24 + 1


def id_model(dtype: str) -> keras.Model:
    """Return a model that adds two numbers, each minus 2**24."""
    inputs = keras.Input((2,), dtype=dtype)
    return keras.Model(inputs, keras.ops.sum(keras.ops.subtract(inputs, 2**24), axis=1, keepdims=True))


@pytest.mark.parametrize("kind", [pytest.param("int", marks=pytest.mark.slow), "bigint"])
def test_integer_columns_for_one_input_stay_integers(spark: SparkSession, kind: str) -> None:
    ids = spark.createDataFrame([(ID, ID + 2)], f"first {kind}, second {kind}")
    model = KerasModel(id_model("int32"), features_col=["first", "second"])
    assert model.transform(ids).collect()[0]["prediction"] == 4
    register_function(spark, "id_model", model)
    ids.createOrReplaceTempView("ids")
    assert spark.sql("select id_model(first, second) as found from ids").collect()[0]["found"] == 4


def test_vectors_of_integers_stay_integers_in_training(spark: SparkSession) -> None:
    ids = spark.createDataFrame([(Vectors.dense([ID, ID + 2]),)], ["ids"])
    column = Column("ids", (2,), "int32")
    rows = partitioned(ids, DataSpec((column,)), 1).toArrow().combine_chunks().to_batches()[0]
    np.testing.assert_array_equal(to_numpy(rows["ids"], column), [[ID, ID + 2]])


def test_an_integer_that_its_input_cannot_hold_is_an_error(spark: SparkSession) -> None:
    ids = spark.createDataFrame([(2**40, 1)], "first bigint, second bigint")
    model = KerasModel(id_model("int32"), features_col=["first", "second"])
    with pytest.raises(PythonException, match="must be exact as int32"):
        model.transform(ids).collect()

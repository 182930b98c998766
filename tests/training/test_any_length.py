"""Rows of any length on Spark: exact counts under a kill, and every way to train, predict and evaluate."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from pyspark.sql import DataFrame, SparkSession
from support.patience import patience
from support.training.spark_jobs import once_at_step, step_callback_layer, total

from distkeras import KerasEstimator, KerasModel, Padding, Trainer
from distkeras.data.model_columns import data_spec
from distkeras.ps.errors import ConfigurationError, ShapeError
from distkeras.ps.rules import make
from distkeras.transformers import ModelPredictor

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(180)]

ROWS, BATCH, EPOCHS = 41, 4, 2
#: Steps of each row.
LENGTHS = [1 + 7 * number % 12 for number in range(ROWS)]


def counting_model(*hooks: keras.layers.Layer) -> keras.Model:
    """Return a model whose table subtracts 1 from a row for each step with its id."""
    tokens = keras.Input((None,), dtype="int32")
    hidden: Any = layers.Embedding(ROWS + 1, 1, embeddings_initializer="zeros", name="counts")(tokens)
    for hook in hooks:
        hidden = hook(hidden)
    return keras.Model(tokens, keras.ops.sum(hidden, axis=1))


def counted_rows(spark: SparkSession) -> DataFrame:
    """Return rows of any length, each with its own id in every step; id 0 is for padding."""
    rows = [([number + 1] * length, 0.0) for number, length in enumerate(LENGTHS)]
    return spark.createDataFrame(rows, "features array<int>, label float")


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the call that kills a worker is TensorFlow's")
@pytest.mark.slow
@pytest.mark.parametrize("tables", ["dense", ["counts"]], ids=["dense", "by rows"])
def test_each_step_counts_once_though_a_worker_is_killed(spark: SparkSession, tmp_path: Path, tables: Any) -> None:
    kill = step_callback_layer(once_at_step(tmp_path / "killed", 3, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    trainer = Trainer(
        counting_model(kill),
        make("downpour", window=2),
        worker_optimizer=keras.optimizers.SGD(1.0),
        loss=total,
        num_workers=2,
        batch_size=BATCH,
        num_epoch=EPOCHS,
        padding={"features": Padding(longest=12, bucket=True)},
        tables=tables,
    )
    model = trainer.train(counted_rows(spark))
    assert (tmp_path / "killed").exists()
    touched = -model.get_layer("counts").get_weights()[0].ravel()[1:]
    np.testing.assert_array_equal(touched, EPOCHS * np.array(LENGTHS))
    padding = [event for event in trainer.events.collect() if event["kind"] == "padding"]
    assert len(padding) == 2
    assert all("of the steps in the mini-batches of worker" in event["text"] for event in padding)


@pytest.mark.slow
def test_a_stream_counts_each_step_once(spark: SparkSession, tmp_path: Path) -> None:
    rows = counted_rows(spark)
    rows.repartition(3).write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(rows.schema).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
    sgd = keras.optimizers.SGD(1.0)
    trainer = Trainer(counting_model(), "downpour", worker_optimizer=sgd, loss=total, num_workers=2, batch_size=BATCH)
    training = trainer.train_stream(stream, checkpoint=tmp_path / "checkpoint", trigger={"availableNow": True})
    assert training.awaitTermination(patience(120))
    touched = -training.model().get_layer("counts").get_weights()[0].ravel()[1:]
    np.testing.assert_array_equal(touched, LENGTHS)


def tagger() -> keras.Model:
    keras.utils.set_random_seed(5)
    tokens = keras.Input((None,), dtype="int32")
    steps = layers.LSTM(6, return_sequences=True)(layers.Embedding(9, 4)(tokens))
    return keras.Model(tokens, layers.Dense(3, "softmax")(steps))


TAGGED = "tokens array<int>, tags array<int>, weights array<float>, group int"


def tagged_rows(spark: SparkSession, rows: int = 60) -> DataFrame:
    rng = np.random.default_rng(0)
    data = []
    for number in range(rows):
        tokens = rng.integers(1, 9, rng.integers(1, 15)).tolist()
        data.append((tokens, [token % 3 for token in tokens], [1.0] * len(tokens), number % 3))
    return spark.createDataFrame(data, TAGGED)


def options(**changed: Any) -> dict[str, Any]:
    columns = {"features_col": "tokens", "label_col": "tags", "sample_weight_col": "weights"}
    keras_options = {"loss": "sparse_categorical_crossentropy", "worker_optimizer": keras.optimizers.Adam(0.05)}
    return columns | keras_options | {"batch_size": 8, "num_epoch": 2} | changed


@pytest.mark.slow
def test_an_estimator_tags_steps_of_rows_of_any_length(spark: SparkSession) -> None:
    df = tagged_rows(spark).cache()
    given = options(num_workers=2, num_epoch=15, prediction_col="scores", weighted_metrics=["accuracy"])
    fitted = KerasEstimator(tagger(), "downpour", **given).fit(df)
    evaluated = fitted.evaluate(df)
    assert evaluated["accuracy"] > 0.9
    rows = fitted.transform(df).select("tokens", "scores").collect()
    assert [len(row["scores"]) for row in rows] == [len(row["tokens"]) for row in rows]
    for row in rows[:10]:  # each as if it were predicted alone
        alone = fitted.keras_model.predict(np.array([row["tokens"]]), verbose=0)[0]
        np.testing.assert_allclose(row["scores"], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*You are using a softmax over axis")  # rows of one step are there, too
def test_an_attention_map_is_predicted_as_wide_and_as_high_as_its_row_is_long(spark: SparkSession) -> None:
    keras.utils.set_random_seed(5)
    tokens = keras.Input((None,), dtype="int32")
    steps = layers.Embedding(9, 4)(tokens)
    attended, heads = layers.MultiHeadAttention(2, 3)(steps, steps, return_attention_scores=True)
    model = keras.Model(tokens, [layers.Dense(3, "softmax")(attended), keras.ops.mean(heads, axis=1), heads])
    df = tagged_rows(spark, 24).cache()
    given = options(
        label_col=["tags", None, None],
        sample_weight_col=["weights", None, None],
        loss=["sparse_categorical_crossentropy", None, None],
    )
    fitted = KerasEstimator(model, "downpour", prediction_col=["scores", "map", "heads"], **given).fit(df)
    found = fitted.transform(df)
    kinds = [found.schema[name].dataType.simpleString() for name in ("map", "heads")]
    assert kinds == ["array<array<float>>", "array<array<array<float>>>"]
    rows = found.select("tokens", "scores", "map", "heads").collect()
    assert len({len(row["tokens"]) for row in rows}) > 5
    for tokens_of_row, *outputs in rows:
        alone = fitted.keras_model.predict_on_batch(np.array([tokens_of_row]))
        for output, expected in zip(outputs, alone, strict=True):
            np.testing.assert_allclose(output, expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("partitions", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_an_evaluation_does_not_depend_on_partitions(spark: SparkSession, partitions: int) -> None:
    """The loss of a mini-batch without a mask depends on its padding, and so on the rows that share it."""
    curve = keras.Input((None, 1))
    model = keras.Model(curve, layers.Dense(1, kernel_initializer="ones")(curve))
    model.compile("sgd", "mse")
    rows = [([float(number)] * (1 + 3 * number % 8),) for number in range(9)]
    df = spark.createDataFrame(spark.sparkContext.parallelize(rows, partitions), "features array<float>")
    found = KerasModel(model, label_col="features", prediction_batch_size=4).evaluate(df)
    assert found["loss"] == 0
    values = [row for (row,) in rows]
    padded = [keras.utils.pad_sequences(values[a : a + 4], dtype="float32", padding="post") for a in range(0, 9, 4)]
    model.layers[-1].set_weights([np.full((1, 1), 3.0), np.zeros(1)])
    found = KerasModel(model, label_col="features", prediction_batch_size=4).evaluate(df)
    errors = [np.mean((2.0 * batch) ** 2) for batch in padded]
    assert found["loss"] == pytest.approx(np.average(errors, weights=[4, 4, 1]))


def test_one_row_is_predicted_as_in_a_dataframe(spark: SparkSession) -> None:
    tokens = keras.Input((None,), dtype="int32")
    model = keras.Model(tokens, keras.ops.sum(keras.ops.cast(tokens, "float32"), axis=1, keepdims=True))
    padding = Padding(value=10, longest=3, multiple=2)
    fitted = KerasModel(model, padding={"features": padding}, output_kind="numbers")
    rows = [[1, 2, 3, 4], [5], []]
    df = spark.createDataFrame([(row,) for row in rows], "features array<int>")
    predicted = [row["prediction"] for row in fitted.transform(df).collect()]
    assert predicted == [19.0, 15.0, 20.0]
    assert [float(np.ravel(fitted.predict(row))[0]) for row in rows] == predicted
    predictor = ModelPredictor(model, padding=padding, output_col="sum")
    assert [row["sum"] for row in predictor.transform(df).collect()] == [[value] for value in predicted]
    for given, text in (({"other": padding}, "rows have any length"), (Padding(0.5), "exact as int32")):
        with pytest.raises(ConfigurationError, match=text):
            ModelPredictor(model, padding=given).transform(df)


@pytest.mark.slow
def test_a_saved_estimator_keeps_its_padding(spark: SparkSession, tmp_path: Path) -> None:
    padding = {"tokens": Padding(longest=5, side="pre", bucket=True)}
    estimator = KerasEstimator(tagger(), "downpour", **options(padding=padding))
    estimator.write().overwrite().save(str(tmp_path / "saved"))
    assert KerasEstimator.load(str(tmp_path / "saved")).getOrDefault("padding") == padding


@pytest.mark.slow
def test_rows_are_validated_while_mini_batches_are_bucketed(spark: SparkSession) -> None:
    df = tagged_rows(spark).cache()
    trainer = Trainer(tagger(), "downpour", **options(num_workers=2, padding=Padding(bucket=True)))
    trainer.train(df, validation_data=df)
    last = trainer.validation[-1]  # short epochs may share an evaluation
    assert (last["rows"], trainer.epochs.collect()[-1]["val_loss"]) == (60, last["loss"])


@pytest.mark.slow
def test_a_group_is_trained_and_predicts_as_alone(spark: SparkSession) -> None:
    df = tagged_rows(spark, 24).cache()
    fitted = KerasEstimator(tagger(), "downpour", **options(prediction_col="scores")).fitGroups(df, by="group")
    alone = Trainer(tagger(), "downpour", **options()).train_groups(df.where("group = 1"), by="group").model(1)
    for found, known in zip(fitted.groups.model(1).get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_array_equal(found, known)
    for row in fitted.transform(df).where("group = 1").select("tokens", "scores").collect():
        expected = alone.predict(np.array([row["tokens"]]), verbose=0)[0]
        np.testing.assert_allclose(row["scores"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        pytest.param(
            {"padding": {"other": Padding()}},
            ConfigurationError,
            r"\['tokens', 'tags', 'weights'\]",
            marks=pytest.mark.slow,
        ),
        ({"padding": "post"}, ConfigurationError, "distkeras.Padding"),
        ({"label_col": "group"}, ShapeError, "labels must be arrays of shape"),
    ],
)
def test_what_does_not_fit_is_refused_before_work(
    spark: SparkSession, changed: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        Trainer(tagger(), "downpour", **options(num_workers=2, **changed)).train(tagged_rows(spark))


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_a_model_is_tried_on_the_steps_of_the_longest_of_the_first_rows(spark: SparkSession, nested: bool) -> None:
    curve = keras.Input((None, 2))
    model = keras.Model(curve, layers.Dense(3)(layers.Conv1D(4, 3)(curve)))
    model.compile("sgd", "sparse_categorical_crossentropy")
    rows = [([[0.5, 1.0]] * steps if nested else [0.5] * 2 * steps, [0] * (steps - 2)) for steps in (3, 7, 5)]
    df = spark.createDataFrame(rows, f"x {'array<array<float>>' if nested else 'array<float>'}, y array<int>")
    for padding, steps in ((None, 7), (Padding(longest=4), 4), (Padding(multiple=5), 10)):
        given = {} if padding is None else {"x": padding}
        found = data_spec(model, df.schema, features=("x",), labels=("y",), rows=df, padding=given)
        assert [column.shown_steps for column in found.columns] == [steps, steps - 2]


@pytest.mark.slow
def test_labels_must_have_as_many_steps_as_the_input(spark: SparkSession) -> None:
    df = tagged_rows(spark).selectExpr("tokens", "if(group = 1, slice(tags, 1, 0), tags) tags", "weights")
    with pytest.raises(ShapeError, match="must have as many steps as in 'tokens'") as caught:
        Trainer(tagger(), "downpour", **options(num_workers=2)).train(df)
    assert caught.value.column == "tags"


@pytest.mark.slow
def test_groups_side_by_side_need_rows_of_one_length(spark: SparkSession) -> None:
    with pytest.raises(ConfigurationError, match="needs rows of one length"):
        Trainer(tagger(), "downpour", **options()).train_groups(tagged_rows(spark), by="group", side_by_side=4)

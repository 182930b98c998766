"""Pipelines whose models have tables that travel by rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from pyspark.sql import DataFrame, SparkSession

from distkeras import KerasEstimator, KerasModel
from distkeras.keras_model import mapped_tables
from distkeras.ps.errors import BadValueError
from distkeras.ps.rules import make
from distkeras.transformers.predictor import PackedModel

USERS, ITEMS = 40, 30


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    draw = np.random.default_rng(3)
    values = [
        (number, f"user {user}", f"item {item}", user, item, float((user + item) % 2))
        for number, (user, item) in enumerate(zip(draw.integers(0, 20, 64), draw.integers(0, 15, 64), strict=True))
    ]
    values = [tuple(getattr(value, "item", lambda value=value: value)() for value in row) for row in values]
    return spark.createDataFrame(values, "id int, user string, item string, user_id int, item_id int, label double")


def head(user: Any, item: Any) -> Any:
    user_rows = layers.Flatten()(layers.Embedding(USERS, 4, name="users")(user))
    item_rows = layers.Flatten()(layers.Embedding(ITEMS, 3, name="items")(item))
    return layers.Dense(1)(layers.Concatenate()([user_rows, item_rows]))


def estimator(model: keras.Model, **options: Any) -> KerasEstimator:
    given = {"worker_optimizer": keras.optimizers.Adagrad(0.1), "loss": "mse", "num_workers": 1, "batch_size": 8}
    tables = ["users", "items"]
    return KerasEstimator(model, make("downpour", window=2), tables=tables, num_epoch=2, **given | options)


def compiled_towers(penalty: str | None = None) -> keras.Model:
    """Return a model with two named outputs, one of them of classes, and with losses and metrics by name."""
    keras.utils.set_random_seed(2)
    user, item = keras.Input((1,), dtype="int32", name="user"), keras.Input((1,), dtype="int32", name="item")
    user_rows = layers.Flatten()(layers.Embedding(USERS, 4, name="users", embeddings_regularizer=penalty)(user))
    item_rows = layers.Flatten()(layers.Embedding(ITEMS, 3, name="items")(item % ITEMS))
    both = layers.Concatenate()([user_rows, item_rows])
    outputs = {"score": layers.Dense(1, name="dense_s")(both), "kind": layers.Dense(2, "softmax", name="dense_k")(both)}
    model = keras.Model({"user": user, "item": item}, outputs)
    model.compile(
        "sgd",
        loss={"score": "mse", "kind": "sparse_categorical_crossentropy"},
        loss_weights={"score": 0.5, "kind": 2.0},
        metrics={"score": ["mae"], "kind": ["accuracy"]},
    )
    return model


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [None, "l2"])
def test_a_model_is_evaluated_with_tables_in_files(
    rows: DataFrame, monkeypatch: pytest.MonkeyPatch, penalty: str | None
) -> None:
    def evaluated(df: DataFrame) -> dict[str, Any]:
        columns: dict[str, Any] = {
            "features_col": {"user": "user_id", "item": "item_id"},
            "label_col": {"score": "label", "kind": "kind"},
        }
        return KerasModel(compiled_towers(penalty), **columns, prediction_batch_size=8).evaluate(
            df.withColumn("kind", df.label)
        )

    whole = evaluated(rows)
    assert {"loss", "score_loss", "kind_loss", "score_mae", "kind_accuracy"} <= whole.keys()
    monkeypatch.setattr(mapped_tables, "FILE_BYTES_MIN", 4 * ITEMS * 3)
    if penalty is None:  # no task loads the whole model
        monkeypatch.setattr(PackedModel, "archive_reader", None)
    assert evaluated(rows) == whole
    if penalty is None:
        with pytest.raises(BadValueError, match=rf"ids of 'users' must be in \[0, {USERS}\).*Received: 41") as caught:
            evaluated(rows.selectExpr("user_id + 41 - user_id AS user_id", "item_id", "label"))
        assert caught.value.column == "user_id"

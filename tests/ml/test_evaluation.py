"""`KerasModel.evaluate` and `keras.Model.evaluate` agree for every metric whose states add up."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession

from distkeras import KerasModel
from distkeras.data.batches import Batch
from distkeras.ml.evaluation import sums_of

ROWS, CLASSES = 90, 3
#: Arguments that a metric must be given.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "TopKCategoricalAccuracy": {"k": 2},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "MeanRelativeError": {"normalizer": [1.0] * CLASSES},
    "MeanIoU": {"num_classes": CLASSES},
    "IoU": {"num_classes": CLASSES, "target_class_ids": [0]},
    "BinaryIoU": {"target_class_ids": [0, 1]},
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0, 1]},
    "OneHotMeanIoU": {"num_classes": CLASSES},
}
#: Classes that are not metrics of predictions, or whose result is not one number.
LEFT_OUT = {"Metric", "Mean", "Sum", "MeanMetricWrapper"}
#: Metrics by their labels; all other metrics have one-hot labels.
SPARSE = {"SparseCategoricalAccuracy", "SparseCategoricalCrossentropy", "SparseTopKCategoricalAccuracy"}
CONFUSION = {"MeanIoU", "IoU"}


def metrics(names: Callable[[str], bool]) -> list[keras.metrics.Metric]:
    """Return an object of every metric class of Keras whose name is selected."""
    found = [(name, kind) for name, kind in vars(keras.metrics).items() if inspect.isclass(kind)]
    return [
        kind(**ARGUMENTS.get(name, {}) | ({"average": "macro"} if name in ("F1Score", "FBetaScore") else {}))
        for name, kind in sorted(found)
        if name not in LEFT_OUT and names(name)
    ]


@pytest.fixture(scope="module")
def data() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(7)
    classes = draw.integers(0, CLASSES, ROWS)
    return {
        "features": draw.normal(size=(ROWS, 4)).astype(np.float32),
        "class": classes.astype(np.int32),
        "onehot": np.eye(CLASSES, dtype=np.float32)[classes],
        "weight": draw.uniform(0.5, 2.0, ROWS).astype(np.float32),
    }


@pytest.fixture(scope="module")
def df(spark: SparkSession, data: dict[str, np.ndarray]) -> DataFrame:
    schema = "features array<float>, class int, onehot array<float>, weight float"
    return spark.createDataFrame(list(zip(*(column.tolist() for column in data.values()), strict=True)), schema).cache()


@pytest.mark.parametrize("label", ["class", pytest.param("onehot", marks=pytest.mark.slow)])
def test_every_metric_of_keras_agrees(df: DataFrame, data: dict[str, np.ndarray], label: str) -> None:
    chosen = metrics(lambda name: name in SPARSE if label == "class" else name not in SPARSE | CONFUSION)
    assert len(chosen) > (2 if label == "class" else 30)
    if label == "onehot":
        chosen.append(keras.metrics.F1Score(average=None, name="f1_of_each"))
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(CLASSES, "softmax", activity_regularizer="l2")])
    loss = "sparse_categorical_crossentropy" if label == "class" else "categorical_crossentropy"
    # Metrics of intersections count whole rows only.
    plain = [metric for number, metric in enumerate(chosen) if number % 2 or "io_u" in metric.name]
    model.compile("sgd", loss, metrics=plain, weighted_metrics=[metric for metric in chosen if metric not in plain])
    expected = model.evaluate(
        data["features"], data[label], sample_weight=data["weight"], batch_size=32, verbose=0, return_dict=True
    )
    fitted = KerasModel(model, label_col=label, sample_weight_col="weight", prediction_batch_size=32)
    found = fitted.evaluate(df.repartition(2))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(np.asarray(value), rel=2e-5, abs=1e-6), name


@keras.saving.register_keras_serializable("evaluation")  # type: ignore[untyped-decorator]  # Keras has no types
def own(y_true: Any, y_pred: Any) -> Any:
    """Return a loss of the whole mini-batch."""
    return keras.ops.max(keras.ops.abs(y_true - y_pred))


def masked(loss: Any) -> keras.Model:
    """Return a model that leaves out the steps of a sequence that are 0."""
    inputs = keras.Input((4,))
    steps = keras.layers.Masking(0.0)(keras.layers.Reshape((4, 1))(keras.ops.maximum(inputs, 0.0)))
    model = keras.Model(inputs, keras.layers.Dense(1, bias_initializer="ones")(steps))
    model.compile("sgd", loss)
    return model


def plain(loss: Any, outputs: int = 1) -> keras.Model:
    inputs = keras.Input((4,))
    heads = [keras.layers.Dense(4, name=name)(inputs) for name in "ab"[:outputs]]
    model = keras.Model(inputs, heads)
    model.compile("sgd", loss, weighted_metrics=[["mae"] for _ in heads])
    return model


def reduced(reduction: str | None) -> keras.losses.Loss:
    return keras.losses.MeanSquaredError(reduction=reduction)


MODELS: dict[str, Callable[[], keras.Model]] = {
    "sum": lambda: plain(reduced("sum")),
    "mean_with_sample_weight": lambda: plain(reduced("mean_with_sample_weight")),
    "none": lambda: plain(reduced("none")),
    "own": lambda: plain(own),
    "masked": lambda: masked("mse"),
    "two outputs": lambda: plain(["mse", reduced("sum")], 2),
    "mean": lambda: plain(reduced("mean")),
    "sum_over_batch_size": lambda: plain(reduced("sum_over_batch_size"), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("partitions", [1, 8])
@pytest.mark.parametrize("name", MODELS)
def test_a_loss_does_not_depend_on_partitions(
    spark: SparkSession, data: dict[str, np.ndarray], name: str, partitions: int
) -> None:
    """Rows are in mini-batches of 32, of which the last one is of 26; partitions end within them."""
    keras.utils.set_random_seed(3)
    model = MODELS[name]()
    count = len(model.outputs)
    x, weight = data["features"], data["weight"]
    rows = [(row.tolist(), float(one)) for row, one in zip(x, weight, strict=True)]
    df = spark.createDataFrame(spark.sparkContext.parallelize(rows, partitions), "features array<float>, weight float")
    y = x[:, :, None] if name == "masked" else x
    labels = ["features"] * count if count > 1 else "features"
    model.run_eagerly = count > 1  # in graphs, Keras counts a short mini-batch of several outputs like the others
    weights = None if name == "masked" else weight  # Keras cannot combine one for each row with a mask of steps
    expected = model.evaluate(
        x, [y] * count if count > 1 else y, sample_weight=weights, batch_size=32, verbose=0, return_dict=True
    )
    column: dict[str, Any] = {} if weights is None else {"sample_weight_col": "weight"}
    fitted = KerasModel(model, label_col=labels, prediction_batch_size=32, **column)
    found = fitted.evaluate(df)
    assert found.keys() == expected.keys()
    for metric, value in expected.items():
        assert found[metric] == pytest.approx(value, rel=2e-6), metric


class Counting(keras.layers.Layer):
    """Adds the number of its calls, also in inference, and has no seed."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs: Any) -> Any:
        self.calls.assign_add(1.0)
        return inputs + self.calls


def test_tasks_of_a_process_share_a_model_whose_states_begin_again() -> None:
    model = keras.Sequential([keras.Input((4,)), Counting(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    loaded: list[keras.Model] = []
    batch = Batch(0, 0, True, (np.ones((8, 4), np.float32),), (np.ones((8, 1), np.float32),), None)

    def load() -> keras.Model:
        loaded.append(model)
        return model

    def sums(name: str) -> Any:
        found = sums_of(name, load)
        assert found.total() is None
        found.add(batch)
        found.add(batch)
        return found.total()

    first = sums("one")
    np.testing.assert_array_equal(sums("one"), first)
    assert len(loaded) == 1
    sums("another")
    assert len(loaded) == 2

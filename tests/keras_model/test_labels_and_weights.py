"""Labels and weights in every form that Keras' `fit` takes: a worker's steps equal Keras' own on the same rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
from keras import layers, losses
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as T

from distkeras.data.batches import DataSpec
from distkeras.data.model_columns import data_spec, example
from distkeras.data.source import BatchSource
from distkeras.groups.replica import GroupsSideBySide, unpacked_weights
from distkeras.keras_model.archive import to_bytes
from distkeras.keras_model.recipe import recipe_of
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps.errors import ConfigurationError

# An output without a loss has weights without a gradient, of which Keras warns.
pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")

ROWS, BATCH = 10, 4
DRAW = np.random.default_rng(5)
X = DRAW.normal(size=(ROWS, 6)).astype(np.float32)
CLASSES = DRAW.integers(0, 3, ROWS)
STEP_CLASSES = DRAW.integers(0, 3, (ROWS, 3))
NUMBERS = DRAW.normal(size=(ROWS, 2)).astype(np.float32)
WEIGHT = DRAW.uniform(0.5, 2, ROWS).astype(np.float32)
STEP_WEIGHT = DRAW.uniform(0, 2, (ROWS, 3)).astype(np.float32)
SPARSE = "sparse_categorical_crossentropy"
#: Times until an event, and whether it was seen: two numbers a row for an output of one.
SURVIVAL = np.stack([DRAW.uniform(0.1, 3, ROWS), DRAW.integers(0, 2, ROWS)], axis=1).astype(np.float32)


def survival(y_true: Any, y_pred: Any) -> Any:
    """Return the negative log-likelihood of an exponential distribution with censored times."""
    time, seen = y_true[:, 0], y_true[:, 1]
    rate = keras.ops.exp(y_pred[:, 0])
    return rate * time - seen * y_pred[:, 0]


class Squared(layers.Layer):
    """Adds a loss of its own."""

    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.mean(x**2))
        return x


class OwnStep(keras.Model):
    """Trains without labels, by a step of its own."""

    def train_step(self, data: Any) -> Any:
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x, training=True) - x[:, :1]) ** 2)
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True)
        )
        return {"loss": loss}


def classifier(loss: Any, **options: Any) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3, "softmax")])
        model.compile("adam", loss, **options)
        return model

    return make


def sequence(loss: Any, **options: Any) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        hidden = layers.Reshape((3, 2))(inputs := keras.Input((6,)))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(hidden))
        model.compile("adam", loss, **options)
        return model

    return make


def number(loss: Any, kind: type[keras.Model] = keras.Model, **options: Any) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        inputs = keras.Input((6,))
        model = kind(inputs, layers.Dense(1, name="number")(inputs))
        model.compile("adam", loss, **options)
        return model

    return make


def adding() -> keras.Model:
    inputs = keras.Input((6,))
    model = keras.Model(inputs, Squared()(layers.Dense(2)(inputs)))
    model.compile("adam")
    return model


def heads(loss: Any, *, named: bool = False, **options: Any) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        inputs = keras.Input((6,))
        outputs = {name: layers.Dense(units, name=name)(inputs) for name, units in (("a", 2), ("b", 1), ("c", 3))}
        model = keras.Model(inputs, outputs if named else list(outputs.values()))
        model.compile("adam", loss, **options)
        return model

    return make


def vectors(size: int) -> T.StructField:
    """Return the field of a column whose length Spark knows."""
    return T.StructField("y", VectorUDT(), metadata={"ml_attr": {"num_attrs": size}})


@dataclass(frozen=True)
class Case:
    """A model and its data, for us and for Keras.

    Args:
        labels, weight: the arguments of `data_spec`.
        columns: by name, the values.
        y, w: what `fit` takes.
        fields: types of columns that do not follow from the values.
    """

    model: Callable[[], keras.Model]
    labels: Any
    columns: Mapping[str, np.ndarray]
    y: Any
    weight: Any = None
    w: Any = None
    fields: Sequence[T.StructField] = ()

    def schema(self) -> T.StructType:
        given = {one.name: one for one in self.fields}
        fields = []
        for name, values in {"x": X, **self.columns}.items():
            kind: T.DataType = T.IntegerType() if values.dtype.kind == "i" else T.FloatType()
            for _ in values.shape[1:]:
                kind = T.ArrayType(kind)
            fields.append(given.get(name, T.StructField(name, kind)))
        return T.StructType(fields)

    def spec(self) -> DataSpec:
        keras.utils.set_random_seed(2)
        options: dict[str, Any] = {"features": "x", "batch_size": BATCH, "shuffle": False}
        return data_spec(self.model(), self.schema(), labels=self.labels, weight=self.weight, **options)

    def record(self) -> pa.RecordBatch:
        values = {"x": X, **self.columns}
        return pa.RecordBatch.from_pydict({name: array.tolist() for name, array in values.items()})


IGNORED = np.where(CLASSES == 1, -1, CLASSES)
UNLABELED = {"a": NUMBERS}
CASES = {
    "ignored class": Case(
        classifier(losses.SparseCategoricalCrossentropy(ignore_class=-1)), "y", {"y": IGNORED}, IGNORED
    ),
    "ignored class of steps": Case(
        sequence(losses.SparseCategoricalCrossentropy(ignore_class=2), metrics=["accuracy"]),
        "y",
        {"y": STEP_CLASSES},
        STEP_CLASSES,
    ),
    "bce": Case(number("bce"), "y", {"y": CLASSES % 2}, CLASSES % 2),
    "ce": Case(classifier("ce"), "y", {"y": CLASSES}, CLASSES),
    "ctc": Case(
        sequence(losses.CTC()), "y", {"y": STEP_CLASSES[:, :2]}, STEP_CLASSES[:, :2], fields=[vectors(2)]
    ),
    "survival": Case(number(survival), "y", {"y": SURVIVAL, "w": WEIGHT}, SURVIVAL, "w", WEIGHT, fields=[vectors(2)]),
    "None in a list": Case(heads(["mse", None, None]), ["a", None, None], UNLABELED, [NUMBERS, None, None]),
    "None in a mapping": Case(
        heads({"a": "mse", "b": None, "c": SPARSE}, named=True, metrics={"c": ["accuracy"]}),
        {"c": "c", "a": "a", "b": None},
        {"a": NUMBERS, "c": CLASSES},
        {"a": NUMBERS, "b": None, "c": CLASSES},
    ),
    "two losses of one output": Case(number(["mse", "mae"]), "y", {"y": WEIGHT}, WEIGHT),
    "add_loss": Case(adding, None, {}, None),
    "own step": Case(number(None, OwnStep), [], {}, None),
    "weights of steps": Case(
        sequence(SPARSE, weighted_metrics=["accuracy"]), "y", {"y": STEP_CLASSES, "w": STEP_WEIGHT}, STEP_CLASSES,
        "w", STEP_WEIGHT,
    ),
    "one weight for all outputs": Case(
        heads(["mse", "mae", SPARSE]), ["a", "b", "c"], {"a": NUMBERS, "b": WEIGHT, "c": CLASSES, "w": WEIGHT},
        [NUMBERS, WEIGHT[:, None], CLASSES], "w", WEIGHT,
    ),
    "a weight for each output": Case(
        heads(["mse", "mae", SPARSE], weighted_metrics=[["mae"], ["mse"], ["accuracy"]]),
        ["a", "b", "c"],
        {"a": NUMBERS, "b": WEIGHT, "c": CLASSES, "w": WEIGHT, "v": WEIGHT[::-1]},
        [NUMBERS, WEIGHT[:, None], CLASSES],
        ["w", None, "v"],
        [WEIGHT, None, WEIGHT[::-1]],
    ),
    "a weight for each named output": Case(
        heads(dict.fromkeys("abc", "mse"), named=True),
        {"a": "a", "b": "w", "c": "c"},
        {"a": NUMBERS, "c": STEP_WEIGHT, "w": WEIGHT},
        {"a": NUMBERS, "b": WEIGHT[:, None], "c": STEP_WEIGHT},
        {"a": None, "b": "w", "c": "w"},
        {"a": None, "b": WEIGHT, "c": WEIGHT},
    ),
}  # fmt: skip


#: Cases whose steps are traced by default; all others take a step eagerly.
TRACED = ("weights of steps",)
#: Cases that differ from another one only in the loss, or in how weights are passed.
LATER = (
    *("a weight for each output", "one weight for all outputs", "weights of steps", "two losses of one output"),
    *("ignored class of steps", "ctc"),
)


def sliced(tree: Any, rows: slice) -> Any:
    return None if tree is None else keras.tree.map_structure(lambda a: None if a is None else a[rows], tree)


def of_keras(case: Case, names: Sequence[str] = (), *, eager: bool = True) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the weights after Keras' own steps, and the loss and metrics ``names`` of each."""
    keras.utils.set_random_seed(2)
    model, rows = case.model(), []
    model.run_eagerly = eager
    for first in range(0, ROWS, BATCH):
        part = slice(first, first + BATCH)
        model.reset_metrics()
        logs = model.train_on_batch(X[part], sliced(case.y, part), sample_weight=sliced(case.w, part), return_dict=True)
        rows.append([logs[name] for name in names])
    return model.get_weights(), np.array(rows)


@pytest.mark.parametrize(
    ("name", "eager"),
    [
        *(pytest.param(name, True, marks=[pytest.mark.slow] * (name in LATER)) for name in CASES),
        *((name, False) for name in TRACED),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in CASES if name not in TRACED),
    ],
)
def test_steps_equal_those_of_keras(name: str, eager: bool) -> None:
    if name == "own step" and keras.backend.backend() != "tensorflow":
        pytest.skip("the step is written for TensorFlow")
    case = CASES[name]
    spec = case.spec()
    keras.utils.set_random_seed(2)
    model = case.model()
    model.run_eagerly = eager
    replica = KerasReplica(model)
    replica.prepare(example(spec))
    with BatchSource(iter([case.record()]), spec, worker=0) as source:
        batches = list(source)
    rows = replica.train(batches)
    weights, expected = of_keras(case, replica.metric_names, eager=eager)
    np.testing.assert_allclose(rows, expected, rtol=1e-6, atol=1e-6)
    for found, value in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(found, value, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() == "torch", reason="it has no stacks of models")
@pytest.mark.parametrize(
    "name",
    [
        "weights of steps",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("None in a list", "a weight for each output")),
    ],
)
def test_groups_side_by_side_take_the_same_steps(name: str) -> None:
    case = CASES[name]
    spec = case.spec()
    keras.utils.set_random_seed(2)
    model = case.model()
    data = to_bytes(model)
    groups = GroupsSideBySide(recipe_of(model, data), data, spec, 1)
    by_name = {"x": X, **case.columns}
    columns = tuple(by_name[column.name].reshape(ROWS, *column.shape).astype(column.dtype) for column in spec.columns)
    (trained,) = groups.train([columns])
    assert isinstance(trained, tuple)
    weights, _ = trained
    kinds = [(array.shape, array.dtype) for array in model.get_weights()]
    for found, value in zip(unpacked_weights(weights, kinds), of_keras(case)[0], strict=True):
        np.testing.assert_allclose(found, value, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # of Keras' own evaluation on JAX
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("survival", marks=pytest.mark.slow),
        pytest.param("None in a mapping", marks=pytest.mark.slow),
        "add_loss",
        pytest.param("a weight for each output", marks=pytest.mark.slow),
    ],
)
def test_an_evaluation_in_parts_equals_that_of_keras(name: str) -> None:
    case = CASES[name]
    keras.utils.set_random_seed(2)
    replica = KerasReplica(case.model())
    with BatchSource(iter([case.record()]), replace(case.spec(), batch_size=ROWS), worker=0) as source:
        (whole,) = source
    expected = case.model()
    expected.set_weights(replica.model.get_weights())
    logs = expected.evaluate(X, case.y, sample_weight=case.w, batch_size=5, verbose=0, return_dict=True)
    assert replica.evaluate(whole, 5) == pytest.approx(logs, rel=1e-6)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (
            Case(number("mse"), None, {}, None),
            r"`label_col` must name a column for output 'number', whose loss is 'mse'",
        ),
        (
            Case(heads(["mse", None, None]), [None, "a", None], UNLABELED, None),
            "column for output 'a', whose loss is 'mse'",
        ),
        (Case(heads(["mse"] * 3), ["a", None], UNLABELED, None), "a column, or None, for each of the 3 outputs"),
        (Case(sequence(losses.CTC()), "y", {"y": STEP_CLASSES}, None), "loss 'CTC' must have a known length"),
        (Case(number("mse"), ["y", ""], {"y": WEIGHT}, None), "`label_col` must be a column name, several"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(case: Case, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        case.spec()

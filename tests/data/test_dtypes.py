"""Inputs, labels and weights reach a model in the dtypes and with the values of Keras' `fit`, given the same arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from distkeras.data.model_columns import data_spec
from distkeras.data.source import BatchSource
from distkeras.keras_model.keras_config import settings_now, use
from distkeras.keras_model.replica import KerasReplica

#: Neither of them is a float32: 2**24 + 1.25, and 2**24 + 1.
LARGE, LARGE_INTEGER = 16777217.25, 16777217
WIDE = 2**30 if keras.backend.backend() == "jax" else 2**40  # JAX has no int64 unless it is enabled at its start
COLUMNS: dict[str, tuple[T.DataType, list[Any]]] = {
    "bool": (T.BooleanType(), [True, False, True]),
    "int8": (T.ByteType(), [-3, 0, 7]),
    "int16": (T.ShortType(), [-3, 0, 300]),
    "int32": (T.IntegerType(), [-3, 0, LARGE_INTEGER]),
    "int64": (T.LongType(), [-3, WIDE + 1, LARGE_INTEGER]),
    "float32": (T.FloatType(), [0.5, 0.1, 3.0]),
    "float64": (T.DoubleType(), [0.5, 0.1, LARGE]),
}


@pytest.fixture
def floatx(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "float64" and keras.backend.backend() == "jax":
        pytest.skip("JAX has no float64 unless it is enabled at its start")
    before = settings_now()
    use({"floatx": request.param, "dtype_policy": request.param})
    yield request.param
    use(before)


class Recording(keras.Model):
    """Records the data of its steps, and reports a loss that is none."""

    def train_step(self, *args: Any) -> Any:
        tensors = keras.tree.map_structure(keras.ops.convert_to_tensor, args[-1])
        self.seen.append(keras.tree.map_structure(keras.ops.convert_to_numpy, tensors))
        logs = {"loss": keras.ops.zeros(())}
        return logs if len(args) == 1 else (logs, args[0])  # JAX passes the state, too


def recording(dtype: str) -> Any:
    inputs = keras.Input((1,), dtype=dtype)
    model = Recording(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", run_eagerly=True)
    model.seen = []
    return model


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # of Keras' own step on JAX
@pytest.mark.parametrize("floatx", ["float32", "float64"], indirect=True)
@pytest.mark.parametrize("kind", COLUMNS)
def test_labels_and_weights_are_those_of_fit(kind: str, floatx: str) -> None:
    column, values = COLUMNS[kind]
    labels, weights = np.array(values, kind), np.array([1.0, 1 + 2.0**-40, 3.0])
    plain, model = recording(floatx), recording(floatx)
    features = np.array([[1.0], [2.0], [4.0]], floatx)
    plain.fit(features, labels, sample_weight=weights, batch_size=3, shuffle=False, verbose=0)
    names = {"x": T.DoubleType(), "y": column, "w": T.DoubleType()}
    schema = T.StructType([T.StructField(name, kind) for name, kind in names.items()])
    spec = data_spec(model, schema, features="x", labels="y", weight="w", batch_size=3, shuffle=False)
    record = pa.RecordBatch.from_pydict({"x": features[:, 0], "y": labels, "w": weights})
    with BatchSource(iter([record]), spec, worker=0) as source:
        batches = list(source)
    replica = KerasReplica(model)
    replica.prepare(batches[0])
    model.seen.clear()
    replica.train(batches)
    ((x, y, weight),), ((of_x, of_y, of_weight),) = model.seen, plain.seen
    for found, expected in ((x, of_x), (y, of_y), (weight, of_weight)):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found.ravel(), expected.ravel())


@pytest.mark.parametrize("floatx", ["float64"], indirect=True)
def test_a_loss_in_float64_sees_all_digits(floatx: str) -> None:
    inputs = keras.Input((1,))
    model = keras.Model(inputs, keras.layers.Dense(1, "linear", use_bias=False, kernel_initializer="ones")(inputs))
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    schema = T.StructType([T.StructField(name, T.DoubleType()) for name in "xy"])
    spec = data_spec(model, schema, features="x", labels="y", batch_size=3, shuffle=False)
    values = [LARGE, 2 * LARGE, 4 * LARGE]
    record = pa.RecordBatch.from_pydict({"x": values, "y": values})
    with BatchSource(iter([record]), spec, worker=0) as source:
        batches = list(source)
    column = np.array(values)[:, None]
    expected = model.train_on_batch(column, column, return_dict=True)
    if keras.backend.backend() != "torch":  # where Keras' own layers multiply in float32
        assert expected == {"loss": 0.0, "mae": 0.0}
    replica = KerasReplica(model)
    np.testing.assert_array_equal(replica.train(batches), [[expected["loss"], expected["mae"]]])
    assert replica.evaluate(batches[0]) == expected

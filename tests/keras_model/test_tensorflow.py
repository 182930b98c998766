"""Arrays between NumPy and TensorFlow: equal values, no unintended sharing of memory, and late updates."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from distkeras.data.batches import Batch  # noqa: E402 - only if TensorFlow is installed
from distkeras.data.rows import aligned  # noqa: E402 - only if TensorFlow is installed
from distkeras.keras_model.compiled_steps import lent, stacked  # noqa: E402 - only if it is installed
from distkeras.keras_model.replica import KerasReplica  # noqa: E402 - only if TensorFlow is installed
from distkeras.keras_model.variables import assign_float32, variable_memory  # noqa: E402 - only if it is installed


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_an_aligned_array_is_shared_without_a_copy() -> None:
    rows = aligned((5, 16, 4), np.dtype(np.float32))
    rows[...] = np.arange(rows.size).reshape(rows.shape)
    rows.flags.writeable = False
    tf.zeros(())  # TensorFlow copies arrays until its runtime has started
    tensor = lent(rows)
    np.testing.assert_array_equal(tensor.numpy(), rows)
    assert address(np.asarray(memoryview(tensor))) == address(rows)


@pytest.mark.parametrize("dtype", ["float32", "uint8", "int64", "float16", "bool"])
@pytest.mark.parametrize("shape", [(5,), (3, 7), (0, 4)])
def test_stacked_arrays_are_a_copy_with_equal_values(dtype: str, shape: tuple[int, ...]) -> None:
    arrays = [np.arange(np.prod(shape)).reshape(shape).astype(dtype) + np.dtype(dtype).type(i) for i in range(3)]
    expected = np.stack(arrays)
    tensor = lent(stacked(arrays))
    for array in arrays:
        array[...] = 0
    assert tensor.dtype.name == dtype
    np.testing.assert_array_equal(tensor.numpy(), expected)


def test_assigned_values_share_no_memory_with_the_variable() -> None:
    variable = tf.Variable(np.zeros((100, 3), np.float32))
    for start in range(8):  # for every alignment of the values
        values = np.arange(start, start + 300, dtype=np.float32)
        vector = np.empty(start + 300, np.float32)
        vector[start:] = values
        assign_float32(variable.handle, vector[start:].reshape(100, 3))
        vector[...] = -1
        np.testing.assert_array_equal(variable_memory(variable.handle), values.reshape(100, 3))
        variable.assign_add(tf.ones_like(variable))
        np.testing.assert_array_equal(variable.numpy(), values.reshape(100, 3) + 1)
        assert (vector == -1).all()


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the model is TensorFlow's only on that backend")
def test_a_step_updates_the_weights_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied() -> bool:
        """Return whether the memory of a weight changes in some steps."""
        hidden = [keras.layers.Dense(16, activation="relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        batches = [Batch(0, i, False, (np.ones((4, 8), np.float32),), (np.ones((4, 2)),), None) for i in range(3)]
        replica = KerasReplica(model)
        replica.train(batches)
        handles = [variable.value.handle for variable in model.trainable_variables]
        places = [variable_memory(handle).__array_interface__["data"] for handle in handles]
        replica.train(batches)
        assert "apply" not in vars(model.optimizer)
        return places != [variable_memory(handle).__array_interface__["data"] for handle in handles]

    assert not copied()
    monkeypatch.setattr("distkeras.keras_model.compiled_steps.updates_last", lambda optimizer: nullcontext())
    assert copied()  # otherwise TensorFlow has fixed this, and `updates_last` may be removed


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the model is TensorFlow's only on that backend")
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adagrad", marks=pytest.mark.slow)])
def test_a_step_does_not_read_a_whole_table(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    """TensorFlow would copy the table in each step."""
    graphs = []

    class Recorded(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            graphs.append(tf.compat.v1.get_default_graph())
            return super().train_step(data)

    def whole_reads() -> int:
        """Return how many times a step reads a variable of the table's shape."""
        table = keras.layers.Embedding(60, 5)
        model = Recorded([keras.Input((3,), dtype="int32"), table, keras.layers.Flatten()])
        model.compile(optimizer, "mse")
        KerasReplica(model).train([Batch(0, 0, True, (np.ones((4, 3), np.int32),), (np.ones((4, 15)),), None)])
        assert not {"call", "update_step"} & {*vars(table), *vars(model.optimizer)}
        reads = [step for step in graphs[-1].get_operations() if step.type == "ReadVariableOp"]
        return sum(read.outputs[0].shape == (60, 5) for read in reads)

    assert whole_reads() == 0
    for name in ("read_only_touched_rows", "update_only_touched_rows"):
        monkeypatch.setattr(f"distkeras.keras_model.compiled_steps.{name}", lambda part: nullcontext())
    assert whole_reads() > 0  # otherwise Keras has fixed this, and both may be removed

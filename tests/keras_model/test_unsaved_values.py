"""Values that Keras does not save as they are: what is loaded has them, steps like the given model, and predicts so."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from typing import Any

import h5py
import keras
import numpy as np
import pytest
from keras import layers
from support.cases import rest_slow

from distkeras.keras_model import archive
from distkeras.keras_model.recipe import recipe_of
from distkeras.keras_model.unsaved_values import VALUES, named_layers
from distkeras.ps.errors import ConfigurationError

RNG = np.random.default_rng(5)


@keras.saving.register_keras_serializable("unsaved_values")
class Rounded(layers.Layer):
    """A user's layer that saves its kernel in float16, and a table not at all."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")
        self.table = self.add_weight(shape=(3,), name="table", initializer="ones", trainable=False, dtype="bfloat16")

    def call(self, x: Any) -> Any:
        return x @ self.kernel * keras.ops.cast(self.table, "float32")

    def save_own_variables(self, store: Any) -> None:
        store["kernel"] = keras.ops.convert_to_numpy(self.kernel).astype(np.float16)

    def load_own_variables(self, store: Any) -> None:
        self.kernel.assign(store["kernel"])


def int8(layer: layers.Layer, *around: layers.Layer) -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), *around, layer])
    layer.quantize("int8")
    return model


def image() -> list[Any]:
    return [keras.Input((5, 5, 2))]


MODELS: dict[str, Callable[[], keras.Model]] = {
    "dense": lambda: keras.Sequential([keras.Input((6,)), layers.Dense(4, "relu"), layers.Dense(3)]),
    "embedding": lambda: keras.Sequential([keras.Input((4,)), layers.Embedding(3, 5), layers.Flatten()]),
    "einsum": lambda: keras.Sequential([keras.Input((6,)), layers.EinsumDense("ab,bc->ac", 4, bias_axes="c")]),
    "convolution": lambda: keras.Sequential([*image(), layers.Conv2D(3, 2), layers.Flatten()]),
    "int8": lambda: int8(layers.Dense(4)),
    "inner": lambda: keras.Sequential([keras.Input((6,)), keras.Sequential([layers.Dense(4)]), layers.Dense(2)]),
}


def adapted(model: keras.Model) -> keras.Model:
    """Give every layer that can have them factors whose product is not zero, and compile the model."""
    for layer in named_layers(model).values():
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(2)
    for variable in model.trainable_variables:
        variable.assign(RNG.normal(size=variable.shape))
    model.compile(keras.optimizers.Adam(0.05), "mse", run_eagerly=True)  # a trace for one step is slow
    return model


def rows(model: keras.Model) -> tuple[np.ndarray, np.ndarray]:
    x = RNG.integers(0, 3, (8, *model.input_shape[1:])).astype("float32")
    return x, RNG.normal(size=(8, *model.output_shape[1:])).astype("float32")


def values(model: keras.Model) -> list[np.ndarray]:
    return [keras.ops.convert_to_numpy(weight) for weight in model.weights]


def assert_equal(one: keras.Model, other: keras.Model) -> None:
    for here, there, weight in zip(values(one), values(other), one.weights, strict=True):
        np.testing.assert_array_equal(here, there, weight.path)


@pytest.mark.parametrize("kind", rest_slow(MODELS, "dense"))
def test_a_model_with_lora_trains_as_in_keras(kind: str) -> None:
    model = adapted(MODELS[kind]())
    before, (x, y) = values(model), rows(model)
    file = archive.to_bytes(model)
    copy = recipe_of(model, file).build(file)
    assert_equal(model, copy)
    np.testing.assert_array_equal(copy.predict_on_batch(x), model.predict_on_batch(x))
    for each in (model, copy):
        each.train_on_batch(x, y)
    assert any((here != there).any() for here, there in zip(before, values(copy), strict=True))
    assert_equal(model, copy)


def test_a_users_layer_that_saves_less_than_it_has_is_loaded_as_it_was() -> None:
    model = keras.Sequential([keras.Input((6,)), Rounded()])
    model.layers[0].table.assign([1, 2, 3])
    assert_equal(model, archive.from_bytes(archive.to_bytes(model)))


def test_other_archives_are_those_of_keras() -> None:
    model = MODELS["dense"]()
    assert VALUES not in zipfile.ZipFile(io.BytesIO(archive.to_bytes(model))).namelist()
    assert VALUES not in zipfile.ZipFile(io.BytesIO(archive.to_bytes(adapted(model), plain=True))).namelist()


@pytest.mark.parametrize(
    ("place", "content", "text"),
    [
        ("/dense_99//0", np.zeros(4, np.uint8), "dense_99"),
        ("/dense//7", np.zeros(4, np.uint8), "7"),
        ("/dense//0", np.zeros(5, np.uint8), "which has 96 bytes"),
        ("/dense//0", np.zeros(96, np.int8), "int8"),
    ],
)
def test_values_that_are_not_of_the_model_are_refused(place: str, content: np.ndarray, text: str) -> None:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, name="dense")])
    file, buffer = io.BytesIO(), io.BytesIO(archive.to_bytes(model))
    with h5py.File(file, "w") as values_file:
        values_file.create_dataset("0", data=content).attrs["place"] = place
    with zipfile.ZipFile(buffer, "a") as member:
        member.writestr(VALUES, file.getvalue())
    with pytest.raises(ConfigurationError, match=text):
        archive.from_bytes(buffer.getvalue())

"""Weights that each worker reads from a file."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
from keras import layers

from distkeras.keras_model import archive
from distkeras.keras_model.recipe import recipe_of
from distkeras.keras_model.replica_cache import ReplicaCache
from distkeras.keras_model.weights_file import ELSEWHERE, with_all_weights, without_weights_of
from distkeras.ps.errors import ConfigurationError, NodeError, sorted_error

WIDTH = 256  # of a layer that is large enough to be replaced by a reference


def base() -> keras.Model:
    keras.utils.set_random_seed(3)
    frozen = keras.Sequential(
        [keras.Input((WIDTH,)), layers.Dense(WIDTH, "relu"), layers.BatchNormalization(), layers.Dense(WIDTH)],
        name="base",
    )
    frozen.trainable = False
    return frozen


def tuned(frozen: keras.Model) -> keras.Model:
    model = keras.Sequential([keras.Input((WIDTH,)), frozen, layers.Dense(2, "softmax")])
    model.compile(keras.optimizers.Adam(), "sparse_categorical_crossentropy")
    return model


def assert_same_weights(one: keras.Model, other: keras.Model) -> None:
    for here, there in zip(one.weights, other.weights, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(here), keras.ops.convert_to_numpy(there))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param("base.weights.h5", "{}", marks=pytest.mark.slow),
        ("whole.keras", "file://{}"),
        *(
            pytest.param(name, form, marks=pytest.mark.slow)
            for name, form in [("base.keras", "{}"), ("base.keras", "file://{}"), ("whole.weights.h5", "{}")]
        ),
    ],
)
def test_a_model_is_loaded_from_its_archive_and_the_file(tmp_path: Path, name: str, form: str) -> None:
    frozen, path = base(), str(tmp_path / name)
    model = tuned(frozen)
    model.fit(np.ones((4, WIDTH)), np.zeros(4), verbose=0)  # gives the optimizer a state
    saved = frozen if name.startswith("base") else model
    (saved.save if name.endswith(".keras") else saved.save_weights)(path)
    data = archive.to_bytes(model)
    sent = without_weights_of(data, form.format(path))
    assert len(data) > 2 * 4 * WIDTH**2 > 8 * len(sent)
    again = archive.from_bytes(with_all_weights(sent), compiled=True)
    assert_same_weights(again, model)
    for here, there in zip(again.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(here.numpy(), there.numpy())


def test_weights_of_half_precision_are_loaded(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(WIDTH, dtype="bfloat16")])
    model.save_weights(tmp_path / "half.weights.h5")
    sent = without_weights_of(archive.to_bytes(model), str(tmp_path / "half.weights.h5"))
    assert len(sent) < WIDTH**2
    assert_same_weights(archive.from_bytes(with_all_weights(sent)), model)


def test_a_file_of_another_layout_is_matched_by_its_values(tmp_path: Path) -> None:
    frozen = base()
    with h5py.File(tmp_path / "preset.h5", "w") as file:
        file["anything/at all"] = frozen.layers[-1].kernel.numpy()
    model = tuned(frozen)
    sent = without_weights_of(archive.to_bytes(model), str(tmp_path / "preset.h5"))
    assert_same_weights(archive.from_bytes(with_all_weights(sent)), model)


def test_a_worker_reads_the_weights_and_notices_another_file(tmp_path: Path) -> None:
    """A kept replica loads the current weights of the file."""
    cache, kept, frozen, path = ReplicaCache(), [], base(), tmp_path / "base.weights.h5"
    model = tuned(frozen)
    for shift in (0.0, 0.0, 1.0):
        frozen.layers[0].kernel.assign(frozen.layers[0].kernel + shift)
        frozen.save_weights(path)
        data = archive.to_bytes(model)
        with cache.lent(recipe_of(model, data), without_weights_of(data, str(path))) as replica:
            np.testing.assert_array_equal(replica.model.layers[0].layers[0].kernel, frozen.layers[0].kernel)
            kept.append(replica)
    assert kept[0] is kept[1] is kept[2]


def test_an_archive_without_references_is_not_changed() -> None:
    data = archive.to_bytes(tuned(base()))
    assert with_all_weights(data) is data


def test_a_changed_file_is_an_error(tmp_path: Path) -> None:
    frozen, path = base(), tmp_path / "base.weights.h5"
    frozen.save_weights(path)
    sent = without_weights_of(archive.to_bytes(tuned(frozen)), str(path))
    frozen.layers[0].kernel.assign(frozen.layers[0].kernel + 1e-6)
    frozen.save_weights(path)
    with pytest.raises(ConfigurationError, match=r"the same file for driver and executors. Received: .*base\.weights"):
        with_all_weights(sent)
    path.unlink()
    with pytest.raises(ConfigurationError, match="that driver and executors can read"):
        with_all_weights(sent)


def test_the_error_for_an_unsuitable_file_names_it(tmp_path: Path) -> None:
    model = tuned(base())
    data = archive.to_bytes(model)
    for name, content in (("no.h5", b"text"), ("no.keras", zipped({"config.json": b"{}"}))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigurationError, match=f"`frozen_weights` must be a file of weights.*{name}"):
            without_weights_of(data, str(tmp_path / name))
    with pytest.raises(ConfigurationError, match="`frozen_weights` must be a file of weights"):
        without_weights_of(data, "nothing://opens.this")
    keras.utils.set_random_seed(4)
    other = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(WIDTH), layers.Dense(WIDTH)])
    other.save_weights(tmp_path / "other.weights.h5")
    with pytest.raises(ConfigurationError, match="none of the 2 that the model has"):
        without_weights_of(data, str(tmp_path / "other.weights.h5"))


def test_a_failing_read_is_an_error_of_the_node() -> None:
    error = ConfigurationError("`frozen_weights` must be a file of weights that driver and executors can read")
    error.__cause__ = OSError(5, "Input/output error")
    assert isinstance(sorted_error(error), NodeError)


def test_an_archive_with_a_reference_contains_its_address(tmp_path: Path) -> None:
    frozen = base()
    frozen.save_weights(tmp_path / "base.weights.h5")
    sent = without_weights_of(archive.to_bytes(tuned(frozen)), str(tmp_path / "base.weights.h5"))
    with zipfile.ZipFile(io.BytesIO(sent)) as found:
        reference = json.loads(found.read(ELSEWHERE))
    assert reference["uri"] == str(tmp_path / "base.weights.h5")
    assert len(reference["arrays"]) == 2


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return buffer.getvalue()

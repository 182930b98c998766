from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cases import examples

from distkeras.job_server.errors import DescriptionError
from distkeras.job_server.model_file import CONFIG_MAX, MEMBERS_MAX, require_archive, require_weights
from distkeras.keras_model import archive
from distkeras.keras_model.optimizers import optimizer_of

layers = keras.layers


def dense() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def functional() -> keras.Model:
    inputs = keras.Input((8, 8, 1))
    hidden = layers.Conv2D(2, 3, kernel_regularizer="l2")(inputs)
    hidden = layers.BatchNormalization()(hidden) + 1.0
    outputs = layers.Dense(3, activation=keras.activations.gelu)(keras.ops.mean(hidden, axis=(1, 2)))
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 100))
    model.compile(
        optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=[keras.metrics.AUC()]
    )
    return model


def words() -> keras.Model:
    lookup = layers.StringLookup(vocabulary=["a", "b"])
    return keras.Sequential([keras.Input((1,), dtype="string"), lookup, layers.Embedding(4, 2), layers.LSTM(2)])


def mixed() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Dense(2, dtype="mixed_bfloat16"), layers.Dropout(0.5)])


def lazy() -> keras.Model:
    model = keras.Sequential([keras.Input((2,), dtype="int32"), layers.Embedding(4, 2), layers.Flatten()])
    model.compile(optimizer_of("LazyAdam" if keras.backend.backend() == "tensorflow" else "adam"), "mse")
    return model


@pytest.fixture(scope="module")
def good() -> bytes:
    return archive.to_bytes(dense())


def members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name: file.read(name) for name in file.namelist()}


def packed(parts: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as file:
        for name, data in parts.items():
            file.writestr(name, data)
    return out.getvalue()


def check(data: bytes, folder: Path) -> None:
    path = folder / "sent.keras"
    path.write_bytes(data)
    require_archive(path)


def test_a_model_that_is_larger_than_its_file_is_never_built(good: bytes, tmp_path: Path) -> None:
    """The model has 10^14 numbers, which fit into no machine's memory."""
    parts = members(good)
    text = parts["config.json"].decode().replace('"units": 2,', '"units": 10000000,').replace("[4]", "[10000000]")
    text = text.replace("[null, 4]", "[null, 10000000]")
    large = packed(parts | {"config.json": text.encode()})
    check(large, tmp_path)
    with pytest.raises(
        DescriptionError, match=r"the weights of its model, 1000000\d{8} numbers. Received: one with \d+"
    ):
        require_weights(large)
    require_weights(good)  # The refused model leaves no state that affects the next one.


def refused(data: bytes, folder: Path) -> str:
    with pytest.raises(DescriptionError) as caught:
        check(data, folder)
    assert caught.value.field == "model"
    assert "Received: " in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_that_python_unpacks_without_a_bound_are_refused(kind: int) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive.to_bytes(dense()))) as source, zipfile.ZipFile(packed, "w", kind) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(DescriptionError, match="of stored and deflated files"):
        require_archive(packed)


@pytest.mark.parametrize("build", [dense, functional, words, mixed, lazy])
def test_models_that_keras_saved_are_accepted(build: Callable[[], keras.Model], tmp_path: Path) -> None:
    data = archive.to_bytes(build())
    check(data, tmp_path)
    require_weights(data)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "assets/../../x", "assets\\x", "extra.py", "C:x", "assets/a\nb", "model.weights.h5.py"]
)
def test_a_member_that_keras_does_not_write_is_refused(good: bytes, tmp_path: Path, name: str) -> None:
    assert "Keras' files" in refused(packed(members(good) | {name: b""}), tmp_path)


@pytest.mark.parametrize("name", ["config.json", "metadata.json", "model.weights.h5"])
def test_an_archive_with_a_missing_member_is_refused(good: bytes, tmp_path: Path, name: str) -> None:
    parts = members(good)
    del parts[name]
    assert name in refused(packed(parts), tmp_path)


def test_an_archive_that_expands_too_much_is_refused(good: bytes, tmp_path: Path) -> None:
    parts = members(good) | {"assets/zeros": bytes(40 << 20)}
    assert "unpacks" in refused(packed(parts, zipfile.ZIP_DEFLATED), tmp_path)


@pytest.mark.parametrize("name", ["config.json", "metadata.json"])
def test_a_text_that_expands_too_much_is_not_read(good: bytes, tmp_path: Path, name: str) -> None:
    parts = members(good) | {name: b" " * (CONFIG_MAX + 1), "assets/noise": random.Random(0).randbytes(1 << 20)}
    assert "unpacks" in refused(packed(parts, zipfile.ZIP_DEFLATED), tmp_path)


def test_a_long_list_of_members_is_refused_unread(good: bytes, tmp_path: Path) -> None:
    """An empty member takes about fifty bytes of the file and ten times as much memory."""
    many = {f"assets/{place}": b"" for place in range(30_000)}
    assert "too long" in refused(packed(members(good) | many), tmp_path)


def test_too_many_members_and_a_duplicate_member_are_refused(good: bytes, tmp_path: Path) -> None:
    many = {f"assets/{place}": b"" for place in range(MEMBERS_MAX)}
    assert "at most" in refused(packed(members(good) | many), tmp_path)
    out = io.BytesIO(good)
    with zipfile.ZipFile(out, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("config.json", "{}")
    assert "each once" in refused(out.getvalue(), tmp_path)


def test_a_link_within_the_archive_is_refused(good: bytes, tmp_path: Path) -> None:
    out = io.BytesIO(good)
    link = zipfile.ZipInfo("assets/link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(out, "a") as file:
        file.writestr(link, "/etc/passwd")
    assert "plain files" in refused(out.getvalue(), tmp_path)


def function(name: str, module: str = "builtins") -> dict[str, Any]:
    return {"module": module, "class_name": "function", "config": name, "registered_name": name}


@pytest.mark.parametrize(
    "part",
    [
        {"module": "keras.layers", "class_name": "Lambda", "config": {}},
        {"module": "keras.layers", "class_name": "TorchModuleWrapper", "config": {}},
        {"module": "keras.layers", "class_name": "TFSMLayer", "config": {"filepath": "/x"}},
        {"module": "keras.layers", "class_name": "StringLookup", "config": {"vocabulary": "/etc/passwd"}},
        {"module": "os", "class_name": "system", "config": {}},
        {"module": "keras_evil", "class_name": "X", "config": {}},
        {"module": "builtins", "class_name": "eval", "config": {}},
        {"module": None, "class_name": "__lambda__", "config": {}},
        {"module": None, "class_name": "__typespec__", "config": {}},
        {"module": 3, "class_name": "Dense", "config": {}},
        {"module": "keras.layers", "class_name": ["Dense"], "config": {}},
        {"module": "keras.layers"},
        function("eval"),
        function("exec"),
        function("system", "os"),
        {"module": "builtins", "class_name": "function", "config": {"class_name": "__lambda__"}},
        {"module": "distkeras.layers", "class_name": "WideEmbedding", "config": {}},
        {"class_name": "distkeras>WideEmbedding", "module": None, "config": {}},
        {"module": "keras.layers", "class_name": "Dense", "registered_name": "distkeras>WideEmbedding", "config": {}},
        *(
            part
            for module, name in (
                ("keras.models", "load_model"),
                ("keras.src.saving.saving_lib", "load_model"),
                ("keras.utils", "get_file"),
                ("keras.applications", "ResNet50"),
                ("keras.applications.resnet", "ResNet50"),
                ("keras", "config"),
                ("keras.layers", "deserialize"),
            )
            for part in ({"module": module, "class_name": name, "config": {}}, function(name, module))
        ),
    ],
    ids=range(33),
)
def test_a_configuration_with_more_than_a_model_is_refused(good: bytes, tmp_path: Path, part: dict[str, Any]) -> None:
    parts = members(good)
    config = json.loads(parts["config.json"])
    config["config"]["layers"][1]["config"]["activation"] = {"deep": [part]}
    refused(packed(parts | {"config.json": json.dumps(config).encode()}), tmp_path)


@pytest.mark.parametrize(
    "config", [b"", b"[]", b"3", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 300 + b"1" + b"}" * 300]
)
def test_a_malformed_configuration_is_refused(good: bytes, tmp_path: Path, config: bytes) -> None:
    refused(packed(members(good) | {"config.json": config}), tmp_path)


@functools.cache
def whole() -> bytes:
    return archive.to_bytes(dense())


@settings(examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8),
    cut=st.integers(0, 99),
)
def test_a_damaged_archive_is_accepted_or_refused(tmp_path: Path, changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(whole())
    for place, value in changes:
        data[place % len(data)] = value
    damaged = bytes(data[: len(data) - cut])
    with contextlib.suppress(DescriptionError):
        check(damaged, tmp_path)
        require_weights(damaged)


# ---- weights


def with_weights(good: bytes, spoil: Callable[[h5py.File], None]) -> bytes:
    parts = members(good)
    out = io.BytesIO(parts["model.weights.h5"])
    with h5py.File(out, "r+") as file:
        spoil(file)
    return packed(parts | {"model.weights.h5": out.getvalue()})


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("/etc/other.h5", "x", (4,))
    file.create_virtual_dataset("x", layout)


def in_circles(file: h5py.File) -> None:
    file["layers/back"] = file["layers"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.__setitem__("x", h5py.ExternalLink("/etc/other.h5", "/y")),
        lambda file: file.__setitem__("x", h5py.SoftLink("/layers")),
        lambda file: file.create_dataset("x", (8,), "u1", external=[("/etc/passwd", 0, 8)]),
        virtual,
        lambda file: file.create_dataset("x", (10**12,), "f4"),
        lambda file: file.create_dataset("x", (10**7,), "f4", compression="gzip", data=np.zeros(10**7, "f4")),
    ],
    ids=["external link", "soft link", "external array", "virtual array", "empty array", "compressed array"],
)
def test_weights_that_are_external_or_expand_too_much_are_refused(
    good: bytes, spoil: Callable[[h5py.File], None]
) -> None:
    with pytest.raises(DescriptionError) as caught:
        require_weights(with_weights(good, spoil))
    assert caught.value.field == "model"


def test_the_check_of_cyclic_links_ends(good: bytes) -> None:
    require_weights(with_weights(good, in_circles))


def test_malformed_weights_are_refused(good: bytes) -> None:
    with pytest.raises(DescriptionError, match="with weights"):
        require_weights(packed(members(good) | {"model.weights.h5": b"nothing"}))

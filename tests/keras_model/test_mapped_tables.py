"""A model whose tables stay in files: it predicts like the whole model and holds no table in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keras import layers
from support.cases import examples

from distkeras.data.batches import Batch
from distkeras.keras_model import mapped_tables
from distkeras.keras_model.archive import CustomObjects, from_bytes, to_bytes
from distkeras.keras_model.mapped_tables import MappedModel, has_wide_tables, split_tables
from distkeras.ml.evaluation import metric_states
from distkeras.ps.errors import BadValueError

ROWS = 300


@pytest.fixture(autouse=True)
def every_table_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_tables, "FILE_BYTES_MIN", 4 * ROWS * 3)


def mapped(model: keras.Model, folder: Path) -> MappedModel:
    parts, tables = split_tables(from_bytes(to_bytes(model), CustomObjects()))
    files = [folder / f"{number}.npy" for number in range(len(tables))]
    for file, table in zip(files, tables, strict=True):
        np.save(file, table)
    return MappedModel(parts, files, [f"column_{number}" for number in range(len(model.inputs))], CustomObjects())


def two_towers() -> keras.Model:
    """Return a model of a shared table, a table of hashed ids, a small table, a dense input, and two outputs."""
    keras.utils.set_random_seed(1)
    user, items = keras.Input((1,), dtype="int32", name="user"), keras.Input((3,), dtype="int32", name="items")
    key, extra = keras.Input((2,), dtype="int64", name="key"), keras.Input((2,), name="extra")
    item = layers.Embedding(ROWS, 3, name="item")
    parts = [
        item(items[:, :2]),
        item(items[:, 2:]),
        layers.Embedding(ROWS, 4, name="user_table")(user),
        layers.Embedding(ROWS, 5, name="keys")(layers.Hashing(ROWS)(key)),
        layers.Embedding(7, 2, name="small")(layers.Rescaling(1.0, dtype="int32")(user) % 7),
    ]
    hidden = layers.Concatenate()([*map(layers.Flatten(), parts), extra])
    hidden = layers.BatchNormalization()(layers.Dense(8, activation="tanh")(hidden))
    return keras.Model([user, items, key, extra], [layers.Dense(1)(hidden), layers.Dense(3)(hidden)])


def inputs_of(draw: np.random.Generator, rows: int) -> list[np.ndarray]:
    return [
        draw.integers(0, ROWS, (rows, 1)).astype(np.int32),
        draw.integers(-ROWS, ROWS, (rows, 3)).astype(np.int32),  # Keras counts negative ids from the end
        draw.integers(0, 1 << 40, (rows, 2)),
        draw.normal(size=(rows, 2)).astype(np.float32),
    ]


def assert_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own, np.asarray(other))


@pytest.mark.slow
def test_predictions_equal_those_of_the_whole_model(tmp_path: Path) -> None:
    if keras.backend.backend() == "jax":
        pytest.skip("JAX cannot compile Keras' Hashing")
    model, draw = two_towers(), np.random.default_rng(0)
    parts = mapped(model, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    for rows in (1, 8):
        inputs = inputs_of(draw, rows)
        assert_same(parts.outputs(inputs), model.predict_on_batch(inputs))


@pytest.mark.slow
def test_inputs_may_have_the_names_that_keras_gives_in_another_process(tmp_path: Path) -> None:
    extra, ids = keras.Input((3,)), keras.Input((2,), dtype="int32")
    vectors = layers.Flatten()(layers.Embedding(ROWS, 3)(ids))
    data = to_bytes(keras.Model([ids, extra], layers.Dense(1)(layers.Concatenate()([vectors, extra]))))
    keras.backend.clear_session()  # it counts from the first name again, as in a new process
    model = from_bytes(data, CustomObjects())
    inputs = [np.arange(8, dtype=np.int32).reshape(4, 2), np.ones((4, 3), np.float32)]
    assert_same(mapped(model, tmp_path).outputs(inputs), [model.predict_on_batch(inputs)])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[keras.Model, MappedModel]:
    if keras.backend.backend() == "jax":
        pytest.skip("JAX cannot compile Keras' Hashing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped_tables, "FILE_BYTES_MIN", 4 * ROWS * 3)
        model = two_towers()
        parts = mapped(model, tmp_path_factory.mktemp("tables"))
    for one in (model, parts.rest):
        one.compile("sgd", ["mse", "mae"], metrics=["mae", "mse"])
    return model, parts


IDS = st.integers(-ROWS, ROWS - 1)


@settings(examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(IDS, IDS, IDS, IDS, st.integers(-(1 << 62), 1 << 62)), min_size=1, max_size=4))
def test_predictions_and_metrics_of_drawn_rows_equal_those_of_the_whole_model(
    both: tuple[keras.Model, MappedModel], rows: list[tuple[int, ...]]
) -> None:
    """The drawn ids include repeated and negative ids, and the first and the last row."""
    drawn = np.array(rows, np.int64)
    inputs: list[np.ndarray] = [
        drawn[:, :1].astype(np.int32),
        drawn[:, 1:4].astype(np.int32),
        drawn[:, [4, 0]],
        drawn[:, 1:3].astype(np.float32),
    ]
    model, parts = both
    assert_same(parts.outputs(inputs), model.predict_on_batch(inputs))
    labels = drawn[:, :1].astype(np.float32) / ROWS, drawn[:, 1:4].astype(np.float32) / ROWS
    batch = Batch(0, 0, True, tuple(inputs), labels, None)
    found = metric_states(parts.rest, replace(batch, x=tuple(parts.rest_inputs(inputs))))
    np.testing.assert_array_equal(found, metric_states(model, batch))
    assert found.any()


def test_a_sequential_model_may_have_ids_that_are_floats(tmp_path: Path) -> None:
    stack = [keras.Input((4,)), layers.Embedding(ROWS, 3), layers.Flatten(), layers.Dropout(0.5), layers.Dense(2)]
    model = keras.Sequential(stack)
    ids = np.random.default_rng(0).integers(0, ROWS, (5, 4)) + np.float32(0.75)
    assert_same(mapped(model, tmp_path).outputs([ids]), [model.predict_on_batch(ids)])


def refused() -> dict[str, keras.Model]:
    ids = keras.Input((2,), dtype="int32")
    wide = layers.Embedding(ROWS, 3)
    inner = keras.Sequential([keras.Input((2,), dtype="int32"), layers.Embedding(ROWS, 3)])
    half = layers.Embedding(ROWS, 3, dtype="mixed_float16")
    return {
        "few rows": keras.Model(ids, layers.Flatten()(layers.Embedding(ROWS - 1, 3)(ids))),
        "a mask": keras.Model(ids, layers.GlobalAveragePooling1D()(layers.Embedding(ROWS, 3, mask_zero=True)(ids))),
        "half precision": keras.Model(ids, layers.Flatten()(half(ids))),
        "an output": keras.Model(ids, [wide(ids), layers.Flatten()(wide(ids))]),
        "a model within": keras.Model(ids, layers.Flatten()(inner(ids))),
    }


def test_other_tables_stay_within_the_model() -> None:
    assert {name for name, model in refused().items() if has_wide_tables(model)} == set()
    assert has_wide_tables(two_towers())


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # JAX computes with 32 bits
@pytest.mark.parametrize("bad", [ROWS, pytest.param(-ROWS - 1, marks=pytest.mark.slow)])
def test_an_id_outside_the_table_is_an_error(tmp_path: Path, bad: int) -> None:
    inputs = inputs_of(np.random.default_rng(0), 4)
    inputs[1][2, 1] = bad
    with pytest.raises(BadValueError, match=rf"ids of 'item' must be in \[0, {ROWS}\).*Received: {bad}") as caught:
        mapped(two_towers(), tmp_path).outputs(inputs)
    assert caught.value.column == "column_1"


def own_memory() -> int:
    """Return the number of bytes of this process that are not mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """The table in the file has 256 MB, and all of its pages are read."""
    model = keras.Sequential([keras.Input((64,), dtype="int32"), layers.Embedding(ROWS, 64), layers.Flatten()])
    parts, _ = split_tables(model)
    rows = 1 << 20
    table = np.lib.format.open_memmap(tmp_path / "table.npy", "w+", np.float32, (rows, 64))
    table[-1] = 3
    del table
    ids = np.arange(0, rows, 16, dtype=np.int32).reshape(-1, 64)
    ids[-1, -1] = rows - 1
    np.save(tmp_path / "small.npy", np.zeros((rows >> 9, 64), np.float32))
    MappedModel(parts, [tmp_path / "small.npy"], ["ids"], CustomObjects()).outputs([ids[:32] % (rows >> 9)])
    before = own_memory()
    wide = MappedModel(parts, [tmp_path / "table.npy"], ["ids"], CustomObjects())
    for first in range(0, len(ids), 32):
        (found,) = wide.outputs([ids[first : first + 32]])
    assert found[-1, -64:].tolist() == [3.0] * 64
    assert own_memory() - before < 64 << 20

"""Columns whose values are decoded on the executors."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from distkeras.data.batches import DataSpec
from distkeras.data.columns import Column, to_numpy
from distkeras.data.source import BatchSource
from distkeras.ps.errors import BadValueError, ShapeError
from distkeras.settings import TrainSettings

IMAGES = np.random.default_rng(0).integers(0, 256, (10, 2, 3), np.uint8)


def pixels(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(2, 3)


def encoded(images: np.ndarray = IMAGES) -> pa.Array:
    return pa.array([image.tobytes() for image in images], pa.binary())


def column(decode: Any = pixels, shape: tuple[int, ...] = (2, 3), dtype: str = "float32") -> Column:
    return Column("content", shape, dtype, decode)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 1), (1, 2, 3)])
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_values_become_arrays_of_the_shape(shape: tuple[int, ...], dtype: str) -> None:
    found = to_numpy(encoded(), column(shape=shape, dtype=dtype))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, IMAGES.reshape(-1, *shape))
    assert to_numpy(encoded()[:0], column()).shape == (0, 2, 3)


def test_values_of_any_type_are_decoded() -> None:
    texts = column(lambda text: [float(part) for part in text.split(",")], (2,))
    np.testing.assert_array_equal(to_numpy(pa.array(["1,2", "3,4"]), texts), [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("decode", "error", "message"),
    [
        (lambda data: np.zeros((3, 2)), ShapeError, r"shape \(3, 2\) in row 7"),
        (lambda data: np.full((2, 3), np.nan), BadValueError, "nan in row 7"),
        (lambda data: np.array("text"), BadValueError, "array of numbers"),
        (lambda data: {"k": 1}["key"], BadValueError, r"KeyError: 'key' in row 7 .*column 'content'"),
    ],
)
def test_the_error_for_a_value_that_cannot_be_decoded_names_it(
    decode: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        to_numpy(encoded(), column(decode), first_row=7)


def test_a_null_is_refused() -> None:
    with pytest.raises(BadValueError, match="null in row 1"):
        to_numpy(pa.array([IMAGES[0].tobytes(), None], pa.binary()), column())


def test_the_prefetch_thread_decodes_each_value_once() -> None:
    threads, calls = set(), []

    def watched(data: bytes) -> np.ndarray:
        threads.add(threading.current_thread().name)
        calls.append(len(data))
        return pixels(data)

    spec = DataSpec((column(watched),), batch_size=2, epochs=2, shuffle=False)
    records = iter([pa.RecordBatch.from_arrays([encoded()], ["content"])])
    with BatchSource(records, spec, worker=3, depth=1) as source:
        first = next(source)
        np.testing.assert_array_equal(first.x[0], IMAGES[:2])
        np.testing.assert_array_equal(np.concatenate([batch.x[0] for batch in source])[-10:], IMAGES)
    assert threads == {"distkeras-batches-3"}
    assert len(calls) == len(IMAGES)  # once for all epochs


def test_decode_is_a_function_or_a_mapping_of_columns() -> None:
    settings: Any = TrainSettings
    assert settings(decode=pixels).decode == {"features": pixels}
    assert TrainSettings(features_col=("a", "b"), decode={"b": pixels}).row_settings["decode"] == {"b": "pixels"}
    assert "decode" not in TrainSettings().row_settings
    for wrong in ({"a": 1}, 3):
        with pytest.raises(ValueError, match="`decode` must be"):
            settings(decode=wrong)
    with pytest.raises(ValueError, match="`decode` must be"):
        settings(features_col=("a", "b"), decode=pixels)

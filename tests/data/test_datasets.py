from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from distkeras.data import datasets
from distkeras.ps.errors import ConfigurationError, ShapeError


def idx(array: np.ndarray, code: int) -> bytes:
    head = struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.mark.parametrize(("dtype", "code"), [("u1", 0x08), ("i1", 0x09), ("i2", 0x0B), ("i4", 0x0C), ("f4", 0x0D)])
@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_an_idx_file_is_read_as_it_was_written(
    tmp_path: Path, dtype: str, code: int, pack: Callable[..., Any] | type[bytes]
) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    (tmp_path / "a.idx").write_bytes(pack(idx(array, code)))
    back = datasets.read_idx(tmp_path / "a.idx")
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_a_file_that_is_not_idx_is_refused(tmp_path: Path) -> None:
    good = idx(np.arange(6, dtype="u1"), 0x08)
    for bad in (b"", b"\x89PNG\r\n", b"\0\0\x42\x01\0\0\0\x01a", good[:6]):
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(ConfigurationError, match="IDX"):
            datasets.read_idx(tmp_path / "bad")
    for bad in (good[:-1], good + b"x"):
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(ConfigurationError, match="6 elements"):
            datasets.read_idx(tmp_path / "bad")


def test_fashion_mnist_is_read_from_a_folder(tmp_path: Path) -> None:
    for split, rows in (("train", 5), ("t10k", 3)):
        pictures, labels = datasets.idx_names(split)
        (tmp_path / pictures).write_bytes(gzip.compress(idx(np.full((rows, 28, 28), rows, "u1"), 0x08)))
        (tmp_path / labels).write_bytes(gzip.compress(idx(np.arange(rows, dtype="u1"), 0x08)))
    (x_train, y_train), (x_test, y_test) = datasets.fashion_mnist(tmp_path)
    assert (x_train.shape, x_train.dtype, x_test.shape) == ((5, 784), np.dtype(np.uint8), (3, 784))
    assert y_train.dtype == np.int64
    np.testing.assert_array_equal(y_test, [0, 1, 2])


@pytest.mark.skipif(not Path(datasets.FASHION_MNIST).is_dir(), reason="dataset-fashion-mnist is not installed")
def test_the_installed_fashion_mnist_is_read() -> None:
    (x_train, y_train), (x_test, y_test) = datasets.fashion_mnist()
    assert x_train.shape == (60000, 784)
    assert x_test.shape == (10000, 784)
    assert np.bincount(y_train).tolist() == [6000] * 10
    assert np.bincount(y_test).tolist() == [1000] * 10
    assert x_train.max() == 255


def test_the_error_for_a_missing_fashion_mnist_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import keras

    def offline() -> None:
        raise Exception("URL fetch failure")

    monkeypatch.setattr(keras.datasets.fashion_mnist, "load_data", offline)
    with pytest.raises(ConfigurationError, match="install the Debian package"):
        datasets.fashion_mnist(tmp_path)


def test_parquet_keeps_order_scales_pixels_and_shares_rows(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (4501, 2, 3), dtype=np.uint8)
    y = np.arange(4501) % 10
    folder = datasets.write_parquet(tmp_path / "set", x, y, files=2)
    parts = sorted(Path(folder).iterdir())
    tables = [pq.read_table(part) for part in parts]
    assert [len(table) for table in tables] == [2250, 2251]
    assert str(tables[0].schema.field("features").type) == "list<element: float>"
    assert str(tables[0].schema.field("label").type) == "int32"
    features = np.concatenate([np.array(t["features"].to_pylist(), np.float32) for t in tables])
    np.testing.assert_allclose(features, x.reshape(-1, 6) / 255, rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([t["label"].to_numpy() for t in tables]), y)
    assert features.max() <= 1
    with pytest.raises(ConfigurationError, match="empty"):
        datasets.write_parquet(folder, x, y)


def test_parquet_refuses_bad_input(tmp_path: Path) -> None:
    x, y = np.zeros((4, 2), np.float32), np.zeros(4)
    with pytest.raises(ConfigurationError, match="files"):
        datasets.write_parquet(tmp_path, x, y, files=0)
    for labels in (y[:3], y.reshape(4, 1)):
        with pytest.raises(ShapeError):
            datasets.write_parquet(tmp_path, x, labels)
    assert not list(tmp_path.iterdir())

"""Data to try the trainers on, and conversions of numpy arrays to Spark."""

from __future__ import annotations

import gzip
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.ps.errors import ConfigurationError, ShapeError
from distkeras.ps.validate import require_integer

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

#: Where Debian's package ``dataset-fashion-mnist`` puts its files.
FASHION_MNIST = "/usr/share/datasets/fashion-mnist"

#: Rows of one Arrow batch or Parquet row group: Spark transfers wide rows fastest in batches of 1000-4000.
BATCH_ROWS = 2000

Split = tuple[np.ndarray, np.ndarray]

_IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def fashion_mnist(directory: str | os.PathLike[str] = FASHION_MNIST) -> tuple[Split, Split]:
    """Return Fashion-MNIST, 28x28 gray-scale pictures of ten kinds of clothing.

    It is read from ``directory`` if its four files are there, else through ``keras.datasets``, which keeps a copy of
    what it downloads.

    Returns:
        ``(x_train, y_train), (x_test, y_test)``: pictures uint8 of shape ``(60000, 784)`` and ``(10000, 784)``,
        labels int64 in 0..9 of shape ``(60000,)`` and ``(10000,)``.

    Raises:
        ConfigurationError: neither source has it; the text says how to get it.

    Reference:
        Xiao, Rasul, Vollgraf: Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms, 2017.
    """
    folder = Path(directory)
    if all((folder / name).is_file() for split in ("train", "t10k") for name in idx_names(split)):
        splits = [tuple(read_idx(folder / name) for name in idx_names(split)) for split in ("train", "t10k")]
    else:
        import keras

        try:
            splits = list(keras.datasets.fashion_mnist.load_data())
        except Exception as error:  # Keras raises a bare Exception when a download fails
            raise ConfigurationError(
                "Fashion-MNIST must be available: install the Debian package dataset-fashion-mnist, put its four "
                "*-ubyte.gz files into `directory`, or let Keras download it. "
                f"Received: directory={os.fspath(directory)!r}, and the download failed: {error}"
            ) from error
    (x_train, y_train), (x_test, y_test) = (
        (np.ascontiguousarray(x.reshape(len(x), -1)), y.astype(np.int64)) for x, y in splits
    )
    return (x_train, y_train), (x_test, y_test)


def idx_names(split: str) -> tuple[str, str]:
    """Return the file names of the pictures and the labels of ``split``, "train" or "t10k"."""
    return f"{split}-images-idx3-ubyte.gz", f"{split}-labels-idx1-ubyte.gz"


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """Return the array in an IDX file, the format of the MNIST family, gzipped or not.

    Layout: two zero bytes, a type code, the number of dimensions; the dimensions as big-endian uint32; the elements in
    C order, big-endian. The array is in native byte order.

    Raises:
        ConfigurationError: the file is not IDX, or does not hold as many elements as its header says.
    """
    content = Path(path).read_bytes()
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    code, ndim = (content[2], content[3]) if len(content) >= 4 and content[:2] == b"\0\0" else (-1, 0)
    start = 4 + 4 * ndim
    if code not in _IDX_DTYPES or len(content) < start:
        raise ConfigurationError(f"`path` must be an IDX file. Received: path={os.fspath(path)!r}")
    dtype = np.dtype(_IDX_DTYPES[code])
    shape = tuple(int(extent) for extent in np.frombuffer(content, ">u4", ndim, 4))
    if len(content) - start != math.prod(shape) * dtype.itemsize:
        raise ConfigurationError(
            f"`path` must hold {math.prod(shape)} elements, as its header says. "
            f"Received: path={os.fspath(path)!r} with {(len(content) - start) // dtype.itemsize}"
        )
    return np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def to_dataframe(
    spark: SparkSession, x: np.ndarray, y: np.ndarray, *, features_col: str = "features", label_col: str = "label"
) -> DataFrame:
    """Return a DataFrame of ``features: array<float>`` and ``label``, made through Arrow.

    The rows go through the driver's JVM. For more than some 100 MB use `write_parquet` and ``spark.read.parquet``.

    Args:
        spark: the session.
        x: shape ``(n, ...)``, flattened to one array a row. uint8 is taken for pixels and scaled to [0, 1]; any other
            dtype is cast to float32 without scaling.
        y: shape ``(n,)``; integers become int, anything else float.
        features_col: name of the column made of ``x``.
        label_col: name of the column made of ``y``.

    Raises:
        ShapeError: ``x`` and ``y`` differ in length, or ``y`` is not flat.
    """
    import pyarrow as pa

    batches = list(_record_batches(x, y, features_col, label_col))
    return spark.createDataFrame(pa.Table.from_batches(batches, _schema(y, features_col, label_col)))


def write_parquet(
    directory: str | os.PathLike[str],
    x: np.ndarray,
    y: np.ndarray,
    *,
    files: int = 1,
    features_col: str = "features",
    label_col: str = "label",
) -> str:
    """Write what `to_dataframe` makes as Parquet, without Spark, and return the folder for ``spark.read.parquet``.

    Args:
        directory: new or empty folder.
        x, y, features_col, label_col: as for `to_dataframe`.
        files: number of files, which share the rows evenly and in order.

    Raises:
        ConfigurationError: the folder holds files, or ``files`` is not positive.
        ShapeError: ``x`` and ``y`` differ in length, or ``y`` is not flat.
    """
    import pyarrow.parquet as pq

    folder = Path(directory)
    files = require_integer("files", files)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(f"`directory` must be new or empty. Received: directory={str(folder)!r}")
    _check(x, y)
    folder.mkdir(parents=True, exist_ok=True)
    bounds = np.linspace(0, len(x), files + 1).astype(int)
    for part, (start, stop) in enumerate(itertools.pairwise(bounds)):
        with pq.ParquetWriter(folder / f"part-{part:05d}.parquet", _schema(y, features_col, label_col)) as writer:
            for batch in _record_batches(x[start:stop], y[start:stop], features_col, label_col):
                writer.write_batch(batch)
    return str(folder)


def _check(x: np.ndarray, y: np.ndarray) -> None:
    if y.ndim != 1 or len(x) != len(y):
        raise ShapeError(f"`x` and `y` must have n rows and shape (n,). Received: {x.shape} and {y.shape}")


def _schema(y: np.ndarray, features_col: str, label_col: str) -> pa.Schema:
    import pyarrow as pa

    label = pa.int32() if np.issubdtype(y.dtype, np.integer) else pa.float32()
    return pa.schema([(features_col, pa.list_(pa.float32())), (label_col, label)])


def _record_batches(x: np.ndarray, y: np.ndarray, features_col: str, label_col: str) -> Iterator[Any]:
    import pyarrow as pa

    _check(x, y)
    schema = _schema(y, features_col, label_col)
    width = math.prod(x.shape[1:])
    for start in range(0, len(x), BATCH_ROWS):
        rows = x[start : start + BATCH_ROWS].reshape(-1, width).astype(np.float32)
        if x.dtype == np.uint8:
            rows /= np.float32(255)
        offsets = np.arange(len(rows) + 1, dtype=np.int32) * np.int32(width)
        features = pa.ListArray.from_arrays(pa.array(offsets), pa.array(rows.reshape(-1)))
        labels = pa.array(y[start : start + BATCH_ROWS]).cast(schema.field(1).type)
        yield pa.record_batch([features, labels], schema=schema)

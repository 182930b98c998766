"""The dtypes in which the values of columns reach a model: those that Keras' ``fit`` gives arrays of the same kind.

Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from distkeras.data.column_kinds import kind_in

if TYPE_CHECKING:
    from pyspark.sql.types import DataType


#: The dtype of an input of text, such as one of TextVectorization or StringLookup, which numpy does not have.
TEXT = "string"


def float_dtype() -> str:
    """Return the numpy name of the dtype of floats: ``fit`` casts those of any array to ``keras.config.floatx()``.

    It is float32 where that is a lower precision, to which layers and losses cast by themselves.
    """
    import keras

    return "float64" if keras.config.floatx() == "float64" else "float32"


def label_dtype(spark_type: DataType) -> str:
    """Return the numpy name of the dtype of labels from a column of type ``spark_type``, which may be an array."""
    dtype = getattr(kind_in(spark_type)[1], "dtype", None)  # None: no type of numpy's
    return float_dtype() if dtype is None or dtype.startswith("float") else _held(dtype)


def dtype_of_input(tensor: Any) -> str:
    """Return the numpy name of the dtype of a symbolic input's values; float32 for one that numpy does not have."""
    dtype = str(tensor.dtype)
    return "float32" if dtype.startswith(("bfloat", "float8")) else _held(dtype)


def held_dtype(dtype: str, backend: str, *, x64: bool) -> str:
    """Return the dtype in which a backend holds values of ``dtype``: JAX truncates integers without ``x64``."""
    return dtype if backend != "jax" or x64 else {"int64": "int32", "uint64": "uint32"}.get(dtype, dtype)


def _held(dtype: str) -> str:
    import keras

    backend = keras.backend.backend()
    x64 = backend != "jax" or bool(sys.modules["jax"].config.jax_enable_x64)
    return held_dtype(dtype, backend, x64=x64)

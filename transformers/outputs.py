"""The columns of a model's outputs: numbers, arrays, vectors, classes or probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

#: By an output's dtype, the dtype of its column if that is not float32: one that represents all numbers exactly.
_COLUMN_DTYPES = {name: name for name in ("float64", "bool", "int8", "int16", "int32", "int64")}
_COLUMN_DTYPES |= {"uint8": "int16", "uint16": "int32", "uint32": "int64", "uint64": "float64"}


@dataclass(frozen=True)
class OutputColumn:
    """One new column.

    Args:
        output: number of the model's output that the column is computed from.
        form: ``values``: numbers, or arrays nested like the output; ``number``: the only element of a row's output, a
            double; ``vector``: the output, flat, as an ML vector; ``class``: the number of the likeliest class, a
            double; ``logits`` and ``probability``: one number for each class, as an ML vector; a single element gives
            two classes.
        depth: axes of one row's output.
        output_dtype: numpy name of the output's numbers.
        logits: the output has not been through softmax or sigmoid.
        thresholds: for a ``class``, the divisor of each class's probability before the largest is taken.
    """

    name: str
    output: int
    form: str = "values"
    depth: int = 1
    output_dtype: str = "float32"
    logits: bool = False
    thresholds: tuple[float, ...] = ()

    @property
    def derived(self) -> bool:
        """Return whether the column is computed from the output's ``values``, and only if it is read."""
        return self.form in ("logits", "probability")

    @property
    def dtype(self) -> str:
        """Return the numpy name of the dtype of ``values``."""
        return _COLUMN_DTYPES.get(self.output_dtype, "float32")

    @property
    def holds_doubles(self) -> bool:
        """Return whether the output's own numbers become doubles."""
        return self.form in ("number", "vector") or (self.form == "values" and self.dtype == "float64")

    @property
    def spark_type(self) -> DataType:
        """Return the column's type in Spark."""
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql.pandas.types import from_arrow_type
        from pyspark.sql.types import ArrayType, DoubleType

        if self.form in ("number", "class"):
            return DoubleType()
        if self.form != "values":
            return VectorUDT()
        kind = from_arrow_type(pa.from_numpy_dtype(self.dtype))
        for _ in range(self.depth):
            kind = ArrayType(kind)
        return kind

    def to_arrow(self, output: np.ndarray) -> pa.Array:
        """Return the column for an output ``(n, …)``."""
        return _FORMS[self.form](output, self)


def nested_lists(output: np.ndarray, dtype: str) -> pa.Array:
    """Return an output ``(n, …)`` as numbers, or as lists with one level for each axis after the first."""
    values = pa.array(np.ascontiguousarray(output, dtype).reshape(-1))
    for axis in range(output.ndim - 1, 0, -1):
        rows = math.prod(output.shape[:axis])
        offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(output.shape[axis])
        values = pa.ListArray.from_arrays(offsets, values)
    return values


def dense_vectors(values: np.ndarray) -> pa.StructArray:
    """Return rows ``(n, k)`` as dense ML vectors, whose size and indices are null."""
    rows = len(values)
    absent = pa.nulls(rows, pa.int32()), pa.nulls(rows, pa.list_(pa.int32()))
    parts = [pa.array(np.ones(rows, np.int8)), *absent, nested_lists(values, "float64")]
    return pa.StructArray.from_arrays(parts, names=["type", "size", "indices", "values"])


#: The least probability of which a logit is computed, and the least complement of a sigmoid's: float32's precision.
_LEAST, _LEAST_COMPLEMENT = 2.0**-149, 2.0**-25


def class_scores(output: np.ndarray, column: OutputColumn) -> np.ndarray:
    """Return one score for each class, ``(n, k)``, float64; a single number p becomes the scores of two classes."""
    scores = output.reshape(len(output), -1).astype(np.float64)
    if scores.shape[1] > 1:
        return scores
    return np.asarray(np.hstack([-scores if column.logits else 1 - scores, scores]))


def class_logits(output: np.ndarray, column: OutputColumn) -> np.ndarray:
    """Return logits, ``(n, k)``, float64, whose softmax is the probabilities; for a single logit x, -x and x.

    The logits of probabilities are their logarithms, or log p - log(1 - p) of a single p.
    """
    scores = class_scores(output, column)
    if column.logits:
        return scores
    if output[:1].size > 1:
        return np.asarray(np.log(np.maximum(scores, _LEAST)))
    logit = np.log(np.maximum(scores[:, 1:], _LEAST)) - np.log(np.maximum(scores[:, :1], _LEAST_COMPLEMENT))
    return np.asarray(np.hstack([-logit, logit]))


def class_probabilities(output: np.ndarray, column: OutputColumn) -> np.ndarray:
    """Return probabilities of the classes, ``(n, k)``, float64."""
    scores = class_scores(output, column)
    if not column.logits:
        return scores
    if output[:1].size == 1:  # the sigmoid of x is the softmax of 0 and x, not of -x and x
        scores = scores * [0.0, 1.0]
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def classes(output: np.ndarray, column: OutputColumn) -> np.ndarray:
    """Return the number of the likeliest class of each row, ``(n,)``, float64; the first of equally likely ones."""
    if not column.thresholds:
        # A single probability of one half is class 0, as for the accuracy of Keras.
        return np.asarray(np.argmax(class_scores(output, column), axis=1), np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = class_probabilities(output, column) / np.array(column.thresholds)
    scaled[:, np.array(column.thresholds) == 0] = np.inf  # even a probability of 0, as in Spark
    return np.asarray(np.argmax(scaled, axis=1), np.float64)


_FORMS: dict[str, Callable[[np.ndarray, OutputColumn], pa.Array]] = {
    "values": lambda output, column: nested_lists(output, column.dtype),
    "number": lambda output, column: nested_lists(output.reshape(len(output)), "float64"),
    "vector": lambda output, column: dense_vectors(output.reshape(len(output), -1)),
    "class": lambda output, column: nested_lists(classes(output, column), "float64"),
    "logits": lambda output, column: dense_vectors(class_logits(output, column)),
    "probability": lambda output, column: dense_vectors(class_probabilities(output, column)),
}

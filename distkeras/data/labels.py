"""Labels that do not go with their loss, found before a job where types, metadata or one row can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkeras.cluster.failures import typed_error
from distkeras.cluster.session import tasks_python
from distkeras.data.columns import Column, quoted
from distkeras.data.dataframe import is_scalar, is_vector, known_length
from distkeras.data.spec import DataSpec
from distkeras.ps.errors import ShapeError

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructField


def require_length(field: StructField, column: Column, loss: str, classes: int | None) -> None:
    """Whether vectors of a length that Spark knows, as of its own encoders, fill what the loss wants.

    Raises:
        ShapeError: they do not.
    """
    length = known_length(field)
    if length is not None and length != column.size:
        raise _unfit(column, loss, classes, f"vectors of {length} values")


def require_class_numbers(df: DataFrame, spec: DataSpec) -> None:
    """Looks at one row where the loss wants a class number and the column's type lets it hold one-hot labels.

    Raises:
        ShapeError: it does.
    """
    for column, classes, loss in zip(spec.labels, spec.class_limits, spec.label_losses, strict=True):
        kind = df.schema[column.name].dataType
        if classes is None or column.size != 1 or is_scalar(kind) or column.decode is not None:
            continue
        length = _length_of_a_row(df, column.name, kind)
        if length is not None and length != column.size:
            raise _unfit(column, loss, classes, f"{length} values in the first row")


def _unfit(column: Column, loss: str, classes: int | None, received: str) -> ShapeError:
    number = "one value" if column.size == 1 else f"{column.size} values"
    if classes is None:
        expected = f"labels must hold {number}, like the model's output"
    else:
        expected = (
            f"labels must be class numbers, {number} a row; one-hot ones need the loss 'categorical_crossentropy'"
        )
    return ShapeError(f"{expected}. Received: {received}, loss={loss!r}", column=column.name)


def _length_of_a_row(df: DataFrame, name: str, kind: DataType) -> int | None:
    """How many numbers the column holds in some row; None where there is no row, or a null."""
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    try:
        row = df.select(_flat(F.col(quoted(name)), kind).alias("values")).first()
    except PySparkException as error:
        raise typed_error(error, tasks_python(df.sparkSession)) from None
    return None if row is None or row["values"] is None else len(row["values"])


def _flat(column: SparkColumn, kind: DataType) -> SparkColumn:
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType

    if is_vector(kind):
        return F.when(column.isNotNull(), vector_to_array(column))
    while isinstance(kind, ArrayType) and isinstance(kind.elementType, ArrayType):
        column, kind = F.flatten(column), kind.elementType
    return column

"""Class weights as sample weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distkeras.data.columns import quoted
from distkeras.data.dataframe import is_vector
from distkeras.data.spec import DataSpec
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import invalid, require_integer, require_number

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

#: The column that `weighted` adds.
CLASS_WEIGHT = "distkeras_class_weight"


def require_class_weight(value: Any) -> dict[int, float]:
    """A weight of at least 0 for each of some classes, from whatever a caller gave.

    Raises:
        ConfigurationError: it is something else.
    """
    if not isinstance(value, Mapping) or not value:
        raise invalid("class_weight", value, "a dictionary: class number to weight")
    try:
        return {
            require_integer("class_weight", number, 0): require_number("class_weight", weight, inclusive=True)
            for number, weight in value.items()
        }
    except ConfigurationError:
        expected = "a dictionary: class number, from 0 on, to a finite weight of at least 0"
        raise invalid("class_weight", value, expected) from None


def require_classes(class_weight: Mapping[int, float], spec: DataSpec) -> None:
    """Whether the labels of ``spec`` are one class a row, and every weight is that of a class.

    Raises:
        ConfigurationError: it is not so.
    """
    labels = spec.labels
    if len(labels) != 1:
        raise ConfigurationError(
            f"`class_weight` needs one label column. Received: label_col={[label.name for label in labels]}"
        )
    (label,), (classes,) = labels, spec.class_limits
    if label.decode is not None:
        raise ConfigurationError(
            "`class_weight` needs labels that are not decoded. Received: `decode`", column=label.name
        )
    if (classes is not None and label.size != 1) or sum(extent != 1 for extent in label.shape) > 1:
        raise ConfigurationError(
            "`class_weight` needs one class a row: a class number, or a one-hot array. "
            f"Received: labels of shape {label.shape}",
            column=label.name,
        )
    if classes is None and label.size > 1:
        classes = label.size
    above = [] if classes is None else [number for number in class_weight if number >= classes]
    if above:
        raise ConfigurationError(
            f"`class_weight` must be of classes in [0, {classes}), which the model's output has. Received: {above}",
            column=label.name,
        )


def weighted(df: DataFrame, label: str, class_weight: Mapping[int, float], weight: str | None) -> DataFrame:
    """``df`` with the column `CLASS_WEIGHT`: the weight of each row's class (1 where it has none), computed in the JVM.

    Args:
        df: any DataFrame.
        label: class numbers of any type, or one-hot arrays or ML vectors, whose largest element tells the class.
        class_weight: of the classes.
        weight: column of sample weights, by which the others are multiplied; None: there is none.

    Raises:
        ConfigurationError: ``df`` has a column `CLASS_WEIGHT`.
    """
    from pyspark.sql import functions as F

    if CLASS_WEIGHT.casefold() in (name.casefold() for name in df.columns):
        raise ConfigurationError(f"no column may have the name {CLASS_WEIGHT!r}. Received: columns={df.columns}")
    number = _class_number(df, label)
    row_weight = F.lit(1.0) if weight is None else F.col(quoted(weight)).cast("double")
    factor = F.lit(1.0)
    for one, value in class_weight.items():
        factor = F.when(number == F.lit(one), F.lit(float(value))).otherwise(factor)
    return df.withColumn(CLASS_WEIGHT, row_weight * factor)


def _class_number(df: DataFrame, label: str) -> SparkColumn:
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    column, kind = F.col(quoted(label)), df.schema[label].dataType
    if is_vector(kind):
        column = F.when(column.isNotNull(), vector_to_array(column))
    elif not isinstance(kind, T.ArrayType):
        return column.cast("double")
    else:
        while isinstance(kind.elementType, T.ArrayType):  # axes of length 1
            column, kind = F.flatten(column), kind.elementType
    largest = F.array_position(column, F.array_max(column)) - 1
    return F.when(F.size(column) == 1, F.get(column, F.lit(0))).otherwise(largest).cast("double")

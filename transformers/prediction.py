"""A model's outputs as new columns of a DataFrame, and as a function of Spark's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from distkeras.cluster.session import drivers_python
from distkeras.data.columns import arrow_ready, map_in_arrow, quoted
from distkeras.data.dataframe import is_vector
from distkeras.transformers import expressions, serving
from distkeras.transformers.outputs import OutputColumn

if TYPE_CHECKING:
    from distkeras.transformers.predictor import PackedModel

#: Spark's functions over Arrow arrays, as PySpark has them from 4.1 on; None before.
arrow_udf: Any
try:
    from pyspark.sql.pandas.functions import arrow_udf
except ImportError:
    arrow_udf = None

#: numpy name of an output to the numpy name and Spark type of its column.
_TYPES: dict[str, tuple[str, T.DataType]] = {
    "float64": ("float64", T.DoubleType()),
    "bool": ("bool", T.BooleanType()),
    "int8": ("int8", T.ByteType()),
    "uint8": ("int16", T.ShortType()),
    "int16": ("int16", T.ShortType()),
    "uint16": ("int32", T.IntegerType()),
    "int32": ("int32", T.IntegerType()),
    "uint32": ("int64", T.LongType()),
    "int64": ("int64", T.LongType()),
}
_FLOAT = ("float32", T.FloatType())

#: Of the outputs on their way, where there are several, and of the partition's number.
_OUTPUTS, _PARTITION = "__distkeras_outputs", "__distkeras_partition"


class ModelFunction:
    """What an executor does for the rows' values of a model's inputs.

    Args:
        plan: how to predict.
        names: a field of a struct for each of the plan's columns; None: the values of its only one. Spark takes no ML
            vectors within the struct of such a function: there they are arrays.
    """

    def __init__(self, plan: serving.PredictionPlan, names: Sequence[str] | None) -> None:
        self.plan = plan
        self._names = names

    def results(self, arguments: Iterator[pa.Array]) -> Iterator[pa.Array]:
        """The function's values for its arguments, which are tuples of arrays where there are several."""
        inputs = [column.name for column in self.plan.inputs]
        batches = (pa.RecordBatch.from_arrays(self.columns(given), names=inputs) for given in arguments)
        for batch in serving.predict(self.plan, batches, _partition()):
            outputs = batch.columns[len(inputs) :]
            if self._names is None:
                yield outputs[0]
            else:
                yield pa.StructArray.from_arrays([_without_vectors(output) for output in outputs], names=self._names)

    def columns(self, given: pa.Array | tuple[pa.Array, ...]) -> list[pa.Array]:
        """One column for each input of the model."""
        return list(given) if isinstance(given, tuple) else [given]


class _RowsFunction(ModelFunction):
    """Takes a last column that is no input."""

    def columns(self, given: pa.Array | tuple[pa.Array, ...]) -> list[pa.Array]:
        """One column for each input of the model."""
        return super().columns(given)[:-1]


def struct_of(fields: Mapping[str, T.DataType]) -> T.StructType:
    """The type of what a `ModelFunction` returns for several columns, given their names and types."""
    plain = {name: T.ArrayType(T.DoubleType()) if is_vector(kind) else kind for name, kind in fields.items()}
    return T.StructType([T.StructField(name, kind) for name, kind in plain.items()])


def _without_vectors(output: pa.Array) -> pa.Array:
    return output.field("values") if pa.types.is_struct(output.type) else output


def column_type(dtype: str) -> tuple[str, T.DataType]:
    """The numpy name and the Spark type of the column for an output of numpy name ``dtype``."""
    return _TYPES.get(dtype, _FLOAT)


def field_of_output(packed: PackedModel, column: OutputColumn) -> T.StructField:
    """The new column as Spark describes it."""
    shape, dtype = packed.outputs[column.output]
    return T.StructField(column.name, column.spark_type(column_type(dtype)[1], len(shape)))


def predicted(
    dataset: DataFrame,
    packed: PackedModel,
    features: Sequence[str],
    columns: Sequence[OutputColumn],
    limits: tuple[int, int],
    decode: Mapping[str, Callable[[Any], Any]] | None = None,
) -> DataFrame:
    """``dataset`` with the new ``columns``; lazy, like any transformation.

    Args:
        dataset: the data, or a stream of it.
        packed: the model.
        features: a column for each of its inputs.
        columns: the new ones.
        limits: rows and bytes of a call.
        decode: what executors make arrays of a feature's values with, by column; none where they are numbers.

    Raises:
        ConfigurationError: a new column that is there already.
        MissingColumnError: no such feature column, or it holds no numbers.
    """
    arrow_ready(dataset, features, decode or ())
    expressions.check_new_columns(dataset, *(column.name for column in columns))
    plan = packed.plan(dataset.sparkSession, features, columns, limits, decode or {})
    fields = [field_of_output(packed, column) for column in columns]
    through = _through_function if arrow_udf is not None else _through_python
    return through(dataset, plan, fields)


def _through_function(dataset: DataFrame, plan: serving.PredictionPlan, fields: Sequence[T.StructField]) -> DataFrame:
    """Only the features go to Python, and only the outputs come back: the rows stay in the JVM.

    From Spark 4.3 on, batches of a columnar source such as Parquet go to a function as they are, which fails where the
    table has ML vectors, given to it or not. A value that only rows have makes rows of them.
    """
    fields_by_key = {f"output_{number}": field for number, field in enumerate(fields)}
    several = len(fields) > 1
    function = _RowsFunction(plan, list(fields_by_key) if several else None)
    struct = struct_of({key: field.dataType for key, field in fields_by_key.items()})
    call = arrow_udf(function.results, struct if several else fields[0].dataType)
    with drivers_python(dataset):
        # Spark would call a deterministic one wherever the column is named: in a filter, and after it once more.
        outputs = call.asNondeterministic()(*(F.col(quoted(column.name)) for column in plan.inputs), F.col(_PARTITION))
    rows = dataset.select("*", F.spark_partition_id().alias(_PARTITION))
    if not several:
        return rows.select("*", outputs.alias(fields[0].name)).drop(_PARTITION)
    named = []
    for key, field in fields_by_key.items():
        output = F.col(_OUTPUTS)[key]
        named.append((array_to_vector(output) if is_vector(field.dataType) else output).alias(field.name))
    return rows.select("*", outputs.alias(_OUTPUTS)).select("*", *named).drop(_OUTPUTS, _PARTITION)


def _through_python(dataset: DataFrame, plan: serving.PredictionPlan, fields: Sequence[T.StructField]) -> DataFrame:
    """All columns go to Python and back."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return serving.predict(plan, batches, _partition())

    return map_in_arrow(dataset, run, T.StructType([*dataset.schema.fields, *fields]))


def _partition() -> int | None:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.partitionId() if context else None

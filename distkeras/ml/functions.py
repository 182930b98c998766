"""A model as a function of Spark SQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyspark

from distkeras.data.binding import listed, names_of
from distkeras.ml.model import KerasModel
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import require_choice, require_text
from distkeras.transformers.predictor import ModelFunction, arrow_udf, struct_of, with_key_columns

if TYPE_CHECKING:
    import keras
    from pyspark.sql import SparkSession

_COLUMNAR_INPUT = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"
#: The columns of a `KerasModel` that a function can return, and the forms they have.
_RETURNS = {
    "prediction": ("class", "number", "values", "vector"),
    "probability": ("probability",),
    "raw": ("logits",),
}


def register_function(
    spark: SparkSession, name: str, model: KerasModel | keras.Model, returns: str = "prediction"
) -> None:
    """Register a model as a function of Spark SQL: ``SELECT name(features) FROM rows``.

    ::

        register_function(spark, "digit", trained)
        spark.sql("SELECT label, digit(features) FROM test")

    The function takes one column for each input of the model: numbers, arrays or vectors. For a model with one input,
    it may also take several columns of one number each. If the inputs are named, register a `KerasModel` whose
    ``features_col`` is a mapping: the function takes its arguments in the order of that mapping. It returns the same
    values as the columns of `KerasModel`. For a model with several outputs, it returns a struct with one field for each
    output, by name, in which vectors are arrays. A row without a prediction, such as one with a null, fails the query,
    unless ``model`` is a `KerasModel` with ``handle_invalid`` "skip" or "keep": then it gets NULL. The function of a
    `KerasGroupModel` takes the columns of the key after those of the inputs.

    Spark 4.3 passes a function the batches of a columnar source such as Parquet unchanged, and fails if the table has
    ML vectors or the function returns them. Therefore this call sets
    ``spark.sql.execution.arrow.pythonUDF.columnarInput.enabled`` to false in the session.

    Args:
        spark: the session in which queries can call it.
        name: name of the function.
        model: a trained model, whose compilation determines what its outputs mean.
        returns: "prediction", or "probability" or "raw" for a classifier.

    Raises:
        ConfigurationError: An argument is invalid, or PySpark is older than 4.1.
    """
    if arrow_udf is None:
        raise ConfigurationError(f"`register_function` needs PySpark 4.1 or newer. Received: {pyspark.__version__}")
    require_text("name", name, "the name of a function")
    require_choice("returns", returns, tuple(_RETURNS))
    fitted = model if isinstance(model, KerasModel) else KerasModel(model)
    packed = fitted.packed_model
    columns = [column for column in fitted.output_columns() if column.form in _RETURNS[returns]]
    if not columns:
        raise ConfigurationError(
            f"`model` must be a classifier to return {returns!r}. Received: one whose outputs are numbers"
        )
    parts = packed.input_parts
    features = names_of(fitted.value("features_col"), "features_col")
    count = len(packed.inputs)
    order = list(range(count))  # for each input, which argument of the function it is
    if parts.named or isinstance(features, Mapping):
        inputs = parts.bound(features, "features_col")
        order = [listed(features).index(name) for name in inputs]
    else:
        inputs = listed(features) if len(features) == count else tuple(f"input {number}" for number in order)

    options = fitted.prediction_options()
    key_count = 0 if options.models is None else len(options.models.key_names)

    def inputs_of(arguments: Sequence[pa.Array]) -> list[pa.Array]:
        keys = list(arguments[len(arguments) - key_count :])
        return [*features_of(arguments[: len(arguments) - key_count]), *keys]

    def features_of(arguments: Sequence[pa.Array]) -> list[pa.Array]:
        if count == 1 and len(arguments) > 1:  # the numbers of the only input, one by one
            numbers = np.stack([argument.to_numpy(zero_copy_only=False) for argument in arguments], axis=1)
            return [pa.FixedSizeListArray.from_arrays(pa.array(numbers.ravel()), len(arguments))]
        if len(arguments) != count:
            raise ConfigurationError(
                f"the function must be given {count} columns, one for each input of the model. "
                f"Received: {len(arguments)}"
            )
        return [arguments[place] for place in order]

    _, plan = with_key_columns(packed.plan(spark, inputs, columns, options, {}))
    types = {fitted.output_names[column.output]: column.spark_type for column in columns}
    single = len(packed.outputs) == 1
    function = ModelFunction(plan, None if single else list(types), inputs_of)
    kind = columns[0].spark_type if single else struct_of(types)
    if spark.conf.isModifiable(_COLUMNAR_INPUT):  # known, that is
        spark.conf.set(_COLUMNAR_INPUT, "false")
    spark.udf.register(name, arrow_udf(function.results, kind))

"""A model as a function of Spark SQL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from distkeras.data.schema import names_of
from distkeras.ml.model import KerasModel
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import require_choice, require_text
from distkeras.transformers import serving
from distkeras.transformers.predictor import field_of_output

if TYPE_CHECKING:
    import keras
    from pyspark.sql import SparkSession

#: The columns of a `KerasModel` that a function can return, and the forms they have.
_RETURNS = {
    "prediction": ("class", "number", "values", "vector"),
    "probability": ("probability",),
    "raw": ("scores",),
}


def register_function(
    spark: SparkSession, name: str, model: KerasModel | keras.Model, returns: str = "prediction"
) -> None:
    """Registers a model as a function of Spark SQL: ``SELECT name(features) FROM rows``.

    It takes a column for each input of the model: numbers, arrays or vectors; or, where there is one input, several
    columns of one number each. It returns what `KerasModel` puts into its columns: of a model with several outputs a
    struct with a field for each, by the outputs' names.

    Args:
        spark: the session that is to know it.
        name: of the function.
        model: trained; its compilation says what its outputs mean.
        returns: "prediction", or of a classifier "probability" or "raw".

    Raises:
        ConfigurationError: an argument cannot work, or PySpark is older than 4.1.
    """
    try:
        from pyspark.sql.pandas.functions import arrow_udf
    except ImportError:
        raise ConfigurationError("`register_function` needs PySpark 4.1 or newer. Received: an older one") from None
    require_text("name", name, "the name of a function")
    require_choice("returns", returns, tuple(_RETURNS))
    fitted = model if isinstance(model, KerasModel) else KerasModel(model)
    packed = fitted.packed_model
    columns = [column for column in fitted.output_columns() if column.form in _RETURNS[returns]]
    if not columns:
        raise ConfigurationError(f"`model` must be a classifier to return {returns!r}. Received: one that is none")
    features = names_of(fitted.value("features_col"), "features_col")
    inputs = features if len(features) == len(packed.inputs) else [f"input {n}" for n in range(len(packed.inputs))]
    plan = packed.plan(spark, inputs, columns, fitted.limits, fitted.feature_decoders())
    function = SqlFunction(plan, fitted.output_names)
    kinds: list[Any] = [field_of_output(packed, column).dataType for column in columns]
    names = [fitted.output_names[column.output] for column in columns]
    struct: Any = T.StructType([T.StructField(*field) for field in zip(names, kinds, strict=True)])
    make: Any = arrow_udf  # its stub asks for the kind of function that its annotations tell
    spark.udf.register(name, make(function.results, kinds[0] if len(packed.outputs) == 1 else struct))


class SqlFunction:
    """What an executor does for the function.

    Args:
        plan: how to predict.
        names: of the model's outputs.
    """

    def __init__(self, plan: serving.PredictionPlan, names: Sequence[str]) -> None:
        self._plan = plan
        self._names = None if len(names) == 1 else [names[column.output] for column in plan.columns]

    def results(self, arguments: Iterator[pa.Array]) -> Iterator[pa.Array]:
        """The function's values for its arguments, which are tuples of arrays where there are several."""
        inputs = [column.name for column in self._plan.inputs]
        batches = (pa.RecordBatch.from_arrays(self._columns(given), names=inputs) for given in arguments)
        for batch in serving.predict(self._plan, batches, None):
            outputs = batch.columns[len(inputs) :]
            yield outputs[0] if self._names is None else pa.StructArray.from_arrays(outputs, names=self._names)

    def _columns(self, given: pa.Array | tuple[pa.Array, ...]) -> list[pa.Array]:
        """One column for each input of the model."""
        columns = list(given) if isinstance(given, tuple) else [given]
        wanted = len(self._plan.inputs)
        if wanted == 1 and len(columns) > 1:
            numbers = np.stack([column.to_numpy(zero_copy_only=False) for column in columns], axis=1)
            return [pa.FixedSizeListArray.from_arrays(pa.array(numbers.ravel()), len(columns))]
        if len(columns) != wanted:
            raise ConfigurationError(
                f"the function must be given {wanted} columns, one for each input of the model. "
                f"Received: {len(columns)}"
            )
        return columns

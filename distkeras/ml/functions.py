"""A model as a function of Spark SQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from distkeras.data.binding import listed, names_of
from distkeras.ml.model import KerasModel
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import require_choice, require_text
from distkeras.transformers.predictor import ModelFunction, arrow_udf, field_of_output, struct_of
from distkeras.transformers.serving import PredictionPlan

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
    """Registers a model as a function of Spark SQL: ``SELECT name(features) FROM rows``.

    It takes a column for each input of the model: numbers, arrays or vectors; or, where there is one input, several
    columns of one number each. Where the inputs are named, make it of a `KerasModel` whose ``features_col`` is a
    mapping: the function takes its arguments in the order of that mapping. It returns what `KerasModel` puts into its
    columns: of a model with several outputs a struct with a field for each, by the outputs' names, in which vectors are
    arrays. A row that cannot be predicted from, as one with a null, fails the query, unless ``model`` is a `KerasModel`
    whose ``handle_invalid`` is "skip" or "keep": it gets NULL then.

    Spark 4.3 hands a function the batches of a columnar source such as Parquet as they are, and fails where the table
    has ML vectors or the function returns them. So this turns
    ``spark.sql.execution.arrow.pythonUDF.columnarInput.enabled`` off in the session.

    Args:
        spark: the session that is to know it.
        name: of the function.
        model: trained; its compilation says what its outputs mean.
        returns: "prediction", or of a classifier "probability" or "raw".

    Raises:
        ConfigurationError: an argument cannot work, or PySpark is older than 4.1.
    """
    if arrow_udf is None:
        raise ConfigurationError("`register_function` needs PySpark 4.1 or newer. Received: an older one")
    require_text("name", name, "the name of a function")
    require_choice("returns", returns, tuple(_RETURNS))
    fitted = model if isinstance(model, KerasModel) else KerasModel(model)
    packed = fitted.packed_model
    columns = [column for column in fitted.output_columns() if column.form in _RETURNS[returns]]
    if not columns:
        raise ConfigurationError(f"`model` must be a classifier to return {returns!r}. Received: one that is none")
    parts = packed.input_parts
    given = names_of(fitted.value("features_col"), "features_col")
    if parts.named or isinstance(given, Mapping):
        inputs = parts.bound(given, "features_col")
        order = [listed(given).index(name) for name in inputs]
    else:
        count = len(packed.inputs)
        inputs = listed(given) if len(given) == count else tuple(f"input {number}" for number in range(count))
        order = list(range(count))
    plan = packed.plan(spark, inputs, columns, fitted.limits, fitted.feature_decoders())
    plan = replace(plan, tolerant=fitted.value("handle_invalid") != "error")
    kinds = [field_of_output(packed, column).dataType for column in columns]
    names = [fitted.output_names[column.output] for column in columns]
    single = len(packed.outputs) == 1
    function = SqlFunction(plan, None if single else names, order)
    kind = kinds[0] if single else struct_of(dict(zip(names, kinds, strict=True)))
    if spark.conf.isModifiable(_COLUMNAR_INPUT):  # known, that is
        spark.conf.set(_COLUMNAR_INPUT, "false")
    spark.udf.register(name, arrow_udf(function.results, kind))


class SqlFunction(ModelFunction):
    """A model as a function whose caller may also give its input's numbers one by one.

    Args:
        plan, names: see `ModelFunction`.
        order: for each input of the model, which argument of the function it is.
    """

    def __init__(self, plan: PredictionPlan, names: Sequence[str] | None, order: Sequence[int]) -> None:
        super().__init__(plan, names)
        self._order = tuple(order)

    def columns(self, given: pa.Array | tuple[pa.Array, ...]) -> list[pa.Array]:
        """One column for each input of the model.

        Raises:
            ConfigurationError: another number of columns.
        """
        columns = super().columns(given)
        wanted = len(self.plan.inputs)
        if wanted == 1 and len(columns) > 1:
            numbers = np.stack([column.to_numpy(zero_copy_only=False) for column in columns], axis=1)
            return [pa.FixedSizeListArray.from_arrays(pa.array(numbers.ravel()), len(columns))]
        if len(columns) != wanted:
            raise ConfigurationError(
                f"the function must be given {wanted} columns, one for each input of the model. "
                f"Received: {len(columns)}"
            )
        return [columns[place] for place in self._order]

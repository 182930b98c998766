"""dist-keras' evaluator, predictor and transformers that differ here, and its job server, which is refused."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import distkeras.transformers.predictor as new
from distkeras.compat.trainers import SUBMIT, RefusedClass, refusal, refused
from distkeras.data.schema import quoted
from distkeras.ps.errors import MissingColumnError
from distkeras.spark.failures import short_errors
from distkeras.transformers.expressions import check_new_columns, vector_of
from distkeras.transformers.params import StageTransformer, column_name, param
from distkeras.transformers.scaling import StandardScaleTransformer

if TYPE_CHECKING:
    import keras


class Evaluator:
    """The base of dist-keras' evaluators, whose subclasses override `evaluate`.

    Args:
        label_col: kept as `label_column`.
        prediction_col: kept as `prediction_column`.
    """

    def __init__(self, label_col: str = "label", prediction_col: str = "prediction") -> None:
        self.label_column = label_col
        self.prediction_column = prediction_col

    def evaluate(self, dataframe: DataFrame) -> float:
        """Written by subclasses."""
        raise refusal(f"{type(self).__name__}.evaluate", "write it, or extend `pyspark.ml.evaluation.Evaluator`")


class Predictor:
    """The base of dist-keras' predictors, whose subclasses override `predict`.

    Args:
        keras_model: the model, kept as `model`.
    """

    def __init__(self, keras_model: keras.Model) -> None:
        self.model = keras_model

    def predict(self, dataframe: DataFrame) -> DataFrame:
        """Written by subclasses."""
        raise refusal(f"{type(self).__name__}.predict", "write it, or use `distkeras.transformers.ModelPredictor`")


class ModelPredictor(new.ModelPredictor, Predictor):  # type: ignore[misc]  # as there
    """`distkeras.transformers.ModelPredictor` with flat outputs as dense vectors.

    Args:
        keras_model, features_col, output_col, batch_size: as there.
        output_type: "vector" by default.
    """

    def __init__(
        self,
        keras_model: keras.Model | new.PackedModel | None = None,
        features_col: str | Sequence[str] | Mapping[str, str] | None = None,
        output_col: str | Sequence[str] | Mapping[str, str] | None = None,
        batch_size: int | None = None,
        output_type: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(keras_model, features_col, output_col, batch_size, output_type, **options)
        self._setDefault(output_type="vector")


_MOMENTS = "its means and deviations are `means` and `stddevs` of what `fit` returns"


class Transformer:
    """The base of dist-keras' transformers, whose subclasses override `transform`."""

    def transform(self, dataframe: DataFrame) -> DataFrame:
        """Written by subclasses."""
        raise refusal(f"{type(self).__name__}.transform", "write it, or extend `pyspark.ml.Transformer`")


def _label(value: Any) -> Any:
    if not isinstance(value, str | numbers.Number):
        raise TypeError
    return value


class BinaryLabelTransformer(StageTransformer):
    """Turns a column into the vector [1, 0] where it is ``label``, else into [0, 1]; also where it is null.

    Args:
        input_column: any column that can be compared with ``label``.
        output_column: new column of dense vectors.
        label: a string or a number.

    Raises:
        MissingColumnError: no such column.
        ConfigurationError: ``output_column`` is there already.
    """

    input_column = param("input_column", "column to read", column_name, "the name of a column")
    output_column = param("output_column", "new column to write", column_name, "the name of a new column")
    label = param("label", "the value of [1, 0]", _label, "a string or a number")

    @short_errors
    def __init__(
        self, input_column: str | None = None, output_column: str | None = None, label: Any | None = None
    ) -> None:
        super().__init__()
        self._set_given(input_column=input_column, output_column=output_column, label=label)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        name, new = self._required("input_column"), self._required("output_column")
        if name not in dataset.columns:
            raise MissingColumnError(
                f"the DataFrame must have the column {name!r}. Received: columns={dataset.columns}", column=name
            )
        check_new_columns(dataset, new)
        hit = F.col(quoted(name)).eqNullSafe(F.lit(self._required("label")))
        yes, no = (F.array(F.lit(first), F.lit(1.0 - first)) for first in (1.0, 0.0))
        return dataset.withColumn(new, vector_of(F.when(hit, yes).otherwise(no)))


class StandardTransformer(StandardScaleTransformer):
    """`StandardScaleTransformer` with the deviation of a whole population, divisor n, as dist-keras took it."""

    def fit(self, dataset: DataFrame) -> StandardTransformer:
        """Return a copy that standardizes by the moments of ``dataset``; this runs two jobs."""
        fitted = super().fit(dataset)
        names = self._required("columns")
        counts = dataset.agg(*(F.count(F.col(quoted(name))) for name in names)).first()
        assert counts is not None
        stddevs = [
            [value * math.sqrt((count - 1) / count) for value in column]
            for column, count in zip(fitted.getOrDefault("stddevs"), counts, strict=True)
        ]
        return self.copy({self.means: fitted.getOrDefault("means"), self.stddevs: stddevs})

    clean_mean_keys = refused("clean_mean_keys", _MOMENTS)
    clean_stddev_keys = refused("clean_stddev_keys", _MOMENTS)


class Punchcard(RefusedClass, instead=SUBMIT):
    """dist-keras' job server."""


class PunchcardJob(RefusedClass, instead=SUBMIT):
    """A job as dist-keras' job server kept it."""


class Job(RefusedClass, instead=SUBMIT):
    """A job as dist-keras' client sent it."""

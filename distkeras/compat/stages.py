"""dist-keras' evaluator and predictor, which differ here, and its job server, which is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame

import distkeras.transformers.predictor as new
from distkeras.compat import SUBMIT, RefusedClass, refusal

# Pipelines that 0.2.0 saved name these classes as members of this module.
from distkeras.transformers.scaling import StandardTransformer as StandardTransformer
from distkeras.transformers.shaping import BinaryLabelTransformer as BinaryLabelTransformer

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


class Punchcard(RefusedClass, instead=SUBMIT):
    """dist-keras' job server."""


class PunchcardJob(RefusedClass, instead=SUBMIT):
    """A job as dist-keras' job server kept it."""


class Job(RefusedClass, instead=SUBMIT):
    """A job as dist-keras' client sent it."""

"""dist-keras' predictor: it has `predict`, and gives dense vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame

import distkeras.transformers.predictor as new
from distkeras.compat.refusals import refusal

if TYPE_CHECKING:
    import keras


class Predictor:
    """The base of dist-keras' predictors, whose subclasses write `predict` anew.

    Args:
        keras_model: the model, kept as `model`.
    """

    def __init__(self, keras_model: keras.Model) -> None:
        self.model = keras_model

    def predict(self, dataframe: DataFrame) -> DataFrame:
        """Written by subclasses."""
        raise refusal(f"{type(self).__name__}.predict", "write it, or use `distkeras.transformers.ModelPredictor`")


class ModelPredictor(new.ModelPredictor, Predictor):
    """`distkeras.transformers.ModelPredictor` with flat outputs as dense vectors, and `predict` for `transform`.

    Args:
        keras_model, features_col, output_col, batch_size: as there.
        output_type: "vector" unless told otherwise.
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

    def predict(self, dataframe: DataFrame) -> DataFrame:
        """`transform`."""
        return self.transform(dataframe)

"""The rows of a DataFrame, bound to the inputs and the labels of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distkeras.data.batches import Batch, DataSpec
from distkeras.data.binding import listed
from distkeras.data.column_kinds import float_dtype
from distkeras.data.columns import Column
from distkeras.data.model_columns import assembled, data_spec, require_class_numbers
from distkeras.data.ordering import partitioned
from distkeras.data.schema import CLASS_WEIGHT, balanced, require_classes, weighted
from distkeras.data.source import collect
from distkeras.keras_model.keras_config import Settings, applied
from distkeras.ps.errors import ConfigurationError
from distkeras.settings import TrainSettings
from distkeras.spark.kept_layout import Arrangement

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class BoundData:
    """A DataFrame, and what a model reads of it; a stream stays as it is until a micro-batch comes."""

    df: DataFrame
    spec: DataSpec
    settings: TrainSettings

    @classmethod
    def of(cls, df: DataFrame, model: keras.Model, settings: TrainSettings, keras_settings: Settings) -> BoundData:
        """Bind the rows that a job trains on to a compiled model."""
        df, spec = columns_of(df, model, settings, keras_settings)
        if not df.isStreaming:
            require_class_numbers(df, spec)
        if settings.class_weight is not None:
            settings = replace(settings, class_weight=_class_weights(df, spec, settings))
            with applied(keras_settings):
                spec = replace(spec, sample_weight=Column(CLASS_WEIGHT, dtype=float_dtype()))
        return cls(df, spec, settings)

    def rewindable(self) -> BoundData:
        """Return the same data, of which workers keep the rows of a single epoch too."""
        return replace(self, spec=replace(self.spec, rewindable=True))

    def weighted(self) -> DataFrame:
        """Return the rows, with the weight of each row's class if the job has such weights."""
        settings = self.settings
        if settings.class_weight is None:
            return self.df
        weight = next(iter(settings.weight_columns), None)
        return weighted(self.df, listed(settings.label_col)[0], self._class_weights, weight)

    @property
    def _class_weights(self) -> dict[int, float]:
        weights = self.settings.class_weight
        assert not isinstance(weights, str), "`of` has counted the classes"
        return weights or {}

    def partitioned(self, workers: int) -> DataFrame:
        """Return the rows as workers read them, one partition each; of a stream, the stream."""
        if self.df.isStreaming:
            return self.df
        return partitioned(self.weighted(), self.spec, workers, partitioned_already=self.settings.partitioned_already)

    def arrangement(self, workers: int) -> Arrangement | None:
        """Return what determines `partitioned`; None if Spark does not move the rows."""
        settings, spec = self.settings, self.spec
        if settings.partitioned_already:
            return None
        weights = self._class_weights
        names = [name for column in spec.columns for name in column.sources if not (weights and name == CLASS_WEIGHT)]
        if weights:
            names += [*listed(settings.label_col), *settings.weight_columns]
        made_by = (spec.columns, spec.seed, workers, tuple(weights.items()), settings.weight_columns)
        return Arrangement(self.df, tuple(dict.fromkeys(names)), made_by)


def _class_weights(df: DataFrame, spec: DataSpec, settings: TrainSettings) -> dict[int, float]:
    weights = settings.class_weight
    if not isinstance(weights, dict):
        require_classes({}, spec)
        if df.isStreaming:
            raise ConfigurationError(
                "`class_weight` of a stream must be a dictionary, because its rows cannot be counted before they come. "
                f"Received: class_weight={weights!r}"
            )
        weights = balanced(df, listed(settings.label_col)[0])
    require_classes(weights, spec)
    return weights


def columns_of(
    df: DataFrame, model: keras.Model, settings: TrainSettings, keras_settings: Settings
) -> tuple[DataFrame, DataSpec]:
    """Return ``df`` with a column for each input of a compiled model, and the columns that the model reads of it."""
    df, features = assembled(df, settings.features_col, [str(tensor.dtype) for tensor in model.inputs or ()])
    with applied(keras_settings):
        return df, data_spec(model, df.schema, rows=df, **settings.data_arguments | {"features": features})


def validation_rows(df: DataFrame, spec: DataSpec, count_max: int) -> Batch:
    """Return rows of a validation DataFrame, at most ``count_max``."""
    return collect(df, replace(spec, epochs=1, shuffle=False, batch_size=count_max), count_max)

"""The models of groups as a Spark ML model: each row is predicted by the model of its key."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from distkeras.groups.results import GROUP, REASON, GroupModels, GroupResults, JoinedGroups, joined
from distkeras.groups.store import MANIFEST, Manifest, copy_groups
from distkeras.keras_model.recipe import recipe_of
from distkeras.ml.model import KerasModel, with_predictions
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.world.files import below, is_uri
from distkeras.spark.cluster import SparkFacts, arrow_uri
from distkeras.spark.failures import short_errors

if TYPE_CHECKING:
    import numpy as np
    from pyspark.sql import DataFrame, SparkSession

    from distkeras.transformers.serving import PredictionOptions

#: The folder of the pieces, below that of a saved stage.
_FOLDER = "groups"


class KerasGroupModel(KerasModel):
    """Predict each row with the model of its group.

    ::

        fitted = KerasEstimator(model, worker_optimizer="adam", loss="mse").fitGroups(df, by="shop")
        fitted.transform(df)                  # "prediction" by the model of each row's shop
        fitted.groups.table.show()            # shop, rows, seconds, loss, metrics, error

    `KerasEstimator.fitGroups` returns such a model; you can also create one from the result of `Trainer.train_groups`.
    Its columns are those of `KerasModel`. A row whose key has no model is invalid: see ``handle_invalid``; the reason
    says whether the key is unknown or why its training failed. Its SQL function (`register_function`) takes the columns
    of the key after those of the model's inputs. Saving copies the models.

    Args:
        groups: the result of `Trainer.train_groups`.
        keywords: those of `KerasModel`.

    Raises:
        ConfigurationError: The columns do not fit the model.
    """

    @short_errors
    def __init__(self, groups: GroupResults | None = None, **keywords: Any) -> None:
        template = None if groups is None else groups.recipe.build(groups.model_file)
        super().__init__(template, **keywords)
        self._groups = groups

    @property
    def groups(self) -> GroupResults:
        """Return the models of all groups, and the table of their training.

        Raises:
            ConfigurationError: `groups` is not set.
        """
        if self._groups is None:
            raise ConfigurationError("`groups` must be set. Received: KerasGroupModel without groups")
        return self._groups

    def _transform(self, dataset: DataFrame) -> DataFrame:
        stored = self.groups.stored
        options = dataclasses.replace(super().prediction_options(), models=JoinedGroups(stored))
        return with_predictions(joined(dataset, stored), self, options).drop(GROUP, REASON)

    def prediction_options(self) -> PredictionOptions:
        """Return the options of predictions in a function of SQL, with the models of the keys."""
        stored = self.groups.stored
        return dataclasses.replace(super().prediction_options(), models=GroupModels(stored, stored.key_names))

    def predict(self, value: Any, key: Any) -> Any:  # type: ignore[override]  # of several models one must be chosen
        """Return the prediction for one row of a group, computed in this process.

        Args:
            value: as in `KerasModel.predict`.
            key: the value of the key's column, or a mapping with the value of each column.

        Raises:
            ConfigurationError: there is no model for the key.
            ShapeError: another number of values.
        """
        return self.model_of(key).predict(value)

    def predictProbability(self, value: Any, key: Any) -> np.ndarray:  # type: ignore[override]  # as above
        """Return the classes' probabilities for one row of a group; see `KerasModel.predictProbability`."""
        return self.model_of(key).predictProbability(value)

    def predictRaw(self, value: Any, key: Any) -> np.ndarray:  # type: ignore[override]  # as above
        """Return the classes' logits for one row of a group; see `KerasModel.predictRaw`."""
        return self.model_of(key).predictRaw(value)

    def model_of(self, key: Any) -> KerasModel:
        """Return the model of one group, with this one's parameters.

        Args:
            key: the value of the key's column, or a mapping with the value of each column.

        Raises:
            ConfigurationError: there is no model for the key.
        """
        fitted: KerasModel = self._copyValues(
            KerasModel(self.groups.model(key), custom_objects=self.value("custom_objects"))
        )
        return fitted

    def evaluate(self, dataset: DataFrame) -> dict[str, float]:
        """Raise ConfigurationError, because several models have no common loss; use an evaluator on `transform`."""
        raise ConfigurationError(
            "models of groups must be evaluated by an evaluator on the rows that `transform` returns, or one by one "
            "with `groups.model(key)`. Received: a call of `evaluate`"
        )

    def save_files(self, path: str) -> None:
        """Copy the pieces below ``path``; raise ConfigurationError if executors do not reach that."""
        copy_groups(self.groups.stored, _shared(self.groups.session, path))

    def load_files(self, spark: SparkSession, path: str) -> None:
        """Take the pieces below ``path``, which must stay; raise ConfigurationError if executors do not reach that."""
        uri = _shared(spark, path)
        manifest = Manifest.load(uri)
        if manifest is None:
            raise ConfigurationError(f"{path} must hold the models of all groups. Received: no {MANIFEST} in {uri}")
        data = self.archive_to_save()
        recipe = recipe_of(self.keras_model, data, objects=self.value("custom_objects"), labels=False)
        self._groups = GroupResults(spark, manifest.stored(uri), recipe, data)


def _shared(spark: SparkSession, path: str) -> str:
    """Return the folder of pieces below ``path`` as a URI that driver and executors open alike."""
    if not is_uri(path) and not SparkFacts.of(spark).local:
        raise ConfigurationError(
            "a model for each group must be saved at a URI that driver and executors reach, such as hdfs:// or s3://. "
            f"Received: path={path!r}"
        )
    return below(arrow_uri(path), _FOLDER)

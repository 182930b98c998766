"""dist-keras' functions, at their old path; see `distkeras.compat`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from distkeras.compat import history_executor, history_executors_average, refused
from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    import keras

__all__ = [
    "deserialize_keras_model",
    "history_executor",
    "history_executors_average",
    "json_to_dataframe_row",
    "new_dataframe_row",
    "pickle_object",
    "precache",
    "serialize_keras_model",
    "shuffle",
    "to_one_hot_encoded_dense",
    "uniform_weights",
    "unpickle_object",
]

_PICKLE = 'what is unpickled runs as code: keep a model with `model.save("name.keras")`'

pickle_object = refused("pickle_object", _PICKLE)
unpickle_object = refused("unpickle_object", _PICKLE)


def to_one_hot_encoded_dense(value: float, n_dim: int = 2) -> np.ndarray:
    """Return float64 ``(n_dim,)``: 1 at the place ``value``, else 0; raise ConfigurationError for no place in it."""
    if not 0 <= value < n_dim:
        raise ConfigurationError(f"`value` must be in [0, {n_dim}). Received: value={value}")
    vector = np.zeros(n_dim)
    vector[int(value)] = 1.0
    return vector


def new_dataframe_row(old_row: Row, column_name: str, column_value: Any) -> Row:
    """Return ``old_row`` with a column more, or another value in one that it has."""
    return Row(**{**old_row.asDict(), column_name: column_value})


def json_to_dataframe_row(string: str) -> Row:
    """Return a row from a JSON object."""
    return Row(**json.loads(string))


def serialize_keras_model(model: keras.Model) -> dict[str, Any]:
    """Return a dictionary of ``model``, its architecture as JSON, and ``weights``, a list of arrays."""
    return {"model": model.to_json(), "weights": model.get_weights()}


def deserialize_keras_model(dictionary: Mapping[str, Any]) -> keras.Model:
    """Return the model that `serialize_keras_model` took, not compiled."""
    import keras

    model = keras.models.model_from_json(dictionary["model"])
    model.set_weights(dictionary["weights"])
    return model


def uniform_weights(model: keras.Model, constraints: Sequence[float] = (-0.5, 0.5)) -> None:
    """Set all weights of ``model`` to random numbers in ``constraints``, from numpy's global generator."""
    low, high = constraints
    model.set_weights([np.random.uniform(low, high, weight.shape) for weight in model.get_weights()])


def shuffle(dataset: DataFrame) -> DataFrame:
    """Return the rows in a random order, cached. Training needs none: it shuffles by itself."""
    return dataset.orderBy(F.rand()).cache()


def precache(dataset: DataFrame, num_workers: int) -> DataFrame:
    """Return the rows in ``num_workers`` partitions, cached by a job that counts them."""
    cached = dataset.repartition(num_workers).cache()
    cached.count()
    return cached

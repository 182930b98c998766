"""dist-keras' functions, at their old path; see `distkeras.compat`."""

from distkeras.compat.trainers import (
    deserialize_keras_model,
    history_executor,
    history_executors_average,
    json_to_dataframe_row,
    new_dataframe_row,
    pickle_object,
    precache,
    serialize_keras_model,
    shuffle,
    to_one_hot_encoded_dense,
    uniform_weights,
    unpickle_object,
)

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

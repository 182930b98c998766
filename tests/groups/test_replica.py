"""A replica that is reset before each group trains like a new one, to the bit."""

from __future__ import annotations

from typing import Any

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from support.cases import examples

from distkeras.data.batches import DataSpec
from distkeras.data.columns import Column
from distkeras.groups.replica import ReplicaOfGroups, weights_of
from distkeras.keras_model import archive
from distkeras.keras_model.recipe import recipe_of
from distkeras.ps.errors import NonFiniteError

SPEC = DataSpec(features=(Column("x", (3,)),), labels=(Column("y", ()),), batch_size=4, epochs=2, seed=3)

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.05, amsgrad=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "schedule": lambda: keras.optimizers.RMSprop(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), dynamic_growth_steps=2),
}
LAYERS = {
    "dropout": lambda: keras.layers.Dropout(0.4, seed=1),
    "noise": lambda: keras.layers.GaussianNoise(0.3, seed=2),
    "averages": lambda: keras.layers.BatchNormalization(),
    "spectral": lambda: keras.layers.SpectralNormalization(keras.layers.Dense(4)),
}


def replica(optimizer: str, layers: list[str]) -> ReplicaOfGroups:
    keras.utils.set_random_seed(1)
    inner = [LAYERS[name]() for name in layers]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), *inner, keras.layers.Dense(1)])
    model_file = archive.to_bytes(model)
    recipe = recipe_of(model, model_file, optimizer=OPTIMIZERS[optimizer](), loss="mse", metrics=["mae"])
    return ReplicaOfGroups(recipe, model_file)


def rows(seed: int, count: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 3)).astype(np.float32), rng.normal(size=count).astype(np.float32)


def trained(groups: ReplicaOfGroups, columns: tuple[np.ndarray, ...]) -> tuple[bytes, list[float]]:
    used, means = groups.train(columns, SPEC)
    return weights_of(used.model), means.tolist()


def require_same_as_new(optimizer: str, layers: list[str], counts: list[int]) -> None:
    kept = replica(optimizer, layers)
    for seed, count in enumerate(counts):
        expected = trained(replica(optimizer, layers), rows(seed, count))
        assert trained(kept, rows(seed, count)) == expected


@pytest.mark.slow
def test_a_reset_replica_trains_like_a_new_one() -> None:
    require_same_as_new("adam", ["dropout", "averages"], [9, 5])


@pytest.mark.slow
@examples(10)
@hypothesis.given(
    st.sampled_from(sorted(OPTIMIZERS)),
    st.lists(st.sampled_from(sorted(LAYERS)), max_size=2, unique=True),
    st.lists(st.integers(1, 11), min_size=2, max_size=3),
)
def test_any_reset_replica_trains_like_a_new_one(optimizer: str, layers: list[str], counts: list[int]) -> None:
    require_same_as_new(optimizer, layers, counts)


def test_a_group_that_diverges_does_not_affect_the_next_group() -> None:
    kept: Any = replica("momentum", ["averages"])
    with pytest.raises(NonFiniteError, match="the loss is"):
        kept.train(tuple(column * np.float32(1e30) for column in rows(0, 9)), SPEC)
    assert trained(kept, rows(1, 9)) == trained(replica("momentum", ["averages"]), rows(1, 9))

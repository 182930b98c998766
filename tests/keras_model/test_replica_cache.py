"""The cache of replicas: a reused replica trains like a new one, to the bit; other replicas are not reused."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from io import BytesIO
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from support.training.small_classifier import batches, mini, weights

from distkeras.data.batches import Batch
from distkeras.keras_model import archive
from distkeras.keras_model.recipe import Recipe, recipe_of
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.replica_cache import ReplicaCache, fingerprint


def network(optimizer: Any = "sgd", *, loss: Any = "sparse_categorical_crossentropy", units: int = 7) -> keras.Model:
    """Return a model with all kinds of state: weights, seeds, moving averages, a frozen layer, metrics."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(units, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.5, seed=3),
            layers.Dense(5, trainable=False),
            layers.Dense(3, activation="softmax"),
        ],
        name="network",
    )
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def packed(model: keras.Model) -> tuple[Recipe, bytes]:
    file = archive.to_bytes(model)
    return recipe_of(model, file), file


def load_first(replica: KerasReplica, start: np.ndarray) -> None:
    """Load a center as a worker does before its first step."""
    replica.load(start)
    replica.load_moving_statistics(np.zeros(replica.moving_statistics.size, np.float32))


def trained(replica: KerasReplica, start: np.ndarray, data: list[Batch]) -> tuple[np.ndarray, ...]:
    load_first(replica, start)
    rows = replica.train(data)
    statistics = np.empty(replica.moving_statistics.size, np.float32)
    replica.read_moving_statistics(statistics)
    return rows, weights(replica), statistics


def gradients(replica: KerasReplica, start: np.ndarray, data: list[Batch]) -> tuple[np.ndarray, ...]:
    load_first(replica, start)
    out = np.empty((len(data), replica.size), np.float32)
    return np.stack([replica.gradient(batch, row) for batch, row in zip(data, out, strict=True)]), out


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam on a schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "averaging": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "a copy of the weights": lambda: keras.optimizers.ScheduleFreeAdamW(0.1),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), dynamic_growth_steps=2),
}


@pytest.mark.parametrize(
    ("optimizer", "run"),
    [
        *(
            pytest.param(optimizer, trained, id=name, marks=[pytest.mark.slow] * (name != "loss scale"))
            for name, optimizer in OPTIMIZERS.items()
        ),
        *(
            pytest.param(optimizer, gradients, id=f"{name}, gradients", marks=[pytest.mark.slow] * (name != "adagrad"))
            for name, optimizer in OPTIMIZERS.items()
        ),
    ],
)
def test_a_second_use_equals_the_first_to_the_bit(optimizer: Callable[[], Any], run: Callable[..., Any]) -> None:
    recipe, file = packed(network(optimizer()))
    data, cache = batches(5), ReplicaCache()
    with cache.lent(recipe, file) as first:
        start = np.random.default_rng(0).normal(size=first.size).astype(np.float32)
        expected = run(first, start, data)
    with cache.lent(recipe, file) as second:
        assert second is first
        found = run(second, start, data)
    new = run(KerasReplica(recipe.build(file)), start, data)
    for one, other, third in zip(expected, found, new, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, third)


def test_a_replica_has_one_user_at_a_time() -> None:
    recipe, file = packed(network())
    cache = ReplicaCache()
    with cache.lent(recipe, file) as first, cache.lent(recipe, file) as second:
        assert first is not second


def test_a_replica_is_not_kept_after_an_exception() -> None:
    recipe, file = packed(network())
    cache = ReplicaCache()
    with pytest.raises(ZeroDivisionError), cache.lent(recipe, file) as first:
        raise ZeroDivisionError
    with cache.lent(recipe, file) as second:
        assert second is not first


@pytest.mark.parametrize(
    "other",
    [
        lambda: network("adam"),
        lambda: network(loss="mse"),
        pytest.param(lambda: network(units=8), marks=pytest.mark.slow),
        pytest.param(
            lambda: network(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5))),
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda: network(keras.optimizers.SGD(0.01, momentum=0.9)), marks=pytest.mark.slow),
    ],
    ids=["optimizer", "loss", "layer", "schedule", "momentum"],
)
def test_another_model_or_compilation_has_another_replica(other: Callable[[], keras.Model]) -> None:
    cache = ReplicaCache()
    with cache.lent(*packed(network())) as first:
        pass
    with cache.lent(*packed(other())) as second:
        assert second is not first


@pytest.mark.parametrize("wrapped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_another_learning_rate_is_set(wrapped: bool) -> None:
    """The rate of a wrapped optimizer cannot be set from outside, so such a replica is built again."""

    def model(rate: float) -> keras.Model:
        found = keras.Sequential([keras.Input((6,)), layers.Dense(7), layers.Dropout(0.5, seed=3), layers.Dense(3)])
        optimizer = keras.optimizers.Adam(rate)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        found.compile(keras.optimizers.LossScaleOptimizer(optimizer) if wrapped else optimizer, loss)
        return found

    data, cache = batches(5), ReplicaCache()
    with cache.lent(*packed(model(0.01))) as first:
        start = np.random.default_rng(0).normal(size=first.size).astype(np.float32)
        trained(first, start, data)
    recipe, file = packed(model(0.3))
    with cache.lent(recipe, file) as second:
        assert (second is first) is not wrapped
        found = trained(second, start, data)
    new = trained(KerasReplica(recipe.build(file)), start, data)
    for one, other in zip(found, new, strict=True):
        np.testing.assert_array_equal(one, other)
    with cache.lent(*packed(model(0.01))) as third:
        assert third.learning_rate == np.float32(0.01)


def shared(units: int, swapped: bool) -> keras.Model:
    """Return a model with a shared layer, a wrapped layer, and an inner model."""
    x = keras.Input((6, units))
    dense = layers.Dense(units)
    inner = keras.Sequential([layers.Bidirectional(layers.LSTM(units)), layers.Dense(3, activation="softmax")])
    first, second = dense(x), layers.Dense(units)(x)
    parts = [second, dense(first)] if swapped else [dense(first), second]
    model = keras.Model(x, inner(layers.Subtract()(parts)))
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.slow
def test_a_model_that_is_built_again_has_the_same_replica() -> None:
    """The names that Keras assigns to the model and its layers make no difference."""
    cache = ReplicaCache()
    with cache.lent(*packed(shared(4, swapped=False))) as first:
        pass
    again = shared(4, swapped=False)
    assert again.name != first.model.name
    with cache.lent(*packed(again)) as second:
        assert second is first
    with cache.lent(*packed(shared(4, swapped=True))) as third:
        assert third is not first
    with cache.lent(*packed(shared(5, swapped=True))) as fourth:
        assert fourth is not third


def two_headed() -> keras.Model:
    x = keras.Input((6,))
    model = keras.Model(x, [layers.Dense(3)(x), layers.Dense(1)(x)])
    model.compile("sgd", ["mse", "mse"], metrics=[["mae"], ["mae"]])
    return model


def test_names_matter_if_metrics_are_named_after_them() -> None:
    cache = ReplicaCache()
    one = two_headed()
    with cache.lent(*packed(one)) as first:
        pass
    with cache.lent(*packed(one)) as second:
        assert second is first
    with cache.lent(*packed(two_headed())) as third:
        assert third is not first


def test_sharing_a_layer_matters() -> None:
    """Two layers with equal settings differ from one layer that is used twice."""

    def model(once: bool) -> keras.Model:
        x = keras.Input((6,))
        dense = layers.Dense(6)
        found = keras.Model(x, (dense if once else layers.Dense(6))(dense(x)))
        found.compile("sgd", "mse")
        return found

    cache = ReplicaCache()
    with cache.lent(*packed(model(once=True))) as first:
        pass
    with cache.lent(*packed(model(once=False))) as second:
        assert second is not first


def test_weights_that_are_not_in_the_center_are_the_models_own() -> None:
    model, cache = network(), ReplicaCache()
    with cache.lent(*packed(model)) as first:
        pass
    frozen = model.layers[-2]
    frozen.set_weights([weight + 1 for weight in frozen.get_weights()])
    with cache.lent(*packed(model)) as second:
        assert second is first
        np.testing.assert_array_equal(second.model.layers[-2].get_weights()[0], frozen.get_weights()[0])


def test_weights_that_are_in_the_center_may_differ() -> None:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    model.compile("sgd", "mse")
    cache = ReplicaCache()
    with cache.lent(*packed(model)) as first:
        pass
    model.set_weights([weight + 1 for weight in model.get_weights()])
    with cache.lent(*packed(model)) as second:
        assert second is first


def mean_of_scores(_: Any, scores: Any) -> Any:
    return keras.ops.mean(scores)


def custom(kind: str) -> keras.Model:
    if kind == "loss":
        return network(loss=mean_of_scores)
    if kind == "metric":
        model = network()
        model.compile("sgd", "mse", metrics=[mean_of_scores])
        return model
    own = type("Own", (layers.Layer,), {"call": lambda self, x: 2 * x})
    keras.saving.register_keras_serializable("replica_cache")(own)
    model = keras.Sequential([keras.Input((6,)), own(), layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("kind", ["loss", "metric", "layer"])
def test_a_replica_with_custom_code_is_built_again(kind: str) -> None:
    recipe, file = packed(custom(kind))
    cache = ReplicaCache()
    with cache.lent(recipe, file) as first:
        pass
    with cache.lent(recipe, file) as second:
        assert second is not first


@pytest.mark.slow
def test_state_that_is_initialized_from_weights_uses_the_loaded_weights() -> None:
    recipe, file = packed(network(keras.optimizers.ScheduleFreeAdamW(0.1)))
    data, cache, draw = batches(5), ReplicaCache(), np.random.default_rng(0)
    with cache.lent(recipe, file) as first:
        trained(first, draw.normal(size=first.size).astype(np.float32), data)
    start = draw.normal(size=first.size).astype(np.float32)
    with cache.lent(recipe, file) as second:
        assert second is first
        found = trained(second, start, data)
    new = trained(KerasReplica(recipe.build(file)), start, data)
    for one, other in zip(found, new, strict=True):
        np.testing.assert_array_equal(one, other)


def named(optimizer: Any, *names: str, **options: Any) -> keras.Model:
    inner = [layers.Dense(6, name=name, **options) for name in names]
    model = keras.Sequential([keras.Input((6,)), *inner, layers.Dense(3, "softmax")])
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


def test_names_matter_if_an_optimizer_reads_them() -> None:
    cache, muon = ReplicaCache(), lambda: keras.optimizers.Muon(0.1, exclude_layers=["block_1"])
    with cache.lent(*packed(named(muon(), "block_1", "block_2"))) as first:
        pass
    with cache.lent(*packed(named(muon(), "block_2", "block_1"))) as second:
        assert second is not first


def test_names_matter_if_a_setting_mentions_them() -> None:
    model = named("sgd", "block_1", "block_2")
    recipe, file = packed(model)
    with zipfile.ZipFile(BytesIO(file)) as opened:
        text = opened.read("config.json").decode()
    swapped = text.replace("block_1", "block_0").replace("block_2", "block_1").replace("block_0", "block_2")

    def digest(text: str, settings: dict[str, Any]) -> bytes | None:
        config = json.loads(text)
        config["config"]["layers"][1]["config"].update(settings)
        return fingerprint(recipe, config, model)

    assert digest(text, {}) == digest(swapped, {})
    for settings in ({"policies": {"block_1": "float16"}}, {"other": "network/block_1/kernel"}):
        assert digest(text, settings) != digest(swapped, settings)


def test_words_in_names_matter_and_numbers_do_not() -> None:
    cache = ReplicaCache()
    with cache.lent(*packed(named("sgd", "block_1", "block_2"))) as first:
        pass
    with cache.lent(*packed(named("sgd", "block_3", "block_4"))) as second:
        assert second is first
    with cache.lent(*packed(named("sgd", "block_1", "part_2"))) as third:
        assert third is not first


@pytest.mark.slow
def test_labels_of_another_shape_rebuild_the_metrics() -> None:
    """The meaning of "accuracy" depends on the labels."""
    recipe, file = packed(network(loss="mse"))
    x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    one_hot, numbers = np.eye(3, dtype=np.float32)[np.arange(8) % 3], (np.arange(8) % 3).astype(np.float32)[:, None]
    cache = ReplicaCache()
    with cache.lent(recipe, file) as first:
        start = np.random.default_rng(0).normal(size=first.size).astype(np.float32)
        trained(first, start, [mini((x,), (one_hot,))])
    with cache.lent(recipe, file) as second:
        found = trained(second, start, [mini((x,), (numbers,))])
    new = trained(KerasReplica(recipe.build(file)), start, [mini((x,), (numbers,))])
    for one, other in zip(found, new, strict=True):
        np.testing.assert_array_equal(one, other)


def test_settings_of_keras_matter() -> None:
    cache, before = ReplicaCache(), keras.config.epsilon()
    with cache.lent(*packed(network())) as first:
        pass
    try:
        keras.config.set_epsilon(1e-3)
        with cache.lent(*packed(network())) as second:
            assert second is not first
    finally:
        keras.config.set_epsilon(before)


def test_the_seed_of_unseeded_dropout_is_drawn_for_each_job() -> None:
    model = keras.Sequential([keras.Input((6,)), layers.Dropout(0.5), layers.Dense(3)])
    model.compile("sgd", "mse")
    recipe, file = packed(model)
    cache, seeds = ReplicaCache(), []
    for _ in range(2):
        with cache.lent(recipe, file) as replica:
            seeds.append(np.array(replica.model.layers[0].seed_generator.state))
    assert (seeds[0] != seeds[1]).any()


def test_a_large_replica_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distkeras.keras_model.replica_cache._BYTES_MAX", 0)
    recipe, file = packed(network())
    cache = ReplicaCache()
    with cache.lent(recipe, file) as first:
        pass
    with cache.lent(recipe, file) as second:
        assert second is not first

"""The replica compared with plain Keras: the same mini-batches result in the same weights and losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from keras import layers
from support.cases import examples
from support.training.small_classifier import ROWS, batches, classifier, mini, weights

from distkeras.data.batches import Batch
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.variables import VariableVector
from distkeras.ml.evaluation import metric_states
from distkeras.ps.errors import ConfigurationError, LocalProtocolError

needs_compiled_steps = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="compiled steps are TensorFlow's"
)


def train_with_keras(model: keras.Model, data: list[Batch]) -> list[dict[str, float]]:
    """Train with Keras itself on the same mini-batches, and return the logs of each."""
    rows = []
    for batch in data:
        x = batch.x[0] if len(batch.x) == 1 else list(batch.x)
        y = batch.y[0] if len(batch.y) == 1 else list(batch.y)
        model.reset_metrics()
        logs = model.train_on_batch(x, y, sample_weight=batch.weight, return_dict=True)
        rows.append({name: float(value) for name, value in logs.items()})
    return rows


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16", "bfloat16"])
def test_the_movement_is_the_difference_to_the_bit(precision: str) -> None:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(5, dtype=precision), layers.Dense(2, dtype=precision)])
    model.compile("sgd", "mse")
    replica = KerasReplica(model)
    since = np.random.default_rng(1).normal(size=replica.size).astype(np.float32)
    moved = np.full(replica.size, np.nan, np.float32)
    replica.moved(since, moved)
    np.testing.assert_array_equal(moved, weights(replica) - since)


def bits(numbers: np.ndarray) -> bytes:
    """Return the bits of numbers, the same for any NaN: a cast to half precision may change those of a NaN."""
    return np.where(np.isnan(numbers), np.array(np.nan, numbers.dtype), numbers).tobytes()


@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from(["float32", "mixed_float16", "float16", "bfloat16"]))
@examples(12)
def test_vectors_are_loaded_and_read_as_keras_assigns_each_variable(seed: int, dtype: str) -> None:
    """To the bit for any numbers: signed zeros, subnormal numbers, infinities and NaN are among them."""
    built = keras.Sequential([keras.Input((3,)), layers.Dense(4, dtype=dtype), layers.Dense(2, dtype=dtype)])
    vector, variables = VariableVector(built.trainable_variables), built.trainable_variables
    chance = np.random.default_rng(seed)
    loaded = chance.integers(0, 2**32, vector.layout.size, dtype=np.uint32).view(np.float32)
    loaded[:5] = 0.0, -0.0, 1e-42, np.inf, np.nan
    before = chance.normal(size=loaded.shape).astype(np.float32)
    with np.errstate(all="ignore"):
        for variable, values in zip(variables, vector.layout.views(loaded), strict=True):
            variable.assign(values.copy())
    expected = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
    for variable in variables:
        variable.assign(np.zeros(variable.shape, np.float32))
    read, moved = np.empty_like(loaded), np.empty_like(loaded)
    with np.errstate(all="ignore"):
        vector.load(loaded)
        vector.read(read)
        vector.moved(before, moved)
        for place, (known, variable) in enumerate(zip(expected, variables, strict=True)):
            assert bits(keras.ops.convert_to_numpy(variable)) == bits(known)
            assert bits(vector.layout.views(read)[place]) == bits(known.astype(np.float32))
            difference = known.astype(np.float32) - vector.layout.views(before)[place]
            np.testing.assert_array_equal(vector.layout.views(moved)[place], difference)


def assert_same_training(build: Callable[..., Any], data: list[Batch]) -> KerasReplica:
    model = build()
    expected = train_with_keras(model, data)
    replica = KerasReplica(build())
    rows = replica.train(data)
    assert rows.dtype == np.float64
    assert set(replica.metric_names) == set(expected[0])
    ordered = [[logs[name] for name in replica.metric_names] for logs in expected]
    np.testing.assert_allclose(rows, ordered, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(weights(replica), weights(KerasReplica(model)), rtol=2e-6, atol=1e-6)
    return replica


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda: keras.optimizers.SGD(0.1, momentum=0.9), marks=pytest.mark.slow),
        lambda: keras.optimizers.Adam(0.01),
    ],
)
def test_train_equals_train_on_batch(optimizer: Callable[..., Any]) -> None:
    replica = assert_same_training(lambda: classifier(optimizer()), batches(5))
    assert replica.metric_names == ("loss", "accuracy")
    assert replica.size == 6 * 8 + 8 + 8 * 3 + 3


@pytest.mark.slow
def test_a_window_equals_single_steps_with_a_short_last_batch() -> None:
    data = [*batches(5), *batches(1, rows=7, seed=2), *batches(2, seed=3)]
    many, single = KerasReplica(classifier("adam")), KerasReplica(classifier("adam"))
    together = many.train(data)
    apart = np.concatenate([single.train([batch]) for batch in data])
    np.testing.assert_allclose(together, apart, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(weights(many), weights(single), rtol=1e-6, atol=1e-7)
    assert many.train([]).shape == (0, 2)


@pytest.mark.slow
def test_a_long_window_is_split_to_fit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distkeras.keras_model.compiled_steps.CALL_BYTES_MAX", 2 * (ROWS * 6 * 4 + ROWS * 8))
    assert_same_training(classifier, batches(5))


@pytest.mark.slow
def test_sample_weights_equal_those_of_keras() -> None:
    data = batches(4, weighted=True)
    replica = assert_same_training(lambda: classifier(weighted_metrics=["accuracy"], metrics=None), data)
    unweighted = KerasReplica(classifier()).train([dataclasses.replace(batch, weight=None) for batch in data])
    assert not np.allclose(replica.train(data)[:, 0], unweighted[:, 0])


def two_inputs_and_outputs(as_dict: bool = False) -> keras.Model:
    keras.utils.set_random_seed(4)
    left, right = keras.Input((3,), name="left"), keras.Input((2, 2), name="right")
    joined = layers.Concatenate()([left, layers.Flatten()(right)])
    score, kind = layers.Dense(1, name="score")(joined), layers.Dense(3, name="kind")(joined)
    inputs = {"right": right, "left": left} if as_dict else [left, right]
    outputs = {"score": score, "kind": kind} if as_dict else [score, kind]
    model = keras.Model(inputs, outputs)
    losses = {"score": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    model.compile("sgd", loss=losses, metrics={"kind": ["accuracy"]})
    return model


def data_of_two_inputs_and_outputs(weighted: bool) -> list[Batch]:
    draw = np.random.default_rng(5)
    return [
        mini(
            (draw.normal(size=(ROWS, 3)).astype("float32"), draw.normal(size=(ROWS, 2, 2)).astype("float32")),
            (draw.normal(size=(ROWS, 1)).astype("float32"), draw.integers(0, 3, ROWS)),
            draw.uniform(0.5, 2, ROWS).astype("float32") if weighted else None,
        )
        for _ in range(3)
    ]


@pytest.mark.slow
def test_several_inputs_and_outputs_equal_keras() -> None:
    replica = assert_same_training(two_inputs_and_outputs, data_of_two_inputs_and_outputs(True))
    assert set(replica.metric_names) == {"loss", "score_loss", "kind_loss", "kind_accuracy"}
    assert replica.metric_names[0] == "loss"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # JAX computes with 32 bits
def test_losses_of_outputs_are_means_over_rows_for_any_size_of_batch() -> None:
    whole = data_of_two_inputs_and_outputs(True)[0]
    replica, most = KerasReplica(two_inputs_and_outputs()), whole.size - 1  # the last mini-batch has one row
    expected = replica.evaluate(whole, whole.size)
    assert {"score_loss", "kind_loss"} < expected.keys()
    assert replica.evaluate(whole, most) == pytest.approx(expected, rel=1e-5)
    parts = [dataclasses.replace(whole, **_rows_of(whole, rows)) for rows in (slice(0, most), slice(most, None))]
    states = np.sum([metric_states(replica.model, part) for part in parts], axis=0)
    np.testing.assert_allclose(states, metric_states(replica.model, whole), rtol=1e-5)


def _rows_of(batch: Batch, rows: slice) -> dict[str, Any]:
    weight = None if batch.weight is None else batch.weight[rows]
    return {"x": tuple(a[rows] for a in batch.x), "y": tuple(a[rows] for a in batch.y), "weight": weight}


@pytest.mark.slow
def test_dict_inputs_and_outputs_are_filled_in_model_order() -> None:
    model, data = two_inputs_and_outputs(as_dict=True), data_of_two_inputs_and_outputs(False)
    by_name = [dict(zip(("left", "right", "score", "kind"), (*b.x, *b.y), strict=True)) for b in data]
    expected = []
    for named in by_name:
        x = {name: named[name] for name in ("left", "right")}
        y = {name: named[name] for name in ("score", "kind")}
        model.reset_metrics()
        expected.append(model.train_on_batch(x, y, return_dict=True)["loss"])
    twin = two_inputs_and_outputs(as_dict=True)
    order_in, order_out = [i.name for i in twin.inputs], list(twin.output_names)
    ordered = [mini(tuple(named[n] for n in order_in), tuple(named[n] for n in order_out)) for named in by_name]
    replica = KerasReplica(twin)
    np.testing.assert_allclose(replica.train(ordered)[:, 0], expected, rtol=2e-6)


def test_an_eager_and_a_subclassed_model_equal_keras() -> None:
    assert_same_training(lambda: classifier(run_eagerly=True), batches(2))

    def subclassed() -> Subclassed:
        keras.utils.set_random_seed(6)
        model = Subclassed()
        model(np.zeros((1, 6), np.float32))
        model.compile("sgd", loss="sparse_categorical_crossentropy")
        return model

    assert_same_training(subclassed, batches(3))


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3, activation="softmax")

    def call(self, x: Any) -> Any:
        return self.dense(x)


def test_moving_statistics_are_separate_from_the_vector() -> None:
    def build() -> keras.Model:
        return classifier("sgd", layers.BatchNormalization(momentum=0.5), layers.Dropout(0.0))

    replica = assert_same_training(build, batches(3))
    assert [name.rsplit("/", 1)[1] for name in replica.moving_statistics.names] == ["moving_mean", "moving_variance"]
    moved = replica.moving_statistics.empty()
    replica.read_moving_statistics(moved)
    assert not np.allclose(moved[:8], 0)
    replica.load_moving_statistics(np.arange(16, dtype=np.float32))
    replica.read_moving_statistics(moved)
    np.testing.assert_array_equal(moved, np.arange(16))
    before = moved.copy()
    replica.gradient(batches(1)[0], replica.layout.empty())
    replica.read_moving_statistics(moved)
    assert not np.array_equal(moved, before)


@pytest.mark.slow
def test_other_state_is_in_neither_vector() -> None:
    frozen = layers.Dense(8)
    model = classifier("sgd", frozen, layers.BatchNormalization(trainable=False), layers.Dropout(0.5))
    frozen.trainable = False
    model.compile("sgd", loss="sparse_categorical_crossentropy")
    replica = KerasReplica(model)
    assert replica.moving_statistics.size == 0
    assert len(replica.layout.names) == 4
    kernel = np.array(frozen.kernel)
    replica.train(batches(3))
    replica.load(np.zeros(replica.size, np.float32))
    np.testing.assert_array_equal(np.array(frozen.kernel), kernel)

    recurrent = keras.Sequential(
        [keras.Input((4, 2), batch_size=3), layers.Normalization(), layers.LSTM(3, stateful=True), layers.Dense(1)]
    )
    recurrent.compile("sgd", loss="mse")
    assert KerasReplica(recurrent).moving_statistics.size == 0


def test_dropout_draws_in_each_step_as_keras_does() -> None:
    assert_same_training(lambda: classifier("sgd", layers.Dropout(0.5, seed=3)), batches(4))
    (batch,) = batches(1)
    replica = KerasReplica(classifier(keras.optimizers.SGD(0.0), layers.Dropout(0.5, seed=3)))
    losses = replica.train([batch] * 4)[:, 0]
    assert len(set(losses)) == 4


@pytest.mark.parametrize(
    "policy",
    [pytest.param("mixed_float16", marks=pytest.mark.slow), pytest.param("mixed_bfloat16", marks=pytest.mark.slow)],
)
def test_mixed_precision_equals_keras(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    try:
        optimizer = keras.optimizers.SGD(0.1)
        data = batches(3)
        expected = classifier(optimizer)
        train_with_keras(expected, data)
        replica = KerasReplica(classifier(keras.optimizers.SGD(0.1)))
        start = weights(replica)
        assert replica.learning_rate == pytest.approx(0.1)
        gradient = np.full(replica.size, np.nan, np.float32)
        replica.gradient(data[0], gradient)
        np.testing.assert_array_equal(weights(replica), start)
        replica.train(data[:1])
        np.testing.assert_allclose(gradient, (start - weights(replica)) / 0.1, atol=5e-3)
        replica.train(data[1:])
        np.testing.assert_allclose(weights(replica), weights(KerasReplica(expected)), atol=2e-3)
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(
    "dtype", [pytest.param("float64", marks=pytest.mark.slow), pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def test_other_precisions_are_cast_on_load_and_read(dtype: str) -> None:
    if dtype == "float64" and keras.backend.backend() == "jax":
        pytest.skip("JAX has no float64 unless it is enabled at its start")
    replica = KerasReplica(classifier("sgd", dtype=dtype))
    vector = np.linspace(-1, 1, replica.size, dtype=np.float32)
    replica.load(vector)
    np.testing.assert_allclose(weights(replica), vector, atol=4e-3 if dtype == "bfloat16" else 0)
    assert np.isfinite(replica.train(batches(2))).all()
    out = np.full(replica.size, np.nan, np.float32)
    replica.gradient(batches(1)[0], out)
    assert np.isfinite(out).all()


def test_loaded_values_are_read_back_and_share_no_memory() -> None:
    replica = KerasReplica(classifier())
    vector = np.random.default_rng(8).normal(size=replica.size).astype(np.float32)
    kept = vector.copy()
    replica.load(vector)
    vector.fill(np.nan)
    np.testing.assert_array_equal(weights(replica), kept)
    seen = weights(replica)
    replica.train(batches(2))
    np.testing.assert_array_equal(seen, kept)
    assert not np.array_equal(weights(replica), kept)
    for bad in (np.zeros(replica.size + 1, np.float32), np.zeros((replica.size, 1), np.float32)):
        with pytest.raises(ConfigurationError, match="shape"):
            replica.load(bad)


@pytest.mark.slow
def test_scalar_weight_is_part_of_the_vector() -> None:
    class Gain(layers.Layer):
        def build(self, shape: tuple[None, int]) -> None:
            self.gain = self.add_weight(shape=(), initializer="ones")

        def call(self, x: Any) -> Any:
            return x * self.gain

    replica = assert_same_training(lambda: classifier("sgd", Gain()), batches(2))
    assert () in replica.layout.shapes


@pytest.mark.slow
def test_learning_rate_follows_its_schedule_for_steps_and_for_gradients() -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2, 4], [0.4, 0.2, 0.1])
    replica = KerasReplica(classifier(keras.optimizers.SGD(schedule)))
    data = batches(3)
    assert replica.learning_rate == pytest.approx(0.4)
    replica.train(data)
    assert replica.learning_rate == pytest.approx(0.2)
    for batch in data:
        replica.gradient(batch, replica.layout.empty())
    assert replica.learning_rate == pytest.approx(0.1)


@needs_compiled_steps
def test_one_trace_serves_every_number_of_steps_and_batch_size() -> None:
    traces = []

    class Counting(keras.Sequential):
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            traces.append(1)
            return super().compute_loss(*args, **options)

    keras.utils.set_random_seed(1)
    model = Counting([keras.Input((6,)), layers.Dense(3, activation="softmax")])
    model.compile("sgd", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    replica = KerasReplica(model)
    replica.prepare(batches(1)[0])
    traces.clear()
    for count in (3, 1, 7, 2):
        for rows in (16, 5, 1):
            replica.train(batches(count, rows=rows))
    assert len(traces) == 1
    for rows in (16, 5):
        replica.gradient(batches(1, rows=rows)[0], replica.layout.empty())
    assert len(traces) == 2
    replica.train(batches(2, weighted=True))
    assert len(traces) == 3


def test_prepare_sets_the_metric_names_and_changes_no_weight() -> None:
    replica = KerasReplica(classifier("adam", layers.BatchNormalization()))
    with pytest.raises(LocalProtocolError, match="metric_names"):
        _ = replica.metric_names
    before = weights(replica)
    zeros = mini((np.zeros((2, 6), np.float32),), (np.zeros(2, np.int64),))
    replica.prepare(zeros)
    assert replica.metric_names == ("loss", "accuracy")
    np.testing.assert_array_equal(weights(replica), before)
    moved = replica.moving_statistics.empty()
    replica.read_moving_statistics(moved)
    np.testing.assert_array_equal(moved, [0.0] * 8 + [1.0] * 8)


def test_labels_that_do_not_fit_are_refused_before_training() -> None:
    wrong = mini((np.zeros((2, 6), np.float32),), (np.zeros((2, 5), np.float32),))
    with pytest.raises(ConfigurationError, match="fit the data"):
        KerasReplica(classifier(loss="categorical_crossentropy")).prepare(wrong)
    one_hot = mini((np.zeros((2, 6), np.float32),), (np.eye(3, dtype=np.float32)[:2],))
    replica = KerasReplica(classifier(loss="mse", metrics=[keras.metrics.F1Score()]))
    replica.prepare(one_hot)
    assert len(replica.metric_names) == 1 + 3, "a metric of an array has a column for each class"


def test_unsuitable_models_are_refused() -> None:
    unbuilt = keras.Sequential([layers.Dense(1)])
    unbuilt.compile("sgd", loss="mse")
    with pytest.raises(ConfigurationError, match="must be built"):
        KerasReplica(unbuilt)
    bare = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    with pytest.raises(ConfigurationError, match="must be compiled"):
        KerasReplica(bare)
    bare.trainable = False
    bare.compile("sgd", loss="mse")
    with pytest.raises(ConfigurationError, match="trainable weights"):
        KerasReplica(bare)


def test_prepare_changes_no_seed_and_no_state() -> None:
    stateful = keras.backend.backend() != "torch"  # Keras cannot train such a layer on PyTorch
    inner = [layers.LSTM(4, stateful=stateful, dropout=0.5, seed=1), layers.BatchNormalization(), layers.Dense(2)]
    model = keras.Sequential([keras.Input(batch_shape=(3, 5, 4)), *inner])
    model.compile("sgd", "mse")
    own = [*model.non_trainable_variables, *(model.layers[0].states if stateful else ())]
    before = [np.array(keras.ops.convert_to_numpy(variable)) for variable in own]
    replica = KerasReplica(model)
    batch = mini((np.ones((3, 5, 4), np.float32),), (np.zeros((3, 2), np.float32),))
    replica.prepare(batch)
    for variable, value in zip(own, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value, err_msg=variable.path)

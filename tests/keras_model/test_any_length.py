"""Models whose rows have any length: the steps of a worker compared with Keras' own on the same padded mini-batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from distkeras.data.batches import Batch, DataSpec, flat_weight
from distkeras.data.columns import Column
from distkeras.data.model_columns import example
from distkeras.data.ordering import EpochOrder
from distkeras.data.padding import compiles_each_length, with_padding
from distkeras.data.rows import RaggedRows
from distkeras.keras_model.compiled_steps import model_inputs, spans
from distkeras.keras_model.replica import KerasReplica

IDS, CLASSES = 20, 3
TOKENS = Column("tokens", (None,), "int32", table=("embedding", IDS))
CURVE = Column("curve", (None, 2))
ALL = Column("fixed", (4,))
CLASS = Column("class", (), "int32", classes=CLASSES)
TAGS = Column("tags", (None,), "int32", classes=CLASSES)
TARGETS = Column("targets", (None, 2))
SPARSE = "sparse_categorical_crossentropy"


def embedded(tokens: Any, **options: Any) -> Any:
    return layers.Embedding(IDS, 6, name="embedding", **options)(tokens)


def by_row(build: Callable[[Any], Any]) -> Callable[[], tuple[keras.Model, DataSpec]]:
    """Return a maker of a model of tokens that gives one class a row."""

    def made() -> tuple[keras.Model, DataSpec]:
        tokens = keras.Input((None,), dtype="int32")
        return keras.Model(tokens, layers.Dense(CLASSES, "softmax")(build(tokens))), DataSpec((TOKENS,), (CLASS,))

    return made


def lstm(tokens: Any) -> Any:
    return layers.LSTM(5)(embedded(tokens, mask_zero=True))


def gru(tokens: Any) -> Any:
    return layers.GRU(5)(embedded(tokens))


def bidirectional(tokens: Any) -> Any:
    return layers.Bidirectional(layers.SimpleRNN(4))(embedded(tokens, mask_zero=True))


def attention(tokens: Any) -> Any:
    steps = embedded(tokens, mask_zero=True)
    steps = layers.LayerNormalization()(steps + layers.MultiHeadAttention(2, 3)(steps, steps))
    return layers.GlobalAveragePooling1D()(steps)


def convolution(tokens: Any) -> Any:
    steps = layers.Conv1D(6, 3, padding="same", activation="relu")(embedded(tokens))
    return layers.GlobalMaxPooling1D()(layers.MaxPooling1D(2, padding="same")(steps))


def normalized(tokens: Any) -> Any:
    return layers.GlobalAveragePooling1D()(layers.BatchNormalization()(embedded(tokens)))


def curves() -> tuple[keras.Model, DataSpec]:
    steps = keras.Input((None, 2))
    hidden = layers.GRU(4)(layers.Masking(0.0)(steps))
    return keras.Model(steps, layers.Dense(1)(hidden)), DataSpec((CURVE,), (Column("y"),))


def two_inputs() -> tuple[keras.Model, DataSpec]:
    tokens, fixed = keras.Input((None,), dtype="int32"), keras.Input((4,))
    hidden = layers.Concatenate()([lstm(tokens), fixed])
    return keras.Model([tokens, fixed], layers.Dense(CLASSES)(hidden)), DataSpec((TOKENS, ALL), (CLASS,))


def two_lengths() -> tuple[keras.Model, DataSpec]:
    tokens, curve = keras.Input((None,), dtype="int32"), keras.Input((None, 2))
    hidden = layers.Concatenate()([gru(tokens), layers.GlobalMaxPooling1D()(layers.Dense(3)(curve))])
    return keras.Model([tokens, curve], layers.Dense(CLASSES)(hidden)), DataSpec((TOKENS, CURVE), (CLASS,))


def tagger() -> tuple[keras.Model, DataSpec]:
    tokens = keras.Input((None,), dtype="int32")
    steps = layers.LSTM(5, return_sequences=True)(embedded(tokens, mask_zero=True))
    return keras.Model(tokens, layers.Dense(CLASSES, "softmax")(steps)), DataSpec((TOKENS,), (TAGS,))


def ignoring_tagger() -> tuple[keras.Model, DataSpec]:
    model, spec = tagger()
    return model, replace(spec, labels=(replace(TAGS, ignored=-1),))


def weighted_steps() -> tuple[keras.Model, DataSpec]:
    curve = keras.Input((None, 2))
    steps = layers.GRU(4, return_sequences=True)(curve)
    return keras.Model(curve, layers.Dense(2)(steps)), DataSpec((CURVE,), (TARGETS,), Column("weight", (None,)))


MODELS = {
    **{build.__name__: by_row(build) for build in (lstm, gru, bidirectional, attention, convolution, normalized)},
    **{build.__name__: build for build in (curves, two_inputs, two_lengths, tagger, ignoring_tagger, weighted_steps)},
}
#: Also with rows of one length, the loop and a single step of Keras differ by rounding.
ROUNDED = (MODELS["attention"], MODELS["normalized"])


def loss_of(spec: DataSpec) -> Any:
    (label,) = spec.targets
    if label.ignored is not None:
        return keras.losses.SparseCategoricalCrossentropy(ignore_class=label.ignored)
    return "mse" if label.classes is None else keras.losses.SparseCategoricalCrossentropy()


def replica_of(build: Callable[[], tuple[keras.Model, DataSpec]], optimizer: Any) -> tuple[KerasReplica, DataSpec]:
    keras.utils.set_random_seed(3)
    model, spec = build()
    model.compile(optimizer, loss_of(spec), weighted_metrics=[])
    spec = with_padding(replace(spec, batch_size=8), None, few=compiles_each_length(model))
    return KerasReplica(model), spec


def rows_of(column: Column, lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray | RaggedRows:
    """Return rows that a column may hold, of these lengths."""
    shape = (lengths.sum() if column.is_open else len(lengths), *column.step_shape)
    if column.dtype == "float32":
        values = rng.uniform(0.1, 1.0, shape).astype(np.float32)
    else:
        values = rng.integers(1 if column.table else 0, IDS if column.table else CLASSES, shape).astype(column.dtype)
    return RaggedRows(values, np.concatenate([[0], np.cumsum(lengths)])) if column.is_open else values


def mini_batches(spec: DataSpec, *, count: int = 83) -> list[Batch]:
    rng = np.random.default_rng(1)
    lengths, others = rng.integers(1, 30, count), rng.integers(1, 12, count)
    several = len([column for column in spec.features if column.is_open]) > 1
    columns = [rows_of(c, others if several and c is CURVE else lengths, rng) for c in spec.columns]
    cuts = list(EpochOrder(spec, 0, 5).cut(tuple(columns), 0, 0))
    return [cut.batch(0, number, number + 1 == len(cuts)) for number, cut in enumerate(cuts)]


def windows(batches: list[Batch]) -> Iterator[list[Batch]]:
    """Yield windows of mini-batches; those of the last one do not share memory."""
    yield batches[:1]
    yield batches[1:6]
    yield [replace(batch) for batch in batches[6:]]


#: The models of the default suite. The others are slow.
BY_DEFAULT = ("gru",)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(build, id=name, marks=[] if name in BY_DEFAULT else [pytest.mark.slow])
        for name, build in MODELS.items()
    ],
)
def test_steps_are_keras_own_on_the_same_mini_batches(build: Callable[[], tuple[keras.Model, DataSpec]]) -> None:
    one, spec = replica_of(build, keras.optimizers.SGD(0.1))
    batches = mini_batches(spec)
    assert len({batch.x[0].shape[1] for batch in batches}) > (1 if compiles_each_length(one.model) else 4)
    one.prepare(example(spec))
    losses = np.concatenate([one.train(window) for window in windows(batches)])[:, 0]
    plain = replica_of(build, keras.optimizers.SGD(0.1))[0].model
    expected = []
    for batch in batches:
        x, y, weight = model_inputs(plain, batch.x, batch.y, batch.weight)
        expected.append(plain.train_on_batch(x, y, sample_weight=weight))
        plain.reset_metrics()
    exact = keras.backend.backend() == "tensorflow" and build not in ROUNDED
    rtol, atol = (0.0, 0.0) if exact else (1e-5, 1e-6)
    np.testing.assert_allclose(losses, np.array(expected, np.float64).reshape(len(batches), -1)[:, 0], rtol, atol)
    for found, known in zip(one.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(found, known, rtol=rtol, atol=atol)


def test_a_window_is_one_call() -> None:
    """Its mini-batches share memory, or are copied together."""
    spec = DataSpec((TOKENS,), (CLASS,), batch_size=8)
    rng = np.random.default_rng(0)
    for lengths, shares in ((np.full(80, 7), True), (np.where(np.arange(80) == 40, 5000, 7), False)):
        columns = tuple(rows_of(column, lengths, rng) for column in spec.columns)
        batches = [cut.batch(0, number, False) for number, cut in enumerate(EpochOrder(spec, 0, 10).cut(columns, 0, 0))]
        ((stack, first, count),) = spans(batches, any_length=True)
        assert (first, count) == (0, 10)
        assert (stack is batches[0].stack) == shares
        assert sum(count for _, _, count in spans(batches)) == 10
        assert len(list(spans(batches))) == len(list(itertools.groupby(batch.x[0].shape for batch in batches)))


class Traced(keras.Model):
    """Counts how often its step is traced."""

    traces = 0

    def train_step(self, *args: Any) -> Any:
        self.traces += 1
        return super().train_step(*args)


def traced() -> tuple[keras.Model, DataSpec]:
    model, spec = MODELS["lstm"]()
    return Traced(model.inputs, model.outputs), spec


@pytest.mark.slow
def test_one_trace_serves_all_lengths() -> None:
    replica, spec = replica_of(traced, keras.optimizers.Adam(0.1))
    batches = mini_batches(spec)
    replica.train(batches[:2])
    before = replica.model.traces
    replica.train(batches[2:])
    again = replica.model.traces - before
    assert again <= (len({batch.x[0].shape for batch in batches}) if compiles_each_length(replica.model) else 0)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lstm, marks=pytest.mark.slow),
        *(pytest.param(build, marks=pytest.mark.slow) for build in (tagger, weighted_steps)),
    ],
)
def test_gradients_are_keras_own(build: Any) -> None:
    build = MODELS[build.__name__]
    replica, spec = replica_of(build, keras.optimizers.SGD(1.0))
    gradient = np.empty(replica.size, np.float32)
    plain = replica_of(build, keras.optimizers.SGD(1.0))[0]
    before = np.empty(replica.size, np.float32)
    plain.read(before)
    for batch in mini_batches(spec)[:3]:
        replica.gradient(batch, gradient)
        plain.load(before)
        x, y, weight = model_inputs(plain.model, batch.x, batch.y, batch.weight)
        plain.model.train_on_batch(x, y, sample_weight=weight)
        after = np.empty(replica.size, np.float32)
        plain.read(after)
        np.testing.assert_allclose(before - gradient, after, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_new_job_of_the_same_kind_keeps_what_was_traced() -> None:
    replica, spec = replica_of(traced, keras.optimizers.SGD(0.1))
    batches = mini_batches(spec)
    replica.train(batches)
    before = replica.model.traces
    assert replica.begin_again(replica_of(traced, keras.optimizers.SGD(0.1))[0].model)
    replica.load(np.zeros(replica.size, np.float32))
    replica.train(batches[3:5])
    assert replica.model.traces == before


def test_labels_and_weights_of_steps_are_padded_with_the_inputs() -> None:
    _, spec = replica_of(MODELS["weighted_steps"], keras.optimizers.SGD(0.1))
    batch = mini_batches(spec)[0]
    assert [array.shape[1] for array in (*batch.x, *batch.y, *flat_weight(batch.weight))] == [batch.x[0].shape[1]] * 3
    (weight,) = flat_weight(batch.weight)
    padded = (batch.x[0] == 0).all(axis=2)
    assert padded.any()
    assert ((weight == 0) == padded).all()

"""Models with tables, mini-batches for them, and their training with whole tables and by rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

from distkeras.data.batches import Batch, DataSpec, Stack
from distkeras.data.columns import Column
from distkeras.keras_model import archive
from distkeras.keras_model.lazy_optimizers import LAZY
from distkeras.keras_model.recipe import Recipe, recipe_of
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.table_replica import RowBatch, TableReplica, WindowRows
from distkeras.keras_model.tables import CutModel, cut
from distkeras.ps.worker.tables import Window

ROWS, SIZE, WINDOW, BATCHES = 3000, 16, 3, 31
#: The number of rows of the second table.
OTHER_ROWS = 2500

Draw = Callable[[np.random.Generator, int], tuple[Sequence[np.ndarray], Sequence[np.ndarray]]]


class Case(NamedTuple):
    """A model, and the function that draws its inputs and targets for a number of rows."""

    model: Callable[[], keras.Model]
    draw: Draw


def compiled(model: keras.Model, optimizer: Any = None, loss: Any = "mse", **options: Any) -> keras.Model:
    model.compile(optimizer or keras.optimizers.SGD(0.5), loss, **options)
    return model


def skewed(draw: np.random.Generator, rows: int, each: int, below: int = ROWS) -> np.ndarray:
    """Draw ids, some of which are frequent and occur twice in a mini-batch."""
    often = draw.integers(0, 9, (rows, each))
    return np.where(draw.random((rows, each)) < 0.4, often, draw.integers(0, below, (rows, each))).astype(np.int32)


def numbers(draw: np.random.Generator, rows: int, width: int = 1) -> np.ndarray:
    return draw.normal(size=(rows, width)).astype(np.float32)


def ids_and_target(draw: np.random.Generator, rows: int) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    return (skewed(draw, rows, 4),), (numbers(draw, rows),)


def ids_extra_and_target(draw: np.random.Generator, rows: int) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    return (skewed(draw, rows, 4), numbers(draw, rows, 3)), (numbers(draw, rows),)


def head(hidden: Any) -> Any:
    return layers.Dense(1, name="out")(layers.Dense(6, activation="tanh", name="hidden")(hidden))


def one_table(optimizer: Any = None, **table: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    ids = keras.Input((4,), dtype="int32", name="ids")
    joined = layers.SimpleRNN(5) if table.get("mask_zero") else layers.Flatten()  # The mean of nothing is NaN.
    model = keras.Model(ids, head(joined(layers.Embedding(ROWS, 8, name="table", **table)(ids))))
    return compiled(model, optimizer, metrics=["mae"])


def extra_input(optimizer: Any = None) -> keras.Model:
    keras.utils.set_random_seed(1)
    ids, extra = keras.Input((4,), dtype="int32", name="ids"), keras.Input((3,), name="extra")
    flat = layers.Flatten()(layers.Embedding(ROWS, 8, name="table")(ids))
    return compiled(keras.Model([ids, extra], head(layers.Concatenate()([flat, extra]))), optimizer)


def two_calls(optimizer: Any = None) -> keras.Model:
    keras.utils.set_random_seed(1)
    first, second = (keras.Input((2,), dtype="int32", name=name) for name in ("first", "second"))
    table = layers.Embedding(ROWS, 8, name="table")
    parts = [layers.Flatten(name=f"flat_{n}")(table(ids)) for n, ids in enumerate((second, first, second))]
    return compiled(keras.Model([first, second], head(layers.Concatenate()(parts))), optimizer)


def two_id_inputs(draw: np.random.Generator, rows: int) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    return (skewed(draw, rows, 2, OTHER_ROWS), skewed(draw, rows, 2)), (numbers(draw, rows),)


def two_tables(optimizer: Any = None) -> keras.Model:
    keras.utils.set_random_seed(1)
    first, second = (keras.Input((2,), dtype="int32", name=name) for name in ("first", "second"))
    parts = [
        layers.Flatten()(layers.Embedding(OTHER_ROWS, 5, name="narrow")(first)),
        layers.Flatten()(layers.Embedding(ROWS, 8, name="wide")(second)),
    ]
    return compiled(keras.Model([first, second], head(layers.Concatenate()(parts))), optimizer)


def wide_and_deep(optimizer: Any = None) -> keras.Model:
    """Return a model with two tables that are looked up by the same tensor."""
    keras.utils.set_random_seed(1)
    ids = keras.Input((4,), dtype="int32", name="ids")
    wide = layers.Flatten()(layers.Embedding(ROWS, 1, name="wide")(ids))
    deep = head(layers.Flatten()(layers.Embedding(ROWS, 8, name="deep")(ids)))
    return compiled(keras.Model(ids, layers.Dense(1)(layers.Concatenate()([wide, deep]))), optimizer)


def slices(optimizer: Any = None) -> keras.Model:
    keras.utils.set_random_seed(1)
    ids = keras.Input((4,), dtype="int32", name="ids")
    table, other = layers.Embedding(ROWS, 8, name="table"), layers.Embedding(ROWS, 3, name="other")
    parts = [layers.Flatten()(part) for part in (table(ids[:, :1]), table(ids[:, 1:3]), other(ids[:, 3:]))]
    return compiled(keras.Model(ids, head(layers.Concatenate()(parts))), optimizer)


def masked(layer: Callable[[], Any], optimizer: Any = None) -> keras.Model:
    keras.utils.set_random_seed(1)
    ids = keras.Input((4,), dtype="int32", name="ids")
    return compiled(
        keras.Model(ids, head(layer()(layers.Embedding(ROWS, 8, mask_zero=True, name="table")(ids)))), optimizer
    )


def float_ids(optimizer: Any = None) -> keras.Model:
    keras.utils.set_random_seed(1)
    ids = keras.Input((4,), name="ids")
    return compiled(keras.Model(ids, head(layers.Flatten()(layers.Embedding(ROWS, 8, name="table")(ids)))), optimizer)


def float_ids_and_target(draw: np.random.Generator, rows: int) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    return (skewed(draw, rows, 4).astype(np.float32),), (numbers(draw, rows),)


def long_ids_and_target(draw: np.random.Generator, rows: int) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    return (skewed(draw, rows, 4).astype(np.int64),), (numbers(draw, rows),)


def sequential(optimizer: Any = None) -> keras.Model:
    keras.utils.set_random_seed(1)
    stack = [
        keras.Input((4,), dtype="int32"),
        layers.Embedding(ROWS, 8, name="table"),
        layers.Flatten(),
        layers.BatchNormalization(),
        layers.Dropout(0.25, seed=4),
        layers.Dense(1),
    ]
    return compiled(keras.Sequential(stack), optimizer, metrics=["mae"])


def tower_of_two_inputs(called: Callable[[Any, Any, Any], Any] = lambda inner, ids, extra: inner([ids, extra])) -> Any:
    """Return a model whose inner model, which is ``called`` with its inputs, has the table."""
    keras.utils.set_random_seed(3)
    own, numbers_too = keras.Input((4,), dtype="int32"), keras.Input((3,))
    joined = layers.Concatenate()([layers.Flatten()(layers.Embedding(ROWS, 8, name="table")(own)), numbers_too])
    inner = keras.Model([own, numbers_too], layers.Dense(4, name="within")(joined), name="inner")
    ids, extra = keras.Input((4,), dtype="int32", name="ids"), keras.Input((3,), name="extra")
    return compiled(keras.Model([ids, extra], head(called(inner, ids, extra))))


def sequential_mask() -> keras.Model:
    keras.utils.set_random_seed(1)
    stack = [
        keras.Input((4,), dtype="int32"),
        layers.Embedding(ROWS, 8, mask_zero=True, name="table"),
        layers.LSTM(5),
        layers.Dense(1),
    ]
    return compiled(keras.Sequential(stack))


def table_as_output() -> keras.Model:
    """Return a model one of whose outputs is what the table returns, and another a value of an input."""
    keras.utils.set_random_seed(1)
    ids, extra = keras.Input((4,), dtype="int32", name="ids"), keras.Input((3,), name="extra")
    vectors = layers.Embedding(ROWS, 8, name="table")(ids)
    hidden = layers.Concatenate()([layers.Flatten()(vectors), extra])
    model = keras.Model([ids, extra], {"table": vectors, "out": head(hidden)})
    return compiled(model, loss={"table": "mse", "out": "mse"}, metrics={"table": ["mae"]})


def extra_and_two_targets(draw: np.random.Generator, rows: int) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    x, (target,) = ids_extra_and_target(draw, rows)
    vectors = draw.standard_normal((rows, 4, 8)).astype(np.float32)
    return x, (target, vectors)


def sequential_hashing() -> keras.Model:
    keras.utils.set_random_seed(1)
    stack = [
        keras.Input((4,), dtype="int64"),
        layers.Hashing(ROWS),
        layers.Embedding(ROWS, 8, name="table"),
        layers.GlobalMaxPooling1D(),
        layers.Dense(1),
    ]
    return compiled(keras.Sequential(stack))


def hashing(optimizer: Any = None) -> keras.Model:
    """Return a model of hashed integers and texts, and of the hash itself; texts have no compiled loop."""
    keras.utils.set_random_seed(1)
    words, ids = keras.Input((2,), dtype="string", name="words"), keras.Input((2,), dtype="int64", name="ids")
    hashed = layers.Hashing(ROWS, name="hash_words")(words)
    parts = [
        layers.Flatten()(layers.Embedding(ROWS, 4, name="words_table")(hashed)),
        layers.Flatten()(layers.Embedding(ROWS, 3, name="ids_table")(layers.Hashing(ROWS, name="hash_ids")(ids))),
        layers.Rescaling(1.0 / ROWS)(hashed),
    ]
    return compiled(keras.Model([words, ids], head(layers.Concatenate()(parts))), optimizer, run_eagerly=True)


def words_ids_and_target(draw: np.random.Generator, rows: int) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    words = np.char.add("w", skewed(draw, rows, 2).astype(str)).astype(object)
    return (words, skewed(draw, rows, 2).astype(np.int64)), (numbers(draw, rows),)


def string_lookup(optimizer: Any = None) -> keras.Model:
    """Return a model with a configured and an adapted vocabulary (saved with the weights), each used twice."""
    keras.utils.set_random_seed(1)
    words, ids = keras.Input((2,), dtype="string", name="words"), keras.Input((2,), dtype="int64", name="ids")
    listed = layers.StringLookup(vocabulary=[f"w{number}" for number in range(2000)], name="listed")
    adapted = layers.IntegerLookup(name="adapted")
    adapted.adapt(np.arange(1000))
    first, second = listed(words), adapted(ids)
    parts = [
        layers.Flatten()(layers.Embedding(ROWS, 4, name="words_table")(first)),
        layers.Flatten()(layers.Embedding(ROWS, 3, name="ids_table")(second)),
        layers.Rescaling(1e-3)(first),
        layers.Rescaling(1e-3)(second),
    ]
    return compiled(keras.Model([words, ids], head(layers.Concatenate()(parts))), optimizer, run_eagerly=True)


def named(optimizer: Any = None) -> keras.Model:
    """Return a model with named inputs and outputs, two losses, moving statistics, and ids with a second use."""
    keras.utils.set_random_seed(1)
    ids, extra = keras.Input((4,), dtype="int32", name="z_ids"), keras.Input((3,), name="a_extra")
    flat = layers.Flatten()(layers.Embedding(ROWS, 8, name="table")(ids))
    share = layers.Rescaling(1.0 / ROWS)(ids)
    hidden = layers.BatchNormalization()(layers.Dense(6)(layers.Concatenate()([flat, extra, share])))
    outputs = {"value": layers.Dense(1, name="value")(hidden), "kind": layers.Dense(3, name="kind")(hidden)}
    loss = {"value": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    model = keras.Model({"z_ids": ids, "a_extra": extra}, outputs)
    return compiled(model, optimizer, loss, metrics={"kind": ["accuracy"]}, loss_weights={"value": 0.5, "kind": 1.0})


def named_and_targets(draw: np.random.Generator, rows: int) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    return (numbers(draw, rows, 3), skewed(draw, rows, 4)), (draw.integers(0, 3, rows), numbers(draw, rows))


def mixed_precision() -> keras.Model:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return one_table(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), dynamic_growth_steps=4))
    finally:
        keras.config.set_dtype_policy(before)


def trained_before(optimizer: Any) -> keras.Model:
    model = one_table(optimizer)
    x, y = ids_and_target(np.random.default_rng(7), SIZE)
    model.fit(x[0], y[0], epochs=5, verbose=0)
    return model


def schedule() -> keras.optimizers.schedules.LearningRateSchedule:
    return keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.8)


def dropped(optimizer: Any = None) -> keras.Model:
    """Return a model that draws random numbers at each step."""
    keras.utils.set_random_seed(2)
    ids = keras.Input((4,), dtype="int32")
    hidden = layers.Dropout(0.4, seed=7)(layers.Flatten()(layers.Embedding(ROWS, 8, name="table")(ids)))
    return compiled(keras.Model(ids, head(layers.GaussianNoise(0.1, seed=8)(hidden))), optimizer)


def ids_from_the_end(draw: np.random.Generator, rows: int) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    (ids,), targets = ids_and_target(draw, rows)
    return [np.where(draw.random(ids.shape) < 0.5, ids, ids - ROWS)], targets


def towers(optimizer: Any = None) -> keras.Model:
    """Return a model of two towers that are models; one of them contains another model."""
    keras.utils.set_random_seed(3)
    users, items = (keras.Input((2,), dtype="int32", name=name) for name in ("users", "items"))
    one = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            layers.Embedding(OTHER_ROWS, 5, name="narrow"),
            layers.Flatten(),
            layers.Dense(4, name="first"),
        ],
        name="one",
    )
    wide = keras.Sequential([keras.Input((2,), dtype="int32"), layers.Embedding(ROWS, 8, name="wide")], name="within")
    ids = keras.Input((2,), dtype="int32")
    hidden = layers.BatchNormalization(name="norm")(layers.Flatten()(wide(ids)))
    other = keras.Model(ids, layers.Dropout(0.3, seed=7)(layers.Dense(4, name="second")(hidden)), name="other")
    return compiled(keras.Model([users, items], head(layers.Concatenate()([one(users), other(items)]))), optimizer)


CASES = {
    "towers": Case(towers, two_id_inputs),
    "adagrad, towers": Case(lambda: towers(keras.optimizers.Adagrad(0.5)), two_id_inputs),
    "dropout, and ids from the end": Case(dropped, ids_from_the_end),
    "one table": Case(one_table, ids_and_target),
    "an extra input": Case(extra_input, ids_extra_and_target),
    "a table called three times": Case(two_calls, two_id_inputs),
    "two tables": Case(two_tables, two_id_inputs),
    "two tables of one tensor": Case(wide_and_deep, ids_and_target),
    "slices": Case(slices, ids_and_target),
    "a mask for an LSTM": Case(lambda: masked(lambda: layers.LSTM(5)), ids_and_target),
    "a mask for pooling": Case(lambda: masked(layers.GlobalAveragePooling1D), ids_and_target),
    "ids that are floats": Case(float_ids, float_ids_and_target),
    "sequential": Case(sequential, ids_and_target),
    "an inner model with two inputs": Case(tower_of_two_inputs, ids_extra_and_target),
    "sequential with a mask": Case(sequential_mask, ids_and_target),
    "what a table returns is an output": Case(table_as_output, extra_and_two_targets),
    "sequential with hashing": Case(sequential_hashing, long_ids_and_target),
    "hashing": Case(hashing, words_ids_and_target),
    "lookups": Case(string_lookup, words_ids_and_target),
    "names, two outputs, moving statistics": Case(named, named_and_targets),
    "mixed precision with a loss scale": Case(mixed_precision, ids_and_target),
    "a schedule": Case(lambda: one_table(keras.optimizers.SGD(schedule())), ids_and_target),
    "a schedule in its course": Case(lambda: trained_before(keras.optimizers.SGD(schedule())), ids_and_target),
    "clipped values": Case(lambda: one_table(keras.optimizers.SGD(0.5, clipvalue=0.01)), ids_and_target),
    "adagrad": Case(lambda: one_table(keras.optimizers.Adagrad(0.5)), ids_and_target),
    "adagrad with clipped values": Case(
        lambda: one_table(keras.optimizers.Adagrad(0.5, 0.0, clipvalue=0.01)), ids_and_target
    ),
    "adagrad, two tables": Case(lambda: two_tables(keras.optimizers.Adagrad(0.5)), two_id_inputs),
    "adagrad, a table called three times": Case(lambda: two_calls(keras.optimizers.Adagrad(0.5)), two_id_inputs),
    "adagrad with a loss scale": Case(
        lambda: one_table(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adagrad(0.5))), ids_and_target
    ),
    "adagrad and a mask": Case(
        lambda: masked(lambda: layers.LSTM(5), keras.optimizers.Adagrad(0.5)), ids_and_target
    ),
    "lazy adam, two tables": Case(lambda: two_tables(LAZY["lazyadam"](0.02)), two_id_inputs),
    "lazy adam on a schedule": Case(lambda: named(LAZY["lazyadam"](schedule())), named_and_targets),
    "lazy adam with a loss scale": Case(
        lambda: one_table(keras.optimizers.LossScaleOptimizer(LAZY["lazyadam"](0.02))), ids_and_target
    ),
    "lazy momentum, a table called three times": Case(lambda: two_calls(LAZY["lazymomentum"](0.1)), two_id_inputs),
    "lazy momentum and a mask": Case(
        lambda: masked(lambda: layers.LSTM(5), LAZY["lazymomentum"](0.1, nesterov=True)), ids_and_target
    ),
    "adagrad on a schedule": Case(lambda: named(keras.optimizers.Adagrad(schedule())), named_and_targets),
}  # fmt: skip


def batches_of(
    draw: Draw, count: int = BATCHES, *, seed: int = 0, stacked: int = 4, weighted: bool = False
) -> list[Batch]:
    """Return the mini-batches of an epoch, of which ``stacked`` are in a stack and the last is short."""
    generator = np.random.default_rng(seed)
    found = list[Batch]()
    while len(found) < count:
        most = min(stacked, count - len(found))
        x, y = draw(generator, most * SIZE)
        weight = generator.uniform(0.5, 2, most * SIZE).astype(np.float32) if weighted else None
        own, targets = (tuple(a.reshape(most, SIZE, *a.shape[1:]) for a in side) for side in (x, y))
        weights = None if weight is None else weight.reshape(most, SIZE)
        stack = Stack(own, targets, weights)
        for place in range(most):
            inputs, outputs = tuple(a[place] for a in own), tuple(a[place] for a in targets)
            own_weights = None if weights is None else weights[place]
            batch = Batch(0, len(found), len(found) == count - 1, inputs, outputs, own_weights)
            found.append(batch.placed_in(stack, place) if most > 1 else batch)
    last = found[-1]
    x, y = (tuple(a[: SIZE // 2] for a in side) for side in (last.x, last.y))
    weight = last.weight[: SIZE // 2] if isinstance(last.weight, np.ndarray) else None
    found[-1] = Batch(0, last.index, True, x, y, weight)
    return found


class CutCase(NamedTuple):
    """A model and its cut."""

    recipe: Recipe
    file: bytes
    cut: CutModel

    @classmethod
    def of(cls, model: keras.Model, window: int = WINDOW, least_bytes: int = 0, **options: Any) -> CutCase:
        """Cut a model whose tables are small."""
        file = archive.to_bytes(model)
        recipe, options = recipe_of(model, file), {**options, "least_bytes": least_bytes}
        return cls(
            recipe, file, cut(recipe.build(file, to_train=True), recipe, window=window, batch_size=SIZE, **options)
        )

    def dense(self) -> KerasReplica:
        return KerasReplica(self.recipe.build(self.file, to_train=True), self.cut.order)

    def small(self) -> TableReplica:
        assert self.cut.worker is not None
        return TableReplica(self.cut.worker.recipe.build(self.cut.model_file, to_train=True), self.cut.worker)

    def windows(self, data: Sequence[Batch], window: int = WINDOW, spec: DataSpec | None = None) -> WindowRows:
        assert self.cut.worker is not None
        return WindowRows(iter(data), self.cut.worker, spec or columns_of(data[0]), window, worker=2)


def batches_in(window: Window) -> list[RowBatch]:
    """Return a window's mini-batches, as `WindowRows` makes them."""
    return [batch for batch in window.batches if isinstance(batch, RowBatch)]


def columns_of(batch: Batch, *, shuffle: bool = True) -> DataSpec:
    features = tuple(Column(f"column_{number}", array.shape[1:]) for number, array in enumerate(batch.x))
    return DataSpec(features, batch_size=SIZE, shuffle=shuffle)


class Trained(NamedTuple):
    """The weights, dense ones first; the moving statistics; and the metrics of each step."""

    weights: np.ndarray
    statistics: np.ndarray
    metrics: np.ndarray


def trained_dense(case: CutCase, data: Sequence[Batch], window: int = WINDOW, *, gradient: bool = False) -> Trained:
    """Return the result of one worker's training with whole tables."""
    replica = case.dense()
    center, statistics, metrics = *start_of(replica), []
    for first in range(0, len(data), window):
        replica.load(center)
        replica.load_moving_statistics(statistics)
        payload, measured = computed(replica, data[first : first + window], center, gradient)
        metrics.append(measured)
        replica.read_moving_statistics(statistics)
        center += payload
    return Trained(center, statistics, np.concatenate(metrics))


def trained_by_rows(
    case: CutCase,
    data: Sequence[Batch],
    window: int = WINDOW,
    *,
    gradient: bool = False,
    replica: TableReplica | None = None,
) -> Trained:
    """Return the result of the same training with rows only, and a server that gathers and scatters."""
    whole, replica = case.dense(), replica or case.small()
    center, statistics, metrics = *start_of(whole), []
    for touched in case.windows(data, window):
        places = places_of(case.cut, whole.size, replica.size, touched)
        sent = np.zeros(replica.size, np.float32)
        for at, own in places:
            sent[own] = center[at]
        replica.load(sent)
        replica.load_moving_statistics(statistics)
        payload, measured = computed(replica, batches_in(touched), sent, gradient)
        metrics.append(measured)
        replica.read_moving_statistics(statistics)
        for at, own in places:
            center[at] += payload[own]
    return Trained(center, statistics, np.concatenate(metrics))


def start_of(replica: KerasReplica) -> tuple[np.ndarray, np.ndarray]:
    """Return a replica's weights and moving statistics."""
    center, statistics = replica.layout.empty(), replica.moving_statistics.empty()
    replica.read(center)
    replica.read_moving_statistics(statistics)
    return center, statistics


def computed(
    replica: KerasReplica, batches: Sequence[Any], sent: np.ndarray, gradient: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return what a window adds to the center, and the metrics of its steps."""
    out = np.empty(replica.size, np.float32)
    if not gradient:
        measured = replica.train(batches)
        replica.moved(sent, out)
        return out, measured
    assert len(batches) == 1
    measured = replica.gradient(batches[0], out)
    return np.float32(-0.5) * out, measured[None]


def places_of(cut: CutModel, whole: int, small: int, window: Window) -> list[tuple[Any, Any]]:
    """Return the slices of the vector with whole tables and the matching slices of the vector with small tables."""
    dense = whole - sum(table.rows * table.width for table in cut.tables)
    assert small == dense + sum(table.most * table.width for table in cut.tables)
    places: list[tuple[Any, Any]] = [(slice(0, dense), slice(0, dense))]
    first = own = dense
    for table, touched, numbers in zip(cut.tables, window.rows, window.places, strict=True):
        assert len(touched) <= table.most
        assert np.all(np.diff(touched) > 0)
        assert touched.dtype == np.int64
        ids = touched[np.argsort(numbers)]
        elements = first + (ids[:, None] * table.width + np.arange(table.width)).reshape(-1)
        places.append((elements, slice(own, own + elements.size)))
        first, own = first + table.rows * table.width, own + table.most * table.width
    return places

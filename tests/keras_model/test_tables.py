"""The tables of a model that can travel by rows, the reasons why others cannot, and the cut model."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from support.cases import rest_slow
from support.training.table_models import (
    OTHER_ROWS,
    ROWS,
    SIZE,
    WINDOW,
    CutCase,
    compiled,
    extra_input,
    named,
    one_table,
    sequential,
    slices,
    string_lookup,
    tower_of_two_inputs,
    towers,
    two_calls,
    two_tables,
    wide_and_deep,
)

from distkeras.keras_model.archive import from_bytes, to_bytes
from distkeras.keras_model.recipe import recipe_of
from distkeras.keras_model.tables import ROWS_RATIO_MIN, UNTOUCHED_BYTES_MIN, cut, require_exact_embeddings
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.tables import TableShape

pytestmark = pytest.mark.skipif(keras.backend.backend() == "torch", reason="tables stay dense on PyTorch")


def embedded(table: Callable[[Any], Any], *, before: Callable[[Any], Any] = lambda ids: ids) -> keras.Model:
    keras.utils.set_random_seed(1)
    ids = keras.Input((4,), dtype="int32", name="ids")
    return compiled(keras.Model(ids, layers.Dense(1)(layers.Flatten()(table(before(ids))))))


def embedding(**options: Any) -> layers.Embedding:
    return layers.Embedding(ROWS, 8, name="table", **options)


@keras.saving.register_keras_serializable("test_tables")
class Subclassed(keras.Model):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.table, self.flat, self.out = embedding(), layers.Flatten(), layers.Dense(1)

    def call(self, ids: Any) -> Any:
        return self.out(self.flat(self.table(ids)))


@keras.saving.register_keras_serializable("test_tables")
class OwnStep(keras.Model):
    """A functional model of a custom class."""


@keras.saving.register_keras_serializable("test_tables")
class OwnEmbedding(layers.Embedding):
    pass


@keras.saving.register_keras_serializable("test_tables")
class Tied(layers.Layer):
    """A layer that uses the weights of an Embedding."""

    def __init__(self, table: Any, **options: Any) -> None:
        super().__init__(**options)
        self.table = table

    def call(self, hidden: Any) -> Any:
        return hidden @ keras.ops.transpose(self.table.embeddings)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"table": keras.saving.serialize_keras_object(self.table)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Tied:
        return cls(**config | {"table": keras.saving.deserialize_keras_object(config["table"])})


@keras.saving.register_keras_serializable("test_tables")
class Doubtful(layers.Layer):
    def call(self, ids: Any, training: bool = False) -> Any:
        return ids + 1 if training else ids


@keras.saving.register_keras_serializable("test_tables")
class Counting(layers.Layer):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls = 0

    def call(self, hidden: Any) -> Any:
        self.calls += 1
        return hidden


def subclassed() -> keras.Model:
    model = Subclassed()
    model(np.zeros((2, 4), np.int32))
    return compiled(model)


def own_class() -> keras.Model:
    ids = keras.Input((4,), dtype="int32")
    return compiled(OwnStep(ids, layers.Dense(1)(layers.Flatten()(embedding()(ids)))))


def nested_twice() -> keras.Model:
    keras.utils.set_random_seed(1)
    inner = keras.Sequential([keras.Input((4,), dtype="int32"), embedding(), layers.Flatten()], name="tower")
    inputs = [keras.Input((4,), dtype="int32") for _ in range(2)]
    return compiled(keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([inner(ids) for ids in inputs]))))


def nested_output() -> keras.Model:
    ids = keras.Input((4,), dtype="int32")
    inner = keras.Sequential(
        [keras.Input((4,), dtype="int32"), embedding(), layers.Flatten(), layers.Dense(1)], name="tower"
    )
    return compiled(keras.Model(ids, inner(ids)))


def used_three_times() -> keras.Model:
    ids = keras.Input((4,), dtype="int32")
    inner = keras.Sequential([keras.Input((4,), dtype="int32"), embedding(), layers.Flatten()], name="tower")
    made = layers.Dense(3, name="many")(inner(ids))
    return compiled(keras.Model(ids, layers.Concatenate()([layers.Dense(1)(made) for _ in range(3)])))


def wrapped() -> keras.Model:
    return embedded(
        layers.TimeDistributed(layers.Embedding(ROWS, 8, name="table"), name="times"), before=lambda i: i[:, :, None]
    )


def lora() -> keras.Model:
    model = embedded(embedding())
    model.get_layer("table").enable_lora(2)
    return compiled(model)


def frozen() -> keras.Model:
    return embedded(embedding(trainable=False))


def narrow_floats() -> keras.Model:
    return embedded(embedding(dtype="bfloat16"))


def reversible() -> keras.Model:
    return embedded(layers.ReversibleEmbedding(ROWS, 8, name="table"))


def tied() -> keras.Model:
    table = embedding()
    ids = keras.Input((4,), dtype="int32")
    return compiled(keras.Model(ids, Tied(table, name="tied")(layers.Dense(8)(layers.Flatten()(table(ids))))))


def trained_ids() -> keras.Model:
    return embedded(embedding(), before=lambda ids: layers.Dense(4, name="choice")(layers.Rescaling(1.0)(ids)))


def random_ids() -> keras.Model:
    return embedded(embedding(), before=lambda ids: layers.Dropout(0.5, name="dropped")(ids))


def doubtful_ids() -> keras.Model:
    return embedded(embedding(), before=Doubtful(name="doubtful"))


def ids_of_unknown_number() -> keras.Model:
    ids = keras.Input((None,), dtype="int32")
    return compiled(keras.Model(ids, layers.Dense(1)(layers.GlobalAveragePooling1D()(embedding()(ids)))))


def trained_further() -> keras.Model:
    model = one_table(keras.optimizers.Adagrad(0.1))
    model.fit(np.zeros((4, 4), np.int32), np.zeros(4), verbose=0)
    return model


def optimized(kind: str, **options: Any) -> Callable[[], keras.Model]:
    return lambda: one_table(getattr(keras.optimizers, kind)(0.1, **options))


DENSE = {
    "subclassed": (subclassed, "only functional and Sequential models"),
    "own class": (own_class, "only functional and Sequential models"),
    "nested twice": (nested_twice, "within the layer 'tower', and the layer 'table' is called more than once"),
    "nested output": (nested_output, "within the layer 'tower', and an output has the name"),
    "nested, in three sums": (used_three_times, "within the layer 'tower', and the output of 'many' is used more than"),
    "wrapped": (wrapped, "within the layer 'times'"),
    "own embedding": (lambda: embedded(OwnEmbedding(ROWS, 8, name="table")), "its class is OwnEmbedding"),
    "reversible": (reversible, "its class is ReversibleEmbedding"),
    "tied": (tied, "used in 'tied'"),
    "lora": (lora, "LoRA"),
    "frozen": (frozen, "does not train"),
    "bfloat16": (narrow_floats, "bfloat16"),
    "regularizer": (lambda: embedded(embedding(embeddings_regularizer="l2")), "regularizer"),
    "constraint": (lambda: embedded(embedding(embeddings_constraint="non_neg")), "constraint"),
    "trained ids": (trained_ids, "made by 'choice', which trains"),
    "random ids": (random_ids, "made by 'dropped', which has a state"),
    "doubtful ids": (doubtful_ids, "made by 'doubtful', which may do otherwise in training"),
    "unknown number": (ids_of_unknown_number, "how many ids a row of data has is not known"),
    "few rows": (lambda: embedded(layers.Embedding(200, 8, name="table")), "200 rows of 8 are too few"),
    "state": (trained_further, "continues from accumulators"),
    "momentum": (optimized("SGD", momentum=0.9), "momentum"),
    "weight decay": (optimized("SGD", weight_decay=0.1), "weight decay"),
    "accumulation": (optimized("SGD", gradient_accumulation_steps=2), "accumulated gradients"),
    "moving average": (optimized("SGD", use_ema=True), "moving average"),
    "norm": (optimized("SGD", clipnorm=1.0), "norm"),
    "global norm": (optimized("Adagrad", global_clipnorm=1.0), "norm"),
    "division by zero": (optimized("Adagrad", initial_accumulator_value=0.0, epsilon=0.0), "divides by zero"),
    **{name: (optimized(name), f"{name} may move rows") for name in ("Adam", "RMSprop", "Adadelta", "Ftrl", "Lion")},
}  # fmt: skip
#: Reasons of each kind: the model, the layer, its weights, its ids, and the optimizer.
BY_DEFAULT = ("subclassed", "nested output", "own embedding", "tied", "regularizer", "random ids", "momentum", "norm")


@functools.cache
def cut_once(build: Callable[[], keras.Model]) -> CutCase:
    """Return the parts of a model, which cost a second, for all tests that do not change them."""
    return CutCase.of(build())


@pytest.mark.parametrize("name", rest_slow(DENSE, *BY_DEFAULT))
def test_a_table_that_must_stay_dense_has_a_reason(name: str) -> None:
    model, reason = DENSE[name]
    if model is reversible and not hasattr(layers, "ReversibleEmbedding"):
        pytest.skip("this version of Keras has none")
    case = CutCase.of(model())
    assert (case.cut.tables, case.cut.worker, case.cut.order) == ((), None, None)
    (kept,) = case.cut.kept_dense
    assert kept.rpartition("/")[2] == "table"
    assert reason in case.cut.kept_dense[kept]


@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="Keras quantizes on TensorFlow and JAX")
def test_a_quantized_table_stays_dense() -> None:
    model = embedded(embedding())
    model.get_layer("table").quantize("int8")
    model.compile("sgd", "mse")
    assert "quantized to int8" in CutCase.of(model).cut.kept_dense["table"]


def test_the_number_of_ids_may_be_known_from_the_data() -> None:
    case = CutCase.of(ids_of_unknown_number(), shapes=[(5,)])
    assert case.cut.tables == (TableShape("table", ROWS, 8, WINDOW * SIZE * 5),)


@pytest.mark.parametrize("window", [None, "auto"])
def test_a_window_must_be_a_number(window: Any) -> None:
    assert "a number of mini-batches" in CutCase.of(one_table(), window=window).cut.kept_dense["table"]


def test_inner_models_are_cut_and_the_model_is_not_changed() -> None:
    model = towers()
    shapes = {layer.name: layer.output.shape for layer in model.layers}
    recipe = recipe_of(model, to_bytes(model))
    result = cut(model, recipe, window=WINDOW, batch_size=SIZE, least_bytes=0)
    assert [table.name for table in result.tables] == ["one/narrow", "other/within/wide"]
    # Another call of an inner model would add an output to it.
    assert {layer.name: layer.output.shape for layer in model.layers} == shapes
    assert model.get_layer("one").get_layer("narrow").output.shape == (None, 2, 5)
    only = cut(model, recipe, window=WINDOW, batch_size=SIZE, choose=["other/within/wide"])
    assert only.kept_dense == {"one/narrow": "`tables` does not name it"}


@pytest.mark.parametrize(
    "called",
    [
        pytest.param(lambda inner, ids, extra: inner([ids, extra]), marks=pytest.mark.slow),
        lambda inner, ids, extra: inner(inputs=[ids, extra]),
        pytest.param(lambda inner, ids, extra: inner([ids, extra], None), marks=pytest.mark.slow),
    ],
    ids=["list", "keyword", "none"],
)
def test_an_inner_model_is_cut_however_it_is_called(called: Callable[[Any, Any, Any], Any]) -> None:
    cut = CutCase.of(tower_of_two_inputs(called)).cut
    assert ([table.name for table in cut.tables], cut.kept_dense) == (["inner/table"], {})


@pytest.mark.filterwarnings("ignore:.*was passed an input with a mask")
def test_an_inner_model_with_a_mask_of_its_own_stays_dense() -> None:
    def called(inner: Any, ids: Any, extra: Any) -> Any:
        return inner([ids, extra], mask=[ids > 0, None])

    cut = CutCase.of(tower_of_two_inputs(called)).cut
    assert "the model 'inner' must be given" in cut.kept_dense["inner/table"]


def test_layers_do_not_run_when_a_model_is_cut() -> None:
    """They may count their calls, and what they count travels with the model."""
    counter, table = Counting(name="counter"), embedding()
    model = embedded(lambda ids: counter(table(ids)))
    assert counter.calls == 1
    recipe = recipe_of(model, to_bytes(model))
    assert cut(model, recipe, window=WINDOW, batch_size=SIZE, least_bytes=0).tables
    assert counter.calls == 1


def test_a_table_travels_by_rows_from_a_number_of_rows_on() -> None:
    most = WINDOW * SIZE * 4
    for rows, travels in ((ROWS_RATIO_MIN * most, True), (ROWS_RATIO_MIN * most - 1, False)):
        case = CutCase.of(embedded(layers.Embedding(rows, 8, name="table")))
        assert bool(case.cut.tables) is travels
    assert CutCase.of(embedded(layers.Embedding(20, 8, name="table")), choose=["table"]).cut.tables[0].most == 20


@pytest.mark.slow
def test_a_table_travels_by_rows_from_a_number_of_bytes_on() -> None:
    most = WINDOW * SIZE * 4
    for rows, travels in ((most + (1 << 14), True), (most + (1 << 14) - 1, False)):
        case = CutCase.of(embedded(layers.Embedding(rows, 16, name="table")), least_bytes=UNTOUCHED_BYTES_MIN)
        assert bool(case.cut.tables) is travels


def test_tables_may_be_chosen_or_excluded() -> None:
    assert [table.name for table in cut_once(two_tables).cut.tables] == ["narrow", "wide"]
    case = CutCase.of(two_tables(), choose=("wide",))
    assert [table.name for table in case.cut.tables] == ["wide"]
    assert case.cut.kept_dense == {"narrow": "`tables` does not name it"}
    assert CutCase.of(two_tables(), choose=None).cut.kept_dense == dict.fromkeys(
        ("narrow", "wide"), "`tables` does not name it"
    )
    with pytest.raises(
        ConfigurationError, match=r"names of Embedding layers of the model, which are \['narrow', 'wide'\]"
    ):
        CutCase.of(two_tables(), choose=["other"])
    with pytest.raises(ConfigurationError, match="'table', which stays dense: momentum"):
        CutCase.of(one_table(keras.optimizers.SGD(0.1, momentum=0.9)), choose="table")


@pytest.mark.slow
def test_a_window_touches_at_most_its_ids() -> None:
    each = WINDOW * SIZE
    assert cut_once(one_table).cut.tables == (TableShape("table", ROWS, 8, 4 * each),)
    assert CutCase.of(one_table(mask_zero=True)).cut.tables == (TableShape("table", ROWS, 8, 4 * each + 1),)
    # One of the tensors is used twice.
    assert cut_once(two_calls).cut.tables == (TableShape("table", ROWS, 8, 4 * each),)
    assert cut_once(slices).cut.tables == (
        TableShape("table", ROWS, 8, 3 * each),
        TableShape("other", ROWS, 3, each),
    )
    assert cut_once(two_tables).cut.tables == (
        TableShape("narrow", OTHER_ROWS, 5, 2 * each),
        TableShape("wide", ROWS, 8, 2 * each),
    )


def test_the_small_model_is_sent_without_the_table() -> None:
    case = CutCase.of(embedded(layers.Embedding(200_000, 8, name="table")))
    assert len(case.file) > 200_000 * 8 * 4 > 30 * len(case.cut.model_file)
    assert len(pickle.dumps(case.cut.worker)) < 5000


def test_inputs_that_are_only_ids_are_omitted() -> None:
    worker = cut_once(extra_input).cut.worker
    assert worker is not None
    assert worker.inputs == (1,)
    assert worker.ids_file == b""
    worker = cut_once(named).cut.worker  # Keras sorts dictionaries; the ids also have another use
    assert worker is not None
    assert worker.inputs == (0, 1)
    assert worker.sources[0].inputs == (1,)


def test_tables_of_one_tensor_share_their_rows() -> None:
    worker = cut_once(wide_and_deep).cut.worker
    assert worker is not None
    assert [lookup.tables for lookup in worker.lookups] == [(0, 1)]


@pytest.mark.slow
def test_dense_variables_keep_their_order() -> None:
    for build in (two_tables, sequential, named, slices):
        case = cut_once(build)
        dense, small = case.dense(), case.small()
        count = len(case.cut.tables)
        names = [name.rsplit("/", 2)[-2:] for name in dense.layout.names]
        assert [name.rsplit("/", 2)[-2:] for name in small.layout.names] == names
        assert [name[0] for name in names[-count:]] == [table.name for table in case.cut.tables]
        assert dense.layout.shapes[:-count] == small.layout.shapes[:-count]
        own = [v.path.rsplit("/", 2)[-2:] for v in dense.model.trainable_variables]
        assert [name for name in own if name[1] != "embeddings"] == names[:-count]
        assert dense.moving_statistics.shapes == small.moving_statistics.shapes


def test_the_given_model_is_not_changed() -> None:
    case = cut_once(slices)
    model = case.recipe.build(case.file)
    before, weights = model.get_config(), model.get_weights()
    assert cut(model, case.recipe, window=WINDOW, batch_size=SIZE, least_bytes=0).tables
    assert model.get_config() == before
    for value, expected in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 2**8), ("float32", 2**24)])
def test_a_table_with_more_rows_than_its_ids_tell_apart_is_refused(dtype: str, most: int) -> None:
    def model(rows: int, kind: str) -> keras.Model:
        ids = keras.Input((2,), dtype=kind)
        inner = keras.Sequential([keras.Input((2,), dtype=kind), layers.Embedding(rows, 1, "zeros", name="table")])
        return keras.Model(ids, inner(ids))

    require_exact_embeddings(model(2**8, dtype))
    require_exact_embeddings(model(2**8 + 1, "int32"))
    with pytest.raises(ConfigurationError, match=rf"'.*table' must be integers.*{dtype} for {most + 1} rows"):
        require_exact_embeddings(model(most + 1, dtype))


def test_vocabularies_are_sent() -> None:
    case = CutCase.of(string_lookup())
    assert case.cut.worker is not None
    for file in (case.cut.model_file, case.cut.worker.ids_file):
        model = from_bytes(file)
        assert model.get_layer("listed").get_vocabulary()[:3] == ["[UNK]", "w0", "w1"]
        assert len(model.get_layer("adapted").get_vocabulary()) == 1001

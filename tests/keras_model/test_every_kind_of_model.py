"""Every kind of model: one worker and a server train it as Keras itself does.

Under the rule downpour, the center moves by the movement of its only worker, so it ends where the steps of Keras end
over the same mini-batches. This holds for every kind of model, or the model is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from keras import layers
from support.ps.running_server import Running

from distkeras.data.batches import Batch
from distkeras.keras_model import archive
from distkeras.keras_model.carried import lost_from_model
from distkeras.keras_model.compiled_steps import model_inputs
from distkeras.keras_model.recipe import recipe_of
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.messages import FIXED_HISTORY
from distkeras.ps.rules import make
from distkeras.ps.worker.loop import run_worker, work
from distkeras.results import JobRecords

ROWS, STEPS = 8, 6
SPARSE = "sparse_categorical_crossentropy"
Draw = np.random.Generator


class Case(NamedTuple):
    """A compiled model, and a function that makes mini-batches for it."""

    model: keras.Model
    batch: Callable[[Draw], tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]]


def classes_of(model: keras.Model, shape: tuple[int, ...] = (6,), integers: int = 0, **compiled: Any) -> Case:
    """Return the case of a model of three classes."""

    def batch(draw: Draw) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        full = (ROWS, *shape)
        x = draw.integers(0, integers, full).astype(np.int32) if integers else draw.normal(size=full).astype(np.float32)
        return (x,), (draw.integers(0, 3, ROWS).astype(np.int32),)

    compiled = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss": SPARSE,
        "metrics": ["accuracy"],
    } | compiled
    model.compile(**compiled)
    return Case(model, batch)


def stack(*inner: Any, shape: tuple[int, ...] = (6,), dtype: str = "float32") -> keras.Model:
    return keras.Sequential([keras.Input(shape, dtype=dtype), *inner, layers.Dense(3, "softmax", dtype="float32")])


def several_inputs_and_outputs() -> Case:
    one, two = keras.Input((4,), name="one"), keras.Input((), dtype="int32", name="two")
    joined = layers.Concatenate()([one, layers.Embedding(5, 3)(two)])
    kind = layers.Dense(3, "softmax", name="kind")(layers.Dense(6, "relu")(joined))
    size = layers.Dense(1, name="size")(joined)
    model = keras.Model({"one": one, "two": two}, {"kind": kind, "size": size})
    model.compile(
        keras.optimizers.RMSprop(0.01),
        {"kind": SPARSE, "size": keras.losses.Huber()},
        loss_weights={"kind": 1.0, "size": 0.25},
        metrics={"kind": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)], "size": "mae"},
    )

    def batch(draw: Draw) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        x = (draw.normal(size=(ROWS, 4)).astype(np.float32), draw.integers(0, 5, ROWS).astype(np.int32))
        return x, (draw.integers(0, 3, ROWS).astype(np.int32), draw.normal(size=(ROWS, 1)).astype(np.float32))

    return Case(model, batch)


@keras.saving.register_keras_serializable("matrix")
class Branched(keras.Model):
    """A subclassed model, which is called on inputs before it is trained."""

    def __init__(self, units: int = 5, **options: Any) -> None:
        super().__init__(**options)
        self.units = units
        self.hidden, self.out = layers.Dense(units, "tanh"), layers.Dense(3, "softmax")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.hidden(x) + keras.ops.mean(x, axis=-1, keepdims=True))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("matrix")
class Penalized(layers.Layer):
    """A layer that adds a loss and counts its calls in an integer."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="calls")

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1)
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(self.scale)))
        return x * self.scale


def subclassed() -> Case:
    model = Branched()
    model(np.zeros((1, 6), np.float32))
    return classes_of(model)


def wrapped() -> Case:
    """Return the case of a subclassed model as a layer of a functional model, as Spark needs it."""
    inputs = keras.Input((6,))
    return classes_of(keras.Model(inputs, Branched(4)(inputs)))


def frozen() -> Case:
    base = keras.Sequential([keras.Input((6,)), layers.Dense(5, "relu"), layers.BatchNormalization()], name="base")
    base.trainable = False
    return classes_of(stack(base))


def lora() -> Case:
    dense = layers.Dense(5, "relu")
    model = stack(dense, layers.Dense(5))
    dense.enable_lora(2)
    return classes_of(model)


def adapted() -> Case:
    normalization = layers.Normalization()
    normalization.adapt(np.random.default_rng(1).normal(3, 2, size=(50, 6)))
    return classes_of(stack(normalization, layers.Discretization([-1.0, 0.0, 1.0]), layers.Rescaling(0.5)))


def sequence(*inner: Any) -> Case:
    return classes_of(stack(*inner, shape=(5, 4)), (5, 4))


def tokens(*inner: Any, mask: bool = False) -> Case:
    embedding = layers.Embedding(7, 4, mask_zero=mask)
    return classes_of(stack(embedding, *inner, shape=(5,), dtype="int32"), (5,), 7)


def image(*inner: Any) -> Case:
    return classes_of(stack(*inner, shape=(6, 6, 2)), (6, 6, 2))


def attention() -> Case:
    inputs = keras.Input((5, 4))
    hidden = layers.LayerNormalization()(layers.MultiHeadAttention(2, 3)(inputs, inputs) + inputs)
    return classes_of(keras.Model(inputs, layers.Dense(3, "softmax")(layers.GlobalAveragePooling1D()(hidden))), (5, 4))


def stateful() -> Case:
    inner = (layers.LSTM(4, stateful=True, dropout=0.2, seed=1), layers.Dense(3, "softmax"))
    return classes_of(keras.Sequential([keras.Input(batch_shape=(ROWS, 5, 4)), *inner]), (5, 4))


def tied() -> Case:
    inputs, shared = keras.Input((6,)), layers.Dense(6, "tanh")
    return classes_of(keras.Model(inputs, layers.Dense(3, "softmax")(shared(shared(inputs)))))


SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam
schedules = keras.optimizers.schedules


def optimized(optimizer: Any, **compiled: Any) -> Case:
    return classes_of(stack(layers.Dense(5, "relu")), optimizer=optimizer, **compiled)


def metrics_of_every_form() -> Case:
    def confidence(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.max(y_pred, axis=-1)

    named = keras.metrics.SparseCategoricalAccuracy(name="named")
    return optimized(
        "sgd", metrics=["accuracy", "sparse_categorical_crossentropy", confidence], weighted_metrics=[named]
    )


#: The cases of the default suite; the others are slow.
FEW = {"several inputs and outputs", "batch normalization", "lora"}
CASES: dict[str, Callable[[], Case]] = {
    "several inputs and outputs": several_inputs_and_outputs,
    "subclassed": subclassed,
    "subclassed in functional": wrapped,
    "penalized": lambda: classes_of(stack(Penalized())),
    "nested": lambda: classes_of(stack(stack(layers.Dense(4)))),
    "tied": tied,
    "frozen": frozen,
    "lora": lora,
    "batch normalization": lambda: classes_of(stack(layers.Dense(5), layers.BatchNormalization(momentum=0.8))),
    "group normalization": lambda: classes_of(stack(layers.Dense(4), layers.GroupNormalization(2))),
    "spectral normalization": lambda: classes_of(stack(layers.SpectralNormalization(layers.Dense(5)))),
    "dropout": lambda: classes_of(
        stack(layers.Dense(9), layers.Dropout(0.4, seed=3), layers.GaussianNoise(0.1, seed=4))
    ),
    "regularized": lambda: classes_of(
        stack(layers.Dense(5, kernel_regularizer=keras.regularizers.L1L2(0.01, 0.01), activity_regularizer="l2"))
    ),
    "constrained": lambda: classes_of(stack(layers.Dense(5, kernel_constraint=keras.constraints.MaxNorm(0.5)))),
    "adapted": adapted,
    "embedding": lambda: tokens(layers.Flatten()),
    "masked": lambda: tokens(layers.LSTM(3), mask=True),
    "lstm": lambda: sequence(layers.LSTM(4, dropout=0.2, seed=1)),
    "stateful": stateful,
    "gru": lambda: sequence(layers.GRU(4, reset_after=False)),
    "bidirectional": lambda: sequence(layers.Bidirectional(layers.SimpleRNN(3))),
    "time distributed": lambda: sequence(layers.TimeDistributed(layers.Dense(2)), layers.Flatten()),
    "convolution": lambda: image(layers.Conv2D(3, 3), layers.DepthwiseConv2D(2), layers.GlobalMaxPooling2D()),
    "augmented": lambda: image(layers.RandomFlip(seed=2), layers.RandomTranslation(0.2, 0.2, seed=3), layers.Flatten()),
    "attention": attention,
    "mixed float16": lambda: classes_of(stack(layers.Dense(5, "relu", dtype="mixed_float16")), optimizer="adam"),
    "bfloat16": lambda: classes_of(stack(layers.Dense(5, "relu", dtype="mixed_bfloat16"))),
    "metrics of every form": metrics_of_every_form,
    "eager": lambda: optimized("sgd", run_eagerly=True),
    "compiled by XLA": lambda: optimized("sgd", jit_compile=True),
    "schedule": lambda: optimized(SGD(schedules.PiecewiseConstantDecay([2, 4], [0.1, 0.05, 0.01]))),
    "warmup": lambda: optimized(ADAM(schedules.CosineDecay(0.0, 9, warmup_target=0.1, warmup_steps=3))),
    "clipped": lambda: optimized(ADAM(0.05, global_clipnorm=0.1)),
    "weight decay": lambda: optimized(keras.optimizers.AdamW(0.05, weight_decay=0.1)),
    "accumulated": lambda: optimized(SGD(0.1, gradient_accumulation_steps=2)),
    "averaged": lambda: optimized(ADAM(0.05, use_ema=True, ema_momentum=0.5)),
    "loss scaled": lambda: optimized(keras.optimizers.LossScaleOptimizer(SGD(0.1))),
    "label smoothing": lambda: optimized("sgd", loss=keras.losses.SparseCategoricalCrossentropy(reduction="sum")),
}


def batches_for(case: Case) -> list[Batch]:
    draw = np.random.default_rng(0)
    return [Batch(0, index, index == STEPS - 1, *case.batch(draw), None) for index in range(STEPS)]


class Trained(NamedTuple):
    """The result of training a model with one worker and a server."""

    replica: KerasReplica
    center: np.ndarray
    moving_statistics: np.ndarray
    history: np.ndarray
    bytes_sent: int


def trained(model: keras.Model, batches: list[Batch]) -> Trained:
    file = archive.to_bytes(model)
    given = dict.fromkeys(("optimizer", "loss", "metrics", "loss_weights", "weighted_metrics", "objects"))
    recipe = recipe_of(model, file, **given)
    replica = KerasReplica(recipe.build(file, to_train=True))
    assert lost_from_model(model, replica.model) is None
    replica.prepare(batches[0])
    start, statistics = replica.layout.empty(), replica.moving_statistics.empty()
    replica.read(start)
    replica.read_moving_statistics(statistics)
    rule = make("downpour", window=2)
    with Running(rule, workers=1, size=replica.size, start=start, moving_statistics=statistics) as running:
        options: Any = {"moving_statistics": len(statistics), "metrics": replica.metric_names}
        client = running.client(0, size=replica.size, **options)

        def begin(welcome: Any) -> Any:
            payload = lambda: client.payload(rule.traits.parts)  # noqa: E731 - the task does the same
            return work(rule, replica, iter(batches), payload, moving_statistics=len(statistics))

        run_worker(client, client.join(), begin)
        client.close()
        reply, records = running.driver.center(), JobRecords.drain(running.driver)
    assert records.metrics == replica.metric_names
    history, most = records.steps_array[:, len(FIXED_HISTORY) :], int(records.commits_array["bytes"].max())
    return Trained(replica, reply.center, reply.moving_statistics, history, most)


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_center_equals_the_weights_of_keras(name: str) -> None:
    keras.utils.set_random_seed(5)
    case = CASES[name]()
    batches = batches_for(case)
    file = archive.to_bytes(case.model)
    found = trained(case.model, batches)

    given = dict.fromkeys(("optimizer", "loss", "metrics", "loss_weights", "weighted_metrics", "objects"))
    alone = recipe_of(case.model, file, **given).build(file)
    rows = []
    for batch in batches:
        alone.reset_metrics()
        x, y, _ = model_inputs(alone, batch.x, batch.y, None)
        logs = alone.train_on_batch(x, y, return_dict=True)
        rows.append([logs[metric] for metric in found.replica.metric_names])
    expected = KerasReplica(alone)
    vector, statistics = expected.layout.empty(), expected.moving_statistics.empty()
    expected.read(vector)
    expected.read_moving_statistics(statistics)
    half = "16" in name
    np.testing.assert_allclose(found.center, vector, rtol=1e-4, atol=1e-2 if half else 1e-5)
    np.testing.assert_allclose(found.moving_statistics, statistics, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.history, rows, rtol=1e-2 if half else 1e-4, atol=1e-5)
    assert len(vector) == sum(int(np.prod(weight.shape)) for weight in case.model.trainable_weights)


@pytest.mark.parametrize("make_case", [frozen, lora])
def test_only_trainable_weights_are_sent(make_case: Callable[[], Case]) -> None:
    case = make_case()
    found = trained(case.model, batches_for(case))
    numbers = sum(int(np.prod(weight.shape)) for weight in case.model.trainable_weights)
    everything = sum(int(np.prod(weight.shape)) for weight in case.model.weights)
    assert found.replica.size == numbers < everything / 1.2
    assert found.bytes_sent < 4 * numbers + 1000


def lambdas() -> keras.Model:
    return stack(layers.Lambda(lambda x: 2 * x))


def float8() -> keras.Model:
    model = stack(layers.Dense(8))
    model.layers[0].quantize("float8")
    return model


def all_frozen() -> keras.Model:
    model = stack(layers.Dense(4))
    model.trainable = False
    return model


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (lambdas, "ambda"),
        (float8, "a float that moves by its gradient"),
        (all_frozen, "must have trainable weights"),
        (lambda: keras.Sequential([layers.Dense(3)]), "must be built"),
    ],
)
def test_the_error_for_an_unsupported_model_gives_the_reason(
    make_model: Callable[[], keras.Model], message: str
) -> None:
    model = make_model()
    model.compile("sgd", "mse")
    with pytest.raises(ConfigurationError, match=message):
        trained(model, batches_for(classes_of(stack())))

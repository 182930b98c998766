"""Draws of whole models: their forms, the arguments of a layer, the options of `compile`, and the rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import layers

from support.draws.layers import VECTOR, Inner, Place, integers
from support.draws.parts import CONSTRAINTS, INITIALIZERS, REGULARIZERS, Draw

ROWS, STEPS, LAST = 8, 6, 5


@dataclass
class Network:
    """The parts of a model: an input, a function that ends in a layer ``first`` of four units, and a head's activation.

    Args:
        body: from the symbolic input to a matrix of four columns.
    """

    place: Place
    body: Inner
    activation: str
    units: int

    def head(self, x: Any, name: str = "head") -> Any:
        return self.last(name=name)(x)

    def last(self, **options: Any) -> layers.Layer:
        return layers.Dense(self.units, self.activation, **options)

    def input(self, **options: Any) -> Any:
        return keras.Input(self.place.shape, dtype=self.place.dtype, **options)


@dataclass
class Built:
    """A model that is not compiled; the places of its inputs in their order, and the names of its outputs.

    Args:
        inputs: names of the inputs, if they are a dictionary.
        outputs: names of the outputs; empty for a single one.
        keyed: whether the outputs are a dictionary.
        whole: whether each mini-batch must have all rows.
        nested: whether the inputs after the first one are a list in the list.
        steps: of an output for each time step; None: an output for each row.
    """

    model: keras.Model
    places: tuple[Place, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    keyed: bool = False
    whole: bool = False
    steps: int | None = None
    nested: bool = False


Form = Callable[[Network], Built]


@keras.saving.register_keras_serializable("draws")
class Guided(keras.Model):
    """A model whose training step is the one in Keras' guide, for any backend with a tape."""

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


@keras.saving.register_keras_serializable("draws")
class Extended(keras.Model):
    """A model with an own loss on top of the compiled one, and an own `compile` argument."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **more: Any
    ) -> Any:
        loss = super().compute_loss(x, y, y_pred, sample_weight, **more)
        return loss + 0.01 * keras.ops.mean(keras.ops.square(y_pred))


@keras.saving.register_keras_serializable("draws")
class Own(keras.Model):
    """A subclassed model, built by a call."""

    def __init__(self, activation: str = "linear", units: int = 3, **options: Any) -> None:
        super().__init__(**options)
        self.activation, self.units = activation, units
        self.hidden, self.out = layers.Dense(5, "tanh"), layers.Dense(units, activation)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.hidden(x))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "activation": self.activation, "units": self.units}


@keras.saving.register_keras_serializable("draws")
class Tail(keras.Model):
    """A subclassed model that other models use as a layer."""

    def __init__(self, activation: str = "linear", units: int = 3, **options: Any) -> None:
        super().__init__(**options)
        self.activation, self.units = activation, units
        self.out = layers.Dense(units, activation)

    def call(self, x: Any) -> Any:
        return self.out(x)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "activation": self.activation, "units": self.units}


@keras.saving.register_keras_serializable("draws")
class Penalized(layers.Layer):
    """A layer that adds a loss, counts its calls in an integer, and averages what it sees."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="calls")
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1)
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(self.scale)))
        return x * self.scale


@keras.saving.register_keras_serializable("draws")
class Factor(layers.Layer):
    """A layer with settings that its constructor does not take."""

    factor = 1.0

    def call(self, x: Any) -> Any:
        return self.factor * x


def functional(net: Network, kind: Any = keras.Model, **options: Any) -> Built:
    x = net.input()
    return Built(kind(x, net.head(net.body(x)), **options), (net.place,))


def sequential(net: Network) -> Built:
    x = net.input()
    parts = keras.Model(x, net.body(x))
    listed = [layers.Activation("linear"), parts, net.last()]
    return Built(keras.Sequential([net.input(), *listed]), (net.place,))


def with_input_shape(net: Network) -> Built:
    x = net.input()
    first = layers.Reshape(net.place.shape, input_shape=net.place.shape, dtype=None)
    model = keras.Sequential([first, keras.Model(x, net.body(x)), net.last()])
    return Built(model, (net.place._replace(dtype="float32"),))


def dense_of(**argument: Any) -> Form:
    """Return the form of a model that begins with a Dense of an argument that says its input's shape."""

    def form(net: Network) -> Built:
        return Built(keras.Sequential([layers.Dense(4, **argument), net.last()]), (VECTOR,))

    return form


def fixed_rows(net: Network) -> Built:
    x = net.input(batch_size=ROWS)
    return Built(keras.Model(x, net.head(net.body(x))), (net.place,), whole=True)


def frozen(net: Network) -> Built:
    x = net.input()
    body = keras.Model(x, net.body(x), name="base")
    body.trainable = False
    return Built(keras.Model(x, net.head(body(x))), (net.place,))


def unfrozen(net: Network) -> Built:
    built = frozen(net)
    built.model.get_layer("base").trainable = True
    return built


def in_inference(net: Network) -> Built:
    x = net.input()
    body = keras.Model(x, net.body(x), name="base")
    return Built(keras.Model(x, net.head(body(x, training=False))), (net.place,))


def listed_inputs(net: Network) -> Built:
    x, other = net.input(), keras.Input(VECTOR.shape, name="other")
    return Built(keras.Model([x, other], net.head(layers.Concatenate()([net.body(x), other]))), (net.place, VECTOR))


def keyed_inputs(net: Network) -> Built:
    ids = integers(5)
    x, other = net.input(name="x"), keras.Input((), dtype="int32", name="ids")
    joined = layers.Concatenate()([net.body(x), layers.Embedding(5, 2)(other)])
    return Built(keras.Model({"ids": other, "x": x}, net.head(joined)), (ids, net.place), inputs=("ids", "x"))


def keyed_outputs(net: Network) -> Built:
    x = net.input()
    hidden = net.body(x)
    model = keras.Model(x, {"b": net.head(hidden, "two"), "a": net.head(layers.Dense(2)(hidden), "one")})
    return Built(model, (net.place,), outputs=("b", "a"), keyed=True)


def listed_outputs(net: Network) -> Built:
    x = net.input()
    hidden = net.body(x)
    model = keras.Model(x, [net.head(hidden, "one"), net.head(layers.Dense(2)(hidden), "two")])
    return Built(model, (net.place,), outputs=("one", "two"))


def tied(net: Network) -> Built:
    x = net.input()
    shared, hidden = layers.Dense(4, "tanh"), net.body(x)
    return Built(keras.Model(x, net.head(shared(shared(hidden)))), (net.place,))


def tied_by_assignment(net: Network) -> Built:
    x = net.input()
    one, two = layers.Dense(4, "tanh"), layers.Dense(4)
    model = keras.Model(x, net.head(two(one(net.body(x)))))
    two._tracker.unlock()  # noqa: SLF001 - a layer assigns it in `build`
    two._kernel = one._kernel  # noqa: SLF001 - the same
    two._tracker.lock()  # noqa: SLF001 - the same
    return Built(model, (net.place,))


def own_tail(net: Network) -> Built:
    x = net.input()
    return Built(keras.Model(x, Tail(net.activation, net.units)(net.body(x))), (net.place,))


def own_model(net: Network) -> Built:
    model = Own(net.activation, net.units)
    model(np.zeros((1, 6), np.float32))
    return Built(model, (VECTOR,))


def deferred(net: Network) -> Built:
    model = keras.Sequential([layers.Dense(4), net.last()])
    model(np.zeros((1, 6), np.float32))
    return Built(model, (VECTOR,))


def penalized(net: Network) -> Built:
    x = net.input()
    return Built(keras.Model(x, net.head(Penalized()(net.body(x)))), (net.place,))


def with_setting(net: Network) -> Built:
    x = net.input()
    layer = Factor()
    layer.factor = 0.3
    return Built(keras.Model(x, net.head(layer(net.body(x)))), (net.place,))


def changed_weights(net: Network) -> Built:
    """Return a model whose weights are not those of its initializers, one of which is not trained."""
    built = functional(net)
    head = built.model.get_layer("head")
    head.bias.assign([0.5, -0.5, 0.25][: net.units])
    head.bias.trainable = False
    return built


def renamed(net: Network) -> Built:
    return functional(net, name="mine")


def trained_before(net: Network) -> Built:
    """Return a model that will have taken steps, so that its optimizer has a state; see `jobs.change`."""
    return functional(net)


def of_operations(net: Network) -> Built:
    """Return a model that calls functions of Keras between its layers."""
    x = net.input()
    hidden = net.body(x)
    hidden = (
        keras.ops.tanh(hidden) + 0.5 * keras.ops.flip(hidden, axis=-1) - keras.ops.mean(hidden, axis=-1, keepdims=True)
    )
    return Built(keras.Model(x, net.head(hidden)), (net.place,))


def nested_inputs(net: Network) -> Built:
    x, one, two = net.input(name="x"), keras.Input(VECTOR.shape, name="one"), keras.Input(VECTOR.shape, name="two")
    joined = layers.Concatenate()([net.body(x), one, layers.Dense(2)(two)])
    return Built(keras.Model([x, [one, two]], net.head(joined)), (net.place, VECTOR, VECTOR), nested=True)


def single_key(net: Network) -> Built:
    x = net.input(name="x")
    return Built(keras.Model({"x": x}, {"out": net.head(net.body(x))}), (net.place,), ("x",), ("out",), keyed=True)


def for_each_step(net: Network) -> Built:
    """Return a model with an output for each time step, some of which are masked."""
    ids = keras.Input((5,), dtype="int32")
    hidden = layers.GRU(4, return_sequences=True)(layers.Embedding(7, 3, mask_zero=True)(ids))
    return Built(keras.Model(ids, net.head(hidden)), (integers(7, 5),), steps=5)


@keras.saving.register_keras_serializable("draws")
class Averaging(layers.Layer):
    """A layer that is not trained, and averages what it sees in training."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
        return x - self.mean


def frozen_state(net: Network) -> Built:
    """Return a model with a frozen layer whose state moves all the same."""
    x = net.input()
    return Built(keras.Model(x, net.head(Averaging(trainable=False)(net.body(x)))), (net.place,))


FORMS: dict[str, Form] = {
    "operations": of_operations,
    "nested inputs": nested_inputs,
    "single key": single_key,
    "for each step": for_each_step,
    "frozen state": frozen_state,
    "changed rate": functional,
    "frozen once compiled": functional,
    "frozen once trained": functional,
    "counted steps": functional,
    "functional": functional,
    "sequential": sequential,
    "input_shape": with_input_shape,
    "input_dim": dense_of(input_dim=6),
    "Dense with input_shape": dense_of(input_shape=(6,)),
    "fixed rows": fixed_rows,
    "frozen": frozen,
    "unfrozen": unfrozen,
    "in inference": in_inference,
    "listed inputs": listed_inputs,
    "keyed inputs": keyed_inputs,
    "keyed outputs": keyed_outputs,
    "listed outputs": listed_outputs,
    "tied": tied,
    "tied by assignment": tied_by_assignment,
    "own tail": own_tail,
    "own model": own_model,
    "deferred": deferred,
    "penalized": penalized,
    "with a setting": with_setting,
    "changed weights": changed_weights,
    "renamed": renamed,
    "trained before": trained_before,
    "the guide's step": lambda net: functional(net, Guided),
    "own loss of the model": lambda net: functional(net, Extended),
}


@dataclass(frozen=True)
class First:
    """The arguments of the layer ``first``, and what happens to it once it is built."""

    arguments: Callable[[], Mapping[str, Any]] = dict
    change: Callable[[Any], Any] = lambda layer: None
    made: Callable[..., Any] = layers.Dense


@keras.saving.register_keras_serializable("draws")  # type: ignore[untyped-decorator]  # Keras has no types
def waves(x: Any) -> Any:
    return keras.ops.sin(x)


def quantized_lora(layer: Any) -> None:
    layer.quantize("int8")
    layer.enable_lora(2)


def lora(layer: Any) -> None:
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(0.1 * np.random.default_rng(1).normal(size=layer.lora_kernel_b.shape))


def einsum(units: int, **arguments: Any) -> layers.Layer:
    return layers.EinsumDense("ab,bc->ac", units, **arguments)


def no_training(layer: Any) -> None:
    layer.kernel.trainable = False


def _made(argument: str, make: Callable[[], Any]) -> dict[str, Any]:
    return {argument: make()}


#: By an argument of a layer, or a method: how the layer ``first`` is made.
ARGUMENTS: dict[str, First] = {
    "none": First(),
    "use_bias": First(lambda: {"use_bias": False}),
    "activation": First(lambda: {"activation": "silu"}),
    "own activation": First(lambda: {"activation": waves}),
    "unregistered activation": First(lambda: {"activation": keras.ops.sin}),
    "activity_regularizer": First(lambda: {"activity_regularizer": "l2"}),
    "trainable": First(lambda: {"trainable": False}),
    "autocast": First(lambda: {"autocast": False}),
    "lora_rank": First(lambda: {"lora_rank": 2, "lora_alpha": 4}),
    "enable_lora": First(change=lora),
    "enable_lora of EinsumDense": First(change=lora, made=einsum),
    "quantize": First(change=lambda layer: layer.quantize("int8")),
    "quantize and enable_lora": First(change=quantized_lora),
    "kernel.trainable": First(change=no_training),
    "mixed_float16": First(lambda: {"dtype": "mixed_float16"}),
    "mixed_bfloat16": First(lambda: {"dtype": "mixed_bfloat16"}),
    "bfloat16": First(lambda: {"dtype": "bfloat16"}),
    "float64": First(lambda: {"dtype": "float64"}),
    "bias_constraint": First(lambda: {"bias_constraint": "non_neg"}),
    "bias_regularizer": First(lambda: {"bias_regularizer": "l1"}),
    "bias_initializer": First(lambda: {"bias_initializer": keras.initializers.RandomNormal(seed=2)}),
    **{f"constraint {name}": First(partial(_made, "kernel_constraint", make)) for name, make in CONSTRAINTS.items()},
    **{f"regularizer {name}": First(partial(_made, "kernel_regularizer", make)) for name, make in REGULARIZERS.items()},
    **{f"initializer {name}": First(partial(_made, "kernel_initializer", make)) for name, make in INITIALIZERS.items()},
}
#: Arguments of `compile` that are not drawn as loss, metrics or optimizer.
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "run_eagerly": {"run_eagerly": True},
    "jit_compile": {"jit_compile": True},
    "no jit_compile": {"jit_compile": False},
    "loss_weights": {"loss_weights": 0.25},
    "weighted_metrics": {"weighted_metrics": True},
    "steps_per_execution": {"steps_per_execution": 2},
    "auto_scale_loss": {"auto_scale_loss": False},
    "named": {},
    "listed": {},
}
OPTION_REASONS = {"optimizer": "drawn", "loss": "drawn", "metrics": "drawn"}

#: Global dtype policies, and other settings of ``keras.config``.
SETTINGS_OF_KERAS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "epsilon": {"epsilon": 1e-3},
    "floatx": {"floatx": "float64"},
    "mixed_float16": {"dtype_policy": "mixed_float16"},
    "mixed_bfloat16": {"dtype_policy": "mixed_bfloat16"},
    "bfloat16": {"dtype_policy": "bfloat16"},
    "float64": {"dtype_policy": "float64"},
}

#: Rules with their hyper-parameters; of each rule, the window divides the steps.
RULES: list[tuple[str, dict[str, Any]]] = [
    ("downpour", {"window": 1}),
    ("downpour", {"window": 3}),
    ("zealous_downpour", {"window": 4}),
    ("zealous_downpour", {"window": 4, "explore": True}),
    ("agn", {"window": 3}),
    ("dynsgd", {"window": 2}),
    ("adag", {"window": 3}),
    ("aeasgd", {"window": 2, "rho": 4.0, "learning_rate": 0.1}),
    ("eamsgd", {"window": 3, "rho": 4.0, "learning_rate": 0.1}),
    ("easgd", {"window": 2, "rho": 4.0, "learning_rate": 0.1}),
    ("averaging", {"window": None}),
    ("diloco", {"window": 3}),
    ("fedopt", {"window": 3}),
    ("delayed_nesterov", {"window": 2}),
    ("mla", {"window": 3}),
    ("delay_adaptive", {"window": 2}),
    ("fedbuff", {"window": 2}),
    ("fadas", {"window": 3, "epsilon": 1e-3}),
    ("ringmaster", {"window": 2}),
    ("daso", {"cool_down": 0}),
    *[(name, {}) for name in ("asgd", "ssgd", "dc_asgd", "dana_dc")],
    *[(name, {"momentum": 0.5}) for name in ("asgdm", "dana_slim", "dana_zero", "lwp", "multi_asgd", "nag_asgd")],
    *[(name, {"momentum": 0.5}) for name in ("ormo", "shifted_momentum", "smega2", "ssgdm", "ssgdm_local")],
]


def first_layer(name: str) -> Inner:
    """Return the function that flattens its input and calls the layer ``first``."""
    first = ARGUMENTS[name]

    def call(x: Any) -> Any:
        flat = layers.Flatten()(x)
        layer = first.made(4, name="first", **first.arguments())
        y = layer(flat)
        first.change(layer)
        return y

    return call


def rows_of(place: Place, draw: Draw, rows: int) -> np.ndarray:
    return place.draw(draw, (rows, *place.shape))


#: Settings of ``keras.config``, by the name after ``set_``, and classes of dtype policies.
SETTINGS_DRAWN = {name for settings in SETTINGS_OF_KERAS.values() for name in settings}
SETTING_REASONS = {
    "backend": "one backend for a process",
    "image_data_format": "TensorFlow computes no convolution of channels_first on a CPU",
    "max_epochs": "it shortens `fit`, which workers do not call",
    "max_steps_per_epoch": "it shortens `fit`, which workers do not call",
}
POLICIES = {"DTypePolicy": "mixed_float16", "QuantizedDTypePolicy": "quantize", "FloatDTypePolicy": "bfloat16"}
_AFTER_TRAINING = "a layer that is quantized after training has no weights to train"
POLICY_REASONS = {
    "AWQDTypePolicy": _AFTER_TRAINING,
    "GPTQDTypePolicy": _AFTER_TRAINING,
    "Int4DTypePolicy": "as int8, which is drawn",
    "QuantizedFloat8DTypePolicy": "refused: its scales move without a gradient",
    "DTypePolicyMap": "it gives policies, which are drawn, to the parts of a composite layer",
}
ARGUMENT_REASONS = {
    "dtype": "drawn as policies",
    "name": "every layer has one",
    "units": "every layer has them",
    "kernel_initializer": "drawn by class",
    "kernel_regularizer": "drawn by class",
    "kernel_constraint": "drawn by class",
    "lora_alpha": "drawn with `lora_rank`",
    "quantization_config": "drawn as `quantize`",
}

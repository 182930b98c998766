"""Tests of what `distkeras.private_keras` expects of Keras: each names the member that a newer Keras has changed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import keras
import numpy as np
import pytest
from keras import layers

from distkeras import private_keras
from distkeras.keras_model.archive import to_bytes
from distkeras.keras_model.attributes import lost, lost_from_model


@contextmanager
def needs(member: str) -> Iterator[None]:
    """Fail with the name of a member of Keras if the code within fails."""
    try:
        yield
    except Exception as error:
        text = f"Keras {keras.__version__}: `{member}` is gone or has changed; `distkeras.private_keras` needs it"
        raise AssertionError(f"{text}: {error!r}") from error


def small(**options: Any) -> keras.Model:
    """A functional model that holds a Sequential one, and is compiled."""
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.BatchNormalization()], name="inner")
    given = keras.Input((3,), name="x")
    model = keras.Model({"x": given}, {"y": layers.Dense(1, name="y")(inner(given))})
    model.compile(**{"optimizer": keras.optimizers.SGD(0.5, momentum=0.9), "loss": "mse"} | options)
    return model


def built(kind: Any, **options: Any) -> tuple[Any, Any]:
    """An optimizer, built for a variable, and the variable."""
    variable, optimizer = keras.Variable(np.ones((2, 2), np.float32)), kind(0.5, **options)
    optimizer.build([variable])
    return optimizer, variable


def saved(model: keras.Model) -> bytes:
    return to_bytes(model, plain=True)


def same(found: Any, expected: Any) -> None:
    """Compare the objects in two lists."""
    assert [id(one) for one in found] == [id(one) for one in expected], f"received {found}, expected {expected}"


def test_layers_at_every_depth() -> None:
    model = small()
    with needs("keras.Layer._flatten_layers"):
        names = [layer.name for layer in private_keras.all_layers(model)]
        assert names[0] == model.name
        assert {"inner", "y", "x", model.get_layer("inner").layers[0].name} <= set(names)
    with needs("keras.Layer._flatten_layers(include_self, recursive)"):
        same(private_keras.inner_layers(model), model.layers)


def test_lists_of_a_layers_own() -> None:
    normalization = layers.BatchNormalization()
    normalization.build((None, 3))
    normalization.gamma.trainable = False
    outer = layers.TimeDistributed(normalization)
    with needs("keras.Layer._trainable_variables, _non_trainable_variables"):
        trainable, others = private_keras.created_variables(normalization)
        same(trainable, [normalization.gamma, normalization.beta])
        same(others, [normalization.moving_mean, normalization.moving_variance])
        assert private_keras.created_variables(outer) == ([], [])
    with needs("keras.Layer._seed_generators"):
        dropout = layers.Dropout(0.5, seed=7)
        (generator,) = private_keras.seed_generators(dropout)
        assert isinstance(generator, keras.random.SeedGenerator)
        assert generator.get_config()["seed"] == 7
        assert private_keras.seed_generators(layers.TimeDistributed(dropout)) == []


def test_the_flag_of_a_layer_itself() -> None:
    model = small()
    with needs("keras.Layer._trainable"):
        setattr(model, private_keras.OWN_FLAG, False)
        assert not model.trainable
        assert model.get_layer("y").trainable


def test_attributes_that_are_no_settings() -> None:
    model = small()
    model.fit({"x": np.ones((4, 3), np.float32)}, {"y": np.ones((4, 1), np.float32)}, verbose=0)
    copy = private_keras.load_model(BytesIO(saved(model)), {}, compiled=True, safe=True)
    found = lost_from_model(model, copy) or lost(model.optimizer, copy.optimizer)
    assert found is None, f"Keras {keras.__version__}: `distkeras.private_keras.HISTORY` must name: {found}"


def test_the_value_of_a_variable() -> None:
    variable = keras.Variable(np.ones(2, np.float32))
    with needs("keras.Variable._value"):
        value = private_keras.value_of(variable)
        assert value is not variable
        assert value is variable.value or keras.backend.backend() == "torch"
        assert private_keras.value_of(value) is value
        with keras.StatelessScope():
            assert private_keras.value_of(keras.Variable("zeros", shape=(2,))) is None


def test_variables_take_over_values() -> None:
    zeros, ones = keras.Variable(np.zeros(2, np.float32)), keras.Variable(np.ones(2, np.float32))
    with needs("keras.Variable._value"):
        private_keras.set_values([zeros], [private_keras.value_of(ones)])
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(zeros), [1, 1])


def test_the_specification_of_a_result() -> None:
    model = small(metrics=["accuracy"])
    x, y = {"x": np.ones((4, 3), np.float32)}, {"y": np.ones((4, 1), np.float32)}
    with needs("keras.src.backend.compute_output_spec"):
        predicted = private_keras.specification(model, x, training=False)
        logs = private_keras.specification(model.compute_metrics, x, y, predicted, sample_weight=None)
        assert tuple(predicted["y"].shape) == (4, 1)
        assert {name: value.shape for name, value in logs.items()} == {"accuracy": (), "loss": ()}
        assert all(keras.ops.convert_to_numpy(variable).shape == () for variable in model.metrics_variables)


def test_the_mask_of_a_tensor() -> None:
    with needs("_keras_mask"):
        embedded = layers.Embedding(4, 2, mask_zero=True)(np.array([[1, 0]]))
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(private_keras.mask_of(embedded)), [[True, False]])
        assert private_keras.mask_of(layers.Dense(2)(np.ones((1, 2), np.float32))) is None


def test_the_structure_of_a_functional_model() -> None:
    model = small()
    with needs("_inputs_struct, _outputs_struct of a functional model"):
        inputs, outputs = private_keras.structures(model)
        assert (list(inputs), list(outputs)) == (["x"], ["y"])
        same([inputs["x"], outputs["y"]], [*model.inputs, *model.outputs])
        assert private_keras.structures(model.get_layer("inner")) == (None, None)
    with needs("keras.Model.input, output"):
        assert model.input == inputs
        assert model.output == outputs
    with needs("keras.Sequential._functional"):
        same(private_keras.functional_in(model.get_layer("inner")).layers[1:], model.get_layer("inner").layers)
        assert private_keras.functional_in(keras.Sequential([layers.Dense(1)])) is None


def test_the_graph_of_a_functional_model() -> None:
    model = small()
    inner, last = model.get_layer("inner"), model.get_layer("y")
    with needs("keras.Operation._inbound_nodes"):
        (call,) = private_keras.calls_of(last)
        assert call.operation is last
        same(call.output_tensors, model.outputs)
    with needs("_nodes_by_depth of a functional model"):
        operations = {node.operation.name for node in private_keras.nodes_of(model)}
        assert operations == {"x", "inner", "y"}
    with needs("keras.KerasTensor._keras_history"):
        node = private_keras.maker_of(call.input_tensors[0])
        assert node.operation is inner
        same(node.input_tensors, model.inputs)
    with needs("keras.Operation._outbound_nodes"), private_keras.nodes_removed([last, *model.operations]):
        last(keras.Input((2,)))
        assert len(private_keras.calls_of(last)) == 2
    same(private_keras.calls_of(last), [call])
    given = {id(call.input_tensors[0]): keras.Input((2,))}
    with needs("arguments.fill_in of a node"):
        args, options = private_keras.arguments_with(call, given)
        same(args, given.values())
        assert not any(options.values())
    with needs("keras.src.ops.node.Node"), private_keras.nodes_removed([last]):
        outputs = private_keras.call_recorded(call, given)
        again = keras.Model(next(iter(given.values())), outputs)
        assert again.layers[-1] is last
        assert tuple(again.outputs[0].shape) == (None, 1)


def test_what_a_model_is_compiled_with() -> None:
    model = small(run_eagerly=True)
    with needs("keras.Model._compile_config"):
        found = private_keras.compile_arguments(model)
        assert found["optimizer"] is model.optimizer
        assert (found["loss"], found["run_eagerly"], found["loss_weights"]) == ("mse", True, None)
        assert private_keras.compile_arguments(keras.Sequential()) == {}


def test_the_losses_of_a_model() -> None:
    x, y = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)
    model = small(run_eagerly=True)
    with needs("keras.Model._compute_loss, _loss_tracker"):
        predicted = model({"x": x})
        loss = private_keras.counted_loss(model, {"x": x}, {"y": y}, predicted, None, 4)
        loss = float(keras.ops.convert_to_numpy(loss))
        assert loss == pytest.approx(float(np.mean((keras.ops.convert_to_numpy(predicted["y"]) - y) ** 2)))
        assert model.metrics[0].name == "loss"
        assert float(model.metrics[0].result()) == pytest.approx(loss)
    with needs("keras.Model._compile_loss"):
        given = keras.Input((3,))
        two = keras.Model(given, [layers.Dense(1, name="a")(given), layers.Dense(1, name="b")(given)])
        assert private_keras.losses_of_outputs(two) == []
        two.compile("sgd", ["mse", "mse"], run_eagerly=True)
        two.train_on_batch(x, [y, y])
        assert [metric.name for metric in private_keras.losses_of_outputs(two)] == ["a_loss", "b_loss"]


def test_metrics_are_made_without_a_step() -> None:
    model, x = small(metrics=["mae"]), np.ones((4, 3), np.float32)
    with needs("keras.Model._symbolic_build"):
        before = [np.array(weight) for weight in model.get_weights()]
        private_keras.make_metrics(model, ({"x": x}, {"y": np.ones((4, 1), np.float32)}, None))
        assert [variable.name for variable in model.metrics_variables] == ["total", "count"] * 2
        for value, weight in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(value, weight)


def test_the_options_of_a_loss() -> None:
    with needs("_fn_kwargs of a loss"):
        assert private_keras.function_options(keras.losses.Huber(delta=3.0))["delta"] == 3.0
    assert private_keras.function_options(lambda y, predicted: predicted) == {}


@pytest.mark.skipif(
    keras.backend.backend() == "torch" or (keras.backend.backend() == "jax" and sys.version_info < (3, 12)),
    reason="Keras profiles JAX from Python 3.12 on, and PyTorch nowhere",
)
def test_the_batches_that_tensorboard_profiles() -> None:
    with needs("keras.callbacks.TensorBoard._start_batch"):
        assert getattr(keras.callbacks.TensorBoard(profile_batch=(3, 5)), private_keras.FIRST_PROFILED) == 3
        assert getattr(keras.callbacks.TensorBoard(), private_keras.FIRST_PROFILED) == 0


def test_the_rate_and_the_count_of_an_optimizer() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    with needs("keras.Optimizer._learning_rate"):
        assert private_keras.rate_of(keras.optimizers.SGD(schedule)) is schedule
        assert isinstance(private_keras.rate_of(keras.optimizers.SGD(0.5)), keras.Variable)
    with needs("keras.Optimizer._iterations"):
        optimizer, variable = built(keras.optimizers.SGD, gradient_accumulation_steps=2)
        for _ in range(3):
            optimizer.apply([keras.ops.ones((2, 2))])
        assert (int(private_keras.step_count(optimizer)), int(optimizer.iterations)) == (3, 1)
    with needs("keras.Optimizer._trainable_variables"):
        same(private_keras.moved_variables(optimizer), [variable])


def test_clipping() -> None:
    with needs("keras.Optimizer._clip_gradients"):
        optimizer, _ = built(keras.optimizers.SGD, clipvalue=0.5)
        (gradient,) = private_keras.clipped(optimizer, [keras.ops.ones((2, 2))])
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(gradient), np.full((2, 2), 0.5, np.float32))


@pytest.mark.parametrize(
    ("kind", "options", "names"),
    [
        ("Adagrad", {}, ["accumulator"]),
        ("Adam", {}, ["momentum", "velocity"]),
        ("SGD", {"momentum": 0.9}, ["momentum"]),
        ("SGD", {}, []),
    ],
)
def test_slots(kind: str, options: dict[str, Any], names: list[str]) -> None:
    with needs(f"_accumulators, _momentums, _velocities, momentums or _get_variable_index of keras.optimizers.{kind}"):
        optimizer, variable = built(getattr(keras.optimizers, kind), **options)
        slots = private_keras.slots_of(optimizer, variable)
        assert [slot.name.rpartition("_")[2] for slot in slots] == names
        same(slots, [own for own in optimizer.variables if tuple(own.shape) == (2, 2)])


def test_the_variables_without_weight_decay() -> None:
    with needs("keras.Optimizer._var_key, _exclude_from_weight_decay"):
        one, other = (keras.Variable(np.ones(2, np.float32)) for _ in range(2))
        optimizer = keras.optimizers.SGD(1.0, weight_decay=0.5)
        assert private_keras.undecayed(optimizer) == set()
        optimizer.exclude_from_weight_decay([one])
        assert private_keras.undecayed(optimizer) == set(private_keras.keys_of(optimizer, [one]))
        private_keras.set_undecayed(optimizer, private_keras.keys_of(optimizer, [other]))
        optimizer.build([one, other])
        optimizer.apply([keras.ops.zeros((2,)), keras.ops.zeros((2,))])
        assert [float(np.sum(keras.ops.convert_to_numpy(variable))) for variable in (one, other)] == [1.0, 2.0]


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the class is of this backend")
def test_an_optimizer_of_tensorflow_without_state() -> None:
    with needs("keras.optimizers.Optimizer.__bases__, and the methods that TensorFlow's base class overrides"):
        kind, methods = private_keras.stateless_methods()
        assert issubclass(keras.optimizers.Optimizer, kind)
        assert all(callable(getattr(kind, name)) for name in methods)
        optimizer, variable = built(keras.optimizers.Adam)
        key = methods["_var_key"](optimizer, variable)
        assert [key] == private_keras.keys_of(optimizer, [variable])


def test_archives() -> None:
    x, y = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)
    model = small()
    model.train_on_batch({"x": x}, {"y": y})
    with needs("keras.src.saving.saving_lib.load_model, serialization_lib.SafeModeScope"):
        data = saved(model)
        copy = private_keras.load_model(BytesIO(data), {}, compiled=False, safe=True)
        assert not copy.compiled
        for one, other in zip(model.weights, copy.weights, strict=True):
            np.testing.assert_array_equal(one, other)
    with needs("keras.src.saving.saving_lib.H5IOStore, _load_state"), ZipFile(BytesIO(data)) as archive:
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
        optimizer.build(copy.trainable_variables)
        private_keras.load_optimizer(optimizer, BytesIO(archive.read("model.weights.h5")))
        for one, other in zip(model.optimizer.variables, optimizer.variables, strict=True):
            np.testing.assert_array_equal(one, other)
        misfit = keras.optimizers.SGD(0.5, momentum=0.9)
        misfit.build([keras.Variable(np.ones(7, np.float32)) for _ in copy.trainable_variables])
        with pytest.raises(ValueError, match="shape"):
            private_keras.load_optimizer(misfit, BytesIO(archive.read("model.weights.h5")))


class Assigning(layers.Layer):
    """A layer whose `build` assigns to variables, and leaves one to its initializer."""

    def build(self, shape: Any) -> None:
        self.once = self.add_weight(shape=shape, initializer="ones")
        self.once.assign(self.once + 3)
        self.twice = keras.Variable("ones", shape=shape)
        self.twice.assign(self.twice * 5)
        self.twice.assign_add([1.0, 2.0])
        self.never = self.add_weight(shape=shape, initializer=keras.initializers.Constant(7))


def test_variables_that_are_created_without_initializers() -> None:
    outside = keras.Variable(np.ones(2, np.float32))

    def load() -> Any:
        outside.assign(outside + 1)
        layer = Assigning()
        layer.build((2,))
        return layer

    with needs("keras.Variable._initializer, keras.StatelessScope.add_update"):
        layer = private_keras.without_initializers(load)
    expected = [(outside, [2, 2]), (layer.once, [4, 4]), (layer.twice, [6, 7]), (layer.never, [7, 7])]
    for variable, values in expected:
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), values)
    layer.once.assign([8, 8])  # is not undone when other variables are initialized
    with keras.StatelessScope():
        keras.Variable("ones", shape=(1,))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(layer.once), [8, 8])


def test_a_model_is_loaded_without_initializers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an initializer was called")

    model = small()
    path = tmp_path / "model.keras"
    path.write_bytes(saved(model))
    monkeypatch.setattr(keras.initializers.GlorotUniform, "__call__", refuse)
    with needs("keras.Variable._initializer, keras.StatelessScope.add_update"):
        copy = private_keras.without_initializers(lambda: keras.saving.load_model(path, compile=False))
    for one, other in zip(model.weights, copy.weights, strict=True):
        np.testing.assert_array_equal(one, other)
    if keras.config.backend() == "jax":
        private_keras.load_model(BytesIO(path.read_bytes()), {}, compiled=False, safe=True)


class FromArray(layers.Layer):
    """A layer with a variable that no initializer makes, as Keras refuses it in a stateless scope."""

    def build(self, _: Any) -> None:
        self.w = keras.Variable(np.array([2, 3], np.float32))

    def call(self, x: Any) -> Any:
        return x * self.w


def test_a_variable_from_an_array_is_loaded() -> None:
    data = saved(keras.Sequential([keras.Input((2,)), FromArray()]))
    with pytest.raises(ValueError, match="stateless scope"):
        private_keras.without_initializers(lambda: called(FromArray()))
    model = private_keras.load_model(BytesIO(data), {"FromArray": FromArray}, compiled=False, safe=True)
    np.testing.assert_array_equal(model.weights[0], [2, 3])


def called(layer: Any) -> Any:
    layer(keras.Input((2,)))
    return layer


def test_code_in_archives() -> None:
    data = saved(keras.Sequential([keras.Input((3,)), layers.Lambda(lambda x: x + 1)]))
    with needs("keras.src.saving.serialization_lib.in_safe_mode, SafeModeScope"):
        assert not private_keras.code_is_permitted()
        private_keras.load_model(BytesIO(data), {}, compiled=False, safe=False)
        assert not private_keras.code_is_permitted()
        from keras.src.saving.serialization_lib import SafeModeScope

        with SafeModeScope(None):
            keras.config.enable_unsafe_deserialization()
            assert private_keras.code_is_permitted()
            with pytest.raises(ValueError, match="enable_unsafe_deserialization"):
                private_keras.load_model(BytesIO(data), {}, compiled=False, safe=True)
            assert private_keras.code_is_permitted()


def test_the_global_policy() -> None:
    with needs("keras.src.backend.common.global_state, its attribute dtype_policy"):
        before = private_keras.dtype_policy()
        try:
            keras.config.set_dtype_policy("mixed_bfloat16")
            assert private_keras.dtype_policy() is keras.config.dtype_policy()
            private_keras.forget_dtype_policy()
            assert private_keras.dtype_policy() is None
            assert keras.config.dtype_policy().name == keras.config.floatx()
        finally:
            private_keras.forget_dtype_policy()
            if before is not None:
                keras.config.set_dtype_policy(before)


def test_the_scope_of_custom_objects() -> None:
    with needs("keras.src.backend.common.global_state, its attribute custom_objects_scope_dict"):
        assert private_keras.objects_in_scope() == {}
        with keras.saving.custom_object_scope({"mine": small}):
            assert private_keras.objects_in_scope() == {"mine": small}


def test_tensorflow_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with needs("keras.src.saving.serialization_lib.tf.available"):
        from keras.src.saving import serialization_lib

        monkeypatch.setattr(serialization_lib, "tf", serialization_lib.tf)  # put back at the end
        installed = serialization_lib.tf.available
        private_keras.leave_tensorflow_out()
        monkeypatch.setitem(sys.modules, "tensorflow", sys)
        assert serialization_lib.tf.available is installed
        monkeypatch.delitem(sys.modules, "tensorflow")
        assert not serialization_lib.tf.available


def test_each_function_has_a_test() -> None:
    def parsed(path: str) -> ast.Module:
        return ast.parse(Path(path).read_text())

    functions = {node.name for node in parsed(private_keras.__file__).body if isinstance(node, ast.FunctionDef)}
    called = {node.attr for node in ast.walk(parsed(__file__)) if isinstance(node, ast.Attribute)}
    assert functions <= called

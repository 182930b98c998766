"""One worker's Keras model, as the flat float32 vectors that update rules work on."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import zlib
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import as_weight, flat_weight
from distkeras.keras_model.compiled_steps import (
    CompiledSteps,
    evaluate_batch,
    flat_logs,
    is_own,
    model_inputs,
    packing_as_fit,
)
from distkeras.keras_model.jax_steps import JaxSteps, can_loop
from distkeras.keras_model.keras_config import Settings, applied
from distkeras.keras_model.optimizers import inner_optimizer
from distkeras.keras_model.settable import Settable, assign_rows, settable
from distkeras.keras_model.torch_steps import TorchSteps
from distkeras.keras_model.variables import (
    VariableOrder,
    VariableVector,
    copied,
    layer_states,
    moving_statistics,
    numpy_value,
    scalar,
    select,
    trainable_variables,
)
from distkeras.metric_columns import elements_of
from distkeras.private_keras import all_layers, losses_of_outputs, rate_of, specification, step_count
from distkeras.ps.errors import ConfigurationError, LocalProtocolError
from distkeras.ps.protocol.loop import NO_ROWS, OptimizerState

if TYPE_CHECKING:
    import keras

    from distkeras.data.batches import Batch
    from distkeras.keras_model.gradient_collector import CollectingOptimizer
    from distkeras.keras_model.recipe import Recipe

_Loop = CompiledSteps | JaxSteps | TorchSteps


def has_state(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether a built optimizer's steps depend on earlier steps.

    Plain SGD with a constant learning rate has no such state: only its count of steps, which nothing reads.
    """
    import keras

    if isinstance(rate_of(optimizer), keras.optimizers.schedules.LearningRateSchedule):
        return True
    settings = {id(step_count(optimizer)), id(rate_of(optimizer))}
    return any(id(variable) not in settings for variable in optimizer.variables)


def read_state(optimizer: keras.optimizers.Optimizer, unsent: Container[int] = ()) -> OptimizerState | None:
    """Return a built optimizer's state, without ``unsent``; None if it is stateless, or if a number is not finite."""
    import keras

    if not has_state(optimizer):
        return None
    variables = _sent(optimizer, unsent)
    content, at = np.empty(sum(map(_bytes_of, variables)), np.uint8), 0
    for variable in variables:
        value = np.ascontiguousarray(numpy_value(variable))
        if keras.backend.is_float_dtype(variable.dtype) and not np.isfinite(value).all():
            return None
        content[at : at + value.nbytes] = value.reshape(-1).view(np.uint8)
        at += value.nbytes
    return OptimizerState(layout_of(optimizer, unsent), content, zlib.crc32(content.data))


def load_state(
    optimizer: keras.optimizers.Optimizer, state: OptimizerState | None, unsent: Container[int] = ()
) -> str | None:
    """Set the state of a built optimizer.

    Args:
        optimizer: on failure, none of its variables is changed.
        state: from `read_state`, of an optimizer of the same kind for a model of the same kind; None: there is none.
        unsent: the identities of variables that are not part of the state, and are not changed.

    Returns:
        None if the optimizer is stateless; "" if the state was loaded; else the reason why not.
    """
    import keras

    if not has_state(optimizer):
        return None
    if state is None:
        return "none is kept"
    variables = _sent(optimizer, unsent)
    layout, size = layout_of(optimizer, unsent), state_bytes(optimizer, unsent)
    if state.layout != layout:
        return f"it must be of {layout}. Received: one of {state.layout}"
    if state.content.nbytes != size:
        return f"it must have {size} bytes. Received: {state.content.nbytes}"
    if state.damaged:
        return f"its {size} bytes have another checksum than {state.checksum:#010x}"
    values, at = list[np.ndarray](), 0
    for variable in variables:
        dtype, end = np.dtype(variable.dtype), at + _bytes_of(variable)
        values.append(state.content[at:end].copy().view(dtype).reshape(tuple(variable.shape)))
        at = end
        if keras.backend.is_float_dtype(variable.dtype) and not np.isfinite(values[-1]).all():
            return f"its variable {variable.name!r} is not finite"
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return ""


def state_bytes(optimizer: keras.optimizers.Optimizer, unsent: Container[int] = ()) -> int:
    """Return the bytes of a built optimizer's state, without the variables ``unsent``."""
    return sum(map(_bytes_of, _sent(optimizer, unsent)))


def layout_of(optimizer: keras.optimizers.Optimizer, unsent: Container[int] = ()) -> str:
    """Return a text that two built optimizers share if one can continue from the other's state."""
    kinds = [type(part).__name__ for part in dict.fromkeys((optimizer, inner_optimizer(optimizer)))]
    variables = [(str(variable.dtype), list(variable.shape)) for variable in _sent(optimizer, unsent)]
    digest = hashlib.sha256(json.dumps([kinds, variables, sys.byteorder]).encode()).hexdigest()[:16]
    elements = sum(math.prod(shape) for _, shape in variables)
    dtypes = "/".join(sorted({dtype for dtype, _ in variables}))
    return f"{'.'.join(kinds)} with {len(variables)} variables of {elements} elements, {dtypes} ({digest})"


def _sent(optimizer: Any, unsent: Container[int]) -> list[keras.Variable]:
    return [variable for variable in optimizer.variables if id(variable) not in unsent]


def _bytes_of(variable: keras.Variable) -> int:
    return int(math.prod(variable.shape) * np.dtype(variable.dtype).itemsize)


class KerasReplica:
    """A built and compiled Keras model behind the interface that rules talk to.

    Trainable float variables form one vector of shape ``(size,)``. Its elements are float32 for any precision of the
    model: they are cast on load and on read. Integers, seed generators, metrics and optimizer slots never leave
    the replica.

    On TensorFlow many steps are one compiled loop over ``model.train_step``, traced once per kind of input, for
    any number of steps and any batch size; on JAX, once per batch size, for the models that `can_loop` names. On
    PyTorch the loop is Python's. Other models on JAX, and on TensorFlow those with ``run_eagerly=True``, take each step
    by ``train_on_batch``.

    Args:
        model: built, and compiled with an optimizer.
        order: of the variables in the vectors; None: as the model lists them.

    Raises:
        ConfigurationError: the model is not built, not compiled, has nothing to train, or holds variables whose
            "gradient" is their next value (float8 scales), which no rule can add up.
    """

    def __init__(self, model: keras.Model, order: VariableOrder | None = None) -> None:
        _check_ready(model)
        self.model, self._order = model, order
        #: Those of ``keras.config`` that `prepare` and evaluations apply, on the driver; a task has set them for good.
        self.settings: Settings = {}
        #: In the model's own order, in which an optimizer is built.
        self._trainable = trainable_variables(model)
        statistics = moving_statistics(model)
        self._weights = VariableVector(self._trainable if order is None else select(self._trainable, order.trainable))
        self._moving_statistics = VariableVector(statistics if order is None else select(statistics, order.statistics))
        #: Where each trainable variable lies in the vector.
        self.layout = self._weights.layout
        #: The same for the moving statistics.
        self.moving_statistics = self._moving_statistics.layout
        self._loop = _loop_of(model)
        #: Whether a window of steps is one loop; else each step is a ``train_on_batch``.
        self.loops = self._loop is not None
        self._training_steps = None if self._loop is None else self._loop(model)
        self._gradient_steps: _Loop | None = None
        self._collecting: CollectingOptimizer | None = None  # created on first use: it takes a vector's memory
        self._metric_names: tuple[str, ...] | None = None  # set by `prepare`
        #: What a step reports, of which `metric_names` names the numbers.
        self.reported: tuple[str, ...] = ()
        self._prepared_for: Any = None
        self._next: keras.Model | None = None  # the first step takes over this model's state
        self._values = NO_ROWS  # what the driver has set

    @classmethod
    def of(
        cls, recipe: Recipe, model_file: bytes, order: VariableOrder | None = None, *, to_train: bool = False
    ) -> KerasReplica:
        """Return a replica of the model that ``recipe`` builds, under its settings of ``keras.config``.

        Args:
            to_train: with the state of the optimizer of the driver's model.
        """
        replica = cls(recipe.build(model_file, to_train=to_train), order)
        replica.settings = recipe.settings
        return replica

    @property
    def size(self) -> int:
        """Return the number of elements of the flat weight vector."""
        return self.layout.size

    @property
    def learning_rate(self) -> float:
        """Return the compiled optimizer's learning rate at its current iteration, schedules evaluated."""
        return scalar((self.model if self._next is None else self._next).optimizer.learning_rate)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the names of the loss and the metrics, in the order of the columns of `train`.

        A metric of one number for each class has one for each: "f1_score[0]", "f1_score[1]" and so on.

        Raises:
            LocalProtocolError: nothing was trained yet and `prepare` was not called: Keras chooses the class of
                "accuracy", and the names of per-output metrics, only when it sees labels.
        """
        if self._metric_names is None:
            raise LocalProtocolError("`metric_names` must be asked for after `prepare` or the first step.")
        return self._metric_names

    def prepare(self, batch: Batch) -> None:
        """Build the loss and the metrics from an example, without training.

        Args:
            batch: any mini-batch of the shapes and dtypes to come; zeros suffice.

        Raises:
            ConfigurationError: the loss or a metric does not fit the model's outputs and these labels, or a metric is
                not a scalar.
        """
        if self._next is not None:
            values = self._values
            self._begin_again(batch)
            self.set_values(values)
        if self._metric_names is not None:
            return
        import keras

        # Saved because a recurrent layer draws dropout, and moves its state, in inference mode too.
        before = [(variable, np.array(keras.ops.convert_to_numpy(variable))) for variable in self._changed_by_prepare()]
        try:
            with applied(self.settings):  # losses and metrics are created
                shapes = self._logs_of_own_step(batch) if is_own(self.model, "train_step") else self._logs(batch)
        except ValueError as error:
            raise ConfigurationError(
                "`model` must have inputs, loss and metrics that fit the data. Received: "
                f"x of shape {[a.shape for a in batch.x]}, y of shape {[a.shape for a in batch.y]}: {error}"
            ) from error
        self.model.reset_metrics()
        for variable, value in before:
            variable.assign(value)
        for name, shape in shapes.items():
            if "\n" in name:
                raise ConfigurationError(f"a metric's name must be one line. Received: {name!r}")
            if len(shape) > 1 or None in shape or (shape and name == "loss"):
                raise ConfigurationError(
                    "`metrics` must be single numbers, or arrays of one axis and a fixed length. "
                    f"Received: {name!r} of shape {shape}"
                )
        self.reported = tuple(sorted(shapes, key=lambda name: name != "loss"))  # Keras 3.11 lists it last
        self._metric_names = tuple(part for name in self.reported for part in elements_of(name, shapes[name]))
        self._prepared_for = _kind(batch)

    def _logs(self, batch: Batch) -> dict[str, tuple[int | None, ...]]:
        """Return the names that Keras' own ``train_step`` reports, and of each the shape."""
        if isinstance(self._training_steps, JaxSteps):
            # JAX would compile each operation by itself, which takes longer than to compile the loop. Not every metric
            # can be traced outside of a step; an error that is the data's is raised below.
            with suppress(Exception):
                return self._logs_by(specification, batch)
        return self._logs_by(_call, batch)

    def _logs_by(self, call: Callable[..., Any], batch: Batch) -> dict[str, tuple[int | None, ...]]:
        x, y, weight = model_inputs(self.model, batch.x, batch.y, batch.weight)
        predicted = call(self.model, x, training=False)
        if getattr(self.model, "loss", None) is not None or not batch.y:
            call(self.model.compute_loss, x, y, predicted, weight)
        logs = call(self.model.compute_metrics, x, y, predicted, sample_weight=weight)
        return {name: tuple(getattr(value, "shape", ())) for name, value in logs.items()}

    def _logs_of_own_step(self, batch: Batch) -> dict[str, tuple[int | None, ...]]:
        """Return the same of the user's ``train_step``, which may report other names than the model's metrics have."""
        try:
            if isinstance(self._training_steps, (CompiledSteps, TorchSteps)):
                return self._training_steps.logs(batch)
            return {name: tuple(np.shape(value)) for name, value in self._logs_on_batch(batch).items()}
        except (ValueError, ConfigurationError):
            raise
        except Exception as error:
            raise ConfigurationError(
                f"`train_step` of {type(self.model).__name__} must take a mini-batch as `fit` gives it. Received: "
                f"x of shape {[a.shape for a in batch.x]}, y of shape {[a.shape for a in batch.y]}; it raised "
                f"{type(error).__name__}: {error}"
            ) from error

    def _changed_by_prepare(self) -> list[keras.Variable]:
        if isinstance(self._training_steps, CompiledSteps) or not is_own(self.model, "train_step"):
            return layer_states(self.model)
        self._build_optimizer()  # the step is taken
        return [*_states(self.model), *self.model.optimizer.variables]

    def load(self, vector: np.ndarray) -> None:
        """Set the weights from a float32 vector of shape ``(size,)``; does not keep a reference to it."""
        self._weights.load(vector)

    def read(self, out: np.ndarray) -> None:
        """Fill ``out``, float32 of shape ``(size,)``, with the weights."""
        self._weights.read(out)

    def moved(self, since: np.ndarray, out: np.ndarray) -> None:
        """Fill ``out`` with the weights minus ``since``, both float32 of shape ``(size,)``."""
        self._weights.moved(since, out)

    def load_moving_statistics(self, vector: np.ndarray) -> None:
        """Set the moving statistics from a float32 vector of shape ``(moving_statistics.size,)``."""
        self._moving_statistics.load(vector)
        self.set_values(self._values)  # the workers' average may still have the values before

    def set_values(self, values: np.ndarray) -> None:
        """Set the learning rate and variables that are not trained, as the driver has set them for all workers.

        They stay so: when the moving statistics or the state of the optimizer are loaded, they are set again.

        Args:
            values: float64 ``(numbers, 2)``, rows of place (see `settable`) and value, places ascending.

        Raises:
            ConfigurationError: the model has no such place.
        """
        self._values = values
        for model in filter(None, (self.model, self._next)) if len(values) else ():
            assign_rows(settable(model), values)

    @property
    def settable(self) -> list[Settable]:
        """Return what the driver may set of this model: see `set_values`."""
        text = "the workers' model is another one, since tables travel by rows"
        return settable(self.model, text if self._order is not None else "")

    def read_moving_statistics(self, out: np.ndarray) -> None:
        """Fill ``out``, float32 of shape ``(moving_statistics.size,)``, with the moving statistics."""
        self._moving_statistics.read(out)

    def train(self, batches: Sequence[Batch]) -> np.ndarray:
        """Take one optimizer step per mini-batch, in order.

        Returns:
            float64 array of shape ``(len(batches), len(metric_names))``: the loss and the metrics of each step alone.
        """
        if not batches:
            return np.empty((0, len(self._metric_names or ())), np.float64)
        self.prepare(batches[0])
        self._build_optimizer()
        if not self.loops or self._training_steps is None:
            return np.stack([self._train_on_batch(batch) for batch in batches])
        return self._training_steps.run(batches, self.reported, len(self.metric_names))

    def evaluate(self, batch: Batch, batch_size: int = 2000) -> dict[str, float]:
        """Return loss and metrics in inference mode, named as in `metric_names`; ``batch_size`` rows at a time."""
        with applied(self.settings):
            return self._evaluate(batch, batch_size)

    def _evaluate(self, batch: Batch, batch_size: int) -> dict[str, float]:
        x, y, weight = model_inputs(self.model, batch.x, batch.y, batch.weight)
        results = self.model.evaluate(x, y, sample_weight=weight, batch_size=batch_size, verbose=0, return_dict=True)
        values = {
            part: float(number)
            for name, value in results.items()
            for part, number in zip(elements_of(name, np.shape(value)), np.ravel(value), strict=True)
        }
        whole, rest = divmod(batch.size, batch_size)
        means = [mean for mean in losses_of_outputs(self.model) if float(mean.count) != batch.size]
        if not means or not whole or not rest:
            return values
        # For the losses of single outputs, TensorFlow's graphs weight the last, shorter batch like a whole one.
        sides = (batch.x, batch.y, flat_weight(batch.weight))
        last_x, last_y, weights = (tuple(array[-rest:] for array in side) for side in sides)
        x, y, weight = model_inputs(self.model, last_x, last_y, as_weight(weights))
        self.model.reset_metrics()
        last = evaluate_batch(self.model, x, y, weight)
        for name in (mean.name for mean in means):
            of_whole = values[name] * (whole + 1) - float(last[name])
            values[name] = (of_whole * batch_size + float(last[name]) * rest) / batch.size
        return values

    def gradient(self, batch: Batch, out: np.ndarray) -> np.ndarray:
        """Compute the gradient of the compiled loss on one mini-batch, without changing the weights.

        The optimizer's clipping is applied, for it changes the gradient; its momentum, weight decay and the weights'
        constraints are not. Its iteration count rises by one, so that a schedule of `learning_rate` advances. Under
        ``mixed_float16``, a gradient that overflowed is returned as zeros and the loss scale is lowered, as Keras skips
        such a step.

        Args:
            out: float32 of shape ``(size,)``, filled with the gradient (mean over the batch, as the loss is compiled).

        Returns:
            float64 array of shape ``(len(metric_names),)``: loss and metrics at these weights.
        """
        from distkeras.keras_model.gradient_collector import CollectingOptimizer

        self.prepare(batch)
        if self._collecting is None:
            places = None if self._order is None else self._order.trainable
            self._collecting = CollectingOptimizer(self.model, self._trainable, places)
            if self._loop is not None:
                self._gradient_steps = self._loop(self.model, self._collecting.installed)
        collecting, steps = self._collecting, self._gradient_steps
        before = collecting.steps
        if self.loops and steps is not None:
            row: np.ndarray = steps.run([batch], self.reported, len(self.metric_names))[0]
        else:
            with collecting.installed():
                row = self._train_on_batch(batch)
        if before is not None and collecting.steps == before:
            out.fill(0.0)
            return row
        collecting.gradient.read(out)
        step_count(inner_optimizer(self.model.optimizer)).assign_add(1)
        return row

    def read_optimizer(self) -> OptimizerState | None:
        """Return the state of the optimizer after a step; None if it is stateless, or if a number is not finite."""
        self._build_optimizer()  # `gradient` does not build it
        return read_state(self.model.optimizer, self._unsent())

    def load_optimizer(self, state: OptimizerState | None, example: Batch) -> str | None:
        """Set the state of the optimizer, before the first step, once the weights are loaded.

        Args:
            state: from `read_optimizer` of a replica of the same model; None: there is none.
            example: a mini-batch of the shapes to come.

        Returns:
            None if the optimizer is stateless; "" if the state was loaded; else the reason why not.
        """
        self.prepare(example)
        self._build_optimizer()
        problem = load_state(self.model.optimizer, state, self._unsent())
        self.set_values(self._values)  # the state has the learning rate of its time
        return problem

    def _unsent(self) -> frozenset[int]:
        """Return the identities of the built optimizer's variables that are not part of its state."""
        return frozenset()

    def _build_optimizer(self) -> None:
        if not self.model.optimizer.built:
            self.model.optimizer.build(self._trainable)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all variables: the model's and the optimizer's."""
        return sum(map(_bytes_of, [*self.model.variables, *self.model.optimizer.variables]))

    def begin_again(self, model: keras.Model) -> bool:
        """Take over the state of ``model``, newly built and compiled as this one was, and keep the traced functions.

        The caller must load weights and moving statistics. The first step creates the optimizer's state from the loaded
        weights, since it may depend on them.

        Returns:
            Whether it was possible; if not, this replica must not be used any more.
        """
        if not copied(_states(model), _states(self.model)):
            return False
        self.model.reset_metrics()
        self._next, self._values = model, NO_ROWS
        return True

    def _begin_again(self, batch: Batch) -> None:
        """Take over the new optimizer's state; if it or the data are of another kind, the whole new model."""
        from distkeras.keras_model.gradient_collector import CollectingOptimizer

        new, self._next = self._next, None
        assert new is not None
        own, optimizer = self.model.optimizer, new.optimizer
        if own.built:
            new.optimizer = type(optimizer).from_config(optimizer.get_config())  # it can be built only once
            optimizer.build(self._trainable)
        possible = _kind(batch) == self._prepared_for and copied(optimizer.variables, own.variables)
        if possible and self._collecting is not None:
            collecting = CollectingOptimizer(self.model, self._trainable)
            possible = copied(collecting.variables, self._collecting.variables)
        if not possible:
            weights, statistics = self.layout.empty(), self.moving_statistics.empty()
            self.read(weights)
            self.read_moving_statistics(statistics)
            KerasReplica.__init__(self, new, self._order)
            self.load(weights)
            self.load_moving_statistics(statistics)

    def _train_on_batch(self, batch: Batch) -> np.ndarray:
        logs = self._logs_on_batch(batch)
        return np.concatenate([np.ravel(logs[name]) for name in self.reported], dtype=np.float64)

    def _logs_on_batch(self, batch: Batch) -> dict[str, Any]:
        x, y, weight = model_inputs(self.model, batch.x, batch.y, batch.weight)
        self.model.reset_metrics()  # metrics are of this step alone, and Keras 3.11 does not reset them
        with packing_as_fit(self.model):
            return flat_logs(self.model.train_on_batch(x, y, sample_weight=weight, return_dict=True), self.reported)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _loop_of(model: keras.Model) -> type[_Loop] | None:
    """Return the class of the loop that takes a model's steps; None: there is none for such a model."""
    import keras

    if keras.backend.backend() == "torch":
        return TorchSteps
    if keras.backend.backend() == "jax":
        return JaxSteps if can_loop(model) else None
    return None if model.run_eagerly else CompiledSteps


def _states(model: keras.Model) -> list[keras.Variable]:
    """Return every variable of a model, without those of its metrics and its optimizer."""
    return list({id(variable): variable for variable in [*model.variables, *layer_states(model)]}.values())


def _kind(batch: Batch) -> Any:
    """Return the properties that metrics and losses depend on: dtypes and shapes of a row, and if rows are weighted."""
    sides = (batch.x, batch.y, flat_weight(batch.weight))
    places = iter(batch.is_open or [False] * sum(map(len, sides)))
    return [[(a.dtype, a.shape[2 if next(places) else 1 :]) for a in side] for side in sides]


def _check_ready(model: keras.Model) -> None:
    unbuilt = [f"{layer.name!r} of {type(layer).__name__}" for layer in all_layers(model) if not layer.built]
    if unbuilt:
        raise ConfigurationError(
            "`model` must be built: give it an Input, or call it on a batch first. Layers that look text up, such as "
            "TextVectorization, belong into the data: apply them to the rows, and train a model of numbers. "
            f"Received: model={model.name!r}, of which {', '.join(unbuilt)} is not built"
        )
    if not model.compiled or model.optimizer is None:
        raise ConfigurationError(
            "`model` must be compiled with an optimizer and a loss. "
            f"Received: model={model.name!r}, compiled={model.compiled}"
        )

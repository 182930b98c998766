"""One worker's Keras model, as the flat float32 vectors that update rules work on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.keras_model.tensorflow import assign, peek, stacked, updates_last
from distkeras.ps.errors import ConfigurationError, LocalProtocolError
from distkeras.ps.protocol.layout import Layout

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from distkeras.data.batches import Batch

#: Most bytes of mini-batches that one call of the compiled loop stacks; more are cut.
MOST_BYTES_A_CALL = 64 * 2**20

CompiledLoop = Callable[..., Any]

_Slot = tuple[Any, Any]
"""A Keras variable, and TensorFlow's handle to it if its memory is float32."""


class KerasReplica:
    """A built and compiled Keras model behind the interface that rules talk to.

    Trainable float variables form one vector of shape ``(size,)``. Its elements are float32 whatever the model's own
    precision: they are cast on load and on read. Integers, seed generators, metrics and optimizer slots never leave
    the replica.

    On TensorFlow many steps are one compiled loop over ``model.train_step``, traced once per kind of input, for
    any number of steps and any batch size. Elsewhere, and with ``run_eagerly=True``, each step is a ``train_on_batch``.

    Args:
        model: built, and compiled with an optimizer.

    Raises:
        ConfigurationError: the model is not built, not compiled, has nothing to train, or holds variables whose
            "gradient" is their next value (float8 scales), which no rule can add up.
    """

    def __init__(self, model: keras.Model) -> None:
        import keras

        if not model.built or not all(layer.built for layer in model._flatten_layers()):
            raise ConfigurationError(
                "`model` must be built: give it an Input, or call it on a batch first. "
                f"Received: model={model.name!r}, not built"
            )
        if not model.compiled or model.optimizer is None:
            raise ConfigurationError(
                "`model` must be compiled with an optimizer and a loss. "
                f"Received: model={model.name!r}, compiled={model.compiled}"
            )
        variables = list(model.trainable_variables)
        refused = [v.path for v in variables if not _is_float(v) or getattr(v, "overwrite_with_gradient", False)]
        if refused or not variables:
            raise ConfigurationError(
                "`model` must have trainable weights, each a float that moves by its gradient. "
                f"Received: model={model.name!r}, refused weights={refused}, weights in all={len(variables)}"
            )
        self.model = model
        self.layout = _layout(variables)
        self._variables = variables
        moving = _moving_statistics(model)
        self.moving_statistics = _layout(moving)
        self._weights, self._moving = _slots(variables), _slots(moving)
        self._compiles = keras.backend.backend() == "tensorflow" and not model.run_eagerly
        self._loops: dict[Any, CompiledLoop] = {}
        self._names: tuple[str, ...] | None = None
        self._collecting: tuple[Any, Any] | None = None  # (optimizer, train_function) of gradient()
        self._gradients: list[_Slot] = []

    @property
    def size(self) -> int:
        """Elements of the flat weight vector."""
        return self.layout.size

    @property
    def learning_rate(self) -> float:
        """The compiled optimizer's learning rate at its present iteration, schedules evaluated."""
        import keras

        rate = self.model.optimizer.learning_rate
        value = np.empty((), np.float64)
        _copy(_slots([rate]) if isinstance(rate, keras.Variable) else [(rate, None)], [value])
        return float(value)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the loss and the metrics, in the order of the columns of `train`.

        Raises:
            LocalProtocolError: nothing was trained yet and `prepare` was not called: Keras settles what "accuracy"
                means, and the names of per-output metrics, only when it sees labels.
        """
        if self._names is None:
            raise LocalProtocolError("`metric_names` must be asked for after `prepare` or the first step.")
        return self._names

    def prepare(self, batch: Batch) -> None:
        """Builds the loss and the metrics from an example; trains nothing, moves nothing.

        Args:
            batch: any mini-batch of the shapes and dtypes to come; zeros will do.

        Raises:
            ConfigurationError: the loss or a metric does not fit the model's outputs and these labels, or a metric is
                not a scalar.
        """
        if self._names is not None:
            return
        x, y, weight = self._pack(batch.x, batch.y, batch.weight)
        try:
            predicted = self.model(x, training=False)
            if getattr(self.model, "loss", None) is not None:
                self.model.compute_loss(x, y, predicted, weight)
            logs = self.model.compute_metrics(x, y, predicted, sample_weight=weight)
        except ValueError as error:
            raise ConfigurationError(
                "`model` must have inputs, loss and metrics that fit the data. Received: "
                f"x of shape {[a.shape for a in batch.x]}, y of shape {[a.shape for a in batch.y]}: {error}"
            ) from error
        self.model.reset_metrics()
        vectors = [name for name, value in logs.items() if np.ndim(value) != 0]
        if vectors:
            raise ConfigurationError(f"`metrics` must be scalars. Received: {vectors} with one value a class")
        self._names = tuple(logs)

    def load(self, vector: np.ndarray) -> None:
        """Sets the weights from a float32 vector of shape ``(size,)``; does not keep a reference to it."""
        _assign(self._weights, self.layout.views(vector))

    def read(self, out: np.ndarray) -> None:
        """Fills ``out``, float32 of shape ``(size,)``, with the weights."""
        _copy(self._weights, self.layout.views(out))

    def moved(self, since: np.ndarray, out: np.ndarray) -> None:
        """Fills ``out`` with the weights less ``since``, both float32 of shape ``(size,)``."""
        views = zip(_values(self._weights), self.layout.views(since), self.layout.views(out), strict=True)
        for value, before, movement in views:
            np.subtract(value, before, out=movement, dtype=np.float32)

    def load_moving_statistics(self, vector: np.ndarray) -> None:
        """Sets the moving statistics from a float32 vector of shape ``(statistics.size,)``."""
        _assign(self._moving, self.moving_statistics.views(vector))

    def read_moving_statistics(self, out: np.ndarray) -> None:
        """Fills ``out``, float32 of shape ``(statistics.size,)``, with the moving statistics."""
        _copy(self._moving, self.moving_statistics.views(out))

    def train(self, batches: Sequence[Batch]) -> np.ndarray:
        """One optimizer step per mini-batch, in order.

        Returns:
            float64 array of shape ``(len(batches), len(metric_names))``: the loss and the metrics of each step alone.
        """
        if not batches:
            return np.empty((0, len(self._names or ())), np.float64)
        self.prepare(batches[0])
        if not self._compiles:
            return np.stack([self._step(batch) for batch in batches])
        if not self.model.optimizer.built:
            self.model.optimizer.build(self._variables)
        rows = [self._burst(run, collecting=False) for run in _runs(batches)]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def evaluate(self, batch: Batch, batch_size: int = 2000) -> dict[str, float]:
        """Loss and metrics over the rows of ``batch`` in inference mode, by name; ``batch_size`` rows at a time."""
        x, y, weight = self._pack(batch.x, batch.y, batch.weight)
        values = self.model.evaluate(x, y, sample_weight=weight, batch_size=batch_size, verbose=0, return_dict=True)
        return {name: float(value) for name, value in values.items()}

    def gradient(self, batch: Batch, out: np.ndarray) -> np.ndarray:
        """Gradient of the compiled loss on one mini-batch; the weights stay where they are.

        The optimizer's clipping is applied, for it changes the gradient; its momentum, weight decay and the weights'
        constraints are not. Its iteration count rises by one, so that a schedule of `learning_rate` goes on. Under
        ``mixed_float16``, a gradient that overflowed is given as zeros and the loss scale is lowered, as Keras skips
        such a step.

        Args:
            batch: the mini-batch.
            out: float32 of shape ``(size,)``, filled with the gradient (mean over the batch, as the loss is compiled).

        Returns:
            float64 array of shape ``(len(metric_names),)``: loss and metrics at these weights.
        """
        self.prepare(batch)
        optimizer, collector = self._collector()
        scaled = optimizer is not collector  # only then may a step be skipped
        before = int(collector.iterations) if scaled else -1
        if self._compiles:
            row = self._burst([batch], collecting=True)[0]
        else:
            with self._swapped():
                row = self._step(batch)
        if scaled and int(collector.iterations) == before:
            out.fill(0.0)
            return row
        _copy(self._gradients, self.layout.views(out))
        _inner(self.model.optimizer)._iterations.assign_add(1)
        return row

    def _collector(self) -> tuple[Any, Any]:
        """The optimizer of gradient() and the collector inside it: made when first needed, for it costs a vector."""
        import keras

        from distkeras.keras_model.gradient_collector import GradientCollector

        if self._collecting is None:
            compiled = self.model.optimizer
            if isinstance(compiled, keras.optimizers.LossScaleOptimizer):
                optimizer = keras.optimizers.LossScaleOptimizer(
                    GradientCollector(compiled.inner_optimizer),
                    initial_scale=compiled.initial_scale,
                    dynamic_growth_steps=compiled.dynamic_growth_steps,
                )
            else:
                optimizer = GradientCollector(compiled)
            optimizer.build(self._variables)
            self._collecting, self._gradients = (optimizer, None), _slots(_inner(optimizer).gradients)
        optimizer = self._collecting[0]
        return optimizer, _inner(optimizer)

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        """The collector in the optimizer's place, with a training function of its own."""
        model = self.model
        assert self._collecting is not None
        kept = model.optimizer, model.train_function
        model.optimizer, model.train_function = self._collecting
        try:
            yield
        finally:
            self._collecting = model.optimizer, model.train_function
            model.optimizer, model.train_function = kept

    def _step(self, batch: Batch) -> np.ndarray:
        x, y, weight = self._pack(batch.x, batch.y, batch.weight)
        logs = self.model.train_on_batch(x, y, sample_weight=weight, return_dict=True)
        return np.array([logs[name] for name in self.metric_names], np.float64)

    def _burst(self, batches: Sequence[Batch], *, collecting: bool) -> np.ndarray:
        """Equally shaped batches through the compiled loop; its rows as in `train`."""
        first = batches[0]
        weighted = first.weight is not None
        kind = (collecting, weighted, *((a.shape[1:], a.dtype) for a in _arrays(first)))
        columns = [stacked(column) for column in zip(*map(_arrays, batches), strict=True)]
        loop = self._loops.get(kind)
        if loop is None:
            with self._swapped() if collecting else nullcontext():
                loop = self._trace(columns, len(first.x), weighted)
            self._loops[kind] = loop
        return loop(*columns).numpy()

    def _trace(self, columns: Sequence[tf.Tensor], inputs: int, weighted: bool) -> CompiledLoop:
        """Compiles ``(k, batch, ...)`` arrays -> ``(k, metrics)`` with k and batch left open: one trace for all."""
        import tensorflow as tf

        model, names = self.model, self.metric_names

        def step(*arrays: Any) -> Any:
            model.reset_metrics()
            y = arrays[inputs : len(arrays) - weighted]
            with updates_last(model.optimizer):
                logs = model.train_step(self._pack(arrays[:inputs], y, arrays[-1] if weighted else None))
            missing = [name for name in names if name not in logs]
            if missing:
                raise ConfigurationError(f"`train_step` must return every metric. Received: none of {missing}")
            return tf.stack([tf.cast(logs[name], tf.float64) for name in names])

        compiled = tf.function(step, jit_compile=True, autograph=False) if model.jit_compile else step

        def loop(*stacks: Any) -> Any:
            steps = tf.shape(stacks[0])[0]
            rows = tf.TensorArray(tf.float64, size=steps, element_shape=(len(names),))
            _, rows = tf.while_loop(
                lambda i, _: i < steps,
                lambda i, rows: (i + 1, rows.write(i, compiled(*(stack[i] for stack in stacks)))),
                (0, rows),
                parallel_iterations=1,
            )
            return rows.stack()

        specs = [tf.TensorSpec((None, None, *column.shape[2:]), column.dtype) for column in columns]
        return tf.function(loop, autograph=False).get_concrete_function(*specs)

    def _pack(self, x: Sequence[Any], y: Sequence[Any], weight: Any | None) -> tuple[Any, Any, Any]:
        """(x, y, sample weight) as the model takes them: bare, a list in its order, or a dict by its names."""
        return _structured(self.model, "input", x), _structured(self.model, "output", y), weight


def _slots(variables: Sequence[Any]) -> list[_Slot]:
    """Settled once: with a small model, Keras' own bookkeeping takes longer than the bytes."""
    import keras

    plain = keras.backend.backend() == "tensorflow"
    return [(v, v.value.handle if plain and v.dtype == "float32" else None) for v in variables]


def _assign(slots: Sequence[_Slot], views: Sequence[np.ndarray]) -> None:
    for (variable, handle), view in zip(slots, views, strict=True):
        if handle is not None:
            assign(handle, view)
        else:  # JAX and PyTorch may keep pointing into what they are given
            variable.assign(view.copy())


def _copy(slots: Sequence[_Slot], views: Sequence[np.ndarray]) -> None:
    for value, view in zip(_values(slots), views, strict=True):
        view[...] = value


def _values(slots: Sequence[_Slot]) -> Iterator[np.ndarray]:
    """Each one to be used before the next: it may be the variable's own memory."""
    import keras

    for variable, handle in slots:
        yield keras.ops.convert_to_numpy(variable) if handle is None else peek(handle)


def _structured(model: Any, side: str, arrays: Sequence[Any]) -> Any:
    structure = getattr(model, side, None) if hasattr(model, "inputs") and model.inputs else None
    if isinstance(structure, dict):
        import keras

        return keras.tree.pack_sequence_as(structure, list(arrays))
    return arrays[0] if len(arrays) == 1 else list(arrays)


def _inner(optimizer: Any) -> Any:
    """The optimizer inside a loss-scaling one; any other as it is."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _arrays(batch: Batch) -> list[np.ndarray]:
    return [*batch.x, *batch.y] + ([] if batch.weight is None else [batch.weight])


def _runs(batches: Sequence[Batch]) -> Iterator[list[Batch]]:
    """Neighbors of one size together, as many as `MOST_BYTES_A_CALL` allows."""
    for _, group in itertools.groupby(batches, key=lambda b: (len(b.x[0]), b.weight is None)):
        run = list(group)
        most = max(1, MOST_BYTES_A_CALL // max(1, sum(a.nbytes for a in _arrays(run[0]))))
        for start in range(0, len(run), most):
            yield run[start : start + most]


def _is_float(variable: Any) -> bool:
    import keras

    return keras.backend.is_float_dtype(variable.dtype)


def _layout(variables: Sequence[Any]) -> Layout:
    return Layout(tuple(v.path for v in variables), tuple(tuple(v.shape) for v in variables))


def _moving_statistics(model: keras.Model) -> list[Any]:
    """Float variables that training moves without a gradient, such as BatchNormalization's moving averages.

    Not among them: what was made trainable and frozen later (kept in a layer's other list), statistics of a frozen
    layer (it runs in inference mode), the states of a stateful recurrent layer (they belong to one worker's
    sequence of batches), and Normalization's constants, which only ``adapt`` sets.
    """
    import keras

    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        if layer.trainable and not getattr(layer, "stateful", False):
            if isinstance(layer, keras.layers.Normalization):
                continue
            found.update((id(v), v) for v in layer._non_trainable_variables if _is_float(v))
    return list(found.values())

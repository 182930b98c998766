"""Many training steps of a Keras model in one call of TensorFlow.

Importing this module does not load TensorFlow.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import Stack, as_weight, flat_weight, is_absent
from distkeras.data.rows import aligned
from distkeras.keras_model.optimizers import divides_by_zero, inner_optimizer
from distkeras.private_keras import all_layers, slots_of
from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from distkeras.data.batches import Batch

#: The most bytes of mini-batches that one call stacks; a longer run is split.
CALL_BYTES_MAX = 64 * 2**20

_CompiledLoop = Callable[..., Any]
"""A function of the bounds ``(first, end)`` and of arrays ``(batches, rows, ...)``, one each for inputs, targets and
weights. It returns float64 ``(end - first, metrics)``."""


def model_inputs(model: keras.Model, x: Sequence[Any], y: Sequence[Any], weight: Any | None) -> tuple[Any, Any, Any]:
    """Return (x, y, sample weight) as ``train_step`` takes them, from arrays or tensors as in `Batch`.

    A single input or target is bare; several are a list in the model's order, or a dictionary by its names. An output
    without labels or weights has None.
    """
    if isinstance(weight, tuple):
        weight = _structured(model, "output", [None if is_absent(array) else array for array in weight])
    targets = [None if is_absent(array) else array for array in y]
    return _structured(model, "input", x), _structured(model, "output", targets) if targets else None, weight


def as_fit_packs(x: Any, y: Any, weight: Any | None) -> Any:
    """Return a step's data as ``fit`` gives them to ``train_step``: ``x``, ``(x, y)`` or ``(x, y, weight)``."""
    import keras

    labels = None if isinstance(y, (list, tuple)) and not y else y
    data = keras.utils.pack_x_y_sample_weight(x, labels, weight)
    # `fit` reads arrays by a dataset on TensorFlow, which makes lists tuples.
    return keras.tree.lists_to_tuples(data) if keras.backend.backend() == "tensorflow" else data


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let a function take the place of an object's method within the context."""
    former = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if former is None:
            delattr(owner, name)
        else:
            setattr(owner, name, former)


def packing_as_fit(model: keras.Model) -> AbstractContextManager[None]:
    """Make ``train_on_batch`` give ``train_step`` its data as ``fit`` does: by itself it adds None for no weights."""
    import keras

    own = model.train_step

    def train_step(*args: Any) -> Any:  # on JAX, the state comes before the data
        return own(*args[:-1], as_fit_packs(*keras.utils.unpack_x_y_sample_weight(args[-1])))

    return _replaced(model, "train_step", train_step)


def evaluate_batch(model: keras.Model, x: Any, y: Any, weight: Any | None) -> dict[str, float]:
    """Return loss and metrics of one mini-batch in inference mode, by name; their states stay in the model."""
    if not is_own(model, "test_step"):
        return dict(model.test_on_batch(x, y, sample_weight=weight, return_dict=True))
    # Keras' `test_on_batch` gives `test_step` a third element, None, if there are no weights.
    import keras

    rows = len(keras.tree.flatten(x)[0])
    return dict(model.evaluate(x, y, sample_weight=weight, batch_size=rows, verbose=0, return_dict=True))


def is_own(model: keras.Model, method: str) -> bool:
    """Return whether a method of a model is the user's and not Keras'."""
    return not str(getattr(getattr(model, method), "__module__", "")).startswith("keras.")


def flat_logs(logs: Any, metrics: Sequence[str] = ()) -> dict[str, Any]:
    """Return what ``train_step`` returned as ``fit`` reports it: the parts of a dictionary within it by their names.

    Raises:
        ConfigurationError: it is not a dictionary, it is empty, or one of ``metrics`` is missing.
    """
    if not isinstance(logs, Mapping) or not logs:
        raise ConfigurationError(f"`train_step` must return a dictionary of the loss and the metrics. Received: {logs}")
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat.update(flat_logs(value) if isinstance(value, Mapping) and value else {name: value})
    flat = {name: value for name, value in flat.items() if not isinstance(value, Mapping)}
    missing = [name for name in metrics if name not in flat]
    if missing:
        raise ConfigurationError(f"`train_step` must return every metric. Received: none of {missing}")
    return flat


def arrays_of(batch: Batch | Stack) -> list[np.ndarray]:
    """Return inputs, targets and, if there are any, sample weights."""
    return [*batch.x, *batch.y, *flat_weight(batch.weight)]


def _structured(model: Any, side: str, arrays: Sequence[Any]) -> Any:
    structure = getattr(model, side, None) if hasattr(model, "inputs") and model.inputs else None
    if isinstance(structure, dict):
        import keras

        return keras.tree.pack_sequence_as(structure, list(arrays))
    return arrays[0] if len(arrays) == 1 else list(arrays)


def row_of_logs(logs: Mapping[str, Any], metrics: Sequence[str]) -> tf.Tensor:
    """Return the numbers of some metrics, in their order, as a float64 tensor of one axis."""
    import tensorflow as tf

    return tf.concat([tf.reshape(tf.cast(logs[name], tf.float64), [-1]) for name in metrics], 0)


class CompiledSteps:
    """A compiled loop over ``model.train_step``.

    It is traced once per kind of input (dtypes, shapes of a row, whether weighted), for any number of steps and any
    batch size.

    Args:
        model: built and compiled, on TensorFlow.
        while_tracing: a context in which the loop is traced.
    """

    def __init__(
        self, model: keras.Model, while_tracing: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._model = model
        self._while_tracing = while_tracing
        self._loops: dict[Any, _CompiledLoop] = {}

    def run(self, batches: Sequence[Batch], metrics: Sequence[str], width: int) -> np.ndarray:
        """Take one step per mini-batch, in order.

        Args:
            batches: at least one.
            metrics: names of metrics that ``train_step`` returns, the same at every call.
            width: how many numbers they have together, also the same.

        Returns:
            float64 array of shape ``(len(batches), width)``, of each step alone.

        Raises:
            ConfigurationError: ``train_step`` does not return all ``metrics``.
        """
        rows = [self._run_span(*span, metrics, width) for span in spans(batches, any_length=True)]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _run_span(self, stack: Stack, first: int, steps: int, metrics: Sequence[str], width: int) -> np.ndarray:
        if stack.tensors is None:
            arrays = arrays_of(stack) if stack.lengths is None else [*arrays_of(stack), stack.lengths]
            kinds = [(shape, array.dtype) for shape, array in zip(_row_shapes(stack), arrays, strict=False)]
            stack.tensors = (len(flat_weight(stack.weight)), *kinds), list(map(lent, arrays))
        kind, tensors = stack.tensors
        loop = self._loops.get(kind)
        if loop is None:
            with self._while_tracing():
                loop = self._loops[kind] = self._trace(stack, metrics, width)
        rows: np.ndarray = loop(_bounds(first, steps), *tensors).numpy()
        return rows

    def logs(self, batch: Batch) -> dict[str, tuple[int | None, ...]]:
        """Return the names that ``train_step`` reports for such a mini-batch, and of each the shape.

        The step is traced, and not run; the optimizer need not be built, and stays unbuilt.
        """
        import tensorflow as tf

        found: dict[str, tuple[int | None, ...]] = {}

        def step(*arrays: Any) -> None:
            found.update((name, tuple(np.shape(value))) for name, value in self._step(batch, arrays).items())

        arrays = arrays_of(batch)
        is_open = batch.is_open or [False] * len(arrays)
        shapes = [(None, *a.shape[2:]) if is_any else a.shape[1:] for a, is_any in zip(arrays, is_open, strict=True)]
        specs = [tf.TensorSpec((None, *s), a.dtype) for s, a in zip(shapes, arrays, strict=True)]
        # An optimizer that updates would be built.
        with _replaced(self._model.optimizer, "apply", lambda *_args, **_options: None):
            tf.function(step, autograph=False).get_concrete_function(*specs)
        return found

    def _step(self, kind: Batch | Stack, arrays: Sequence[Any], metrics: Sequence[str] = ()) -> dict[str, Any]:
        """Call ``train_step`` on tensors of the same kind as ``kind``, and return what it reports."""
        model, inputs, outputs = self._model, len(kind.x), len(kind.y)
        self._model.reset_metrics()
        y, weight = arrays[inputs : inputs + outputs], as_weight(arrays[inputs + outputs :])
        x, y, weight = model_inputs(model, arrays[:inputs], y, weight)
        return flat_logs(model.train_step(as_fit_packs(x, y, weight)), metrics)

    def _trace(self, stack: Stack, metrics: Sequence[str], width: int) -> _CompiledLoop:
        """Compile the loop for the dtypes and row shapes of ``stack``, for any number of steps and of rows."""
        import tensorflow as tf

        model = self._model

        def step(*arrays: Any) -> Any:
            with (
                updates_last(model.optimizer),
                update_only_touched_rows(model.optimizer),
                read_only_touched_rows(model),
            ):
                return row_of_logs(self._step(stack, arrays, metrics), metrics)

        compiled = tf.function(step, jit_compile=True, autograph=False) if model.jit_compile else step

        shapes = _row_shapes(stack)

        def of_batch(span: Sequence[Any], i: Any) -> list[Any]:
            """Return the arrays of a mini-batch, each as long as the mini-batch's rows are."""
            return [
                array[i, :, : span[-1][i, number]] if shape[:1] == (None,) else array[i]
                for number, (array, shape) in enumerate(zip(span, shapes, strict=False))
            ]

        def loop(bounds: Any, *stacks: Any) -> Any:
            span = [array[bounds[0] : bounds[1]] for array in stacks]
            steps = bounds[1] - bounds[0]
            rows = tf.TensorArray(tf.float64, size=steps, element_shape=(width,))
            _, rows = tf.while_loop(
                lambda i, _: i < steps,
                lambda i, rows: (i + 1, rows.write(i, compiled(*of_batch(span, i)))),
                (0, rows),
                parallel_iterations=1,
            )
            return rows.stack()

        arrays = arrays_of(stack)
        specs = [tf.TensorSpec((None, None, *s), a.dtype) for s, a in zip(shapes, arrays, strict=True)]
        if stack.lengths is not None:
            specs.append(tf.TensorSpec((None, len(arrays)), tf.int32))
        bounds = tf.TensorSpec((2,), tf.int32)
        traced: _CompiledLoop = tf.function(loop, autograph=False).get_concrete_function(bounds, *specs)
        return traced


@lru_cache(maxsize=1024)
def _bounds(first: int, steps: int) -> tf.Tensor:
    import tensorflow as tf

    return tf.constant((first, first + steps), tf.int32)


def _row_shapes(stack: Stack) -> list[tuple[int | None, ...]]:
    """Return the shape of a row of each array of a stack; the first extent is None if mini-batches differ in it."""
    arrays = arrays_of(stack)
    is_open = [False] * len(arrays) if stack.lengths is None else stack.lengths[0] > 0
    return [(None, *a.shape[3:]) if is_any else a.shape[2:] for a, is_any in zip(arrays, is_open, strict=True)]


def spans(batches: Sequence[Batch], *, any_length: bool = False) -> Iterator[tuple[Stack, int, int]]:
    """Yield each contiguous run of mini-batches: their stack, the place of the first, and their number.

    ``any_length``: mini-batches that differ in the length of their rows may share a stack, which then has `lengths`.
    """
    shared = batches[0].stack if any_length and all(batch.stack is batches[0].stack for batch in batches) else None

    def usable(batch: Batch) -> Stack | None:
        stack = batch.stack
        return stack if stack is None or stack.lengths is None or stack is shared else None

    for stack, neighbors in itertools.groupby(batches, key=usable):
        group = list(neighbors)
        if stack is None:
            yield from _copies(group, any_length=any_length)
        elif all(batch.place == place for place, batch in enumerate(group, group[0].place)):
            yield stack, group[0].place, len(group)
        else:
            yield from ((stack, batch.place, 1) for batch in group)


def _copies(batches: Sequence[Batch], *, any_length: bool) -> Iterator[tuple[Stack, int, int]]:
    """Copy mini-batches without a stack into stacks of at most `CALL_BYTES_MAX`, and yield the runs."""

    def kind(batch: Batch) -> Any:
        if not batch.is_open or any_length:
            return len(batch.x[0]), len(flat_weight(batch.weight))
        return [array.shape for array in arrays_of(batch)]

    for _, group in itertools.groupby(batches, key=kind):
        run = list(group)
        most = max(1, CALL_BYTES_MAX // max(1, *(sum(array.nbytes for array in arrays_of(batch)) for batch in run)))
        for start in range(0, len(run), most):
            part = run[start : start + most]
            weights = zip(*(flat_weight(batch.weight) for batch in part), strict=True)
            x, y = (tuple(map(stacked, zip(*side, strict=True))) for side in ([b.x for b in part], [b.y for b in part]))
            lengths = _lengths(part) if part[0].is_open else None
            yield Stack(x, y, as_weight(list(map(stacked, weights))), lengths), 0, len(part)


def _lengths(batches: Sequence[Batch]) -> np.ndarray:
    """Return the lengths of each array of any length, int32 ``(batches, arrays)``; 0 of other arrays."""
    lengths = [
        [array.shape[1] if is_open else 0 for array, is_open in zip(arrays_of(batch), batch.is_open, strict=True)]
        for batch in batches
    ]
    return np.array(lengths, np.int32)


def stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return a copy ``(len(arrays), *shape)`` of arrays of one shape and dtype, for `lent`.

    Arrays may differ in their second extent: the copy has the largest one, and no meaning behind a shorter array.
    """
    longest = max(array.shape[1:2] for array in arrays)
    if any(array.shape[1:2] != longest for array in arrays):
        joined = aligned((len(arrays), len(arrays[0]), *longest, *arrays[0].shape[2:]), arrays[0].dtype)
        for copy, array in zip(joined, arrays, strict=True):
            copy[:, : array.shape[1]] = array
        return joined
    joined = aligned((len(arrays), *arrays[0].shape), arrays[0].dtype)
    np.concatenate(arrays, out=joined.reshape(len(arrays) * len(arrays[0]), *arrays[0].shape[1:]))
    return joined


def lent(array: np.ndarray) -> tf.Tensor:
    """Return a tensor in the memory of an `aligned` array, which must not be written to; any other array is copied."""
    import tensorflow as tf

    return tf.raw_ops.Identity(input=array)  # `tf.convert_to_tensor` copies, twice if the array is not aligned


def updates_last(optimizer: Any) -> AbstractContextManager[None]:
    """While a step is traced, make a Keras optimizer wait for all gradients before it updates the first variable.

    TensorFlow copies a variable that is updated while an operation still reads it. A layer's kernel is read once more
    for the gradient of the layer below, so without this most of a model is copied in every step.
    """
    import tensorflow as tf

    apply = optimizer.apply

    def apply_after_all(gradients: Any, *args: Any, **options: Any) -> Any:
        gradients = list(gradients)
        parts = tf.nest.flatten(gradients, expand_composites=True)
        with tf.control_dependencies([part for part in parts if part is not None]):
            return apply(gradients, *args, **options)

    return _replaced(optimizer, "apply", apply_after_all)


@contextmanager
def read_only_touched_rows(model: Any) -> Iterator[None]:
    """While a step is traced, make a model read only those rows of an Embedding that the step touches.

    Keras reads the whole table and gathers rows from it. After the first update of single rows, TensorFlow copies a
    variable whenever it is read as a whole: then each step takes as long as a copy of the table. The result is the
    same.
    """
    import keras

    with ExitStack() as stack:
        for layer in all_layers(model):
            if type(layer) is keras.layers.Embedding and not layer.lora_enabled and layer.quantization_mode is None:
                stack.enter_context(_reading_rows(layer))
        yield


def _reading_rows(layer: Any) -> AbstractContextManager[None]:
    import keras
    import tensorflow as tf

    call = layer.call

    def call_on_rows(inputs: Any) -> Any:
        variable = layer.embeddings.value
        if not isinstance(variable, tf.Variable) or not isinstance(inputs, tf.Tensor):
            return call(inputs)  # within a scope that casts it; sparse or ragged ids
        ids = inputs if inputs.dtype in (tf.int32, tf.int64) else keras.ops.cast(inputs, "int32")
        ids = tf.where(ids < 0, ids + tf.cast(variable.shape[0], ids.dtype), ids)  # negative: from the end
        return keras.ops.cast(tf.gather(variable, ids), layer.compute_dtype)

    return _replaced(layer, "call", call_on_rows)


def update_only_touched_rows(optimizer: Any) -> AbstractContextManager[None]:
    """While a step is traced with TensorFlow, make Adagrad compute only with the rows that have a gradient.

    Keras computes the square roots of all accumulators, and gathers the rows afterwards. The result is the same.

    Args:
        optimizer: of Keras; any but Adagrad is not changed.
    """
    import keras

    inner = inner_optimizer(optimizer)
    if type(inner) is not keras.optimizers.Adagrad or divides_by_zero(inner):
        return nullcontext()
    import tensorflow as tf

    step = inner.update_step

    def step_on_rows(gradient: Any, variable: Any, learning_rate: Any) -> None:
        if not isinstance(gradient, tf.IndexedSlices):
            step(gradient, variable, learning_rate)
            return
        (accumulator,) = slots_of(inner, variable)
        gradient = keras.ops.cast(gradient, variable.dtype)
        inner.assign_add(accumulator, keras.ops.square(gradient))
        scaled = keras.ops.multiply(keras.ops.cast(learning_rate, variable.dtype), gradient)
        rows = tf.gather(accumulator.value, scaled.indices)
        # TensorFlow rewrites other divisions by a root as products, which round differently.
        moved = tf.math.divide_no_nan(scaled.values, keras.ops.sqrt(keras.ops.add(rows, inner.epsilon)))
        inner.assign_sub(variable, tf.IndexedSlices(moved, scaled.indices, scaled.dense_shape))

    return _replaced(inner, "update_step", step_on_rows)

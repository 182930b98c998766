"""The optimizers that train a table's touched rows exactly as they train the whole table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distkeras.keras_model.optimizers import inner_optimizer


def reason_against_rows(optimizer: Any) -> str | None:
    """Return why steps on the touched rows alone differ from steps on the whole table; None if they are equal.

    A step must not change a row with a zero gradient, or its slots, by a single bit. The update of one element must not
    depend on others, since the whole table has more of them.

    Args:
        optimizer: of Keras, as a model is compiled with it.
    """
    import keras

    from distkeras.keras_model.lazy_optimizers import LAZY

    if keras.config.backend() == "torch":
        return "Keras' optimizers for PyTorch step whole tables; TensorFlow would work"
    inner = inner_optimizer(optimizer)
    kind = type(inner)
    if kind not in (keras.optimizers.SGD, keras.optimizers.Adagrad, *LAZY.values()):
        return (
            f"{kind.__name__} may move rows that a step does not touch; LazyAdam, of `distkeras.optimizers`, would "
            "work, and so would Adagrad and SGD without momentum"
        )
    reasons = {
        "momentum moves rows after they were touched; LazyMomentum, of `distkeras.optimizers`, would work": (
            kind is keras.optimizers.SGD and bool(inner.momentum)
        ),
        "weight decay moves every row": inner.weight_decay not in (None, 0),
        "accumulated gradients are kept for every row": inner.gradient_accumulation_steps is not None,
        "a moving average of the weights is kept for every row": inner.use_ema,
        "the norm of a gradient is that of the whole table": bool(inner.clipnorm or inner.global_clipnorm),
    }
    if kind is keras.optimizers.Adagrad:
        reasons["Adagrad divides by zero in a row without a gradient"] = _divides_by_zero(inner)
    return next((reason for reason, applies in reasons.items() if applies), None)


#: The attributes that list an optimizer's slots: the variables with a number for each element of a model's variable.
_SLOTS = ("_accumulators", "_momentums", "_velocities", "momentums")


def slots_of(optimizer: Any, variable: Any) -> tuple[Any, ...]:
    """Return the slots of ``variable`` in a built ``optimizer`` for rows."""
    inner = inner_optimizer(optimizer)
    place = inner._get_variable_index(variable)  # noqa: SLF001 - Keras has no public one
    return tuple(slots[place] for slots in (getattr(inner, name, None) for name in _SLOTS) if slots)


def _divides_by_zero(adagrad: Any) -> bool:
    return bool(adagrad.initial_accumulator_value + adagrad.epsilon == 0)


@contextmanager
def update_only_touched_rows(optimizer: Any) -> Iterator[None]:
    """While a step is traced with TensorFlow, make Adagrad compute only with the rows that have a gradient.

    Keras computes the square roots of all accumulators, and gathers the rows afterwards. The result is the same.

    Args:
        optimizer: of Keras; any but Adagrad is not changed.
    """
    import keras

    inner = inner_optimizer(optimizer)
    if type(inner) is not keras.optimizers.Adagrad or _divides_by_zero(inner):
        yield
        return
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

    inner.update_step = step_on_rows
    try:
        yield
    finally:
        del inner.update_step

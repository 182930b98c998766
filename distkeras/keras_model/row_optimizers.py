"""Which optimizers train a table's touched rows exactly as they train the whole table."""

from __future__ import annotations

from typing import Any


def reason_against_rows(optimizer: Any) -> str | None:
    """Return why steps on the touched rows alone would end elsewhere than steps on the whole table; None if they don't.

    A step must leave a row with a zero gradient, and what the optimizer keeps of it, as they are, to the bit. What it
    does with one element must not depend on others: the elements of the whole table are more.

    Args:
        optimizer: of Keras, as a model is compiled with it.
    """
    import keras

    from distkeras.keras_model.gradient_collector import inner_optimizer

    inner = inner_optimizer(optimizer)
    kind = type(inner)
    if kind not in (keras.optimizers.SGD, keras.optimizers.Adagrad):
        return f"{kind.__name__} may move rows that a step does not touch; SGD without momentum and Adagrad do not"
    reasons = {
        "momentum moves rows after they were touched": bool(getattr(inner, "momentum", 0.0)),
        "weight decay moves every row": inner.weight_decay not in (None, 0),
        "accumulated gradients are kept for every row": inner.gradient_accumulation_steps is not None,
        "a moving average of the weights is kept for every row": inner.use_ema,
        "the norm of a gradient is that of the whole table": bool(inner.clipnorm or inner.global_clipnorm),
    }
    if kind is keras.optimizers.Adagrad:
        divisor = inner.initial_accumulator_value + inner.epsilon
        reasons["Adagrad divides by zero in a row without a gradient"] = divisor == 0
    return next((reason for reason, applies in reasons.items() if applies), None)


def accumulators_of(optimizer: Any, variable: Any) -> Any | None:
    """Return the variable in which a built optimizer keeps what it knows of each element of ``variable``; None if none.

    Args:
        optimizer: one that `reason_against_rows` has nothing against.
        variable: one that it was built for.
    """
    from distkeras.keras_model.gradient_collector import inner_optimizer

    inner = inner_optimizer(optimizer)
    slots = getattr(inner, "_accumulators", None)
    return None if not slots else slots[inner._get_variable_index(variable)]  # noqa: SLF001 - Keras has no public list

"""Optimizers by name, and the checks for those that several workers, or tables by rows, cannot use.

After each exchange a worker takes over the center's weights. An optimizer that has stored weights or averages continues
from those, and pulls every later step back to the worker's old weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distkeras.keras_model.attributes import attributes_of, set_attributes
from distkeras.private_keras import moved_variables, set_undecayed, undecayed
from distkeras.ps.errors import ConfigurationError

#: Shapes of the weights for the trial of an optimizer: a bias, a kernel of a dense layer, one of a convolution.
_SHAPES = ((3,), (3, 4), (2, 2, 3, 4))
#: Steps of a trial: lookahead and the like store weights every few steps.
_STEPS = 12
#: A learning rate too small to move a weight; it is not zero, since an optimizer may divide by it.
_TINY_RATE = 1e-12
#: What to use instead.
_ADVICE = "use an optimizer such as AdamW, and average the weights of the center if that is wanted"


def optimizer_of(given: Any) -> Any:
    """Return an optimizer of Keras or of `distkeras.optimizers`.

    Args:
        given: an optimizer, the name of its class, or a mapping with ``class_name`` and the arguments as ``config``.

    Raises:
        TypeError, ValueError: no optimizer has this name, or it does not take these arguments.
    """
    import keras

    from distkeras.keras_model.lazy_optimizers import LAZY

    given = {"class_name": given} if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        return keras.optimizers.get(given)
    config = {"config": {}} | dict(given)
    kind = LAZY.get(config["class_name"].lower())
    return keras.optimizers.get(config) if kind is None else kind.from_config(dict(config["config"]))


def with_learning_rate(optimizer: Any, rate: float) -> Any:
    """Return a new optimizer that differs from ``optimizer`` in its learning rate alone."""
    config = optimizer.get_config()
    inner = inner_optimizer(optimizer)
    copied = type(optimizer).from_config(config if inner is not optimizer else {**config, "learning_rate": rate})
    set_attributes(copied, attributes_of(optimizer, copied))
    if inner is not optimizer:
        copied.inner_optimizer = with_learning_rate(inner, rate)
    elif keys := undecayed(optimizer):
        set_undecayed(copied, keys)
    return copied


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a loss-scaling one, and any other one unchanged."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def takes_plain_steps(given: Any) -> bool:
    """Return whether an optimizer's steps are ``w - learning rate * gradient``, up to the clipping of the gradient.

    An optimizer of the user's own class may extend SGD; two steps show what it does.
    """
    import keras

    inner = inner_optimizer(given)
    if not isinstance(inner, keras.optimizers.SGD):
        return False
    if inner.momentum or inner.weight_decay or inner.gradient_accumulation_steps:
        return False
    return type(inner) is keras.optimizers.SGD or _steps_of_trial_are_plain(type(inner), inner.get_config())


def _steps_of_trial_are_plain(kind: type, config: dict[str, Any]) -> bool:
    import keras

    without = dict.fromkeys(("clipnorm", "global_clipnorm", "clipvalue", "loss_scale_factor"))
    weights = _weights(1.0)
    try:
        optimizer = _built(kind, {**config, **without, "learning_rate": 0.5, "use_ema": False}, weights)
        for _ in range(2):
            optimizer.apply([keras.ops.full(weight.shape, 0.25 * place + 0.25) for place, weight in enumerate(weights)])
    except Exception:  # noqa: BLE001 - a user's optimizer may reject these shapes, and then nothing shows its steps
        return False
    values = [np.asarray(keras.ops.convert_to_numpy(weight)) for weight in weights]
    return all(np.allclose(value, 0.75 - 0.25 * place) for place, value in enumerate(values))


def require_independent(given: Any) -> None:
    """Raise ConfigurationError for an optimizer that stores weights, or that has several learning rates."""
    import keras

    optimizer = keras.optimizers.get(given)
    parts = [optimizer, inner_optimizer(optimizer)]
    several = getattr(keras.optimizers, "MultiOptimizer", None)  # older versions of Keras have none
    if several is not None and any(isinstance(part, several) for part in parts):
        raise ConfigurationError(
            "`worker_optimizer` must have one learning rate, which workers report and servers set: use one optimizer "
            f"for all weights. Received: {optimizer.name!r} of several optimizers"
        )
    if any(part.use_ema for part in parts):
        raise ConfigurationError(
            "`worker_optimizer` must not have `use_ema`: each worker would average its own path, and training ends "
            f"with the weights of the center. Received: {optimizer.name!r} with use_ema=True; {_ADVICE}"
        )
    stored = _stored_weights(type(parts[-1]), parts[-1].get_config())
    if stored is not None:
        raise ConfigurationError(
            "`worker_optimizer` must not store weights: a worker takes over those of the center, and each step would "
            f"draw back to its own old ones. Received: {optimizer.name!r}, whose {stored}; {_ADVICE}"
        )


def _stored_weights(kind: type, config: dict[str, Any]) -> str | None:
    """Describe how an optimizer's state depends on weights; None if a trial shows no dependence."""
    try:
        states = [_state(_built(kind, config, _weights(value))) for value in (1.0, 2.0)]
    except Exception:  # noqa: BLE001 - a user's optimizer may reject these shapes: no trial is possible
        return None
    for (name, of_ones), (_, of_twos) in zip(*states, strict=True):
        if not np.array_equal(of_ones, of_twos):
            return f"variable {name!r} begins as a function of the weights"
    return _movement_without_gradient(kind, config)


def _movement_without_gradient(kind: type, config: dict[str, Any]) -> str | None:
    """Take steps with zero gradients at a tiny rate, replace the weights, and describe how later steps move them."""
    import keras

    weights = _weights(1.0)
    optimizer = _built(kind, {**config, "learning_rate": _TINY_RATE}, weights)
    gradients = [keras.ops.zeros(weight.shape, weight.dtype) for weight in weights]
    for value in (1.0, 2.0):
        for weight in weights:
            weight.assign(keras.ops.full(weight.shape, value))
        for _ in range(_STEPS):
            optimizer.apply(gradients, weights)
    moved = [np.asarray(keras.ops.convert_to_numpy(weight)) for weight in weights]
    if all(np.allclose(value, 2.0) for value in moved):
        return None
    return "steps without gradient move weights that were replaced towards the old ones"


def _built(kind: Any, config: dict[str, Any], weights: Sequence[Any]) -> Any:
    optimizer = kind.from_config(dict(config))
    optimizer.build(list(weights))
    return optimizer


def _weights(value: float) -> list[Any]:
    import keras

    return [keras.Variable(np.full(shape, value, np.float32), name=f"weight_{len(shape)}") for shape in _SHAPES]


def _state(optimizer: Any) -> list[tuple[str, np.ndarray]]:
    import keras

    return [(variable.name, np.array(keras.ops.convert_to_numpy(variable))) for variable in optimizer.variables]


def require_step(model: Any) -> None:
    """Raise ConfigurationError if Keras cannot take a compiled model's step: on JAX, once a trained layer is frozen."""
    import keras

    if keras.config.backend() != "jax" or not model.optimizer.built:
        return
    moved, trainable = moved_variables(inner_optimizer(model.optimizer)), model.trainable_variables
    if len(moved) != len(trainable):
        raise ConfigurationError(
            "the model's optimizer must be of the variables that are trainable, or Keras on JAX takes no step: compile "
            "the model again, with a new optimizer, after you freeze layers that have been trained. Received: "
            f"model={model.name!r}, an optimizer of {len(moved)} variables, of which {len(trainable)} are trainable"
        )


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
        reasons["Adagrad divides by zero in a row without a gradient"] = divides_by_zero(inner)
    return next((reason for reason, applies in reasons.items() if applies), None)


def divides_by_zero(adagrad: Any) -> bool:
    """Return whether an Adagrad divides by zero in a row without a gradient."""
    return bool(adagrad.initial_accumulator_value + adagrad.epsilon == 0)

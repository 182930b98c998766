"""What a compiled loss says about its output and its labels, decided by the object that Keras resolves it to.

A name such as "bce" is an alias, and a class of the user may extend one of Keras': neither is compared by its text.
Importing this module does not load Keras.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distkeras.data.binding import outputs_of
from distkeras.private_keras import function_options

if TYPE_CHECKING:
    import keras

#: By argument of ``compile``, the names for which Keras chooses a class or function when it sees labels.
CHOSEN_BY_LABELS = {
    "loss": ("crossentropy", "ce"),
    **dict.fromkeys(("metrics", "weighted_metrics"), ("accuracy", "acc")),
}


@dataclass(frozen=True)
class LossKind:
    """The meaning of the loss of one output.

    Args:
        name: the text that the user gave, or the name of the function or of the object's class; "" for no loss.
        scores: "sparse", "one-hot" or "binary" for Keras' cross-entropies, their focal variants and subclasses of them:
            the output scores classes, and labels are class numbers, one number for each class, or probabilities; "ctc"
            for that loss; "" for any other.
        by_keras: it is computed by Keras' code alone. The user's own code may accept labels of any shape and values.
        from_logits: the scores have not been through softmax or sigmoid.
        ignore_class: a class number of "sparse" labels that is left out of the loss, or None.
        axis: the axis of the output's classes, counted with that of the batch.
    """

    name: str = ""
    scores: str = ""
    by_keras: bool = True
    from_logits: bool = False
    ignore_class: int | None = None
    axis: int = -1


def losses_of(model: keras.Model) -> list[Any]:
    """Return the loss of each output as compiled: a name, a function, an object, or None; of several, the first."""
    loss, outputs = model.loss, list(model.outputs)
    if isinstance(loss, dict):
        return [loss.get(name) for name in outputs_of(model).names]
    if isinstance(loss, (list, tuple)):
        if len(outputs) == 1:
            return [next((one for one in loss if one is not None), None)]
        return [*loss, *[None] * (len(outputs) - len(loss))]
    return [loss] * len(outputs)


def has_own_step(model: keras.Model) -> bool:
    """Return whether the user's own code computes the loss of a model, so that Keras' requirements may not hold."""
    return not all(_is_of_keras(getattr(type(model), name)) for name in ("train_step", "compute_loss"))


def loss_name(loss: Any) -> str:
    """Return the name of a loss: the text itself, or the name of the function or of the object's class."""
    if loss is None or isinstance(loss, str):
        return loss or ""
    return getattr(loss, "__name__", type(loss).__name__)


def kind_of(loss: Any, output: tuple[int | None, ...], *, sparse: bool | None = None) -> LossKind:
    """Return the meaning of a loss, as compiled, on an output whose rows have this shape.

    ``sparse``: labels have fewer axes than the output, by which Keras resolves "crossentropy"; None: unknown.
    """
    import keras

    name = loss_name(loss)
    if isinstance(loss, str):
        if loss.lower() in CHOSEN_BY_LABELS["loss"]:
            scores = "binary" if output[-1:] == (1,) else "one-hot" if sparse is False else "sparse"
            return LossKind(name, scores)
        try:
            loss = keras.losses.get(loss)
        except ValueError:  # a model that was compiled with such a name can still predict
            return LossKind(name, by_keras=False)
    return LossKind(name) if loss is None else replace(_kind(loss), name=name)


def _kind(loss: Any) -> LossKind:
    """Return the kind of a function, or of an object."""
    from keras import losses

    options: dict[str, Any] = {}
    function = loss
    while isinstance(function, functools.partial):
        options = {**function.keywords, **options}
        function = function.func
    scores, by_keras = _scores_of(function), _is_of_keras(function)
    if isinstance(function, losses.Loss):
        scores, by_keras = _object_scores(function)
        options = _options_of(function) | options
    ignored = options.get("ignore_class") if scores == "sparse" else None
    return LossKind(
        scores=scores,
        by_keras=by_keras,
        from_logits=bool(options.get("from_logits", False)),
        ignore_class=None if ignored is None else int(ignored),
        axis=int(options.get("axis", -1)) if scores in ("sparse", "one-hot") else -1,
    )


def _object_scores(loss: Any) -> tuple[str, bool]:
    """Return the field ``scores`` of an object, and whether only Keras' code computes it."""
    function = getattr(loss, "fn", None)
    scores = next((scores for kind, scores in _class_scores().items() if isinstance(loss, kind)), "")
    scores = scores or _scores_of(function)
    parts = [type(loss).call, type(loss).__call__, *([] if function is None else [function])]
    return scores, all(map(_is_of_keras, parts))


def _scores_of(function: Any) -> str:
    """Return the field ``scores`` of a function, which may be an object without a hash."""
    return next((scores for known, scores in _function_scores().items() if known is function), "")


def _options_of(loss: Any) -> dict[str, Any]:
    """Return the options with which an object calls its function; a `get_config` of the user's may leave them out."""
    names = ("from_logits", "ignore_class", "axis")
    own = {name: getattr(loss, name) for name in names if hasattr(loss, name)}
    return own | function_options(loss)


def _is_of_keras(part: Any) -> bool:
    return str(getattr(part, "__module__", type(part).__module__)).split(".")[0] == "keras"


@functools.cache
def _class_scores() -> dict[type, str]:
    from keras import losses

    return {
        losses.SparseCategoricalCrossentropy: "sparse",
        losses.CategoricalGeneralizedCrossEntropy: "sparse",
        losses.CategoricalCrossentropy: "one-hot",
        losses.CategoricalFocalCrossentropy: "one-hot",
        losses.BinaryCrossentropy: "binary",
        losses.BinaryFocalCrossentropy: "binary",
        losses.CTC: "ctc",
    }


@functools.cache
def _function_scores() -> dict[Any, str]:
    from keras import losses

    return {
        losses.sparse_categorical_crossentropy: "sparse",
        losses.categorical_generalized_cross_entropy: "sparse",
        losses.categorical_crossentropy: "one-hot",
        losses.categorical_focal_crossentropy: "one-hot",
        losses.binary_crossentropy: "binary",
        losses.binary_focal_crossentropy: "binary",
        losses.ctc: "ctc",
    }

"""What the outputs of a compiled model mean, as its losses tell: classes, or numbers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distkeras.data.schema import loss_name, losses_of

if TYPE_CHECKING:
    import keras

_CLASSES = {
    "sparse_categorical_crossentropy",
    "categorical_crossentropy",
    "categorical_focal_crossentropy",
    "binary_crossentropy",
    "binary_focal_crossentropy",
}
_BINARY = {"binary_crossentropy", "binary_focal_crossentropy"}


@dataclass(frozen=True)
class Head:
    """One output of a model.

    Args:
        classes: it scores classes: one number each, or a single one for the second of two.
        logits: the scores have not been through softmax or sigmoid.
        size: numbers of one row.
    """

    classes: bool
    logits: bool
    size: int


def heads_of(model: keras.Model) -> list[Head]:
    """One for each output of a model; without a loss, an output is numbers."""
    losses = losses_of(model) if model.compiled else [None] * len(model.outputs)
    found = []
    for output, loss in zip(model.outputs, losses, strict=True):
        shape = tuple(output.shape[1:])
        size = -1 if None in shape else math.prod(shape)
        name = "" if loss is None else re.sub(r"(?<!^)(?=[A-Z])", "_", loss_name(loss)).lower()
        # Several binary outputs in one are labels that may hold at once, none of which is the class.
        classes = name in _CLASSES and len(shape) <= 1 and not (name in _BINARY and size != 1)
        found.append(Head(classes, _from_logits(loss), size))
    return found


def _from_logits(loss: Any) -> bool:
    return bool(loss.get_config().get("from_logits")) if hasattr(loss, "get_config") else False

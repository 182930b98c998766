"""Mini-batches as a Keras model takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import keras

    from distkeras.data.batches import Batch, Stack


def model_inputs(model: keras.Model, x: Sequence[Any], y: Sequence[Any], weight: Any | None) -> tuple[Any, Any, Any]:
    """(x, y, sample weight) as ``train_step`` takes them.

    Args:
        model: built.
        x: an array or tensor for each input, in the model's order.
        y: likewise for each output.
        weight: sample weights ``(n,)``, or None.

    Returns:
        Inputs and targets bare where there is one, a list in the model's order, or a dictionary by its names.
    """
    return _structured(model, "input", x), _structured(model, "output", y), weight


def arrays_of(batch: Batch | Stack) -> list[np.ndarray]:
    """Inputs, targets and, if there are any, sample weights."""
    return [*batch.x, *batch.y] + ([] if batch.weight is None else [batch.weight])


def _structured(model: Any, side: str, arrays: Sequence[Any]) -> Any:
    structure = getattr(model, side, None) if hasattr(model, "inputs") and model.inputs else None
    if isinstance(structure, dict):
        import keras

        return keras.tree.pack_sequence_as(structure, list(arrays))
    return arrays[0] if len(arrays) == 1 else list(arrays)

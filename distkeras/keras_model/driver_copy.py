"""What a callback of Keras has changed in the driver's copy of the model, and which of it reaches the workers.

The copy before a hook is compared with the copy after it. The learning rate and variables that are not trained are
carried to the workers; any other change would be without effect there, and is an error at the first one.

Importing this module does not load Keras.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.keras_model.settable import Settable
from distkeras.ps.center.driver_values import VALUES_MAX
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.loop import NO_ROWS

if TYPE_CHECKING:
    import keras

_PLAIN = (bool, int, float, str, type(None))
_ADVICE = (
    "Learning rate and variables that are not trained (a `keras.Variable`, `add_weight(trainable=False)`) reach them. "
    "For anything else, end the job in the callback (`self.model.stop_training = True`), change the model, and train "
    "it again"
)


class CopyState:
    """The state of a copy of the model, to be compared with a later one.

    Args:
        variables: what can be set of it.
    """

    def __init__(self, model: keras.Model, variables: Sequence[Settable]) -> None:
        self._model, self._optimizer, self._settable = model, model.optimizer, variables
        self._values = [variable.value() for variable in self._settable]
        self._weights = [_copy(weight) for weight in model.trainable_variables]
        self._flags = _flags(model)
        self._attributes = _attributes(model)
        self._iterations = int(model.optimizer.iterations)

    def changes(self, author: str) -> tuple[np.ndarray, list[str]]:
        """Return what has changed and can be carried: rows of place and value, and its names.

        Args:
            author: whose hook it was, for texts.

        Raises:
            ConfigurationError: something has changed that cannot be carried, or more than `VALUES_MAX` numbers.
        """
        self._require_unchanged(author)
        rows, names = [], []
        for variable, before in zip(self._settable, self._values, strict=True):
            after = variable.value()
            moved = np.flatnonzero(before != after)
            if not moved.size:
                continue
            _require_carried(author, variable, after)
            rows.append(np.stack([moved + float(variable.start), after[moved]], axis=1))
            shown = f" ({after[0]:.6g})" if variable.size == 1 else f" ({moved.size} of {variable.size} numbers)"
            names.append(variable.name + shown)
        found = np.concatenate(rows) if rows else NO_ROWS
        if len(found) > VALUES_MAX:
            raise _refused(author, f"{len(found)} numbers at once: at most {VALUES_MAX} can be set")
        return found, names

    def _require_unchanged(self, author: str) -> None:
        model = self._model
        if model.optimizer is not self._optimizer:
            raise _refused(author, "how the model is compiled")
        flags = _flags(model)
        changed = next((name for name, flag in self._flags.items() if flags.get(name, flag) is not flag), None)
        if changed is not None:
            raise _refused(author, f"`trainable` of {changed} to {flags[changed]}")
        if self.has_new_weights:
            names = [weight.path for weight in model.trainable_variables]
            first = next(name for name, same in zip(names, self._same_weights(), strict=True) if not same)
            raise _refused(author, f"weights during training, first {first!r}; it may do so in `on_train_end`")
        attributes = _attributes(model)
        for name, value in self._attributes.items():
            now = attributes.get(name, value)
            if type(now) is not type(value) or now != value:
                raise _refused(
                    author, f"`{name}` from {value!r} to {now!r}, which a step reads once, when it is traced"
                )
        if int(model.optimizer.iterations) != self._iterations:
            raise _refused(author, "the optimizer's count of steps")

    @property
    def has_new_weights(self) -> bool:
        """Return whether a trained weight has changed."""
        return not all(self._same_weights())

    def _same_weights(self) -> list[bool]:
        weights = self._model.trainable_variables
        return [
            np.array_equal(before, _copy(now), equal_nan=True)
            for before, now in zip(self._weights, weights, strict=True)
        ]


def _require_carried(author: str, variable: Settable, after: np.ndarray) -> None:
    if not np.isfinite(after).all():
        raise _refused(author, f"{variable.name} to a value that is not finite")
    if variable.obstacle:
        raise _refused(author, f"{variable.name}: {variable.obstacle}")


def _refused(author: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"`callbacks` must not change what cannot be sent to the workers, which have models of their own. {_ADVICE}. "
        f"Received: {author} has changed {what}"
    )


def _copy(variable: Any) -> np.ndarray:
    import keras

    return np.array(keras.ops.convert_to_numpy(variable))


def _flags(model: keras.Model) -> dict[str, bool]:
    layers = model._flatten_layers()  # noqa: SLF001 - Keras has no public list of layers at every depth
    flags = {f"layer {layer.name!r} ({number})": layer.trainable for number, layer in enumerate(layers)}
    return flags | {
        f"variable {weight.path!r} ({number})": weight.trainable for number, weight in enumerate(model.weights)
    }


def _attributes(model: keras.Model) -> dict[str, Any]:
    """Return the public attributes with plain values of the optimizer, the loss and the layers, by their names."""
    owners: dict[str, Any] = {"optimizer": model.optimizer, "loss": getattr(model, "loss", None)}
    inner = getattr(model.optimizer, "inner_optimizer", None)
    owners |= {"optimizer.inner_optimizer": inner}
    for number, layer in enumerate(model._flatten_layers()):  # noqa: SLF001 - as above
        owners[f"{layer.name} ({number})" if layer is not model else "model"] = layer
    return {
        f"{owner}.{name}": value
        for owner, thing in owners.items()
        for name, value in getattr(thing, "__dict__", {}).items()
        if not name.startswith(("_", "stop_")) and isinstance(value, _PLAIN)
    }

"""Snapshots of Keras objects, by which a user's model can take a step and be afterwards exactly as it was.

A step changes more than weights: it builds the optimizer and the metrics, advances seeds and counters, and sets
attributes; `compile` replaces others. So a snapshot has the attributes of every Keras object that can be reached, the
content of every list, dictionary and set among them, and the value of every variable.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class Snapshot:
    """The state of Keras objects and of the random numbers of Python and NumPy.

    Args:
        roots: models, optimizers, losses and metrics, as single objects or in lists and dictionaries. Other objects of
            the user's that are attributes of these are not searched.
    """

    def __init__(self, *roots: Any) -> None:
        self._attributes: list[tuple[Any, dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._values: list[tuple[Any, np.ndarray]] = []
        self._seen: dict[int, Any] = {}  # holds the objects, so that no identity is used again
        pending: list[Any] = list(roots)
        while pending:
            value = _unwrapped(pending.pop())
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                pending.extend(self._recorded(value))
        self._random = random.getstate(), np.random.get_state()

    def _recorded(self, value: Any) -> Iterator[Any]:
        """Record one object, and yield the objects that it holds."""
        import keras

        if isinstance(value, list | set):
            self._contents.append((value, type(value)(value) if type(value) in (list, set) else list(value)))
            yield from value
        elif isinstance(value, dict):
            self._contents.append((value, dict(value)))
            yield from value.values()
        elif isinstance(value, tuple):
            yield from value
        elif _is_of_keras(value):
            if isinstance(value, keras.Variable) and value._value is not None:  # noqa: SLF001 - it may be deferred
                self._values.append((value, np.array(keras.ops.convert_to_numpy(value))))
            self._attributes.append((value, dict(vars(value))))
            yield from vars(value).values()

    def restore(self) -> None:
        """Put everything back; objects that were created since are no longer referred to."""
        for owner, attributes in self._attributes:
            own = vars(owner)
            for name in [name for name in own if name not in attributes]:
                del own[name]
            own.update(attributes)
        for container, content in self._contents:
            _refill(container, content)
        for variable, value in self._values:
            variable.assign(value)
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])


@contextmanager
def undone(*roots: Any) -> Iterator[None]:
    """Restore the state of ``roots`` when the context ends, also by an exception; see `Snapshot`."""
    snapshot = Snapshot(*roots)
    try:
        yield
    finally:
        snapshot.restore()


def _unwrapped(value: Any) -> Any:
    """Return the plain container within one of TensorFlow's, which it puts into the attributes of layers."""
    inner = getattr(type(value), "__module__", "").startswith("tensorflow") and (
        getattr(value, "__wrapped__", None) if isinstance(value, dict | tuple) else getattr(value, "_storage", None)
    )
    return inner if isinstance(inner, dict | list | tuple) else value


def _is_of_keras(value: Any) -> bool:
    """Return whether an object is of one of Keras' classes, or of a class of the user's that extends one."""
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    return any(kind.__module__.partition(".")[0] == "keras" for kind in type(value).__mro__)


def _refill(container: Any, content: Any) -> None:
    if len(container) == len(content) and all(one is other for one, other in zip(container, content, strict=True)):
        if not isinstance(container, dict):
            return
        if all(container[key] is value for key, value in content.items()):
            return
    # Keras' containers track what is added: the plain methods do not.
    if isinstance(container, dict):
        dict.clear(container)
        dict.update(container, content)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, content)
    else:
        list.__setitem__(container, slice(None), content)

"""What a model's variables held at first, to be put back: a traced model is worth keeping, its state is not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import keras


class InitialState:
    """The first values of variables, as they are remembered one after the other.

    Of an array of one value, as an optimizer's slots begin with, only that value is kept.

    Args:
        overwritten: variables that whoever restores sets himself; they are left out.
    """

    def __init__(self, overwritten: Iterable[keras.Variable] = ()) -> None:
        self._overwritten = {id(variable) for variable in overwritten}
        self._values: dict[int, tuple[keras.Variable, np.ndarray]] = {}

    @property
    def nbytes(self) -> int:
        """What is kept, in bytes."""
        return sum(value.nbytes for _, value in self._values.values())

    def remember(self, variables: Iterable[keras.Variable]) -> None:
        """Takes the values as they are now of those ``variables`` that are not known yet."""
        import keras

        for variable in variables:
            if id(variable) in self._overwritten or id(variable) in self._values:
                continue
            value = np.array(keras.ops.convert_to_numpy(variable))
            if value.size > 1 and (value == value.flat[0]).all():
                value = value.flat[:1].copy()
            self._values[id(variable)] = variable, value

    def knows(self, variables: Iterable[keras.Variable]) -> bool:
        """Whether each of ``variables`` is remembered, or is left out on purpose."""
        return all(id(variable) in self._values or id(variable) in self._overwritten for variable in variables)

    def restore(self) -> None:
        """Puts back every value that is remembered."""
        for variable, value in self._values.values():
            whole = value if value.shape == tuple(variable.shape) else np.full(variable.shape, value[0])
            variable.assign(whole.copy())

"""The binding of columns to the inputs and outputs of a model, which only this module decides.

Keras flattens dictionaries sorted by key, so the order of a caller's columns does not identify inputs or outputs that
are named. For these a mapping is required, and a list is refused. Importing this module loads neither pyspark nor
Keras.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distkeras.private_keras import structures
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import invalid

if TYPE_CHECKING:
    import keras

GivenColumns = str | Sequence[str] | Mapping[str, str]
"""A caller's columns: one name, several in the model's order, or a mapping from the names of the model's parts."""

Entry = str | tuple[str, ...] | None
"""What one output has: a column, several that form an array together, or nothing."""

GivenEntries = str | Sequence[str | Sequence[str] | None] | Mapping[str, str | Sequence[str] | None] | None
"""A caller's columns of labels or weights, of which outputs may have none or several."""

Entries = tuple[Entry, ...] | dict[str, Entry]
"""The same, checked by `entries_of`; empty if no output has any."""


@dataclass(frozen=True)
class Parts:
    """The inputs or the outputs of a model, in the order in which Keras flattens them.

    Args:
        names: one for each part: its key in a dictionary, or else the name of its input layer or last layer.
        named: there are several in a dictionary, so that no order can be assumed.
    """

    what: str
    names: tuple[str, ...]
    named: bool

    def bound(self, columns: GivenColumns, argument: str) -> tuple[str, ...]:
        """Return a column for each part, in the model's order."""
        placed = self._placed(names_of(columns, argument), argument)
        return tuple(name for name in placed if isinstance(name, str))  # `names_of` returns nothing else

    def entries(self, columns: GivenEntries, argument: str) -> tuple[Entry, ...]:
        """Return what each part has, in the model's order; empty if no part has anything.

        Several names for a single part are its columns together.
        """
        entries = entries_of(columns, argument)
        if isinstance(entries, tuple) and len(self.names) == 1 and len(entries) > 1:
            entries = entries_of([list(entries)], argument)
        placed = self._placed(entries, argument, optional=True) if entries else ()
        return placed if any(entry is not None for entry in placed) else ()

    def _placed(
        self, columns: Entries | Mapping[str, str], argument: str, *, optional: bool = False
    ) -> tuple[Entry, ...]:
        """Return the entry of each part; ``optional``: one may be None."""
        none = ", or None," if optional and len(self.names) > 1 else ""
        if isinstance(columns, Mapping):
            if len(set(self.names)) != len(self.names):
                raise ConfigurationError(
                    f"`{argument}` must be a list: the {self.what} of the model have no names of their own. "
                    f"Received: {argument}={columns} for {list(self.names)}"
                )
            if columns.keys() != set(self.names):
                raise ConfigurationError(
                    f"`{argument}` must name a column{none} for each of the model's {self.what} "
                    f"{list(self.names)}. Received: {argument}={columns}"
                )
            return tuple(columns[name] for name in self.names)
        if len(columns) != len(self.names):
            surplus = self.what == "inputs" and len(columns) > len(self.names)
            several = "; Spark ML's VectorAssembler makes one column of several" if surplus else ""
            known = f", {list(self.names)}" if self.named else ""
            raise ConfigurationError(
                f"`{argument}` must name a column{none} for each of the {len(self.names)} {self.what} of the "
                f"model{known}{several}. Received: {argument}={list(columns)}"
            )
        if self.named:
            example = ", ".join(f"{name!r}: ..." for name in self.names)
            raise ConfigurationError(
                f"`{argument}` must be a mapping, {{{example}}}, for the model's {self.what} are named. "
                f"Received: {argument}={list(columns)}"
            )
        return columns


def names_of(columns: Any, argument: str) -> tuple[str, ...] | dict[str, str]:
    """Return one column name or several as a tuple, and a mapping from names of a model's parts as a dictionary."""
    checked: tuple[str, ...] | dict[str, str]
    if isinstance(columns, Mapping):
        checked = dict(columns)
        names = [*checked.keys(), *checked.values()]
    else:
        names = [columns] if isinstance(columns, str) else list(columns) if isinstance(columns, Iterable) else []
        checked = tuple(names)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise invalid(argument, columns, "a column name, several, or a mapping: name of an input or output to column")
    return checked


def entries_of(columns: Any, argument: str) -> Entries:
    """Return a caller's columns of labels or weights, of which a part of the model may have none or several."""
    if columns is None or isinstance(columns, str):
        columns = [] if columns is None else [columns]
    if not isinstance(columns, Iterable):
        raise _entries_error(columns, argument)
    if isinstance(columns, Mapping):
        return {_name(name, columns, argument): _entry(entry, columns, argument) for name, entry in columns.items()}
    return tuple(_entry(entry, columns, argument) for entry in columns)


def _entry(value: Any, columns: Any, argument: str) -> Entry:
    if value is None or isinstance(value, str):
        return None if value is None else _name(value, columns, argument)
    names = tuple(_name(name, columns, argument) for name in value) if isinstance(value, (list, tuple)) else ()
    if not names or len(set(names)) != len(names):
        raise _entries_error(columns, argument)
    return names if len(names) > 1 else names[0]


def _name(value: Any, columns: Any, argument: str) -> str:
    if not isinstance(value, str) or not value:
        raise _entries_error(columns, argument)
    return value


def _entries_error(columns: Any, argument: str) -> ConfigurationError:
    return invalid(
        argument,
        columns,
        "a column name, several, or a mapping: name of an output to its column, to a list of columns, or to None",
    )


def listed(columns: Entries | Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns in a result of `names_of` or `entries_of`, in the caller's order."""
    entries = columns.values() if isinstance(columns, Mapping) else columns
    return tuple(name for entry in entries if entry for name in ((entry,) if isinstance(entry, str) else entry))


def inputs_of(model: keras.Model) -> Parts:
    return Parts("inputs", *_names(structures(model)[0], [t.name for t in model.inputs or ()]))


def outputs_of(model: keras.Model) -> Parts:
    """Return the outputs of a Functional or Sequential model; the only one of a Sequential model is "output"."""
    names = getattr(model, "output_names", None) or ["output"] * len(model.outputs or ())
    return Parts("outputs", *_names(structures(model)[1], list(names)))


def _names(structure: Any, names: list[str]) -> tuple[tuple[str, ...], bool]:
    """Return the names of the parts, and whether there are several in a dictionary."""
    import keras

    paths = [] if structure is None else [path for path, _ in keras.tree.flatten_with_path(structure)]
    if not any(isinstance(step, str) for path in paths for step in path):
        return tuple(names), False
    return tuple("/".join(map(str, path)) for path in paths), len(paths) > 1

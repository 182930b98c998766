"""dist-keras 0.2.1's names, where they are not this project's own: its scripts run, or fail with a named replacement.

The modules at dist-keras' old paths import from here histories as lists and arrays, the text of `help` and refusals,
and from `stages` its predictor and its evaluator, and its job server and client, which are refused. No code of
dist-keras is in it.
"""

from __future__ import annotations

import inspect
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import Rule
from distkeras.trainer import Trainer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class PortingWarning(UserWarning):
    """A call in the shape of dist-keras' that does something else here, or nothing."""


def warn_about_porting(text: str) -> None:
    """Warn at the nearest line that is not this package's."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("distkeras."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, PortingWarning, stacklevel=level)


#: Where a rule comes in place of dist-keras' worker and server classes.
RULES = "an algorithm is one `Rule`, both halves: `distkeras.Trainer(model, rule)`, `python -m distkeras.ps rules`"
#: What comes in place of a trainer that travels.
SUBMIT = "there is `distkeras.job_server.Client`, and `distkeras train` with a file of its arguments"


def refusal(name: str, instead: str) -> ConfigurationError:
    """Return the error for ``name``."""
    return ConfigurationError(f"`{name}` of dist-keras has no equivalent here; {instead}. Received: a use of it")


def refused(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a function or method ``name`` that raises its refusal, with any arguments."""

    def raise_it(*_arguments: Any, **_keywords: Any) -> NoReturn:
        raise refusal(name, instead)

    raise_it.__name__ = raise_it.__qualname__ = name
    raise_it.__doc__ = f"Of dist-keras, without an equivalent: {instead}."
    return raise_it


class RefusedClass:
    """Base of classes that raise their refusal when they are called."""

    instead: ClassVar[str]

    def __init_subclass__(cls, *, instead: str) -> None:
        cls.instead = instead

    def __init__(self, *_arguments: Any, **_keywords: Any) -> None:
        raise refusal(type(self).__name__, self.instead)


def history_executor(history: Iterable[dict[str, Any]], id: int) -> list[dict[str, Any]]:
    """Return the entries of one worker, by iteration."""
    return sorted((entry for entry in history if entry["worker_id"] == id), key=lambda entry: entry["iteration"])


def history_executors_average(history: Iterable[dict[str, Any]]) -> np.ndarray:
    """Return means of loss and metrics over the workers that came so far.

    Returns:
        float64 ``(steps, metrics)``, the loss first; ``(0, 0)`` where there is no entry.
    """
    by_worker: dict[int, list[Sequence[float]]] = {}
    for entry in sorted(history, key=lambda entry: entry["iteration"]):
        by_worker.setdefault(entry["worker_id"], []).append(entry["history"])
    columns = [np.atleast_2d(np.asarray(rows, np.float64).reshape(len(rows), -1)) for rows in by_worker.values()]
    if not columns:
        return np.empty((0, 0))
    total = np.zeros((max(map(len, columns)), columns[0].shape[1]))
    count = np.zeros((len(total), 1))
    for rows in columns:
        total[: len(rows)] += rows
        count[: len(rows)] += 1
    return total / count


#: What an entry of ``Args:`` begins with: one name, or several.
_ENTRY = re.compile(r"^    (?=\w[\w, ]*: )", re.MULTILINE)
_SECTION = re.compile(r"^Args:\n((?:    .*\n?|\n)+)", re.MULTILINE)

_DEFAULTS = "Where the signature has a default, that is the one."
_OWN = "keras_model: a built `keras.Model`. It is not changed.\n"
_PORT = "master_port: the port of `network`.\n"
_WINDOW = 'communication_window: the `window` of the rule: a number, "auto" or "by_speed".\n'
_WINDOW_MAX = 'window_max: the window of the fastest worker, with "by_speed".\n'


def documented(words: str, rule: type[Rule]) -> str:
    """Return the docstring of a trainer under ``rule``, which begins with ``words``."""
    own = [entry for entry in _arguments(rule) if not entry.startswith("window:")]
    options = [entry for entry in _arguments(Trainer) if not entry.startswith(("model:", "rule:"))]
    own_names = {entry.partition(":")[0] for entry in own}
    rest = [entry for entry in options if entry.partition(":")[0] not in own_names]
    entries = "".join(f"    {entry.rstrip()}\n" for entry in (_OWN, _WINDOW, _WINDOW_MAX, *own, *rest, _PORT))
    head = f"{inspect.cleandoc(words)}\n\n{_DEFAULTS}"
    return f"{head}\n\nArgs:\n{entries}\nRaises:\n    ConfigurationError: an argument cannot work.\n"


def _arguments(kind: type) -> list[str]:
    """Return the entries of a class' ``Args:``, each without its first indentation."""
    section = _SECTION.search(inspect.cleandoc(kind.__doc__ or "") + "\n")
    return _ENTRY.split(section[1])[1:] if section else []


_SERVER = "`train` starts and stops the server, which is a process of its own"
_TIMES = "`train` takes the times: `get_training_time`, `timings`"

#: Methods from inside dist-keras' trainers, and what there is for each. Nothing calls them here, also not a subclass'.
_INSIDE = {
    "allocate_worker": RULES,
    "allocate_parameter_server": RULES,
    "average_models": RULES,
    "service": _SERVER,
    "start_service": _SERVER,
    "stop_service": _SERVER,
    "record_training_start": _TIMES,
    "record_training_end": _TIMES,
    "serialize": SUBMIT,
}


def single_dataframe(df: DataFrame | None, dataframe: DataFrame | None) -> DataFrame:
    """Return the table to train on, given under either name; raise ConfigurationError for both or none."""
    table = df if dataframe is None else dataframe
    if table is None or (df is not None and dataframe is not None):
        raise ConfigurationError(f"`dataframe` must be given, once. Received: df={df!r}, dataframe={dataframe!r}")
    return table


class Histories(ABC):
    """Gives histories as lists and arrays, and refuses what was inside a trainer.

    Raises:
        ConfigurationError: a subclass defines one of the methods that nothing calls here.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in _INSIDE.keys() & vars(cls).keys():
            raise refusal(f"{cls.__name__}.{name}", _INSIDE[name])

    @abstractmethod
    def get_history(self) -> list[dict[str, Any]]:
        """Return one dictionary a mini-batch, by worker and iteration; as a DataFrame it is `history`.

        Returns:
            ``worker_id``; ``iteration``, from 1; ``history``: loss and metrics; ``timestamp``: seconds since 1970.
        """

    def get_executor_history(self, executor_id: int) -> list[dict[str, Any]]:
        """Return the entries of `get_history` of one worker, by iteration."""
        return history_executor(self.get_history(), executor_id)

    def get_averaged_history(self) -> np.ndarray:
        """Return means of loss and metrics over the workers: float64 ``(steps, metrics)``, the loss first."""
        return history_executors_average(self.get_history())

    def set_max_prefetch(self, max_mini_batches: int) -> None:
        """Warn that this has no effect: a worker reads ahead by itself, in bounded memory."""
        warn_about_porting(
            f"`set_max_prefetch` has no effect: a worker reads ahead by itself. Received: {max_mini_batches}"
        )


for _name, _instead in _INSIDE.items():
    setattr(Histories, _name, refused(_name, _instead))

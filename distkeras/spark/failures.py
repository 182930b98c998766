"""The conversion of errors of Spark and Keras into typed errors, and the shortening of tracebacks.

An error says in its first line what is wrong. Its traceback, and that of its cause, shows only the caller's own code:
frames of this package, of Spark, Keras and its backend are left out. The full text is in
`DistkerasError.full_traceback` and, from a worker, in `remote_traceback`; with ``DISTKERAS_TRACEBACK=full`` in the
environment all frames are shown.
"""

from __future__ import annotations

import functools
import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from py4j.protocol import Py4JError

from distkeras.ps.errors import (
    ERRORS,
    ConfigurationError,
    DistkerasError,
    NodeError,
    WorkerError,
    headline,
    is_library,
    shown_in_full,
)
from distkeras.spark.cluster import tasks_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_P = ParamSpec("_P")
_R = TypeVar("_R")

_TYPED = re.compile(
    rf"{re.escape(DistkerasError.__module__)}\.({'|'.join(kind.__qualname__ for kind in ERRORS)}): (.*?)"
    r"(?: \[(?:worker/partition (\d+))?(?:, )?(?:column '([^']*)')?(?:, )?(?:step (\d+))?\])?"
    r"(?: SQLSTATE: \w+)?\s*(?:\n|$)"
)
#: Spark's messages if a task's Python does not start, or lacks a module.
_PYTHON = re.compile(
    r"(?:ModuleNotFoundError: )?No module named '?[\w.]+'?|ImportError: [^\n]+|Cannot run program \"[^\"]+\""
    r"|\[?PYTHON_VERSION_MISMATCH\]?[^\n]*|Python in worker has different version[^\n]*"
)


def named_error(failure: BaseException) -> DistkerasError | None:
    """Return the typed error whose name and text Spark's error contains; None if there is none.

    In this form errors of tasks and of JVM expressions reach the driver.
    """
    text = str(failure)
    match = _TYPED.search(text)
    if match is None:
        return None
    kind = next(kind for kind in ERRORS if kind.__qualname__ == match[1])
    worker, step = (None if number is None else int(number) for number in (match[3], match[5]))
    return kind(match[2], worker=worker, column=match[4], step=step, remote_traceback=text)


def typed_error(failure: BaseException, session: SparkSession) -> DistkerasError:
    """Return an error that Spark raised in ``session`` as a typed error."""
    known_error = named_error(failure)
    if known_error is not None:
        if isinstance(known_error, NodeError):  # other attempts were made first
            known_error.message += ", after the last attempt that Spark makes"
        return known_error
    text = str(failure)
    lacking = _PYTHON.search(text)
    if lacking is not None:
        return ConfigurationError(
            "the executors' Python must start, and have distkeras, Keras and what the model's own code imports: set "
            "PYSPARK_PYTHON before the session starts, or ship an environment with --archives. "
            f"Received: {lacking[0]}, with {tasks_python(session)}",
            remote_traceback=text,
        )
    return WorkerError(f"Spark ended the job's tasks: {innermost(failure)}", remote_traceback=text)


def innermost(failure: BaseException) -> str:
    """Return the headline of the innermost Java cause: Py4J's own text names only the call that failed."""
    java: Any = getattr(failure, "java_exception", None)
    try:
        while java is not None and java.getCause() is not None:
            java = java.getCause()
        if java is not None and java.getMessage():
            return headline(str(java.getMessage()))
    except (OSError, Py4JError):  # the JVM has ended
        pass
    return headline(str(failure))


@contextmanager
def message_first() -> Iterator[None]:
    """Make Spark's text of a typed error that a task raises in this context begin with the error's message.

    Spark would show the worker's traceback first. The variable affects no other task: the worker ends with the error.
    """
    try:
        yield
    except DistkerasError:
        if not shown_in_full():
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


def short_errors(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Shorten the traceback of a typed error, or of Ctrl-C, that ``function`` raises; for functions that users call."""

    @functools.wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        try:
            return function(*args, **options)
        except DistkerasError as error:
            if shown_in_full():
                raise
            raise shortened(error) from error.__cause__
        except KeyboardInterrupt as error:
            if shown_in_full() or not error.args:  # Python's own has no text
                raise
            raise error.with_traceback(None) from None

    return call


def shortened(error: DistkerasError) -> DistkerasError:
    """Return ``error`` without traceback, and with its cause only if that shows the caller's own code."""
    if error.full_traceback is None:
        error.full_traceback = "".join(traceback.format_exception(error))
    cause = error.__cause__
    if cause is not None:
        frames = _user_frames(cause.__traceback__)
        cause.__cause__, cause.__suppress_context__ = None, True
        error.__cause__ = cause.with_traceback(frames) if frames else None
    return error.with_traceback(None)


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of libraries."""
    if frames is None:
        return None
    rest = _user_frames(frames.tb_next)
    if is_library(frames.tb_frame.f_code.co_filename):
        return rest
    return TracebackType(rest, frames.tb_frame, frames.tb_lasti, frames.tb_lineno)

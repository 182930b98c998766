"""Every error that the project raises, in one closed table, and the origin of each.

An error carries fields (worker, partition, column, step) in addition to its text, survives pickling (Spark pickles what
a task raises), and is sent over the wire as its position in `ERRORS`: a peer can only name one of these types.

The consequence of an error depends on its `Origin`: an error of the user's code, data or settings ends the job, because
it would occur at every attempt; any other error ends one attempt, and Spark retries the task. `sorted_error` converts
other exceptions into errors with an origin.
"""

from __future__ import annotations

import enum
import errno
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

#: If this variable is "full", every error shows its whole traceback.
VARIABLE = "DISTKERAS_TRACEBACK"

#: Matches the files of this package, of installed packages and of the standard library, and frames without a file.
_LIBRARY = re.compile(
    r"[/\\](?:site-packages|dist-packages|python3?\.\d+t?|pyspark)[/\\]|\.zip[/\\]|^<frozen"
    r"|[/\\]distkeras[/\\](?:"
    r"(?:analysis|commands|compat|dashboard|data|groups|job_server|keras_model|ml|ps|spark|training|transformers)[/\\]"
    r"|(?:__(?:init|main)__|callbacks|chatter|evaluators|flags|job_deployment|keras_callbacks|layers|metric_columns"
    r"|private_keras|mlflow_logger|optimizers|predictors|prometheus|results|search|settings|shown|trainers?|utils)\.py$)"
)
_FRAME = re.compile(r'^  File "([^"\n]+)", line \d+, in .*\n(?:^    .*\n?)*', re.M)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
#: Matches first lines without information, and the lines of details; the cause is on one of the other lines.
_EMPTY = re.compile(r"^(?:\w+: )?(?:Graph execution error|Exception encountered when calling|An exception was thrown)")
_DETAILS = re.compile(r"^(?:Detected at node|Traceback \(most|  File |    |\s*\[\[|\t|Arguments received|Stack trace)")


def shown_in_full() -> bool:
    """Return whether errors show their whole traceback."""
    return os.environ.get(VARIABLE, "").lower() == "full"


def is_library(path: str) -> bool:
    """Return whether a file of a traceback is not the user's code."""
    return _LIBRARY.search(path) is not None


def user_frames(text: str) -> str:
    """Return the frames of a formatted traceback that are the user's code; an empty text if there are none."""
    return "".join(match[0] for match in _FRAME.finditer(text) if not is_library(match[1])).rstrip("\n")


def headline(text: str) -> str:
    """Return the line of a library's error text that names the cause."""
    lines = [line.rstrip() for line in _ANSI.sub("", text).splitlines() if line.strip()]
    if len(lines) < 2 or not _EMPTY.match(lines[0]):
        return lines[0].strip() if lines else ""
    causes = [line for line in lines[1:] if not _DETAILS.match(line)]
    if not causes:
        return lines[0].strip()
    # Keras names the cause before the arguments, TensorFlow and Spark after the stack.
    cause = causes[0] if "when calling" in lines[0] else causes[-1]
    kind = re.match(r"\w+(?=: Graph)", lines[0])
    return f"{kind[0]}: {cause.strip()}" if kind else cause.strip()


_TRACEBACK_HINT = f"the whole traceback is this error's `remote_traceback`; {VARIABLE}=full shows it"


class Origin(enum.Enum):
    """The origin of an error."""

    USER = "code, data or settings: it comes again at every attempt"
    NODE = "a machine's memory, disk, threads or descriptors: another attempt, perhaps elsewhere, may do better"
    NETWORK = "a connection, or a peer that does not respond: another attempt may do better"
    JOB = "the outcome of the job or of this attempt"


class DistkerasError(Exception):
    """The base of all errors of distkeras; never raised itself.

    Args:
        message: what happened, or what was expected and what was received.
        worker: id of the worker, which is the id of its partition.
        column: DataFrame column concerned.
        step: mini-batch within the epoch, counted from 0.
        remote_traceback: formatted traceback of the process in which the error occurred, if it is another one. The
            error's text shows the lines of the user's own code in it, and all lines with ``DISTKERAS_TRACEBACK=full``
            in the environment.

    Attributes:
        full_traceback: formatted traceback of this process, if a shorter one is shown.
    """

    origin: ClassVar[Origin] = Origin.USER

    def __init__(
        self,
        message: str,
        *,
        worker: int | None = None,
        column: str | None = None,
        step: int | None = None,
        remote_traceback: str | None = None,
    ) -> None:
        if type(self) in ABSTRACT:
            raise TypeError(f"{type(self).__name__} is abstract; raise one of its subclasses")
        super().__init__(message)
        self.message = message
        self.worker = worker
        self.column = column
        self.step = step
        self.remote_traceback = remote_traceback
        self.full_traceback: str | None = None

    @property
    def partition(self) -> int | None:
        """Partition concerned: workers and partitions share their numbers."""
        return self.worker

    def __str__(self) -> str:
        fields = [
            f"{label} {value!r}" if label == "column" else f"{label} {value}"
            for label, value in (
                ("worker/partition", self.worker),
                ("column", self.column),
                ("step", self.step),
            )
            if value is not None
        ]
        text = self.message + (f" [{', '.join(fields)}]" if fields else "")
        if not self.remote_traceback:
            return text
        if shown_in_full():
            return f"{text}\n\nRemote traceback:\n{self.remote_traceback}"
        frames = user_frames(self.remote_traceback)
        return f"{text}\n{frames}\n({_TRACEBACK_HINT})" if frames else text

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {k: getattr(self, k) for k in ("worker", "column", "step", "remote_traceback")}
        return _rebuild, (type(self), self.message, fields)


def _rebuild(kind: type[DistkerasError], message: str, fields: dict[str, Any]) -> DistkerasError:
    return kind(message, **fields)


class ConfigurationError(DistkerasError, ValueError):
    """An argument, hyper-parameter or model is invalid; raised before any work starts."""


class DataError(DistkerasError, ValueError):
    """The base of errors about input rows that cannot be trained on or predicted from; never raised itself."""


class EmptyDataError(DataError):
    """There is no row to train on."""


class MissingColumnError(DataError):
    """A named column is not in the DataFrame."""


class ColumnTypeError(DataError, TypeError):
    """A column has a type without numbers: text, bytes, a structure."""


class BadValueError(DataError):
    """A row has a null, NaN or infinite value, or a label out of range."""


class ShapeError(DataError):
    """A ragged array, or values whose count does not fill the model's input or output."""


class WorkerError(DistkerasError, RuntimeError):
    """User or library code has raised an exception in a task; the remote traceback shows where."""


class NodeError(DistkerasError, RuntimeError):
    """A task has failed because of its machine or network: no memory, no disk space, too many threads or files."""

    origin = Origin.NODE


class NonFiniteError(DistkerasError, ArithmeticError):
    """A commit had a NaN or infinity; it was refused before it changed the center."""


class ProtocolError(DistkerasError):
    """The base of the two protocol errors; never raised itself."""


class LocalProtocolError(ProtocolError):
    """This process attempted an action that the protocol does not allow in this state: a mistake in its own code."""


class RemoteProtocolError(ProtocolError):
    """The peer has sent something that the protocol does not allow: garbage, a wrong version, an excessive length."""


class AuthenticationError(DistkerasError, PermissionError):
    """The peer does not hold the job's key."""

    origin = Origin.NETWORK


class LeaseLostError(DistkerasError):
    """Another attempt now holds the lease of this partition; requests of this attempt are refused."""

    origin = Origin.JOB


class DeadlineError(DistkerasError, TimeoutError):
    """A wait has reached its deadline; the text names what was missing."""

    origin = Origin.NETWORK


class ServerLostError(DistkerasError, ConnectionError):
    """The parameter server cannot be reached any more."""

    origin = Origin.NETWORK


class RelayLostError(ServerLostError):
    """A commit in a group's sum was not applied; its worker joins the server again and sends it again."""


class JobStoppedError(DistkerasError):
    """The driver has stopped the job, or another worker has failed, while this worker was training."""

    origin = Origin.JOB


class MemberLostError(DistkerasError, ConnectionError):
    """A worker that exchanges with others has died or does not respond; they repeat the round with its next attempt.

    The job ends with this error if there is no next attempt, or if the workers lose each other repeatedly.
    """

    origin = Origin.NETWORK


class LedgerError(DistkerasError, RuntimeError):
    """The mini-batches are not committed exactly once each."""


class SnapshotError(DistkerasError, OSError):
    """A snapshot cannot be written, or none can be read."""


class NoVersionError(DistkerasError, LookupError):
    """No version of a model is published yet; a training stream publishes the first one."""


class DifferentJobError(ConfigurationError):
    """A checkpoint directory holds another job than the one to be resumed; the text names the difference."""


class OwnershipLostError(DistkerasError):
    """Another server now owns the checkpoint directory; the text names it. Later work of this one does not count."""


#: Base classes, which are never raised themselves.
ABSTRACT: tuple[type[DistkerasError], ...] = (DistkerasError, DataError, ProtocolError)

#: Wire code = position. Append only.
ERRORS: tuple[type[DistkerasError], ...] = (
    WorkerError,
    ConfigurationError,
    EmptyDataError,
    MissingColumnError,
    BadValueError,
    ShapeError,
    NonFiniteError,
    LocalProtocolError,
    RemoteProtocolError,
    AuthenticationError,
    LeaseLostError,
    DeadlineError,
    ServerLostError,
    JobStoppedError,
    LedgerError,
    SnapshotError,
    ColumnTypeError,
    DifferentJobError,
    OwnershipLostError,
    NodeError,
    MemberLostError,
    NoVersionError,
    RelayLostError,
)

#: The system's error numbers that a machine's condition causes.
_NODE_ERRNOS = {
    errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EIO, errno.EROFS,
    errno.ESTALE,
}  # fmt: skip
#: The names of the backends' errors when memory is exhausted; the backends must not be imported here.
_NODE_NAMES = {"ResourceExhaustedError", "OutOfMemoryError"}
#: Matches the texts of such errors, also if a backend reports the error of a Python function.
_NODE_TEXTS = re.compile(
    r"^RESOURCE_EXHAUSTED|can't allocate memory|can't start new thread|\bMemoryError:?"
    r"|\bOSError: \[Errno (?P<errno>\d+)\]"
)
#: The longest chain of causes that is searched.
_CAUSES_MAX = 20


def sorted_error(error: Exception) -> DistkerasError:
    """Return ``error`` if it is typed, a `NodeError` if a machine or its network caused it, else a `WorkerError`."""
    if isinstance(error, DistkerasError) and error.origin is not Origin.USER:
        return error
    trouble = next(filter(None, map(_node_error_text, _with_causes(error))), None)
    if trouble is not None:
        return NodeError(f"the machine or its network lacks what a task needs: {trouble}")
    if isinstance(error, ModuleNotFoundError):
        return ConfigurationError(
            f"the executors' Python must have every module that model and trainer import. Received: {error}, with "
            f"{sys.executable!r}"
        )
    return error if isinstance(error, DistkerasError) else WorkerError(headline(f"{type(error).__name__}: {error}"))


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__


def _node_error_text(error: BaseException) -> str | None:
    """Return one line of the text of an ``error`` of a machine or network; None for others, and for typed errors."""
    if isinstance(error, DistkerasError):
        return None
    text = str(error)
    match = _NODE_TEXTS.search(text)
    if match is not None and (match["errno"] is None or int(match["errno"]) in _NODE_ERRNOS):
        start, end = text.rfind("\n", 0, match.end()) + 1, text.find("\n", match.end())
        return f"{type(error).__name__}: {text[start : end if end >= 0 else None].strip()}"
    named = {kind.__name__ for kind in type(error).__mro__}
    known = isinstance(error, (MemoryError, ConnectionError, TimeoutError)) or bool(named & _NODE_NAMES)
    if known or (isinstance(error, OSError) and error.errno in _NODE_ERRNOS):
        return f"{type(error).__name__}: {text.strip().partition(chr(10))[0]}"
    return None

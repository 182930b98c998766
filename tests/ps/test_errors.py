from __future__ import annotations

import errno
import pickle

import pytest

from distkeras.ps import errors
from distkeras.ps.errors import (
    ERRORS,
    BadValueError,
    ConfigurationError,
    DeadlineError,
    DistkerasError,
    LeaseLostError,
    NodeError,
    Origin,
    ProtocolError,
    ServerLostError,
    WorkerError,
    sorted_error,
)
from distkeras.ps.protocol.messages import error_of, fault_of


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_survives_pickling_and_the_wire(kind: type[DistkerasError]) -> None:
    error = kind("text", worker=1, column="c", step=3, remote_traceback="Traceback …")
    for copy in (pickle.loads(pickle.dumps(error)), error_of(fault_of(error))):
        assert type(copy) is kind
        assert vars(copy) == vars(error)
        assert str(copy) == str(error)


def test_the_text_of_an_error_names_its_fields() -> None:
    text = str(BadValueError("no null. Received: null", worker=2, column="x", step=5))
    assert text == "no null. Received: null [worker/partition 2, column 'x', step 5]"


def test_missing_fields_are_still_missing_after_the_wire() -> None:
    error = error_of(fault_of(BadValueError("text")))
    assert (error.worker, error.column, error.step, error.remote_traceback) == (None, None, None, None)


@pytest.mark.parametrize("kind", [DistkerasError, ProtocolError, errors.DataError])
def test_an_abstract_error_class_cannot_be_raised(kind: type[Exception]) -> None:
    with pytest.raises(TypeError, match="abstract"):
        kind("text")


def test_every_concrete_error_is_in_the_table() -> None:
    concrete = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, DistkerasError) and value not in errors.ABSTRACT
    }
    assert concrete == set(ERRORS)


def test_a_long_traceback_keeps_its_beginning_and_its_end() -> None:
    fault = fault_of(BadValueError("text", remote_traceback="a" * 50_000 + "z" * 50_000))
    assert len(fault.traceback) < 40_000
    assert fault.traceback.startswith("a")
    assert fault.traceback.endswith("z")


class ResourceExhaustedError(Exception):
    """An error with the class name of TensorFlow's error; only the name is compared."""


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EMFILE, "Too many open files"),
        ConnectionResetError("Connection reset by peer"),
        ResourceExhaustedError("OOM when allocating tensor"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
        RuntimeError("can't start new thread"),
        RuntimeError("Graph error:\n\n{{function_node f}} OSError: [Errno 28] No space left on device\nTraceback"),
        raised_from(ConfigurationError("the model cannot be opened"), OSError(errno.EDQUOT, "quota")),
        raised_from(ValueError("no"), raised_from(KeyError("no"), MemoryError())),
    ],
)
def test_an_error_that_the_machine_caused_becomes_a_node_error(error: Exception) -> None:
    result = sorted_error(error)
    assert type(result) is NodeError
    assert result.origin is Origin.NODE
    assert "\n" not in result.message


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("x"), WorkerError),
        (FileNotFoundError(errno.ENOENT, "no such file"), WorkerError),
        (RuntimeError("OSError: [Errno 2] No such file"), WorkerError),
        (BadValueError("null"), BadValueError),
        (raised_from(BadValueError("null"), ValueError("null")), BadValueError),
        (ServerLostError("gone"), ServerLostError),
        (raised_from(DeadlineError("late"), MemoryError()), DeadlineError),
        (LeaseLostError("taken"), LeaseLostError),
    ],
)
def test_an_error_of_the_users_code_or_a_typed_error_keeps_its_kind(
    error: Exception, kind: type[DistkerasError]
) -> None:
    result = sorted_error(error)
    assert type(result) is kind
    assert result is error or kind is WorkerError

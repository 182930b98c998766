from __future__ import annotations

import pickle

import pytest

from distkeras.ps import errors
from distkeras.ps.errors import ERRORS, BadValueError, DistkerasError, ProtocolError
from distkeras.ps.protocol.error_codes import error_of, fault_of


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_survives_pickling_and_the_wire(kind: type[DistkerasError]) -> None:
    error = kind("text", worker=1, column="c", step=3, remote_traceback="Traceback …")
    for copy in (pickle.loads(pickle.dumps(error)), error_of(fault_of(error))):
        assert type(copy) is kind
        assert vars(copy) == vars(error)
        assert str(copy) == str(error)


def test_the_text_names_the_fields() -> None:
    text = str(BadValueError("no null. Received: null", worker=2, column="x", step=5))
    assert text == "no null. Received: null [worker/partition 2, column 'x', step 5]"


def test_missing_fields_stay_missing() -> None:
    error = error_of(fault_of(BadValueError("text")))
    assert (error.worker, error.column, error.step, error.remote_traceback) == (None, None, None, None)


@pytest.mark.parametrize("kind", [DistkerasError, ProtocolError, errors.DataError])
def test_a_base_cannot_be_raised(kind: type[Exception]) -> None:
    with pytest.raises(TypeError, match="abstract"):
        kind("text")


def test_the_table_is_complete() -> None:
    concrete = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, DistkerasError) and value not in errors.ABSTRACT
    }
    assert concrete == set(ERRORS)


def test_a_long_traceback_keeps_its_ends() -> None:
    fault = fault_of(BadValueError("text", remote_traceback="a" * 50_000 + "z" * 50_000))
    assert len(fault.traceback) < 40_000
    assert fault.traceback.startswith("a")
    assert fault.traceback.endswith("z")

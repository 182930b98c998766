"""Errors as messages, and back."""

from __future__ import annotations

from distkeras.ps.errors import ERRORS, DistkerasError, RemoteProtocolError
from distkeras.ps.protocol.messages import Fault

#: A traceback longer than this is cut in the middle, to stay below a frame's bound.
_LONGEST_TRACEBACK = 32 * 1024


def fault_of(error: DistkerasError) -> Fault:
    """Return the message of ``error``."""
    return Fault(
        code=ERRORS.index(type(error)),
        message=_shortened(error.message),
        worker=-1 if error.worker is None else error.worker,
        column=error.column or "",
        step=-1 if error.step is None else error.step,
        traceback=_shortened(error.remote_traceback or ""),
    )


def error_of(fault: Fault) -> DistkerasError:
    """Return the error of ``fault``; an unknown code is a `RemoteProtocolError`."""
    kind = ERRORS[fault.code] if 0 <= fault.code < len(ERRORS) else RemoteProtocolError
    return kind(
        fault.message,
        worker=None if fault.worker < 0 else fault.worker,
        column=fault.column or None,
        step=None if fault.step < 0 else fault.step,
        remote_traceback=fault.traceback or None,
    )


def _shortened(text: str) -> str:
    half = _LONGEST_TRACEBACK // 2
    cut = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return text if len(text) <= _LONGEST_TRACEBACK else cut

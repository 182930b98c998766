"""What a job is known by, and in what two differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distkeras.ps.errors import DifferentJobError

#: Differences that an error names, and characters of each value.
_NAMED, _LONGEST = 3, 120


def require_same_job(own: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    """Whether what ``own`` tells of a job is what ``saved`` tells.

    Args:
        own, saved: JSON-ready; what only ``saved`` has does not count.
        where: the saved job's directory, for the error.

    Raises:
        DifferentJobError: it is another job; the error names what differs.
    """
    found = list(differences(own, {name: saved.get(name) for name in own}))
    if found:
        path, ours, theirs = found[0]
        others = [f"`{path}`" for path, _, _ in found[1:_NAMED]]
        if len(found) > _NAMED:
            others.append(f"{len(found) - _NAMED} more")
        also = f"; also different: {', '.join(others)}" if others else ""
        raise DifferentJobError(
            f"`{path}` must be {_short(theirs)}, as in the job that {where!r} holds. Received: {_short(ours)}{also}"
        )


def differences(own: Any, saved: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each place in which two JSON values differ: its path, and both values."""
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        for name in {**own, **saved}:
            yield from differences(own.get(name), saved.get(name), f"{path}.{name}" if path else name)
    elif isinstance(own, list) and isinstance(saved, list) and len(own) == len(saved):
        for number, (ours, theirs) in enumerate(zip(own, saved, strict=True)):
            yield from differences(ours, theirs, f"{path}.{number}")
    elif own != saved:
        yield path, own, saved


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"

"""Paths and URIs of folders: made absolute where a user hands them over, and extended by a name.

A text is a URI if it begins with a scheme; everything else is a path of this machine, with any characters in it. In a
URI, characters are escaped (``%20``), as Arrow reads it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import require_text

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://|file:")
_FILE = "file:"


def is_uri(place: str) -> bool:
    """Return whether ``place`` is a URI, not a path."""
    return _URI.match(place) is not None


def absolute(place: str) -> str:
    """Return a URI as it is, and a path as an absolute one, for processes with another working directory."""
    if "\0" in place:
        raise ConfigurationError(f"a folder must be a path or a URI without NUL characters. Received: {place!r}")
    if not is_uri(place):
        return str(Path(place).absolute())
    ignored = "#?" if place.startswith(_FILE) else "#"
    found = next((mark for mark in ignored if mark in place), None)
    if found is not None:  # Arrow would open the folder that the part before it names
        raise ConfigurationError(
            f"a URI must have {f'%{ord(found):02X}'!r} in place of {found!r}; or give a path without a scheme. "
            f"Received: {place!r}"
        )
    return place


def require_place(name: str, value: Any, expected: str) -> str:
    """Return a path or URI as `absolute` does; raise ConfigurationError, in which ``expected`` follows "must be"."""
    return absolute(require_text(name, value, expected))


def below(place: str, name: str) -> str:
    """Return the path or URI of ``name`` in a folder."""
    path, query = _split(place)
    return f"{path.rstrip('/')}/{name}{query}"


def beside(place: str, suffix: str) -> str:
    """Return the path or URI of a folder whose name ends with ``suffix`` in addition."""
    path, query = _split(place)
    return f"{path.rstrip('/')}{suffix}{query}"


def _split(place: str) -> tuple[str, str]:
    """Return ``place`` without the options of its file system, such as ``?region=eu-west-1``, and these."""
    path, mark, query = place.partition("?") if is_uri(place) else (place, "", "")
    return path, mark + query

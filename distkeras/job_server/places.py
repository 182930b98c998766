"""The places where jobs may read and write: a user's path is compared with those that the server's operator allows.

Symbolic links of a local path are resolved, when a job is submitted and again by its driver: a user who may write to a
place that jobs read must not redirect them to another place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from distkeras.job_server.errors import DescriptionError, refused

if TYPE_CHECKING:
    from distkeras.job_server.settings import Settings
    from distkeras.job_server.store.accounts import Account

#: The most characters of a received value in an error.
_SHOWN = 300
#: Characters that Spark would take for a pattern, which might match files outside of the allowed places.
_PATTERN = re.compile(r"[*?#\[\]{}\\%\x00-\x1f]")
_LOCAL = "file://"


def require_readable(place: str, field: str, settings: Settings, account: Account) -> str:
    """Return the URI of a place that a job of ``account`` may read."""
    uri = require_allowed(place, settings.data, field)
    _require_elsewhere(uri, settings.private, field)
    if not account.is_admin:
        _require_own(uri, settings.output, account.name, field)
    if uri.startswith(_LOCAL) and not _path(uri).exists():  # only Spark can check any other place
        raise refused(field, f"exist. Received: {uri[:_SHOWN]}, which does not")
    return uri


def require_writable(place: str, settings: Settings, account: Account) -> str:
    """Return the URI of a place in the user's own folder of an output; DescriptionError if it is elsewhere."""
    own = [f"{root.rstrip('/')}/{account.name}" for root in settings.output]
    uri = require_allowed(place, own, "output")
    if any(uri == "{}{}".format(*_located(folder)) for folder in own):
        raise refused("output", f"be a folder below {uri}. Received: {uri} itself")
    _require_elsewhere(uri, settings.private, "output")
    return uri


def require_allowed(place: str, roots: Sequence[str], field: str) -> str:
    """Return the URI of ``place`` for Spark, without symbolic links; DescriptionError unless it is below a root."""
    if _PATTERN.search(place) or ".." in PurePosixPath(place).parts:
        raise refused(field, f"be one path or URI, without patterns and `..`. Received: {place[:_SHOWN]!r}")
    base, path = _located(place)
    if any(base == root and path.is_relative_to(below) for root, below in map(_located, roots)):
        return f"{base}{path}"
    places = ", ".join(roots) or "its operator has allowed none"
    raise refused(field, f"be below a folder that the server allows: {places}. Received: {place!r}")


def require_no_links(uri: str) -> None:
    """Raise DescriptionError if a local place has become a symbolic link, or contains one that points out of it."""
    if not uri.startswith(_LOCAL):
        return
    path = _path(uri)
    links = [path] if path.resolve() != path else []
    for folder, folders, names in os.walk(path):
        entries = [Path(folder, name) for name in (*folders, *names)]
        links += [entry for entry in entries if entry.is_symlink() and not entry.resolve().is_relative_to(path)]
    _refuse_links(links, uri)


def require_listed(files: Iterable[str], uri: str) -> None:
    """Raise DescriptionError if a file that Spark will read lies elsewhere than in ``uri``, by a link that is new."""
    if uri.startswith(_LOCAL):
        paths = [Path(unquote(urlsplit(file).path)) for file in files]
        _refuse_links([path for path in paths if path.resolve() != path or not path.is_relative_to(_path(uri))], uri)


def _refuse_links(links: Sequence[Path], uri: str) -> None:
    if links:
        name = links[0].name[:_SHOWN]
        raise DescriptionError(f"{uri} must not have symbolic links that leave it. Received: {name!r}")


def _require_own(uri: str, roots: Sequence[str], user: str, field: str) -> None:
    """Raise DescriptionError if ``uri`` holds outputs of others: it is in one of ``roots``, and not the user's own."""
    found, path = _located(uri)
    for base, above in map(_located, roots):
        overlaps = path.is_relative_to(above) or above.is_relative_to(path)
        if base == found and overlaps and not path.is_relative_to(above / user):
            raise refused(field, f"not hold what jobs of others have written. Received: {uri[:_SHOWN]}")


def _require_elsewhere(uri: str, private: Iterable[Path], field: str) -> None:
    for ours in (folder.resolve() for folder in private):
        if uri.startswith(_LOCAL) and (_path(uri).is_relative_to(ours) or ours.is_relative_to(_path(uri))):
            raise refused(field, "not be in the server's own folder, nor above it. Received: such a path")


def _path(uri: str) -> Path:
    return Path(uri.removeprefix(_LOCAL))


def _located(place: str) -> tuple[str, PurePosixPath]:
    """Return scheme and host, and the path; symbolic links of a local path are resolved."""
    parts = urlsplit(place if "://" in place else f"{_LOCAL}{Path(place).absolute()}")
    if parts.scheme == "file" and not parts.netloc:
        return _LOCAL, PurePosixPath(Path(parts.path).resolve())
    return f"{parts.scheme}://{parts.netloc}", PurePosixPath("/", parts.path)

"""The places where jobs may read and write: a user's path is compared with those that the server's operator allows.

Symbolic links of a local path are resolved, when a job is submitted and again by its driver: a user who may write to a
place that jobs read must not redirect them to another place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from distkeras.job_server.errors import DescriptionError

#: The most characters of a received value in an error.
_SHOWN = 300
#: Characters that Spark would take for a pattern, which might match files outside of the allowed places.
_PATTERN = re.compile(r"[*?#\[\]{}\\%\x00-\x1f]")
_LOCAL = "file://"


def require_no_links(uri: str) -> None:
    """Raise DescriptionError if a local place has become a symbolic link, or contains one that points out of it."""
    if not uri.startswith(_LOCAL):
        return
    path = Path(uri.removeprefix(_LOCAL))
    links = [path] if path.resolve() != path else []
    for folder, folders, names in os.walk(path):
        entries = [Path(folder, name) for name in (*folders, *names)]
        links += [entry for entry in entries if entry.is_symlink() and not entry.resolve().is_relative_to(path)]
    if links:
        name = links[0].name[:_SHOWN]
        raise DescriptionError(f"{uri} must not have symbolic links that leave it. Received: {name!r}")


def require_listed(files: Iterable[str], uri: str) -> None:
    """Raise DescriptionError if a file that Spark will read lies elsewhere than in ``uri``, by a link that is new."""
    if not uri.startswith(_LOCAL):
        return
    for file in files:
        path = Path(unquote(urlsplit(file).path))
        if path.resolve() != path or not path.is_relative_to(uri.removeprefix(_LOCAL)):
            raise DescriptionError(
                f"{uri} must not have symbolic links that leave it. Received: {path.name[:_SHOWN]!r}"
            )


def require_allowed(place: str, roots: Sequence[str], field: str = "data") -> str:
    """Return the URI of ``place``, if it lies below one of ``roots``.

    Args:
        roots: paths and URIs of folders, or of single files.

    Returns:
        The URI for Spark; that of a local file has no symbolic links.

    Raises:
        DescriptionError: ``place`` is not below a root, or is ambiguous.
    """
    allowed = [_located(root) for root in roots]
    if _PATTERN.search(place) or ".." in PurePosixPath(place).parts:
        raise DescriptionError(
            f"`{field}` must be one path or URI, without patterns and `..`. Received: {place[:_SHOWN]!r}", field
        )
    base, path = _located(place)
    for root, below in allowed:
        if base == root and path.is_relative_to(below):
            return f"{base}{path}"
    places = ", ".join(roots) or "its operator has allowed none"
    raise DescriptionError(
        f"`{field}` must be below a folder that the server allows: {places}. Received: {place!r}", field
    )


def require_output(place: str, roots: Sequence[str], user: str) -> str:
    """Return the URI of ``place``; raise DescriptionError unless it is in the user's own folder in one of ``roots``."""
    own = [f"{root.rstrip('/')}/{user}" for root in roots]
    uri = require_allowed(place, own, "output")
    if any(uri == "{}{}".format(*_located(folder)) for folder in own):
        raise DescriptionError(f"`output` must be a folder below {uri}. Received: {uri} itself", "output")
    return uri


def require_own(uri: str, roots: Sequence[str], user: str, field: str) -> None:
    """Raise DescriptionError if ``uri`` holds outputs of others: it is in one of ``roots``, and not the user's own."""
    for root in roots:
        (base, above), (found, path) = _located(root), _located(uri)
        if base != found or path.is_relative_to(above / user):
            continue
        if path.is_relative_to(above) or above.is_relative_to(path):
            raise DescriptionError(
                f"`{field}` must not hold what jobs of others have written. Received: {uri[:_SHOWN]}", field
            )


def require_elsewhere(uri: str, folder: Path, field: str) -> None:
    """Raise DescriptionError if ``uri`` lies in ``folder``, which holds the server's own files."""
    path, ours = Path(uri.removeprefix(_LOCAL)), folder.resolve()
    if uri.startswith(_LOCAL) and (path.is_relative_to(ours) or ours.is_relative_to(path)):
        raise DescriptionError(
            f"`{field}` must not be in the server's own folder, nor above it. Received: such a path", field
        )


def require_existing(uri: str, field: str) -> None:
    """Raise DescriptionError if a local ``uri`` does not exist. Only Spark can check any other place."""
    if uri.startswith(_LOCAL) and not Path(uri.removeprefix(_LOCAL)).exists():
        raise DescriptionError(f"`{field}` must exist. Received: {uri[:_SHOWN]}, which does not", field)


def _located(place: str) -> tuple[str, PurePosixPath]:
    """Return scheme and host, and the path; symbolic links of a local path are resolved."""
    parts = urlsplit(place if "://" in place else f"{_LOCAL}{Path(place).absolute()}")
    if parts.scheme == "file" and not parts.netloc:
        return _LOCAL, PurePosixPath(Path(parts.path).resolve())
    return f"{parts.scheme}://{parts.netloc}", PurePosixPath("/", parts.path)

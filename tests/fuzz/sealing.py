"""Tags for invalid frames, so that inputs reach more code than the check of the tag."""

from __future__ import annotations

import struct

import numpy as np

from distkeras.ps.protocol.framing import MAGIC, Seal
from distkeras.ps.protocol.messages import MESSAGES

_HEADER = struct.Struct(">4sBBHIQ")
_ENTRY = struct.Struct(">BQ")
_DTYPES = ("u1", "<f4", "<f8")


def sealed(data: bytes, seal: Seal | None) -> bytes:
    """Return ``data`` with a tag in each whole frame at its beginning, and with the rest unchanged.

    Args:
        data: frames without tags, which may be damaged.
        seal: the sender's seal; None: frames have no tags.
    """
    done = b""
    while seal is not None and (arrays := _arrays(data)) is not None:
        *_, code, _, fields, body = _HEADER.unpack_from(data)
        head, end = _HEADER.size + fields, _HEADER.size + fields + body
        done += data[:head] + seal.tag(MESSAGES[code], data[:head], arrays) + data[head:end]
        data = data[end:]
    return done + data


def _arrays(data: bytes) -> list[np.ndarray] | None:
    """Return the arrays of the frame at the beginning of ``data``, or None if there is no whole frame."""
    if len(data) < _HEADER.size:
        return None
    magic, _, code, count, fields, body = _HEADER.unpack_from(data)
    table, at = _HEADER.size + fields - _ENTRY.size * count, _HEADER.size + fields
    if magic != MAGIC or code >= len(MESSAGES) or table < _HEADER.size or len(data) < at + body:
        return None
    arrays = []
    for dtype, size in _ENTRY.iter_unpack(data[table:at]):
        if dtype >= len(_DTYPES) or size > body:
            return None
        nbytes = size * np.dtype(_DTYPES[dtype]).itemsize
        if at + nbytes > len(data):
            return None
        arrays.append(np.frombuffer(data, _DTYPES[dtype], size, at))
        at += nbytes
    return arrays

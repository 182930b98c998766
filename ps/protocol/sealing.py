"""Keyed tags of frames: what is changed, left out, repeated or reordered between two ends is refused.

Each direction of a connection has a key of its own, made from the job's key and both nonces of the handshake, and
counts its frames. A frame's tag is a keyed BLAKE2b of that count, the frame's head, and its arrays: short ones as they
are, long ones by their SHA-256, which processors have instructions for.

Long vectors of commits and of the center are by far the most of all bytes, and to hash one takes longer than to send
it: some 0.6 ms a megabyte at each end, where loopback takes less than 0.3. They are covered only where the server asks
for that, in its challenge, and else by nothing but TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable

import numpy as np

from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.protocol.messages import CenterReply, Commit, Message

TAG_BYTES = 16
#: Bytes of an array above which it counts as long.
LONG = 4096

Octets = bytes | bytearray

_NUMBER = struct.Struct(">Q")
_BULKY = (Commit, CenterReply)
_FLOAT64 = np.dtype("<f8")


class Seal:
    """The tags of one direction of one connection, frame by frame.

    Args:
        key: of this direction, 32 bytes.
        whole: whether the long vectors of commits and of the center are covered as well.
    """

    def __init__(self, key: bytes, *, whole: bool) -> None:
        self._key = key
        self._whole = whole
        self._frames = 0

    def __repr__(self) -> str:
        return f"Seal(whole={self._whole}, frames={self._frames})"

    def tag(self, kind: type[Message], head: Octets, arrays: Iterable[np.ndarray]) -> bytes:
        """The tag of the next frame, ``TAG_BYTES`` long.

        Args:
            kind: the frame's message type.
            head: its header, fields and table.
            arrays: as the table lists them.
        """
        self._frames += 1
        pieces: list[Octets] = [_NUMBER.pack(self._frames), head]
        for array in arrays:
            if array.nbytes <= LONG:
                pieces.append(array.tobytes())
            elif self._whole or kind not in _BULKY or array.dtype == _FLOAT64:  # a history is no vector
                pieces.append(hashlib.sha256(array.data).digest())
        return hashlib.blake2b(b"".join(pieces), digest_size=TAG_BYTES, key=self._key).digest()

    def check(self, tag: Octets, kind: type[Message], head: Octets, arrays: Iterable[np.ndarray]) -> None:
        """Check that ``tag`` is that of the next frame; the arguments are those of `tag`.

        Raises:
            RemoteProtocolError: it is another one.
        """
        if not hmac.compare_digest(tag, self.tag(kind, head, arrays)):
            raise RemoteProtocolError(
                "the tag of a frame does not match: it was changed, repeated or reordered on its way. "
                f"Received: a {kind.__name__}"
            )

"""A connection without I/O: the handshake, then frames; bytes in, messages out, and back.

In the handshake both ends prove that they hold the job's key. The server sends a nonce; the client answers with its own
nonce and its proof, HMAC-SHA256 over both nonces; the server answers with its proof over the same nonces. Proofs are
compared in constant time. During the handshake only its messages are accepted, in frames of a few hundred bytes at
most. The server announces whether tags also cover the long vectors, and both proofs cover this flag. After the
handshake each frame has a tag (`Seal`); the key of each direction is derived from the nonces.

A frame is a fixed header, the message's fields, a table of its arrays, a tag, and the arrays' raw bytes::

    magic 4 | version 1 | code 1 | arrays 2 | fields 4 | body 8      (big-endian)
    fields:  every number as 8 bytes, every string as length 4 + UTF-8; the number of vectors of a tuple, and the number
             of columns of an array of rows, as 8 bytes
    table:   for each array: dtype 1, elements 8; dtype + 4 × slot + 128 for a vector that is in shared memory
    tag:     16 bytes, after the handshake: see `Seal`
    body:    the arrays, little-endian, one after the other

Rules:

1. Every length is checked against its bound before memory is allocated for it.
2. Arrays are received directly into the memory that ``allocate`` returns, without a copy.
3. The end of the stream is an event between two frames and a `RemoteProtocolError` within one.
4. A peer waits for the reply before it sends the next frame: one frame at a time is in flight in each direction.
   Members of a job may send several in a row, so they never read beyond a frame (``read_ahead=False``).
5. A vector in shared memory (`shared_slots`) has no bytes in the body, and no tag covers it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from distkeras.ps.errors import AuthenticationError, ConfigurationError, LocalProtocolError, RemoteProtocolError
from distkeras.ps.protocol.driver_messages import TableRows
from distkeras.ps.protocol.loop import NO_BYTES
from distkeras.ps.protocol.messages import (
    Answer,
    CenterReply,
    Challenge,
    Commit,
    KeepOptimizer,
    KeptOptimizer,
    Message,
    PeerVector,
    Proof,
)
from distkeras.ps.protocol.registry import MESSAGES
from distkeras.ps.protocol.shard_messages import SendPart
from distkeras.ps.protocol.shared_slots import SLOTS_MAX, SharedSlots

TAG_BYTES = 16
#: The largest array, in bytes, that is always covered by the tag.
TAGGED_BYTES_MAX = 4096

Octets = bytes | bytearray

_NUMBER = struct.Struct(">Q")
_VECTOR_MESSAGES = (Commit, SendPart, CenterReply, KeepOptimizer, KeptOptimizer, TableRows, PeerVector)
#: The dtypes of histories and row numbers, which tags always cover.
_NO_VECTOR = (np.dtype("<f8"), np.dtype("<i8"))


class Seal:
    """Computes the authentication tags of one direction of a connection, frame by frame, with its key of 32 bytes."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._frames = 0

    def tag(self, kind: type[Message], head: Octets, arrays: Iterable[np.ndarray]) -> bytes:
        """Return the tag of the next frame, ``TAG_BYTES`` long, over its head and the arrays of its body."""
        self._frames += 1
        pieces: list[Octets] = [_NUMBER.pack(self._frames), head]
        for array in arrays:
            if array.nbytes <= TAGGED_BYTES_MAX:
                pieces.append(array.tobytes())
            elif kind not in _VECTOR_MESSAGES or array.dtype in _NO_VECTOR:
                pieces.append(hashlib.sha256(array.data).digest())
        return hashlib.blake2b(b"".join(pieces), digest_size=TAG_BYTES, key=self._key).digest()

    def check(self, tag: Octets, kind: type[Message], head: Octets, arrays: Iterable[np.ndarray]) -> None:
        """Raise a RemoteProtocolError unless ``tag`` is that of the next frame; other arguments as for `tag`."""
        if not hmac.compare_digest(tag, self.tag(kind, head, arrays)):
            raise RemoteProtocolError(
                "the tag of a frame does not match: it was changed, repeated or reordered on its way. "
                f"Received: a {kind.__name__}"
            )


MAGIC = b"DKPS"
VERSION = 22
#: Bytes that are read with a header, to save a system call; more than a commit's fields have.
READ_AHEAD = 256

_HEADER = struct.Struct(">4sBBHIQ")
_ENTRY = struct.Struct(">BQ")
_LENGTH = struct.Struct(">I")
_DTYPES = (np.dtype("u1"), np.dtype("<f4"), np.dtype("<f8"), np.dtype("<i8"))
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
#: The bits of an array's code in the table: the dtype's code, the slot, and a flag that the array is in a slot.
_DTYPE_BITS, _SLOT_BITS, _IN_SLOT = 2, 5, 0x80
assert len(_DTYPES) <= 1 << _DTYPE_BITS
assert SLOTS_MAX <= 1 << _SLOT_BITS
_TYPE_CODES = {kind: code for code, kind in enumerate(MESSAGES)}

#: Returns the memory for an arriving array, from message type, dtype and number of elements.
Allocate = Callable[[type[Message], np.dtype, int], np.ndarray]


@dataclass(frozen=True)
class Limits:
    """The limits of one frame: bytes of fields and table, bytes of all arrays, and the number of arrays."""

    fields: int = 256 * 1024  # a traceback travels in a field
    body: int = 1 << 32
    arrays: int = 8


@dataclass(frozen=True)
class EndOfStream:
    """The peer closed the connection, between two frames."""


class _ArrayField(NamedTuple):
    """A field with an array, which has two dimensions if ``rows``; or with a tuple of arrays, if ``several``."""

    name: str
    dtype_code: int
    several: bool
    rows: bool


@dataclass(frozen=True)
class _Schema:
    """The layout of a message type: its numbers in one struct, then its strings, then its arrays in field order."""

    kind: type[Message]
    numbers: tuple[str, ...]
    packer: struct.Struct
    booleans: tuple[str, ...]
    strings: tuple[str, ...]
    arrays: tuple[_ArrayField, ...]
    #: The fields of ``arrays`` that have a count among the numbers.
    counted: tuple[str, ...]


def _schema_of(kind: type[Message]) -> _Schema:
    numbers: list[str] = []
    codes: list[str] = []
    strings: list[str] = []
    arrays: list[_ArrayField] = []
    hints = typing.get_type_hints(kind, include_extras=True)
    for name, hint in hints.items():
        several = typing.get_origin(hint) is tuple
        kept = typing.get_args(hint)[0] if several else hint
        if typing.get_origin(kept) is typing.Annotated:
            dtype, *dimensions = typing.get_args(kept)[1:]
            array = _ArrayField(name, _CODES[dtype], several, rows=bool(dimensions))
            arrays.append(array)
            if array.several or array.rows:
                numbers.append(name)
                codes.append("q")
        elif hint is str:
            strings.append(name)
        else:
            numbers.append(name)
            codes.append({int: "q", bool: "q", float: "d"}[hint])
    return _Schema(
        kind=kind,
        numbers=tuple(numbers),
        packer=struct.Struct(">" + "".join(codes)),
        booleans=tuple(name for name, hint in hints.items() if hint is bool),
        strings=tuple(strings),
        arrays=tuple(arrays),
        counted=tuple(array.name for array in arrays if array.several or array.rows),
    )


_SCHEMAS = {kind: _schema_of(kind) for kind in MESSAGES}


def _arrays_of(message: Message, schema: _Schema) -> tuple[list[tuple[str, np.ndarray, int]], dict[str, int]]:
    """Return the arrays of ``message``, each with its field and dtype code, and the counts that its fields contain."""
    arrays: list[tuple[str, np.ndarray, int]] = []
    counts: dict[str, int] = {}
    for name, code, several, rows in schema.arrays:
        value = getattr(message, name)
        if several:
            arrays.extend([(name, array, code) for array in value])
            counts[name] = len(value)
            continue
        arrays.append((name, value, code))
        if rows:
            if value.ndim != 2:
                raise LocalProtocolError(f"`{name}` must have two dimensions. Received: {value.ndim}")
            counts[name] = value.shape[1]
    return arrays, counts


def encode(message: Message, seal: Seal | None = None, slots: SharedSlots | None = None) -> list[bytes | memoryview]:
    """Return the frame of ``message`` as consecutive buffers; arrays are not copied.

    The frame has a tag if there is a ``seal``. With ``slots``, vectors are placed there if possible.
    """
    kind = type(message)
    schema = _SCHEMAS.get(kind)
    if schema is None:
        raise LocalProtocolError(f"`message` must be one of the protocol's. Received: {kind.__name__}")
    arrays, counts = _arrays_of(message, schema)
    values = [counts[name] if name in counts else getattr(message, name) for name in schema.numbers]
    fields = [schema.packer.pack(*values)]
    for name in schema.strings:
        text = getattr(message, name).encode(errors="backslashreplace")  # a file's name may have a lone surrogate
        fields += (_LENGTH.pack(len(text)), text)
    body = 0
    traveling: list[np.ndarray] = []
    for name, array, code in arrays:
        if array.dtype != _DTYPES[code] or not array.flags.c_contiguous:
            raise LocalProtocolError(f"arrays must be contiguous, here of {_DTYPES[code]}. Received: {array.dtype}")
        slot = None if slots is None else slots.slot_of(kind, name, array)
        if slot is not None:
            fields.append(_ENTRY.pack(_IN_SLOT | slot << _DTYPE_BITS | code, array.size))
            continue
        fields.append(_ENTRY.pack(code, array.size))
        if array.size:
            body += array.nbytes
            traveling.append(array)
    head = b"".join(fields)
    head = _HEADER.pack(MAGIC, VERSION, _TYPE_CODES[kind], len(arrays), len(head), body) + head
    if seal is not None:
        head += seal.tag(kind, head, traveling)
    return [head, *[array.data.cast("B") for array in traveling]]


class _Frame(NamedTuple):
    """The content of a header, and the memory for the fields and the tag that follow it."""

    schema: _Schema
    arrays: int
    #: Bytes of the arrays.
    body: int
    fields: bytearray
    tag: bytearray


#: The most columns of an array of rows; numpy refuses more than it could address, even of an empty array.
_COLUMNS_MAX = 1 << 31


def _check_rows(name: str, columns: int, size: int) -> None:
    if not 0 <= columns <= _COLUMNS_MAX or (size % columns if columns else size):
        raise RemoteProtocolError(f"`{name}` must fill its rows of {columns} columns. Received: {size} elements")


class _Entry(NamedTuple):
    """An entry of the table: the array's dtype code, its number of elements, and its slot; None: it is in the body."""

    code: int
    size: int
    slot: int | None

    def __repr__(self) -> str:
        return str(self[:2] if self.slot is None else tuple(self))

    @classmethod
    def of(cls, code: int, size: int) -> _Entry:
        """Return the entry that the wire encodes as these two numbers."""
        if not code & _IN_SLOT:
            return cls(code, size, None)
        slot = code >> _DTYPE_BITS & (1 << _SLOT_BITS) - 1
        return cls(code & (1 << _DTYPE_BITS) - 1, size, slot)

    @property
    def nbytes(self) -> int:
        return 0 if self.slot is not None else _DTYPES[self.code].itemsize * self.size


class _Table(NamedTuple):
    """The entries of a frame's table, and whether any of the arrays is in a slot."""

    entries: tuple[_Entry, ...]
    in_slots: bool


def _decode_fields(frame: _Frame) -> tuple[dict[str, Any], bytes]:
    """Return numbers and strings by field, and the bytes of the table."""
    schema, fields = frame.schema, frame.fields
    values = dict(zip(schema.numbers, schema.packer.unpack_from(fields), strict=True))
    at = schema.packer.size
    table = len(fields) - _ENTRY.size * frame.arrays
    for name in schema.strings:
        # The previous strings may have used up the fields, so that even the length is missing.
        length = _LENGTH.unpack_from(fields, at)[0] if at + _LENGTH.size <= table else table
        at += _LENGTH.size
        if at + length > table:
            raise RemoteProtocolError(f"`{name}` must end within the fields. Received: {length} bytes of it")
        try:
            values[name] = fields[at : at + length].decode()
        except UnicodeDecodeError as error:
            raise RemoteProtocolError(f"`{name}` must be UTF-8. Received: {error}") from None
        at += length
    if at != table:
        raise RemoteProtocolError(f"{schema.kind.__name__} has {at} bytes of fields. Received: {table}")
    return values, bytes(memoryview(fields)[table:])


@lru_cache(maxsize=256)
def _checked_table(code: int, counts: tuple[int, ...], table: bytes, body: int) -> _Table:
    """Return a table, checked before memory is allocated; cached, as consecutive frames mostly have equal tables.

    ``counts`` are the numbers of the schema's `_Schema.counted` fields, ``body`` the bytes of all arrays.
    """
    entries = tuple(_Entry.of(*entry) for entry in _ENTRY.iter_unpack(table))
    schema, kind = _SCHEMAS[MESSAGES[code]], MESSAGES[code].__name__
    count_of = dict(zip(schema.counted, counts, strict=True))
    codes: list[int] = []
    for name, dtype_code, several, rows in schema.arrays:
        if several:
            count = count_of[name]
            if not 0 <= count <= len(entries):
                raise RemoteProtocolError(f"{kind} has {count} arrays in `{name}`. Received: {len(entries)} in all")
            codes += [dtype_code] * count
            continue
        if rows and len(codes) < len(entries):
            _check_rows(name, count_of[name], entries[len(codes)].size)
        codes.append(dtype_code)
    if len(codes) != len(entries):
        raise RemoteProtocolError(f"{kind} has {len(codes)} arrays. Received: {len(entries)}")
    if [entry.code for entry in entries] != codes:
        raise RemoteProtocolError(f"{kind} has arrays of dtypes {codes}. Received: {list(entries)}")
    if sum(entry.nbytes for entry in entries) != body:
        raise RemoteProtocolError(f"the arrays must fill the body of {body} bytes. Received: {list(entries)}")
    return _Table(entries, any(entry.slot is not None for entry in entries))


def _check_slots(kind: type[Message], entries: Iterable[_Entry], slots: SharedSlots | None) -> None:
    """Check that the peer may use the slots that ``entries`` name."""
    for entry in entries:
        if entry.slot is None:
            continue
        if slots is None:
            raise RemoteProtocolError(f"the ends of this connection share no memory. Received: {kind.__name__} in it")
        slots.require(kind, entry.slot, _DTYPES[entry.code], entry.size)


def _build_message(schema: _Schema, values: dict[str, Any], arrays: list[np.ndarray]) -> Message:
    """Return the message with these values and arrays; it takes over the dictionary ``values``."""
    at = 0
    for name, _, several, rows in schema.arrays:
        if several:
            values[name] = tuple(arrays[at : at + values[name]])
            at += len(values[name])
            continue
        array, at = arrays[at], at + 1
        values[name] = array.reshape(-1 if values[name] else 0, values[name]) if rows else array
    for name in schema.booleans:
        values[name] = bool(values[name])
    message = object.__new__(schema.kind)
    vars(message).update(values)  # faster than the constructor of a frozen dataclass
    return message


class Reader:
    """Parses frames of a byte stream: the caller reads bytes into `spaces`, then passes their number to `received`.

    Args:
        limits: bounds on a frame; may be replaced between two frames.
        read_ahead: whether `spaces` may extend beyond a header; then the next frame must not follow at once.

    Attributes:
        seal: checks the tags of frames; None: they have none. May be set between two frames.
        slots: the memory that both ends share; None: they share none. May be set between two frames.
    """

    def __init__(self, limits: Limits, allocate: Allocate | None = None, *, read_ahead: bool = True) -> None:
        self.limits = limits
        self.accepts: tuple[type[Message], ...] = MESSAGES
        self.seal: Seal | None = None
        self.slots: SharedSlots | None = None
        self._allocate = allocate or (lambda kind, dtype, size: np.empty(size, dtype))
        self._header = bytearray(_HEADER.size)
        #: Memory for bytes that are read with a header: fields, and perhaps the first bytes of arrays.
        self._ahead = memoryview(bytearray(READ_AHEAD if read_ahead else 0))
        #: The memory for the next bytes, and the method to call when it is full.
        self._spaces = self._between_frames()
        self._stage: Callable[[], Message | None] = self._parse_header

    def _between_frames(self) -> list[memoryview]:
        return [memoryview(self._header), self._ahead] if self._ahead else [memoryview(self._header)]

    def spaces(self) -> list[memoryview]:
        """Return the memory for the next bytes, as a list that is not empty and whose first element is not empty."""
        return self._spaces

    def received(self, count: int) -> Message | EndOfStream | None:
        """Process ``count`` bytes in `spaces`, 0 at the end of the stream; return a message if it is complete.

        A RemoteProtocolError says that the bytes are not a valid frame, exceed a bound, or end within a frame.
        """
        spaces = self._spaces
        if count == 0:
            if self._stage == self._parse_header and len(spaces[0]) == _HEADER.size:
                return EndOfStream()
            raise RemoteProtocolError("the stream must end between two frames. Received: its end within one")
        if self._stage == self._parse_header:
            if count < len(spaces[0]):
                self._spaces = [spaces[0][count:]]  # read the rest of the header alone
                return None
            return self._distribute(self._ahead[: count - len(spaces[0])], self._parse_header())
        return self._advance(count)

    def _advance(self, count: int) -> Message | None:
        spaces = self._spaces
        while count >= len(spaces[0]):
            count -= len(spaces.pop(0))
            if not spaces:
                return self._stage()
        spaces[0] = spaces[0][count:]
        return None

    def _distribute(self, ahead: memoryview, event: Message | None) -> Message | None:
        """Copy the bytes that were read with a header to their memory."""
        while ahead:
            if event is not None:
                name = type(event).__name__
                raise RemoteProtocolError(
                    f"a peer must wait for the answer to its message. Received: further bytes after a {name}"
                )
            space = self._spaces[0]
            size = min(len(space), len(ahead))
            space[:size], ahead = ahead[:size], ahead[size:]
            event = self._advance(size)
        return event

    def _parse_header(self) -> Message | None:
        magic, version, code, arrays, fields, body = _HEADER.unpack(self._header)
        if magic != MAGIC:
            raise RemoteProtocolError(f"a frame must begin with {MAGIC!r}. Received: {bytes(magic)!r}")
        if version != VERSION:
            raise RemoteProtocolError(f"the protocol version must be {VERSION}. Received: {version}")
        if code >= len(MESSAGES) or MESSAGES[code] not in self.accepts:
            names = ", ".join(kind.__name__ for kind in self.accepts)
            raise RemoteProtocolError(f"a message must be one of {names}. Received: code {code}")
        limits = self.limits
        if arrays > limits.arrays or fields > limits.fields or body > limits.body:
            raise RemoteProtocolError(
                f"a frame must have at most {limits.arrays} arrays, {limits.fields} bytes of fields and "
                f"{limits.body} of arrays. Received: {arrays}, {fields}, {body}"
            )
        schema = _SCHEMAS[MESSAGES[code]]
        if fields < schema.packer.size + _LENGTH.size * len(schema.strings) + _ENTRY.size * arrays:
            raise RemoteProtocolError(f"{schema.kind.__name__} has more fields. Received: {fields} bytes of them")
        head, tag = bytearray(fields), bytearray(0 if self.seal is None else TAG_BYTES)
        frame = _Frame(schema, arrays, body, head, tag)
        self._stage = partial(self._parse_fields, frame)
        self._spaces = [memoryview(part) for part in (head, tag) if part]
        return None if self._spaces else self._parse_fields(frame)

    def _parse_fields(self, frame: _Frame) -> Message | None:
        values, table = _decode_fields(frame)
        schema = frame.schema
        counts = tuple([values[name] for name in schema.counted])
        entries, in_slots = _checked_table(_TYPE_CODES[schema.kind], counts, table, frame.body)
        if in_slots:
            _check_slots(schema.kind, entries, self.slots)
            arrays = [self._array_of(schema.kind, entry) for entry in entries]
            in_body = [array for array, entry in zip(arrays, entries, strict=True) if entry.slot is None]
        else:
            in_body = arrays = [self._allocate(schema.kind, _DTYPES[entry.code], entry.size) for entry in entries]
        traveling = [array for array in in_body if array.size]
        spaces = [array.data.cast("B") for array in traveling]
        if not spaces:
            return self._finish_message(frame, values, arrays, traveling)
        self._spaces, self._stage = spaces, partial(self._finish_message, frame, values, arrays, traveling)
        return None

    def _array_of(self, kind: type[Message], entry: _Entry) -> np.ndarray:
        """Return the array of an entry: new memory if it is in the body, or the content of its slot."""
        dtype, slots = _DTYPES[entry.code], self.slots
        if slots is None or entry.slot is None:
            return self._allocate(kind, dtype, entry.size)
        shared = slots.read(entry.slot, dtype, entry.size)
        if kind is not Commit:
            return shared
        # A commit is copied completely before it is processed, so that later writes of the peer have no effect.
        array = self._allocate(kind, dtype, entry.size)
        array[...] = shared
        return array

    def _finish_message(
        self, frame: _Frame, values: dict[str, Any], arrays: list[np.ndarray], traveling: list[np.ndarray]
    ) -> Message:
        if self.seal is not None:
            self.seal.check(frame.tag, frame.schema.kind, self._header + frame.fields, traveling)
        self._spaces, self._stage = self._between_frames(), self._parse_header
        return _build_message(frame.schema, values, arrays)


def decode(frame: bytes) -> Message:
    """Return the message of a complete frame without a tag; raise RemoteProtocolError if the bytes are not one."""
    reader = Reader(Limits(fields=len(frame), body=len(frame), arrays=len(frame)))
    rest, event = memoryview(frame), None
    while rest and event is None:
        space = reader.spaces()[0]
        count = min(len(space), len(rest))
        space[:count], rest = rest[:count], rest[count:]
        event = reader.received(count)
    if rest or not isinstance(event, Message):
        raise RemoteProtocolError(f"the bytes must be exactly one frame. Received: {len(frame)} bytes")
    return event


KEY_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size

_HANDSHAKE = (Challenge, Answer, Proof)
_AFTER_HANDSHAKE = tuple(kind for kind in MESSAGES if kind not in _HANDSHAKE)

#: The limits until the peer is authenticated.
HANDSHAKE_LIMITS = Limits(fields=128, body=NONCE_BYTES + PROOF_BYTES, arrays=2)


@dataclass(frozen=True, eq=False)
class Nonces:
    """The nonces of both ends, uint8 of shape ``(NONCE_BYTES,)``."""

    server: np.ndarray
    client: np.ndarray

    def proof(self, key: bytes, role: bytes) -> np.ndarray:
        """Return the proof of one end that it holds ``key``, uint8; ``role``, b"server" or b"client", is that end's."""
        return np.frombuffer(self._digest(key, b"proof", role), np.uint8)

    def seal(self, key: bytes, role: bytes) -> Seal:
        """Return the seal for the frames that one end sends; arguments as for `proof`."""
        return Seal(self._digest(key, b"seal", role))

    def _digest(self, key: bytes, purpose: bytes, role: bytes) -> bytes:
        transcript = self.server.tobytes() + self.client.tobytes()
        return hmac.digest(key, MAGIC + bytes([VERSION]) + purpose + role + transcript, "sha256")


class Connection:
    """One end of a connection: the handshake with the job's key of 32 bytes, then messages.

    ``limits`` and ``allocate`` (see `Reader`) apply once the peer is authenticated; ``token`` returns random bytes.
    """

    def __init__(
        self,
        *,
        server: bool,
        key: bytes,
        limits: Limits | None = None,
        allocate: Allocate | None = None,
        token: Callable[[int], bytes] = secrets.token_bytes,
        read_ahead: bool = True,
    ) -> None:
        if len(key) != KEY_BYTES:
            raise ConfigurationError(f"`key` must have {KEY_BYTES} bytes. Received: {len(key)}")
        self.server = server
        self.authenticated = False
        self._key, self._limits, self._allocate = key, limits or Limits(), allocate
        #: This end's nonce; not secret.
        self.nonce = np.frombuffer(token(NONCE_BYTES), np.uint8)
        self._read_ahead = read_ahead
        self._reader = Reader(HANDSHAKE_LIMITS, read_ahead=read_ahead)
        self._reader.accepts = (Answer,) if server else (Challenge,)
        #: The server's first message.
        self._challenge = Challenge(self.nonce if server else NO_BYTES)
        #: The seal for frames that this end sends; None before the handshake is complete.
        self.seal: Seal | None = None
        #: The slots through which vectors are exchanged; None: they are in the frames.
        self.slots: SharedSlots | None = None

    def start(self) -> list[bytes | memoryview]:
        """Return the bytes to send first: the server's challenge; none from a client."""
        return encode(self._challenge) if self.server else []

    def refusal(self) -> list[bytes | memoryview]:
        """Return the bytes that a server sends after a wrong proof: an invalid proof; none from a client."""
        return encode(Proof(np.zeros(PROOF_BYTES, np.uint8))) if self.server else []

    def send(self, message: Message) -> list[bytes | memoryview]:
        """Return the bytes of ``message``; raise a LocalProtocolError before the handshake is complete."""
        if not self.authenticated:
            raise LocalProtocolError(f"the handshake must be over first. Received: {type(message).__name__} to send")
        return encode(message, self.seal, self.slots)

    def spaces(self) -> list[memoryview]:
        return self._reader.spaces()

    def received(self, count: int) -> tuple[Message | EndOfStream | None, list[bytes | memoryview]]:
        """Process bytes as `Reader.received` does; return a message, and the bytes that the handshake must send now."""
        event = self._reader.received(count)
        if isinstance(event, _HANDSHAKE):
            return None, self._continue_handshake(event)
        return event, []

    def _continue_handshake(self, message: Message) -> list[bytes | memoryview]:
        if isinstance(message, Challenge):
            self._require_nonce(message.nonce)
            self._challenge = message
            self._reader.accepts = (Proof,)
            return encode(Answer(self.nonce, self._nonces(self.nonce).proof(self._key, b"client")))
        if isinstance(message, Answer):
            self._require_nonce(message.nonce)
            nonces = self._nonces(message.nonce)
            self._check_proof(message.proof, nonces.proof(self._key, b"client"))
            self._authenticate(nonces)
            return encode(Proof(nonces.proof(self._key, b"server")))
        assert isinstance(message, Proof)
        nonces = self._nonces(self.nonce)
        self._check_proof(message.proof, nonces.proof(self._key, b"server"))
        self._authenticate(nonces)
        return []

    def _nonces(self, client: np.ndarray) -> Nonces:
        return Nonces(self._challenge.nonce, client)

    def _require_nonce(self, nonce: np.ndarray) -> None:
        if nonce.nbytes != NONCE_BYTES:
            raise RemoteProtocolError(f"a nonce must have {NONCE_BYTES} bytes. Received: {nonce.nbytes}")

    def _check_proof(self, received: np.ndarray, expected: np.ndarray) -> None:
        if not hmac.compare_digest(received.tobytes(), expected.tobytes()):
            peer = "client" if self.server else "server"
            raise AuthenticationError(f"the {peer} does not hold this job's key: its proof was made with another one")

    def _authenticate(self, nonces: Nonces) -> None:
        self.authenticated = True
        self._reader = Reader(self._limits, self._allocate, read_ahead=self._read_ahead)
        ours, theirs = (b"server", b"client") if self.server else (b"client", b"server")
        self.seal, self._reader.seal = nonces.seal(self._key, ours), nonces.seal(self._key, theirs)
        self._reader.accepts = _AFTER_HANDSHAKE

    def share(self, slots: SharedSlots | None) -> None:
        """Exchange vectors through ``slots`` from the next frame on; None: in the frames. Needs authentication."""
        self.slots = self._reader.slots = slots

    def set_limits(self, limits: Limits) -> None:
        """Replace the bounds on the peer's frames, between two of them."""
        self._limits = limits
        if self.authenticated:
            self._reader.limits = limits

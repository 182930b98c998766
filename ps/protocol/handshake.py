"""The handshake, without I/O: both ends prove that they hold the job's key, then messages pass.

The server sends a nonce; the client answers with its proof, HMAC-SHA256 over both nonces, and a nonce of its own; the
server proves itself over the same two. Proofs are compared in constant time. Until then nothing but the handshake is
read, in frames bounded to a few hundred bytes. Whether tags cover the long vectors is the server's word, and under both
proofs. From then on each frame has a tag (`sealing`), with a key that the same nonces give to its direction.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from distkeras.ps.errors import AuthenticationError, ConfigurationError, LocalProtocolError, RemoteProtocolError
from distkeras.ps.protocol.framing import MAGIC, VERSION, Allocate, EndOfStream, Limits, Reader, Seal, encode
from distkeras.ps.protocol.messages import MESSAGES, NO_BYTES, Answer, Challenge, Message, Proof

KEY_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size

_HANDSHAKE = (Challenge, Answer, Proof)
_AFTER_HANDSHAKE = tuple(kind for kind in MESSAGES if kind not in _HANDSHAKE)

#: In force until the peer is authenticated.
HANDSHAKE_LIMITS = Limits(fields=128, body=NONCE_BYTES + PROOF_BYTES, arrays=2)


@dataclass(frozen=True, eq=False)
class Nonces:
    """What both ends have said once both nonces are known.

    Args:
        server, client: uint8 of shape ``(NONCE_BYTES,)``.
        whole: whether tags cover the long vectors, too.
    """

    server: np.ndarray
    client: np.ndarray
    whole: bool = False

    def proof(self, key: bytes, role: bytes) -> np.ndarray:
        """The proof of holding ``key`` that an end sends, uint8 of shape ``(PROOF_BYTES,)``.

        Args:
            key: the job's.
            role: of who proves it, ``b"server"`` or ``b"client"``, so that neither end's proof serves as the other's.
        """
        return np.frombuffer(self._digest(key, b"proof", role), np.uint8)

    def seal(self, key: bytes, role: bytes) -> Seal:
        """The seal of what an end sends; arguments as for `proof`."""
        return Seal(self._digest(key, b"seal", role), whole=self.whole)

    def _digest(self, key: bytes, purpose: bytes, role: bytes) -> bytes:
        said = bytes([self.whole]) + self.server.tobytes() + self.client.tobytes()
        return hmac.digest(key, MAGIC + bytes([VERSION]) + purpose + role + said, "sha256")


class Connection:
    """One end of a connection: the handshake, then messages.

    Args:
        server: which end this is.
        key: the job's key, 32 bytes.
        limits: bounds on a frame once the peer is authenticated.
        allocate: memory for arrays, once the peer is authenticated.
        token: makes so many random bytes.
        whole: of a server: whether tags cover the long vectors, too.

    Raises:
        ConfigurationError: a key of another length.
    """

    def __init__(
        self,
        *,
        server: bool,
        key: bytes,
        limits: Limits | None = None,
        allocate: Allocate | None = None,
        token: Callable[[int], bytes] = secrets.token_bytes,
        whole: bool = False,
    ) -> None:
        if len(key) != KEY_BYTES:
            raise ConfigurationError(f"`key` must have {KEY_BYTES} bytes. Received: {len(key)}")
        self.server = server
        self.authenticated = False
        self.limits = limits or Limits()
        self._key = key
        #: This end's own; no secret.
        self.nonce = np.frombuffer(token(NONCE_BYTES), np.uint8)
        self._reader = Reader(HANDSHAKE_LIMITS, self._allocate)
        self._reader.accepts = (Answer,) if server else (Challenge,)
        self._allocate_array = allocate
        #: The server's first word.
        self._challenge = Challenge(self.nonce if server else NO_BYTES, whole)
        #: Of what this end sends; None before the handshake is over.
        self.seal: Seal | None = None

    def __repr__(self) -> str:
        return f"Connection(server={self.server}, authenticated={self.authenticated})"

    def _allocate(self, kind: type[Message], dtype: np.dtype, size: int) -> np.ndarray:
        if self._allocate_array is None or kind in _HANDSHAKE:
            return np.empty(size, dtype)
        return self._allocate_array(kind, dtype, size)

    def start(self) -> list[bytes | memoryview]:
        """What to send before anything is read: the server's challenge, nothing from a client."""
        return encode(self._challenge) if self.server else []

    def refusal(self) -> list[bytes | memoryview]:
        """What a server sends to a client whose proof is wrong: a proof that is wrong too. Nothing from a client."""
        return encode(Proof(np.zeros(PROOF_BYTES, np.uint8))) if self.server else []

    def send(self, message: Message) -> list[bytes | memoryview]:
        """The bytes of ``message``.

        Raises:
            LocalProtocolError: before the handshake is over.
        """
        if not self.authenticated:
            raise LocalProtocolError(f"the handshake must be over first. Received: {type(message).__name__} to send")
        return encode(message, self.seal)

    def space(self) -> memoryview:
        """Where the next bytes of the peer go."""
        return self._reader.space()

    def spaces(self) -> list[memoryview]:
        """See `Reader.spaces`."""
        return self._reader.spaces()

    def received(self, count: int) -> tuple[Message | EndOfStream | None, list[bytes | memoryview]]:
        """Takes in ``count`` bytes written to `space`; 0 is the end of the stream.

        Returns:
            A message for the application if one is complete, and what the handshake wants sent now.

        Raises:
            AuthenticationError: the peer does not hold the key.
            RemoteProtocolError: see `Reader.received`.
        """
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
        return Nonces(self._challenge.nonce, client, self._challenge.whole)

    def _require_nonce(self, nonce: np.ndarray) -> None:
        if nonce.nbytes != NONCE_BYTES:
            raise RemoteProtocolError(f"a nonce must have {NONCE_BYTES} bytes. Received: {nonce.nbytes}")

    def _check_proof(self, received: np.ndarray, expected: np.ndarray) -> None:
        if not hmac.compare_digest(received.tobytes(), expected.tobytes()):
            peer = "client" if self.server else "server"
            raise AuthenticationError(f"the {peer} does not hold this job's key: its proof was made with another one")

    def _authenticate(self, nonces: Nonces) -> None:
        self.authenticated = True
        ours, theirs = (b"server", b"client") if self.server else (b"client", b"server")
        self.seal, self._reader.seal = nonces.seal(self._key, ours), nonces.seal(self._key, theirs)
        self._reader.limits = self.limits
        self._reader.accepts = _AFTER_HANDSHAKE

    def set_limits(self, limits: Limits) -> None:
        """Replaces the bounds on the peer's frames, between two of them."""
        self.limits = limits
        if self.authenticated:
            self._reader.limits = limits

"""Request and reply over one connection to the parameter server: what driver's and worker's clients share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from distkeras.ps.errors import (
    AuthenticationError,
    DeadlineError,
    LocalProtocolError,
    RemoteProtocolError,
    ServerLostError,
)
from distkeras.ps.protocol.framing import EndOfStream
from distkeras.ps.protocol.messages import Fault, Message, error_of
from distkeras.ps.transport.channel import Channel, dial
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.tls import client_context
from distkeras.ps.world.world import REAL, World

_Answer = TypeVar("_Answer", bound=Message)


@dataclass(frozen=True)
class Address:
    """Where a server is, and the key to it. Travels inside Spark's own task closure; the key stays out of its repr.

    Args:
        host, port: where.
        key: the job's, 32 bytes.
        certificate: the one that the server must have, PEM; empty: the connection is not encrypted.
    """

    host: str
    port: int
    key: bytes
    certificate: str = ""

    def __repr__(self) -> str:
        return f"Address(host={self.host!r}, port={self.port}, tls={bool(self.certificate)})"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def moves(self) -> bool:
        """Return whether a server that is lost may come back somewhere else."""
        return False

    def locate(self, world: World = REAL) -> tuple[str, int]:
        """Host and port, as they are now.

        Raises:
            ServerLostError: they are not known.
        """
        return self.host, self.port


class Client:
    """Request and reply over one channel, which is opened by the first request.

    Args:
        address: the server's.
        deadlines: of every wait.
        world: time and connections.
        met: the server is known to be at this address: who else is found there has its port while it is away.
    """

    def __init__(
        self, address: Address, deadlines: Deadlines | None = None, world: World = REAL, *, met: bool = False
    ) -> None:
        self.address = address
        self.deadlines = deadlines or Deadlines()
        self.world = world
        self.channel: Channel | None = None
        self._met = met
        #: Held while a request is under way.
        self._requesting = world.lock()

    @property
    def reply_timeout(self) -> float:
        """Seconds to wait for an answer: longer than the server's own waits, whose errors say more than its silence."""
        return max(self.deadlines.reply, self.deadlines.gather) + 10.0

    def _connect(self) -> Channel:
        """A connection to the server.

        Raises:
            ServerLostError: it is not there: nothing listens, the process stands still, or a stranger has its port.
            AuthenticationError, RemoteProtocolError: there is a stranger, and the server was never met there.
        """
        where, certificate = self.address.locate(self.world), self.address.certificate
        context = client_context(certificate) if certificate else None
        try:
            self.channel = dial(
                where, self.address.key, self.deadlines, allocate=self._allocate, context=context, world=self.world
            )
        except DeadlineError as error:  # the kernel accepts connections for a server that stands still
            raise ServerLostError(f"the server has not completed the handshake: {error.message}") from error
        except (AuthenticationError, RemoteProtocolError) as error:
            if not self._met:
                raise
            raise ServerLostError(f"the server has lost its port to another process: {error.message}") from error
        self._met = True
        return self.channel

    def _allocate(self, kind: type[Message], dtype: np.dtype, size: int) -> np.ndarray:
        return np.empty(size, dtype)

    def request(
        self, message: Message, expected: type[_Answer] | tuple[type[_Answer], ...], timeout: float | None = None
    ) -> _Answer:
        """Sends ``message`` and returns the reply, which must be one of ``expected``.

        Raises:
            DistkerasError: the server answered with a fault: that very error.
            ServerLostError: the connection is gone.
            DeadlineError: no answer in time.
        """
        with self._requesting:
            answer = self.exchange(message, self.reply_timeout if timeout is None else timeout)
        if isinstance(answer, Fault):
            raise error_of(answer)
        if not isinstance(answer, expected):
            names = " or ".join(kind.__name__ for kind in (expected if isinstance(expected, tuple) else (expected,)))
            raise RemoteProtocolError(
                f"the answer to {type(message).__name__} must be {names}. Received: {type(answer).__name__}"
            )
        return answer

    def exchange(self, message: Message, timeout: float) -> Message:
        """Sends ``message`` and returns what comes back, a `Fault` too; by one thread at a time.

        Raises:
            ServerLostError, DeadlineError: see `request`.
        """
        channel = self.channel or self._connect()
        what = f"the server's answer to {type(message).__name__}"
        try:
            channel.send(message)
            answer = channel.receive(timeout, what)
        except (LocalProtocolError, DeadlineError):
            self.close()  # what comes next in this stream answers another question
            raise
        except (RemoteProtocolError, OSError) as error:  # no server sends the former: the stream was changed on the way
            self.close()
            raise ServerLostError(f"the server has not answered {type(message).__name__}: {error}") from error
        if isinstance(answer, EndOfStream):
            self.close()
            raise ServerLostError(f"the server hung up instead of answering {type(message).__name__}")
        return answer

    def lost(self, error: Exception) -> bool:
        """Return whether ``error``, of the latest request, is not an answer of the server: there was none."""
        # After a deadline of ours the connection is closed; the server's own comes over one that is open.
        return isinstance(error, ServerLostError) or (isinstance(error, DeadlineError) and self.channel is None)

    def stands_still(self, error: Exception) -> bool:
        """Return whether a handshake had no answer: the host accepts connections also for a stopped process."""
        return isinstance(error, ServerLostError) and isinstance(error.__cause__, DeadlineError)

    def close(self) -> None:
        """Hangs up."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

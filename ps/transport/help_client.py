"""A worker's requests about loans, over a connection of their own: see `center.loans`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from distkeras.ps.errors import ServerLostError
from distkeras.ps.protocol.messages import Ack, AskForWork, Loan, OfferRows
from distkeras.ps.transport.client import RETRY_SECONDS, UNREACHED, Address, Client
from distkeras.ps.transport.deadlines import Backoff, Deadlines
from distkeras.ps.world.world import REAL, World

_T = TypeVar("_T")


class HelpClient(Client):
    """Offers the rows of this worker's partition, and asks for work.

    A restarted server does not know the offer: each new connection begins with it.
    """

    def __init__(
        self, address: Address, deadlines: Deadlines, *, worker: int, attempt: int, world: World = REAL
    ) -> None:
        super().__init__(address, deadlines, world)
        self._worker, self._attempt = worker, attempt
        #: The offer of the partition's rows; None: they are not read.
        self.rows: OfferRows | None = None
        self._offered = False

    def offer(self) -> None:
        """Send the offer."""
        self._offered = False
        self._repeated(lambda: None)

    def ask(self, lost: Loan | None = None) -> Loan:
        """Return a loan, which may be none; ``lost`` is one whose rows could not be had."""
        gone = Loan() if lost is None else lost
        self._offered = False  # a helper may have lost its connection, and reported that the rows cannot be had
        message = AskForWork(self._worker, self._attempt, gone.partition, gone.host, gone.port)
        return self._repeated(lambda: self.request(message, Loan))

    def close(self) -> None:
        self._offered = False
        super().close()

    def _repeated(self, exchange: Callable[[], _T]) -> _T:
        """Return ``exchange()``, after the offer; repeat both while the server cannot be reached."""
        backoff = Backoff(longest=RETRY_SECONDS, timeout=self.deadlines.reconnect, world=self.world)
        while True:
            try:
                if self.rows is not None and not self._offered:
                    self.request(self.rows, Ack)
                    self._offered = True
                return exchange()
            except UNREACHED as error:
                if self.channel is not None and not isinstance(error, ServerLostError):
                    raise  # the server's own error
                self.close()
                if self.handshake_unanswered(error) or self.address.moves:
                    backoff.restart(self.deadlines.standstill + self.deadlines.reconnect)
                if not backoff.pause():
                    raise

"""What a job needs of its server, wherever that runs: beside the driver (`Supervisor`) or in the cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from distkeras.ps.errors import DistkerasError
from distkeras.ps.server.start import ResumePoint
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient

_R = TypeVar("_R")


class Hold(Protocol):
    """The driver's hold on a server that may die."""

    @property
    def address(self) -> Address:
        """Where workers find the server."""

    @property
    def resumed(self) -> ResumePoint | None:
        """Where the center stands that a snapshot was found of; None: a new one."""

    @property
    def news_seconds(self) -> float:
        """From one question for news to the next, at least."""

    def connect(self) -> DriverClient:
        """Another connection of the driver's."""

    def alive(self) -> bool:
        """Whether the server runs, or is brought back."""

    def heard(self) -> None:
        """The server has answered, over whatever connection of the driver's; from any thread."""

    def watch(self) -> None:
        """Looks after the server; to be called now and then. Raises a DistkerasError where it is lost for good."""

    def ask(self, call: Callable[[DriverClient], _R]) -> _R:
        """``call`` with a connection, again until it is answered; raises as `watch`, and what the server answers."""

    def try_to_ask(self, call: Callable[[DriverClient], _R]) -> _R:
        """`ask` for something that is not worth a long wait."""

    def abandon(self, error: DistkerasError) -> None:
        """A server that gave no answer but ``error`` is not waited for."""

    def end_early(self, reason: str) -> None:
        """Has the workers leave, whatever becomes of the server."""

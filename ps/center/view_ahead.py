"""The view that a commit's reply will be, made with the commit while its blocks are in the cache."""

from __future__ import annotations

from distkeras.ps.center.buffers import Buffer


class ViewAhead:
    """At most one version that nobody has been sent yet, which a release soon after its commit takes.

    Whatever changes the center in between makes it worthless: another commit, which the clock tells, or what `forget`
    is called for.
    """

    def __init__(self) -> None:
        self._made_for: tuple[int, int] | None = None
        self._version: Buffer | None = None

    def put(self, worker: int, clock: int, version: Buffer) -> None:
        """Takes over ``version``: what ``worker`` is sent as long as the clock says ``clock``."""
        self.forget()
        self._made_for, self._version = (worker, clock), version

    def take(self, worker: int, clock: int) -> Buffer | None:
        """Gives the version to its only taker; None where there is none for it."""
        if self._made_for != (worker, clock):
            return None
        version, self._version, self._made_for = self._version, None, None
        return version

    def forget(self) -> None:
        """Gives an untaken version back to its pool."""
        if self._version is not None:
            self._version.drop()
        self._version = self._made_for = None

"""Which processes are a sequencer's shards, if they come by themselves, as tasks in a cluster do."""

from __future__ import annotations

from distkeras.ps.errors import ServerLostError
from distkeras.ps.protocol.shard_messages import AskRole
from distkeras.ps.server.job_state import Peer


class Roles:
    """The process of each shard: the first one that asks, while its connection lasts. The job's lock guards it."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, Peer]] = {}
        #: A shard whose process must end soon; None: there is none.
        self.leaving: int | None = None

    def __bool__(self) -> bool:
        return bool(self._held)

    def holder(self, shard: int) -> int:
        """Return the number of the process of ``shard``; 0: there is none."""
        return self._held[shard][0] if shard in self._held else 0

    def ask(self, message: AskRole, peer: Peer) -> bool:
        """Return whether the process at ``peer`` is the shard that it asks to be, from now on or already."""
        process, _ = self._held.setdefault(message.shard, (message.process, peer))
        if process == message.process and message.leaving:
            self.leaving = message.shard
        return process == message.process

    def require(self, shard: int, process: int) -> None:
        """Raise a ServerLostError unless ``process`` is that of ``shard``; 0 if the sequencer has started it."""
        if self.holder(shard) != process:
            raise ServerLostError(
                f"shard {shard} must be process {self.holder(shard)}. Received: process {process}, which has been "
                "replaced"
            )

    def leave(self, peer: Peer) -> int | None:
        """Note that a session has ended; return the shard that its process was, or None."""
        for shard, (_, holder) in self._held.items():
            if holder is peer:
                del self._held[shard]
                return shard
        return None

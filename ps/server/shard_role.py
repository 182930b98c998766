"""What a process must know to be a shard, apart from what it shares with the sequencer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShardRole:
    """The role of a process: shard number ``shard`` of a sequencer.

    Args:
        host, port: of the sequencer.
        incarnation: of the sequencer and all of its shards.
        claim: the sequencer's claim to the checkpoint, under which the shard writes files; empty: there is none.
        snapshot: the name of the snapshot from which the shard restores its elements; empty: from none.
        same_attempts, epochs: see `StartMode`.
        process: the number by which the sequencer knows a process that it has not started itself: see `AskRole`.
    """

    shard: int
    host: str
    port: int
    incarnation: int
    claim: str = ""
    snapshot: str = ""
    same_attempts: bool = True
    epochs: int | None = None
    process: int = 0

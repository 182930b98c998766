"""The server's end of memory that a worker shares with it: see `shared_slots`."""

from __future__ import annotations

import logging

from distkeras.ps.center.center import Center
from distkeras.ps.protocol.compression import Codec
from distkeras.ps.protocol.messages import Hello
from distkeras.ps.protocol.shared_slots import MOST_SLOTS, TOKEN_BYTES, SharedSlots, SlotSizes
from distkeras.ps.world.world import World

log = logging.getLogger(__name__)


def map_slots(hello: Hello, center: Center, codec: Codec | None, world: World) -> SharedSlots | None:
    """Return the slots in the memory that a worker offers; None: it offers none, or it is not on this host.

    The peer has proved the job's key, and yet nothing is mapped for it but memory of the size that follows from the
    center, in which its token stands.
    """
    if not hello.memory:
        return None
    sizes = SlotSizes(center.size, center.traits.parts, 0 if codec is None else codec.nbytes)
    try:
        if sizes.slots > MOST_SLOTS:
            raise OSError(f"there are {MOST_SLOTS} slots at most. Received: {sizes.slots}")
        slots = SharedSlots(sizes, world.map_shared(hello.memory, sizes.nbytes), server=True)
        token = bytes.fromhex(hello.memory_token)
        if len(token) != TOKEN_BYTES or not slots.has_token(token):
            raise OSError("the worker's token must be there. Received: memory of another process")
    except (OSError, ValueError) as error:  # the worker is on another host, or in another container, or of another user
        text = "the vectors of partition %d travel over its connection: its memory cannot be mapped here: %s"
        log.info(text, hello.worker, error)
        return None
    log.info("the vectors of partition %d are in memory that worker and server share", hello.worker)
    return slots

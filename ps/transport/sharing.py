"""Memory that the two ends of a connection share: a worker offers it, and a server or a relay maps it.

See `shared_slots`.
"""

from __future__ import annotations

import logging

from distkeras.ps.protocol.messages import Hello
from distkeras.ps.protocol.shared_slots import MOST_SLOTS, TOKEN_BYTES, SharedSlots, SlotSizes
from distkeras.ps.world.shared_memory import SharedMemory
from distkeras.ps.world.world import World

log = logging.getLogger(__name__)


def offer_slots(sizes: SlotSizes, world: World) -> tuple[SharedMemory, SharedSlots, str] | None:
    """Return new memory, its slots, and the token that is there in hexadecimal digits; None: none is available.

    The memory may be hidden once the peer has answered the `Hello` that names it.
    """
    try:
        memory = world.share(sizes.nbytes)
    except OSError as error:
        log.info("vectors travel over the connection: this process cannot share memory: %s", error)
        return None
    slots, token = SharedSlots(sizes, memory.memory, server=False), world.token(TOKEN_BYTES)
    slots.write_token(token)
    return memory, slots, token.hex()


def map_slots(hello: Hello, sizes: SlotSizes, world: World) -> SharedSlots | None:
    """Return the slots in the memory that a worker offers; None: it offers none, or it is not on this host.

    The peer has proved the job's key, and yet nothing is mapped for it but memory of the size that this end expects, in
    which its token stands.
    """
    if not hello.memory:
        return None
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

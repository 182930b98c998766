"""What every program here is held to."""

from __future__ import annotations

from distkeras.ps.protocol.framing import Limits

KEY = bytes(range(32))
LIMITS = Limits(fields=4096, body=64 * 1024, arrays=16)
#: Bytes that a process may grow by while it is fed.
ROOM = 64 << 20
HANG = 60.0  # seconds


class Violation(AssertionError):
    """What must not come of any input."""

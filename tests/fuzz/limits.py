"""Limits of every program in this package."""

from __future__ import annotations

from distkeras.ps.protocol.framing import Limits

KEY = bytes(range(32))
LIMITS = Limits(fields=4096, body=64 * 1024, arrays=16)
#: Bytes by which a process may grow while it receives inputs.
ROOM = 64 << 20
HANG = 60.0  # In seconds.


class Violation(AssertionError):
    """A behavior that no input may cause."""

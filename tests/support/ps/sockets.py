"""The real sockets below the channels of a test."""

from __future__ import annotations

import socket

from distkeras.ps.transport.client import Channel
from distkeras.ps.world.streams import TcpStream


def socket_of(channel: Channel) -> socket.socket:
    """Return the socket of ``channel``."""
    assert isinstance(channel.stream, TcpStream)
    return channel.stream.sock

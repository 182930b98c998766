"""Invalid data that strangers send to a port."""

from __future__ import annotations

import random
import socket
import struct

_VISITORS = 40


def throw(address: tuple[str, int], seed: int) -> int:
    """Connect many times, send unexpected data, and return the number of established connections.

    Some close at once, some reset, some send data and wait for an answer, and some are silent for a short time.
    """
    rng = random.Random(seed)
    open_ones: list[socket.socket] = []
    visits = 0
    for _ in range(_VISITORS):
        try:
            sock = socket.create_connection(address, timeout=1.0)
        except OSError:  # The server is down or busy.
            continue
        visits += 1
        try:
            sock.settimeout(0.2)
            sock.sendall(_bytes(rng))
            if rng.random() < 0.3:
                sock.recv(4096)
        except OSError:  # The server has closed the connection, as expected.
            pass
        if rng.random() < 0.3:
            # Closing resets the connection.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if rng.random() < 0.5:
            open_ones.append(sock)
        else:
            sock.close()
    for sock in open_ones:
        sock.close()
    return visits


def _bytes(rng: random.Random) -> bytes:
    match rng.randrange(6):
        case 0:
            return b""
        case 1:
            return b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        case 2:
            # These bytes are the start of a TLS handshake.
            return b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200)
        case 3:
            return b"\xff" * rng.randrange(1, 5000)
        case 4:
            return bytes(rng.randrange(1, 5000))
        case _:
            return rng.randbytes(rng.randrange(1, 100_000))

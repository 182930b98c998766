"""What strangers send to a port."""

from __future__ import annotations

import random
import socket
import struct

_VISITORS = 40


def throw(address: tuple[str, int], seed: int) -> int:
    """Connects many times and sends what the server did not ask for. Returns how many connections came about.

    Some hang up at once, some reset, some send and wait for an answer, and some stay silent for a moment.
    """
    rng = random.Random(seed)
    open_ones: list[socket.socket] = []
    visits = 0
    for _ in range(_VISITORS):
        try:
            sock = socket.create_connection(address, timeout=1.0)
        except OSError:  # the server is down, or busy
            continue
        visits += 1
        try:
            sock.settimeout(0.2)
            sock.sendall(_bytes(rng))
            if rng.random() < 0.3:
                sock.recv(4096)
        except OSError:  # it has hung up on us, as it should
            pass
        if rng.random() < 0.3:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close resets
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
            return b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200)  # the beginning of TLS
        case 3:
            return b"\xff" * rng.randrange(1, 5000)
        case 4:
            return bytes(rng.randrange(1, 5000))
        case _:
            return rng.randbytes(rng.randrange(1, 100_000))

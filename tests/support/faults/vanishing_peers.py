"""A program: ``server`` or ``client`` of connections whose hosts vanish from each other.

Each prints the lines that the test waits for; after it has read the line ``vanished``, it prints how each connection
ended.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import numpy as np

from distkeras.ps.errors import DistkerasError
from distkeras.ps.protocol.driver_messages import Inspect, Observe
from distkeras.ps.protocol.messages import Message
from distkeras.ps.rules import make
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address, make_certificate, server_context
from distkeras.ps.transport.driver_client import DriverClient
from support.patience import PATIENT, brief, until

KEY = bytes(range(32))


def say(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201 - read by the test


def vanished_at() -> float:
    assert sys.stdin.readline() == "vanished\n"
    return time.monotonic()


def serve(host: str, *, tls: bool) -> None:
    settings = ServerSettings(make("downpour"), workers=1, host=host, deadlines=PATIENT)
    made = make_certificate() if tls else None
    pinned = "" if made is None else made.certificate
    with ParameterServer(settings, KEY, context=None if made is None else server_context(made)) as server:
        driver = DriverClient(Address(*server.address, KEY, pinned), PATIENT)
        driver.publish(np.zeros(3, np.float32))
        driver.close()
        until(lambda: not server.sessions)
        say(json.dumps([server.address[1], pinned]))
        until(lambda: sorted(session.asking for session in server.sessions) == [False, True])
        say("ready")
        began = vanished_at()
        left = {session.name: "owed an answer" if session.asking else "idle" for session in server.sessions}
        while left:
            for name in set(left) - {session.name for session in server.sessions}:
                say(f"{time.monotonic() - began:.1f} server, {left.pop(name)}")
            time.sleep(0.1)


def send_requests(host: str, port: int, pinned: str) -> None:
    clients = [DriverClient(Address(host, port, KEY, pinned), PATIENT) for _ in range(2)]
    for client in clients:
        client.center()
    # The answer is due after its host has vanished, so it is never acknowledged.
    patience = brief(5)
    requests: list[Message] = [Observe(10**9, patience), Inspect()]
    began: list[float] = []

    def expect_loss(number: int, what: str) -> None:
        try:
            clients[number].request(requests[number], Message, 1000)
        except DistkerasError as error:
            say(f"{time.monotonic() - began[0]:.1f} client, {what}: {type(error).__name__}: {error}")

    waiting = threading.Thread(target=expect_loss, args=(0, "waits"))
    waiting.start()
    began.append(vanished_at())
    expect_loss(1, "asks")
    waiting.join()


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve(sys.argv[2], tls=sys.argv[3] == "tls")
    else:
        send_requests(sys.argv[2], *json.loads(sys.argv[3]))

"""A host that vanishes without closing its connections: the router between two network namespaces drops all packets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.faults.namespaces import HOSTS, Namespaces
from support.patience import brief, patience

ROOT = Path(__file__).parents[2]
PEER = [sys.executable, str(ROOT / "tests" / "support" / "faults" / "vanishing_peers.py")]
#: Seconds within which each end must detect the loss.
DETECTED = 40


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["plain", "tls"])
def test_both_ends_detect_a_vanished_host_whether_data_is_in_transit_or_not(how: str) -> None:
    if how == "tls":
        pytest.importorskip("cryptography")
    try:
        namespaces = Namespaces()
    except PermissionError as error:
        pytest.skip(f"network namespaces are not allowed here: {error}")
    paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": os.environ | {"PYTHONPATH": ":".join(paths)}}
    with namespaces:
        host = HOSTS["server"][1]
        server = namespaces.start("server", [*PEER, "server", host, how], **pipes)
        client = namespaces.start("worker", [*PEER, "client", host, read(server)], **pipes)
        try:
            assert read(server) == "ready"
            namespaces.swallow()
            lines = []
            for process in (server, client):
                assert process.stdin is not None
                process.stdin.write("vanished\n")
                process.stdin.flush()
            for process in (server, client):
                lines += process.communicate(timeout=patience(3 * DETECTED))[0].splitlines()
        finally:
            for process in (server, client):
                process.kill()
                process.wait(patience(10))
    endings = {text: float(seconds) for seconds, _, text in (line.partition(" ") for line in lines)}
    assert sorted(text.partition(":")[0] for text in endings) == [
        "client, asks",
        "client, waits",
        "server, idle",
        "server, owed an answer",
    ]
    assert max(endings.values()) < brief(DETECTED), endings
    for text in endings:
        if text.startswith("client"):
            assert "ServerLostError" in text
            assert "the peer's host has acknowledged nothing" in text

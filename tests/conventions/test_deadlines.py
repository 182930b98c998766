"""Tests that every wait has a deadline, by reading the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from support.sources import PACKAGE, ROOT, name_of, nodes_of, sources, tree_of

#: Calls that wait, with the position of their timeout argument; that of `acquire` follows `blocking`.
WAITS = {"wait": 0, "join": 0, "acquire": 1, "get": 1, "result": 0, "exception": 0, "wait_for": 1}
WAITS |= {"communicate": 1, "select": 3, "poll": 0, "as_completed": 1, "create_connection": 1, "urlopen": 2}
#: Calls on a socket, which wait as long as the socket's timeout.
SOCKETS = {"accept", "connect", "do_handshake", "recv", "recv_into", "recvfrom", "send", "sendall", "sendmsg"}
#: Waits without a deadline of their own, and what ends them.
ALLOWED = {
    "ps/server/server.py: self._listener.accept()": "`close` wakes it",
    "ps/transport/handshakes.py: self._listener.accept()": "`close` wakes it",
    "ps/world/streams.py: self._listener.accept()": "`close` wakes it",
    "ps/world/streams.py: sock.settimeout(None)": (
        "the kernel keeps the deadline of each call; Python's would cost a fourth"
    ),
    "distkeras/data/source.py: self._changed.wait_for(lambda: not self._is_full)": (
        "the producer waits for its consumer, each of whose waits has a deadline, and who closes it at its end"
    ),
}
#: The module that uses sockets and gives each call the rest of a deadline.
STREAMS = "ps/world/streams.py"
CHANNEL = "ps/transport/client.py"


def waits_for_ever(tree: ast.AST, *, sockets_have_deadlines: bool = False) -> Iterator[str]:
    """Yield the calls in ``tree`` that may wait without a bound, as source text."""
    for node in nodes_of(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if called == "settimeout":
            unbounded = [argument for argument in node.args if isinstance(argument, ast.Constant)]
            if any(argument.value is None for argument in unbounded):
                yield ast.unparse(node)
        elif called in SOCKETS:
            if ("sock" in owner and not sockets_have_deadlines) or "listener" in owner:
                yield ast.unparse(node)
        elif called in WAITS and not _returns_at_once(node, called, owner) and not _has_timeout(node, called):
            yield ast.unparse(node)


def _returns_at_once(node: ast.Call, called: str, owner: str) -> bool:
    """Return whether the method belongs to a dict (``get``), a string or the lease (``join``), or a frame
    (``select``).
    """
    match called:
        case "get":
            return not owner.endswith(("queue", "signals"))
        case "join":
            leases = ("self", "center", "self._center", "client")
            return owner in (*leases, "os.path") or owner.startswith(("'", '"', "b'"))
        case "poll":
            return owner.endswith(("_process", "child")) or owner == "select"
        case "select":
            return owner != "select"
        case "exception":
            return owner in ("log", "logging")
    return False


def _has_timeout(node: ast.Call, called: str) -> bool:
    given = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
    given += node.args[WAITS[called] : WAITS[called] + 1]
    if called == "acquire" and any(
        isinstance(value, ast.Constant) and value.value is False
        for value in [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "blocking")]
    ):
        return True
    return any(not (isinstance(value, ast.Constant) and value.value is None) for value in given)


def test_every_wait_has_a_deadline() -> None:
    found = {
        f"{name_of(path)}: {call}"
        for path in sources(*PACKAGE)
        for call in waits_for_ever(tree_of(path), sockets_have_deadlines=name_of(path) == STREAMS)
    }
    assert found == set(ALLOWED)


def test_a_channel_passes_the_rest_of_the_deadline_to_each_call_of_its_socket() -> None:
    """Only this module calls the classes that wrap a socket, and it sets the timeout, or the kernel's, before each
    call.
    """
    tree, streams = (tree_of(ROOT / name) for name in (CHANNEL, STREAMS))
    calls = [node for node in nodes_of(tree) if isinstance(node, ast.Call)]
    piped = [ast.unparse(call) for call in calls if ast.unparse(call.func) in ("self.stream.read", "self.stream.write")]
    assert len(piped) == 2
    assert all("self._left(deadline, what)" in call for call in piped)
    functions = [node for node in nodes_of(streams) if isinstance(node, ast.FunctionDef)]
    wrapped = [ast.unparse(function) for function in functions if function.name in ("read", "write")]
    wrapped = [text for text in wrapped if "self._sock" in text]
    assert len(wrapped) == 4
    for text in wrapped:
        for before in re.split(r"self\._sock\.(?:recv|send)", text.partition("\n")[2])[:-1]:
            assert "settimeout(timeout)" in before or before.endswith("timeout, lambda: "), text
    patiently = next(ast.unparse(function) for function in functions if function.name == "_until_timeout")
    assert "self._limit(option, timeout)" in patiently.partition("while True")[0]
    greeting = next(ast.unparse(function) for function in functions if "do_handshake()" in ast.unparse(function))
    assert "settimeout(timeout)" in greeting.partition("do_handshake()")[0]


@pytest.mark.parametrize(
    "call",
    [
        "event.wait()",
        "event.wait(None)",
        "event.wait(timeout=None)",
        "thread.join()",
        "lock.acquire()",
        "lock.acquire(True)",
        "self._signals.get()",
        "queue.get(True)",
        "future.result()",
        "select.select([sock], [], [])",
        "condition.wait_for(lambda: True)",
        "process.wait()",
        "process.communicate()",
        "process.communicate(b'')",
        "sock.settimeout(None)",
        "sock.recv(4)",
        "sock.sendall(data)",
        "self._listener.accept()",
        "socket.create_connection(address)",
    ],
)
def test_a_wait_without_a_deadline_is_found(call: str) -> None:
    assert list(waits_for_ever(ast.parse(call))) == [ast.unparse(ast.parse(call))]


@pytest.mark.parametrize(
    "call",
    [
        "event.wait(3)",
        "thread.join(timeout)",
        "lock.acquire(timeout=3)",
        "lock.acquire(blocking=False)",
        "lock.acquire(False)",
        "self._signals.get(timeout=1)",
        "settings.get('x')",
        "', '.join(names)",
        "condition.wait_for(ready, 3)",
        "select.select([a], [], [], left)",
        "frame.select('x')",
        "sock.settimeout(3)",
    ],
)
def test_a_wait_with_a_deadline_is_accepted(call: str) -> None:
    assert list(waits_for_ever(ast.parse(call))) == []

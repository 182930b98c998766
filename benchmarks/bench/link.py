"""Exchanges over a network instead of loopback: the server is here, its client is behind a virtual cable.

The cable is a veth pair. Both ends send through a token bucket: `BURST` bytes at once, the rest at the nominal rate,
and up to `QUEUE` of it in line, more than the sockets' buffers hold, so that nothing is dropped. A larger bucket would
send the beginning of each frame without delay; a smaller one overflows between two wake-ups of a busy machine. There is
no other delay: a real network is slower. Packets are segmented to 1500 bytes at the last moment, as network cards do,
and TCP uses the congestion control cubic, the default of Linux.

Needs Linux, root, iproute2 and util-linux.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import random
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.measure import Case, Factory
from bench.processes import Fleet
from bench.ps import MEDIUM
from bench.rig import WorkerExchange, center_server, elements
from distkeras.ps.protocol.compression import FORMATS
from distkeras.ps.rules import make
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address

SECTION = "link"
_SIZE = elements(MEDIUM)
#: The size of the token buckets, by the rate in Gbps: it is sent in a millisecond, or in less than half of one.
BURST = {1: "128kb", 10: "512kb"}
QUEUE = "50ms"
#: A network reserved for benchmarks (RFC 2544), to which this machine has no other route.
NETWORK = ipaddress.IPv4Network("198.18.0.0/15")
_CLONE_NEWNET = 0x40000000  # <sched.h>
_PATIENCE = 60.0


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    return [partial(_formats, gbps, 0.4 if quick else 2.5) for gbps in BURST]


@contextmanager
def _formats(gbps: int, seconds: float) -> Iterator[list[Case]]:
    """Yield cases of shorter wire formats and float32 over the same link, with a client that computes nothing."""
    with ExitStack() as stack:
        missing = ""
        try:
            link = stack.enter_context(shaped(gbps))
        except NoLinkError as error:
            missing = str(error)
        else:
            settings = ServerSettings(make("downpour"), workers=len(FORMATS), host=link.host)
            server = stack.enter_context(center_server(_SIZE, settings))
            exchange = partial(_exchange, namespace=link.namespace, address=server.address)
            sides = {name: partial(exchange, worker=worker, wire_format=name) for worker, name in enumerate(FORMATS)}
            fleet = stack.enter_context(Fleet(1, sides))
            for side in sides:
                fleet.run(side, seconds / 4)

        def rate(side: str) -> float:
            return fleet.run(side, seconds).rate

        yield [
            Case(
                SECTION,
                f"{4 * _SIZE / 1e6:.3g} MB exchange, {name}, {gbps} Gbps",
                "exchanges/s",
                partial(rate, name),
                None,
                partial(rate, FORMATS[0]),
                missing=missing,
                note=f"naive: {FORMATS[0]} (burst {BURST[gbps]}, queue {QUEUE})",
            )
            for name in FORMATS[1:]
        ]


def _exchange(number: int, *, namespace: str, worker: int, address: Address, wire_format: str) -> WorkerExchange:
    enter(namespace)
    return WorkerExchange(worker, address, _SIZE, wire_format)


class NoLinkError(RuntimeError):
    """The error that this machine or this user cannot create a shaped link, and why."""


@dataclass(frozen=True)
class Link:
    """A shaped link that is up: device and address of the near end, path of the network namespace of the far end."""

    device: str
    host: str
    namespace: str


@contextmanager
def shaped(gbps: int) -> Iterator[Link]:
    """Yield a link with that rate in both directions; it is removed afterwards, even if this process is killed."""
    device = f"dk{secrets.token_hex(4)}"
    nets = 2 ** (30 - NETWORK.prefixlen)
    net = ipaddress.IPv4Network((int(NETWORK.network_address) + 4 * random.randrange(nets), 30))
    near, far = map(str, net.hosts())
    with ExitStack() as stack:
        holder = stack.enter_context(unnamed_namespace())
        namespace = f"/proc/{holder}/ns/net"
        # This precedes its creation, so that the link is removed even if the next call fails.
        stack.callback(_remove, device)
        run_tool("ip", "link", "add", device, "type", "veth", "peer", "name", f"{device}f", "netns", str(holder))
        for end, address, where in ((device, near, ()), (f"{device}f", far, ("nsenter", f"--net={namespace}"))):
            run = partial(run_tool, *where)
            bring_up(run, end, address, net)
            shape(run, end, gbps)
        yield Link(device, near, namespace)


def bring_up(run: Callable[..., None], device: str, address: str, net: ipaddress.IPv4Network) -> None:
    """Give a device its address in ``net``; ``run`` runs a command in its namespace."""
    run("ip", "address", "add", f"{address}/{net.prefixlen}", "dev", device)
    run("ip", "link", "set", device, "up")
    run("ip", "route", "change", str(net), "dev", device, "src", address, "congctl", "cubic")


def shape(run: Callable[..., None], device: str, gbps: int) -> None:
    """Limit what a device sends."""
    bucket = ("rate", f"{gbps}gbit", "burst", BURST[gbps], "latency", QUEUE)
    run("tc", "qdisc", "add", "dev", device, "root", "tbf", *bucket)


@contextmanager
def unnamed_namespace() -> Iterator[int]:
    """Yield a process in an unnamed network namespace, which the kernel removes with the last process in it.

    The process ends with this one in any case, and the devices of the namespace are removed with it.
    """
    command = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        raise NoLinkError(f"{command[0]}: {error.strerror}") from None
    with process:  # Closing its standard input ends the process.
        assert process.stdout is not None
        assert process.stderr is not None
        if not process.stdout.readline():
            raise NoLinkError(process.stderr.read().decode().strip())
        yield process.pid


def run_tool(*command: str) -> None:
    """Run a command; raise a NoLinkError if it fails, or if this machine does not have it."""
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE)
    except OSError as error:
        raise NoLinkError(f"{command[0]}: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        raise NoLinkError(f"{' '.join(command)}: {error.stderr.decode().strip()}") from None


def _remove(device: str) -> None:
    with suppress(NoLinkError):  # The device was not created, or was removed with the namespace.
        run_tool("ip", "link", "delete", device)


def enter(namespace: str) -> None:
    """Move the calling thread, and threads that it starts later, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns needs Python 3.12.
    with Path(namespace).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)

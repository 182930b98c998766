"""A virtual cable of a given rate, with one end here and one in a separate network namespace.

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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

#: The size of the token buckets, by the rate in Gbps: it is sent in a millisecond, or in less than half of one.
BURST = {1: "128kb", 10: "512kb"}
QUEUE = "50ms"
#: A network reserved for benchmarks (RFC 2544), to which this machine has no other route.
NETWORK = ipaddress.IPv4Network("198.18.0.0/15")
_CLONE_NEWNET = 0x40000000  # <sched.h>
_PATIENCE = 60.0


class NoLinkError(RuntimeError):
    """The error that this machine or this user cannot create a shaped link, and why."""


@dataclass(frozen=True)
class Link:
    """A shaped link that is up.

    Args:
        device: network device of the near end.
        host: address of the near end.
        namespace: path of the network namespace of the far end.
    """

    device: str
    host: str
    namespace: str


@contextmanager
def shaped(gbps: int) -> Iterator[Link]:
    """Yield a link with that rate in both directions; it is removed afterwards, even if this process is killed.

    Raises:
        NoLinkError: If it cannot be created here.
    """
    device = f"dk{secrets.token_hex(4)}"
    nets = 2 ** (30 - NETWORK.prefixlen)
    net = ipaddress.IPv4Network((int(NETWORK.network_address) + 4 * random.randrange(nets), 30))
    near, far = map(str, net.hosts())
    with ExitStack() as stack:
        holder = stack.enter_context(_namespace())
        namespace = f"/proc/{holder}/ns/net"
        # This precedes its creation, so that the link is removed even if the next call fails.
        stack.callback(_remove, device)
        _tool("ip", "link", "add", device, "type", "veth", "peer", "name", f"{device}f", "netns", str(holder))
        for end, address, within in ((device, near, ()), (f"{device}f", far, ("nsenter", f"--net={namespace}"))):
            _tool(*within, "ip", "address", "add", f"{address}/30", "dev", end)
            _tool(*within, "ip", "link", "set", end, "up")
            _tool(*within, "ip", "route", "change", str(net), "dev", end, "src", address, "congctl", "cubic")
            bucket = ("rate", f"{gbps}gbit", "burst", BURST[gbps], "latency", QUEUE)
            _tool(*within, "tc", "qdisc", "add", "dev", end, "root", "tbf", *bucket)
        yield Link(device, near, namespace)


@contextmanager
def _namespace() -> Iterator[int]:
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


def _tool(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE)
    except OSError as error:
        raise NoLinkError(f"{command[0]}: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        raise NoLinkError(f"{' '.join(command)}: {error.stderr.decode().strip()}") from None


def _remove(device: str) -> None:
    with suppress(NoLinkError):  # The device was not created, or was removed with the namespace.
        _tool("ip", "link", "delete", device)


def enter(namespace: str) -> None:
    """Move the calling thread, and threads that it starts later, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns needs Python 3.12.
    with Path(namespace).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)

"""Two hosts and a router between them, as network namespaces of this machine; the router can drop all packets."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from support.patience import patience

#: The router's address in each host's network, and the host's own address.
HOSTS = {"worker": ("10.213.1.1", "10.213.1.2"), "server": ("10.213.2.1", "10.213.2.2")}


class Namespaces:
    """A worker's and a server's host in networks of their own, which exist until this is closed.

    Raises:
        PermissionError: this process may not create network namespaces.
    """

    def __init__(self) -> None:
        self._names = {host: f"distkeras-{os.getpid()}-{host}" for host in ("router", *HOSTS)}
        if shutil.which("ip") is None:
            raise PermissionError("there is no `ip`")
        try:
            for name in self._names.values():
                _run("ip", "netns", "add", name)
            for number, (host, (gateway, address)) in enumerate(HOSTS.items()):
                inside, outside = (f"dk{os.getpid() % 10**6}{letter}{number}" for letter in "io")
                _run("ip", "link", "add", inside, "type", "veth", "peer", "name", outside)
                for link, end, where in ((inside, host, address), (outside, "router", gateway)):
                    _run("ip", "link", "set", link, "netns", self._names[end])
                    self._run(end, "ip", "address", "add", f"{where}/24", "dev", link)
                    self._run(end, "ip", "link", "set", link, "up")
                self._run(host, "ip", "link", "set", "lo", "up")
                self._run(host, "ip", "route", "add", "default", "via", gateway)
            self._run("router", "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
        except subprocess.CalledProcessError as error:
            self.close()
            raise PermissionError(f"{error.cmd}: {error.stderr.strip()}") from None

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(self, host: str, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process on ``host``."""
        return subprocess.Popen(["ip", "netns", "exec", self._names[host], *command], text=True, **options)

    def swallow(self) -> None:
        """Drop all packets at the router from now on, without notice to either host."""
        for _, address in HOSTS.values():
            self._run("router", "ip", "route", "add", "blackhole", f"{address}/32")

    def close(self) -> None:
        """Remove the namespaces."""
        for name in self._names.values():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=patience(30))

    def _run(self, host: str, *command: str) -> None:
        _run("ip", "netns", "exec", self._names[host], *command)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=patience(30))

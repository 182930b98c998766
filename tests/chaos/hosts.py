"""The hosts of a small cluster: network namespaces of this machine on one bridge, which can be cut off silently.

If this user may not make namespaces, other loopback addresses represent the hosts: Spark treats them as hosts, but they
cannot be cut off.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress

_SECONDS = 30.0


class Hosts:
    """A number of hosts, until they are closed.

    Args:
        count: the number of hosts.

    Attributes:
        driver: address of this machine as the hosts reach it.
        addresses: addresses of the hosts.
        whole: why the hosts cannot be cut off; empty if they can.
    """

    def __init__(self, count: int) -> None:
        number = os.getpid()
        network = f"10.214.{number % 250}"
        self._bridge = f"ch{number % 10**6}"
        self._names = [f"chaos-{number}-{host}" for host in range(count)]
        self._outside = [f"{self._bridge}o{host}" for host in range(count)]
        self.driver, self.addresses = f"{network}.1", [f"{network}.{host + 2}" for host in range(count)]
        self.whole = ""
        try:
            self._make()
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            output = getattr(error, "stderr", None)
            self.whole = f"network namespaces are not allowed here: {output.strip() if output else error}"
            self._names, self._outside, self._bridge = [], [], ""
            self.driver, self.addresses = "127.0.0.1", ["127.0.0.1"] * count
            if sys.platform == "linux":  # Other systems have only one loopback address.
                self.addresses = [f"127.0.0.{host + 2}" for host in range(count)]

    def _make(self) -> None:
        if shutil.which("ip") is None:
            raise OSError("there is no `ip`")
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self.driver}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for host, (name, outside) in enumerate(zip(self._names, self._outside, strict=True)):
            inside = f"{self._bridge}i{host}"
            _ip("netns", "add", name)
            _ip("link", "add", inside, "netns", name, "type", "veth", "peer", "name", outside)
            _ip("link", "set", outside, "master", self._bridge, "up")
            _ip("-n", name, "address", "add", f"{self.addresses[host]}/24", "dev", inside)
            for link in ("lo", inside):
                _ip("-n", name, "link", "set", link, "up")

    def command(self, host: int) -> list[str]:
        """Return the words that precede a command to run it on the host."""
        return ["ip", "netns", "exec", self._names[host]] if self._names else []

    def cut_off(self, host: int) -> None:
        """Drop all packets from and to the host from now on, without an error to any process."""
        _ip("link", "set", self._outside[host], "nomaster")

    def connect(self, host: int) -> None:
        """Undo `cut_off`."""
        _ip("link", "set", self._outside[host], "master", self._bridge)

    def close(self) -> None:
        """Remove the hosts."""
        for name in self._names:
            with suppress(OSError, subprocess.SubprocessError):
                _ip("netns", "del", name)
        for link in (*self._outside, self._bridge):
            with suppress(OSError, subprocess.SubprocessError):
                _ip("link", "del", link)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=_SECONDS)

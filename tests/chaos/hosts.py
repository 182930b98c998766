"""The hosts of a small cluster: network namespaces of this machine on one bridge, which can be cut off without a word.

Where this user may make none, other loopback addresses stand for them: Spark takes those for hosts, too, but nothing
comes between them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress

_SECONDS = 30.0


class Hosts:
    """So many of them, until they are closed.

    Args:
        count: how many.

    Attributes:
        driver: address of this machine as the hosts reach it.
        addresses: of the hosts.
        whole: why they cannot be cut off; empty: they can.
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
            told = getattr(error, "stderr", None)
            self.whole = f"network namespaces are not allowed here: {told.strip() if told else error}"
            self._names, self._outside, self._bridge = [], [], ""
            self.driver, self.addresses = "127.0.0.1", ["127.0.0.1"] * count
            if sys.platform == "linux":  # other systems have one loopback address
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
        """What a command begins with that is to run there."""
        return ["ip", "netns", "exec", self._names[host]] if self._names else []

    def cut_off(self, host: int) -> None:
        """Let nothing come from it or get to it from now on, and report that to no one."""
        _ip("link", "set", self._outside[host], "nomaster")

    def connect(self, host: int) -> None:
        """As it was before `cut_off`."""
        _ip("link", "set", self._outside[host], "master", self._bridge)

    def close(self) -> None:
        """Removes all of it."""
        for name in self._names:
            with suppress(OSError, subprocess.SubprocessError):
                _ip("netns", "del", name)
        for link in (*self._outside, self._bridge):
            with suppress(OSError, subprocess.SubprocessError):
                _ip("link", "del", link)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=_SECONDS)

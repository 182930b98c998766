"""The objects that the endpoints use, and the settings of the server's operator."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flask import current_app, g, request

from distkeras.job_server.runner.files import JobFiles
from distkeras.job_server.store.accounts import Accounts
from distkeras.job_server.store.jobs import JobStore, Quota


@dataclass(frozen=True)
class ServiceSettings:
    """The operator's settings for requests.

    Args:
        data: paths and URIs of folders that jobs may read.
        output: paths and URIs of folders that predict jobs may write to, each user in a subfolder of their name.
        upload_max: the most bytes of a model.
        quota: of each user.
        reserve: the least free bytes on the disk for a job to be accepted.
        private: folders of the server's own files, which no job may read or write, even if they are in ``data``.
    """

    data: Sequence[str] = ()
    output: Sequence[str] = ()
    upload_max: int = 512 << 20
    quota: Quota = field(default_factory=Quota)
    reserve: int = 1 << 30
    private: Sequence[Path] = ()


@dataclass(frozen=True)
class Services:
    """The objects that the endpoints use."""

    accounts: Accounts
    jobs: JobStore
    files: JobFiles
    settings: ServiceSettings
    #: Seconds since the jobs were last checked.
    silence: Callable[[], float] = lambda: 0.0


def services() -> Services:
    """Return the services of the current request's application."""
    current: Services = current_app.extensions["distkeras"]
    return current


def audit(action: str, subject: str = "") -> None:
    """Record what the caller of the current request did."""
    services().accounts.record(g.account.name, request.remote_addr or "", action, subject)


class FailureLimit:
    """Counts failures by address; thread-safe, with bounded memory.

    Args:
        most: failures within ``seconds`` after which an address is refused.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, most: int = 20, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._seconds, self._clock = most, seconds, clock
        self._lock = threading.Lock()
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def add(self, address: str) -> bool:
        """Count one failure; return whether it exceeds the limit."""
        now = self._clock()
        with self._lock:
            times = self._failures.setdefault(address, deque(maxlen=self._most))
            self._failures.move_to_end(address)
            while len(self._failures) > _ADDRESSES:
                self._failures.popitem(last=False)
            if len(times) == self._most and now - times[0] < self._seconds:
                return True
            times.append(now)
            return False


#: The most addresses whose failures are counted; beyond it, the one that failed longest ago is discarded.
_ADDRESSES = 10_000


def data_roots(roots: Sequence[str]) -> list[str]:
    """Return places with absolute paths, which do not depend on a process' working directory."""
    return [root if "://" in root else str(Path(root).absolute()) for root in roots]

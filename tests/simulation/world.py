"""The simulated `World` of a process of a run."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distkeras.ps.center.tables import Rows
from distkeras.ps.checkpoint.snapshots import Saved
from distkeras.ps.errors import ServerLostError
from distkeras.ps.server.process import GOODBYE, StartRequest
from distkeras.ps.world.processes import POLL_SECONDS
from distkeras.ps.world.streams import Listener, Stream
from distkeras.ps.world.world import Condition, Flag, Lock, Thread, World
from simulation.disk import Disk, VirtualFiles
from simulation.network import SHARD, Network
from simulation.plan import Layout
from simulation.scheduler import Process, Scheduler, Task
from simulation.threads import VirtualCondition, VirtualFlag, VirtualLock, VirtualThread

#: Seconds since the epoch, and of the monotonic clock, when a run begins.
_EPOCH, _BOOT = 1_700_000_000.0, 1000.0
#: The number of lines that a pipe holds.
_LINES = 20
#: Seconds that a server has to end when its driver is gone: the alarm of ``python -m distkeras.ps child``.
_ALARM = 120.0
#: How often memory cannot be mapped for lack of space.
_NO_ROOM = 0.15


class Surroundings:
    """The state that all processes of a run share.

    Args:
        scheduler, network, disk: scheduler, network and disk of the run.
        serve: body of a server's process, called with its child and its needs; returns the exit status.
    """

    def __init__(
        self, scheduler: Scheduler, network: Network, disk: Disk, serve: Callable[[VirtualChild], int]
    ) -> None:
        self.scheduler, self.network, self.disk, self.serve = scheduler, network, disk, serve
        #: Shared memory by its path, with the scope of the process that shares it.
        self.shared: dict[str, tuple[str, memoryview]] = {}
        #: The number of the first partitions that are on the server's host.
        self.neighbors = 0
        #: The error of each host's clock, in seconds.
        self.skews: dict[str, float] = {}
        #: The processes of all servers, with the latest one last; those of their shards are their own.
        self.servers: list[Any] = []
        #: The snapshots, with whole vectors and rows where they have some, that servers with shards have restored.
        self.saved: dict[Process, tuple[Saved, tuple[Rows, ...]]] = {}
        #: The number of the ticket's snapshot to which each part of a divided center belongs, by the part's name.
        self.snapshots_of_parts: dict[str, int] = {}
        #: The table and the rows that the driver removes from shards, by the number of its request.
        self.removals: dict[int, tuple[int, set[int]]] = {}
        self.child_of: dict[Process, Any] = {}
        #: The Spark job that runs a driver's server, if that is a task.
        self.actions: dict[Process, Any] = {}
        #: The number of small tasks so far.
        self.tasks = 0
        #: Seconds that the next servers take to come up.
        self.startup = 0.5
        #: The layout that each driver's process uses.
        self.layouts: dict[Process, Layout] = {}
        #: Partitions whose next step returns a NaN; a partition may occur several times.
        self.poisoned: list[int] = []
        #: Faults for the next servers, each with a delay after the server's start.
        self.awaiting: list[tuple[float, Callable[[Process], None]]] = []

    def strike_awaiting(self, process: Process) -> None:
        """Inject the faults that wait for the next server, when a server's process begins."""
        if self.awaiting:
            seconds, strike = self.awaiting.pop(0)
            self.scheduler.later(seconds, lambda: strike(process))


class VirtualWorld(World):
    """The world of one process.

    Args:
        surroundings: surroundings of the run.
        process: process of this world.
        scope: owner of its connections, for faults that concern one partition.
    """

    def __init__(self, surroundings: Surroundings, process: Process, scope: str) -> None:
        self.surroundings, self.process, self.scope = surroundings, process, scope
        self._scheduler = surroundings.scheduler

    def monotonic(self) -> float:
        """See `World`."""
        return _BOOT + self._scheduler.now

    def time(self) -> float:
        """See `World`."""
        return _EPOCH + self._scheduler.now + self.surroundings.skews.get(self.process.host, 0.0)

    def uniform(self, low: float, high: float) -> float:
        """See `World`."""
        return low + (high - low) * self._scheduler.random.random()

    def token(self, nbytes: int | None = None) -> bytes:
        """See `World`."""
        return self._scheduler.random.randbytes(32 if nbytes is None else nbytes)

    def sleep(self, seconds: float) -> None:
        """See `World`."""
        self._scheduler.wait(None, seconds)

    def lock(self) -> Lock:
        """See `World`."""
        return VirtualLock(self._scheduler)

    def reentrant_lock(self) -> Lock:
        """See `World`."""
        return VirtualLock(self._scheduler, reentrant=True)

    def condition(self, lock: Lock | None = None) -> Condition:
        """See `World`."""
        lock = VirtualLock(self._scheduler, reentrant=True) if lock is None else lock
        assert isinstance(lock, VirtualLock)
        return VirtualCondition(self._scheduler, lock)

    def event(self) -> Flag:
        """See `World`."""
        return VirtualFlag(self._scheduler)

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        """See `World`."""
        return VirtualThread(self._scheduler, self.process, target, name)

    def connect(self, address: tuple[str, int], timeout: float) -> Stream:
        """See `World`."""
        return self.surroundings.network.connect(self.process, address, timeout, self.scope)

    def listen(self, host: str, port: int) -> Listener:
        """See `World`."""
        return self.surroundings.network.listen(self.process, host, port)

    def files(self, uri: str, *, create: bool = True) -> VirtualFiles:
        """See `World`."""
        return self.surroundings.disk.files(uri)

    def share(self, size: int) -> VirtualMemory:
        """See `World`."""
        return VirtualMemory(self.surroundings, self.process, self.scope, size)

    def map_shared(self, place: str, size: int) -> memoryview:
        """See `World`."""
        scope, memory = self.surroundings.shared.get(place, ("", memoryview(b"")))
        if len(memory) != size or not int(scope[1:]) < self.surroundings.neighbors:
            raise OSError(errno.ENOENT, "No such file or directory")
        if self._scheduler.random.random() < _NO_ROOM:
            raise OSError(errno.ENOSPC, "No space left on device")
        return memory

    def spawn(self, command: Sequence[str], environment: Mapping[str, str]) -> VirtualChild:
        """See `World`."""
        return VirtualChild(self.surroundings, self.process)


class VirtualMemory:
    """Memory that a process shares, as a simulated `world.shared_memory.SharedMemory`."""

    def __init__(self, surroundings: Surroundings, process: Process, scope: str, size: int) -> None:
        self._shared = surroundings.shared
        self.memory = memoryview(bytearray(size))
        self.place = f"{process.name}/{len(process.at_end)}"
        self._shared[self.place] = scope, self.memory
        process.at_end.append(self.hide)

    def hide(self) -> None:
        """See `SharedMemory`."""
        self._shared.pop(self.place, None)


class VirtualChild:
    """A server's process, as a simulated `world.processes.Child`; a child of a server is one of its shards."""

    def __init__(self, surroundings: Surroundings, driver: Process) -> None:
        self.surroundings, self.driver = surroundings, driver
        self._scheduler = surroundings.scheduler
        #: The server that has started this shard; None if this is a server.
        self.sequencer: VirtualChild | None = surroundings.child_of.get(driver)
        #: The server's shards, in their order.
        self.shards: list[VirtualChild] = []
        self.pid, self.process = self._join_family()
        self.process.watched = True
        surroundings.child_of[self.process] = self
        self.world = VirtualWorld(surroundings, self.process, "server" if self.sequencer is None else SHARD)
        #: The request with which it was started; None before it has arrived.
        self.request: StartRequest | None = None
        #: The server of the process, once it is up.
        self.server: Any = None
        #: The unread lines of its input.
        self.lines: list[bytes] = []
        self._output: list[bytes] = []
        self._news: list[Task] = []
        driver.at_end.append(lambda: self._scheduler.wake_all(self._news))
        self.process.at_end.append(lambda: self._scheduler.wake_all(self._news))
        self._scheduler.start(self.process, self._main, "main")
        if self.sequencer is None:
            surroundings.strike_awaiting(self.process)

    def _join_family(self) -> tuple[int, Process]:
        """Return the number and the process of this server or shard."""
        sequencer = self.sequencer
        family = self.surroundings.servers if sequencer is None else sequencer.shards
        family.append(self)
        name = f"server{len(family)}" if sequencer is None else f"{sequencer.process.name}shard{len(family) - 1}"
        return len(family), Process(name, self.driver.host)

    @property
    def family(self) -> list[Process]:
        """Return the processes that serve together: the server and its shards."""
        sequencer = self.sequencer or self
        return [sequencer.process, *(shard.process for shard in sequencer.shards)]

    def _main(self) -> None:
        self._scheduler.wait(None, self.surroundings.startup)
        self._scheduler.kill(self.process, self.surroundings.serve(self))

    # ---- the process' own side

    def input_line(self, over: Callable[[], bool] = lambda: False, poll: float | None = None) -> bytes | None:
        """Return the next line of its input, or None after the goodbye, when its driver is gone, or if ``over()``.

        ``over`` is called every ``poll`` seconds.
        """
        while not self.lines:
            if not self.driver.alive or over():
                return None
            self._scheduler.wait(self._news, poll)
        line = self.lines.pop(0)
        return None if line == GOODBYE else line

    def require_driver(self) -> None:
        """Raise a `ServerLostError` unless its driver is alive."""
        if not self.driver.alive:
            raise ServerLostError("the driver of this server has ended")

    def tell(self, line: bytes) -> None:
        """Write a line to its output; wait first while too many lines are unread."""
        while len(self._output) >= _LINES:
            self._scheduler.wait(self._news, None)
        self._output.append(line)
        self._scheduler.wake_all(self._news)

    def wait_until_over(self, server: Any) -> int:
        """Serve until the driver says goodbye or is gone; with shards, also until a process has lost another one."""
        self.server = server
        divided = self.sequencer is not None or self.request is None or self.request.settings.shards > 1
        poll = POLL_SECONDS if divided else None
        while self.input_line(lambda: divided and server.corrupt, poll) is not None:
            pass
        self._scheduler.later(_ALARM, lambda: self._scheduler.kill(self.process, -14))
        return int(divided and server.corrupt)

    # ---- the driver's side

    @property
    def exit_code(self) -> int | None:
        """See `Child`."""
        return self.process.exit_code

    def write(self, line: bytes) -> None:
        """See `Child`."""
        self._scheduler.pass_on()
        if not self.process.alive:
            raise BrokenPipeError
        self.lines.append(line)
        self._scheduler.wake_all(self._news)

    def line(self, timeout: float) -> bytes:
        """See `Child`."""
        deadline = self._scheduler.now + timeout
        while not self._output and self.process.alive:
            if self._scheduler.now >= deadline:
                raise TimeoutError
            self._scheduler.wait(self._news, deadline - self._scheduler.now)
        line = self._output.pop(0) if self._output else b""
        self._scheduler.wake_all(self._news)
        return line

    def errors(self) -> Iterator[bytes]:
        """See `Child`."""
        while self.process.alive:
            self._scheduler.wait(self.process.waiters, None)
        yield from ()

    def end_input(self, goodbye: bytes) -> None:
        """See `Child`."""
        if self.process.alive and not self._scheduler.silent:
            self.lines.append(goodbye)
            self._scheduler.wake_all(self._news)

    def wait(self, timeout: float) -> bool:
        """See `Child`."""
        deadline = self._scheduler.now + timeout
        while self.process.alive and self._scheduler.now < deadline:
            self._scheduler.wait(self.process.waiters, deadline - self._scheduler.now)
        return not self.process.alive

    def kill(self) -> None:
        """See `Child`."""
        if not self._scheduler.silent:
            self._scheduler.kill(self.process)

    def close(self) -> None:
        """See `Child`."""

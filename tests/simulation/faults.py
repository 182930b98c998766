"""The effect of each kind of fault on a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simulation.disk import Disk
from simulation.driver import Driver
from simulation.impostor import Impostor
from simulation.network import SHARD, Network, VirtualStream
from simulation.plan import DEADLINES, Fault
from simulation.scheduler import Process, Scheduler
from simulation.world import Surroundings

#: The number of sends in a connection's handshake.
_GREETING = 8
#: The length of a period, in seconds, in which the disk or the store is slow.
_SLOW_SECONDS, _CRAWLING_SECONDS = 20.0, 150.0


class Striker:
    """An injector of faults into a run.

    Args:
        surroundings: surroundings of the run.
        drivers: the run's drivers, with the latest one last.
        expect_driver: starts another driver after a number of seconds.
    """

    def __init__(
        self, surroundings: Surroundings, drivers: Sequence[Driver], expect_driver: Callable[[float], None]
    ) -> None:
        self._surroundings, self._drivers, self._expect_driver = surroundings, drivers, expect_driver
        self._scheduler: Scheduler = surroundings.scheduler
        self._network: Network = surroundings.network
        self._disk: Disk = surroundings.disk
        self._disk_seconds = self._disk.seconds
        #: Operations of the disk until the server dies in one; None if it does not.
        self._crash_after: int | None = None
        self._on_stream: dict[str, Callable[[VirtualStream, float], None]] = {
            "half cut": lambda stream, amount: stream.link.half_cut(stream, amount),
            "vanish": lambda stream, _: stream.link.vanish(),
            "stall": lambda stream, amount: stream.link.stall(stream, amount),
            "part": lambda stream, amount: self._network.part(stream.process.host, stream.peer.process.host, amount),
            "flip": self._spoil,
            "kill sender": lambda stream, _: self._kill_sender(stream),
            "clock jump": self._jump,
        }
        self._on_place: dict[str, Callable[[Fault], None]] = {
            "kill server": lambda _: self._kill_server(),
            "kill shard": lambda fault: self._on_shard(fault.place, self._scheduler.kill),
            "stop shard": lambda fault: self._on_shard(
                fault.place, lambda process: self._scheduler.stop(process, fault.amount)
            ),
            "power cut": lambda _: self._cut_power(),
            "crash in disk": lambda fault: self._crash_in(int(fault.amount)),
            "disk full": lambda fault: self._fill_disk(fault.amount),
            "disk slow": lambda fault: self._slow_disk(fault.amount, _SLOW_SECONDS),
            "store crawls": lambda fault: self._slow_disk(fault.amount, _CRAWLING_SECONDS),
            "no memory": lambda fault: self._starve(int(fault.amount)),
            "slow start": lambda fault: self._slow_start(fault.amount),
            "kill driver": lambda fault: self._kill_driver(fault.amount),
            "second driver": lambda fault: self._expect_driver(fault.amount),
            "stop driver": lambda fault: self._scheduler.stop(self._drivers[-1].process, fault.amount),
            "stop server": self._stop_server,
            "stop worker": self._stop_worker,
            "kill worker": self._kill_worker,
            "rival": self._start_rival,
            "stop and rival": self._stop_and_rival,
            "kill server twice": lambda fault: self._kill_again(fault.amount),
            "kill next server": lambda fault: self._kill_next(fault.amount),
            "kill driver twice": self._kill_drivers,
            "stop at start": lambda fault: self._stop_next(fault.amount),
            "impostor": lambda fault: self._pretend(fault.amount),
            "snapshot rot": self._rot,
            "log rot": self._rot,
            "speculate": lambda _: self._speculate(),
            "nan": lambda fault: self._surroundings.poisoned.append(fault.place),
        }
        #: Kinds of files that a fault has damaged.
        self.rotten: set[str] = set()

    def strike(self, fault: Fault, stream: VirtualStream) -> float | None:
        """Inject a fault at a write to ``stream``; return the share of the write that arrives if it is cut."""
        if stream.process is stream.peer.process and fault.kind in (*self._on_stream, "cut"):
            return None  # Messages within a process always arrive.
        if stream.link.scope == SHARD != fault.scope and fault.kind in (*self._on_stream, "cut"):
            return None  # So do those between processes of a host, except where a plan says otherwise.
        if fault.kind == "cut":
            return fault.amount
        if fault.kind in self._on_stream:
            self._on_stream[fault.kind](stream, fault.amount)
        else:
            self._on_place[fault.kind](fault)
        return None

    def strike_place(self, fault: Fault) -> None:
        """Inject a fault at a moment that is not a write."""
        self._on_place[fault.kind](fault)

    def on_disk(self) -> None:
        """Act before an operation of the disk."""
        if self._crash_after is not None:
            self._crash_after -= 1
            if self._crash_after <= 0:
                self._crash_after = None
                child = self._surroundings.child_of.get(self._scheduler.current.process)
                if child is not None and child in self._surroundings.servers[-1].shards:
                    self._scheduler.kill(child.process)
                self._kill_server()
                self._scheduler.require_alive()

    def _kill_sender(self, stream: VirtualStream) -> None:
        # Small tasks are retried.
        spared = stream.process.name.startswith("task")
        if not spared and stream.process not in [driver.process for driver in self._drivers]:
            self._scheduler.kill(stream.process)

    def _spoil(self, stream: VirtualStream, share: float) -> None:
        # A client that first meets a stranger gets an error and, as intended, does not retry, so greetings are spared.
        if stream.link.sends > _GREETING:
            stream.spoiled = min(share, 0.999)
            # A reader of a changed length waits for the rest of a frame and sends nothing in the meantime.
            stream.link.disturbed_until = self._scheduler.now + DEADLINES.frame

    def _jump(self, stream: VirtualStream, seconds: float) -> None:
        skews, host = self._surroundings.skews, stream.process.host
        skews[host] = skews.get(host, 0.0) + seconds

    def _kill_server(self) -> None:
        if self._surroundings.servers:
            self._scheduler.kill(self._surroundings.servers[-1].process)

    def _on_shard(self, place: int, strike: Callable[[Process], None]) -> None:
        shards = self._surroundings.servers[-1].shards if self._surroundings.servers else []
        if shards:
            strike(shards[place % len(shards)].process)

    def _speculate(self) -> None:
        action = self._surroundings.actions.get(self._drivers[-1].process)
        if action is not None:
            action.speculate()

    def _kill_again(self, seconds: float) -> None:
        self._kill_next(seconds)
        self._kill_server()

    def _kill_next(self, seconds: float) -> None:
        self._surroundings.awaiting.append((seconds, self._scheduler.kill))

    def _kill_drivers(self, fault: Fault) -> None:
        self._kill_driver(0.5)
        self._scheduler.later(0.6 + fault.amount, lambda: self._kill_driver(0.5))

    def _stop_next(self, seconds: float) -> None:
        after = 2.0 * self._surroundings.startup * self._scheduler.random.random()
        self._surroundings.awaiting.append((after, lambda process: self._scheduler.stop(process, seconds)))
        self._kill_server()

    def _pretend(self, seconds: float) -> None:
        server = self._surroundings.servers[-1].server if self._surroundings.servers else None
        self._kill_server()
        if server is not None:
            impostor = Impostor(self._surroundings, server.address)
            self._scheduler.later(seconds, lambda: self._scheduler.kill(impostor.process))

    def _rot(self, fault: Fault) -> None:
        kind = fault.kind.removesuffix(" rot")
        if self._disk.rot(kind, min(fault.amount, 0.999)):
            self.rotten.add(kind)

    def _cut_power(self) -> None:
        servers = self._surroundings.servers
        processes = servers[-1].family if servers else []
        for process in processes:
            self._scheduler.kill(process)
        self._disk.cut_power(processes)

    def _crash_in(self, operations: int) -> None:
        self._crash_after = operations

    def _fill_disk(self, seconds: float) -> None:
        self._disk.full_until = max(self._disk.full_until, self._scheduler.now + seconds)

    def _slow_disk(self, seconds: float, length: float) -> None:
        def mend() -> None:
            self._disk.seconds = self._disk_seconds

        self._disk.seconds = seconds
        self._scheduler.later(length, mend)

    def _starve(self, operations: int) -> None:
        self._disk.starving += operations

    def _slow_start(self, seconds: float) -> None:
        self._surroundings.startup = seconds

    def _kill_driver(self, seconds: float) -> None:
        if self._drivers[-1].process.alive:
            self._expect_driver(seconds)
            self._scheduler.kill(self._drivers[-1].process)

    def _stop_server(self, fault: Fault) -> None:
        if self._surroundings.servers:
            self._scheduler.stop(self._surroundings.servers[-1].process, fault.amount)

    def _worker(self, place: int) -> Process | None:
        executors = self._drivers[-1].executors
        running = [] if executors is None else list(executors.running[place % len(executors.running)].values())
        return running[-1] if running else None

    def _stop_worker(self, fault: Fault) -> None:
        process = self._worker(fault.place)
        if process is not None:
            self._scheduler.stop(process, fault.amount)

    def _kill_worker(self, fault: Fault) -> None:
        process = self._worker(fault.place)
        if process is not None:
            self._scheduler.kill(process)

    def _start_rival(self, fault: Fault) -> None:
        executors = self._drivers[-1].executors
        if executors is not None:
            place = fault.place % len(executors.running)
            if executors.running[place]:
                executors.start(place)

    def _stop_and_rival(self, fault: Fault) -> None:
        self._stop_worker(fault)
        self._start_rival(fault)

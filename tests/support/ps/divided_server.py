"""A real sequencer and real shards in the test's own process, and their clients."""

from __future__ import annotations

from typing import Any

import numpy as np

from distkeras.ps.rules import Rule
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.server.shard_role import ShardRole
from distkeras.ps.settings import ServerSettings
from distkeras.ps.shards.sequencer_server import SequencerDispatcher
from distkeras.ps.shards.shard_server import ShardDispatcher
from distkeras.ps.shards.spread_client import SpreadWorkerClient
from distkeras.ps.shards.spread_driver import SpreadDriverClient
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.driver_client import DriverClient
from support.patience import PATIENT
from support.ps.running_server import KEY
from support.ps.toy_tables import ToyTables


class DividedServer:
    """A running sequencer and its shards, which have received a center.

    Attributes:
        shards: the servers of the shards, by number.
    """

    def __init__(  # noqa: PLR0913 - keywords, of which a test gives few
        self,
        rule: Rule,
        start: np.ndarray,
        *,
        shards: int,
        workers: int = 2,
        eta: Any = 0.1,
        moving_statistics: int = 0,
        tables: ToyTables | None = None,
        publish: bool = True,
        deadlines: Deadlines = PATIENT,
        **options: Any,
    ) -> None:
        self.rule, self.deadlines = rule, deadlines
        settings = ServerSettings(
            rule,
            workers=workers,
            learning_rate=eta if rule.traits.gradient else None,
            deadlines=deadlines,
            shards=shards,
            tables=() if tables is None else tables.shapes,
            **options,
        )
        self.sequencer = ParameterServer(settings, KEY, dispatcher=SequencerDispatcher(settings))
        self.sequencer.start()
        self.address = Address(*self.sequencer.address, KEY)
        self.shards = []
        for number in range(shards):
            dispatcher = ShardDispatcher(settings, ShardRole(number, *self.sequencer.address, 1), self.address)
            self.shards.append(ParameterServer(settings, KEY, dispatcher=dispatcher))
            self.shards[-1].start()
            dispatcher.register(self.shards[-1].address)
        self.driver: DriverClient = SpreadDriverClient(self.address, deadlines)
        rows = [] if tables is None else tables.whole_rows()
        self._publication = (start, np.zeros(moving_statistics, np.float32), b"the model", (), rows)
        if publish:
            self.publish()

    def publish(self) -> None:
        self.driver.publish(*self._publication)

    def client(self, worker: int = 0, attempt: int = 0, **options: Any) -> SpreadWorkerClient:
        options.setdefault("deadlines", self.deadlines)
        return SpreadWorkerClient(self.address, worker=worker, attempt=attempt, **options)

    def __enter__(self) -> DividedServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.driver.close()
        for server in (*self.shards, self.sequencer):
            server.close()

"""A driver that removes rows of a table, and follows the changes of its rows, while workers commit."""

from __future__ import annotations

import numpy as np

from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.protocol.driver_messages import ALL_ROWS
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.transport.driver_client import DriverClient
from simulation.scheduler import Finding, Scheduler
from simulation.tables import VISITED, VISITS

#: The share of the visits that remove rows.
_REMOVALS = 0.4
#: How many servers may end in a row while changes are read.
_MOST_FAILURES = 3
#: How often the last rows are compared: a removal whose answer was lost may come between the two reads.
_TRIES = 3


class Visitor:
    """The rows of the table ``shape`` as its driver knows them."""

    def __init__(self, shape: TableShape, scheduler: Scheduler) -> None:
        self._shape, self._scheduler = shape, scheduler
        self._rows: dict[int, list[float]] = {}
        self._read_at = ALL_ROWS
        #: How often in a row the changes were not known when they were read.
        self._failures = 0
        #: Whether a visit has begun and not ended.
        self._busy = False

    def visit(self, driver: DriverClient) -> None:
        """Remove some rows, or read what has changed."""
        draw, self._busy = self._scheduler.random.random, True
        try:
            if draw() < _REMOVALS:
                driver.remove_rows(VISITS, np.array([row for row in range(VISITED) if draw() < 0.5], np.int64))
            else:
                self.follow(driver)
        finally:
            self._busy = False

    def follow(self, driver: DriverClient) -> None:
        """Read what has changed."""
        begun = driver.begin_changes(self._read_at)
        # Until all blocks are read, the rows known here are of no moment.
        known, self._rows, self._read_at = self._rows if begun.known else {}, {}, ALL_ROWS
        try:
            if begun.known:
                for ids, rows, gone in driver.changes(VISITS, self._shape):
                    known |= _rows_of(ids, rows)
                    for row in gone.tolist():
                        known.pop(row, None)
            else:
                for ids, rows in driver.touched(VISITS, self._shape):
                    known |= _rows_of(ids, rows)
        except RemoteProtocolError as error:
            self._failures += 1  # another server began meanwhile
            if "changes must be begun" not in error.message or self._failures > _MOST_FAILURES:
                raise
            return
        self._failures *= not begun.known
        self._rows, self._read_at = known, begun.clock

    def check(self, driver: DriverClient) -> None:
        """Raise a finding unless the followed changes have led to the rows that there are at the end."""
        expected = dict[int, list[float]]()
        for _ in range(_TRIES):
            if self._busy:  # the last visit still waits for its answer
                return
            self.follow(driver)
            expected = {}
            for ids, rows in driver.touched(VISITS, self._shape):
                expected |= _rows_of(ids, rows)
            if self._rows == expected:
                return
        raise Finding("changes", f"changes must lead to the rows {expected}. Received: {self._rows}")


def _rows_of(ids: np.ndarray, rows: np.ndarray) -> dict[int, list[float]]:
    return dict(zip(ids.tolist(), rows.tolist(), strict=True))

"""Tables whose rows travel, over real sockets."""

from __future__ import annotations

import numpy as np
import pytest
from support.patience import patience
from support.present import present
from support.ps.running_server import Running
from support.ps.toy_tables import TableBatch, TableJob, ToyTables, table_worker

from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.rules import make
from distkeras.ps.worker.loop import run_worker

USERS, ITEMS = TableShape("users", 50, 3, 8), TableShape("items", 9, 2, 8)


def some_model(seed: int = 1) -> ToyTables:
    rng = np.random.default_rng(seed)
    rows = tuple(rng.normal(size=(shape.rows, shape.width)).astype(np.float32) for shape in (USERS, ITEMS))
    return ToyTables(rng.normal(size=4).astype(np.float32), (USERS, ITEMS), rows)


def some_batches(count: int, *, epochs: int = 1, seed: int = 1) -> list[TableBatch]:
    rng = np.random.default_rng(seed)
    found = []
    for epoch in range(epochs):
        for index in range(count):
            ids = (rng.integers(0, USERS.rows, 4), rng.integers(0, ITEMS.rows, 4))
            found.append(TableBatch(epoch, index, index == count - 1, ids, rng.normal(size=4)))
    return found


def test_a_job_by_rows_ends_as_the_dense_one() -> None:
    rule, model, data = make("downpour", window=2), some_model(), some_batches(7, epochs=2)
    dense = TableJob(rule, model, [data], by_rows=False)
    while dense.pending:
        dense.commit(0)
    with Running(rule, workers=1, start=model.dense, tables=model) as running:
        client, welcome, begin = table_worker(running.address, rule, model, data, deadlines=running.deadlines)
        run_worker(client, welcome, begin)
        client.close()
        center = running.driver.center()
        tables = [running.driver.table(number, shape).reshape(-1) for number, shape in enumerate(model.shapes)]
        np.testing.assert_array_equal(np.concatenate([center.center, *tables]), dense.result())
        assert running.driver.observe(-1, patience(5)).clock == center.clock == 8


def test_a_center_is_not_published_before_all_rows() -> None:
    model = some_model()
    with Running(make("downpour"), workers=1, start=model.dense, tables=model, publish=False) as running:
        with pytest.raises(RemoteProtocolError, match=r"all 50 rows of table 'users' .* Received: 0"):
            running.driver.publish(model.dense)
        assert running.server.center is None
        running.driver.close()  # the server has hung up
        running.publish()
        np.testing.assert_array_equal(present(running.server.center).tables[0].array, model.rows[0])

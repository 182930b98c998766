"""Workers that lend, over real sockets: each mini-batch counts once, also if one of them dies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.patience import until
from support.ps.lenders import SIZE, Lender
from support.ps.running_server import Running

from distkeras.ps.center import loans
from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.center.leases import PartitionLease
from distkeras.ps.errors import LedgerError
from distkeras.ps.rules import make
from distkeras.ps.worker import helping

LONG = [float(number + 1) for number in range(40)]
SHORT = [100.0, 200.0]
EPOCHS = 2


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(loans, "_LEAST_SECONDS", 0.0)
    with Running(make("downpour", window=2), size=SIZE, lends=True) as running:
        yield running


def leases_of(running: Running) -> dict[int, PartitionLease]:
    center = running.server.center
    assert center is not None
    return center.leases


def lending_of(running: Running) -> loans.Lending:
    center = running.server.center
    assert center is not None
    assert center.lending is not None
    return center.lending


def lend(running: Running, **rows: Any) -> tuple[Lender, Lender]:
    """Return an owner that has lent a part of its partition, and the helper that has joined the loan."""
    owner = Lender(running, 0, LONG, epochs=EPOCHS, **rows)
    owner.permit(6)
    until(lambda: 0 in leases_of(running) and leases_of(running)[0].batch == 6)
    helper = Lender(running, 1, SHORT, epochs=EPOCHS)
    helper.permit(4)
    until(lambda: (1, 0) in lending_of(running).helpers)
    owner.permit(2)
    until(lambda: 2 in leases_of(running) and leases_of(running)[2].connected)
    return owner, helper


def check_exact(running: Running) -> np.ndarray:
    """Check that each mini-batch is in the ledger once, and in the center; return the ledger."""
    reply, records = running.driver.center(), running.driver.drain()
    rows = records.commits.view(COMMIT)
    trained = [
        (int(row["worker"]), int(row["epoch"]), batch)
        for row in rows
        for batch in range(int(row["first_batch"]), int(row["last_batch"]) + 1)
    ]
    sizes = {0: len(LONG), 1: len(SHORT)}
    assert sorted(trained) == [
        (part, epoch, k) for part in sizes for epoch in range(EPOCHS) for k in range(sizes[part])
    ]
    np.testing.assert_array_equal(reply.center, np.full(SIZE, EPOCHS * (sum(LONG) + sum(SHORT)), np.float32))
    return rows


def test_a_worker_without_work_trains_the_later_part_of_another_ones(running: Running) -> None:
    owner, helper = lend(running)
    loan = leases_of(running)[2]
    begin = (loan.epoch, loan.batch)
    helper.permit()
    owner.permit()
    assert owner.ended() is helper.ended() is None
    rows = check_exact(running)
    lent = rows[rows["lease"] == 2]
    assert (int(lent[0]["epoch"]), int(lent[0]["first_batch"])) == begin
    assert {(int(row["worker"]), int(row["trained_by"])) for row in lent} == {(0, 1)}


def test_a_loan_whose_holder_dies_is_trained_by_the_owner(running: Running) -> None:
    owner, helper = lend(running)
    helper.permit(2)
    until(lambda: leases_of(running)[2].sequence == 1)
    helper.die()
    assert helper.ended() is None
    owner.permit()
    assert owner.ended() is None
    rows = check_exact(running)
    assert {int(row["trained_by"]) for row in rows[rows["lease"] == 2]} == {0, 1}


def test_a_helper_gets_the_same_loan_again_from_the_next_attempt_at_the_partition(running: Running) -> None:
    owner, helper = lend(running)
    owner.die()
    assert owner.ended() is None
    helper.permit()
    until(lambda: not leases_of(running)[2].connected)
    again = Lender(running, 0, LONG, attempt=1, epochs=EPOCHS)
    until(lambda: leases_of(running)[2].finished)
    again.permit()
    assert again.ended() is helper.ended() is None
    check_exact(running)


def test_a_mini_batch_may_have_more_arrays_than_a_message_of_the_server(running: Running) -> None:
    owner, helper = lend(running, arrays=300)
    helper.permit()
    owner.permit()
    assert owner.ended() is helper.ended() is None
    rows = check_exact(running)
    assert {int(row["trained_by"]) for row in rows[rows["lease"] == 2]} == {1}


def test_a_connection_for_rows_that_breaks_is_made_again(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helping, "_AGAIN_SECONDS", 0.0)
    owner, helper = lend(running)
    helper.permit(2)
    until(lambda: leases_of(running)[2].sequence == 1)
    server = owner.helping._rows  # noqa: SLF001 - the network breaks
    assert server is not None
    for channel in [*server._channels]:  # noqa: SLF001 - as above
        channel.hang_up()
    helper.permit()
    until(lambda: 0 not in lending_of(running).offers)
    owner.permit(2)  # its next mini-batch offers the rows again
    until(lambda: leases_of(running)[2].finished)
    owner.permit()
    assert owner.ended() is helper.ended() is None
    rows = check_exact(running)
    assert {int(row["trained_by"]) for row in rows[rows["lease"] == 2]} == {1}


def test_a_worker_that_no_other_one_can_reach_trains_all_its_mini_batches(running: Running) -> None:
    owner = Lender(running, 0, LONG, epochs=EPOCHS, host="192.0.2.1")  # an address of no machine
    helper = Lender(running, 1, SHORT, epochs=EPOCHS)
    helper.permit()
    owner.permit()
    assert owner.ended() is helper.ended() is None
    rows = check_exact(running)
    np.testing.assert_array_equal(rows["trained_by"], rows["worker"])


def test_other_rows_of_the_next_attempt_are_an_error(running: Running) -> None:
    owner, helper = lend(running)
    owner.die()
    assert owner.ended() is None
    again = Lender(running, 0, LONG, attempt=1, epochs=EPOCHS, checksum=8)
    error = again.ended()
    assert isinstance(error, LedgerError)
    assert "has not returned the same rows" in error.message
    helper.die()
    helper.ended()

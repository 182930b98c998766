"""Rules with the trait `rows`: an exchange by rows gives the result of the dense exchange, to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.ps.toy_model import ToyReplica
from support.ps.toy_tables import TableBatch, TableJob, ToyTables

from distkeras.ps import rules
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.rules.base import Chunk, Context, Rule, Traits, WorkerState

#: The rules with the trait, and the hyper-parameters that are drawn for them.
BY_ROWS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "agn": {"window": st.integers(1, 3)},
    "asgd": {},
    "delay_adaptive": {"window": st.integers(1, 3), "threshold": st.none() | st.integers(1, 3)},
    "downpour": {"window": st.integers(1, 3)},
    "dynsgd": {"window": st.integers(1, 3)},
    "ringmaster": {
        "window": st.integers(1, 3),
        "threshold": st.integers(1, 3),
        "patience": st.none() | st.integers(0, 2),
    },
}


def drawn_rule(name: str) -> st.SearchStrategy[Rule]:
    return st.fixed_dictionaries(BY_ROWS[name]).map(lambda values: rules.make(name, **values))


def test_exactly_these_rules_have_the_trait() -> None:
    assert {name for name, kind in rules.center_rules().items() if kind().traits.rows} == set(BY_ROWS)
    assert not rules.make("asgd", weight_decay=0.1).traits.rows


@pytest.mark.parametrize("name", BY_ROWS)
def test_a_rule_by_rows_has_no_trait_that_needs_untouched_rows(name: str) -> None:
    """Other traits need state for rows that no commit names, at the center or at the worker."""
    allowed = {"rows", "gradient", "grows", "overlaps", "refuses", "plain_sgd", "sums"}
    traits = rules.make(name).traits
    for field in dataclasses.fields(Traits):
        if field.name not in allowed:
            assert getattr(traits, field.name) == field.default, field.name


NUMBERS = st.floats(-1e6, 1e6, width=32)


@pytest.mark.parametrize("name", BY_ROWS)
@examples(25)
@given(data=st.data())
def test_a_payload_of_zero_does_not_change_an_element(name: str, data: st.DataObject) -> None:
    rule = data.draw(drawn_rule(name))
    center = np.array(data.draw(st.lists(NUMBERS, min_size=1, max_size=20)), np.float32) + 0
    payload = np.array(data.draw(st.lists(NUMBERS, min_size=center.size, max_size=center.size)), np.float32)
    zero = np.array(data.draw(st.lists(st.booleans(), min_size=center.size, max_size=center.size)))
    payload[zero] = data.draw(st.sampled_from([0.0, -0.0]))
    workers, staleness = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 20))
    rate = data.draw(st.floats(0, 10))
    scalars = rule.accept(Context(workers, 0, 20, staleness, 1, rate, rate), {})

    def applied(elements: np.ndarray) -> np.ndarray:
        chunk = Chunk()
        out = payload[elements].copy()
        chunk.out, chunk.payload, chunk.model, chunk.worker = out, (out,), (), ()
        chunk.center = chunk.sent = center[elements]
        chunk.scratch = np.empty_like(out)
        rule.apply(chunk, scalars)
        return out

    dense = applied(np.arange(center.size))
    np.testing.assert_array_equal(dense[zero].view(np.int32), center[zero].view(np.int32))
    # An element does not depend on the payload of other elements.
    moved = np.flatnonzero(~zero)
    np.testing.assert_array_equal(applied(moved), dense[moved])


@pytest.mark.parametrize("name", BY_ROWS)
@examples(20)
@given(data=st.data())
def test_an_element_that_has_not_moved_has_a_payload_of_zero(name: str, data: st.DataObject) -> None:
    rule = data.draw(drawn_rule(name))
    sent = np.array(data.draw(st.lists(NUMBERS, min_size=2, max_size=9)), np.float32)
    slope = np.zeros_like(sent)
    slope[0] = 1
    replica = ToyReplica(sent.size, 0.1, lambda theta, value: slope, np.float32)
    state: WorkerState = rule.start(replica, sent)
    steps = 1 if rule.traits.gradient else 2
    state.payload = (np.full_like(sent, np.nan),)
    for _ in range(steps):
        rule.compute(replica, state, [TableBatch(0, 0, False, (), np.zeros(1))])
        state.steps += 1
    rule.fill_payload(replica, state)
    assert not state.payload[0][1:].any()


@st.composite
def table_jobs(draw: st.DrawFn, name: str) -> tuple[Rule, ToyTables, list[list[TableBatch]]]:
    """Draw a rule, the initial model and each worker's mini-batches."""
    rule = draw(drawn_rule(name))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    workers, samples = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    sizes = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5)), min_size=1, max_size=3))
    assert isinstance(rule.window, int)
    shapes = tuple(
        TableShape(f"table {number}", rows, width, min(rows, rule.window * samples))
        for number, (rows, width) in enumerate(sizes)
    )
    model = ToyTables(
        rng.normal(size=draw(st.integers(0, 4))).astype(np.float32),
        shapes,
        tuple(rng.normal(size=(shape.rows, shape.width)).astype(np.float32) for shape in shapes),
    )
    return rule, model, [drawn_batches(draw, rng, shapes, samples) for _ in range(workers)]


def drawn_batches(
    draw: st.DrawFn, rng: np.random.Generator, shapes: Sequence[TableShape], samples: int
) -> list[TableBatch]:
    count, epochs = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    return [
        TableBatch(
            epoch,
            index,
            index == count - 1,
            tuple(rng.integers(0, shape.rows, samples) for shape in shapes),
            rng.normal(size=samples),
        )
        for epoch in range(epochs)
        for index in range(count)
    ]


@pytest.mark.parametrize("name", BY_ROWS)
@examples(25)
@given(data=st.data())
def test_an_exchange_by_rows_equals_the_dense_one_to_the_bit(name: str, data: st.DataObject) -> None:
    rule, model, batches = data.draw(table_jobs(name))
    dense = TableJob(rule, model, batches, by_rows=False)
    by_rows = TableJob(rule, model, batches, by_rows=True)
    while dense.pending:
        worker = data.draw(st.sampled_from(sorted(dense.pending)))
        dense.commit(worker)
        by_rows.commit(worker)
        np.testing.assert_array_equal(by_rows.result().view(np.int32), dense.result().view(np.int32))
    assert not by_rows.pending
    assert by_rows.refused == dense.refused
    by_rows_commits, dense_commits = by_rows.center.log.commits(), dense.center.log.commits()
    for column in ("worker", "sequence", "epoch", "first_batch", "last_batch", "clock", "staleness", "learning_rate"):
        np.testing.assert_array_equal(by_rows_commits[column], dense_commits[column])
    np.testing.assert_allclose(by_rows_commits["scale"], dense_commits["scale"], rtol=1e-6)

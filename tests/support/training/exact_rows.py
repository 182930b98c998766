"""A program that trains each model of `table_models` with whole tables and by rows, and reports differences.

It is a program of its own because TensorFlow must have one compute thread: with two, even two trainings with whole
tables differ. It prints a line of JSON that maps each case to None or to its traceback.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from unittest import mock

import hypothesis
import keras
import numpy as np
from hypothesis import strategies as st

from distkeras.data.batches import Batch
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.replica_cache import ReplicaCache
from distkeras.keras_model.table_replica import TableReplica
from support.training.table_models import (
    CASES,
    ROWS,
    SIZE,
    WINDOW,
    CutCase,
    batches_of,
    ids_and_target,
    mixed_precision,
    numbers,
    one_table,
    start_of,
    string_lookup,
    trained_by_rows,
    trained_dense,
    two_calls,
    two_id_inputs,
    two_tables,
    words_ids_and_target,
)


def assert_same(case: CutCase, data: list[Batch], window: int = WINDOW, *, gradient: bool = False) -> None:
    dense = trained_dense(case, data, window, gradient=gradient)
    rows = trained_by_rows(case, data, window, gradient=gradient)
    for name, expected, found in zip(dense._fields, dense, rows, strict=True):
        np.testing.assert_array_equal(found, expected, err_msg=name)
    start, _ = start_of(case.dense())
    tables = case.dense().layout.views(dense.weights - start)[-len(case.cut.tables) :]
    # The tables were trained, but not all of their rows.
    assert all(table.any() and not table.all() for table in tables)


def of_case(name: str) -> None:
    case = CutCase.of(CASES[name].model())
    assert case.cut.tables
    assert not case.cut.kept_dense, case.cut.kept_dense
    assert_same(case, batches_of(CASES[name].draw))


def weighted_rows() -> None:
    assert_same(CutCase.of(one_table()), batches_of(ids_and_target, weighted=True))


def lonely_batches() -> None:
    assert_same(CutCase.of(one_table()), batches_of(ids_and_target, stacked=1))


def a_gradient_rule() -> None:
    for build, draw in ((two_tables, two_id_inputs), (string_lookup, words_ids_and_target)):
        assert_same(CutCase.of(build(), window=1), batches_of(draw, 12), window=1, gradient=True)


def drawn_ids(examples: int = 4) -> None:
    """Compare any ids: all equal, all rows, the first and the last. The first four examples cover all four models."""
    cases = {
        (zero, adagrad): CutCase.of(
            one_table(keras.optimizers.Adagrad(0.5) if adagrad else None, mask_zero=zero), choose="table"
        )
        for zero in (False, True)
        for adagrad in (False, True)
    }
    ids = st.integers(0, ROWS - 1) | st.sampled_from([0, 1, ROWS - 1])

    @hypothesis.settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @hypothesis.given(st.data())
    def check(draws: st.DataObject) -> None:
        case = cases[draws.draw(st.booleans()), draws.draw(st.booleans())]
        generator = np.random.default_rng(0)
        count = draws.draw(st.integers(1, 7))
        sizes = [SIZE] * (count - 1) + [draws.draw(st.integers(1, SIZE))]
        pool = np.array(draws.draw(st.lists(ids, min_size=1, max_size=64)), np.int32)
        data = [
            Batch(0, n, n == count - 1, (generator.choice(pool, (size, 4)),), (numbers(generator, size),), None)
            for n, size in enumerate(sizes)
        ]
        dense, rows = trained_dense(case, data), trained_by_rows(case, data)
        for expected, found in zip(dense, rows, strict=True):
            np.testing.assert_array_equal(found, expected)

    check()


#: The optimizers that `reason_against_rows` refuses, because they give another result by rows.
REFUSED: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "weight decay": lambda: keras.optimizers.SGD(0.5, weight_decay=1e-3),
    "accumulation": lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=2),
    "global norm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.01),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
}


def many_drawn_ids() -> None:
    drawn_ids(60)


def refused_optimizers_differ() -> None:
    for name, optimizer in REFUSED.items():
        refused = CutCase.of(two_tables(optimizer()))
        assert not refused.cut.tables, name
        assert set(refused.cut.kept_dense) == {"narrow", "wide"}, name
        with mock.patch("distkeras.keras_model.tables.reason_against_rows", return_value=None):
            case = CutCase.of(two_tables(optimizer()))
        data = batches_of(two_id_inputs)
        assert not np.array_equal(trained_dense(case, data).weights, trained_by_rows(case, data).weights), name


def used_again() -> None:
    """Check that a replica that another job has trained begins without accumulators of rows."""
    case, data = CutCase.of(one_table(keras.optimizers.Adagrad(0.5))), batches_of(ids_and_target)
    cache, expected = ReplicaCache(), trained_dense(case, data)
    assert case.cut.worker is not None
    replicas = []
    for _ in range(2):
        with cache.lent(case.cut.worker.recipe, case.cut.model_file, case.cut.worker) as replica:
            assert isinstance(replica, TableReplica)
            replicas.append(replica)
            np.testing.assert_array_equal(trained_by_rows(case, data, replica=replica).weights, expected.weights)
    assert replicas[0] is replicas[1]
    other = CutCase.of(one_table(keras.optimizers.Adagrad(0.5)), window=2)
    assert other.cut.worker is not None
    with cache.lent(other.cut.worker.recipe, other.cut.model_file, other.cut.worker) as replica:
        assert replica is not replicas[0]


def steps_of_keras_itself() -> None:
    """Check that whole tables of which a step touches only some rows become the tables that Keras computes."""
    for build, draw in (
        (one_table, ids_and_target),
        (lambda: one_table(keras.optimizers.Adagrad(0.5)), from_the_end),
        (lambda: two_calls(keras.optimizers.Adagrad(0.5)), two_id_inputs),
        (lambda: one_table(keras.optimizers.Adagrad(0.5, 0.0), embeddings_regularizer="l2"), ids_and_target),
        (lambda: one_table(keras.optimizers.Adam(0.01), mask_zero=True), ids_and_target),
        (mixed_precision, ids_and_target),
    ):
        data, trained = batches_of(draw, 12), [build(), build()]
        KerasReplica(trained[0]).train(data)
        with (
            mock.patch("distkeras.keras_model.compiled_steps.read_only_touched_rows", return_value=nullcontext()),
            mock.patch("distkeras.keras_model.compiled_steps.update_only_touched_rows", return_value=nullcontext()),
        ):
            KerasReplica(trained[1]).train(data)
        for found, expected in zip(*(model.get_weights() for model in trained), strict=True):
            np.testing.assert_array_equal(found, expected)


def from_the_end(draw: np.random.Generator, rows: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    (ids,), (target,) = ids_and_target(draw, rows)
    return [ids - ROWS], [target]


OTHERS = (
    steps_of_keras_itself,
    refused_optimizers_differ,
    used_again,
    weighted_rows,
    lonely_batches,
    a_gradient_rule,
    drawn_ids,
    many_drawn_ids,
)


def cases() -> dict[str, Callable[[], None]]:
    checks: dict[str, Callable[[], None]] = {name: partial(of_case, name) for name in CASES}
    return checks | {check.__name__.replace("_", " "): check for check in OTHERS}


def main(names: list[str]) -> None:
    found: dict[str, str | None] = {}
    for name, check in cases().items():
        if names and name not in names:
            continue
        try:
            check()
            found[name] = None
        except Exception:  # noqa: BLE001 - each case reports its outcome
            found[name] = traceback.format_exc()
    print(json.dumps(found))  # noqa: T201 - the program's output


if __name__ == "__main__":
    main(sys.argv[1:])

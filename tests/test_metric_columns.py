"""Every metric has a column of its own, in Spark too, for any name; arrays are put together again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distkeras.analysis.metrics import averaged, with_elements
from distkeras.metric_columns import RESERVED, arrays_of, columns_of, elements_of, in_columns, with_arrays
from distkeras.ps.center.commit_log import COMMIT
from distkeras.results import JobRecords


@pytest.mark.parametrize(
    ("metrics", "columns"),
    [
        (["loss", "accuracy"], ["loss", "accuracy"]),
        (["loss", "auc", "AUC"], ["loss", "auc", "AUC_2"]),
        (["loss", "AUC", "auc", "auc_2"], ["loss", "AUC", "auc_3", "auc_2"]),
        (["loss", "worker", "Samples"], ["loss", "worker_2", "Samples_2"]),
    ],
)
def test_a_name_that_is_taken_gets_a_number(metrics: list[str], columns: list[str]) -> None:
    assert list(columns_of(metrics).values()) == columns
    assert in_columns(dict.fromkeys(metrics, 1.0)) == dict.fromkeys(columns, 1.0)


NAMES = st.lists(st.sampled_from(["loss", "auc", "AUC", "Auc_2", "auc_2", "auc_3", *RESERVED, "STEPS", "x[0]", "x"]))


@given(NAMES.map(lambda names: list(dict.fromkeys(names))))
def test_no_two_columns_are_equal_without_regard_to_case(metrics: list[str]) -> None:
    columns = columns_of(metrics)
    assert list(columns) == metrics
    folded = [column.casefold() for column in columns.values()]
    assert len({*folded, *RESERVED}) == len(metrics) + len(RESERVED)
    assert sorted(place for places in arrays_of(metrics).values() for place in places) == list(range(len(metrics)))


def test_arrays_are_put_together_from_their_elements() -> None:
    metrics = ["loss", *elements_of("f1", (2,)), *elements_of("one", (1,)), *elements_of("accuracy", ()), "x[3]"]
    assert arrays_of(metrics) == {"loss": [0], "f1": [1, 2], "one": [3], "accuracy": [4], "x[3]": [5]}
    whole = with_arrays(dict(zip(metrics, map(float, range(6)), strict=True)))
    np.testing.assert_array_equal(whole.pop("f1"), [1.0, 2.0])
    np.testing.assert_array_equal(whole.pop("one"), [3.0])
    assert whole == {"loss": 0.0, "accuracy": 4.0, "x[3]": 5.0}


def records(*metrics: str) -> JobRecords:
    """Return the records of two steps of worker 3; the metrics of the first are 10, 11 and so on, of the second 20."""
    commits = np.zeros(1, COMMIT)
    commits["worker"], commits["steps"], commits["last_batch"] = 3, 2, 1
    steps = [[1.5 + step, 4.0, *(10.0 * (step + 1) + n for n in range(len(metrics)))] for step in range(2)]
    return JobRecords(commits, np.array(steps), metrics)


@pytest.mark.parametrize("name", ["worker", "epoch", "iteration", "timestamp", "samples", "Worker", "LOSS"])
def test_history_keeps_its_own_columns_and_each_metric(name: str) -> None:
    table = records("loss", name).history()
    values: dict[str, list[Any]] = table.to_pydict()
    assert values.pop(f"{name}_2") == [11.0, 21.0]
    assert len(values.pop("timestamp")) == 2
    expected = {"worker": [3, 3], "epoch": [0, 0], "iteration": [0, 1], "loss": [10.0, 20.0], "samples": [4, 4]}
    assert values == expected


def test_history_has_arrays_that_curves_read_as_numbers() -> None:
    given = records("loss", "f1[0]", "f1[1]", "seconds")
    history = given.history()
    assert history["f1"].to_pylist() == [[11.0, 12.0], [21.0, 22.0]]
    assert given.history(elements=True)["f1[1]"].to_pylist() == [12.0, 22.0]
    frame = with_elements(history.to_pandas())
    assert frame["f1[1]"].tolist() == [12.0, 22.0]
    curve = averaged(history.to_pandas(), every=10)
    pd.testing.assert_series_equal(curve["seconds_2"], pd.Series([18.0], name="seconds_2"))
    assert curve["f1[0]"].tolist() == [16.0]

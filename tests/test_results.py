"""The tables of a job's records, and the check that every mini-batch counted once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from distkeras import rules
from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.errors import LedgerError
from distkeras.ps.server.start_report import ResumePoint
from distkeras.results import JobRecords


def records(
    ranges: Sequence[tuple[int, int, int, int]],
    *,
    metrics: tuple[str, ...] = ("loss",),
    gap: float = np.nan,
) -> JobRecords:
    """Return records of commits ``(worker, epoch, first, last)`` by clock; a step's loss is its overall number."""
    commits = np.zeros(len(ranges), COMMIT)
    steps: list[Any] = []
    for clock, (worker, epoch, first, last) in enumerate(ranges):
        commits[clock]["clock"] = clock
        for name, value in (("worker", worker), ("epoch", epoch), ("first_batch", first), ("last_batch", last)):
            commits[clock][name] = value
        commits[clock]["steps"] = last - first + 1
        commits[clock]["gap"] = gap
        commits[clock]["timestamp"] = 1.5 + clock
        for _ in range(first, last + 1):
            steps.append([10.25 + len(steps), 4, *([float(len(steps))] * len(metrics))])
    rows = np.array(steps, np.float64).reshape(-1, 2 + len(metrics))
    return JobRecords(commits, rows, tuple(metrics))


class TestEpochs:
    def test_a_row_has_means_over_samples_and_the_evaluation_at_its_end(self) -> None:
        made = records([(0, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, 1)])  # losses 0, 1, 2 and 3, 4
        made.steps_array[0, 1] = 2  # the first mini-batch has half of the samples
        points = [{"epoch": 1.2, "clock": 2, "seconds": 0.1, "rows": 5, "accuracy": 0.5, "loss": 7.0}]
        table = made.epochs(points)
        assert table.column_names == ["epoch", "samples", "loss", "val_loss", "val_accuracy"]
        assert table["loss"].to_pylist() == [(0 * 2 + 1 * 4 + 2 * 4) / 10, 3.5]
        assert table["val_loss"].to_pylist() == [7.0, None]

    def test_a_job_without_commits_has_the_columns(self) -> None:
        assert records([]).epochs().schema.names == ["epoch", "samples", "loss"]


class TestHistory:
    INTERLEAVED = ((1, 0, 0, 1), (0, 0, 0, 0), (1, 0, 2, 2), (0, 0, 1, 2), (1, 1, 0, 2), (0, 1, 0, 2))

    def test_rows_are_ordered_by_worker_and_iterations_have_no_gap(self) -> None:
        table = records(self.INTERLEAVED).history()
        assert table["worker"].to_pylist() == [0] * 6 + [1] * 6
        assert table["iteration"].to_pylist() == [0, 1, 2, 3, 4, 5] * 2
        assert table["epoch"].to_pylist() == [0, 0, 0, 1, 1, 1] * 2
        # The losses are the numbers of the steps in the order of the commits.
        assert table["loss"].to_pylist() == [2, 4, 5, 9, 10, 11, 0, 1, 3, 6, 7, 8]

    def test_columns_have_these_types(self) -> None:
        table = records(self.INTERLEAVED, metrics=("loss", "accuracy")).history()
        assert table.schema == pa.schema(
            [
                ("worker", pa.int32()),
                ("epoch", pa.int32()),
                ("iteration", pa.int64()),
                ("timestamp", pa.timestamp("us", tz="UTC")),
                ("loss", pa.float64()),
                ("accuracy", pa.float64()),
                ("samples", pa.int64()),
            ]
        )
        assert table["samples"].to_pylist() == [4] * 12
        assert table["timestamp"].cast(pa.int64())[6].as_py() == 10_250_000

    def test_tables_without_commits_are_empty(self) -> None:
        empty = records([])
        assert empty.history().num_rows == 0
        assert empty.commits().num_rows == 0
        assert empty.ledger().num_rows == 0


def test_the_share_that_reaches_the_center_is_what_the_rule_sends_times_its_scale() -> None:
    made = records([(0, 0, 0, 9), (1, 0, 0, 3), (0, 0, 10, 19)])
    made.commits_array["scale"] = [1.0, 0.5, 0.0]  # the last one was skipped
    for name, share in (("downpour", 0.75), ("agn", (1 / 10 + 0.5 / 4) / 2), ("adag", (1 / 10 + 0.5 / 4) / 2)):
        assert made.share_moved(rules.make(name)) == pytest.approx(share)
    assert made.share_moved(rules.make("adag", normalize=False)) == 0.75
    assert records([]).share_moved(rules.make("agn")) == 1.0


class TestCommits:
    def test_the_gap_is_null_unless_it_is_measured(self) -> None:
        assert records([(0, 0, 0, 0)]).commits()["gap"].to_pylist() == [None]
        assert records([(0, 0, 0, 0)], gap=0.0).commits()["gap"].to_pylist() == [0.0]

    def test_columns_have_these_types(self) -> None:
        schema = records([(0, 0, 0, 0)]).commits().schema
        assert schema.field("worker").type == pa.int32()
        assert schema.field("clock").type == pa.int64()
        assert schema.field("wait").type == pa.float64()
        assert schema.field("timestamp").type == pa.timestamp("us", tz="UTC")

    def test_the_ledger_has_the_mini_batches_of_each_commit(self) -> None:
        ledger = records([(0, 0, 0, 2), (0, 0, 3, 3)]).ledger()
        assert ledger["first_batch"].to_pylist() == [0, 3]
        assert ledger["last_batch"].to_pylist() == [2, 3]


class TestExactlyOnce:
    def test_a_complete_ledger_passes(self) -> None:
        records([(0, 0, 0, 1), (1, 0, 0, 0), (0, 0, 2, 2), (1, 1, 0, 0), (0, 1, 0, 2)]).check_exactly_once(
            {0: 3, 1: 1}, 2
        )

    def test_clock_order_is_not_needed(self) -> None:
        records([(0, 0, 2, 2), (0, 0, 0, 1)]).check_exactly_once({0: 3}, 1)

    @pytest.mark.parametrize(
        "ranges",
        [
            [(0, 0, 0, 1)],  # the end is missing
            [(0, 0, 1, 2)],  # the start is missing
            [(0, 0, 0, 0), (0, 0, 2, 2)],  # the middle is missing
            [(0, 0, 0, 1), (0, 0, 1, 2)],  # one mini-batch is counted twice
            [(0, 0, 0, 2), (0, 0, 0, 2)],  # all are counted twice
            [(0, 0, 0, 3)],  # one mini-batch too many
            [],
        ],
    )
    def test_a_mini_batch_that_is_missing_or_repeated_is_an_error(
        self, ranges: list[tuple[int, int, int, int]]
    ) -> None:
        with pytest.raises(LedgerError, match="exactly once: 0 to 2 in epoch 0") as caught:
            records(ranges).check_exactly_once({0: 3}, 1)
        assert caught.value.worker == 0

    def test_a_missing_epoch_is_an_error(self) -> None:
        with pytest.raises(LedgerError, match="in epoch 1"):
            records([(0, 0, 0, 2)]).check_exactly_once({0: 3}, 2)

    def test_an_unknown_count_is_that_of_the_first_epoch(self) -> None:
        records([(0, 0, 0, 2), (0, 1, 0, 2)]).check_exactly_once({0: -1}, 2)
        with pytest.raises(LedgerError, match="in epoch 1"):
            records([(0, 0, 0, 2), (0, 1, 0, 1)]).check_exactly_once({0: -1}, 2)

    @pytest.mark.parametrize(
        "ranges",
        [[(0, 0, 0, 1)], [(0, 0, 0, 2)], [(0, 0, 0, 2), (0, 1, 0, 0)], [(0, 0, 0, 2), (0, 1, 0, 2), (0, 2, 0, 1)], []],
    )
    @pytest.mark.parametrize("known", [3, -1])
    def test_a_job_that_ended_early_has_a_prefix_of_its_mini_batches(
        self, ranges: list[tuple[int, int, int, int]], known: int
    ) -> None:
        records(ranges).check_exactly_once({0: known}, 3, stopped=True)

    @pytest.mark.parametrize(
        "ranges",
        [
            [(0, 0, 1, 2)],  # the start is missing
            [(0, 0, 0, 0), (0, 0, 2, 2)],  # the middle is missing
            [(0, 0, 0, 1), (0, 0, 1, 2)],  # one mini-batch is counted twice
            [(0, 0, 0, 1), (0, 1, 0, 0)],  # epoch 0 is incomplete
            [(0, 1, 0, 0)],  # epoch 0 is missing
            [(0, 0, 0, 3)],  # one mini-batch too many
        ],
    )
    def test_other_mini_batches_of_a_job_that_ended_early_are_an_error(
        self, ranges: list[tuple[int, int, int, int]]
    ) -> None:
        with pytest.raises(LedgerError, match="exactly once"):
            records(ranges).check_exactly_once({0: 3}, 3, stopped=True)

    def test_a_skipped_commit_is_in_the_ledger_and_not_in_the_commits(self) -> None:
        found = records([(0, 0, 0, 1), (0, 0, 2, 2)])
        found.commits_array["skipped"][1] = 1
        found.check_exactly_once({0: 3}, 1)
        assert found.ledger()["applied"].to_pylist() == [True, False]
        assert found.commits()["clock"].to_pylist() == [0]
        assert found.history().num_rows == 3

    def test_lost_records_explain_only_as_many_missing_mini_batches(self) -> None:
        found = records([(0, 0, 2, 2), (0, 1, 0, 2)])
        found.missing = 2
        found.check_exactly_once({0: 3}, 2)
        found.missing = 1
        with pytest.raises(LedgerError, match=r"for 1 whose records were lost\. Received: 2"):
            found.check_exactly_once({0: 3}, 2)
        found.check_exactly_once({0: 3}, 2, stopped=True)
        for ranges in ([(0, 0, 0, 1), (0, 0, 1, 2)], [(0, 0, 1, 3)]):
            found = records(ranges)
            found.missing = 9
            with pytest.raises(LedgerError, match="no mini-batch must be committed twice, and none beyond"):
                found.check_exactly_once({0: 3}, 1)

    @pytest.mark.parametrize("exact", [False, True], ids=["in this job", "in one before"])
    def test_commits_of_another_number_of_workers_do_not_count(self, exact: bool) -> None:
        """Two workers train epoch 0 and a part of epoch 1; after a resume, one worker trains epochs 1 and 2."""
        others = [(0, 0, 0, 1), (1, 0, 0, 1), (0, 1, 0, 0)]
        own = [(0, 1, 0, 3), (0, 2, 0, 3)]
        clock, epoch = (4, 0) if exact else (3, 1)
        resumed = ResumePoint(clock, 2, exact, epoch, began_clock=3, began_epoch=1)
        records([*others, *own]).check_exactly_once({0: 4}, 3, resumed)
        with pytest.raises(LedgerError, match="exactly once"):
            records([*others, *own[:1]]).check_exactly_once({0: 4}, 3, resumed)

    def test_a_worker_without_rows_passes(self) -> None:
        records([]).check_exactly_once({0: 0}, 3)

    def test_a_worker_that_no_task_reported_is_an_error(self) -> None:
        with pytest.raises(LedgerError):
            records([(1, 0, 0, 0)]).check_exactly_once({0: 1}, 1)

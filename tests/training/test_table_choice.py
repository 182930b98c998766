"""Automatic choice of tables: which travel by rows, and the reasons why others stay dense."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest

from distkeras import Monitoring, Network, Trainer
from distkeras.keras_model.tables import CutModel
from distkeras.ps.checkpoint.ownership import Claim, Name
from distkeras.ps.checkpoint.store import Store
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import make
from distkeras.training.plan import TableChoice

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="with other backends, tables stay dense"
)

BOTH = ["narrow", "wide"]
IDS = 4


def one_table(optimizer: Any = None, *names: str) -> keras.Model:
    keras.utils.set_random_seed(1)
    ids = keras.Input((IDS,), dtype="int32")
    tables = [keras.layers.Embedding(40_000, 8 + n, name=name)(ids) for n, name in enumerate(names or ["table"])]
    hidden = [keras.layers.Flatten()(rows) for rows in tables]
    joined = keras.layers.Concatenate()(hidden) if len(hidden) > 1 else hidden[0]
    model = keras.Model(ids, keras.layers.Dense(1)(joined))
    model.compile(optimizer or keras.optimizers.SGD(0.1), "mse")
    return model


def two_tables(optimizer: Any = None) -> keras.Model:
    return one_table(optimizer, *BOTH)


def chosen(
    model: keras.Model,
    rule: Any = "downpour",
    *,
    stream: bool = False,
    resumed: Path | None = None,
    backend: str = "tensorflow",
    **options: Any,
) -> CutModel:
    rule = make(rule, window=3) if isinstance(rule, str) else rule
    trainer = Trainer(model, rule, batch_size=4, **options)
    choice = TableChoice(
        training=trainer.settings,
        server=trainer.server_settings,
        worker=trainer.worker_settings,
        recipe=replace(trainer.recipe, backend=backend),
        shapes=[tuple(tensor.shape[1:]) for tensor in model.inputs],
        stream=stream,
        resumed=None if resumed is None else str(resumed),
    )
    build = partial(trainer.recipe.build, trainer.model_file)
    return choice.cut(build(), lambda: build(to_train=True))


def names(cut: CutModel) -> list[str]:
    return [table.name for table in cut.tables]


def save_job(folder: Path, job: dict[str, Any], clock: int = 7) -> None:
    Store(str(folder)).save(str(Name("snapshot", Claim(1, "0" * 8), clock, clock)), {"job": job}, {})


def test_tables_travel_by_rows_by_default() -> None:
    cut = chosen(two_tables(keras.optimizers.Adagrad(0.1)))
    assert (names(cut), cut.kept_dense) == (BOTH, {})


@pytest.mark.slow
def test_the_choice_does_not_change_the_seeds_of_later_layers() -> None:
    states = []
    for tables in ("auto", "dense"):
        chosen(two_tables(), tables=tables)  # building a model sets a seed first
        states.append(random.getstate())
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("rule", "options", "reason"),
    [
        ("easgd", {}, "rule 'easgd' may move rows"),
        pytest.param(
            "downpour", {"network": Network(wire_format="int8")}, "wire_format='int8'", marks=pytest.mark.slow
        ),
        pytest.param("downpour", {"network": Network(overlap=True)}, "`overlap`", marks=pytest.mark.slow),
        pytest.param("downpour", {"network": Network(relays="host")}, "`relays`", marks=pytest.mark.slow),
        pytest.param("downpour", {"monitoring": Monitoring(measure_gap=True)}, "`measure_gap`", marks=pytest.mark.slow),
        pytest.param("downpour", {"frozen_weights": "some.keras"}, "`frozen_weights`", marks=pytest.mark.slow),
        pytest.param(
            "downpour",
            {"worker_optimizer": "adam"},
            "Adam may move rows that a step does not touch; LazyAdam, of",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "downpour",
            {"worker_optimizer": keras.optimizers.SGD(0.1, momentum=0.9)},
            "LazyMomentum, of",
            marks=pytest.mark.slow,
        ),
        pytest.param(make("agn", window="auto"), {}, "window='auto'", marks=pytest.mark.slow),
        ("downpour", {"tables": ["wide"], "worker_optimizer": "LazyAdam"}, None),
        pytest.param("downpour", {"tables": ["wide"], "stream": True}, None, marks=pytest.mark.slow),
    ],
)
def test_options_that_exclude_rows_keep_tables_dense_with_a_reason(
    rule: Any, options: dict[str, Any], reason: str | None
) -> None:
    cut = chosen(two_tables(), rule, **options)
    if reason is None:
        assert names(cut) == ["wide"]
        return
    assert (names(cut), list(cut.kept_dense)) == ([], BOTH)
    assert all(reason in text for text in cut.kept_dense.values())


@pytest.mark.slow
def test_tables_stay_dense_with_a_backend_that_may_add_in_another_order() -> None:
    cut = chosen(one_table(), backend="jax")
    assert cut.kept_dense == {"table": "jax may add up their rows in another order"}
    assert names(chosen(one_table(), backend="jax", tables=["table"])) == ["table"]


def test_a_model_that_cannot_be_cut_is_trained_whole() -> None:
    def fails(*arguments: Any, **options: Any) -> CutModel:
        raise TypeError("an unusual layer")

    with mock.patch("distkeras.training.plan.cut", fails):
        cut = chosen(one_table())
        assert cut.kept_dense == {"table": "the model cannot be cut: TypeError: an unusual layer"}
        with pytest.raises(TypeError, match="unusual"):
            chosen(one_table(), tables=["table"])
    bug = mock.patch("distkeras.training.plan.cut", side_effect=KeyError("a bug of ours"))
    with bug, pytest.raises(KeyError, match="a bug of ours"):
        chosen(one_table())


def test_a_model_without_a_table_is_not_cut() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with mock.patch("distkeras.training.plan.cut", side_effect=AssertionError):
        assert chosen(model) == CutModel({})


class TestResumedJob:
    """A resumed job continues with the choice that was saved."""

    @pytest.mark.parametrize("job", [{}, pytest.param({"tables": None}, marks=pytest.mark.slow)])
    def test_dense_tables_stay_dense(self, tmp_path: Path, job: dict[str, Any]) -> None:
        save_job(tmp_path, job)
        assert chosen(two_tables(), resumed=tmp_path).kept_dense == dict.fromkeys(
            BOTH, "they are dense in the job that is resumed"
        )

    def test_the_same_tables_travel_by_rows(self, tmp_path: Path) -> None:
        save_job(tmp_path, {"tables": BOTH}, 6)
        save_job(tmp_path, {"tables": ["wide"]})
        assert names(chosen(two_tables(), resumed=tmp_path)) == ["wide"]

    def test_a_snapshot_that_cannot_be_read_is_skipped(self, tmp_path: Path) -> None:
        save_job(tmp_path, {"tables": ["wide"]}, 6)
        save_job(tmp_path, {"tables": ["narrow"]})
        (latest,) = tmp_path.glob("snapshot-*7.dks")
        latest.write_bytes(latest.read_bytes()[:20])
        assert names(chosen(two_tables(), resumed=tmp_path)) == ["wide"]

    @pytest.mark.slow
    def test_a_job_without_a_snapshot_chooses_as_a_new_one(self, tmp_path: Path) -> None:
        assert names(chosen(two_tables(), resumed=tmp_path)) == BOTH
        assert names(chosen(two_tables(), resumed=tmp_path / "elsewhere")) == BOTH
        assert not (tmp_path / "elsewhere").exists()

    def test_options_that_exclude_the_saved_choice_are_refused(self, tmp_path: Path) -> None:
        save_job(tmp_path, {"tables": BOTH})
        with pytest.raises(
            ConfigurationError, match=r"`checkpoint` must hold .*one whose \['narrow', 'wide'\].*`overlap`"
        ):
            chosen(two_tables(), resumed=tmp_path, network=Network(overlap=True))


def test_names_are_an_error_if_rows_cannot_travel() -> None:
    with pytest.raises(ConfigurationError, match=r'`tables` must be "auto" or "dense".*`overlap`'):
        chosen(one_table(), tables="table", network=Network(overlap=True))
    np.testing.assert_equal(names(chosen(one_table(), tables="dense")), [])

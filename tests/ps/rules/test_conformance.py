"""The conformance suite of the rules: each rule in the list of rules is tested."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.present import present
from support.ps.toy_model import ToyJob

from distkeras.ps import rules
from distkeras.ps.center.center import Center
from distkeras.ps.checkpoint.state import State, capture, restore
from distkeras.ps.checkpoint.store import Store
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.messages import Commit
from distkeras.ps.rules.base import BLOCK

NAMES = list(rules.center_rules())
SCHEDULE = [0, 1, 0, 1, 1, 0, 1, 0]


def job(name: str, *, block: int = BLOCK, size: int = 7, workers: int = 2, dtype: Any = np.float32) -> ToyJob:
    rng = np.random.default_rng(1)
    kind = rules.center_rules()[name]
    rule = kind() if kind.__dataclass_fields__["window"].default is None else kind(window=1)
    data = list(rng.normal(size=(workers, 12, size)))
    return ToyJob(rule, rng.normal(size=size), data, dtype=dtype, block=block, measure_gap=True)


def run(toy: ToyJob) -> np.ndarray:
    if toy.rule.window is None:
        return toy.run(range(len(toy.replicas)))
    return toy.run(SCHEDULE)


@pytest.mark.parametrize("name", NAMES)
@examples(15)
@given(block=st.integers(1, 9))
def test_chunked_application_equals_whole_application_to_the_bit(name: str, block: int) -> None:
    np.testing.assert_array_equal(run(job(name, block=block)), run(job(name)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", NAMES)
def test_the_dtype_and_the_shape_of_the_center_never_change(name: str, dtype: type[float]) -> None:
    toy = job(name, dtype=dtype)
    run(toy)
    assert toy.theta.dtype == dtype
    assert toy.theta.shape == (7,)
    assert np.isfinite(toy.theta).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_published_version_never_changes(name: str) -> None:
    toy = job(name)
    versions = []
    for worker in range(2) if toy.rule.window is None else SCHEDULE:
        version = toy.center.inspect().buffer
        versions.append((version.array, version.array.copy()))
        toy.commit(worker)
    if not toy.rule.traits.view:  # a rule with a view updates the center in place and sends copies
        for array, copy in versions:
            np.testing.assert_array_equal(array, copy)


def job_half_way(name: str) -> ToyJob:
    """Return a job that has applied some commits; for a rule with rounds, it is in the middle of a round."""
    toy = job(name)
    toy.run([0] if toy.rule.window is None else SCHEDULE[:5])
    return toy


def continue_job(center: Center) -> Iterator[tuple[np.ndarray, float]]:
    """Yield the replies and centers of four exchanges of each worker; payloads are the same for each call."""
    rng = np.random.default_rng(2)
    for worker in [0, 1, 1, 0, 1, 0, 0, 1]:
        payload = [rng.normal(size=center.size).astype(np.float32) for _ in range(center.traits.parts)]
        if not center.scheduler.ready(worker):
            continue
        released = center.release(worker, 0)
        yield released.buffer.array.copy(), released.learning_rate
        lease = center.leases[worker]
        commit = Commit(
            worker=worker,
            attempt=0,
            incarnation=center.incarnation,
            sequence=lease.sequence + 1,
            epoch=lease.epoch,
            first=lease.batch,
            last=lease.batch,
            epoch_end=False,
            wants_center=not center.traits.pull_first,
            learning_rate=0.1,
            scale=1.0,
            waited=0.0,
            parts=tuple(payload),
        )
        center.commit(commit, [center.pool.adopt(part) for part in payload])
        yield center.current.array.copy(), center.clock


@pytest.mark.parametrize("name", NAMES)
def test_the_state_survives_a_snapshot(name: str, tmp_path: Path) -> None:
    toy = job_half_way(name)
    state = capture(toy.center)
    store = Store(str(tmp_path))
    store.save("state", state.header, state.arrays)
    restored = job(name).center
    restored.leases.clear()
    restore(restored, State(*store.load("state")), same_attempts=True)

    copy = capture(restored)
    assert copy.header == state.header
    assert copy.arrays.keys() == state.arrays.keys()
    for key, array in state.arrays.items():
        np.testing.assert_array_equal(copy.arrays[key], array)
        assert copy.arrays[key].dtype == array.dtype

    # The snapshot is complete: both centers continue equally, to the bit.
    for worker in range(2):
        restored.join(worker, 0)
    for (expected, expected_number), (actual, number) in zip(
        continue_job(toy.center), continue_job(restored), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)
        assert number == expected_number


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_survives_json(name: str) -> None:
    rule = rules.make(name)
    assert rules.make(rule.name.upper(), **json.loads(json.dumps(rule.config()))) == rule


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("agn", {"window": np.int64(3)}),
        ("asgd", {"window": np.int32(1), "weight_decay": np.float32(0.5)}),
        ("eamsgd", {"rho": np.float32(0.5), "momentum": np.float32(0.25), "learning_rate": np.float64(0.5)}),
        ("dc_asgd", {"decay": np.float32(0.5), "compensation": np.int64(2)}),
        ("adag", {"gamma": np.float32(0.5)}),
    ],
)
def test_numbers_of_numpy_become_numbers_of_python(name: str, given: dict[str, Any]) -> None:
    config = rules.make(name, **given).config()
    assert {key: config[key] for key in given} == given
    assert json.loads(json.dumps(config)) == config


@pytest.mark.parametrize("name", rules.all_rules())
def test_the_info_of_a_rule_is_complete(name: str) -> None:
    info = rules.all_rules()[name].info
    assert all(vars(info).values())
    assert info.bibtex.startswith("@")
    assert f"| `{name}` |" in rules.table()


@pytest.mark.parametrize("name", rules.all_rules())
def test_the_docstring_of_a_rule_names_its_source(name: str) -> None:
    assert "Reference:" in present(rules.all_rules()[name].__doc__)


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_window_is_refused(name: str) -> None:
    for window in (0, -1, 1.5, "2", True):
        with pytest.raises(ConfigurationError, match="`window` must be"):
            rules.make(name, window=window)


def test_an_unknown_rule_and_an_unknown_hyper_parameter_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="`rule` must be one of"):
        rules.make("adam")
    with pytest.raises(ConfigurationError, match=r"`rule` must be one of.*Received: rule=5"):
        rules.make(cast("Any", 5))
    with pytest.raises(ConfigurationError, match="takes window"):
        rules.make("downpour", rho=1)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("aeasgd", {"rho": -1.0}),
        ("aeasgd", {"rho": 5.0, "learning_rate": 0.2}),
        ("easgd", {"early_stopping": "2.8"}),
        ("eamsgd", {"momentum": 1.0}),
        ("adag", {"gamma": 0.0}),
        ("adag", {"gamma": float("nan")}),
        ("adag", {"form": "4.2"}),
        ("adag", {"algorithm": 14}),
        ("asgd", {"window": 2}),
        ("diloco", {"server_rate": 0.0}),
        ("diloco", {"momentum": 1.0}),
        ("diloco", {"nesterov": 0.5}),
        ("diloco", {"window": "auto"}),
        ("fedopt", {"form": "adamw"}),
        ("fedopt", {"server_rate": 0.0}),
        ("fedopt", {"beta_1": 1.0}),
        ("fedopt", {"beta_2": -0.1}),
        ("fedopt", {"epsilon": 0.0}),
        ("delayed_nesterov", {"period": 0}),
        ("delayed_nesterov", {"activation": 1.01}),
        ("mla", {"reach": -1.0}),
        ("mla", {"momentum": 1.0}),
        ("delay_adaptive", {"threshold": 0}),
        ("ringmaster", {"threshold": 0}),
        ("ringmaster", {"patience": -1}),
        ("ringmaster", {"window": None}),
        ("fedbuff", {"buffer": 0}),
        ("fedbuff", {"exponent": -0.5}),
        ("fedbuff", {"server_rate": 0.0}),
        ("fedbuff", {"nesterov": "yes"}),
        ("fadas", {"buffer": 1.5}),
        ("fadas", {"delay_threshold": 0}),
        ("fadas", {"epsilon": 0.0}),
    ],
)
def test_bad_hyper_parameters_are_refused(name: str, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="Received"):
        rules.make(name, **bad)

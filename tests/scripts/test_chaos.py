from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from chaos.injector import KINDS, plan
from support.patience import patience

SCRIPT = Path(__file__).parents[1] / "chaos"


def test_a_plan_is_determined_by_its_seed() -> None:
    assert plan(3, 300) == plan(3, 300)
    assert plan(3, 300) != plan(4, 300)


def test_a_longer_plan_starts_with_the_shorter_one() -> None:
    short, long = plan(5, 100), plan(5, 200)
    assert len(short) < len(long)
    assert long[: len(short)] == short


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_of_ten_minutes_has_many_faults_of_all_kinds_in_order(seed: int) -> None:
    faults = plan(seed, 600)
    kinds = Counter(fault.kind for fault in faults)
    assert len(faults) >= 60
    assert kinds.keys() == KINDS.keys()
    assert max(kinds.values()) - min(kinds.values()) <= 1
    assert all(one.at <= other.at for one, other in pairwise(faults))
    assert all(0 < fault.at < 600 and 0 <= fault.pick < 1 for fault in faults)
    for fault in faults:
        shortest, longest = KINDS[fault.kind]
        assert shortest <= fault.lasts <= longest


def test_no_fault_is_planned_before_the_first_job_can_have_started() -> None:
    assert plan(1, 1.0) == []


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.skipif(sys.platform != "linux", reason="stops and cuts what other systems do not let one")
def test_a_short_run_keeps_every_promise(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--minutes", "0.4", "--seed", "1", "--out", str(tmp_path)],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=patience(600),
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "every promise was kept" in done.stdout
    assert " duplicated 0, lost 0" in done.stdout

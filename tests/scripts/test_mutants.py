"""Tests that planted faults fit the present sources; `python tests/mutants` checks in minutes that tests find them."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
from mutants.catalog import FAULTS, MUTANTS, Mutant
from mutants.command import main

ROOT = Path(__file__).parents[2]
FAULT = Mutant(
    "an error without its worker",
    "ps/errors.py",
    "        self.worker = worker\n",
    "        self.worker = None\n",
    "no one knows which worker it was",
    ("tests/ps/test_errors.py",),
)
#: A replacement of the tests, which would take longer.
TEST = ("-c", "from distkeras.ps.errors import DeadlineError; assert DeadlineError('late', worker=3).worker == 3")


def test_each_mutant_applies_once_and_is_valid_python() -> None:
    wrong = []
    for mutant in FAULTS:
        try:
            ast.parse(mutant.applied(ROOT))
        except (ValueError, SyntaxError) as error:
            wrong.append(f"{mutant.name}: {error}")
        missing = [test for test in mutant.tests if not (ROOT / test.partition("::")[0]).exists()]
        wrong += [f"{mutant.name}: {test} must be there" for test in missing]
    assert not wrong, "\n".join(wrong)


def test_there_are_many_mutants_and_each_is_unique() -> None:
    assert len(MUTANTS) >= 60
    assert len({mutant.name for mutant in FAULTS}) == len(FAULTS)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_a_verdict_follows_from_the_status_of_the_tests(capsys: pytest.CaptureFixture[str]) -> None:
    no_fault = dataclasses.replace(FAULT, name="no fault", new=FAULT.old + "\n")
    declared = dataclasses.replace(no_fault, name="declared", equivalent="an empty line more")
    assert main([], [FAULT, declared], TEST) == 0
    assert capsys.readouterr().out.splitlines() == [
        "caught         ps/errors.py: an error without its worker",
        "equivalent     ps/errors.py: declared",
        "1 caught, 1 equivalent",
    ]
    wrong = {
        "survived": no_fault,
        "does not apply": dataclasses.replace(FAULT, old="this is nowhere"),
        "not equivalent": dataclasses.replace(FAULT, equivalent="no caller asks"),
    }
    for verdict, mutant in wrong.items():
        assert main([], [mutant], TEST) == 1
        assert capsys.readouterr().out.startswith(verdict)
    assert main([], [FAULT], ("-c", "assert False")) == 1
    assert capsys.readouterr().out.startswith("tests fail")

"""Run whole jobs in virtual time, each with its own faults and order of events, and search for broken promises.

The seed of a run that breaks one is printed. The run is reduced while it still breaks the promise, and its story is
printed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from simulation.mutations import MUTATIONS, planted
from simulation.plan import KINDS, Plan, draw
from simulation.planting import REPLACEMENTS, divides, simulated
from simulation.shrink import shrink
from simulation.simulation import Outcome, simulate

#: The number of runs after which garbage is collected.
_RUNS_A_COLLECTION = 50


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status, which is 1 if a promise broke or a planted fault was not found."""
    parser = argparse.ArgumentParser(prog="python tests/simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000, metavar="N", help="runs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first one (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of faults (default: all)")
    parser.add_argument("--divided", action="store_true", help="run only jobs with shards")
    parser.add_argument(
        "--story", action="store_true", help="print the story of the first run even if no promise breaks"
    )
    parser.add_argument("--findings", type=int, default=3, metavar="N", help="end after so many (default: %(default)s)")
    parser.add_argument(
        "--planted",
        nargs="*",
        metavar="NAME",
        choices=[*MUTATIONS, *REPLACEMENTS],
        help="plant faults in the code, in turn: these, of this program or of tests/mutants; or all of this program",
    )
    arguments = parser.parse_args(argv)
    kinds = tuple(arguments.kinds)
    if arguments.planted is not None:
        names = arguments.planted or simulated()
        return int(not all([find_planted(name, arguments.seed, arguments.schedules, kinds) for name in names]))
    if arguments.story:
        plan = draw(arguments.seed, kinds=kinds, shards=float(arguments.divided) or 0.5)
        _print_story(plan, simulate(plan, story=True))
        return 0
    divided = arguments.divided
    return int(run(arguments.seed, arguments.schedules, kinds, arguments.findings, divided=divided) > 0)


def run(seed: int, schedules: int, kinds: tuple[str, ...], findings_max: int, *, divided: bool = False) -> int:
    """Run ``schedules`` schedules from ``seed`` on, and return how many broke a promise.

    With ``divided``, only the jobs with shards among them are run, and all that may have shards have them.
    """
    ends, steps, injected, findings = Counter[str](), 0, Counter[str](), 0
    began, busy = time.perf_counter(), time.process_time()
    for number in collecting(range(seed, seed + schedules)):
        plan = draw(number, kinds=kinds, shards=1.0 if divided else 0.5)
        if divided and not plan.divided:
            continue
        outcome = simulate(plan)
        steps += outcome.steps
        injected.update(fault.kind for fault in outcome.injected)
        ends[outcome.finding.kind if outcome.finding else outcome.error or "well"] += 1
        if outcome.finding is not None:
            findings += 1
            print(f"seed {number}: {outcome.finding}", flush=True)
            smaller, runs = shrink(plan, outcome.finding.kind)
            print(f"after {runs} runs:")
            _print_story(smaller, simulate(smaller, story=True))
            if findings == findings_max:
                break
        if (number - seed + 1) % 1000 == 0:
            print(f"{number - seed + 1} schedules, {time.perf_counter() - began:.0f} s", flush=True)
    seconds, busy, count = time.perf_counter() - began, time.process_time() - busy, sum(ends.values())
    print(f"{count} schedules, seeds {seed} to {seed + count - 1}, {steps / count:.0f} hand-overs each")
    print(f"{seconds:.0f} s, {count / seconds:.1f}/s; {busy:.0f} s of processor, {count / busy:.1f}/s")
    print("ended: " + ", ".join(f"{name} {number}" for name, number in ends.most_common()))
    print("injected: " + ", ".join(f"{name} {number}" for name, number in injected.most_common()))
    return findings


def find_planted(name: str, seed: int, schedules: int, kinds: tuple[str, ...] = tuple(KINDS)) -> bool:
    """Return whether a planted fault is found, and print after how many schedules."""
    shards = 1.0 if divides(name) else 0.0  # without, so that faults are found where they were before there were shards
    with planted(name):
        for number in collecting(range(schedules)):
            plan = draw(seed + number, kinds=kinds, shards=shards)
            finding = simulate(plan).finding if plan.divided == bool(shards) else None
            if finding is not None:
                print(f"{name}: found after {number + 1} schedules: {finding.kind}", flush=True)
                return True
    print(f"{name}: not found in {schedules} schedules", flush=True)
    return False


def collecting(numbers: range) -> Iterator[int]:
    """Yield ``numbers``; collect garbage only after a number of runs, as automatic collection would cost a tenth of
    the time.
    """
    gc.freeze()  # Objects from before the first run are kept; searching a test's libraries would cost half a second.
    gc.disable()
    try:
        for number in numbers:
            yield number
            if number % _RUNS_A_COLLECTION == 0:
                gc.collect()
    finally:
        gc.enable()
        gc.collect()


def _print_story(plan: Plan, outcome: Outcome) -> None:
    print(f"  {plan}")
    for line in outcome.story:
        print(f"  {line}")
    print(f"  {outcome.finding or outcome.error or 'ends successfully'}")
    sys.stdout.flush()

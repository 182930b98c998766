"""Feeds invalid inputs to the protocol and to a running server, and checks that they are refused without harm.

    python tests/fuzz --inputs 1000000 --live 100000      # both, some minutes each
    python tests/fuzz --guided 300                        # seconds, led by coverage; needs the package atheris

Inputs are valid frames of every message type, damaged with knowledge of their structure, and pure garbage; the same
seed gives the same inputs. The parser may raise its two errors only, allocate no more than its limits, and end. A
server must keep serving: an honest worker trains meanwhile, and its center must be bitwise the undisturbed one.
"""

from __future__ import annotations

import argparse
import time

from fuzz.guided import guided
from fuzz.parser import parse
from fuzz.server import live


def main(argv: list[str] | None = None) -> int:
    """Run the parts that the arguments select; return the exit status."""
    options = argparse.ArgumentParser(
        prog="python tests/fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--inputs", type=int, default=0, metavar="N", help="inputs to the parser")
    options.add_argument("--live", type=int, default=0, metavar="N", help="inputs to a running server")
    options.add_argument("--guided", type=int, default=0, metavar="SECONDS", help="of inputs that follow coverage")
    options.add_argument("--seed", type=int, default=0, metavar="S", help="of the inputs (default: %(default)s)")
    chosen = options.parse_args(argv)
    for name, count, run in (("parser", chosen.inputs, parse), ("server", chosen.live, live)):
        if count:
            began = time.monotonic()
            outcomes = run(count, chosen.seed)
            print(f"{name}: {count} inputs of seed {chosen.seed} in {time.monotonic() - began:.0f} s")
            for outcome, number in sorted(outcomes.items()):
                print(f"  {number:>10} {outcome}")
    return guided(chosen.guided, chosen.seed) if chosen.guided else 0

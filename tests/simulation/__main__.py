"""Entry point of `python tests/simulation`; see `command.main`."""

from __future__ import annotations

import sys
from pathlib import Path

# Python adds this folder to the path, but it is a package of its parent.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from simulation.command import main  # noqa: E402 - found on the path that was set above

if __name__ == "__main__":
    sys.exit(main())

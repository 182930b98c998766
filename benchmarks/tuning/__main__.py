"""`python benchmarks/tuning`: what `command.main` does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # Python puts this folder there; it is a package

from tuning.command import main  # noqa: E402 - found on the path that was set above

if __name__ == "__main__":
    sys.exit(main())

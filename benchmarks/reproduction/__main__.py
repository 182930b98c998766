"""`python benchmarks/reproduction` runs `command.main`."""

from __future__ import annotations

import sys
from pathlib import Path

# The path of the parent replaces that of this folder, which is a package.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from reproduction.command import main  # noqa: E402 - found on the path that was set above

if __name__ == "__main__":
    sys.exit(main())

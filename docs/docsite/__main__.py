"""`python docs/docsite`: what `command.main` does."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path[0:1] = [str(_ROOT / name) for name in ("docs", "benchmarks", "tests")]  # Python puts this folder there

from docsite.command import main  # noqa: E402 - found on the path that was set above

if __name__ == "__main__":
    sys.exit(main())

"""The entry point of `python tests/fuzz`: see `command.main`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # Python puts this folder there, but it is a package.

from fuzz.command import main  # noqa: E402 - found on the path that was set above

if __name__ == "__main__":
    sys.exit(main())

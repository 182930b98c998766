"""``python -m distkeras.jobs``: the command ``distkeras``."""

import sys

from distkeras.jobs.cli import main

if __name__ == "__main__":
    sys.exit(main())

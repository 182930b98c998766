"""``python -m distkeras.job_server``: the command ``distkeras``."""

import sys

from distkeras.job_server.cli import main

if __name__ == "__main__":
    sys.exit(main())

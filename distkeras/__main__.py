"""``python -m distkeras``: the command ``distkeras``."""

import sys

from distkeras.commands.main import main

if __name__ == "__main__":
    sys.exit(main())

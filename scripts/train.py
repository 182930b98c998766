"""`distkeras train` as the file that spark-submit needs: see `distkeras.commands.train`."""

import sys

from distkeras.commands.train import main

if __name__ == "__main__":
    sys.exit(main())

"""`distkeras score` as the file that spark-submit needs: see `distkeras.commands.score`."""

import sys

from distkeras.commands.score import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m distkeras``: the command ``distkeras``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("distkeras.commands.main", run_name="__main__")

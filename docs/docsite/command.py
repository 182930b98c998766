"""Write the generated parts of README and docs again, take the pictures of the dashboard, and build the site."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from docsite import screens
from docsite.generated import ROOT, files

#: This silences a long notice that mkdocs-material prints in every run.
_QUIET = {"NO_MKDOCS_2_WARNING": "1"}


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site; any warning of mkdocs, such as a broken link, is a failure."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder.resolve())]
    env, pipe = {**os.environ, **_QUIET}, subprocess.PIPE
    return subprocess.run(command, cwd=ROOT, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False)


def main(argv: list[str] | None = None) -> int:
    """Run what the command line requests, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python docs/docsite", description=__doc__)
    parser.add_argument("--site", type=Path, default=ROOT / "site", metavar="FOLDER", help="default: site")
    parser.add_argument("--no-build", action="store_true", help="only write the generated parts again")
    options = parser.parse_args(argv)
    for path, content in files().items():
        if not path.exists() or path.read_text() != content:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
            sys.stderr.write(f"wrote {path.relative_to(ROOT)}\n")
    if options.no_build:
        return 0
    for name, picture in screens.take():
        (ROOT / "docs" / "assets" / name).write_bytes(picture)
    built = build(options.site)
    sys.stderr.write(built.stdout)
    return built.returncode

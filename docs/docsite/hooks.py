"""What `mkdocs.yml` has mkdocs call: formulas, and the generated pages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

_ROOT = Path(__file__).resolve().parents[2]
sys.path[0:1] = [str(_ROOT / name) for name in ("docs", "benchmarks", "tests")]  # mkdocs puts this folder there

from docsite import pages  # noqa: E402 - found on the path that was set above
from docsite.formulas import Formulas  # noqa: E402 - the same

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files


@event_priority(100)  # before mkdocstrings copies the extensions
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lets docstrings and pages have formulas, and names the generated pages in the navigation."""
    config.markdown_extensions.append(Formulas())  # Markdown takes instances too
    _fill(config.nav or [])
    return config


def _fill(entries: list[Any]) -> None:
    """Put the generated pages in the place of each folder in the navigation, at any depth."""
    for entry in entries:
        for title, place in entry.items():
            if isinstance(place, list):
                _fill(place)
            elif place.endswith("/"):
                entry[title] = pages.navigation(place)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    for path, text in pages.generated():
        files.append(File.generated(config, path, content=text))
    return files

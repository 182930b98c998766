"""What `mkdocs.yml` has mkdocs call: formulas, generated pages, pictures within the page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

_ROOT = Path(__file__).resolve().parents[2]
sys.path[0:1] = [str(_ROOT / name) for name in ("docs", "benchmarks", "tests")]  # mkdocs puts this folder there

from docsite import generated, pages  # noqa: E402 - found on the path that was set above
from docsite.formulas import Formulas  # noqa: E402 - the same

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

_PICTURE = re.compile(r'<img alt="[^"]*" src="[^"]*pictures/([\w-]+\.svg)"[^>]*/?>')
_LAYERS = re.compile(r"<!-- layers of ([\w.]+) -->")


@event_priority(100)  # before mkdocstrings copies the extensions
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lets docstrings and pages have formulas, and names the generated pages in the navigation."""
    config.markdown_extensions.append(Formulas())  # Markdown takes instances too
    for entry in config.nav or []:
        for title, place in entry.items():
            if isinstance(place, str) and place.endswith("/"):
                entry[title] = pages.navigation(place)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    for path, text in pages.generated():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Puts the order of imports where a page asks for it."""
    return _LAYERS.sub(lambda found: pages.layers(found[1]), markdown)


def on_page_content(html: str, **_: object) -> str:
    """Puts pictures into the page itself, where the reader's color scheme reaches them."""
    return _PICTURE.sub(lambda found: (generated.PICTURE_FOLDER / found[1]).read_text(), html)

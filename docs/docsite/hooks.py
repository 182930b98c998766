"""What `mkdocs.yml` has mkdocs call: formulas of docstrings as MathML, without a script, and the generated pages."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as etree
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

_ROOT = Path(__file__).resolve().parents[2]
sys.path[0:1] = [str(_ROOT / name) for name in ("docs", "benchmarks", "tests")]  # mkdocs puts this folder there

from docsite import pages  # noqa: E402 - found on the path that was set above

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files


_BLOCK = re.compile(r"\.\. math::\s*(.+)", re.DOTALL)
#: Before Markdown's own backticks (190).
_BEFORE_BACKTICKS = 195
#: Before paragraphs, and before all other blocks.
_BEFORE_BLOCKS = 200
_BEFORE_HTML = 40


def mathml(formula: str, *, display: str = "inline") -> str:
    """LaTeX to one ``<math>`` element; ``display`` is "inline" or "block"."""
    return convert(" ".join(formula.split()), display=display)


class _Inline(InlineProcessor):  # type: ignore[misc]  # Markdown has no types
    """Replaces :math:`...`."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        return self.md.htmlStash.store(mathml(m.group(1))), m.start(0), m.end(0)


class _Block(BlockProcessor):  # type: ignore[misc]  # Markdown has no types
    """Replaces a paragraph ``.. math:: ...``."""

    def __init__(self, md: Markdown) -> None:
        super().__init__(md.parser)
        self._stash = md.htmlStash

    def test(self, parent: etree.Element, block: str) -> bool:
        return block.startswith(".. math::")

    def run(self, parent: etree.Element, blocks: list[str]) -> None:
        found = _BLOCK.fullmatch(blocks.pop(0))
        if found is None:
            raise ValueError("`.. math::` must be followed by its formula. Received: nothing")
        formula = self._stash.store(mathml(found.group(1), display="block"))
        etree.SubElement(parent, "div", {"class": "formula"}).text = formula


class _Literals(Preprocessor):  # type: ignore[misc]  # Markdown has no types
    """Takes away the colons that announce a literal block; Markdown knows it by its indentation."""

    def run(self, lines: list[str]) -> list[str]:
        found = list(lines)
        for place, (line, blank, following) in enumerate(zip(lines, lines[1:], lines[2:], strict=False)):
            if line.endswith("::") and not blank.strip() and following.startswith("    "):
                found[place] = "" if line == "::" else line[:-1]
        return found


class Formulas(Extension):  # type: ignore[misc]  # Markdown has no types
    """All three."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Registers each."""
        md.preprocessors.register(_Literals(md), "rst-literals", _BEFORE_HTML)
        md.inlinePatterns.register(_Inline(r":math:`([^`]+)`", md), "rst-math", _BEFORE_BACKTICKS)
        md.parser.blockprocessors.register(_Block(md), "rst-math-block", _BEFORE_BLOCKS)


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

"""The docstrings' reStructuredText in Markdown: formulas become MathML, which browsers render without a script."""

from __future__ import annotations

import re
import xml.etree.ElementTree as etree
from collections.abc import Callable

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor

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
        self._store: Callable[[str], str] = md.htmlStash.store

    def test(self, parent: etree.Element, block: str) -> bool:
        return block.startswith(".. math::")

    def run(self, parent: etree.Element, blocks: list[str]) -> None:
        found = _BLOCK.fullmatch(blocks.pop(0))
        if found is None:
            raise ValueError("`.. math::` must be followed by its formula. Received: nothing")
        etree.SubElement(parent, "div", {"class": "formula"}).text = self._store(
            mathml(found.group(1), display="block")
        )


class _Literals(Preprocessor):  # type: ignore[misc]  # Markdown has no types
    """Takes away the colons that announce a literal block; Markdown knows it by its indentation."""

    def run(self, lines: list[str]) -> list[str]:
        found = []
        for place, line in enumerate(lines):
            following = lines[place + 2] if place + 2 < len(lines) else ""
            announces = line.endswith("::") and not lines[place + 1].strip() if following else False
            if announces and following.startswith("    "):
                found.append("" if line == "::" else line[:-1])
            else:
                found.append(line)
        return found


class Formulas(Extension):  # type: ignore[misc]  # Markdown has no types
    """All three."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Registers each."""
        md.preprocessors.register(_Literals(md), "rst-literals", _BEFORE_HTML)
        md.inlinePatterns.register(_Inline(r":math:`([^`]+)`", md), "rst-math", _BEFORE_BACKTICKS)
        md.parser.blockprocessors.register(_Block(md), "rst-math-block", _BEFORE_BLOCKS)

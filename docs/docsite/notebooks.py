"""The notebooks as pages of the site: text, code, and the outputs that are committed with them."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"

#: What each shows, in the order in which to read them.
SHOWN = {
    "first_steps": "from a table of images to a network that is trained, evaluated and saved",
    "comparing_rules": "four rules compared; what staleness, gap and scale mean; sixteen workers in the simulator",
    "pipeline_and_stream": "a Spark ML pipeline, cross-validated, saved, loaded, and scoring files as they arrive",
    "losing_executors": "an executor and the parameter server are killed while training; the tables show the effects",
    "fine_tuning_images": "PNG files, a frozen convolutional network, and a new head",
    "models_by_shop": "forty shops, a small model for each, and its loss next to the best possible one",
    "learning_and_scoring": "one stream trains and publishes versions, another is scored with them; workers are killed",
    "sequences": "the next item of a session, learned from rows of any length, and what three ways to pad them cost",
    "wide_tables": "a recommender with tables of rows, compared with the best possible one; hot rows and cold rows",
    "learning_recommender": "users who come and go: rows that are admitted, expire, and are published by their changes",
}

_HEAD = """# Notebooks

Each notebook is a complete example with its outputs. The notebooks are in the folder `notebooks`. Each runs in a
minute or two on two cores, and needs the extra `notebooks`.
"""

#: Code of notebooks is wide: their pages have no table of contents next to it.
_FRONT = "---\nhide: [toc]\n---\n\n"

#: Letters of a line of code or output on such a page, at 1280 px.
_COLUMN = 120

#: What pandas makes of a table, without the styles before it.
_TABLE = re.compile(r"<table.*</table>", re.DOTALL)
#: Links to another notebook, and to a page of the documentation.
_NOTEBOOK_LINK = re.compile(r"\]\((\w+)\.ipynb\)")
_DOCS_LINK = re.compile(r"\]\(\.\./docs/")


def pages() -> Iterator[tuple[str, str]]:
    """Path within the docs, and Markdown, of the list of notebooks and of each."""
    cells = {name: json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"] for name in SHOWN}
    titles = {name: _text(own[0]["source"]).partition("\n")[0].removeprefix("# ") for name, own in cells.items()}
    entries = [f"* [{title}]({name}.md): {SHOWN[name]}." for name, title in titles.items()]
    yield "notebooks/index.md", "\n".join([_HEAD, *entries, ""])
    for name, own in cells.items():
        yield f"notebooks/{name}.md", _FRONT + "\n\n".join(part for cell in own for part in _cell(cell)) + "\n"


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    """Markdown of a cell, block by block."""
    source = _text(cell["source"])
    if cell["cell_type"] == "markdown":
        yield _DOCS_LINK.sub("](../", _NOTEBOOK_LINK.sub(r"](\1.md)", source))
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if output["output_type"] == "stream":
            yield _printed(output["text"])
        elif "image/png" in data:
            yield f'<img alt="what this code draws" src="data:image/png;base64,{_text(data["image/png"])}">'
        elif "text/html" in data:
            yield _html(_text(data["text/html"]))
        elif "text/plain" in data:
            yield _printed(data["text/plain"])


def _printed(text: str | list[str]) -> str:
    """Return a block of what a cell has printed; the lines that do not fit the column are wrapped."""
    lines = [textwrap.wrap(line, _COLUMN) if len(line) > _COLUMN else [line] for line in _text(text).splitlines()]
    return "\n".join(["```text", *(part for parts in lines for part in parts), "```"])


def _html(text: str) -> str:
    """A table in a box that scrolls, on one line, which Markdown takes for one block."""
    table = _TABLE.search(text)
    line = "".join(line.strip() for line in (table[0] if table else text).splitlines()).replace(' border="1"', "")
    return f'<div class="wide">{line}</div>'


def _text(lines: str | list[str]) -> str:
    """Lines as a notebook has them."""
    return "".join(lines).rstrip()

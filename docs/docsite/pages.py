"""The site's generated pages: one a rule, one a part of the public face."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import distkeras
import distkeras.job_server
import distkeras.layers
import distkeras.optimizers
import distkeras.ps
import distkeras.transformers
from distkeras.ps import rules
from distkeras.ps.rules import Rule
from docsite import notebooks

#: A page's first line; an anchor of its own may follow the title.
_TITLE = re.compile(r"(?:---\n.*?---\s+)?# ([^{\n]+[^{\n ])", re.DOTALL)
#: What fits in a block of code without scrolling.
_CODE_WIDTH = 76

#: The pages of classes, in their order: title, and what the module of a class must have in its name.
_PAGES = {
    "trainer": ("Estimator, model and trainers", r"\.ml\.|\.trainer"),
    "callbacks": ("Callbacks", "callbacks|mlflow|prometheus"),
    "more": ("Settings, gradients, simulation", ""),
}


def generated() -> Iterator[tuple[str, str]]:
    """Path within the docs, and Markdown, of each page."""
    yield "rules/index.md", _rules()
    for name, kind in rules.all_rules().items():
        yield f"rules/{name}.md", _rule(name, kind)
    yield from reference().items()
    yield from notebooks.pages()


def navigation(folder: str) -> list[dict[str, str]]:
    """The entries of a folder of generated pages: title to path."""
    found = [(_TITLE.match(text), path) for path, text in generated() if path.startswith(folder)]
    return [{"All" if path.endswith("index.md") else title[1]: path} for title, path in found if title]


def _rules() -> str:
    text = (Path(__file__).parent / "rules.md").read_text()
    lines = ["| rule | a worker sends | replies | family | source |", "|---|---|---|---|---|"]
    for name in rules.all_rules():
        row = _table_row(name)
        lines.append(
            f"| [{row['name']}]({name}.md)<br>`{name}` | {row['sends']} | {row['scheduler']} | {row['family']} | "
            f"{row['paper']}, {row['equations']} |"
        )
    return text.replace("TABLE", "\n".join(lines))


def _rule(name: str, kind: type[Rule]) -> str:
    info = kind.info
    facts = {key: value for key, value in _table_row(name).items() if key not in ("rule", "name", "hyper-parameters")}
    lines = [f"# {info.title}", "", f"| rule | `{name}` |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in facts.items()]
    lines += ["", _described(kind), "", "With its defaults:", ""]
    lines += ["```python", "from distkeras import rules", "", _made(name, kind), "```", ""]
    if info.bibtex:
        lines += ["```bibtex", info.bibtex, "```", ""]
    return "\n".join(lines)


def _described(kind: type[Rule]) -> str:
    """Return the rule's docstring as Markdown: its arguments become a list."""
    text, _, rest = (inspect.getdoc(kind) or "").partition("\nArgs:\n")
    arguments, _, rest = rest.partition("\n\n")
    listed = re.sub(r"^    (\w+): ", r"* **`\1`**: ", arguments, flags=re.MULTILINE)
    return "\n".join([text, *(["**Hyper-parameters**", "", listed, ""] if listed else []), rest])


def _made(name: str, kind: type[Rule]) -> str:
    """The call that makes the rule; one argument a line where they are many."""
    arguments = [f'"{name}"', *(f"{key}={value!r}" for key, value in kind().config().items())]
    short = f"rule = rules.make({', '.join(arguments)})"
    if len(short) <= _CODE_WIDTH:
        return short
    return "\n    ".join(["rule = rules.make(", *(f"{argument}," for argument in arguments)]) + "\n)"


def _table_row(name: str) -> dict[str, str]:
    """The rule's row in the table of rules, by the table's head."""
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in rules.table().splitlines())
    return next(dict(zip(head, row, strict=True)) for row in rows if row[0] == f"`{name}`")


def public() -> dict[str, object]:
    """The names of ``from distkeras import ...``."""
    return {name: getattr(distkeras, name) for name in distkeras.__all__ if not name.startswith("_")}


def home(name: str, value: object) -> str:
    """The full name under which a public name is documented."""
    if isinstance(value, ModuleType):
        return value.__name__
    module = inspect.getmodule(value)
    if module is None:
        raise ValueError(f"a public name must be a class, a function or a module. Received: {name}={value!r}")
    return f"{module.__name__}.{getattr(value, '__qualname__', name)}"


def reference() -> dict[str, str]:
    """The API reference: classes by their module, and a page a public module."""
    pages: dict[str, list[str]] = {}
    modules = {name: value for name, value in public().items() if isinstance(value, ModuleType)}
    for full in (home(name, value) for name, value in public().items() if name not in modules):
        page = next(page for page, (_, homes) in _PAGES.items() if re.search(homes, full))
        pages.setdefault(page, []).append(full)
    found = {f"reference/{page}.md": _reference(title, pages[page]) for page, (title, _) in _PAGES.items()}
    found |= {f"reference/{name}.md": _module(f"distkeras.{name}", value) for name, value in modules.items()}
    own = [name for name, value in vars(distkeras.transformers).items() if inspect.isclass(value)]
    found["reference/transformers.md"] = _module("distkeras.transformers", distkeras.transformers, own)
    found["reference/jobs.md"] = _module("distkeras.job_server", distkeras.job_server)
    for module in (distkeras.layers, distkeras.optimizers):
        found[f"reference/{module.__name__.rpartition('.')[2]}.md"] = _module(module.__name__, module, module.__all__)
    return found


def _reference(title: str, names: list[str]) -> str:
    lines = [f"# {title}", ""]
    for name in names:
        lines += [f"::: {name}", "    options:", "      show_root_heading: true", "      show_bases: false"]
        lines += ["      inherited_members: true", ""] if name == "distkeras.trainer.Trainer" else [""]
    return "\n".join(lines)


def _module(title: str, module: ModuleType, members: Sequence[str] = ()) -> str:
    """A page for a module; a package says itself which of its modules' members are its own, unless they are given."""
    name = module.__name__
    lines = [f"# {title} {{#{name}}}", "", f"::: {name}", "    options:", "      show_root_heading: false"]
    lines += ["      show_root_toc_entry: false"]
    if members or hasattr(module, "__path__"):
        lines += [f"      members: [{', '.join(members or module.__all__)}]"]
    return "\n".join([*lines, ""])

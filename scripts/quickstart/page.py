"""The page at the end of the tour: one HTML file with the pictures, what to do next, and the dashboard of the jobs."""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from quickstart.stage import ActResult

#: What to do next: a purpose, and the page or the command for it.
_NEXT = (
    ("Train on your own DataFrame", "docs/guide/start.md"),
    ("Fit and save a Spark ML pipeline: one script that needs no data", "docs/guide/first-pipeline.md"),
    ("Decide whether one machine is enough for you", "docs/guide/one-machine.md"),
    ("See how an executor and the server are killed", "notebooks/losing_executors.ipynb"),
    ("Run a job server with a live page of all jobs", "{distkeras} serve --data ."),
    ("Compare five update rules with plain Keras", "bash scripts/quickstart.sh --rules"),
)


def write_page(
    path: Path, results: Sequence[ActResult], dashboard: Path, machine: Mapping[str, Any], seconds: float
) -> None:
    """Write the page, which needs no other file; the saved page of the jobs becomes a frame."""
    cards = "\n".join(_card(number, result) for number, result in enumerate(results, 1))
    steps = "\n".join(f"<li>{escape(purpose)}: <code>{escape(_as_here(how))}</code></li>" for purpose, how in _NEXT)
    problems = [escape(problem) for result in results for problem in result.problems]
    wrong = "".join(f'<p class="problem">Not as promised: {problem}.</p>' for problem in problems)
    html = _PAGE.format(
        style=_STYLE,
        wrong=wrong,
        cards=cards,
        steps=steps,
        about=escape(_about(machine, seconds)),
        dashboard=escape(dashboard.read_text(encoding="utf-8"), quote=True),
    )
    path.write_text(html, encoding="utf-8")


def _card(number: int, result: ActResult) -> str:
    picture = base64.b64encode(result.picture.read_bytes()).decode()
    notes = "".join(f"<p>{escape(note)}</p>" for note in result.notes)
    return f"""<section class="act">
<div>
<h2><span class="number">{number}</span> {escape(result.title)}</h2>
<p class="line">{escape(result.line)}.</p>
{notes}
<p>More: <code>{escape(result.read)}</code></p>
</div>
<img src="data:image/png;base64,{picture}" alt="{escape(result.alt, quote=True)}">
</section>"""


def _as_here(how: str) -> str:
    """Return the command with the path of this environment's program, relative to the present folder if it is below."""
    program = Path(sys.executable).parent / "distkeras"
    here = Path.cwd()
    return how.format(distkeras=program.relative_to(here) if program.is_relative_to(here) else program)


def _about(machine: Mapping[str, Any], seconds: float) -> str:
    libraries = ", ".join(f"{name} {machine[name]}" for name in ("keras", "tensorflow", "pyspark") if machine[name])
    return (
        f"The acts took {seconds:.0f} s with all starting and ending, on {machine['cores']} cores "
        f"({machine['platform']}), with Python {machine['python']}, {libraries}. "
        "The speeds are those of this machine at this time; nothing here was compared with a target."
    )


_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #16191d; --soft: #565e69; --line: #d9dde3;
  --accent: #1a5fb4; --bad: #a51d2d; }
@media (prefers-color-scheme: dark) {
  :root { --page: #111417; --card: #1a1e23; --text: #eceff3; --soft: #a6afbb; --line: #343b44; --accent: #7fb2f0;
    --bad: #ff8f92; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem 1.25rem 2rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.15rem; line-height: 1.3; margin: 0 0 .5rem; }
p { margin: 0 0 .6rem; color: var(--soft); font-size: .9rem; }
.line { color: var(--text); font-size: 1rem; font-weight: 600; }
.problem { color: var(--bad); font-weight: 600; }
.act, .next { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 33rem); gap: 1rem 1.5rem;
  align-items: start; margin: 1rem 0; padding: 1.1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem; break-inside: avoid; }
.next { display: block; }
.number { display: inline-block; min-width: 1.7em; text-align: center; border-radius: 1em; background: var(--accent);
  color: var(--card); }
img { display: block; width: 100%; height: auto; background: white; border-radius: .35rem; }
code { font: .92em ui-monospace, monospace; color: var(--text); overflow-wrap: anywhere; }
li { margin: .35rem 0; }
ul { margin: 0; padding-left: 1.2rem; }
iframe { width: 100%; height: 56rem; border: 1px solid var(--line); border-radius: .5rem; background: var(--page); }
@media (max-width: 52rem) {
  body { padding: .5rem .75rem 1rem; }
  .act { grid-template-columns: minmax(0, 1fr); padding: .8rem; }
}
@media print { iframe { height: 40rem; } }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>distkeras in five acts</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main>
<h1>distkeras in five acts</h1>
<p>{about}</p>
{wrong}
{cards}
<section class="next">
<h2>What to do next</h2>
<ul>
{steps}
</ul>
</section>
<h2>The jobs of acts 1 to 3 on the dashboard</h2>
<iframe srcdoc="{dashboard}" title="The dashboard of the jobs"></iframe>
</main>
</body>
</html>
"""

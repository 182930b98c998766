"""The pictures of `docs/pictures`, drawn as SVG: narrow enough for a phone, in the system's color scheme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

_STYLE = """\
  .picture { --ink: #1f2328; --soft: #59636e; --line: #818b98; --paper: #f6f8fa; --room: #ddf4ff; --mark: #0969da;
    --back: #ffffff; }
  @media (prefers-color-scheme: dark) {
    .picture { --ink: #e6edf3; --soft: #9198a1; --line: #7d8590; --paper: #212830; --room: #15324f; --mark: #58a6ff;
      --back: #0d1117; }
  }
  .picture .back { fill: var(--back); }
  .picture text { font-family: system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif;
    font-size: 13px; fill: var(--ink); }
  .picture .title { font-weight: 600; font-size: 14px; }
  .picture .soft { fill: var(--soft); font-size: 12px; }
  .picture .box { fill: var(--paper); stroke: var(--line); }
  .picture .room { fill: var(--room); stroke: var(--mark); }
  .picture .lane { stroke: var(--line); stroke-dasharray: 3 4; }
  .picture .arrow { stroke: var(--mark); stroke-width: 1.6; fill: none; }
  .picture .head { fill: var(--mark); }"""
_LINE = 18


@dataclass
class Drawing:
    """An SVG in the making: what is drawn, from the bottom up."""

    title: str
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, width: int, lines: Sequence[str], *, kind: str = "box", height: int = 0) -> int:
        """A box whose first line is its title; returns where it ends."""
        height = height or 14 + _LINE * len(lines)
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="7"/>')
        for place, line in enumerate(lines):
            self.text(x + 12, y + 21 + _LINE * place, line, kind="soft" if place else "title")
        return y + height

    def text(self, x: int, y: int, line: str, *, kind: str = "", anchor: str = "start") -> None:
        """One line of text."""
        self.parts.append(f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(line)}</text>')

    def arrow(self, start: tuple[int, int], end: tuple[int, int], *, both: bool = False) -> None:
        """A straight arrow; ``both``: with a head at each end."""
        tail = ' marker-start="url(#head)"' if both else ""
        (x, y), (to_x, to_y) = start, end
        self.parts.append(f'<path class="arrow" d="M{x} {y} L{to_x} {to_y}" marker-end="url(#head)"{tail}/>')

    def svg(self) -> str:
        """The whole file."""
        body = "\n".join(f"  {part}" for part in self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" aria-label="{escape(self.title)}">\n'
            f"  <title>{escape(self.title)}</title>\n"
            f"  <style>\n{_STYLE}\n  </style>\n"
            '  <defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'markerUnits="userSpaceOnUse" orient="auto-start-reverse"><path class="head" d="M0 0 L8 4 L0 8 Z"/>'
            f'</marker></defs>\n  <rect class="back" width="100%" height="100%" rx="7"/>\n{body}\n</svg>\n'
        )


def architecture() -> Drawing:
    """The driver, the server and the executors."""
    title = "A driver with a trainer and a parameter server; Spark tasks that exchange with the server"
    drawing = Drawing(title, 400, 408)
    drawing.box(1, 1, 398, ["Driver"], height=164)
    trainer = ["Trainer", "model, rule, options", "callbacks, supervisor", "history, commits,", "ledger, events"]
    server = ["Parameter server", "a separate process", "center, update rule", "leases, ledger", "snapshots"]
    drawing.box(12, 34, 164, trainer)
    drawing.box(216, 34, 172, server, kind="room")
    drawing.arrow((178, 86), (214, 86), both=True)
    drawing.arrow((20, 167), (20, 250))
    drawing.text(28, 187, "one Spark job:", kind="soft")
    drawing.text(28, 204, "one task per partition", kind="soft")
    for x, to in ((250, 90), (300, 205), (378, 378)):
        drawing.arrow((x, 142), (to, 250), both=True)
    drawing.text(370, 210, "commits up,", kind="soft", anchor="end")
    drawing.text(370, 227, "center down", kind="soft", anchor="end")
    for place, x in enumerate((1, 137, 273)):
        drawing.box(x, 252, 126, [f"Task {place}", "mini-batches", "Keras replica", "optimizer", "a window of steps"])
    late = (
        "Executors start late, run slowly, or die. Others do not",
        "wait, and a retried task resumes after the last commit.",
    )
    for y, line in zip((384, 401), late, strict=True):
        drawing.text(200, y, line, kind="soft", anchor="middle")
    return drawing


#: Where it happens ("box": driver, "room": executor), the module, and what it is.
_DATAFRAME = (
    ("box", "data.schema", "Driver: df", "any source that Spark reads"),
    ("box", "data.schema", "Columns", "checked, pruned, ML vectors to arrays"),
    ("box", "data.ordering", "Order", "a hash of each row; repartition(n) by it,",
     "sorted within partitions: the same", "rows in every attempt"),
    ("room", "training.task", "Executor: record batches", "mapInArrow of Arrow, no Python object a row"),
    ("room", "data.source", "Mini-batches", "a prefetch thread; blocks shuffled by",
     "(seed, partition, epoch); a checksum", "over the rows' hashes"),
    ("room", "data.source", "Spool", "memory up to spool_bytes, then a file:", "later epochs do not ask Spark again"),
    ("room", "ps.worker.loop", "Training thread", "a window of steps on the replica,", "then an exchange"),
)  # fmt: skip


def dataframe() -> Drawing:
    """The way of the rows of a DataFrame to mini-batches."""
    drawing = Drawing("From a DataFrame to mini-batches", 342, 0)
    y = 1
    for place, (kind, module, *lines) in enumerate(_DATAFRAME):
        if place:
            drawing.arrow((171, y), (171, y + 20))
            y += 22
        top, y = y, drawing.box(1, y, 340, lines, kind=kind)
        drawing.text(329, top + 21, module, kind="soft", anchor="end")
    drawing.height = y + 2
    return drawing


#: Where each lane is, and what it shows.
_LANES = {"worker": 66, "session": 200, "center": 334}
_LANE_TITLES = {"worker": "executor", "session": "server thread", "center": "state machine"}
_COMMIT: tuple[tuple[str, ...], ...] = (
    ("note", "worker", "a window", "of steps"),
    ("arrow", "worker", "session", "Commit"),
    ("note", "session", "received whole", "into a buffer; finite?"),
    ("arrow", "session", "center", "under one lock"),
    ("note", "center", "lease, sequence,", "next mini-batch?"),
    ("note", "center", "clock + 1; the rule,", "chunk by chunk"),
    ("note", "center", "commit log, ledger;", "buffer = new center"),
    ("arrow", "center", "session", "released"),
    ("arrow", "session", "worker", "CenterReply"),
    ("note", "worker", "loads the center,", "next window"),
)


def commit() -> Drawing:
    """A commit and its reply."""
    drawing = Drawing("A commit on its way from a worker to the center, and the reply", 400, 0)
    y = 56
    for kind, *words in _COMMIT:
        if kind == "note":
            lane, *lines = words
            x = _LANES[lane]
            height = 12 + 16 * len(lines)
            drawing.parts.append(
                f'<rect class="{"room" if lane == "center" else "box"}" x="{x - 65}" y="{y}" width="130" '
                f'height="{height}" rx="6"/>'
            )
            for line in lines:
                y += 16
                drawing.text(x, y + 2, line, kind="soft", anchor="middle")
            y += 12 + 12
        else:
            start, end, label = words
            drawing.text((_LANES[start] + _LANES[end]) // 2, y + 8, label, anchor="middle")
            drawing.arrow((_LANES[start], y + 16), (_LANES[end], y + 16))
            y += 30
    drawing.parts[:0] = [f'<path class="lane" d="M{x} 52 V{y}"/>' for x in _LANES.values()]
    for lane, where in _LANE_TITLES.items():
        drawing.text(_LANES[lane], 20, lane.title(), kind="title", anchor="middle")
        drawing.text(_LANES[lane], 38, where, kind="soft", anchor="middle")
    drawing.height = y + 4
    return drawing


#: File name to drawing.
PICTURES = {f"{draw.__name__}.svg": draw for draw in (architecture, dataframe, commit)}

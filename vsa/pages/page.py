"""A page in one file: what it needs is inside, and it loads nothing.

Whatever a run or a file says (names, captions, reasons) is text of strangers: it goes through `html.escape`, or into
JSON without a `<`. The page's own policy lets a browser run its two scripts and nothing else, and fetch nothing at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from vsa.pages.charts import Chart, plotly_panel
from vsa.plotting import COLOURS
from vsa.secrets import without_secrets

HERE = Path(__file__).parent
POINTS = 6_000
"""Points of all curves of a panel together; a curve has at most 300, and at least 20."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Text of a cell.

    Args:
        text: what it says.
        sub: smaller, below it.
        colour: number of the colour of a dot before it.
        long: whether it is a sentence.
    """

    text: str
    sub: str = ""
    colour: int | None = None
    long: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the page; a click on a heading sorts it.

    Args:
        headings: texts with what explains them, "" for nothing.
        rows: cells.
        marked: numbers of the rows that stand out.
    """

    headings: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[Cell]]
    marked: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with a table below it.

    Args:
        title: the heading.
        note: a sentence or two below it.
        table: rows.
        data: file with the numbers, beside the page; "" for none.
        folded: None: a reader cannot fold it; else whether it is at first.
    """

    title: str
    note: str
    table: Table
    data: str = ""
    folded: bool | None = None


def page(
    *,
    title: str,
    facts: Mapping[str, str],
    careful: Sequence[str],
    body: Sequence[str],
    charts: Sequence[Chart],
    footer: str,
) -> str:
    """The whole page as HTML.

    Args:
        title: of the page.
        facts: what the header says.
        careful: what to know before reading on.
        body: parts in HTML, from `section_html`, `figure_html` and the like; empty ones are left out.
        charts: those that have a figure in the body.
        footer: one line at the end.
    """
    from plotly.offline import get_plotlyjs

    scripts = [get_plotlyjs().replace("\r", ""), (HERE / "page.js").read_text(encoding="utf-8")]
    rules = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = f"default-src 'none'; script-src {rules}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
    parts = [
        f"<header><h1>{escape(title)}</h1>",
        "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items()) + "</dl>",
        list_html(careful, "careful"),
        "</header>",
        *body,
        f"<footer>{escape(footer)}</footer>",
    ]
    # scripts stay as they are: the policy holds their digests
    title, data, *parts = (without_secrets(text, named=False) for text in (title, _chart_data(charts), *parts))
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{(HERE / 'page.css').read_text(encoding='utf-8')}</style>\n</head>\n<body>",
            *(part for part in parts if part),
            f'<script type="application/json" id="charts">{data}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body>\n</html>\n",
        ]
    )


def _chart_data(charts: Sequence[Chart]) -> str:
    drawn = []
    for chart in charts:
        panels = []
        for key, panel in chart.panels.items():
            curves = len(getattr(panel, "series", ()))
            panels.append({"key": [*key], **plotly_panel(panel, max(20, min(300, POINTS // max(curves, 1))))})
        drawn.append({"key": chart.key, "switches": [*chart.switches], "panels": panels})
    # no text of a run can end the element
    return json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def figure_html(chart: Chart, picture: Path | None, data: str) -> str:
    """A chart with its title, and what stands there without JavaScript.

    Args:
        chart: what is drawn.
        picture: PNG of it; None: a line says that it is drawn by JavaScript.
        data: CSV of it, as the page calls it.
    """
    shown = "<noscript>This chart needs JavaScript.</noscript>"
    if picture is not None:
        shown = f'<img src="{data_uri(picture, "image/png")}" alt="{escape(chart.title)}">'
    return (
        f'<section><h2>{escape(chart.title)}</h2><p class="note">{escape(chart.note)}{_data_link(data)}</p>'
        f'<figure id="chart-{chart.key}"><div class="switches"></div><div class="legend"></div>'
        f'<div class="plot"></div>{shown}</figure></section>'
    )


def picture_html(title: str, note: str, picture: Path) -> str:
    """A heading with a PNG below it."""
    image = f'<img src="{data_uri(picture, "image/png")}" alt="{escape(title)}">'
    return f'<section><h2>{escape(title)}</h2><p class="note">{escape(note)}</p><figure>{image}</figure></section>'


def _data_link(data: str) -> str:
    return f' Data: <a href="{escape(data)}">{escape(Path(data).name)}</a>' if data else ""


def section_html(section: Section) -> str:
    """A heading, a note and a table."""
    link = _data_link(section.data)
    note = f'<p class="note">{escape(section.note)}{link}</p>' if section.note or link else ""
    title, content = f"<h2>{escape(section.title)}</h2>", f"{note}{table_html(section.table)}"
    if section.folded is None:
        return f"<section>{title}{content}</section>"
    state = "" if section.folded else " open"
    return f"<section><details{state}><summary>{title}</summary>{content}</details></section>"


def table_html(table: Table) -> str:
    """A table that scrolls inside itself."""
    # a column without a number, or with sentences, reads from the left
    columns = [[row[i] for row in table.rows] for i in range(len(table.headings))]
    right = [
        i > 0 and not any(c.long for c in cells) and any(_is_number(c.text) for c in cells)
        for i, cells in enumerate(columns)
    ]
    kinds = ["" if each else "text" for each in right]
    head = "".join(
        f'<th class="{kind}"{f" title={chr(34)}{escape(why)}{chr(34)}" if why else ""}>{escape(text)}</th>'
        for (text, why), kind in zip(table.headings, kinds, strict=True)
    )
    rows = "".join(
        f"<tr{' class=' + chr(34) + 'reference' + chr(34) if place in table.marked else ''}>"
        + "".join(_cell(cell, kind) for cell, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for place, row in enumerate(table.rows)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _is_number(text: str) -> bool:
    return text[:1] in set("+-0123456789<")


def _cell(cell: Cell, kind: str) -> str:
    dot = (
        ""
        if cell.colour is None
        else f'<span class="dot" style="background:{COLOURS[cell.colour % len(COLOURS)]}"></span>'
    )
    sub = f'<span class="sub">{escape(cell.sub)}</span>' if cell.sub else ""
    return f'<td class="{"long" if cell.long else kind}">{dot}{escape(cell.text)}{sub}</td>'


def list_html(items: Sequence[str], kind: str) -> str:
    """A list of sentences of a kind that the style sheet knows; nothing without items."""
    return f'<ul class="{kind}">{"".join(f"<li>{escape(item)}</li>" for item in items)}</ul>' if items else ""


def data_uri(path: Path, kind: str) -> str:
    """A file as an address that holds it."""
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"

"""Self-contained HTML page: one file that loads nothing else.

Texts of runs and files (names, captions, reasons) are untrusted: they are escaped by `html.escape`, or written as JSON
without `<`. The content security policy of the page allows only its own two scripts and no network access.
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
"""Most points of all curves of a panel together; the limit per curve is between 20 and 300."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A table cell.

    Args:
        text: the text.
        sub: smaller text below it.
        colour: index of the colour of a dot before the text, None for no dot.
        long: whether the text is a sentence.
    """

    text: str
    sub: str = ""
    colour: int | None = None
    long: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the page; a click on a heading sorts it.

    Args:
        headings: texts with their explanations, "" for none.
        rows: cells of the rows.
        marked: indices of the highlighted rows.
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
        table: the table.
        data: file with the numbers, beside the page; "" for none.
        folded: whether the section is folded at first; None for a section that cannot be folded.
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
        title: title of the page.
        facts: facts in the header, by heading.
        careful: warnings below the facts.
        body: HTML parts from `section_html`, `figure_html` and similar functions; empty parts are left out.
        charts: charts of the figures in the body.
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
    # secrets are masked in all parts but the scripts, whose digests are in the policy
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
    chart_data = []
    for chart in charts:
        panels = []
        for key, panel in chart.panels.items():
            curves = len(getattr(panel, "series", ()))
            panels.append({"key": [*key], **plotly_panel(panel, max(20, min(300, POINTS // max(curves, 1))))})
        chart_data.append({"key": chart.key, "switches": [*chart.switches], "panels": panels})
    # without <, no text of a run can close the script element
    return json.dumps(chart_data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def figure_html(chart: Chart, picture: Path | None, data: str) -> str:
    """A chart with its title and a fallback without JavaScript.

    Args:
        chart: the chart.
        picture: PNG that is shown without JavaScript; None: a line says that the chart needs it.
        data: path of its CSV relative to the page, "" for none.
    """
    image_html = "<noscript>This chart needs JavaScript.</noscript>"
    if picture is not None:
        image_html = f'<img src="{data_uri(picture, "image/png")}" alt="{escape(chart.title)}">'
    return (
        f'<section><h2>{escape(chart.title)}</h2><p class="note">{escape(chart.note)}{_data_link(data)}</p>'
        f'<figure id="chart-{chart.key}"><div class="switches"></div><div class="legend"></div>'
        f'<div class="plot"></div>{image_html}</figure></section>'
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
    """A table with its own scroll bar."""
    # columns without numbers, or with sentences, are aligned left
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
    """An HTML list with the CSS class `kind`; empty without items."""
    return f'<ul class="{kind}">{"".join(f"<li>{escape(item)}</li>" for item in items)}</ul>' if items else ""


def data_uri(path: Path, kind: str) -> str:
    """The content of a file as a data URI."""
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"

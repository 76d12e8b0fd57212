"""The page of a report: one file that needs no other and loads nothing.

Whatever a run says (names, captions, reasons) is text of strangers: it goes through `html.escape`, or into JSON without
a `<`. The page's own policy lets a browser run its two scripts and nothing else, and fetch nothing at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from vsa.sweeps.reports.charts import COLOURS, Chart, plotly_panel
from vsa.sweeps.reports.clips import ClipTable, data_uri
from vsa.sweeps.reports.tables import Cell, Table

HERE = Path(__file__).parent
POINTS = 6_000
"""Points of all curves of a panel together; a curve has at most 300, and at least 20."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with a table below it.

    Args:
        title: the heading.
        note: a sentence or two below it.
        table: rows.
        data: file with the numbers, beside the page; "" for none.
    """

    title: str
    note: str
    table: Table
    data: str = ""


def page(
    *,
    title: str,
    facts: Mapping[str, str],
    careful: Sequence[str],
    results: Section,
    charts: Sequence[tuple[Chart, Path]],
    clips: ClipTable,
    sections: Sequence[Section],
    not_shown: Sequence[str],
    data: str,
) -> str:
    """The whole page as HTML.

    Args:
        title: of the page.
        facts: what the header says.
        careful: what speaks against comparing the runs.
        results: the table of the variants.
        charts: with the picture of each that stands there without JavaScript.
        clips: beside each other.
        sections: further tables.
        not_shown: what is missing for figures.
        data: folder of the CSVs and PNGs, as the page calls it.
    """
    from plotly.offline import get_plotlyjs

    scripts = [get_plotlyjs().replace("\r", ""), (HERE / "page.js").read_text(encoding="utf-8")]
    rules = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = f"default-src 'none'; script-src {rules}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
    body = [
        f"<header><h1>{escape(title)}</h1>",
        "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items()) + "</dl>",
        _list(careful, "careful"),
        "</header>",
        _section(results),
        *(_figure(chart, picture, data) for chart, picture in charts),
        _clips(clips),
        *(_section(section) for section in sections),
    ]
    if not_shown:
        body.append(f"<section><h2>Not shown</h2>{_list(not_shown, 'missing')}</section>")
    body.append(f"<footer>Every figure as CSV and PNG: {escape(data)}/</footer>")
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{(HERE / 'page.css').read_text(encoding='utf-8')}</style>\n</head>\n<body>",
            *(part for part in body if part),
            f'<script type="application/json" id="charts">{_chart_data([chart for chart, _ in charts])}</script>',
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


def _figure(chart: Chart, picture: Path, data: str) -> str:
    source = data_uri(picture, "image/png")
    links = f'<a href="{escape(data)}/{chart.key}.csv">{chart.key}.csv</a>'
    return (
        f'<section><h2>{escape(chart.title)}</h2><p class="note">{escape(chart.note)} Data: {links}</p>'
        f'<figure id="chart-{chart.key}"><div class="switches"></div><div class="legend"></div>'
        f'<div class="plot"></div><img src="{source}" alt="{escape(chart.title)}"></figure></section>'
    )


def _section(section: Section) -> str:
    link = f' Data: <a href="{escape(section.data)}">{escape(Path(section.data).name)}</a>' if section.data else ""
    note = f'<p class="note">{escape(section.note)}{link}</p>' if section.note or link else ""
    return f"<section><h2>{escape(section.title)}</h2>{note}{table_html(section.table)}</section>"


def table_html(table: Table) -> str:
    """A table that scrolls inside itself."""
    # a column without a number reads from the left
    columns = [[row[i].text for row in table.rows] for i in range(len(table.headings))]
    kinds = ["" if i and any(map(_is_number, texts)) else "text" for i, texts in enumerate(columns)]
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


def _list(items: Sequence[str], kind: str) -> str:
    return f'<ul class="{kind}">{"".join(f"<li>{escape(item)}</li>" for item in items)}</ul>' if items else ""


def _clips(clips: ClipTable) -> str:
    if not clips.rows:
        return ""
    head = "".join(f'<th>{escape(name)}<span class="sub">{escape(said)}</span></th>' for name, said in clips.headings)
    rows = "".join(
        f"<tr><td>{escape(prompt)}</td>{''.join(_clip(path, prompt) for path in paths)}</tr>"
        for prompt, paths in clips.rows.items()
    )
    left = f" {clips.left_out} more prompts did not fit into the page (--clips-mb)." if clips.left_out else ""
    return (
        '<section class="clips"><h2>Sampled clips</h2>'
        f'<p class="note">The newest clips of the first run of each variant.{left}</p>'
        f'<div class="scroll"><table><thead><tr><th>prompt</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        "</section>"
    )


def _clip(path: Path | None, prompt: str) -> str:
    return "<td></td>" if path is None else f'<td><img src="{data_uri(path, "image/gif")}" alt="{escape(prompt)}"></td>'

"""Self-contained HTML page: one file that loads nothing else, with the CSVs and PNGs of its figures beside it.

Texts of runs and files (names, captions, reasons) are untrusted: they are escaped by `html.escape`, or written as JSON
without `<`. The content security policy of the page allows only its own scripts and no network access.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from vsa.files import write_whole
from vsa.pages.charts import Chart, draw_panel, plotly_panel, write_csv
from vsa.plotting import COLOURS
from vsa.secrets import known_secrets, without_secrets

HERE = Path(__file__).parent
POINTS = 6_000
"""Most points of all curves of a panel together; the limit per curve is between 20 and 300."""

_NUMBER = tuple("+-0123456789<")


@dataclass(frozen=True)
class Cell:
    """A table cell.

    Args:
        text: the text.
        sub: smaller text below it.
        colour: index of the colour of a dot before the text, None for no dot.
    """

    text: str
    sub: str = ""
    colour: int | None = None


class Table:
    """A table of the page; a click on a heading sorts it.

    Args:
        headings: texts, or texts with their explanations.
        rows: cells of the rows; a text is a cell of nothing else.
        title: heading above the table.
        note: a sentence or two below the heading.
        marked: indices of the highlighted rows.
        long: indices of the columns of sentences.
        folded: whether the section is folded at first; None for a section that cannot be folded.
    """

    def __init__(
        self,
        headings: Sequence[str | tuple[str, str]],
        rows: Iterable[Sequence[str | Cell]],
        *,
        title: str = "",
        note: str = "",
        marked: Collection[int] = (),
        long: Collection[int] = (),
        folded: bool | None = None,
    ):
        self.headings = [(each, "") if isinstance(each, str) else each for each in headings]
        self.rows = [[Cell(each) if isinstance(each, str) else each for each in row] for row in rows]
        self.title, self.note, self.marked, self.long, self.folded = title, note, marked, long, folded


@dataclass(frozen=True, kw_only=True)
class Clips:
    """Clips by prompt.

    Args:
        first: name of the column of prompts.
        headings: name of each further column, and a label below it.
        rows: the GIF of each column by prompt, None if the column has no clip of it.
        left_out: number of prompts that did not fit into the page.
    """

    headings: Sequence[tuple[str, str]]
    rows: Mapping[str, Sequence[Path | None]]
    left_out: int
    first: str = "prompt"


class Page:
    """A page that is written section by section, in the order in which they are added.

        page = Page(out / "report.html", title="Runs", facts={"Runs": "3"}, warnings=["..."], folder="report")
        page.table(table, data=page.csv("variants", columns, rows))  # report/variants.csv
        page.chart(chart)  # report/loss.csv, report/loss-validation-steps.png, ...
        page.picture("Attention", "Tiles of a clip.", png)
        page.write("Every figure as CSV and PNG: report/")

    CSVs and PNGs are written when their section is added, the page itself by `write`, whole and last.

    Args:
        path: HTML file to write.
        title: title of the page.
        facts: facts in the header, by heading.
        warnings: sentences below the facts.
        folder: name of the folder beside the page for CSVs and PNGs; "" for a page without any.
        subject: subject of the page, for the titles of the PNGs.
    """

    def __init__(
        self,
        path: Path,
        *,
        title: str,
        facts: Mapping[str, str] | None = None,
        warnings: Sequence[str] = (),
        folder: str = "",
        subject: str = "",
    ):
        self.path, self.title, self.folder, self.subject = path, title, folder, subject
        entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in (facts or {}).items())
        self._parts = [f"<header><h1>{escape(title)}</h1><dl>{entries}</dl>{_list(warnings, 'careful')}</header>"]
        self._charts: list[Chart] = []
        self._scripts: list[str] = []
        self._styles = [_own("page.css")]

    def csv(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
        """Write `name`.csv in the folder; returns its name, for the `data` of a section."""
        return write_csv(self.path.parent / self.folder / f"{name}.csv", columns, rows).name

    def chart(self, chart: Chart, *, data: str = "", picture: Path | None = None) -> None:
        """Add a chart. With a folder, its rows become KEY.csv and its panels KEY-PANEL.png there.

        Args:
            chart: the chart.
            data: name of the file with its numbers; "": of its own CSV, if the page has a folder.
            picture: PNG that is shown without JavaScript; None: the first of its own, else a line that asks for it.
        """
        if self.folder:
            data = data or self.csv(chart.key, chart.columns, chart.rows)
            title = f"{chart.title}, {self.subject}" if self.subject else chart.title
            for key in chart.panels if chart.drawn is None else chart.drawn:
                name = "-".join((chart.key, *key)).replace(" ", "_")
                named = f"{title}: {', '.join(key)}" if key else title
                own = draw_panel(chart.panels[key], self.path.parent / self.folder / f"{name}.png", title=named)
                picture = picture or own
        image = _image(picture, chart.title) if picture else "<noscript>This chart needs JavaScript.</noscript>"
        self._charts.append(chart)
        self._section(
            chart.title,
            self._note(chart.note, data),
            f'<figure id="chart-{chart.key}"><div class="switches"></div><div class="legend"></div>'
            f'<div class="plot"></div>{image}</figure>',
        )

    def table(self, table: Table, *, data: str = "") -> None:
        """Add a table; `data` is the name of the file with its numbers."""
        self._section(table.title, self._note(table.note, data), table_html(table), folded=table.folded)

    def picture(self, title: str, note: str, picture: Path) -> None:
        """Add a PNG."""
        self._section(title, self._note(note), f"<figure>{_image(picture, title)}</figure>")

    def clips(self, title: str, note: str, clips: Clips) -> None:
        """Add clips; nothing without any."""
        if not clips.rows:
            return
        if clips.left_out:
            note += f" {clips.left_out} more prompts did not fit into the page (--clips-mb)."
        head = "".join(f"<th>{escape(name)}{_sub(label)}</th>" for name, label in clips.headings)
        lines = "".join(
            f"<tr><td>{escape(prompt)}</td>"
            + "".join(f"<td>{_image(path, prompt, 'gif') if path else ''}</td>" for path in paths)
            + "</tr>"
            for prompt, paths in clips.rows.items()
        )
        table = f"<table><thead><tr><th>{escape(clips.first)}</th>{head}</tr></thead><tbody>{lines}</tbody></table>"
        self._section(title, self._note(note), f'<div class="scroll">{table}</div>', kind="clips")

    def missing(self, sentences: Sequence[str]) -> None:
        """Add what is not shown, with the reasons; nothing without any."""
        if sentences:
            self._section("Not shown", _list(sentences, "missing"))

    def interactive(self, html: str, *, data: Any, script: str, style: str = "") -> None:
        """Add trusted HTML with a script of its own, which reads the JSON of `data` in the element with id `data`."""
        self._parts.append(f"{html}{_json(data, 'data')}")
        self._scripts.append(script)
        self._styles.append(style)

    def write(self, footer: str = "") -> Path:
        """Write the page with one line at the end; returns its path."""
        scripts = [_own("page.js"), *self._scripts]
        if self._charts:
            from plotly.offline import get_plotlyjs

            scripts.insert(0, get_plotlyjs().replace("\r", ""))
        rules = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
        policy = (
            f"default-src 'none'; script-src {rules}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
        )
        parts = [*self._parts, f"<footer>{escape(footer)}</footer>", _json(_chart_data(self._charts), "charts")]
        # secrets, as HTML and JSON spell them, are masked in all parts but the scripts, whose digests the policy holds
        secrets = [form for secret in known_secrets() for form in (secret, escape(secret), _json_text(secret)[1:-1])]
        title, *parts = (without_secrets(text, secrets, named=False) for text in (self.title, *parts))
        lines = [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<title>{escape(title)}</title>",
            *(f"<style>\n{style}</style>" for style in self._styles if style),
            "</head>\n<body>",
            *parts,
            *(f"<script>{script}</script>" for script in scripts),
            "</body>\n</html>\n",
        ]
        write_whole(self.path, "\n".join(lines))
        return self.path

    def _note(self, text: str, data: str = "") -> str:
        place = f"{self.folder}/{data}" if self.folder else data
        link = f' Data: <a href="{escape(place)}">{escape(data)}</a>' if data else ""
        return f'<p class="note">{escape(text)}{link}</p>' if text or link else ""

    def _section(self, title: str, *content: str, folded: bool | None = None, kind: str = "") -> None:
        inside = f"<h2>{escape(title)}</h2>"
        if folded is None:
            inside += "".join(content)
        else:
            inside = f"<details{'' if folded else ' open'}><summary>{inside}</summary>{''.join(content)}</details>"
        self._parts.append(f'<section class="{kind}">{inside}</section>' if kind else f"<section>{inside}</section>")


def table_html(table: Table) -> str:
    """A table with its own scroll bar."""
    long = {place % len(table.headings) for place in table.long}
    # columns without numbers, or with sentences, are aligned left
    kinds = [
        "long" if i in long else "" if i > 0 and any(row[i].text[:1] in _NUMBER for row in table.rows) else "text"
        for i in range(len(table.headings))
    ]
    head = "".join(
        f'<th class="{kind and "text"}"{f" title={chr(34)}{escape(why)}{chr(34)}" if why else ""}>{escape(text)}</th>'
        for (text, why), kind in zip(table.headings, kinds, strict=True)
    )
    rows = "".join(
        f"<tr{' class=' + chr(34) + 'reference' + chr(34) if place in table.marked else ''}>"
        + "".join(_cell(cell, kind) for cell, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for place, row in enumerate(table.rows)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(cell: Cell, kind: str) -> str:
    colour = "" if cell.colour is None else COLOURS[cell.colour % len(COLOURS)]
    dot = colour and f'<span class="dot" style="background:{colour}"></span>'
    return f'<td class="{kind}">{dot}{escape(cell.text)}{cell.sub and _sub(cell.sub)}</td>'


def _sub(text: str) -> str:
    return f'<span class="sub">{escape(text)}</span>'


def _list(items: Sequence[str], kind: str) -> str:
    return f'<ul class="{kind}">{"".join(f"<li>{escape(item)}</li>" for item in items)}</ul>' if items else ""


def _image(path: Path, text: str, kind: str = "png") -> str:
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<img src="data:image/{kind};base64,{content}" alt="{escape(text)}">'


def _chart_data(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    chart_data = []
    for chart in charts:
        panels = []
        for key, panel in chart.panels.items():
            curves = len(getattr(panel, "series", ()))
            panels.append({"key": [*key], **plotly_panel(panel, max(20, min(300, POINTS // max(curves, 1))))})
        chart_data.append({"key": chart.key, "switches": [*chart.switches], "panels": panels})
    return chart_data


def _json(data: Any, name: str) -> str:
    return f'<script type="application/json" id="{name}">{_json_text(data)}</script>'


def _json_text(data: Any) -> str:
    # without <, no text of a run can close the script element
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _own(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")

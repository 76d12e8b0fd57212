"""Results of a comparison in a terminal: the page's tables with as many of their columns as fit."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Printed

from vsa.attention.denoising import DenoisingPlan
from vsa.evaluation.comparison.agreement import Denoised
from vsa.evaluation.comparison.figures import denoising_table, groups, is_part, plan_text, result_table
from vsa.evaluation.comparison.measure import Row
from vsa.pages.page import Table
from vsa.streams import visible

METHOD_WIDTH = 18
"""Columns of a terminal that a method's name has at least; a longer one is folded."""
BETWEEN = 3
"""Columns between two numbers."""
EDGES = 2
"""Columns left of the first and right of the last."""
SPARED = ("L2 error", "attention", "speed-up", "prediction", "recall p5", "kept", "seconds", "density", "recall")
"""Headings that a narrow terminal leaves to the page, the first one first."""


def print_results(rows: Sequence[Row], denoised: Sequence[Denoised], plan: DenoisingPlan) -> None:
    """Print the means of every method, then the denoising runs."""
    tables = {
        f"attention methods: {group}": result_table(some) for group, some in groups(rows).items() if not is_part(group)
    }
    if denoised:
        tables[f"denoising runs against dense attention{plan_text(plan)}"] = denoising_table(denoised)
    console = Console()
    for title, table in tables.items():
        console.print(_printed(title, table, console.width))


def _printed(title: str, table: Table, width: int) -> Printed:
    printed = Printed(title=escape(visible(title)), box=SIMPLE, pad_edge=False)
    columns = _columns_that_fit(table, width)
    for place in columns:
        options = (
            {"overflow": "fold", "min_width": METHOD_WIDTH} if place == 0 else {"no_wrap": True, "justify": "right"}
        )
        printed.add_column(table.headings[place][0], **options)
    for row in table.rows:
        cells = [f"{row[place].text} {row[place].sub}" if place == 0 else row[place].text for place in columns]
        printed.add_row(*(escape(visible(cell)) for cell in cells))
    return printed


def _columns_that_fit(table: Table, width: int) -> list[int]:
    """Places of the columns whose numbers stand whole beside a method's name in `width` columns of a terminal."""
    names = [heading for heading, _ in table.headings]
    widths = [max(len(name), *(len(row[place].text) for row in table.rows)) for place, name in enumerate(names)]
    columns = list(range(len(names)))
    for name in SPARED:
        if EDGES + METHOD_WIDTH + sum(BETWEEN + widths[place] for place in columns[1:]) <= width:
            break
        if name in names:
            columns.remove(names.index(name))
    return columns

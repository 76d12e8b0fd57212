"""`vsa config`: all settings with type, default and meaning."""

from __future__ import annotations

from typing import Annotated

import typer


def config(
    group: Annotated[
        str | None, typer.Argument(help="a group (model), one of its files (task/distill), or `run` for the rest")
    ] = None,
) -> None:
    """List the options of a config group; without a group, the groups and their files.

    \b
    vsa config
    vsa config task/distill
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if group is None:
        from vsa.config_files import choices

        table = Table("group", "file", "meaning")
        for name, files in choices().items():
            for i, (file, about) in enumerate(files.items()):
                table.add_row(escape(name) if i == 0 else "", escape(file), escape(about))
    else:
        from vsa.config_help import options

        table = Table("key", "expected", "default", "meaning", show_lines=True)
        for option in options(group):
            table.add_row(*map(escape, (option.key, option.type, option.default, option.meaning)))
    Console().print(table)

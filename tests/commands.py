"""Commands of `vsa` as tests call them: the command line of one function of `vsa.cli`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer


def run_command(function: Callable[..., None], *arguments: Any) -> None:
    """Run a command with these words; what it raises comes through."""
    app = typer.Typer()
    app.command()(function)
    command = typer.main.get_command(app)
    # without `main`, which has an end of its own for a Ctrl-C
    command.invoke(command.make_context("vsa", [str(word) for word in arguments]))

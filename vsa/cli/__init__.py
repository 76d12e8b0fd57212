"""The console command `vsa`: one file per command, with its arguments only; the work is imported when it runs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from importlib import import_module
from inspect import cleandoc
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from vsa.errors import one_line_errors
from vsa.places import place_of
from vsa.secrets import print_exception
from vsa.signals import end_at_once, handled_by
from vsa.streams import LOADING, lost_output, make_steady

COMMANDS = {
    "train": "vsa.cli.train:train",
    "plan": "vsa.cli.plan:plan",
    "sweep": "vsa.cli.sweep:sweep",
    "replay": "vsa.cli.replay:replay",
    "encode": "vsa.cli.encode:encode",
    "latents": "vsa.cli.latents:latents",
    "sample": "vsa.cli.sample:sample",
    "evaluate": "vsa.cli.evaluate:evaluate",
    "inspect": "vsa.cli.inspect:inspect",
    "compare-attention": "vsa.cli.compare_attention:compare_attention",
    "tune-sparge": "vsa.cli.tune_sparge:tune_sparge",
    "convert": "vsa.cli.convert:convert",
    "push": "vsa.cli.push:push",
    "merge": "vsa.cli.merge:merge",
    "verify-export": "vsa.cli.verify_export:verify_export",
    "certify": "vsa.cli.certify:certify",
    "report": "vsa.cli.report:report",
    "toy": "vsa.cli.toy:toy",
    "check-data": "vsa.cli.check_data:check_data",
    "config": "vsa.cli.config:config",
    "tiles": "vsa.cli.tiles:tiles",
    "simulate": "vsa.cli.simulate:simulate",
    "info": "vsa.cli.info:info",
}
"""Commands in the order of the help, each with the function that defines its arguments."""

PRINTED = {"plan", "replay", "verify-export", "report", "check-data", "config", "tiles", "simulate", "info"}
"""Commands that fail if their output cannot be written; the others write files, and go on without their lines."""


def _in_paragraphs(docstring: str) -> str:
    """A help text whose paragraphs fill the terminal, which typer would break where the docstring does."""
    paragraphs = cleandoc(docstring).split("\n\n")
    return "\n\n".join(text if text.startswith("\b") else text.replace("\n", " ") for text in paragraphs)


class LazyGroup(TyperGroup):
    """Command group that imports the file of a command on demand; bad input ends with one line and status 1."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # known names, for the suggestion after a misspelt one
        self.commands: Any = dict.fromkeys(COMMANDS)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module_name, _, function_name = COMMANDS[cmd_name].partition(":")
        module = import_module(module_name)
        single = typer.Typer(add_completion=False)
        settings = getattr(module, "CONTEXT_SETTINGS", None)
        function = _at_places(getattr(module, function_name))
        single.command(cmd_name, context_settings=settings, help=_in_paragraphs(function.__doc__ or ""))(function)
        command: Any = typer.main.get_command(single)
        work = command.callback

        def announced(**options: Any) -> None:
            # on stderr, also in a log, so that a pipe gets the result alone; other ranks say nothing
            if "torch" not in sys.modules and os.environ.get("LOCAL_RANK", "0") == "0":
                print(LOADING, file=sys.stderr, flush=True)
            work(**options)

        command.callback = announced
        return command

    def invoke(self, ctx: Any) -> Any:
        with one_line_errors():
            return super().invoke(ctx)


app = typer.Typer(cls=LazyGroup, pretty_exceptions_enable=False)


@app.callback(no_args_is_help=True)
def vsa() -> None:
    """Train, sample and evaluate video diffusion transformers with sparse attention.

    \b
    vsa train experiment=quickstart
    vsa sample outputs/quickstart/default --prompt "a red circle moving left slowly"
    """


def _at_places(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose paths are the values of `place_of`, which everything behind it takes."""

    def placed(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [placed(name, each) for each in value]
        return place_of(value, f"{name.replace('_', '-')} {value}") if isinstance(value, Path) else value

    return wraps(function)(lambda **options: function(**{name: placed(name, value) for name, value in options.items()}))


def _refuse_empty(words: Sequence[str]) -> None:
    """Refuse what an unset variable of a shell leaves of a path or a name; a prompt may be empty."""
    for option, word in pairwise(["", *words]):
        if (not word or (word.startswith("--") and word.endswith("="))) and "prompt" not in (word or option):
            raise ValueError(f"{word or option or 'command'} has an empty value: leave it out, or give a value")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line (that of the process by default) and exit with its status."""
    make_steady()
    words = sys.argv[1:] if arguments is None else list(arguments)
    # handlers are set before torch is imported, which takes seconds
    with handled_by(end_at_once) if words[:1] == ["train"] else nullcontext():
        try:
            with one_line_errors():
                _refuse_empty(words)
            app(args=words, prog_name="vsa")
        except Exception:
            # set here, because typer installs its own hook
            sys.excepthook = print_exception
            raise
        finally:
            lost = lost_output()
            if lost is not None and PRINTED.intersection(words[:1]):
                with one_line_errors():
                    # the status that a shell shows for other programs whose reader has gone
                    raise SystemExit(128 + signal.SIGPIPE) if isinstance(lost, BrokenPipeError) else lost

"""Fixtures of tiny runs."""

from tests.tiny_runs import (  # noqa: F401
    command_line,
    one_thread,
    tiny_config,
    tiny_overrides,
    tiny_run_dir,
    training,
    write_tiny_run,
)

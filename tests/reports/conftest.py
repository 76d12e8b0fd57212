"""Fixtures of tiny runs."""

from tests.tiny_runs import command_line, one_thread, tiny_overrides, training  # noqa: F401

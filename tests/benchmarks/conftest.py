"""Fixtures of tiny runs, and `scripts.bench` with a tiny shape."""

from tests.kernels.conftest import bench  # noqa: F401
from tests.tiny_runs import (  # noqa: F401
    command_line,
    one_thread,
    tiny_config,
    tiny_overrides,
    tiny_run_dir,
    training,
    write_tiny_run,
)

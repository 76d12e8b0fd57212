"""Fixtures of tiny runs."""

from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest

from tests.tiny_runs import (  # noqa: F401
    TinyTraining,
    command_line,
    one_thread,
    tiny_config,
    tiny_overrides,
    tiny_run_dir,
    training,
    write_tiny_run,
)
from tests.training.distillations import DENSE, DISTILL


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory) -> Path:
    """Run folder of a dense tiny run whose output is not zero."""
    runs = TinyTraining(tmp_path_factory.mktemp("teacher"), pytest.MonkeyPatch())
    runs(*DENSE)
    return runs.folder("dense")


@pytest.fixture
def distill(training, teacher_dir) -> Callable[..., L.Trainer]:  # noqa: F811 (the fixture)
    """`distill(*overrides, callbacks=())` distils the dense tiny run."""

    def run(*overrides: str, callbacks: tuple[L.Callback, ...] = ()) -> L.Trainer:
        return training(*DISTILL, f"init_from={teacher_dir}", *overrides, callbacks=callbacks)

    return run

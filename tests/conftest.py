"""What every test shares: configs compose as `vsa train` composes them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session", autouse=True)
def options_need_no_plus() -> Iterator[None]:
    """An override may name an option that no config file holds, because its default stands in Python."""
    if find_spec("hydra") is None:
        # tests of kernels run where there is only torch
        yield
        return
    from vsa.training.hydra_guard import checked_hydra

    with checked_hydra():
        yield

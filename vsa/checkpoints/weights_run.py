"""A run folder that holds weights alone, as conversion and merging make them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vsa.checkpoints.run_checkpoint import write_checkpoint
from vsa.checkpoints.run_folder import write_manifest
from vsa.files import atomic_folder


def write_weights_run(folder: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a run folder with weights alone; it appears when all of it is written.

    Args:
        folder: must not exist.
        tensors: by parameter name.
        state: see `write_checkpoint`.
    """
    with atomic_folder(folder) as temporary:
        write_checkpoint(temporary / "checkpoints", {"model": tensors}, state)
        write_manifest(temporary)

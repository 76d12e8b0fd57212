"""A run folder that contains weights only, written by conversion and merging."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vsa.checkpoints.manifest import write_manifest
from vsa.checkpoints.run_checkpoint import write_checkpoint
from vsa.files import atomic_folder


def write_weights_run(folder: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a run folder with weights only, atomically.

    Args:
        folder: target folder, which must not exist.
        tensors: tensors by parameter name.
        state: see `write_checkpoint`.
    """
    with atomic_folder(folder) as temporary:
        write_checkpoint(temporary / "checkpoints", {"model": tensors}, state)
        write_manifest(temporary)

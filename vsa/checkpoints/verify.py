"""Verification of an exported checkpoint: this project's model against the golden tensors, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from vsa.attention.video_sparse import Backend
from vsa.checkpoints.golden import GoldenError, attention_output, check_golden
from vsa.checkpoints.weight_source import open_network
from vsa.errors import usable_device


def verify_export(
    folder: Path, *, layers: Sequence[int] | None = None, backend: Backend | None = None, device: str | None = None
) -> None:
    """Print the error of every layer of an exported sparse checkpoint.

    Args:
        folder: folder with `sparse_attention.json` and its golden tensors.
        layers: layers that are checked; None: all of the model.
        backend: backend of the sparse attention; None: default of the device.
        device: device to use; None: a GPU if there is one.

    Raises:
        ValueError: the error of a layer exceeds the tolerance, or a layer cannot be checked (`check_golden`).
    """
    model, info = open_network(folder, device=usable_device(device), backend=backend)
    with torch.no_grad():
        errors = check_golden(info.folder, partial(attention_output, model), layers=layers)
    _print_table(errors)
    for row in errors:
        if row.failed:
            raise ValueError(f"layer {row.layer} has error {row.error:.3e}, above its tolerance {row.tolerance:.3e}")
    print(f"{len(errors)} layers of {info.folder} conform: their self-attention, no other weights are compared")


def _print_table(errors: Sequence[GoldenError]) -> None:
    table = Table(title="relative error of each layer's self-attention")
    for heading in ("layer", "error", "tolerance", ""):
        table.add_column(heading, justify="right")
    for row in errors:
        table.add_row(str(row.layer), f"{row.error:.2e}", f"{row.tolerance:.2e}", "FAILED" if row.failed else "ok")
    Console().print(table)

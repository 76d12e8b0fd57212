"""Arguments of `vsa verify-export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vsa.cli.options import Device, option


def verify_export(
    folder: Annotated[Path, typer.Argument(help="exported folder with sparse_attention.json")],
    backend: Annotated[
        Literal["reference", "gather", "triton"] | None, option("of the sparse attention (that of the device)")
    ] = None,
    device: Device = None,
) -> None:
    """Check our own model against the golden tensors of an exported sparse checkpoint.

    Another engine does the same in a few lines: it opens the folder's weights, writes a function that computes one
    layer's self-attention for a `vsa.checkpoints.golden.GoldenCase` and gives it to `check_golden`. Exit status 1 when
    a layer is further off than the tolerance.

    \b
    vsa verify-export EXPORT
    vsa verify-export EXPORT --backend reference --device cpu
    """
    from vsa.checkpoints.verify import verify_export

    verify_export(folder, backend=backend, device=device)

"""Arguments of `vsa verify-export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vsa.cli.options import Device, option
from vsa.cli.values import numbers


def verify_export(
    folder: Annotated[Path, typer.Argument(help="exported folder with sparse_attention.json")],
    backend: Annotated[
        Literal["reference", "gather", "triton"] | None, option("backend of sparse attention (by device)")
    ] = None,
    layers: Annotated[str | None, option("layers to check (all)", metavar="N,N,...")] = None,
    device: Device = None,
) -> None:
    """Check our model against the golden tensors of an exported sparse checkpoint.

    Another engine can do the same in a few lines: load the weights of the folder, write a function that computes the
    self-attention of one layer for a `vsa.checkpoints.golden.GoldenCase`, and pass it to `check_golden`. Exits with
    status 1 if a layer has no golden tensors or its error exceeds the tolerance.

    \b
    vsa verify-export EXPORT
    vsa verify-export EXPORT --backend reference --device cpu
    """
    from vsa.checkpoints.verify import verify_export

    verify_export(folder, layers=numbers("--layers", layers, int), backend=backend, device=device)

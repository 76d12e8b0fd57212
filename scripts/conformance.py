"""Check an engine against the golden tensors of an exported sparse checkpoint; this one checks our own model.

Another engine does the same in a few lines: it opens the folder's weights, writes a function that computes one
layer's self-attention for a `vsa.checkpoints.golden.GoldenCase` and gives it to `check_golden`. Exit status 1 when a
layer is further off than the tolerance.

python scripts/conformance.py exported
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from vsa.checkpoints.golden import GoldenError, attention_output, check_golden
from vsa.checkpoints.weight_source import open_network
from vsa.errors import one_line_errors, usable_device


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="exported folder with sparse_attention.json")
    parser.add_argument("--backend", help="of the sparse attention: reference, gather, triton (that of the device)")
    parser.add_argument("--device", help="cpu, cuda, ... (cuda when there is one)")
    return parser.parse_args(argv)


def print_table(found: list[GoldenError]) -> None:
    table = Table(title="relative error of each layer's self-attention")
    for heading in ("layer", "error", "tolerance", ""):
        table.add_column(heading, justify="right")
    for row in found:
        table.add_row(str(row.layer), f"{row.error:.2e}", f"{row.tolerance:.2e}", "FAILED" if row.failed else "ok")
    Console().print(table)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    device = usable_device(args.device)
    model, info = open_network(args.folder, device=device, backend=args.backend)
    with torch.no_grad():
        found = check_golden(info.folder, partial(attention_output, model))
    print_table(found)
    for row in found:
        if row.failed:
            raise ValueError(f"layer {row.layer} has error {row.error:.3e}, above its tolerance {row.tolerance:.3e}")
    print(f"{len(found)} layers of {info.folder} conform")


if __name__ == "__main__":
    with one_line_errors():
        main()

"""Compiles launches ahead, or meets the same launches as a program would, and prints JSON.

    PYTHONPATH=kernels python tests/kernels/ahead.py compile --stage operator
    PYTHONPATH=kernels python tests/kernels/ahead.py launch --stage operator

`compile` records the launches of a stage for a chip of capability 9.0, compiles them, and prints their number and
whether a second call had nothing to do. In `launch` every launch is a compilation (`aot.install`). It prints each
kernel that it meets, and whether the kernel was in the cache, first in bf16 and then in fp16.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import aot
import torch
from triton import knobs
from vsa_kernels.block_sparse import triton_fwd
from vsa_kernels.compile_ahead import compile_ahead, recorded_launches
from vsa_kernels.linear_gelu import triton_bias_gelu

PROBLEM = aot.Problem(head_dim=64, heads=2, num=8)


def few(p: aot.Problem) -> None:
    """A kernel per direction with partial sums, and one that takes descriptors."""
    x, bias = (torch.empty(*size, 264, dtype=aot.DTYPES[p.dtype]) for size in ((p.batch, 999), ()))
    triton_bias_gelu.forward(x, bias)
    triton_bias_gelu.backward(x, x, bias)
    mask = p.mask()
    triton_fwd.forward(*(p.tokens(mask.q_blocks, p.heads) for _ in range(3)), mask, 0.1)


STAGES = {"few": few, "operator": aot.operator}


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["compile", "launch"])
    parser.add_argument("--stage", choices=list(STAGES), required=True)
    args = parser.parse_args()
    stage = STAGES[args.stage]
    if args.mode == "compile":
        with recorded_launches((9, 0)) as launches:
            stage(PROBLEM)
        compilation = compile_ahead(launches, (9, 0), 2)
        assert compilation is not None
        compilation.wait()
        print(json.dumps([len(launches), compile_ahead(launches, (9, 0), 2) is None]))
        return
    found: list[tuple[str, bool]] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        found.append((src.name, cache_hit))

    aot.install(90)
    knobs.compilation.listener = listen
    stage(PROBLEM)
    compiled = found.copy()
    stage(replace(PROBLEM, dtype="fp16"))
    print(json.dumps([compiled, found[len(compiled) :]]))


if __name__ == "__main__":
    main()

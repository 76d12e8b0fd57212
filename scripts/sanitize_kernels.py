"""Forward and backward of every operator on 40 ragged problems, to run under compute-sanitizer, see gpu_soak.sh.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python scripts/sanitize_kernels.py

Every tensor has exactly the size that the op requires, so that an access past its end leaves the allocation. Values are
only checked to be finite; tests/kernels checks their accuracy.
"""

from __future__ import annotations

import argparse
import os
import random

import torch
from vsa_kernels.operators import OPERATORS
from vsa_kernels.testing import make_case

from vsa.errors import one_line_errors


def device() -> torch.device:
    """The GPU, or the CPU if kernels are interpreted."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    raise ValueError("expected a CUDA device (or TRITON_INTERPRET=1, to try the script itself)")


def problem(seed: int, at: torch.device) -> str:
    """Run all operators on one problem; returns its description."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    half = (torch.bfloat16, torch.float16) if at.type == "cuda" else ()
    dtype = rng.choice((*half, torch.float32))
    head_dim, group, kv_heads = rng.choice([16, 32, 48, 64, 128]), rng.choice([1, 2, 3]), rng.choice([1, 2])
    largest = rng.choice(
        [(64, 64), (64, 16), (128, 64), (128, 128), (100, 40)] if at.type == "cuda" else [(16, 16), (20, 9)]
    )
    sizes = [[rng.choice([1, n, rng.randint(1, n)]) for _ in range(rng.randint(1, 6))] for n in largest]
    batch, heads = 2, group * kv_heads
    case = make_case(
        *sizes, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, density=0.4, index_batch=1,
        index_heads=1, fine=True, kv_valid=True, dtype=dtype, device=at, seed=seed,
    )  # fmt: skip
    for operator in OPERATORS.values():
        for call in operator.cases(case):
            results, gradients = call.run("triton")
            for x in (*results, *gradients):
                assert x.isfinite().all(), f"{operator.name}: a result is not finite"
    shape = f"B {batch} H {heads}/{kv_heads} D {head_dim} L {sum(sizes[0])} S {sum(sizes[1])} blocks {largest}"
    return f"{dtype} {shape}".removeprefix("torch.")


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=40, help="number of problems (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first problem (default %(default)s)")
    args = parser.parse_args()
    with one_line_errors():
        at = device()
        for seed in range(args.first, args.first + args.problems):
            print(f"{seed}: {problem(seed, at)}", flush=True)
        if at.type == "cuda":
            torch.cuda.synchronize()
        print(f"{args.problems} problems done")


if __name__ == "__main__":
    main()

"""Tuning of the launch configurations of the Triton kernels on the GPU of this machine.

    python -m scripts.tune fwd dq dkv --head-dim 64 128
    python -m scripts.tune coarse_fwd coarse_dq coarse_dkv --write

Each candidate of a fixed grid is checked against an eager result and timed on a problem of 16,384 tokens and 12 heads
with 32 of 256 blocks listed per query block (coarse kernels: attention over the 256 block means). Candidates are
first compiled in parallel processes. `--write` pins the fastest in vsa_kernels/configs.json for this architecture.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from vsa_kernels import Blocks, launch, select_topk
from vsa_kernels.block_sparse import gather
from vsa_kernels.block_sparse.mask import BlockMask

from scripts.bench.timing import flush_buffer, gpu_times
from vsa.errors import one_line_errors
from vsa.files import atomic_file

KERNELS = ("fwd", "dq", "dkv", "coarse_fwd", "coarse_dq", "coarse_dkv")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_HEADS, _TOKENS, _TOPK, _BLOCK = 12, 16384, 32, 64
# small problems with the same divisibility as the large ones, on which compiled kernels are specialised
_COMPILE_TOKENS, _COMPILE_TOPK = 1024, 4
_REPEATS = 50
_FIELDS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "DESC", "maxnreg", "DP_FIRST")
_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}

Config = dict[str, int | None]


def candidates(kernel: str, dtype: torch.dtype, arch: int, pinned: Config) -> list[Config]:
    """Candidate configurations of a kernel, the pinned one first.

    Args:
        kernel: one of `KERNELS`.
        dtype: dtype of the tokens.
        arch: 10 * major + minor of the GPU's compute capability.
        pinned: current configuration; its fields that are not part of the grid are added to every candidate.
    """
    grid: list[Config] = []

    def add(**axes: tuple[int | None, ...]) -> None:
        for values in itertools.product(*axes.values()):
            grid.append(dict(zip(axes, values, strict=True)))

    if kernel.startswith("coarse_"):
        add(BLOCK_M=(16, 32, 64), BLOCK_N=(16, 32, 64), num_warps=(4, 8), num_stages=(1, 2, 3))
    elif dtype == torch.float32:
        tiles: dict[str, tuple[int | None, ...]] = {"BLOCK_M": (16, 32, 64), "BLOCK_N": (16, 32, 64)}
        add(**tiles, num_warps=(4, 8), num_stages=(1, 2), DESC=(0,), maxnreg=(None,))
    else:
        # tensor descriptors need Hopper or newer
        rest: dict[str, tuple[int | None, ...]] = {"DESC": (1, 0) if arch >= 90 else (0,), "maxnreg": (None,)}
        both: dict[str, tuple[int | None, ...]] = {"BLOCK_M": (64,), "BLOCK_N": (64,)}
        add(**both, num_warps=(4,), num_stages=(1, 2, 3), **{**rest, "maxnreg": (None, 96, 128, 168)})
        add(**both, num_warps=(8,), num_stages=(1, 2), **rest)
        for tile in ((32, 64), (64, 32)):
            add(BLOCK_M=(tile[0],), BLOCK_N=(tile[1],), num_warps=(4,), num_stages=(1, 2), **rest)
    if kernel.endswith("dkv"):
        grid = [{**config, "DP_FIRST": first} for config in grid for first in (0, 1)]
    unknown = {name: value for name, value in pinned.items() if name not in _FIELDS}
    configs = [pinned]
    for config in ({**config, **unknown} for config in grid):
        if config not in configs:
            configs.append(config)
    return configs


class Problem(NamedTuple):
    """A launch of one kernel, with an eager result to compare with.

    Args:
        run: function that launches the kernel under the current configuration.
        want: expected results.
        flops: floating point operations of the kernel.
    """

    run: Callable[[], Any]
    want: tuple[Tensor, ...]
    flops: int


def problem(
    kernel: str, head_dim: int, dtype: torch.dtype, device: torch.device,
    tokens: int = _TOKENS, topk: int = _TOPK, heads: int = _HEADS, block: int = _BLOCK,
) -> Problem:  # fmt: skip
    """Problem of a kernel with random data."""
    g = torch.Generator(device=device).manual_seed(0)
    coarse, scale = kernel.startswith("coarse_"), head_dim**-0.5
    num = tokens // block
    length = num if coarse else tokens
    size, dtype_in = (1, length, heads, head_dim), torch.float32 if coarse else dtype
    q, k, v, dout = (torch.randn(size, generator=g, device=device).to(dtype_in) for _ in range(4))
    # the coarse stage is attention to one block that holds all keys
    blocks = Blocks.from_sizes([length] if coarse else [block] * num, device)
    scores = torch.randn((1, heads, blocks.num, blocks.num), generator=g, device=device)
    index = select_topk(scores, 1 if coarse else topk, backend="reference")
    mask = BlockMask(index=index, q_blocks=blocks, kv_blocks=blocks, kv_valid=None)
    out, lse = gather.forward(q, k, v, mask, scale)
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2).contiguous()
    grads = gather.backward(dout, delta, lse, q, k, v, mask, scale)
    kind = kernel.removeprefix("coarse_")
    want = {"fwd": (out, lse), "dq": grads[:1], "dkv": grads[1:]}[kind]
    flops = 2 * _PRODUCTS[kind] * heads * length * (length if coarse else topk * block) * head_dim
    args = (q, k, v, None if coarse else mask, scale)
    return Problem(_runner(kernel, args, (dout, delta, lse), coarse and dtype.itemsize == 2), tuple(want), flops)


def _runner(kernel: str, args: Any, saved: Any, half: bool) -> Callable[[], Any]:
    from vsa_kernels.block_sparse import triton_bwd, triton_fwd
    from vsa_kernels.block_sparse.triton_tiles import Plan

    fwd: Any = triton_fwd
    bwd: Any = triton_bwd
    q, k, _, mask, _ = args
    kind = kernel.removeprefix("coarse_")
    if kind == "fwd":
        return lambda: fwd._run(*args, Plan.of(kernel, q, k, mask, half))
    if kind == "dq":
        return lambda: bwd._run_dq(*saved, *args, Plan.of(kernel, q, k, mask, half), None)
    if mask is None:
        return lambda: bwd._run_dkv(*saved, *args, Plan.of(kernel, q, k, mask, half), (None, None))
    # transposed and ordered once, because that is not part of the kernel
    columns = triton_bwd.transpose(mask.index.kv_indices, mask.index.kv_num_blocks, mask.kv_blocks.num)
    order = triton_bwd.long_first(columns, None, q.shape[0], q.shape[2], 1)

    def run() -> Any:
        with mock.patch.multiple(triton_bwd, transpose=lambda *_: columns, long_first=lambda *_: order):
            return bwd._run_dkv(*saved, *args, Plan.of(kernel, q, k, mask, half), (None, None))

    return run


def checked(p: Problem, config: Config, dtype: torch.dtype) -> Callable[[], Any]:
    """The launch of a kernel under a configuration; raises ValueError if its result is wrong."""
    from vsa_kernels.block_sparse import triton_tiles

    def run() -> Any:
        # plans are cached, and remove the entries that they use from the configuration
        triton_tiles._plan.cache_clear()
        with mock.patch.object(triton_tiles, "config", side_effect=lambda *_: dict(config)):
            return p.run()

    result = run()
    for x, want in zip(result if isinstance(result, tuple) else (result,), p.want, strict=True):
        error = float((x.double() - want.double()).norm() / want.double().norm())
        if not error <= (2e-2 if dtype.itemsize == 2 else 1e-4):
            raise ValueError(f"wrong result, off by {error:.3g}")
    return run


def measure(kernel: str, head_dim: int, dtype: torch.dtype, configs: list[Config]) -> list[tuple[float, Config]]:
    """Milliseconds of every candidate that works, fastest first; prints a line for each candidate."""
    device = torch.device("cuda")
    p, flush = problem(kernel, head_dim, dtype, device), flush_buffer(device)
    timed: list[tuple[float, Config]] = []
    for config in configs:
        try:
            run = checked(p, config, dtype)
            gpu_times(run, 10, flush, ahead=True)
            ms = statistics.median(gpu_times(run, _REPEATS, flush, ahead=True))
        # the compiler or the launch may raise any exception for a candidate; the others are still measured
        except Exception as error:
            print(
                f"  failed  {_line(config)}: {' '.join(f'{type(error).__name__}: {error}'.split())[:160]}", flush=True
            )
            continue
        timed.append((ms, config))
        pinned = "  (pinned)" if config is configs[0] else ""
        print(f"  {ms * 1e3:8.1f} us {p.flops / ms / 1e9:7.1f} TFLOP/s  {_line(config)}{pinned}", flush=True)
    return sorted(timed, key=lambda entry: entry[0])


def compile_all(jobs: Sequence[tuple[str, int, torch.dtype, Config]]) -> None:
    """Compile all candidates into Triton's cache, in up to 14 parallel processes."""
    count = max(1, min(14, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as workers:
        wait([workers.submit(compile_one, *job) for job in jobs])


def compile_one(kernel: str, head_dim: int, dtype: torch.dtype, config: Config) -> None:
    """Run a candidate once on a small problem with the compile keys of the large one."""
    # the measurement reports candidates that fail
    with contextlib.suppress(Exception):
        checked(_small_problem(kernel, head_dim, dtype), config, dtype)


@functools.cache
def _small_problem(kernel: str, head_dim: int, dtype: torch.dtype) -> Problem:
    # the problem of the coarse stage is already small
    size = {} if kernel.startswith("coarse_") else {"tokens": _COMPILE_TOKENS, "topk": _COMPILE_TOPK}
    return problem(kernel, head_dim, dtype, torch.device("cuda"), **size)


def write(path: Path, kernel: str, arch: int, bits: int, head_dim: int, config: Config) -> None:
    """Pin a configuration; a new architecture starts from the configurations of the newest older one."""
    table = json.loads(path.read_text())
    of_kernel = table[kernel]
    if str(arch) not in of_kernel:
        older = [int(name) for name in of_kernel if int(name) <= arch]
        of_kernel[str(arch)] = json.loads(json.dumps(of_kernel[str(max(older) if older else min(map(int, of_kernel)))]))
        table[kernel] = dict(sorted(of_kernel.items(), key=lambda item: int(item[0])))
    dims = table[kernel][str(arch)].setdefault(str(bits), {})
    dims[str(head_dim)] = config
    table[kernel][str(arch)][str(bits)] = dict(sorted(dims.items(), key=lambda item: int(item[0])))
    with atomic_file(path) as temporary:
        temporary.write_text(dump(table))


def dump(table: dict[str, Any], depth: int = 0) -> str:
    """Format a table as JSON with one line per configuration."""
    if not any(isinstance(value, dict) for value in table.values()):
        return json.dumps(table)
    inside = ",\n".join(f'{" " * (depth + 1)}"{key}": {dump(value, depth + 1)}' for key, value in table.items())
    return f"{{\n{inside}\n{' ' * depth}}}" + ("\n" if depth == 0 else "")


def _line(config: Config) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def main(argv: list[str]) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="+", choices=KERNELS, metavar="KERNEL", help=", ".join(KERNELS))
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128], metavar="D")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="dtype of the tokens")
    parser.add_argument("--write", action="store_true", help="pin the fastest in configs.json")
    args = parser.parse_args(argv)
    if not all(d % 16 == 0 and 16 <= d <= 256 for d in args.head_dim):
        raise ValueError(f"--head-dim must be multiples of 16 from 16 to 256, got {args.head_dim}")
    if not torch.cuda.is_available():
        raise ValueError("tuning needs a CUDA device, but torch finds none")
    device, dtype = torch.device("cuda"), DTYPES[args.dtype]
    major, minor = launch.capability(device)
    arch = 10 * major + minor
    plan = []
    for kernel, head_dim in itertools.product(args.kernels, args.head_dim):
        dtype_in = torch.float32 if kernel.startswith("coarse_") else dtype
        pinned = launch.config(kernel, head_dim, dtype_in, device)
        plan.append((kernel, head_dim, candidates(kernel, dtype, arch, pinned)))
    jobs = [(kernel, head_dim, dtype, config) for kernel, head_dim, configs in plan for config in configs]
    print(f"{torch.cuda.get_device_name(device)}, sm_{arch}: compiling {len(jobs)} candidates", flush=True)
    compile_all(jobs)
    for kernel, head_dim, configs in plan:
        print(f"{kernel}, D={head_dim}, {args.dtype}", flush=True)
        timed = measure(kernel, head_dim, dtype, configs)
        if not timed:
            raise ValueError(f"no candidate of {kernel} at D={head_dim} works")
        print(f"  fastest: {_line(timed[0][1])}", flush=True)
        if args.write:
            bits = 32 if kernel.startswith("coarse_") else dtype.itemsize * 8
            write(launch.CONFIGS, kernel, arch, bits, head_dim, timed[0][1])


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])

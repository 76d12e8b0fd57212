"""Compiles what the host functions would launch on a chip that is not there, and prints one JSON line per kernel.

    PYTHONPATH=kernels python tests/kernels/aot.py --arch 90 --plan quick

A stand-in for Triton's CUDA driver names the target, every launch becomes a compilation, and the host functions run on
CPU tensors with undefined values: so the kernels, constants and pinned configurations are those of production. It is a
program of its own because Triton picks its driver, and whether kernels are interpreted, once per process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import triton
import vsa_kernels
from torch import Tensor
from triton.backends.compiler import GPUTarget
from vsa_kernels import BlockIndex, Blocks, launch
from vsa_kernels.block_sparse.mask import BlockMask

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES = ((64, 64), (64, 16), (128, 64), (128, 128), (256, 256))
DIMS = tuple(range(16, 257, 16))


@dataclass(frozen=True, kw_only=True)
class Record:
    """What the compiler made of one kernel; `error` alone is set when there is none.

    Args:
        label: problem that launched it.
        stack: bytes of local memory per thread: spilled registers, as Triton's kernels have no local arrays.
        dots: rows, columns, depth and operand type of every matrix product in the source.
        wgmma: Hopper's matrix instruction is used.
        mma_sync: the older one is used.
    """

    label: str
    arch: int
    error: str = ""
    kernel: str = ""
    constants: dict[str, Any] = field(default_factory=dict)
    warps: int = 0
    stages: int = 0
    registers: int = 0
    stack: int = 0
    shared: int = 0
    dots: list[tuple[int, int, int, str]] = field(default_factory=list)
    wgmma: bool = False
    mma_sync: bool = False


class OfflineDriver:
    """As much of Triton's driver as compilation asks for; a GPU is never touched.

    Args:
        capability: compute capability of the chip that kernels are compiled for.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        """Nothing is launched."""

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def install(arch: int) -> list[Any]:
    """Turns every launch of this process into a compilation for `arch`; returns the list that collects them."""
    from triton.runtime.jit import JITFunction

    if triton.knobs.runtime.interpret:
        raise SystemExit("kernels are interpreted: unset TRITON_INTERPRET")
    triton.runtime.driver.set_active(OfflineDriver(divmod(arch, 10)))  # type: ignore[arg-type]
    real = launch.capability

    def capability(device: torch.device) -> tuple[int, int]:
        return divmod(arch, 10)

    # files that imported the function by name hold it too
    for module in list(sys.modules.values()):
        if getattr(module, "capability", None) is real:
            module.capability = capability  # type: ignore[attr-defined]
    kernels: list[Any] = []
    compile_and_launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = compile_and_launch(self, *args, grid=grid, warmup=True, **kwargs)
        kernels.append(kernel)
        return kernel

    JITFunction.run = run  # type: ignore[method-assign]

    # no call takes the short way to compiled code: there is nothing to run it on
    launch._runner = lambda *_compiled: None  # type: ignore[assignment,return-value]
    return kernels


def record_of(label: str, arch: int, kernel: Any) -> Record:
    """Reads one compiled kernel."""
    names, ptx = kernel.src.fn.arg_names, kernel.asm["ptx"]
    constants = {names[path[0]]: value for path, value in kernel.src.constants.items()}
    registers, stack = resources(kernel.asm["cubin"])
    # Gluon has no earlier form than ttgir
    product = re.compile(r"(?:tt\.dot|ttng\.warp_group_dot) .*: \S+<(\d+)x(\d+)x(\w+)[^*]*> \* \S+<\d+x(\d+)x\w+")
    source = kernel.asm["ttir" if "ttir" in kernel.asm else "ttgir"]
    dots = [(int(m), int(n), int(k), kind) for m, k, kind, n in product.findall(source)]
    return Record(
        label=label,
        arch=arch,
        kernel=kernel.name,
        constants={
            name: value if isinstance(value, int | str | None) else str(value) for name, value in constants.items()
        },
        warps=kernel.metadata.num_warps,
        stages=kernel.metadata.num_stages,
        registers=registers,
        stack=stack,
        shared=kernel.metadata.shared,
        dots=dots,
        wgmma="wgmma.mma_async" in ptx,
        mma_sync="mma.sync" in ptx,
    )


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory per thread, from the binary itself (a cached kernel has no ptxas log)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        process = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    match = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", process.stdout)
    assert match is not None, process.stdout
    registers, stack, local = map(int, match.groups())
    return registers, stack + local


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem as the host functions see it; tensors hold undefined values."""

    dtype: str = "bf16"
    head_dim: int = 128
    blocks: tuple[int, int] = (64, 64)
    even: bool = True
    valid: bool = False
    masked: bool = False
    group: int = 1
    batch: int = 2
    heads: int = 4
    num: int = 24

    def __str__(self) -> str:
        marks = "" if self.even else " ragged"
        marks += " valid" if self.valid else ""
        marks += " masked" if self.masked else ""
        marks += f" group {self.group}" if self.group > 1 else ""
        return f"{self.dtype} {self.head_dim} {self.blocks[0]}x{self.blocks[1]}{marks}"

    def sides(self) -> tuple[Blocks, Blocks]:
        """Query and kv blocks."""
        q, kv = (
            [size] * self.num if self.even else [size, size - 5, size, 3] * (self.num // 4) for size in self.blocks
        )
        return Blocks.from_sizes(q), Blocks.from_sizes(kv)

    def tokens(self, blocks: Blocks, heads: int) -> Tensor:
        return torch.empty(self.batch, int(blocks.offsets[-1]), heads, self.head_dim, dtype=DTYPES[self.dtype])

    def means(self, heads: int) -> Tensor:
        return torch.empty(self.batch, self.num, heads, self.head_dim)

    def mask(self, topk: int = 8, capacity: int = 24) -> BlockMask:
        q, kv = self.sides()
        rows = (self.batch, self.heads, self.num)
        index = BlockIndex(
            kv_indices=torch.empty(*rows, capacity, dtype=torch.int32),
            kv_num_blocks=torch.empty(rows, dtype=torch.int32),
            max_blocks=topk,
            min_blocks=topk,
        )
        if self.masked:
            bits = torch.empty(5, q.max_size, kv.max_size, dtype=torch.bool)
            counts, ids = torch.empty_like(index.kv_num_blocks), torch.empty_like(index.kv_indices)
            index = replace(index, kv_num_full_blocks=counts, mask_ids=ids, mask_bits=bits)
        valid = torch.empty(self.batch, self.num, dtype=torch.int32) if self.valid else None
        return BlockMask(index=index, q_blocks=q, kv_blocks=kv, kv_valid=valid)


def fine(p: Problem) -> None:
    """The fine stage, forward and backward, with and without the gradients of the means."""
    from vsa_kernels.block_sparse import dispatch, triton_bwd

    mask, kv_heads = p.mask(), p.heads // p.group
    q, k, v = p.tokens(mask.q_blocks, p.heads), *(p.tokens(mask.kv_blocks, kv_heads) for _ in range(2))
    out, lse = dispatch.forward(q, k, v, mask, 0.1)
    delta = triton_bwd.delta(out, out, lse, lse)
    for shares in (dispatch.NO_SHARES, (p.means(p.heads), p.means(kv_heads), p.means(kv_heads))):
        dispatch.backward(out, delta, lse, q, k, v, mask, 0.1, shares)


def skipping(p: Problem) -> None:
    """Attention that skips, with both denominators."""
    from vsa_kernels.skipping import triton_skipping

    if p.dtype == "fp32":
        # whole blocks of exact fp32 spill; it is for tests
        return
    mask, kv_heads = p.mask(), p.heads // p.group
    q, k, v = p.tokens(mask.q_blocks, p.heads), *(p.tokens(mask.kv_blocks, kv_heads) for _ in range(2))
    lists, rows = (mask.index, mask.q_blocks, mask.kv_blocks, torch.empty(p.heads)), p.blocks[0] // 4
    for keeps_sum in (True, False):
        triton_skipping.forward(q, k, v, *lists, rows, keeps_sum, 0.1)


def coarse(p: Problem) -> None:
    """Dense attention over the block means, in whole tiles and not."""
    from vsa_kernels.block_sparse import triton_bwd, triton_fwd

    kv_heads, half = p.heads // p.group, p.dtype != "fp32"
    for problem in (p, replace(p, num=64)):
        q, k, v = (problem.means(heads) for heads in (p.heads, kv_heads, kv_heads))
        out, lse = triton_fwd.dense(q, k, v, 0.1, half=half)
        triton_bwd.dense(out, torch.empty_like(lse), lse, q, k, v, 0.1, half=half)


def transpose(p: Problem) -> None:
    """The index of the backward."""
    from vsa_kernels.block_sparse import triton_index

    index = p.mask().index
    for num_kv in (p.num, 1200, 4096):
        triton_index.transpose(index.kv_indices, index.kv_num_blocks, num_kv)


def pooling(p: Problem) -> None:
    """Means of q, k and v in one launch, their gradient, and means with similarities."""
    from vsa_kernels.pooling import triton_pool

    blocks, _ = p.sides()
    sizes = (blocks.offsets, blocks.max_size, blocks.min_size)
    kv_heads = p.heads // p.group
    q, k, v = (p.tokens(blocks, heads) for heads in (p.heads, kv_heads, kv_heads))
    for xs in ((q,), (k, v), (q, k, v)):
        triton_pool.forward(xs, *sizes)
    triton_pool.backward(p.means(p.heads), *sizes, q.shape[1], q.dtype)
    for center in (None, torch.empty(p.batch, p.heads, p.head_dim)):
        triton_pool.mean_and_similarity(q, center, *sizes)


def norm_rope(p: Problem) -> None:
    """Norm, with bias and rotation, of the problem's heads, and at the widths of models, forward and backward."""
    from vsa_kernels.norm_rope import triton_norm_rope

    for heads, head_dim in ((p.heads, p.head_dim), (12, 64), (12, 128), (40, 128)):
        x, weight = (torch.empty(*size, heads * head_dim, dtype=DTYPES[p.dtype]) for size in ((p.batch, 999), ()))
        for bias, table in (
            (None, torch.empty(999, head_dim // 2)),
            (weight, torch.empty(999, head_dim // 2)),
            (weight, None),
        ):
            inputs = (weight, bias, table, table)
            out, rstd = triton_norm_rope.forward(x, *inputs, heads, 1e-6)
            triton_norm_rope.backward(out, x, *inputs, rstd)


def linear_gelu(p: Problem) -> None:
    """Bias and GELU of an odd width, and at the widths of models, forward and backward."""
    from vsa_kernels.linear_gelu import triton_bias_gelu

    for width in (999, 3072, 8960):
        x, bias = (torch.empty(*size, width, dtype=DTYPES[p.dtype]) for size in ((p.batch, 999), ()))
        triton_bias_gelu.forward(x, bias)
        triton_bias_gelu.backward(x, x, bias)


def residual_norm(p: Problem) -> None:
    """The norms and residual connections of a block at an odd width and at the widths of models, forward and
    backward."""
    from vsa_kernels.residual_norm import triton_gated_residual, triton_residual_norm
    from vsa_kernels.residual_norm.api import MOST_GATED_CHANNELS

    for width in (999, 768, 1536, 5120):
        x, rows = (torch.empty(p.batch, size, width, dtype=DTYPES[p.dtype]) for size in (999, 1))
        offset = rows[0, 0]
        for update, update_bias, gate, weight in (
            (None, None, None, rows),
            (x, offset if width <= MOST_GATED_CHANNELS else None, rows, offset),
            (x, offset, None, rows),
            (x, None, rows, offset),
        ):
            inputs = (update, update_bias, gate, weight, weight)
            total, norm, mean, rstd = triton_residual_norm.forward(x, *inputs, 1e-6)
            dtotal, factor = (None, x) if update is None else (x, total)
            saved_tensors = (None if gate is None else update, update_bias, gate, weight)
            triton_residual_norm.backward(dtotal, norm, factor, *saved_tensors, weight, mean, rstd)
            # frozen parameters
            triton_residual_norm.backward(dtotal, norm, factor, None, None, gate, weight, None, mean, rstd)
        for update_bias in (offset, None):
            out = triton_gated_residual.forward(x, x, update_bias, rows)
            for update in (x, None):
                triton_gated_residual.backward(out, update, update_bias, rows)


def selection(p: Problem) -> None:
    """Top-k and top-p, plain and with every option, over few and many blocks, and a top-k over the most."""
    for num_kv in (p.num, 1200, 4096):
        select(p, num_kv, 8, min(32, num_kv))
    for num_kv in (p.num, 2048):
        select_by_share(p, num_kv)


def mean_scores(p: Problem) -> None:
    """Scores between block means of fp32 and of half precision."""
    from vsa_kernels.selection import triton_scores

    q, k = p.means(p.heads), p.means(p.heads // p.group)
    for precision in ("tf32", "ieee"):
        triton_scores.scores(q, k, 0.1, 0, 1, precision=precision)


def select(p: Problem, num_kv: int, topk: int, capacity: int) -> None:
    from vsa_kernels.selection import triton_topk

    scores = torch.empty(p.batch, p.heads, p.num, num_kv)
    candidates = torch.empty(p.num, num_kv, dtype=torch.bool)
    rows = torch.empty(p.num, dtype=torch.int32)
    triton_topk.select(scores, topk, None, None, None, capacity)
    triton_topk.select(scores, topk, None, candidates, None, capacity)
    triton_topk.select(scores, None, rows, candidates, candidates, num_kv)


def select_by_share(p: Problem, num_kv: int) -> None:
    from vsa_kernels.selection import triton_share

    scores, shares = torch.empty(1, p.heads, 4, num_kv), torch.empty(p.heads, dtype=torch.float64)
    column, row = torch.empty(1, p.heads, 1, num_kv, dtype=torch.bool), torch.empty(1, 1, 4, 1, dtype=torch.bool)
    triton_share.select(scores, shares, "keep", None, None)
    triton_share.select(scores, shares, "drop", column, row)


def widest_selection(p: Problem) -> None:
    """Top-p where one warp has the most blocks, and over the most."""
    for num_kv in (1024, 4096, 8192):
        select_by_share(p, num_kv)


def gates(p: Problem) -> None:
    """Gate and sum of the two stages, with and without the fine gate."""
    from vsa_kernels.coarse_fine import triton_gate

    blocks, _ = p.sides()
    tokens, means = p.tokens(blocks, p.heads), p.means(p.heads)
    for gate in (None, tokens):
        triton_gate.combine(tokens, means, tokens, gate, blocks)
        triton_gate.combine_backward(tokens, tokens, means, tokens, gate, blocks)


def operator(p: Problem) -> None:
    """The whole operator, forward and backward."""
    from vsa_kernels.coarse_fine import triton_op
    from vsa_kernels.coarse_fine.op import Call, Saved

    q_blocks, kv_blocks = p.sides()
    if p.blocks[0] == p.blocks[1]:
        kv_blocks = q_blocks
    q, gate = p.tokens(q_blocks, p.heads), p.tokens(q_blocks, p.heads)
    k, v = (p.tokens(kv_blocks, p.heads // p.group) for _ in range(2))
    for fine_gate in (None, gate):
        sizes = [x for b in (q_blocks, kv_blocks) for x in (b.offsets, b.max_size, b.min_size)]
        call = Call(q, k, v, gate, fine_gate, *sizes, topk=8, capacity=24, scale=0.1)
        out, *saved_tensors = triton_op.forward(call)
        triton_op.backward(out, Saved(*saved_tensors), call)


def gathered(p: Problem) -> None:
    """Groups of query tiles, with a mask of their members or without, and how they are found."""
    from vsa_kernels.gathered import TileGroups, triton_fwd, triton_group

    q_blocks, kv_blocks = p.sides()
    size = max(1, 128 // q_blocks.max_size)
    rows = (p.batch, p.heads, -(-p.num // size))
    lists, counts = torch.empty(*rows, p.num, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    groups = TileGroups(
        members=torch.empty(*rows, size, dtype=torch.int32), kv_indices=lists, kv_num_blocks=counts,
        kv_members=lists if p.masked else None, order=counts.flatten(),
    )  # fmt: skip
    k, v = (p.tokens(kv_blocks, p.heads // p.group) for _ in range(2))
    # Hopper has a kernel of its own for contiguous heads, and the other one for those of a wider projection
    for keys, values in ((k, v), (torch.cat([x, x], -1)[..., : p.head_dim] for x in (k, v))):
        triton_fwd.forward(p.tokens(q_blocks, p.heads), keys, values, groups, q_blocks, kv_blocks, 0.1)
    triton_group.group(torch.zeros(1, 1, 2048, 96, dtype=torch.bool), size)


def tiles_of_128(p: Problem) -> None:
    """The kernels of Hopper for tiles of 128, with and without a workspace and the gradients of the means."""
    from vsa_kernels.block_sparse import dispatch, hopper_bwd128, hopper_fwd128

    if launch.capability(torch.device("cpu")) != (9, 0):
        return
    mask, kv_heads = p.mask(), p.heads // p.group
    q, k, v = p.tokens(mask.q_blocks, p.heads), *(p.tokens(mask.kv_blocks, kv_heads) for _ in range(2))
    _, lse = hopper_fwd128.forward(q, k, v, mask, 0.1)
    for shares in (dispatch.NO_SHARES, (p.means(p.heads), p.means(kv_heads), p.means(kv_heads))):
        hopper_bwd128.backward(q, lse, lse, q, k, v, mask, 0.1, shares)
        hopper_bwd128.dkv(q, lse, lse, q, k, v, mask, 0.1, shares[1:])


def long_rows(p: Problem) -> None:
    """The forward in three ranges of keys, and the sum of dq over them."""
    from vsa_kernels.block_sparse import triton_ranges

    if launch.capability(torch.device("cpu")) != (9, 0):
        return
    mask, kv_heads = p.mask(), p.heads // p.group
    q, k, v = p.tokens(mask.q_blocks, p.heads), *(p.tokens(mask.kv_blocks, kv_heads) for _ in range(2))
    triton_ranges.ranges_of = lambda _: 3
    _, lse = triton_ranges.forward(q, k, v, mask, 0.1)
    triton_ranges.dq(q, lse, lse, q, k, v, mask, 0.1, p.means(p.heads))


STAGES: tuple[Callable[[Problem], None], ...] = (
    fine, skipping, coarse, transpose, pooling, mean_scores, norm_rope, linear_gelu, residual_norm,
    selection, gates, operator, gathered,
)  # fmt: skip
BY_SHAPE = (fine, pooling, gates, operator)
MASKED = (fine, gathered)


def annealing(topk: int, capacity: int) -> None:
    """One step of an annealing schedule, which changes the counts at a fixed shape."""
    from vsa_kernels.block_sparse import dispatch

    # neither the number of blocks nor every capacity is a multiple of 16
    p = Problem(num=70)
    mask = p.mask(topk, capacity)
    q = p.tokens(mask.q_blocks, p.heads)
    # Hopper has a kernel of its own for contiguous heads, and the other one for those of a wider projection
    wide = torch.cat([q, q], -1)[..., : p.head_dim]
    dispatch.forward(wide, wide, wide, mask, 0.1)
    out, lse = dispatch.forward(q, q, q, mask, 0.1)
    dispatch.backward(out, torch.empty_like(lse), lse, q, q, q, mask, 0.1)
    select(p, p.num, topk, capacity)


def plan(name: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """The (label, callable) pairs of a plan; the callables launch what is to be compiled."""
    if name == "toys":
        yield from importlib.import_module("aot_toys").CASES
        return
    if name == "annealing":
        for topk, capacity in ((2, 32), (1, 32), (16, 32), (17, 32), (33, 64), (69, 70), (70, 70)):
            yield f"annealing {topk}", lambda topk=topk, capacity=capacity: annealing(topk, capacity)
        return
    tuned = Problem()
    problems: dict[Problem, tuple[Callable[[Problem], None], ...]] = {}
    if name == "quick":
        ragged = replace(tuned, even=False, group=2)
        problems = {tuned: (*STAGES, long_rows), ragged: BY_SHAPE}
        problems |= {replace(p, masked=True): (fine,) for p in (tuned, ragged)}
        problems |= {replace(p, blocks=(128, 128)): (tiles_of_128,) for p in (tuned, ragged)}
    elif name == "tuned":
        for dim, blocks in ((d, b) for d in (64, 128) for b in ((64, 64), (128, 64))):
            for even in (True, False):
                variant = replace(tuned, head_dim=dim, blocks=blocks, even=even)
                problems |= {variant: STAGES, replace(variant, masked=True): MASKED}
        problems |= {replace(tuned, blocks=blocks): (gathered,) for blocks in ((128, 32), (16, 1))}
        problems[tuned] = (*STAGES, widest_selection)
    elif name == "dims":
        problems = {replace(tuned, head_dim=dim): STAGES for dim in DIMS}
        problems |= {replace(tuned, head_dim=dim, masked=True): MASKED for dim in DIMS}
    elif name in ("fp16", "fp32"):
        for dim in (16, 64, 80, 128, 256):
            problems[replace(tuned, dtype=name, head_dim=dim, even=False)] = STAGES
    elif name == "shapes":
        for blocks in SHAPES:
            problems[replace(tuned, blocks=blocks)] = BY_SHAPE
            ragged = replace(tuned, blocks=blocks, even=False, valid=True, group=2)
            problems |= {ragged: BY_SHAPE, replace(ragged, masked=True): (fine,)}
    else:
        raise SystemExit(f"no plan is called {name!r}")
    for problem, stages in problems.items():
        for stage in stages:
            yield f"{stage.__name__} {problem}", lambda stage=stage, problem=problem: stage(problem)


def kernels_in_source() -> set[str]:
    """Names of all kernels of the package: the jitted functions that are called `..._kernel`."""
    from triton.runtime.jit import JITFunction

    root = Path(vsa_kernels.__file__).parent
    names = set()
    for file in sorted((*root.rglob("triton_*.py"), *root.rglob("hopper_*.py"))):
        module = importlib.import_module(".".join(["vsa_kernels", *file.relative_to(root).with_suffix("").parts]))
        names |= {x.__name__ for x in vars(module).values() if isinstance(x, JITFunction) and "_kernel" in x.__name__}
    return names


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, default=90, help="compute capability without its dot (default %(default)s)")
    parser.add_argument("--plan", default="quick", help="quick, tuned, dims, fp16, fp32, shapes, annealing or toys")
    parser.add_argument("--only", default="", help="labels that contain this")
    args = parser.parse_args()
    kernels = install(args.arch)
    hashes: set[str] = set()
    start = time.monotonic()
    for label, call in plan(args.plan):
        if args.only not in label:
            continue
        kernels.clear()
        try:
            call()
        except Exception:
            print(json.dumps(asdict(Record(label=label, arch=args.arch, error=traceback.format_exc()))), flush=True)
        for kernel in kernels:
            if kernel.hash not in hashes:
                hashes.add(kernel.hash)
                print(json.dumps(asdict(record_of(label, args.arch, kernel))), flush=True)
    source = [] if args.plan == "toys" else sorted(kernels_in_source())
    print(json.dumps({"kernels": source, "seconds": time.monotonic() - start}), flush=True)


if __name__ == "__main__":
    main()

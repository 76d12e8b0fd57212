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
from vsa_kernels import BlockIndex, Blocks, dispatch, launch
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.operators import OPERATORS, Operator
from vsa_kernels.testing import Case, make_case

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
    dispatch._can_launch = lambda device: True
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

    def drawn(self, **sizes: Any) -> Case:
        """Attention of the same sizes, or some others, for the calls of an operator."""
        q, kv = (blocks.offsets.diff().tolist() for blocks in self.sides())
        own = {"q_sizes": q, "kv_sizes": kv, "heads": self.heads, "kv_heads": self.heads // self.group}
        own |= {"head_dim": self.head_dim, "batch": self.batch, "dtype": DTYPES[self.dtype]}
        return make_case(**{**own, **sizes}, index_batch=1, index_heads=1, fine=True, kv_valid=True)

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


def selection(p: Problem) -> None:
    """Top-k and top-p, plain and with every option, over few and many blocks, and a top-k over the most."""
    for num_kv in (p.num, 1200, 4096):
        select(p, num_kv, 8, min(32, num_kv))
    for num_kv in (p.num, 2048):
        select_by_share(p, num_kv)


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


def grouping(p: Problem) -> None:
    """Groups of the tiles of a long video."""
    from vsa_kernels.gathered import triton_group

    triton_group.group(torch.zeros(1, 1, 2048, 96, dtype=torch.bool), max(1, 128 // p.blocks[0]))


def gates(p: Problem) -> None:
    """Gate and sum of the two stages, with and without the fine gate."""
    from vsa_kernels.coarse_fine import triton_gate

    blocks, _ = p.sides()
    tokens, means = p.tokens(blocks, p.heads), p.means(p.heads)
    for gate in (None, tokens):
        triton_gate.combine(tokens, means, tokens, gate, blocks)
        triton_gate.combine_backward(tokens, tokens, means, tokens, gate, blocks)


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


Stage = Callable[[Problem], None]
PARTS: tuple[Stage, ...] = (fine, coarse, transpose, pooling, selection, grouping, gates)
# exact fp32, which is for tests, spills in whole blocks
NOT_IN_FP32 = ("skipping_attn",)


def stage_of(operator: Operator, *, widest: bool = False) -> Stage:
    """All calls of an operator, at the sizes of the problem and, if models have some of their own, at these, or at the
    widest of them."""
    heads = sorted((h * d, h, d) for _, _, h, d in operator.sizes.values())[-1 if widest else 0 :]

    def stage(p: Problem) -> None:
        if p.dtype == "fp32" and operator.name in NOT_IN_FP32:
            return
        models = (p.drawn(q_sizes=[999], heads=h, kv_heads=h, head_dim=d) for _, h, d in heads)
        for case in (p.drawn(), *models):
            for call in operator.cases(case):
                call.run("triton")

    stage.__name__ = operator.name
    return stage


def all_stages(*, widest: bool = False) -> tuple[Stage, ...]:
    """Parts of operators at more sizes than these meet, and every operator of the records."""
    return (*PARTS, *(stage_of(operator, widest=widest) for operator in OPERATORS.values()))


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
    problems: dict[Problem, tuple[Stage, ...]] = {}
    by_shape = (fine, pooling, gates, stage_of(OPERATORS["coarse_fine_attn"]))
    gathered = stage_of(OPERATORS["gathered_attn"])
    if name == "quick":
        ragged = replace(tuned, even=False, group=2)
        problems = {tuned: (*all_stages(widest=True), long_rows), ragged: by_shape}
        problems |= {replace(p, masked=True): (fine,) for p in (tuned, ragged)}
        problems |= {replace(p, blocks=(128, 128)): (tiles_of_128,) for p in (tuned, ragged)}
    elif name == "tuned":
        for dim, blocks in ((d, b) for d in (64, 128) for b in ((64, 64), (128, 64))):
            for even in (True, False):
                variant = replace(tuned, head_dim=dim, blocks=blocks, even=even)
                problems |= {variant: all_stages(), replace(variant, masked=True): (fine,)}
        problems |= {replace(tuned, blocks=blocks): (gathered, grouping) for blocks in ((128, 32), (16, 1))}
        problems[tuned] = (*all_stages(), widest_selection)
    elif name == "dims":
        problems = {replace(tuned, head_dim=dim): all_stages() for dim in DIMS}
        problems |= {replace(tuned, head_dim=dim, masked=True): (fine,) for dim in DIMS}
    elif name in ("fp16", "fp32"):
        for dim in (16, 64, 80, 128, 256):
            problems[replace(tuned, dtype=name, head_dim=dim, even=False)] = all_stages()
    elif name == "shapes":
        for blocks in SHAPES:
            problems[replace(tuned, blocks=blocks)] = by_shape
            ragged = replace(tuned, blocks=blocks, even=False, valid=True, group=2)
            problems |= {ragged: by_shape, replace(ragged, masked=True): (fine,)}
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
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="the labels I of every N, which are launched")
    args = parser.parse_args()
    kernels = install(args.arch)
    hashes: set[str] = set()
    start = time.monotonic()
    part, parts = args.part
    for i, (label, call) in enumerate(plan(args.plan)):
        if args.only not in label or i % parts != part:
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

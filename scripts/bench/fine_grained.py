"""FG-Attn's kernel on random masks of small tiles, the problems of the paper's Figures 5 and 6.

Estimate for an H200 from before the measurement (docs/benchmarks/methods.md): 70% sparsity, tiles of 128 x 32, 24
heads, D=128, 32,768 tokens, bf16. Dense attention of cuDNN runs at 615 TFLOP/s, 21.5 ms. The kernel multiplies 30%
of the pairs, so a speed-up of 2.3x needs 424 TFLOP/s and the 2.56x of the paper need 472.

- A step multiplies 128 queries with 64 keys, 4.2 MFLOP in wgmma of 64 x 64 x 16 and 64 x 128 x 16, and reads 32 KiB of
  keys and values. At 424 TFLOP/s this is 3.3 TB/s from L2, which L2 sustains; memory (4.8 TB/s) does so only without
  other traffic. Keys and values of three heads fit into L2; `longest_first` therefore sorts by eighths, which keeps
  heads together.
- A row is 256 bytes, two whole cache lines, so scattered tiles of 32 keys, and even single keys, read no further bytes.
  They cost list entries and addresses: 8 copies of 16 bytes per thread and step, each with its own address.
- Compiled for sm_90, the kernel takes 210 registers without spills and 97 KiB of shared memory, one program of 8 warps
  per multiprocessor. No second program hides the softmax, which limits plain Triton to 407 to 487 TFLOP/s in dense
  attention on an H100.

The estimate is 390 to 450 TFLOP/s, 2.1x to 2.4x: 2.3x is likely after tuning, 2.56x is not. The Gluon kernel of
`block_sparse` (506 TFLOP/s, 2.7x at this sparsity) could reach it with 64 / N boxes for each of its tiles of keys.
Smaller query tiles compute the union of their lists: with random masks 51, 76 and 94% of all tiles for 64, 32 and 16
queries; the last is slower than dense attention, as in the paper.

B batch, L tokens, H heads, M / N tokens of a query / kv tile, R = 128 / M tiles of a group.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vsa_kernels import BlockIndex, Blocks, TileGroups, gathered_attn
from vsa_kernels.testing import Case, define, make_case, run

from vsa.attention.fine_grained.grouping import plan_groups

from .checks import check_forward, compare
from .peers import dense_ops
from .problems import Shape, listed_pairs, named
from .timing import FORWARD, Measured, Op, Setup, Skipped, against, attempt, measure

_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class MaskShape(Shape):
    """A problem with random masks.

    Args:
        q_tokens: values of M.
        kv_tokens: values of N.
        sparsities: shares of the kv tiles that a query tile skips.
        skews: values of (Lmax - Lmin) / Lmax of the list lengths, for `skewed_tiles` at `skewed_sparsity`.
        skewed_tiles: M and N of the skewed masks.
        skewed_sparsity: mean sparsity of the skewed masks.
    """

    q_tokens: tuple[int, ...] = (128, 64, 32, 16)
    kv_tokens: tuple[int, ...] = (128, 64, 32, 16)
    sparsities: tuple[float, ...] = (0.3, 0.5, 0.7, 0.9)
    skews: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    skewed_tiles: tuple[int, int] = (128, 32)
    skewed_sparsity: float = 0.7


def _shape(name: str, tokens: int, heads: int, head_dim: int, **rest: Any) -> MaskShape:
    return MaskShape(name=name, grid_thw=(1, 1, tokens), heads=heads, head_dim=head_dim, topk=1, **rest)


GPU_MASKS = (_shape("32k-h24-d128", 32768, 24, 128),)
# 1,000 tokens, so that the last tiles are short
CPU_MASKS = (_shape("1k", 1000, 2, 32, q_tokens=(128, 16), kv_tokens=(32, 16), sparsities=(0.7,), skews=(0.5,)),)


def tokens_of(text: str) -> int:
    """Parse the tokens of a tile, for argparse."""
    if not text.isdigit() or int(text) < 1 or _ROWS % int(text):
        raise argparse.ArgumentTypeError(f"must divide {_ROWS}, got {text!r}")
    return int(text)


def share_of(text: str) -> float:
    """Parse a sparsity, for argparse."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text!r}")
    return share


def mask_shapes(args: argparse.Namespace, device: torch.device) -> list[MaskShape]:
    """The problems of the command line."""
    shapes_by_name = {shape.name: shape for shape in (*CPU_MASKS, *GPU_MASKS)}
    usual = GPU_MASKS if device.type == "cuda" else CPU_MASKS
    options = {name: getattr(args, name) for name in ("q_tokens", "kv_tokens", "sparsities")}
    changes = {name: tuple(values) for name, values in options.items() if values}
    return [replace(shape, **changes) for shape in named(args.shapes, shapes_by_name, usual)]


def fine_grained(shape: Shape, setup: Setup) -> Measured:
    """FG-Attn's kernel by tile size and sparsity of random masks, its planning, and the kernel on uneven lists."""
    assert isinstance(shape, MaskShape)
    g = torch.Generator(device=setup.device).manual_seed(0)
    size = (shape.batch, shape.tokens, shape.heads, shape.head_dim)
    q, k, v = (torch.randn(size, generator=g, device=setup.device, dtype=setup.dtype) for _ in range(3))
    ops, skipped = list[Op](), Skipped()
    for name, make in dense_ops(_case(shape, q, k, v, (_ROWS, _ROWS), None), ("dense-cudnn", "dense")).items():
        attempt(ops, skipped, name, make)
    rows = [
        row | {"block": "-", "q_block": "-"} for row in measure([replace(op, passes=(FORWARD,)) for op in ops], setup)
    ]
    dense = rows[0] if rows else None
    for tiles, sparsity in itertools.product(itertools.product(shape.q_tokens, shape.kv_tokens), shape.sparsities):
        counts = tuple(-(-shape.tokens // n) for n in tiles)
        mask = torch.rand(shape.batch, shape.heads, *counts, generator=g, device=setup.device) >= sparsity
        case = _case(shape, q, k, v, tiles, mask)
        for backend in setup.backends:
            plan = partial(plan_groups, case.index, counts[1], _ROWS // tiles[0], backend=backend)
            planning = Op(name=f"{backend}: planning", call=plan, passes=(FORWARD,), against=())
            rows += _measured([_attend(backend, backend, case, plan()), planning], case, setup, dense)
    for skew, backend in itertools.product(shape.skews, setup.backends):
        mask = skewed(shape, skew, g)
        case = _case(shape, q, k, v, shape.skewed_tiles, mask)
        groups = plan_groups(case.index, mask.shape[3], _ROWS // shape.skewed_tiles[0], backend=backend)
        orders = {"longest first": groups, "as listed": replace(groups, order=None)}
        timed = [_attend(f"{backend}, skew {skew:.0%}, {name}", backend, case, some) for name, some in orders.items()]
        rows += _measured(timed, case, setup, dense)
    return Measured(rows, skipped)


def skewed(shape: MaskShape, skew: float, g: torch.Generator) -> Tensor:
    """Mask `[B, H, Nq, Nkv]` with list lengths evenly spaced from Lmin to Lmax = Lmin / (1 - skew), in random order.

    The mean sparsity is `skewed_sparsity`. The paper varies the skew in section 6.1; the even spacing is our reading.
    """
    num_q, num_kv = (-(-shape.tokens // n) for n in shape.skewed_tiles)
    rows = (shape.batch, shape.heads, num_q)
    largest = (1 - shape.skewed_sparsity) * num_kv / (1 - skew / 2)
    place = torch.rand(rows, generator=g, device=g.device).argsort(-1) / max(1, num_q - 1)
    length = (largest * (1 - skew * place)).round().clamp(1, num_kv)
    rank = torch.rand(*rows, num_kv, generator=g, device=g.device).argsort(-1)
    return rank < length[..., None]


def _case(shape: MaskShape, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[int], mask: Tensor | None) -> Case:
    q_blocks, kv_blocks = (_runs(shape.tokens, n, q.device) for n in tiles)
    # dense attention reads no mask
    index = BlockIndex.from_dense(torch.ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask)
    dlse = q.new_zeros(0)
    return Case(q=q, k=k, v=v, dout=q, dlse=dlse, index=index, q_blocks=q_blocks, kv_blocks=kv_blocks)


def _runs(num_tokens: int, size: int, device: torch.device) -> Blocks:
    return Blocks.from_sizes([min(size, num_tokens - start) for start in range(0, num_tokens, size)], device)


def _attend(name: str, backend: str, case: Case, groups: TileGroups) -> Op:
    """The op of the kernel without planning, after parts of its result have been compared with fp64."""
    call = partial(gathered_attn, case.q, case.k, case.v, groups, **case.blocks, backend=backend)
    index = groups.tile_index(case.q_blocks.num, case.kv_blocks.num)
    check_forward(replace(case, index=index), call()[0], f"gathered attention on backend {backend}")
    batch, _, heads, head_dim = case.q.shape
    pairs = listed_pairs(case.index, case.q_blocks.sizes, case.kv_blocks.sizes, batch, heads)
    executed = int(groups.kv_num_blocks.sum()) * case.kv_blocks.max_size * _ROWS
    return Op(name=name, call=call, passes=(FORWARD,), head_dim=head_dim, pairs=pairs, executed=executed)


def _measured(ops: list[Op], case: Case, setup: Setup, dense: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Rows of ops on one mask, with its tiles, its sparsity, and the share of pairs computed after merging tiles."""
    rows = measure(ops, setup)
    all_pairs = case.q.shape[0] * case.q.shape[2] * case.q.shape[1] ** 2
    computed = ops[0].executed / all_pairs
    for op, row in zip(ops, rows, strict=True):
        row |= {"q_block": case.q_blocks.max_size, "block": case.kv_blocks.max_size}
        row |= {"topk": None, "sparsity": 1 - ops[0].pairs / all_pairs, "computed": round(computed, 4)}
        if op.pairs:
            against(row, dense)
            if row["speedup"] is not None:
                row["share_of_bound"] = round(row["speedup"] * computed, 3)
    return rows


def check_groups(backend: str, dtype: torch.dtype, device: torch.device) -> str:
    """Compare gathered attention of groups with fp64 on ragged tiles, and test the comparison with a wrong result.

    Raises:
        ValueError: an error exceeds its budget, or a damaged result stays within the budget.
    """
    sizes: Any = ([16, 16, 16, 16, 7], [8, 8, 8, 8, 8, 5])
    case = make_case(*sizes, heads=2, kv_heads=1, head_dim=32, dtype=dtype, device=device)
    groups = plan_groups(replace(case, index=_listed(case)).index, 6, 2, backend=backend)
    case = replace(case, index=groups.tile_index(5, 6))

    def result(scale: float | None) -> dict[str, Tensor]:
        outputs = gathered_attn(case.q, case.k, case.v, groups, **case.blocks, scale=scale, backend=backend)
        return dict(zip(("out", "lse"), outputs, strict=True))

    compare(f"gathered attention on backend {backend}", result(None), result(1.0), run(case, "reference"), define(case))
    return f"gathered attention on {backend} {dtype}: out, lse within the fp64 budget; the wrong scale is noticed"


def _listed(case: Case) -> BlockIndex:
    # the entries past the counts that `make_case` generates are out of range
    return BlockIndex.from_dense(case.index.to_dense(case.kv_blocks.num))

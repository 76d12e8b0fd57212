"""DFSAttn over its schedule against dense attention: the kernel at each budget, and the cost of its selections.

Blocks are runs along the Hilbert curve with as many tokens as a tile of the shape, and sub-blocks are an eighth of
them. Lists come from the scores of the method on structured fields, so that they are as uneven as those of a video.

B batch, L tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vsa_kernels import block_sparse_attn
from vsa_kernels.testing import Case

from vsa.attention.denoising import Denoising, DenoisingPlan
from vsa.attention.dense import dense_index
from vsa.attention.dynamic_hilbert import DynamicHilbertAttention
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment, TileLayout
from vsa.attention.selection import select_blocks
from vsa.evaluation.comparison.synthetic import draw_captures

from .checks import check_forward
from .peers import dense_ops
from .problems import Shape, pair_counts
from .timing import FORWARD, Measured, Op, Setup, Skipped, added, against, attempt, measure, say

_PLAN = Path(__file__).parents[2] / "configs" / "denoising" / "dfs.yaml"
# steps of the schedule
_STEPS = 50


def dynamic_hilbert(shape: Shape, setup: Setup) -> Measured:
    """DFSAttn's forward at the densities of its schedule, reorder and selection apart, and the mean of its steps."""
    say("  drawing fields")
    p = HilbertProblem.of(shape, setup.dtype, setup.device)
    schedule = Schedule.of(p.layout.num_video_tiles)
    ops, skipped = list[Op](), Skipped()
    for name, make in dense_ops(p.case, ("dense-cudnn", "dense")).items():
        # the method is used without training
        attempt(ops, skipped, name, lambda make=make: replace(make(), passes=(FORWARD,)))
    if not ops:
        raise ValueError(f"dense attention did not run, so there is nothing to compare with: {skipped}")
    dense = ops[0].name
    plain: dict[str, Any] = {"passes": (FORWARD,), "against": ()}
    ops += [
        Op(name="reorder of q, k, v, out", call=p.reorder, **plain),
        Op(name="scores of sub-blocks", call=p.scores, **plain),
    ]
    scores = p.scores()
    by_op: dict[str, dict[str, Any]] = {}
    for topk in schedule.steps:
        ops.append(Op(name=f"top-{topk}", call=partial(select_blocks, scores, KeptTiles.of(topk)), **plain))
        case = replace(p.case, index=select_blocks(scores, KeptTiles.of(topk)))
        for backend in setup.backends:
            call = partial(p.attend, case, backend)
            with torch.no_grad():
                check_forward(case, call(), f"backend {backend}, top-{topk}")
            pairs, executed = pair_counts(case, backend)
            ops.append(
                Op(
                    name=f"{backend}, top-{topk}",
                    call=call,
                    head_dim=shape.head_dim,
                    pairs=pairs,
                    executed=executed,
                    passes=(FORWARD,),
                    against=(dense,),
                )
            )
            by_op[ops[-1].name] = {"topk": topk, "sparsity": 1 - topk / p.layout.num_video_tiles}
    rows = measure(ops, setup)
    by_name = {row["op"]: row for row in rows}
    for backend in setup.backends:
        for name, reorders in ((f"{backend}, mean of the sparse steps", 0), (f"{backend}, mean, reordered in each", 1)):
            rows.append(added(name, schedule.parts(by_name, backend, reorders)))
            against(rows[-1], by_name[dense])
            by_op[name] = {"topk": None, "sparsity": schedule.sparsity(p.layout.num_video_tiles)}
    for row in rows:
        row |= {"block": shape.block, "q_block": shape.block, **by_op.get(row["op"], {})}
    sparsity = schedule.sparsity(p.layout.num_video_tiles)
    note = (
        f"{shape.name}: {schedule.count} of {_STEPS} steps are sparse, {sparsity:.2%} in the mean: bound"
        f" {1 / (1 - sparsity):.2f}x by listed blocks; {sum(schedule.selecting.values())} of them select"
    )
    return Measured(rows, skipped, (note,))


@dataclass(frozen=True)
class Schedule:
    """Sparse steps of a denoising.

    Args:
        steps: number of steps by the number of kept blocks.
        selecting: number of these steps with a new selection, by the number of kept blocks.
    """

    steps: Counter[int]
    selecting: Counter[int]

    @classmethod
    def of(cls, num_tiles: int) -> Schedule:
        """Schedule of `denoising=dfs` on a grid of `num_tiles` blocks."""
        # imported here, because the other cases do not need these packages
        from hydra.utils import instantiate
        from omegaconf import OmegaConf

        plan: DenoisingPlan = instantiate(OmegaConf.load(_PLAN), _convert_="all")
        topk, denoising = plan.constant((num_tiles,), num_tiles), Denoising(plan)
        steps, selecting = Counter[int](), Counter[int]()
        for step in range(_STEPS):
            now = denoising.at(step, step / _STEPS)
            if now.dense:
                continue
            step_topk = topk.at(now.progress, step).count
            steps[step_topk] += 1
            selecting[step_topk] += now.refresh
        return cls(steps, selecting)

    @property
    def count(self) -> int:
        """Number of sparse steps."""
        return sum(self.steps.values())

    def sparsity(self, num_tiles: int) -> float:
        """Mean sparsity over the sparse steps."""
        return 1 - sum(topk * n for topk, n in self.steps.items()) / (self.count * num_tiles)

    def parts(
        self, rows: dict[str, dict[str, Any]], backend: str, reorders: float
    ) -> list[tuple[float, dict[str, Any]]]:
        """Parts of an average sparse step: rows with their mean number of runs per step."""
        parts = [(n / self.count, rows[f"{backend}, top-{topk}"]) for topk, n in self.steps.items()]
        parts += [(n / self.count, rows[f"top-{topk}"]) for topk, n in self.selecting.items()]
        parts.append((sum(self.selecting.values()) / self.count, rows["scores of sub-blocks"]))
        return [*parts, (reorders, rows["reorder of q, k, v, out"])]


@dataclass(frozen=True, kw_only=True)
class HilbertProblem:
    """Structured fields with the method that attends to them.

    Args:
        method: method of one layer.
        layout: layout of its blocks.
        case: the fields in the order of the curve, with a dense index.
    """

    method: DynamicHilbertAttention
    layout: TileLayout
    case: Case

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype, device: torch.device) -> HilbertProblem:
        """Structured fields of a shape."""
        heads, head_dim = shape.heads, shape.head_dim
        if shape.block % 8:
            raise ValueError(f"shape {shape.name} has blocks of {shape.block} tokens, which must be a multiple of 8")
        method = DynamicHilbertAttention(
            dim=heads * head_dim,
            num_heads=heads,
            head_dim=head_dim,
            tokens=shape.block,
            sub_tokens=shape.block // 8,
        )
        layout = method.layout([Segment(shape.grid_thw)], device)
        capture = draw_captures(shape.grid_thw, heads=heads, head_dim=head_dim, device=str(device)).items[0]
        q, k, v = (
            layout.permute(x.to(dtype)).expand(shape.batch, -1, -1, -1).contiguous()
            for x in (capture.q, capture.k, capture.v)
        )
        dlse = q.new_zeros((shape.batch, heads, shape.tokens), dtype=torch.float32)
        blocks: dict[str, Any] = {"q_blocks": layout.blocks, "kv_blocks": layout.blocks}
        case = Case(q=q, k=k, v=v, dout=torch.zeros_like(q), dlse=dlse, index=dense_index(layout), **blocks)
        return cls(method=method, layout=layout, case=case)

    def reorder(self) -> None:
        """Permute the inputs and the output of one layer; a model permutes tokens only once for all layers."""
        for x in (self.case.q, self.case.k, self.case.v):
            self.layout.permute(x)
        self.layout.unpermute(self.case.dout)

    def scores(self) -> Tensor:
        """Scores of the method, `[B, H, N, N]`."""
        return self.method.scores(self.case.q, self.case.k, self.layout)

    def attend(self, case: Case, backend: str) -> Tensor:
        """Output of the kernel for tokens in the order of the curve."""
        return block_sparse_attn(case.q, case.k, case.v, case.index, **case.blocks, backend=backend)[0]

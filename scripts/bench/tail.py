"""The pooled tail in tiles of 128 beside VSA in tiles of 64, with as many kept tokens; each part alone.

B batch, L tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

import torch
from torch import Tensor
from vsa_kernels import (
    BlockIndex,
    block_sparse_attn,
    coarse_fine_attn,
    select_topk,
    set_workspace_limit,
    tail_attn,
    workspace_limit,
)
from vsa_kernels.selection.api import Form
from vsa_kernels.testing import make_case

from vsa.attention.layout import Segment, TileLayout
from vsa.attention.scores import subblock_scores

from . import checks
from .peers import dense_ops
from .problems import Shape, problem
from .timing import FORWARD, Measured, Op, Setup, Skipped, attempt, measure, must_notice

_SUB_THW = (2, 2, 2)
# smaller than the limit at the start of a process
_WORKSPACES = (2 << 30, 1 << 30, 256 << 20, 0)


def tail(shape: Shape, setup: Setup) -> Measured:
    """VSA, and in tiles of twice as many tokens, half as many per list, the method with a pooled tail and its parts."""
    t, h, w = shape.tile_thw
    p, topk = problem(shape, setup.lists, setup.dtype, setup.device), max(1, shape.topk // 2)
    layout = TileLayout.build(
        [Segment(shape.grid_thw)], tile_thw=(t, h, 2 * w), more_tiles=[_SUB_THW], device=setup.device
    )
    blocks = {"q_blocks": layout.blocks, "kv_blocks": layout.blocks}
    ops, skipped = list[Op](), Skipped()
    for name, make in dense_ops(p.case, ("dense-cudnn",)).items():
        attempt(ops, skipped, name, make)
    leaves = tuple(x.detach().requires_grad_() for x in (p.case.q, p.case.k, p.case.v, p.gate_coarse))
    q, k, v, gate = leaves

    def add(name: str, call: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> None:
        ops.append(Op(name=name, call=call, inputs=inputs, dout=p.case.dout))

    def score(form: Form) -> Tensor:
        return subblock_scores(q, k, layout, _SUB_THW, form=form)

    def select(form: Form) -> BlockIndex:
        return select_topk(score(form), topk)

    for backend in setup.backends:
        attend = partial(tail_attn, q, k, v, **blocks, backend=backend)
        vsa = partial(coarse_fine_attn, q, k, v, gate, None, **p.case.blocks, topk=shape.topk, backend=backend)
        add("vsa", lambda vsa=vsa: vsa().out, leaves)
        for form in get_args(Form):
            whole = lambda form=form, attend=attend: attend(index=select(form))[0]  # noqa: E731
            add(f"tail, subblock_{form}", whole, leaves[:3])
        index = select("softmax")
        add("tail, lists given", lambda attend=attend, index=index: attend(index=index)[0], leaves[:3])
        listed = partial(block_sparse_attn, q, k, v, index, **blocks, backend=backend)
        add("listed tiles alone", lambda listed=listed: listed()[0], leaves[:3])
        for limit in _WORKSPACES:

            def within(limit: int = limit, attend: Callable[..., tuple[Tensor, Tensor]] = attend) -> Tensor:
                # the backward reads it
                set_workspace_limit(limit)
                return attend(index=select("softmax"))[0]

            add(f"tail, workspace of {limit >> 20} MiB", within, leaves[:3])
    for form in get_args(Form):
        ops.append(Op(name=f"score subblock_{form}", call=partial(score, form), passes=(FORWARD,), against=()))
    limit = workspace_limit()
    try:
        return Measured(measure(ops, setup), skipped)
    finally:
        set_workspace_limit(limit)


def check_tail(backend: str, dtype: torch.dtype, device: torch.device) -> str:
    """Check a backend's results and gradients against the reference in fp64, and that tiles counted twice are noticed.

    Raises:
        ValueError: a result is far, or the check does not notice the fault.
    """
    sizes = [128, 77, 128, 90]
    case = make_case(sizes, sizes, heads=2, kv_heads=2, head_dim=64, dtype=dtype, device=device)

    def run(name: str, exclude: bool, to: torch.dtype) -> list[Tensor]:
        wide = case.to(to)
        q, k, v = leaves = [x.detach().requires_grad_() for x in (wide.q, wide.k, wide.v)]
        out, _ = tail_attn(q, k, v, case.index, **case.blocks, exclude=exclude, backend=name)
        return [out.detach(), *torch.autograd.grad(out, leaves, wide.dout)]

    exact = run("reference", True, torch.float64)

    def refuse(got: list[Tensor]) -> None:
        for name, x, want in zip(("out", "dq", "dk", "dv"), got, exact, strict=True):
            checks.refuse_far(f"tail_attn, backend {backend}: {name}", x, want, dtype)

    refuse(run(backend, True, dtype))
    must_notice(lambda: refuse(run(backend, False, dtype)), f"tail_attn, backend {backend}", "tiles counted twice")
    return f"tail_attn on {backend}: right by fp64; tiles counted twice are noticed"

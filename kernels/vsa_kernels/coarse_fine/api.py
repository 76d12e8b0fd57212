"""Public interface of the VSA operator: checks, defaults, then the registered op or the composition of single ops.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

from torch import Tensor

from vsa_kernels.block_index import BlockIndex, Blocks
from vsa_kernels.checks import check_allowed, check_blocks, check_device, check_qkv, check_scale
from vsa_kernels.coarse_fine.op import Call, Saved, coarse_fine_fwd
from vsa_kernels.coarse_fine.reference import CoarseFineOutput, coarse_fine_stages, combine
from vsa_kernels.dispatch import resolve_backend
from vsa_kernels.modes import lowered, refuse_forward_mode
from vsa_kernels.selection.api import list_capacity


def coarse_fine_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_coarse: Tensor,
    gate_fine: Tensor | None,
    *,
    q_blocks: Blocks,
    kv_blocks: Blocks,
    topk: int,
    candidates: Tensor | None = None,
    always: Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> CoarseFineOutput:
    """Video sparse attention (VSA): coarse stage, top-k selection, fine stage and gates.

    With means over the tokens of each block (qm, km, vm):

        scores = scale * qm km^T
        coarse = softmax(scores) vm
        fine   = softmax(scale * q k^T) v         over the tokens of the topk best blocks of `scores` and of `always`
        out    = gate_coarse * coarse[block of the token] + gate_fine * fine

    Differentiable in q, k, v and both gates; the selection is a constant to the gradient. `triton` runs as one
    registered op (`torch.ops.vsa_kernels.coarse_fine_fwd`), so a checkpoint policy that saves it saves the selection
    together with out and lse; the other backends, and calls with `candidates` or `always`, compose the single ops (see
    `reference`). Under `torch.autocast` q, k, v and the gates are cast to its dtype.

    Args:
        q: `[B, L, H, D]` queries, tokens in block order.
        k: `[B, S, Hkv, D]` keys, H a multiple of Hkv.
        v: `[B, S, Hkv, D]` values.
        gate_coarse: `[B, L, H, D]` in q's dtype.
        gate_fine: `[B, L, H, D]` in q's dtype; None: 1.
        q_blocks: partition of the L query tokens.
        kv_blocks: partition of the S kv tokens.
        topk: kv blocks per query block and head, at least 1; Nkv or more selects all.
        candidates: bool `[Nq, Nkv]`, blocks that the coarse stage attends to and that may be selected, at least one per
            row; None: all.
        always: bool `[Nq, Nkv]`, blocks that the fine stage attends to besides the topk; None: none.
        scale: factor of the logits of both stages, default D ** -0.5.
        backend: `reference`, `gather`, `triton`, `cudnn` (the fine stage alone) or None (automatic, see
            `resolve_backend`).

    Source: Zhang et al., "VSA: Faster Video Diffusion with Trainable Sparse Attention", sections 2.2 and 2.3.
    """
    q, k, v, gate_coarse, gate_fine = lowered(q, k, v, gate_coarse, gate_fine)
    check_qkv(q, k, v)
    check_blocks("q_blocks", q_blocks, "q", q)
    check_blocks("kv_blocks", kv_blocks, "k", k)
    refuse_forward_mode(q, k, v, gate_coarse, gate_fine)
    for name, gate in (("gate_coarse", gate_coarse), ("gate_fine", gate_fine)):
        if gate is not None and (gate.shape != q.shape or gate.dtype != q.dtype):
            raise ValueError(f"{name} must be {q.dtype} {list(q.shape)} like q, got {gate.dtype} {list(gate.shape)}")
        check_device(name, gate, "q", q)
    for name, mask in (("candidates", candidates), ("always", always)):
        check_allowed(name, mask, q_blocks.num, kv_blocks.num, "q", q)
    if topk < 1:
        raise ValueError(f"topk must be at least 1, got {topk}")
    resolved_backend = resolve_backend(backend, q.device, q.dtype, q.shape[-1])
    factor = check_scale(scale, q.shape[-1], resolved_backend)
    if resolved_backend != "triton" or candidates is not None or always is not None:
        stages = coarse_fine_stages(
            *(q, k, v),
            q_blocks=q_blocks,
            kv_blocks=kv_blocks,
            topk=topk,
            candidates=candidates,
            always=always,
            scale=scale,
            backend=resolved_backend,
        )
        out = combine(stages.fine, stages.coarse, gate_coarse, gate_fine, q_blocks)
        looked_at = (x.detach() for x in (stages.fine, stages.lse, stages.coarse))
        return CoarseFineOutput(out, stages.index, *looked_at)
    num_selected = min(topk, kv_blocks.num)
    call = Call(
        *(q, k, v, gate_coarse, gate_fine),
        *(q_blocks.offsets, q_blocks.max_size, q_blocks.min_size),
        *(kv_blocks.offsets, kv_blocks.max_size, kv_blocks.min_size),
        topk=num_selected,
        capacity=list_capacity(topk, kv_blocks.num),
        scale=factor,
    )
    out, *saved = coarse_fine_fwd(*call)
    saved = Saved(*saved)
    index = BlockIndex(
        kv_indices=saved.kv_indices, kv_num_blocks=saved.kv_num_blocks, max_blocks=num_selected, min_blocks=num_selected
    )
    return CoarseFineOutput(out, index, saved.fine, saved.lse, saved.coarse)

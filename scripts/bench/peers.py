"""Peers that the ops are compared with: dense attention, FlexAttention, `fastvideo-kernel`, the block-sparse attention
of `nvidia-cudnn-frontend`, and FlashAttention-4. `scripts/peer_wheels.sh` names the versions.

B batch, L tokens, H heads, D head dim, N tiles.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from vsa_kernels.block_index import BlockIndex, token_places
from vsa_kernels.testing import Case, define

from .checks import check_forward, refuse_far
from .problems import Problem, Shape, listed_pairs, problem
from .timing import Op, Skipped, attempt, must_notice, say

PEERS = ("dense", "flex", "fastvideo", "cudnn", "fa4")
_DENSE = {"dense-cudnn": SDPBackend.CUDNN_ATTENTION, "dense-fa2": SDPBackend.FLASH_ATTENTION}
_FLEX_BLOCK = 128
_FASTVIDEO = ("fastvideo-tk", "fastvideo-triton")


def _dense(case: Case, name: str) -> Op:
    """Dense SDPA with the backend of `name` (cuDNN or FlashAttention-2), else with torch's choice."""
    q, k, v = leaves = tuple(x.detach().requires_grad_() for x in (case.q, case.k, case.v))
    batch, tokens, heads, head_dim = q.shape
    pairs = batch * heads * tokens**2

    def call() -> Tensor:
        with sdpa_kernel(_DENSE[name]) if name in _DENSE else nullcontext():
            qh, kh, vh = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(qh, kh, vh).transpose(1, 2)

    return Op(name=name, call=call, inputs=leaves, dout=case.dout, head_dim=head_dim, pairs=pairs, executed=pairs)


def dense_ops(case: Case, names: tuple[str, ...] = (*_DENSE, "dense")) -> dict[str, Callable[[], Op]]:
    """Factories of the dense ops by name: those of `_DENSE` on a GPU, else torch's choice."""
    here = _DENSE if case.q.is_cuda else ("dense",)
    return {name: partial(_dense, case, name) for name in here if name in names}


def flex_lists(p: Problem) -> tuple[Tensor, Tensor]:
    """Lists over blocks of 128 with as many pairs as in the problem: indices `[B, H, N, N]`, counts `[B, H, N]`."""
    shape = p.shape
    topk, rest = divmod(shape.topk * shape.block, _FLEX_BLOCK)
    if rest or shape.tokens % _FLEX_BLOCK or shape.group > 1 or p.lists != "random":
        raise ValueError(f"needs random lists of whole blocks of {_FLEX_BLOCK} tokens on both sides")
    num = shape.tokens // _FLEX_BLOCK
    g = torch.Generator(device=p.device).manual_seed(0)
    scores = torch.rand(shape.batch, shape.heads, num, num, generator=g, device=p.device)
    mask = torch.zeros_like(scores, dtype=torch.int32).scatter_(-1, scores.topk(topk, -1).indices, 1)
    # `BlockMask` requires the full width: the listed blocks come first, ascending
    indices = mask.sort(dim=-1, descending=True, stable=True).indices.int()
    return indices, torch.full_like(indices[..., 0], topk)


def _flex(p: Problem) -> Op:
    """Compiled FlexAttention on random lists over blocks of 128, since its backward does not support blocks of 64."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    indices, counts = flex_lists(p)
    # all blocks are full blocks, so that no mask is evaluated inside
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), indices, counts, indices, BLOCK_SIZE=_FLEX_BLOCK,
        seq_lengths=(p.shape.tokens, p.shape.tokens),
    )  # fmt: skip
    # every shape is recompiled, and past its recompile limit dynamo would run it uncompiled
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    # the layout of FlexAttention is [B, H, L, D]
    q, k, v, dout = (x.detach().transpose(1, 2).contiguous() for x in (p.case.q, p.case.k, p.case.v, p.case.dout))
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    pairs = int(counts.sum()) * _FLEX_BLOCK**2

    def call() -> Tensor:
        out = compiled(leaves[0], leaves[1], leaves[2], block_mask=mask)
        assert isinstance(out, Tensor)
        return out

    return Op(
        name=f"flex-{_FLEX_BLOCK}", call=call, inputs=leaves, dout=dout, head_dim=p.shape.head_dim,
        pairs=pairs, executed=pairs, products=7,
    )  # fmt: skip


def _fastvideo(p: Problem, name: str, whole: bool) -> Op:
    """`block_sparse_attn_from_indices` of `fastvideo-kernel`, or the whole `video_sparse_attn`."""
    shape, case = p.shape, p.case
    if shape.block != 64 or shape.group != 1 or shape.batch != 1:
        raise ValueError("needs one sample and blocks of 64 tokens")
    import fastvideo_kernel  # type: ignore[import-not-found]

    if name == "fastvideo-tk":
        # otherwise its fallback would be timed under this name
        from fastvideo_kernel._C import fastvideo_kernel_ops  # type: ignore[import-not-found]

        assert fastvideo_kernel_ops.block_sparse_fwd is not None
        if torch.cuda.get_device_capability(p.device) != (9, 0):
            raise ValueError("needs compute capability 9.0")
    slots = padded_slots(p)
    q, k, v, gate, dout = (pad(x, slots, p) for x in (case.q, case.k, case.v, p.gate_coarse, case.dout))
    sizes = case.kv_blocks.sizes.contiguous()
    leaves = tuple(x.requires_grad_() for x in ((q, k, v, gate) if whole else (q, k, v)))
    indices, counts = (x.expand(1, shape.heads, *x.shape[2:]).contiguous() for x in
                       (case.index.kv_indices[..., : shape.topk], case.index.kv_num_blocks))  # fmt: skip

    def fine() -> Tensor:
        return fastvideo_kernel.block_sparse_attn_from_indices(q, k, v, indices, counts, sizes)[0]

    def operator() -> Tensor:
        return fastvideo_kernel.video_sparse_attn(
            q, k, v, sizes, sizes, shape.topk, block_size=(4, 4, 4), compress_attn_weight=gate
        )

    def call() -> Tensor:
        # the package reads this variable at every call
        os.environ["FASTVIDEO_VSA_TRITON"] = "1" if name == "fastvideo-triton" else "0"
        return operator() if whole else fine()

    if not whole:
        with torch.no_grad():
            check_forward(case, call().transpose(1, 2)[:, slots], name)
    real = listed_pairs(case.index, case.q_blocks.sizes, case.kv_blocks.sizes, 1, shape.heads)
    full = torch.full_like(case.kv_blocks.sizes, 64)
    return Op(
        name=name, call=call, inputs=leaves, dout=dout, head_dim=shape.head_dim, pairs=real,
        executed=listed_pairs(case.index, full, full, 1, shape.heads), products=7 if name == "fastvideo-triton" else 5,
    )  # fmt: skip


class _CudnnAttention(torch.autograd.Function):
    """cuDNN's block-sparse attention of q, k, v `[B, H, L, D]` on lists of one length."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block: int, splits: int | str) -> Tensor:
        from cudnn.block_sparse_attention import block_sparse_attention_forward  # type: ignore[import-not-found]

        ctx.block = block
        q, k, v = (x.detach() for x in (q, k, v))
        result = block_sparse_attention_forward(q, k, v, indices, sparse_block_size=block, kv_splits=splits)
        # nothing is differentiated twice
        ctx.saved = (q, k, v, result["o_tensor"].detach(), result["lse_tensor"], indices)
        return result["o_tensor"]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        from cudnn.block_sparse_attention import block_sparse_attention_backward  # type: ignore[import-not-found]

        result = block_sparse_attention_backward(dout, *ctx.saved, sparse_block_size=ctx.block)
        return (*(result[f"{name}_tensor"] for name in ("dq", "dk", "dv")), None, None, None)


def _equal_lists(p: Problem, *blocks: int) -> Tensor:
    """The lists int32 `[B, H, N, K]` of a problem with equal blocks of a supported size and lists of one length."""
    shape, index = p.shape, p.case.index
    if shape.block not in blocks or shape.group != 1 or p.case.kv_blocks.min_size != shape.block:
        raise ValueError(f"needs equal blocks of {' or '.join(map(str, blocks))} tokens on both sides")
    rows = (shape.batch, shape.heads, shape.tiles, min(shape.topk, shape.tiles))
    return index.kv_indices[..., : rows[-1]].expand(rows).contiguous()


def _cudnn(p: Problem, name: str, splits: int | str) -> Op:
    indices = _equal_lists(p, 64, 128)
    q, k, v, dout = (x.detach().transpose(1, 2).contiguous() for x in (p.case.q, p.case.k, p.case.v, p.case.dout))
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    return _sparse(p, name, lambda: _CudnnAttention.apply(*leaves, indices, p.shape.block, splits), leaves, dout)


def _fa4(p: Problem) -> Op:
    """FlashAttention-4 with `block_sparse_tensors`: all listed blocks are full blocks, so that no mask is evaluated."""
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch  # type: ignore[import-not-found]

    indices = _equal_lists(p, 128)
    transposed = BlockIndex.from_dense(p.case.index.to_dense(p.shape.tiles).transpose(-1, -2))
    counts = torch.full_like(indices[..., 0], indices.shape[-1])

    def tensors(counts: Tensor, indices: Tensor) -> Any:
        none = torch.zeros_like(counts)
        return BlockSparseTensorsTorch(
            mask_block_cnt=none, mask_block_idx=none[..., None], full_block_cnt=counts, full_block_idx=indices,
            block_size=(128, 128),
        )  # fmt: skip

    lists = {
        "block_sparse_tensors": tensors(counts, indices),
        "block_sparse_tensors_bwd": tensors(
            transposed.kv_num_blocks.expand(indices.shape[:3]).contiguous(), transposed.kv_indices
        ),
    }
    leaves = tuple(x.detach().requires_grad_() for x in (p.case.q, p.case.k, p.case.v))
    return _sparse(p, "fa4-128", lambda: flash_attn_func(*leaves, **lists)[0], leaves, p.case.dout)


def _fa4_dense(case: Case) -> Op:
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

    op = _dense(case, "dense-fa4")
    return replace(op, call=lambda: flash_attn_func(*op.inputs)[0])


def _sparse(p: Problem, name: str, call: Callable[[], Tensor], leaves: tuple[Tensor, ...], dout: Tensor) -> Op:
    """The op of a peer, after its output on the measured problem has been compared with fp64."""
    with torch.no_grad():
        out = call()
        check_forward(p.case, out if out.shape == p.case.q.shape else out.transpose(1, 2), name)
    pairs = listed_pairs(p.case.index, p.case.q_blocks.sizes, p.case.kv_blocks.sizes, p.shape.batch, p.shape.heads)
    return Op(name=name, call=call, inputs=leaves, dout=dout, head_dim=p.shape.head_dim, pairs=pairs, executed=pairs)


def padded_slots(p: Problem) -> Tensor:
    """Index of each token in tiles that are padded to `shape.block` tokens: int64 `[L]`."""
    block, place = token_places(p.case.kv_blocks, p.shape.tokens)
    return block * p.shape.block + place


def pad(x: Tensor, slots: Tensor, p: Problem) -> Tensor:
    """Contiguous `[B, H, N * block, D]` of x `[B, L, H, D]`, padded with zeros in short tiles."""
    B, _, H, D = x.shape
    padded = x.new_zeros((B, p.case.kv_blocks.num * p.shape.block, H, D))
    padded[:, slots] = x.detach()
    return padded.transpose(1, 2).contiguous()


def add_peers(ops: list[Op], skipped: Skipped, p: Problem, peers: Sequence[str], whole: bool = False) -> None:
    """Append the ops of the installed peers that support a problem; `peers` holds names of peers, or of single ops."""
    cuda, block = p.device.type == "cuda", p.shape.block
    # the package splits by itself at blocks of 64 alone
    splits: int | str = "auto" if block == 64 else 2
    ops_by_peer: dict[str, dict[str, Callable[[], Op]]] = {
        "dense": dense_ops(p.case),
        "flex": {f"flex-{_FLEX_BLOCK}": partial(_flex, p)} if cuda and not whole else {},
        "fastvideo": {},
        "cudnn": {},
        "fa4": {},
    }
    if cuda and importlib.util.find_spec("fastvideo_kernel") is not None:
        ops_by_peer["fastvideo"] = {name: partial(_fastvideo, p, name, whole) for name in _FASTVIDEO}
    if cuda and not whole and importlib.util.find_spec("cudnn") is not None:
        names = {f"cudnn-{block}": 1, f"cudnn-{block}-splits-{splits}": splits}
        ops_by_peer["cudnn"] = {name: partial(_cudnn, p, name, count) for name, count in names.items()}
    if cuda and not whole and importlib.util.find_spec("flash_attn") is not None:
        ops_by_peer["fa4"] = {f"fa4-{block}": partial(_fa4, p), "dense-fa4": partial(_fa4_dense, p.case)}
    for name in PEERS:
        for op, make in ops_by_peer[name].items():
            if name in peers or op in peers:
                attempt(ops, skipped, op, make)


@cache
def check_peers(peers: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> tuple[dict[str, str], Skipped]:
    """Compare output and gradients of peers with fp64 at the sizes of `_CHECKED`, and test each comparison.

    Args:
        peers: names of peers, or of single ops.
        dtype: dtype of the tokens.
        device: compute device.

    Returns:
        a line with the errors of each op that is right, and the reason of each other one.
    """
    right, wrong = dict[str, str](), Skipped()
    for shape in _CHECKED:
        p = problem(shape, "random", dtype, device)
        ops = list[Op]()
        add_peers(ops, wrong, p, peers)
        everything = BlockIndex.from_dense(torch.ones(1, 1, shape.tiles, shape.tiles, dtype=torch.bool, device=device))
        for case, dense in ((p.case, False), (replace(p.case, index=everything), True)):
            chosen = [op for op in ops if op.name.startswith("dense") == dense]
            exact, other = (define(x) for x in (case, replace(case, scale=1.0))) if chosen else ({}, {})
            for op in chosen:
                got = _results(op)
                try:
                    errors = _errors(got, exact)
                    must_notice(partial(_errors, got, other), op.name, "the wrong scale")
                except ValueError as error:
                    wrong[op.name] = str(error)
                    say(f"  {op.name} skipped: {error}")
                    continue
                listed = ", ".join(f"{name} {error:.2g}" for name, error in errors.items())
                right[op.name] = f"{op.name} {dtype}, {shape.tokens:,} tokens, relative errors from fp64: {listed}"
    return right, wrong


_CHECKED = tuple(
    Shape(name="4k", grid_thw=(4, 32, 32), heads=2, head_dim=128, topk=topk, tile_thw=tile)
    for tile, topk in (((4, 4, 4), 16), ((4, 4, 8), 8))
)
"""Problems of `check_peers`."""


def _results(op: Op) -> dict[str, Tensor]:
    out = op.call()
    results = (out.detach(), *torch.autograd.grad(out, op.inputs, op.dout))
    return dict(zip(("out", "dq", "dk", "dv"), results, strict=True))


def _errors(got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative distance of each result from fp64; a ValueError where one exceeds rounding errors."""
    errors = {}
    for name, x in got.items():
        want = exact[name] if x.shape == exact[name].shape else exact[name].transpose(1, 2)
        errors[name] = float((x.double() - want).norm() / want.norm())
        refuse_far(name, x, want, x.dtype)
    return errors

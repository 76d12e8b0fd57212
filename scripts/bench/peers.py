"""Peers that the ops are compared with: dense attention, FlexAttention and `fastvideo-kernel`.

B batch, L tokens, H heads, D head dim, N tiles.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from vsa_kernels.block_index import token_places
from vsa_kernels.testing import Case

from .checks import check_forward
from .problems import Problem, listed_pairs
from .timing import Op, Skipped, attempt

PEERS = ("dense", "flex", "fastvideo")
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
        raise ValueError(f"requires random lists of whole blocks of {_FLEX_BLOCK} tokens on both sides")
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
        raise ValueError("requires one sample and blocks of 64 tokens")
    import fastvideo_kernel  # type: ignore[import-not-found]

    if name == "fastvideo-tk":
        # otherwise its fallback would be timed under this name
        from fastvideo_kernel._C import fastvideo_kernel_ops  # type: ignore[import-not-found]

        assert fastvideo_kernel_ops.block_sparse_fwd is not None
        if torch.cuda.get_device_capability(p.device) != (9, 0):
            raise ValueError("requires compute capability 9.0")
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


def add_peers(ops: list[Op], skipped: Skipped, p: Problem, peers: list[str], whole: bool = False) -> None:
    """Append the ops of the installed peers that support a problem."""
    cuda = p.device.type == "cuda"
    ops_by_peer: dict[str, dict[str, Callable[[], Op]]] = {
        "dense": dense_ops(p.case),
        "flex": {f"flex-{_FLEX_BLOCK}": partial(_flex, p)} if cuda and not whole else {},
        "fastvideo": {},
    }
    if cuda and importlib.util.find_spec("fastvideo_kernel") is not None:
        ops_by_peer["fastvideo"] = {name: partial(_fastvideo, p, name, whole) for name in _FASTVIDEO}
    for name in PEERS:
        for op, make in ops_by_peer[name].items() if name in peers else ():
            attempt(ops, skipped, op, make)

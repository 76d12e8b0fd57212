"""Rows about kernels that need the memory of a GPU; they import only torch, triton and the kernels.

B batch, L tokens, H heads, D head dim.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor
from vsa_kernels import BlockIndex, Blocks, block_sparse_attn

from scripts.soak.rows import Attempts, Row

LONG = 99_866
"""Number of tokens from which the strides of a fused q, k, v of 56 heads x 128 exceed 2^31 elements."""


def long_views(
    tokens: int, *, heads: int, head_dim: int, seed: int, backend: str, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Compare attention on views of a fused tensor with that on copies, and 20 rows with fp64; returns the difference.

    Args:
        tokens: L; the fused tensor is `[1, L, 3, H, D]`.
        heads: H.
        head_dim: D.
        seed: seed of values and lists.
        backend: backend of the operator.
        device: device of the tensors.
        dtype: dtype of the tensors.
    """
    rng, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    sizes = [64] * (tokens // 64) + ([tokens % 64] if tokens % 64 else [])
    blocks = Blocks.from_sizes(sizes, device)
    # the last block is in every list, because its offsets are the largest
    count, num = min(4, len(sizes)), len(sizes)
    lists = torch.tensor([sorted({*rng.sample(range(num - 1), count - 1), num - 1}) for _ in sizes], device=device)
    counts = torch.full((1, 1, num), count, dtype=torch.int32, device=device)
    index = BlockIndex(kv_indices=lists.int()[None, None], kv_num_blocks=counts)
    fused = torch.randn(1, tokens, 3, heads, head_dim, generator=generator, device=device, dtype=dtype)
    d_out = torch.randn(1, tokens, heads, head_dim, generator=generator, device=device, dtype=dtype)

    def results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out, lse = block_sparse_attn(q, k, v, index, q_blocks=blocks, kv_blocks=blocks, backend=backend)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), d_out)

    views = results(*fused.unbind(2))
    copies = results(*(x.contiguous() for x in fused.unbind(2)))
    names = ("out", "lse", "dq", "dk", "dv")
    wrong = [name for name, a, b in zip(names, views, copies, strict=True) if not torch.equal(a, b)]
    if wrong:
        return f"{wrong} differ from those of contiguous tensors"
    # always includes the last token
    for token in [tokens - 1, *rng.sample(range(tokens), min(19, tokens))]:
        block = token // 64
        kv_tokens = torch.cat([torch.arange(n * 64, n * 64 + sizes[n], device=device) for n in lists[block].tolist()])
        q, k, v = fused[0, token, 0].double(), *(fused[0, kv_tokens, part].double() for part in (1, 2))
        weights = (torch.einsum("hd,shd->hs", q, k) * head_dim**-0.5).softmax(-1)
        error = (views[0][0, token].double() - torch.einsum("hs,shd->hd", weights, v)).abs().max().item()
        if error > 4 * torch.finfo(dtype).eps:
            return f"token {token} differs by {error:.1e} from fp64"
    return None


def long_strides(folder: Path, tries: int, seed: int) -> Attempts:
    """Forward and backward on a fused q, k, v of at least 2^31 elements (4.3 GB in bf16)."""
    device = torch.device("cuda")
    for number in range(tries):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        failure = long_views(
            LONG + number, heads=56, head_dim=128, seed=seed + number, backend="triton", device=device, dtype=dtype
        )
        yield f"{LONG + number} x 56 x 128, {dtype}", failure
        torch.cuda.empty_cache()


ROWS = (Row(name="strides past 2**31 on a GPU", tries=4, short_tries=1, run=long_strides),)

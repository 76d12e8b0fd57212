"""Random problems of block-sparse attention, and dense attention with a token mask to compare with.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vsa_kernels import BlockIndex, Blocks, block_sparse_attn


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention with a token mask `[B, H, L, S]`; out and lse of queries without keys are 0 and -inf."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    logits = torch.einsum("blhd,bshd->bhls", q, k) * scale
    logits = logits.masked_fill(~mask, -torch.inf)
    none = ~mask.any(-1, keepdim=True)
    weights = torch.softmax(logits.masked_fill(none, 0.0), -1).masked_fill(none, 0.0)
    lse = torch.logsumexp(logits.masked_fill(none, 0.0), -1).masked_fill(none[..., 0], -torch.inf)
    return torch.einsum("bhls,bshd->blhd", weights, v), lse


def block_of_token(sizes: Sequence[int]) -> Tensor:
    """The block of each token, `[L]`, for blocks of these sizes."""
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Random tensors, blocks and lists.

    Args:
        q, k, v: `[B, L, H, D]`, `[B, S, Hkv, D]` in fp64, exact in the dtype of the problem.
        d_out: gradient of the output.
        q_sizes, kv_sizes: tokens of the blocks.
        lists: listed kv blocks of each of the B x H x Nq rows.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    q_sizes: tuple[int, ...]
    kv_sizes: tuple[int, ...]
    lists: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    @property
    def blocks(self) -> dict[str, Any]:
        return {"q_blocks": Blocks.from_sizes(self.q_sizes), "kv_blocks": Blocks.from_sizes(self.kv_sizes)}

    def mask(self) -> Tensor:
        rows = torch.tensor(
            [[[[n in row for n in range(len(self.kv_sizes))] for row in head] for head in b] for b in self.lists]
        )
        q_block, kv_block = (
            torch.arange(len(s)).repeat_interleave(torch.tensor(s)) for s in (self.q_sizes, self.kv_sizes)
        )
        return rows[:, :, q_block][..., kv_block]

    def index(self) -> BlockIndex:
        capacity = max(1, *(len(row) for b in self.lists for head in b for row in head))
        # entries past the count are never read, so that they may be out of range
        padded = [[[[*row, *[10**6] * (capacity - len(row))] for row in head] for head in b] for b in self.lists]
        counts = [[[len(row) for row in head] for head in b] for b in self.lists]
        return BlockIndex(
            kv_indices=torch.tensor(padded, dtype=torch.int32), kv_num_blocks=torch.tensor(counts, dtype=torch.int32)
        )


def problem(
    seed: int,
    dtype: torch.dtype,
    *,
    most: int = 24,
    dims: Sequence[int] = (8, 16, 24, 64, 80, 128, 256),
    least: int = 0,
) -> Problem:
    """A random problem with at least `least` kv blocks in every list."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, kv_heads, group, head_dim = rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((1, 2, 3)), rng.choice(dims)
    q_sizes, kv_sizes = (tuple(rng.randint(1, most) for _ in range(rng.randint(1, 5))) for _ in range(2))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).double()

    def row() -> tuple[int, ...]:
        count = rng.randint(least, len(kv_sizes))
        return tuple(sorted(rng.sample(range(len(kv_sizes)), count)))

    heads = group * kv_heads
    return Problem(
        q=draw(batch, sum(q_sizes), heads, head_dim),
        k=draw(batch, sum(kv_sizes), kv_heads, head_dim),
        v=draw(batch, sum(kv_sizes), kv_heads, head_dim),
        d_out=draw(batch, sum(q_sizes), heads, head_dim),
        q_sizes=q_sizes,
        kv_sizes=kv_sizes,
        lists=tuple(tuple(tuple(row() for _ in q_sizes) for _ in range(heads)) for _ in range(batch)),
    )


Results = dict[str, Tensor]


def gradients(
    function: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, d_out: Tensor
) -> Results:
    """Output, lse and the gradients of q, k and v of an attention function."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = function(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), d_out.to(out.dtype))
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def expected(p: Problem, dtype: torch.dtype) -> tuple[Results, Results]:
    """Results of the definition in fp64, and of the same formula in `dtype`, whose error sets the tolerance."""
    mask = p.mask()

    def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dense(q, k, v, mask, p.scale)

    exact = gradients(plain, p.q, p.k, p.v, p.d_out)
    return exact, gradients(plain, *(x.to(dtype) for x in (p.q, p.k, p.v, p.d_out)))


def computed(p: Problem, dtype: torch.dtype, backend: str) -> Results:
    index, blocks = p.index(), p.blocks

    def sparse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return block_sparse_attn(q, k, v, index, **blocks, backend=backend)

    return gradients(sparse, *(x.to(dtype) for x in (p.q, p.k, p.v, p.d_out)))


def difference(p: Problem, dtype: torch.dtype, got: Results) -> str | None:
    """The first result whose error exceeds twice that of the plain formula plus the rounding of its terms, or None."""
    exact, plain = expected(p, dtype)
    # dq and dk are sums of differences dout . v - dout . out, whose rounding errors remain where they cancel
    terms = 1 + p.d_out.abs().max() * p.v.abs().max() * max(p.q.abs().max(), p.k.abs().max())
    # in fp64, the plain formula has no error relative to the definition
    epsilon = torch.finfo(dtype).eps * (100 if dtype == torch.float64 else 1)
    for name, right in exact.items():
        if right.numel() == 0:
            continue
        # queries without keys have the same -inf
        if not torch.equal(got[name].isinf(), right.isinf()) or got[name].isnan().any():
            return f"{name} is not finite where it must be"
        size = right.masked_fill(right.isinf(), 0.0)
        error, usual = ((x[name].double().masked_fill(right.isinf(), 0.0) - size).abs() for x in (got, plain))
        for how in (Tensor.max, Tensor.mean):
            bound = 2 * how(usual) + 2 * epsilon * max(1.0, how(size.abs()).item())
            bound += 2 * min(epsilon, torch.finfo(torch.float32).eps) * terms if name in ("dq", "dk") else 0.0
            if not how(error) <= bound:
                return f"{name}: {how.__name__} error {how(error):.2e}, allowed {bound:.2e}"
    return None

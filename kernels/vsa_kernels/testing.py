"""Test cases, an independent fp64 definition and error budgets, shared by the tests and `scripts/bench`.

Only `run` calls the code under test: the definition builds masks token by token on the host. `Call` and the functions
below it are for `cases.py` of an operator's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from vsa_kernels.block_index import BlockIndex, Blocks
from vsa_kernels.block_sparse import block_sparse_attn

_POISON = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of one `block_sparse_attn` call, with gradients of both outputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    index: BlockIndex
    q_blocks: Blocks
    kv_blocks: Blocks
    kv_valid: Tensor | None = None
    scale: float | None = None

    @property
    def blocks(self) -> dict[str, Any]:
        """Both partitions as keyword arguments of the ops."""
        return {"q_blocks": self.q_blocks, "kv_blocks": self.kv_blocks}

    def to(self, dtype: torch.dtype) -> Case:
        """The same values in another dtype (dlse: fp32, or fp64 for fp64)."""
        q, k, v, dout = (x.to(dtype) for x in (self.q, self.k, self.v, self.dout))
        lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        return replace(self, q=q, k=k, v=v, dout=dout, dlse=self.dlse.to(lse_dtype))


def make_case(
    q_sizes: Sequence[int],
    kv_sizes: Sequence[int],
    *,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int = 1,
    head_dim: int = 16,
    density: float = 0.5,
    index_batch: int | None = None,
    index_heads: int | None = None,
    fine: bool = False,
    kv_valid: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Case:
    """A random case. List entries past the counts hold an index far out of range, and rows may be empty.

    Args:
        q_sizes: tokens of each query block.
        kv_sizes: tokens of each kv block.
        density: probability that a block is listed.
        index_batch: batch dim of the index, 1 or `batch` (default).
        index_heads: head dim of the index, 1 or `heads` (default).
        fine: whether about half of the listed blocks get one of the token masks of `fine_masks`.
        kv_valid: whether the kv blocks of each sample are shortened at random.
    """
    g = torch.Generator().manual_seed(seed)
    L, S, Nq, Nkv = sum(q_sizes), sum(kv_sizes), len(q_sizes), len(kv_sizes)
    # rounded once, so that the fp64 definition and the op see the same numbers
    q = torch.randn(batch, L, heads, head_dim, generator=g).to(dtype)
    k, v = (torch.randn(batch, S, kv_heads, head_dim, generator=g).to(dtype) for _ in range(2))
    dout = torch.randn(batch, L, heads, head_dim, generator=g).to(dtype)
    dlse = torch.randn(batch, heads, L, generator=g)
    rows = (index_batch or batch, index_heads or heads, Nq)
    block_mask = torch.rand(*rows, Nkv, generator=g) < density
    masked = (torch.rand(*rows, Nkv, generator=g) < 0.5) & block_mask if fine else torch.zeros_like(block_mask)
    index = index_of(block_mask, masked if fine else None, max(q_sizes), max(kv_sizes), g)
    valid = None
    if kv_valid:
        valid = torch.stack([torch.randint(0, n + 1, (batch,), generator=g) for n in kv_sizes], 1).int()
    blocks: dict[str, Any] = {"q_blocks": Blocks.from_sizes(q_sizes), "kv_blocks": Blocks.from_sizes(kv_sizes)}
    case = Case(q=q, k=k, v=v, dout=dout, dlse=dlse, index=index, **blocks, kv_valid=valid)
    return _on(device, case).to(dtype)


def index_of(listed: Tensor, masked: Tensor | None, block_q: int, block_kv: int, g: torch.Generator) -> BlockIndex:
    """The index of a bool block mask `[B, H, Nq, Nkv]`, written row by row; entries past the counts are poisoned.

    Args:
        listed: bool `[B, H, Nq, Nkv]`, blocks that each row lists.
        masked: listed blocks that carry one of the masks of `fine_masks`; None for an index without any.
        block_q: tokens of the largest query block.
        block_kv: tokens of the largest kv block.
        g: random generator of the masks.
    """
    indices, ids = (torch.full(listed.shape, _POISON, dtype=torch.int32) for _ in range(2))
    plain = BlockIndex(kv_indices=indices, kv_num_blocks=listed.sum(-1, dtype=torch.int32))
    if masked is None:
        for row in _rows(listed):
            blocks = listed[row].nonzero().squeeze(-1)
            indices[row][: len(blocks)] = blocks.int()
        return plain
    bits = fine_masks(block_q, block_kv, g)
    for row in _rows(listed):
        full, part = ((listed[row] & ~masked[row]).nonzero().squeeze(-1), masked[row].nonzero().squeeze(-1))
        both = torch.cat([full, part]).int()
        indices[row][: len(both)] = both
        ids[row][len(full) : len(both)] = torch.randint(0, len(bits), (len(part),), generator=g).int()
    num_full = (listed & ~masked).sum(-1, dtype=torch.int32)
    return replace(plain, kv_num_full_blocks=num_full, mask_ids=ids, mask_bits=bits)


def fine_masks(block_q: int, block_kv: int, g: torch.Generator) -> Tensor:
    """Token masks bool `[6, block_q, block_kv]`: random, a band, some rows empty, some columns empty, all empty."""
    bits = torch.rand(6, block_q, block_kv, generator=g) < 0.6
    # keys near the query, as in the mask of a window
    place_q, place_kv = torch.arange(block_q) / block_q, torch.arange(block_kv) / block_kv
    bits[1] = (place_q[:, None] - place_kv).abs() < 0.3
    bits[2, ::3] = False
    bits[3, :, ::3] = False
    bits[4] = False
    return bits


def expand_mask(case: Case) -> Tensor:
    """Token mask bool `[B, H, L, S]` of the case, built block by block on the host."""
    B, L, H, _ = case.q.shape
    index = _on("cpu", case.index)
    q_at, kv_at = case.q_blocks.offsets.tolist(), case.kv_blocks.offsets.tolist()
    valid = None if case.kv_valid is None else case.kv_valid.cpu()
    mask = torch.zeros(B, H, L, case.k.shape[1], dtype=torch.bool)
    for b, h, n in _rows(torch.empty(B, H, len(q_at) - 1, 1)):
        row = (b % index.kv_indices.shape[0], h % index.kv_indices.shape[1], n)
        for slot in range(int(index.kv_num_blocks[row])):
            block = int(index.kv_indices[row][slot])
            size = kv_at[block + 1] - kv_at[block]
            bits = torch.ones(q_at[n + 1] - q_at[n], size, dtype=torch.bool)
            if index.mask_bits is not None and slot >= int(index.kv_num_full_blocks[row]):  # type: ignore[index]
                bits = index.mask_bits[int(index.mask_ids[row][slot])][: bits.shape[0], :size].clone()  # type: ignore[index]
            if valid is not None:
                bits[:, int(valid[b, block]) :] = False
            mask[b, h, q_at[n] : q_at[n + 1], kv_at[block] : kv_at[block + 1]] = bits
    return mask


def define(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The definition: out, lse, dq, dk, dv of a case by a dense masked softmax and autograd, exact in fp64."""
    case = case.to(dtype)
    mask = expand_mask(case).to(case.q.device)
    q, k, v = (x.detach().requires_grad_() for x in (case.q, case.k, case.v))
    group = q.shape[2] // k.shape[2]
    kh, vh = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scale = q.shape[3] ** -0.5 if case.scale is None else case.scale
    some = mask.any(-1)
    logits = torch.einsum("blhd,bshd->bhls", q, kh) * scale
    logits = logits.masked_fill(~mask, -torch.inf).masked_fill(~some[..., None], 0)
    p = torch.softmax(logits, -1) * some[..., None]
    out = torch.einsum("bhls,bshd->blhd", p, vh)
    lse = torch.logsumexp(logits, -1).masked_fill(~some, -torch.inf)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (case.dout, case.dlse.to(lse.dtype)))
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def run(case: Case, backend: str | None) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv of a case, computed by the op under test."""
    q, k, v = (x.detach().requires_grad_() for x in (case.q, case.k, case.v))
    how: dict[str, Any] = {**case.blocks, "kv_valid": case.kv_valid, "scale": case.scale, "backend": backend}
    out, lse = block_sparse_attn(q, k, v, case.index, **how)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (case.dout, case.dlse))
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def summed_terms(case: Case) -> dict[str, float]:
    """For each output, the largest sum of absolute terms over its elements, to which fp32 rounding is proportional.

    A result may be small because its terms cancel, but their rounding errors do not cancel.
    """
    case = case.to(torch.float64)
    group = case.q.shape[2] // case.k.shape[2]
    q, k, v, dout = (x.abs().transpose(1, 2) for x in (case.q, case.k, case.v, case.dout))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = case.q.shape[3] ** -0.5 if case.scale is None else case.scale
    mask = expand_mask(case).to(q.device)
    # tokens past kv_valid may hold anything
    k, v = (x.masked_fill(~mask.any(2)[..., None], 0) for x in (k, v))
    exact = define(case)
    logits = torch.einsum("blhd,bshd->bhls", case.q, case.k.repeat_interleave(group, 2)) * scale
    lse = exact["lse"].masked_fill(exact["lse"].isinf(), 0)
    p = (logits - lse[..., None]).masked_fill(~mask, -torch.inf).exp()
    out = exact["out"].abs().transpose(1, 2)
    ds = p * (dout @ v.transpose(2, 3) + (dout * out).sum(-1, keepdim=True) + case.dlse.nan_to_num().abs()[..., None])
    dk, dv = ds.transpose(2, 3) @ q * scale, p.transpose(2, 3) @ dout
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    terms = {"out": p @ v, "lse": q @ k.transpose(2, 3) * scale, "dq": ds @ k * scale, "dk": dk, "dv": dv}
    return {name: float(x.max()) for name, x in terms.items()}


def assert_right(case: Case, got: dict[str, Tensor], label: str = "") -> None:
    """Every output of `run` is within its budget (see `assert_within_budget`)."""
    exact, plain, terms = define(case), run(case, "reference"), summed_terms(case)
    for name, x in got.items():
        assert_within_budget(x, plain[name], exact[name], f"{label} {name}".strip(), terms[name])


def assert_within_budget(actual: Tensor, plain: Tensor, exact: Tensor, name: str, terms: float = 0.0) -> None:
    """Assert an error against fp64 of at most twice that of the reference in the same dtype, plus one rounding.

    The bound holds for the largest and for the mean error. Infinities must be at the same positions, NaN nowhere.

    Args:
        actual: result under test.
        plain: the reference backend's result in the same dtype.
        exact: the fp64 definition.
        name: name of the tensor in the message.
        terms: largest sum of absolute terms (see `summed_terms`), whose fp32 rounding is allowed on top.
    """
    exact = exact.double()
    assert not actual.isnan().any(), f"{name}: NaN in the result"
    infinite = exact.isinf()
    assert torch.equal(actual.double()[infinite], exact[infinite]), f"{name}: infinities differ"
    error, plain_error = ((x.double() - exact).abs()[~infinite] for x in (actual, plain))
    if not error.numel():
        return
    size, eps = exact.abs()[~infinite], torch.finfo(actual.dtype).eps
    for kind in ("max", "mean"):
        actual_error, budget, rounding = (float(getattr(x, kind)()) for x in (error, plain_error, size))
        limit = 2 * budget + eps * rounding + torch.finfo(torch.float32).eps * terms
        assert actual_error <= limit, f"{name}: expected a {kind} error of at most {limit:.3g}, got {actual_error:.3g}"


class Call(NamedTuple):
    """A call of an operator.

    Args:
        function: the operator, which also gets the argument `backend`; returns tensors, or values that contain them.
        inputs: arguments in order.
        options: arguments by name.
    """

    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    options: Mapping[str, Any] = {}

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments that require a gradient."""
        return tuple(x for x in _tensors((self.inputs, tree_leaves(self.options))) if x.requires_grad)

    def run(self, backend: str, dout: Sequence[Tensor] | None = None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The resulting tensors, and the gradients of `leaves` from those of the results (None: random ones)."""
        results = tuple(_tensors(self.function(*self.inputs, **self.options, backend=backend)))
        outs, grads = [x for x in results if x.requires_grad], ()
        if outs:
            dout = [torch.randn_like(x) for x in outs] if dout is None else dout
            grads = torch.autograd.grad(outs, self.leaves, [g.to(x.dtype) for g, x in zip(dout, outs, strict=True)])
        return tuple(x.detach() for x in results), grads


def normal(case: Case, *size: int, dtype: torch.dtype | None = None) -> Tensor:
    """Random values that require a gradient, of the case's dtype if none is given."""
    return torch.randn(size, device=case.q.device).to(dtype or case.q.dtype).requires_grad_()


def tokens(case: Case, width: int | None = None) -> Tensor:
    """Random tokens `[B, L, C]` of an elementwise operator, as wide as all heads of the case if no width is given."""
    B, L, H, D = case.q.shape
    return normal(case, B, L, width or H * D)


def projection(case: Case, width: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Tokens of 8 channels, and weight and bias of a linear layer to `width` of them."""
    return tokens(case, 8), (normal(case, width, 8), normal(case, width))


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif is_dataclass(x):
        yield from _tensors([getattr(x, field.name) for field in fields(x)])
    elif isinstance(x, list | tuple):
        for y in x:
            yield from _tensors(y)


def _rows(x: Tensor) -> list[tuple[int, int, int]]:
    B, H, N = x.shape[:3]
    return [(b, h, n) for b in range(B) for h in range(H) for n in range(N)]


def _on(device: torch.device | str, x: Any) -> Any:
    """A tensor, or a dataclass with all tensors in it, on a device."""
    if is_dataclass(x):
        return replace(x, **{field.name: _on(device, getattr(x, field.name)) for field in fields(x)})  # type: ignore[type-var]
    return x.to(device) if isinstance(x, Tensor) else x

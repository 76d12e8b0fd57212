"""Correctness checks before a speed is printed: agreement with fp64 on small ragged problems and on parts of the
measured problem. Each check on a small problem is itself tested with a damaged result.

B batch, L tokens, H heads, D head dim, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from vsa_kernels import Blocks, block_sparse_attn
from vsa_kernels.coarse_fine import coarse_attn, coarse_fine_attn
from vsa_kernels.coarse_fine.reference import CoarseFineOutput
from vsa_kernels.testing import Case, assert_within_budget, define, make_case, run

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.models.blocks import Conditioning, TransformerBlock
from vsa.models.compiled import compiled_body
from vsa.models.rope import rope_tables

from .problems import Problem
from .step import FreeAttention
from .timing import must_notice

_SIZES = [5, 9, 3, 10, 7, 16]


def check(backend: str, dtype: torch.dtype, device: torch.device) -> str:
    """Compare the fine stage with its fp64 definition on ragged blocks, and test the comparison with a wrong result.

    Raises:
        ValueError: an error exceeds its budget, or a damaged result stays within the budget.
    """
    case = make_case(
        [5, 9, 3, 10], [7, 2, 11, 1, 6], batch=2, heads=4, kv_heads=2, head_dim=32,
        fine=True, kv_valid=True, dtype=dtype, device=device,
    )  # fmt: skip
    exact, plain = define(case), run(case, "reference")
    compare(f"backend {backend}", run(case, backend), run(replace(case, scale=1.0), backend), plain, exact)
    return f"{backend} {dtype}: out, lse, dq, dk, dv within the fp64 budget; the wrong scale is noticed"


def check_operator(backend: str, dtype: torch.dtype, device: torch.device) -> str:
    """Compare `coarse_fine_attn` with the eager composition in fp64; arguments and errors as in `check`."""
    blocks = Blocks.from_sizes(_SIZES, device)
    topk = 3
    inputs = _separated(blocks, topk, dtype, device)

    def result(backend: Any, dtype: torch.dtype, scale: float | None = None) -> dict[str, Tensor]:
        *leaves, dout = (x.to(dtype).requires_grad_() for x in inputs)
        sides: dict[str, Any] = {"q_blocks": blocks, "kv_blocks": blocks, "topk": topk, "scale": scale}
        output = coarse_fine_attn(*leaves, **sides, backend=backend)
        names = ("dq", "dk", "dv", "dgate_coarse", "dgate_fine")
        grads = torch.autograd.grad(output.out, leaves, dout.detach())
        block_mask = output.index.to_dense(blocks.num).to(dtype)
        return {"listed": block_mask, "out": output.out.detach(), **dict(zip(names, grads, strict=True))}

    exact, plain = result("reference", torch.float64), result("reference", dtype)
    damaged = result(backend, dtype, scale=1.0)
    compare(f"the operator on backend {backend}", result(backend, dtype), damaged, plain, exact)
    return f"operator on {backend} {dtype}: lists, out and gradients within the fp64 budget; the wrong scale is noticed"


def check_layer(backend: str, device: torch.device) -> str:
    """Compare a sparse self-attention layer in fp32 with fp64; arguments and errors as in `check`."""

    def result(backend: Any, dtype: torch.dtype, topk: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        method = VideoSparseAttention(
            dim=32, num_heads=2, head_dim=16, tile_thw=(2, 2, 2), gate_init="model", backend=backend
        )
        layer = Layer.build(method, (3, 5, 4), 1, topk, dtype, device)
        out = layer.attention()
        gates = [layer.block.get_parameter(f"{gate}.weight") for gate in ("to_gate_compress", "to_gate_fine")]
        dx, *grads = torch.autograd.grad(out, [layer.x, *gates], layer.dout)
        return {"out": out.detach(), "dx": dx, "dw_coarse": grads[0], "dw_fine": grads[1]}

    exact, plain = result("reference", torch.float64, 4), result("reference", torch.float32, 4)
    damaged = result(backend, torch.float32, 5)
    compare(f"the layer on backend {backend}", result(backend, torch.float32, 4), damaged, plain, exact)
    return f"layer on {backend} float32: out and gradients within the fp64 budget; the wrong top-k is noticed"


def check_block(mode: str, dtype: torch.dtype, device: torch.device) -> str:
    """Compare a block without self-attention with fp64, and test the comparison with another text.

    Args:
        mode: `eager` or `compiled`.
        dtype: dtype of the block.
        device: compute device.

    Raises:
        ValueError: an error exceeds rounding errors, or the results for another text do not.
    """
    torch.manual_seed(0)
    method = FreeAttention(dim=32, num_heads=2, head_dim=16)
    layer = Layer.build(method, (3, 5, 4), 2, 1, dtype, device).run_in(mode)
    exact = layer.exact(torch.arange(layer.x.shape[1], device=device)).results()
    what = f"the {mode} block without self-attention"

    def refuse_wrong(layer: Layer) -> None:
        for name, result in layer.results().items():
            refuse_far(f"{what}: {name}", result, exact[name], dtype)

    refuse_wrong(layer)
    other = replace(layer, cond=layer.cond._replace(text=layer.cond.text.roll(1, -1)))
    must_notice(lambda: refuse_wrong(other), what, "a damaged input")
    return f"{what} {dtype}: out and gradients right by fp64; another text is noticed"


def check_measured_block(layer: Layer, what: str) -> None:
    """Compare output and gradient of some tokens of a measured block without self-attention with fp64."""
    rows = torch.linspace(0, layer.x.shape[1] - 1, 256, device=layer.x.device).long()
    exact = layer.exact(rows).results()
    out = layer.whole()
    (dx,) = torch.autograd.grad(out, layer.x, layer.dout)
    for name, result in (("out", out.detach()), ("dx", dx)):
        refuse_far(f"{what}: {name}", result[:, rows], exact[name], result.dtype)


def compare(
    what: str, got: dict[str, Tensor], damaged: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]
) -> None:
    """Compare `got` with `exact` within a budget from the rounding error of `plain`; `damaged` has to exceed it.

    Raises:
        ValueError: an error exceeds its budget, or the damaged result stays within the budget.
    """

    def agrees(results: dict[str, Tensor]) -> None:
        for name, x in results.items():
            assert_within_budget(x, plain[name], exact[name], name)

    try:
        agrees(got)
    except AssertionError as error:
        raise ValueError(f"{what} is wrong, no speed is printed: {error}") from error
    must_notice(lambda: agrees(damaged), what, "a damaged input")


def _separated(blocks: Blocks, topk: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v, both gates and dout with well-separated scores, so that rounding cannot change the selection."""
    for seed in range(100):
        g = torch.Generator().manual_seed(seed)
        size = (2, sum(_SIZES), 4, 32)
        q, k, v, gate_coarse, gate_fine, dout = (torch.randn(size, generator=g) for _ in range(6))
        # a random vector per block spreads the scores
        own = (torch.randn(2, len(_SIZES), 4, 32, generator=g) for _ in range(2))
        q, k = (x + y.repeat_interleave(torch.tensor(_SIZES), dim=1) for x, y in zip((q, k), own, strict=True))
        inputs = tuple(x.to(device, dtype) for x in (q, k, v, gate_coarse, gate_fine, dout))
        q, k, v = (x.double() for x in inputs[:3])
        ranked = coarse_attn(q, k, v, q_blocks=blocks, kv_blocks=blocks).scores.sort(-1, descending=True).values
        if float((ranked[..., topk - 1] - ranked[..., topk]).min()) > 0.02:
            return inputs
    raise AssertionError("no seed separates the scores")


def refuse_far(what: str, got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError for a result in `dtype` whose distance from fp64 exceeds rounding errors."""
    error = float((got.double() - want).norm() / want.norm())
    # bounds the rounding of the result and of half-precision probabilities, and fp32 sums of thousands of terms
    if not error <= torch.finfo(dtype).eps * (4 if dtype.itemsize == 2 else 100):
        raise ValueError(f"{what} is off by {error:.3g}, no speed is printed")


@dataclass(frozen=True, kw_only=True)
class Spot:
    """fp64 attention of single query blocks of a large problem, in one sample and head."""

    case: Case
    b: int
    h: int

    def tokens(self, blocks: Blocks, listed: list[int]) -> Tensor:
        at = blocks.offsets.tolist()
        return torch.cat([torch.arange(at[j], at[j + 1]) for j in listed]).to(blocks.offsets.device)

    def listed(self, n: int) -> list[int]:
        index = self.case.index
        row = (self.b % index.kv_indices.shape[0], self.h % index.kv_indices.shape[1], n)
        return index.kv_indices[row][: int(index.kv_num_blocks[row])].tolist()

    def take(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x[self.b, tokens, self.h * x.shape[2] // self.case.q.shape[2]].double()

    def block(self, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query tokens of block n, their kv tokens, probabilities and logit gradients."""
        case = self.case
        rows, columns = self.tokens(case.q_blocks, [n]), self.tokens(case.kv_blocks, self.listed(n))
        q, dout = self.take(case.q, rows), self.take(case.dout, rows)
        k, v = self.take(case.k, columns), self.take(case.v, columns)
        p = torch.softmax(q @ k.T * q.shape[-1] ** -0.5, -1)
        dp = dout @ v.T
        return rows, columns, p, p * (dp - (p * dp).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5


def check_forward(case: Case, out: Tensor, what: str) -> None:
    """Compare some query blocks of an output `[B, L, H, D]` of the measured problem with fp64 attention."""
    last = case.q_blocks.num - 1
    for b, h, n in {(0, 0, 0), (0, 0, last // 2), (case.q.shape[0] - 1, case.q.shape[2] - 1, last)}:
        spot = Spot(case=case, b=b, h=h)
        rows, columns, p, _ = spot.block(n)
        want = p @ spot.take(case.v, columns)
        refuse_far(f"{what}: query block {n}", spot.take(out, rows), want, out.dtype)


def check_measured(case: Case, backend: str) -> None:
    """Compare parts of the output and gradients of the fine stage on the measured problem with fp64."""
    q, k, v = (x.detach().requires_grad_() for x in (case.q, case.k, case.v))
    out = block_sparse_attn(q, k, v, case.index, **case.blocks, backend=backend)[0]
    check_forward(case, out.detach(), f"backend {backend}")
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), case.dout)
    spot = Spot(case=case, b=0, h=0)
    n = case.q_blocks.num // 2
    rows, columns, _, ds = spot.block(n)
    comparisons = {f"dq of query block {n}": (spot.take(dq, rows), ds @ spot.take(case.k, columns))}
    # gradients of the last kv block of this list, summed over all query blocks that list it
    j = spot.listed(n)[-1]
    own = spot.tokens(case.kv_blocks, [j])
    want_k = want_v = torch.zeros((), dtype=torch.float64, device=q.device)
    for i in range(case.q_blocks.num):
        if j in spot.listed(i):
            rows, columns, p, ds = spot.block(i)
            own_columns = (columns >= own[0]) & (columns <= own[-1])
            want_v = want_v + p[:, own_columns].T @ spot.take(case.dout, rows)
            want_k = want_k + ds[:, own_columns].T @ spot.take(case.q, rows)
    comparisons |= {
        f"dk of kv block {j}": (spot.take(dk, own), want_k),
        f"dv of kv block {j}": (spot.take(dv, own), want_v),
    }
    for name, (actual, expected) in comparisons.items():
        refuse_far(f"backend {backend}: {name}", actual, expected, q.dtype)


def check_measured_operator(p: Problem, got: CoarseFineOutput, what: str) -> None:
    """Compare the selection and some outputs of `coarse_fine_attn` on the measured problem with fp64."""
    case = replace(p.case, index=got.index)
    check_forward(case, got.fine, what)
    at = case.q_blocks.offsets.tolist()
    for b, h, n in {(0, 0, 0), (case.q.shape[0] - 1, case.q.shape[2] - 1, case.q_blocks.num - 1)}:
        spot = Spot(case=case, b=b, h=h)
        rows = torch.arange(at[n], at[n + 1], device=p.device)
        k_mean, v_mean = (_means(x[b, :, h * x.shape[2] // case.q.shape[2]], case.kv_blocks) for x in (case.k, case.v))
        scores = k_mean @ spot.take(case.q, rows).mean(0) * case.q.shape[-1] ** -0.5
        blocks = spot.listed(n)
        if blocks != sorted(set(blocks)) or len(blocks) != min(p.shape.topk, case.kv_blocks.num):
            raise ValueError(
                f"{what}: query block {n} has an invalid list of {len(blocks)} blocks, no speed is printed"
            )
        rest = torch.ones_like(scores, dtype=torch.bool)
        rest[blocks] = False
        # scores may be computed in tf32
        slack = float(scores.abs().max()) * (4e-3 if p.dtype.itemsize == 2 else 1e-5)
        if rest.any() and float(scores[blocks].min()) < float(scores[rest].max()) - slack:
            raise ValueError(f"{what}: query block {n} does not list its best blocks, no speed is printed")
        coarse = torch.softmax(scores, 0) @ v_mean
        gates = [spot.take(x, rows) for x in (p.gate_coarse, p.gate_fine)]
        want = gates[0] * coarse + gates[1] * spot.take(got.fine, rows)
        refuse_far(f"{what}: the output of query block {n}", spot.take(got.out, rows), want, got.out.dtype)


def _means(x: Tensor, blocks: Blocks) -> Tensor:
    # fp64 [N, D] of x [L, D]
    block = torch.arange(blocks.num, device=x.device).repeat_interleave(blocks.sizes)
    sums = x.new_zeros((blocks.num, x.shape[-1]), dtype=torch.float64).index_add_(0, block, x.double())
    return sums / blocks.sizes[:, None]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A DiT block on one video, with all of its inputs.

    Args:
        block: the block.
        x: `[B, L, C]` hidden states, a leaf tensor.
        dout: `[B, L, C]` gradient of the output.
        cond: modulation, RoPE tables and text.
        ctx: layout and top-k.
    """

    block: TransformerBlock
    x: Tensor
    dout: Tensor
    cond: Conditioning
    ctx: AttnContext

    @classmethod
    def build(
        cls, method: AttentionMethod, grid_thw: tuple[int, int, int], batch: int, topk: int,
        dtype: torch.dtype, device: torch.device, text_tokens: int = 8, ffn_dim: int = 128,
    ) -> Layer:  # fmt: skip
        """Random weights and inputs, the same for every method under one seed."""
        dim = method.dim
        block = TransformerBlock(
            method, num_heads=method.num_heads, head_dim=method.head_dim, ffn_dim=ffn_dim,
            cross_attn_norm=True, eps=1e-6, added_kv_proj_dim=None,
        )  # fmt: skip
        torch.nn.init.normal_(block.scale_shift_table, std=dim**-0.5)
        block.to(device, dtype)
        with warnings.catch_warnings():
            # short tiles are intended here
            warnings.simplefilter("ignore")
            layout = method.layout([Segment(grid_thw)], device)
        g = torch.Generator().manual_seed(1)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=g).to(device, dtype)

        cond = Conditioning(
            modulation=normal(batch, 1, 6, dim).to(torch.promote_types(dtype, torch.float32)),
            rope=tuple(x[layout.order] for x in rope_tables(grid_thw, method.head_dim, device)),  # type: ignore[arg-type]
            text=normal(batch, text_tokens, dim),
        )
        x, dout = (normal(batch, layout.num_tokens, dim) for _ in range(2))
        ctx = AttnContext(layout=layout, topk=KeptTiles.of(topk))
        return cls(block=block, x=x.requires_grad_(), dout=dout, cond=cond, ctx=ctx)

    def run_in(self, mode: str) -> Layer:
        """This layer, `eager` or, for its sizes, `compiled`."""
        self.block.run = compiled_body(dynamic=False) if mode == "compiled" else TransformerBlock.body
        return self

    def exact(self, rows: Tensor) -> Layer:
        """These tokens, int64 `[R]`, in fp64 and without compilation, for a method that leaves tokens apart."""
        cond = self.cond._replace(
            modulation=self.cond.modulation.double(),
            rope=(self.cond.rope[0][rows], self.cond.rope[1][rows]),
            text=self.cond.text.double(),
        )
        x = self.x.detach()[:, rows].double().requires_grad_()
        block, dout = copy.deepcopy(self.block).double(), self.dout[:, rows].double()
        return replace(self, block=block, x=x, dout=dout, cond=cond).run_in("eager")

    def results(self) -> dict[str, Tensor]:
        """Output of the whole block, and gradients of hidden states and matrices."""
        # in half precision, the gradient of the bias of keys is little more than rounding
        matrices = {name: p for name, p in self.block.named_parameters() if p.dim() > 1}
        out = self.whole()
        grads = torch.autograd.grad(out, (self.x, *matrices.values()), self.dout)
        names = ("dx", *(f"gradient of {name}" for name in matrices))
        return {"out": out.detach(), **dict(zip(names, grads, strict=True))}

    def attention(self) -> Tensor:
        """Self-attention with its projections and norms."""
        return self.block.self_attention(F.layer_norm(self.x, self.x.shape[-1:]), self.cond.rope, self.ctx)

    def whole(self) -> Tensor:
        """Output of the whole block."""
        return self.block(self.x, self.cond, self.ctx)

"""What is not finite stays in its sample, its row of a batch and the lists that hold it: outputs and gradients of
everything else are the same bits as without it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from vsa_kernels import BlockIndex, Blocks, block_sparse_attn, coarse_fine_attn, tail_attn
from vsa_kernels.testing import make_case

from tests.attention.test_all_methods import ALL, SIZES, make
from vsa.attention.context import AttnContext
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")
SLOW = pytest.mark.slow
METHODS: list[tuple[str, dict[str, Any]]] = [case.values for case in ALL]  # type: ignore[misc]
# the last value is finite, but its products are not
VALUES = (math.nan, math.inf, 1e38)
ROWS = {
    "batch": (Segment((4, 3, 6)),),
    "sample": (Segment((4, 3, 6)), Segment((2, 3, 4), sample=1), Segment((1, 3, 5), kind="image", sample=2)),
    "sample with text": (
        Segment((1, 1, 5), kind="text"),
        Segment((4, 3, 6)),
        Segment((2, 3, 4), sample=1),
        Segment((1, 1, 3), kind="text", sample=1),
    ),
}


def passed(method: Any, row: str, value: float | None, where: str) -> tuple[list[Tensor], Tensor]:
    """Output and gradients `[B, L, ...]` of q, k, v and the hidden states, and the tokens bool `[B, L]` that do not
    belong to the sample, of the first row of the batch, in which some tokens of an input have the value."""
    layout = method.layout(ROWS[row])
    generator = torch.Generator().manual_seed(0)
    sizes = (2, layout.num_tokens, SIZES["num_heads"], SIZES["head_dim"])
    inputs = {name: torch.randn(sizes, generator=generator) for name in "qkv"}
    inputs["x"] = torch.randn(*sizes[:2], SIZES["dim"], generator=generator)
    start, stop = layout.sample_spans[-1]
    others = torch.ones(sizes[:2], dtype=torch.bool)
    others[0, start:stop] = False
    if value is not None:
        for name in where:
            # three neighbours, of which the last ends the sample
            inputs[name][0, stop - 3 : stop, ...] = value
    trains = method.allow_training
    leaves = [x.requires_grad_(trains) for x in inputs.values()]
    extra = method.project(inputs["x"])
    out = method(*leaves[:3], extra, AttnContext(layout=layout, topk=KeptTiles.of(2)).layer(0))
    if not trains:
        return [out.detach()], others
    # the gradient of what is not finite is not finite, as that of a loss
    dout = torch.randn(out.shape, generator=generator).masked_fill(~out.detach().isfinite(), math.nan)
    return [out.detach(), *torch.autograd.grad(out, leaves if extra else leaves[:3], dout)], others


def check(name: str, options: dict[str, Any], row: str, value: float, where: str) -> bool:
    """Compare with the finite run; False for a method that does not take the row, or the value."""
    method: Any = make(name, options)
    # the lengths of lists change the padding of `gather`, and with it the bits of every row
    method.backend = "reference"
    try:
        clean, others = passed(method, row, None, where)
    except ValueError:
        return False
    dirty, _ = passed(method, row, value, where)
    for part, a, b in zip(("out", *(f"gradient of {x}" for x in "qkvx")), clean, dirty, strict=False):
        assert torch.equal(a[others], b[others]), f"{name} {options} {row} {where}={value}: {part}"
    # the control: it arrives inside
    arrives = not math.isnan(value) or bool(dirty[0][~others].isnan().any())
    # gates alone read x
    assert arrives or where == "x", f"{name} {options} {row}"
    return arrives


@pytest.mark.parametrize("row", ["batch", "sample with text"])
def test_nan_stays_in_its_sample_and_row(row):
    # every config as it is
    taken = {name for name, options in METHODS if not options and check(name, options, row, math.nan, "qkv")}
    assert taken >= {"full", "pooled_tail", "sol", "sparge", "video_sparse", "vsa", "fine_grained"}


@pytest.mark.slow
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("where", ["q", "k", "v", "x", "qkvx"])
@pytest.mark.parametrize("row", ROWS)
def test_what_is_not_finite_stays_in_its_sample_and_row(row, where, value):
    assert any([check(name, options, row, value, where) for name, options in METHODS])


# query blocks 0 and 1 and kv blocks 0 and 1 are one sample, the others another one
Q_BLOCKS, KV_BLOCKS = Blocks.from_sizes([4, 4, 3, 4]), Blocks.from_sizes([4, 3, 4, 4])
ALLOWED = torch.tensor([[1, 1, 0, 0]] * 2 + [[0, 0, 1, 1]] * 2).bool()
LISTED = BlockIndex.from_dense(torch.eye(4).bool()[None, None])
BLOCKS: dict[str, Any] = {"q_blocks": Q_BLOCKS, "kv_blocks": KV_BLOCKS}


def of_lists(q, k, v, backend):
    return block_sparse_attn(q, k, v, LISTED, **BLOCKS, backend=backend)[0]


def of_tail(q, k, v, backend):
    return tail_attn(q, k, v, LISTED, **BLOCKS, candidates=ALLOWED, backend=backend)[0]


def of_double_tail(q, k, v, backend):
    return tail_attn(q, k, v, LISTED, **BLOCKS, candidates=ALLOWED, exclude=False, backend=backend)[0]


def of_stages(q, k, v, backend):
    return coarse_fine_attn(q, k, v, q, None, **BLOCKS, topk=1, candidates=ALLOWED, backend=backend).out


def results(op: Any, backend: str, where: str, value: float = 0.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(1, 15, 2, 8, generator=generator) for name in "qkv"}
    for name in where:
        # inside of the last block but one, and at its end, behind which kernels read on
        inputs[name][0, [9, 10]] = value
    leaves = [x.requires_grad_() for x in inputs.values()]
    out = op(*leaves, backend)
    dout = torch.randn(out.shape, generator=generator).masked_fill(~out.detach().isfinite(), math.nan)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def check_operator(op: Any, backend: str, value: float, where: str) -> None:
    clean, dirty = results(op, backend, ""), results(op, backend, where, value)
    for name, a, b, tokens in zip(("out", "dq", "dk", "dv"), clean, dirty, (8, 8, 7, 7), strict=True):
        assert torch.equal(a[:, :tokens], b[:, :tokens]), f"{op.__name__} {backend} {where}={value}: {name}"
    assert not math.isnan(value) or dirty[0][:, 8:].isnan().any()


OPERATORS = (of_lists, of_tail, of_double_tail, of_stages)


def of_backend(backend: str, request: pytest.FixtureRequest) -> str:
    if backend == "triton" and request.getfixturevalue("triton_device").type != "cpu":
        pytest.skip("needs TRITON_INTERPRET=1")
    return backend


@pytest.mark.parametrize("backend", ["reference", "gather", pytest.param("triton", marks=SLOW)])
def test_nan_stays_among_its_lists_and_candidates(backend, request):
    for op in OPERATORS:
        check_operator(op, of_backend(backend, request), math.nan, "qkv")


@pytest.mark.slow
@pytest.mark.parametrize("where", "qkv")
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("backend", ["reference", "gather", "triton"])
def test_what_is_not_finite_stays_among_its_lists_and_candidates(backend, value, where, request):
    for op in OPERATORS:
        check_operator(op, of_backend(backend, request), value, where)


@pytest.mark.parametrize("backend", ["reference", "gather", pytest.param("triton", marks=SLOW)])
def test_tokens_that_do_not_exist_may_hold_anything(backend, request):
    case = make_case([4, 3], [4, 5, 3], batch=2, heads=2, kv_heads=1, head_dim=8, density=0.7, kv_valid=True)
    sizes = case.kv_blocks.sizes.tolist()
    places = torch.cat([torch.arange(n) for n in sizes])
    assert case.kv_valid is not None
    absent = places >= case.kv_valid.repeat_interleave(case.kv_blocks.sizes.long(), 1)
    found = []
    for value in (0.0, math.nan, math.inf, 1e38):
        k, v = (x.masked_fill(absent[..., None, None], value) for x in (case.k, case.v))
        q, k, v = (x.requires_grad_() for x in (case.q.clone(), k, v))
        how = {**case.blocks, "kv_valid": case.kv_valid, "backend": of_backend(backend, request)}
        out, lse = block_sparse_attn(q, k, v, case.index, **how)
        found.append([out.detach(), lse.detach(), *torch.autograd.grad((out, lse), (q, k, v), (case.dout, case.dlse))])
    assert absent.any()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))

"""Residual connection and layer norm, by Triton kernels and by torch, against their definition in fp64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from vsa_kernels import residual_norm
from vsa_kernels.residual_norm.api import MOST_GATED_CHANNELS
from vsa_kernels.residual_norm.op import residual_norm_bwd, residual_norm_fwd

from tests.kernels.elementwise import (
    TOLERANCE,
    assert_close,
    dtypes,
    spread,
    two_rows,
)
from tests.kernels.interpreted import further, poisoned_outputs  # noqa: F401 (the fixture)
from vsa.models.recompute import checkpointed_except_attention

# B, L, C: odd sizes, two channels, several programs a sample, more channels than a warp holds
SHAPES = [(2, 5, 6), (1, 3, 2), (3, 37, 10), (2, 1, 300)]
# what the three norms of a block have, and others
KINDS = (
    "modulated", "modulated, update", "affine, gated update", "modulated, gated update", "affine",
    "modulated, projected update", "affine, gated projected update",
)  # fmt: skip
EPS = 1e-3


def problem(shape: tuple[int, int, int], kind: str, device: torch.device, dtype=torch.float32) -> dict[str, Any]:
    """Tensors around 1 with a mean that is not 0, parameters in fp32, and gradients of the sum and of the norm."""
    B, L, C = shape
    g = torch.Generator().manual_seed(C)

    def normal(*size: int, dtype=dtype) -> Tensor:
        return (0.5 + torch.randn(size, generator=g)).to(device, dtype)

    row = (C,) if "affine" in kind else (B, 1, C)
    projected, width = "projected" in kind, 3
    tensors = {
        "x": normal(B, L, C),
        "update": normal(B, L, width if projected else C) if "update" in kind else None,
        "gate": normal(B, 1, C, dtype=torch.float32) if "gated" in kind else None,
        "weight": normal(*row, dtype=torch.float32),
        "bias": normal(*row, dtype=torch.float32),
    }
    if projected:
        tensors |= {"matrix": normal(C, width), "offset": normal(C)}
    leaves = {name: None if x is None else x.requires_grad_() for name, x in tensors.items()}
    return leaves | {"dtotal": normal(B, L, C), "dnorm": normal(B, L, C)}


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 with the values of another dtype, and the gradient of the identity."""
    return x + (x.to(dtype).double() - x).detach()


def define(
    x: Tensor,
    update: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    matrix: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    bessel: int = 0,
    joins: bool = True,
) -> tuple[Tensor, Tensor]:
    """In fp64, with the roundings of the product (with its bias unless the bias `joins`) and of the sum."""
    total = x.double()
    if update is not None:
        change = update.double()
        if matrix is not None and offset is not None:
            product = change @ matrix.double().T
            change = rounded(product, x.dtype) + offset.double()
            if not joins:
                change = rounded(product + offset.double(), x.dtype)
        # the norm and the gradients are those of the sum that is returned, which is rounded
        total = rounded(total + change * (1 if gate is None else gate.double()), x.dtype)
    deviation = total - total.mean(-1, keepdim=True)
    variance = deviation.square().sum(-1, keepdim=True) / (x.shape[-1] - bessel)
    return total, deviation / (variance + EPS).sqrt() * weight.double() + bias.double()


def ours(x: Tensor, *, matrix: Tensor | None = None, offset: Tensor | None = None, **inputs: Any) -> Any:
    projection = None if matrix is None or offset is None else (matrix, offset)
    return residual_norm(x, **inputs, eps=EPS, projection=projection)


def results(function: Any, dtotal: Tensor, dnorm: Tensor, **inputs: Any) -> dict[str, Tensor]:
    """The sum, the norm, and the gradients of all tensors for gradients of both."""
    total, norm = function(**inputs)
    leaves = {name: x for name, x in inputs.items() if x is not None}
    outputs, upstream = (total, norm), (dtotal.to(total.dtype), dnorm.to(norm.dtype))
    grads = torch.autograd.grad(outputs, list(leaves.values()), upstream)
    return {"total": total, "norm": norm} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def assert_defined(shape: tuple[int, int, int], kind: str, backend: str, device: torch.device) -> None:
    for dtype in dtypes(device, backend == "triton"):
        p = problem(shape, kind, device, dtype)
        call = partial(ours, backend=backend)
        expected, actual = results(define, **p), results(call, **p)
        assert all(x.is_contiguous() for x in actual.values())
        dtypes_of = {name: torch.float32 if name in ("dgate", "dweight", "dbias") else dtype for name in actual}
        assert {name: x.dtype for name, x in actual.items()} == dtypes_of
        assert_close(actual, expected, dtype)
        if shape[2] in (6, 10):
            # the other definition of a variance
            with pytest.raises(AssertionError):
                assert_close(results(partial(define, bessel=1), **p), expected, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_the_definition(shape, kind, device):
    assert_defined(shape, kind, "reference", device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [*SHAPES[:2], *map(further, SHAPES[2:])], ids=str)
def test_triton_is_the_definition(shape, kind, triton_device):
    assert_defined(shape, kind, "triton", triton_device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(1, 23296, 1536), (2, 4099, 5120), (8, 2048, 768)], ids=str)
def test_triton_at_the_sizes_of_models(size, kind, triton_device):
    if triton_device.type == "cpu":
        pytest.skip("takes minutes in the interpreter")
    p = problem(size, kind, triton_device, torch.bfloat16)
    call = partial(ours, backend="triton")
    actual, again = (results(call, **p) for _ in range(2))
    assert all(torch.equal(actual[name], again[name]) for name in actual)
    joins = "gated" not in kind or size[2] <= MOST_GATED_CHANNELS
    expected = results(partial(define, joins=joins), **p)
    assert_close(actual, expected, torch.bfloat16)
    # sums over the tokens are in fp32, of values that are not rounded yet
    for name in ("dgate", "dweight", "dbias"):
        if name in expected:
            assert (actual[name].double() - expected[name]).norm() < 1e-4 * expected[name].norm(), name


@pytest.mark.parametrize("kind", ["modulated, gated update", "affine, gated projected update"])
def test_triton_adds_the_sums_of_several_programs(kind, triton_device, monkeypatch):
    from vsa_kernels import partial_sums
    from vsa_kernels.residual_norm import triton_residual_norm

    # ten programs a sample, the last one short, and five steps of each sum
    monkeypatch.setattr(partial_sums, "_PARTIALS", 2)
    monkeypatch.setattr(triton_residual_norm, "_FEWEST_ROWS", 4)
    monkeypatch.setattr(triton_residual_norm, "_MOST_ROWS", 4)
    assert_defined((2, 37, 12), kind, "triton", triton_device)


def test_triton_keeps_a_bad_token_to_itself(triton_device):
    p = problem((2, 5, 6), "modulated, gated update", triton_device)
    p["update"].data[1, 2, 3] = torch.nan
    actual = results(partial(ours, backend="triton"), **p)
    bad = [[False] * 5, [False, False, True, False, False]]
    for name in ("total", "norm", "dx", "dupdate"):
        assert actual[name].isnan().any(-1).tolist() == bad, name
    assert actual["dbias"].isfinite().all()


def test_triton_takes_any_strides(triton_device):
    p = problem((3, 4, 6), "modulated, gated update", triton_device)
    call = partial(ours, backend="triton")
    expected = results(call, **p)
    views = {name: x.detach().movedim(-1, 0).contiguous().movedim(0, -1) for name, x in p.items()}
    upstream = {name: views.pop(name) for name in ("dtotal", "dnorm")}
    assert_close(
        results(call, **upstream, **{k: v.requires_grad_() for k, v in views.items()}), expected, torch.float32
    )
    # rows of modulation, as a block has them
    rows = torch.stack([p[name].detach() for name in ("gate", "weight", "bias")], 2).requires_grad_()
    gate, weight, bias = rows.unbind(2)
    actual = results(call, **p | {"gate": gate, "weight": weight, "bias": bias})
    assert_close(actual, expected, torch.float32)


# what is kept for the backward when these tensors are frozen; the last but one is what training of adapters leaves
KEPT: dict[str, set[str]] = {
    "": {"total", "update", "gate", "weight", "bias"},
    "gate": {"total", "gate", "weight", "bias"},
    "weight bias": {"total", "update", "gate", "weight"},
    "bias": {"total", "update", "gate", "weight", "bias"},
    "gate weight bias": {"total", "gate", "weight"},
    "x update": {"total", "update", "gate", "weight", "bias"},
}


@pytest.mark.parametrize("frozen", KEPT)
@pytest.mark.parametrize("kind", [KINDS[3], further(KINDS[2])])
def test_triton_neither_sums_nor_keeps_for_frozen_tensors(kind, frozen, triton_device):
    p = problem((3, 5, 6), kind, triton_device)
    upstream = tuple(p.pop(name) for name in ("dtotal", "dnorm"))
    call = partial(ours, backend="triton")
    everything = dict(zip(p, torch.autograd.grad(call(**p), list(p.values()), upstream), strict=True))
    some = {name: x.detach().requires_grad_(name not in frozen.split()) for name, x in p.items()}
    saved_tensors: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved_tensors.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = call(**some)
    names = [name for name in p if name not in frozen.split()]
    grads = torch.autograd.grad(outputs, [some[name] for name in names], upstream)
    for name, grad in zip(names, grads, strict=True):
        assert torch.equal(grad, everything[name]), name
    places = {x.data_ptr() for x in saved_tensors}
    assert {name for name, x in (some | {"total": outputs[0]}).items() if x.data_ptr() in places} == KEPT[frozen]


@pytest.mark.parametrize(("frozen", "kept"), [("offset", True), ("gate", True), ("gate offset", False)])
def test_triton_keeps_the_bias_of_the_projection_for_itself_and_the_gate(frozen, kept, triton_device):
    p = problem((3, 5, 6), "affine, gated projected update", triton_device)
    upstream = tuple(p.pop(name) for name in ("dtotal", "dnorm"))
    call = partial(ours, backend="triton")
    everything = dict(zip(p, torch.autograd.grad(call(**p), list(p.values()), upstream), strict=True))
    some = {name: x.detach().requires_grad_(name not in frozen.split()) for name, x in p.items()}
    places: set[int] = set()

    def pack(x: Tensor) -> Tensor:
        places.add(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = call(**some)
    names = [name for name in p if name not in frozen.split()]
    grads = torch.autograd.grad(outputs, [some[name] for name in names], upstream)
    assert all(torch.equal(grad, everything[name]) for name, grad in zip(names, grads, strict=True))
    assert (some["offset"].data_ptr() in places) == kept


@pytest.mark.parametrize("used", ["total", "norm"])
@pytest.mark.parametrize("kind", [KINDS[3], further(KINDS[4])])
def test_triton_takes_a_gradient_of_one_output(kind, used, triton_device):
    p = problem((2, 5, 6), kind, triton_device)
    # the sum is x itself where there is no update
    p["dnorm" if used == "total" else "dtotal"].zero_()
    expected = results(define, **p)
    upstream = {name: p.pop(name) for name in ("dtotal", "dnorm")}
    output = ours(**p, backend="triton")[used == "norm"]
    leaves = [x for x in p.values() if x is not None]
    grads = torch.autograd.grad(output, leaves, upstream[f"d{used}"], allow_unused=True)
    names = [name for name, x in p.items() if x is not None]
    for name, grad in zip(names, grads, strict=True):
        actual = torch.zeros_like(p[name]) if grad is None else grad
        torch.testing.assert_close(actual, expected[f"d{name}"], rtol=1e-5, atol=1e-5, check_dtype=False)


def test_triton_takes_more_samples_than_the_second_axis_of_a_grid(triton_device):
    if triton_device.type == "cpu":
        pytest.skip("takes minutes in the interpreter")
    assert_defined((65537, 2, 6), KINDS[3], "triton", triton_device)


def test_parameters_of_each_token_are_computed_by_the_reference(device):
    p = problem((2, 5, 6), "modulated, gated update", device)
    for name in ("gate", "weight", "bias"):
        p[name] = p[name].detach().repeat(1, 5, 1).requires_grad_()
    assert_close(results(ours, **p), results(define, **p), torch.float32)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("modulated, gated update", [8, 2, 21, 3, 4]),
        ("affine, gated projected update", [36, *range(8)]),
        ("modulated", []),
        ("modulated, update", list(range(37))),
    ],
)
def test_tokens_have_one_of_two_rows(kind, backend, first, request, monkeypatch):
    device = request.getfixturevalue("triton_device") if backend == "triton" else torch.device("cpu")
    if backend == "triton":
        from vsa_kernels.residual_norm import triton_residual_norm

        # several programs of a row, the last ones short
        monkeypatch.setattr(triton_residual_norm, "_FEWEST_ROWS", 4)
        monkeypatch.setattr(triton_residual_norm, "_MOST_ROWS", 4)
    for dtype in dtypes(device, backend == "triton"):
        p, places = two_rows(problem((2, 37, 10), kind, device, dtype), first, device)

        def define_rows(gate: Any, weight: Tensor, bias: Tensor, places: Any = places, **others: Any) -> Any:
            gate, weight, bias = spread(places, gate, weight, bias)
            return define(gate=gate, weight=weight, bias=bias, **others)

        actual, expected = results(partial(ours, backend=backend, places=places), **p), results(define_rows, **p)
        assert_close(actual, expected, dtype)
        if first:
            # the control: the rows of neighbours
            other = (places[0].roll(1), places[1]) if len(first) < 37 else (places[0], 0)
            with pytest.raises(AssertionError):
                assert_close(results(partial(define_rows, places=other), **p), expected, dtype)


def test_two_rows_keep_no_more_for_the_backward_than_one(triton_device):
    one = problem((2, 64, 12), "modulated, gated update", triton_device)
    two, places = two_rows(one, [3, 9], triton_device)

    def kept(p: dict[str, Any], **options: Any) -> int:
        tensors: dict[int, int] = {}
        inputs = {name: x for name, x in p.items() if name not in ("dtotal", "dnorm")}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: tensors.update({x.data_ptr(): x.nbytes}) or x, lambda x: x
        ):
            ours(**inputs, backend="triton", **options)
        return sum(tensors.values())

    # a row of gate, weight and bias of both samples, and the list of tokens
    assert kept(two, places=places) - kept(one) == 2 * 3 * 12 * 4 + 64 * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_reference_is_that_of_plain_blocks_bit_for_bit(dtype, kind):
    """Runs on a CPU with one seed keep every digit of their losses."""
    p = problem((2, 9, 16), kind, torch.device("cpu"), dtype)

    def plain(
        x: Tensor, update: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor, **projection: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        if projection:
            assert update is not None
            update = F.linear(update, projection["matrix"], projection["offset"])
        if update is not None:
            x = (x + update * (1 if gate is None else gate)).type_as(x)
        if "affine" in kind:
            return x, F.layer_norm(x.to(wide), (16,), weight.to(wide), bias.to(wide), EPS).type_as(x)
        return x, (F.layer_norm(x.to(wide), (16,), eps=EPS) * weight + bias).type_as(x)

    actual, expected = results(ours, **p), results(plain, **p)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", ["modulated", "affine, gated projected update"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_compiles_whole(backend, kind, request):
    device = request.getfixturevalue("triton_device") if backend == "triton" else torch.device("cpu")
    torch._dynamo.reset()
    p = problem((2, 5, 6), kind, device)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    actual, expected = (results(partial(function, backend=backend), **p) for function in (compiled, ours))
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name])


def test_triton_runs_again_where_a_block_is_computed_again(triton_device, monkeypatch):
    from vsa_kernels.residual_norm import triton_residual_norm

    p = problem((1, 3, 6), "modulated, update", triton_device)
    call = partial(ours, backend="triton")
    expected = results(call, **p)
    forward, calls = triton_residual_norm.forward, []
    monkeypatch.setattr(triton_residual_norm, "forward", lambda *a: calls.append(a) or forward(*a))

    def again(x: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
        return checkpointed_except_attention(lambda y: call(y, **others), x)

    actual = results(again, **p)
    assert len(calls) == 2
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[6], *map(further, (KINDS[1], *KINDS[2:6]))])
def test_triton_opcheck(kind, triton_device):
    p = problem((2, 5, 6), kind, triton_device)
    dtotal, dnorm = p.pop("dtotal"), p.pop("dnorm")
    inputs = op_inputs(**p)
    torch.library.opcheck(residual_norm_fwd, inputs)
    if kind == "modulated":
        p, places = two_rows(p, [2, 3], triton_device)
        torch.library.opcheck(residual_norm_fwd, (*op_inputs(**p), *places))
    plain = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
    total, _, mean, rstd = residual_norm_fwd(*plain)
    x, update, update_bias, gate, weight, bias, _ = plain
    sums = (None if gate is None else update, update_bias, gate, weight, bias)
    for some in (sums, (None, None, gate, weight, None)):
        call = (None if update is None else dtotal, dnorm, x if update is None else total, *some, mean, rstd)
        torch.library.opcheck(residual_norm_bwd, call)


def op_inputs(
    x: Tensor, update: Any, gate: Any, weight: Tensor, bias: Tensor, matrix: Any = None, offset: Any = None
) -> tuple[Any, ...]:
    """Arguments of the op: an update that is multiplied, and the bias of its projection."""
    if matrix is not None:
        update = F.linear(update, matrix).detach().requires_grad_()
    return x, update, offset, gate, weight, bias, EPS


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_gives_an_empty_result(kind):
    p = problem((0, 5, 4), kind, torch.device("cpu"))
    upstream = {name: p.pop(name) for name in ("dtotal", "dnorm")}
    actual = results(ours, **upstream, **p)
    assert actual["norm"].shape == actual["dx"].shape == (0, 5, 4)
    # the op itself needs no GPU for nothing
    x, update, update_bias, gate, weight, bias, _ = inputs = op_inputs(**p)
    _, norm, mean, rstd = residual_norm_fwd(*inputs)
    grads = residual_norm_bwd(None, norm, x, update, update_bias, gate, weight, bias, mean, rstd)
    assert (norm.shape, grads[0].shape, mean.shape) == ((0, 5, 4), (0, 5, 4), (0, 5))
    assert all(grad.abs().sum() == 0 for grad in grads[2:])
    assert grads[2].shape == ((4,) if "projected" in kind else (0,))


@pytest.mark.parametrize("of_bias", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
def test_triton_takes_parameters_of_another_dtype(other, of_bias, triton_device):
    p = problem((2, 5, 6), "affine, gated update", triton_device)
    for name, dtype in (("gate", other), ("weight", other), ("bias", of_bias)):
        p[name] = p[name].detach().to(dtype).requires_grad_()
    actual = results(partial(ours, backend="triton"), **p)
    assert (actual["norm"].dtype, actual["dgate"].dtype, actual["dbias"].dtype) == (torch.float32, other, of_bias)
    expected = results(define, **p)
    for name, exact in expected.items():
        error = (actual[name].double() - exact.double()).abs().max() / exact.abs().max()
        assert error <= TOLERANCE[actual[name].dtype], name


def test_triton_refuses_parameters_of_each_token(triton_device):
    p = problem((2, 5, 6), "modulated", triton_device)
    rows = {name: p[name].detach().repeat(1, 5, 1) for name in ("weight", "bias")}
    with pytest.raises(ValueError, match="triton takes one row of parameters per sample, got one per token"):
        residual_norm(p["x"], None, None, **rows, eps=EPS, backend="triton")

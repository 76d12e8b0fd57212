"""Gated residual connection, by Triton kernels and by torch, against its definition in fp64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from vsa_kernels import gated_residual
from vsa_kernels.residual_norm.gated_op import gated_residual_bwd, gated_residual_fwd

from tests.kernels.elementwise import (
    assert_close,
    dtypes,
    spread,
    two_rows,
)
from tests.kernels.interpreted import further, poisoned_outputs  # noqa: F401 (the fixture)

# B, L, C: odd sizes, several programs a sample, more channels than a program has
SHAPES = [(2, 5, 6), (1, 3, 2), (3, 37, 10), (2, 18, 300)]


def problem(
    shape: tuple[int, int, int], projected: bool, device: torch.device, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Tensors around 1, a gate in fp32, and a gradient."""
    B, L, C = shape
    g = torch.Generator().manual_seed(C)

    def normal(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return (0.5 + torch.randn(size, generator=g)).to(device, dtype)

    tensors = {"x": normal(B, L, C), "update": normal(B, L, 4 if projected else C)}
    tensors["gate"] = normal(B, 1, C, dtype=torch.float32)
    if projected:
        tensors |= {"matrix": normal(C, 4), "offset": normal(C)}
    return {name: x.requires_grad_() for name, x in tensors.items()} | {"dout": normal(B, L, C)}


def define(x: Tensor, update: Tensor, gate: Tensor, matrix: Any = None, offset: Any = None) -> Tensor:
    change = update.double()
    if matrix is not None:
        change = change @ matrix.double().T + offset.double()
    return x.double() + gate.double() * change


def ours(x: Tensor, *, matrix: Any = None, offset: Any = None, **inputs: Any) -> Tensor:
    return gated_residual(x, **inputs, projection=None if matrix is None else (matrix, offset))


TRITON = partial(ours, backend="triton")


def results(function: Any, dout: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
    """The sum and the gradients of all tensors."""
    out = function(**inputs)
    grads = torch.autograd.grad(out, list(inputs.values()), dout.to(out.dtype))
    return {"out": out} | {f"d{name}": grad for name, grad in zip(inputs, grads, strict=True)}


def assert_defined(shape: tuple[int, int, int], projected: bool, backend: str, device: torch.device) -> None:
    for dtype in dtypes(device, backend == "triton"):
        p = problem(shape, projected, device, dtype)
        expected, actual = results(define, **p), results(partial(ours, backend=backend), **p)
        assert {name: x.dtype for name, x in actual.items()} == {
            name: torch.float32 if name == "dgate" else dtype for name in actual
        }
        assert_close(actual, expected, dtype)
        # a control: the gate of another sample
        if shape[0] > 1:
            with pytest.raises(AssertionError):
                assert_close(results(define, **p | {"gate": p["gate"].roll(1, 0)}), expected, dtype)


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_the_definition(shape, projected, device):
    assert_defined(shape, projected, "reference", device)


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES[:2], further(SHAPES[2]), SHAPES[3]], ids=str)
def test_triton_is_the_definition(shape, projected, triton_device):
    assert_defined(shape, projected, "triton", triton_device)


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("size", [(1, 23296, 1536), (2, 4099, 5120), (8, 2048, 768)], ids=str)
def test_triton_at_the_sizes_of_models(size, projected, triton_device):
    if triton_device.type == "cpu":
        pytest.skip("takes minutes in the interpreter")
    p = problem(size, projected, triton_device, torch.bfloat16)
    actual, again = (results(TRITON, **p) for _ in range(2))
    assert all(torch.equal(actual[name], again[name]) for name in actual)
    assert_close(actual, results(define, **p), torch.bfloat16)


def test_triton_adds_the_sums_of_several_programs(triton_device, monkeypatch):
    from vsa_kernels import partial_sums
    from vsa_kernels.residual_norm import triton_gated_residual

    # three programs a sample of two tiles, the last one short, and three steps of each sum
    monkeypatch.setattr(partial_sums, "_PARTIALS", 2)
    for name, value in (("_FEWEST_ROWS", 16), ("_MOST_ROWS", 16), ("_TILE_ROWS", 8)):
        monkeypatch.setattr(triton_gated_residual, name, value)
    assert_defined((2, 37, 12), True, "triton", triton_device)


def test_triton_takes_any_strides(triton_device):
    p = problem((3, 4, 6), False, triton_device)
    expected = results(TRITON, **p)
    views = {name: x.detach().movedim(-1, 0).contiguous().movedim(0, -1).requires_grad_() for name, x in p.items()}
    assert_close(results(TRITON, **views), expected, torch.float32)
    # a row of modulation, as a block has it
    rows = torch.stack([p["gate"].detach() for _ in range(3)], 2).requires_grad_()
    assert_close(results(TRITON, **p | {"gate": rows.unbind(2)[1]}), expected, torch.float32)


# frozen tensors, and which of update and offset are kept for the backward
KEPT: dict[str, set[str]] = {
    "offset": {"product", "offset"}, "gate": {"offset"}, "gate offset": set(), "x matrix update": {"product", "offset"},
}  # fmt: skip


@pytest.mark.parametrize("frozen", KEPT)
def test_triton_neither_sums_nor_keeps_for_frozen_tensors(frozen, triton_device, monkeypatch):
    p = problem((3, 5, 6), True, triton_device)
    dout = p.pop("dout")
    everything = dict(zip(p, torch.autograd.grad(TRITON(**p), list(p.values()), dout), strict=True))
    some = {name: x.detach().requires_grad_(name not in frozen.split()) for name, x in p.items()}
    product = F.linear(some["update"], some["matrix"])
    monkeypatch.setattr(F, "linear", lambda *_: product)
    places: set[int] = set()

    def pack(x: Tensor) -> Tensor:
        places.add(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = TRITON(**some)
    names = [name for name in p if name not in frozen.split()]
    for name, grad in zip(names, torch.autograd.grad(out, [some[name] for name in names], dout), strict=True):
        assert torch.equal(grad, everything[name]), name
    kept = {"product": product, "offset": some["offset"]}
    assert {name for name, x in kept.items() if x.data_ptr() in places} == KEPT[frozen]


def test_gates_of_each_token_are_computed_by_the_reference(device):
    p = problem((2, 5, 6), True, device)
    p["gate"] = p["gate"].detach().repeat(1, 5, 1).requires_grad_()
    assert_close(results(ours, **p), results(define, **p), torch.float32)


def test_triton_refuses_gates_of_each_token(triton_device):
    p = problem((2, 5, 6), False, triton_device)
    with pytest.raises(ValueError, match="triton takes one row of parameters per sample, got one per token"):
        gated_residual(p["x"], p["update"], p["gate"].repeat(1, 5, 1), backend="triton")


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_tokens_have_one_of_two_gates(backend, request, monkeypatch):
    device = request.getfixturevalue("triton_device") if backend == "triton" else torch.device("cpu")
    if backend == "triton":
        from vsa_kernels.residual_norm import triton_gated_residual

        for name, value in (("_FEWEST_ROWS", 8), ("_MOST_ROWS", 8), ("_TILE_ROWS", 4)):
            monkeypatch.setattr(triton_gated_residual, name, value)
    for dtype in dtypes(device, backend == "triton"):
        p, places = two_rows(problem((2, 37, 130), True, device, dtype), [8, 2, 21, 3, 4, 11, 12, 13, 1], device)
        actual = results(partial(ours, backend=backend, places=places), **p)

        def define_rows(gate: Tensor, places: Any = places, **others: Any) -> Tensor:
            return define(gate=spread(places, gate)[0], **others)

        expected = results(define_rows, **p)
        assert_close(actual, expected, dtype)
        # the control: the gates of neighbours
        with pytest.raises(AssertionError):
            assert_close(results(partial(define_rows, places=(places[0].roll(1), 9)), **p), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_reference_is_that_of_plain_blocks_bit_for_bit(dtype):
    """Runs on a CPU with one seed keep every digit of their losses."""
    p = problem((2, 9, 16), True, torch.device("cpu"), dtype)

    def plain(x: Tensor, update: Tensor, gate: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
        return (x + F.linear(update, matrix, offset) * gate).type_as(x)

    actual, expected = results(ours, **p), results(plain, **p)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_compiles_whole(backend, request):
    device = request.getfixturevalue("triton_device") if backend == "triton" else torch.device("cpu")
    torch._dynamo.reset()
    p = problem((2, 5, 6), True, device)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    actual, expected = (results(partial(function, backend=backend), **p) for function in (compiled, ours))
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name])


@pytest.mark.parametrize("biased", [True, further(False)])
def test_triton_opcheck(biased, triton_device):
    p = problem((2, 5, 6), False, triton_device)
    bias = torch.ones(6, device=triton_device, requires_grad=True) if biased else None
    torch.library.opcheck(gated_residual_fwd, (p["x"], p["update"], bias, p["gate"]))
    update, gate = p["update"].detach(), p["gate"].detach()
    for some in (update, None):
        torch.library.opcheck(gated_residual_bwd, (p["dout"], some, None if bias is None else bias.detach(), gate))


def test_an_empty_batch_gives_an_empty_result():
    p = problem((0, 5, 6), True, torch.device("cpu"))
    assert results(ours, **p)["out"].shape == (0, 5, 6)
    # the op itself needs no GPU for nothing
    x, bias = p["x"].detach(), p["offset"].detach()
    assert gated_residual_fwd(x, x, bias, p["gate"].detach()).shape == (0, 5, 6)
    dupdate, dbias, dgate = gated_residual_bwd(x, x, bias, p["gate"].detach())
    assert (dupdate.shape, dgate.shape) == ((0, 5, 6), (0, 1, 6))
    assert dbias.tolist() == [0.0] * 6


def test_wrong_arguments_are_refused_by_name():
    p = {"x": torch.zeros(2, 3, 4), "update": torch.zeros(2, 3, 4), "gate": torch.zeros(2, 1, 4)}
    assert gated_residual(**p).shape == (2, 3, 4)
    for changes, message in (
        ({"x": torch.zeros(2, 0, 4)}, "x must be a float .B, tokens, channels. with tokens"),
        ({"update": torch.zeros(2, 3, 5)}, r"update must be torch.float32 \[2, 3, 4\] like x"),
        ({"gate": torch.zeros(2, 2, 4)}, r"gate must be a float \[2, 1, 4\] or \[2, 3, 4\]"),
        ({"projection": (torch.zeros(4, 5), torch.zeros(4))}, "the weight of projection must be a float .4, 4. like"),
        ({"backend": "gather"}, "backend must be reference, triton or None"),
    ):
        with pytest.raises(ValueError, match=message):
            gated_residual(**p | changes)

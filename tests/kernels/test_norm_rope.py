"""Norm and rotation, by Triton kernels and by torch, against their definition with complex numbers in fp64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from vsa_kernels import norm_rope
from vsa_kernels.norm_rope.op import norm_rope_bwd, norm_rope_fwd

from tests.kernels.elementwise import assert_close, dtypes
from tests.kernels.interpreted import further, poisoned_outputs  # noqa: F401 (the fixture)
from vsa.models.recompute import checkpointed_except_attention

# B, L, H, D: odd L, heads of no power of two, and the widths of Wan-1.3B and of the small model
SHAPES = [(2, 5, 3, 6), (1, 7, 2, 16), (2, 3, 12, 64), (1, 3, 5, 80), (1, 1, 1, 2), (1, 3, 12, 128)]
# queries and keys of self-attention, those of cross-attention, and those whose projection is an adapter's
KINDS = ("projected, rotated", "projected", "rotated")
# input channels of a projection
WIDTH = 5
EPS = 1e-4
LAYOUTS = ["plain", "packed", "tokens apart", "channels apart"]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values with other strides."""
    if layout == "packed":
        return torch.stack([x, torch.full_like(x, torch.nan)], dim=-2).flatten(-2)[..., : x.shape[-1]]
    if layout == "tokens apart":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "channels apart":
        return x.transpose(1, -1).contiguous().transpose(1, -1)
    return x


def problem(
    shape: tuple[int, ...], device: torch.device, layout: str = "plain", dtype=torch.float32, kind: str = "rotated"
) -> dict[str, Any]:
    """Tokens so small that eps matters, a weight, tables of random angles and a gradient."""
    B, L, H, D = shape
    g = torch.Generator().manual_seed(L)
    normal = partial(torch.randn, generator=g)
    inputs: dict[str, Any] = {"x": 1e-2 * normal(B, L, H * D), "weight": 1 + 0.3 * normal(H * D)}
    dout, angle = normal(B, L, H, D), 6 * torch.rand(L, D // 2, generator=g)
    if "projected" in kind:
        # the bias is about as large as the product
        inputs["x"], matrix, bias = normal(B, L, WIDTH), 4e-3 * normal(H * D, WIDTH), 6e-3 * normal(H * D)
        inputs["projection"] = tuple(x.to(device, dtype).requires_grad_() for x in (matrix, bias))
    inputs["x"] = laid_out(inputs["x"].to(device, dtype), layout).requires_grad_()
    inputs["weight"] = inputs["weight"].to(device, dtype).requires_grad_()
    if "rotated" in kind:
        inputs |= {"cos": angle.cos().to(device), "sin": angle.sin().to(device)}
    return inputs | {"num_heads": H, "eps": EPS, "dout": laid_out(dout.to(device, dtype), layout)}


def define(
    x: Tensor, weight: Tensor, cos: Any = None, sin: Any = None, *, num_heads: int, eps: float, projection: Any = None
) -> Tensor:
    """Each channel pair is a complex number, which the table turns."""
    x, weight = x.double(), weight.double()
    if projection is not None:
        matrix, bias = (parameter.double() for parameter in projection)
        x = x @ matrix.T + bias
    normed_x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    if cos is None:
        return normed_x.unflatten(-1, (num_heads, -1))
    pairs = torch.view_as_complex(normed_x.unflatten(-1, (num_heads, -1, 2)).contiguous())
    turned_pairs = pairs * torch.complex(cos.double(), sin.double())[:, None]
    return torch.view_as_real(turned_pairs).flatten(-2)


def leaves(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors with gradients."""
    named = {"x": inputs["x"], "weight": inputs["weight"]}
    return named | dict(zip(("matrix", "bias"), inputs.get("projection", ()), strict=False))


def results(function: Any, dout: Tensor, **inputs: Any) -> dict[str, Tensor]:
    """Output and gradients."""
    out, named = function(**inputs), leaves(inputs)
    grads = torch.autograd.grad(out, list(named.values()), dout.to(out.dtype))
    return {"out": out, **{f"d{name}": grad for name, grad in zip(named, grads, strict=True)}}


def wrong_inputs(p: dict[str, Any]) -> list[dict[str, Any]]:
    """Other values of what matters in a problem."""
    wrong: list[dict[str, Any]] = [{"eps": 1.2 * EPS}]
    if "sin" in p:
        wrong.append({"sin": -p["sin"]})
    if "projection" in p:
        matrix, bias = p["projection"]
        wrong.append({"projection": (matrix, (0.5 * bias).detach().requires_grad_())})
    return wrong


def assert_defined(
    shape: tuple[int, ...], backend: str, device: torch.device, layout: str = "plain", kind: str = "rotated"
) -> None:
    def ours(**inputs: Any) -> Tensor:
        return norm_rope(**inputs, backend=backend)

    for dtype in dtypes(device, backend == "triton"):
        p = problem(shape, device, layout, dtype, kind)
        expected = results(define, **p)
        actual = results(ours, **p)
        assert actual["out"].is_contiguous()
        assert all(x.dtype == dtype for x in actual.values())
        assert_close(actual, expected, dtype)
        for wrong in wrong_inputs(p):
            with pytest.raises(AssertionError):
                assert_close(results(ours, **p | wrong), expected, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_the_definition(shape, kind, device):
    assert_defined(shape, "reference", device, kind=kind)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_takes_any_strides(layout, device):
    assert_defined((2, 5, 3, 6), "reference", device, layout)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        *((shape, kind) for shape in SHAPES[:2] for kind in KINDS),
        *((shape, KINDS[0]) for shape in SHAPES[2:4]),
        *(further(shape, kind) for shape in SHAPES[2:4] for kind in KINDS[1:]),
        *(further(shape, kind) for shape in SHAPES[4:] for kind in KINDS),
    ],
    ids=str,
)
def test_triton_is_the_definition(shape, kind, triton_device):
    assert_defined(shape, "triton", triton_device, kind=kind)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton_takes_any_strides(layout, triton_device):
    assert_defined((2, 5, 3, 6), "triton", triton_device, layout)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(8, 16384, 12, 64), (1, 23296, 12, 128), (1, 2048, 40, 128)], ids=str)
def test_triton_at_the_sizes_of_models(shape, kind, triton_device):
    if triton_device.type == "cpu":
        pytest.skip("takes minutes in the interpreter")
    p = problem(shape, triton_device, dtype=torch.bfloat16, kind=kind)
    dout, inputs = p.pop("dout"), p
    actual = results(lambda **x: norm_rope(**x, backend="triton"), dout, **inputs)
    assert_close(actual, results(define, dout, **inputs), torch.bfloat16)
    again = results(lambda **x: norm_rope(**x, backend="triton"), dout, **inputs)
    assert all(torch.equal(actual[name], again[name]) for name in actual)


@pytest.mark.parametrize("kind", [KINDS[1], further(KINDS[2])])
def test_triton_adds_the_sums_of_several_programs(kind, triton_device, monkeypatch):
    from vsa_kernels import partial_sums

    # five programs, the last one short, and three steps of their sum
    monkeypatch.setattr(partial_sums, "_PARTIALS", 2)
    assert_defined((2, 37, 2, 6), "triton", triton_device, kind=kind)


def test_triton_rounds_once(triton_device):
    if triton_device.type == "cpu":
        pytest.skip("the interpreter is wrong in half precision")
    p = problem((2, 64, 12, 64), triton_device, dtype=torch.bfloat16)
    p.pop("dout")
    exact = define(**p)
    ours, torchs = (norm_rope(**p, backend=name) for name in ("triton", "reference"))
    assert (ours.double() - exact).norm() < 0.8 * (torchs.double() - exact).norm()


def test_triton_reads_nothing_else(triton_device):
    B, L, H, D = 1, 6, 3, 6
    p = problem((B, L, H, D), triton_device)
    expected = norm_rope(**{k: v for k, v in p.items() if k != "dout"}, backend="reference")
    store = torch.full((B, L + 4, H * D + 14), torch.nan, device=triton_device)
    p["x"] = store[:, 2:-2, : H * D].copy_(p["x"].detach()).requires_grad_()
    heads = torch.full((B, L + 4, H + 2, D + 2), torch.nan, device=triton_device)
    p["dout"] = heads[:, 2:-2, 1:-1, :D].copy_(p["dout"])
    actual = results(lambda **x: norm_rope(**x, backend="triton"), **p)
    assert all(x.isfinite().all() for x in actual.values())
    torch.testing.assert_close(actual["out"], expected, rtol=1e-5, atol=1e-6)


def test_triton_keeps_a_bad_token_to_itself(triton_device):
    p = problem((1, 5, 2, 6), triton_device)
    p["x"].data[0, 2, 3] = torch.nan
    actual = results(lambda **x: norm_rope(**x, backend="triton"), **p)
    for name in ("out", "dx"):
        assert actual[name].isnan().flatten(2).any(-1).tolist() == [[False, False, True, False, False]]


def test_triton_strides_past_two_billion(triton_device):
    if triton_device.type == "cpu":
        pytest.skip("needs 6 GB of device memory")
    p, stride = problem((1, 134, 2, 64), triton_device, dtype=torch.bfloat16), 20_000_000
    store = torch.zeros(stride * 134, dtype=torch.bfloat16, device=triton_device)
    p["x"] = store.as_strided(p["x"].shape, (stride * 134, stride, 1)).copy_(p["x"].detach()).requires_grad_()
    actual = results(lambda **x: norm_rope(**x, backend="triton"), **p)
    assert_close(actual, results(define, **p), torch.bfloat16)


@pytest.mark.parametrize("other", [torch.float32, torch.float64])
def test_triton_takes_a_weight_of_another_dtype(other, triton_device):
    p = problem((1, 3, 2, 8), triton_device)
    p["weight"] = p["weight"].detach().to(other).requires_grad_()
    actual = results(lambda **x: norm_rope(**x, backend="triton"), **p)
    assert (actual["out"].dtype, actual["dweight"].dtype) == (torch.float32, other)
    assert_close(actual, results(define, **p), torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_reference_is_torchs_norm_and_the_rotation_bit_for_bit(dtype, kind):
    """Runs on a CPU with one seed keep every digit of their losses."""

    def separately(x, weight, cos=None, sin=None, *, num_heads, eps, projection=None):
        x = x if projection is None else F.linear(x, *projection)
        heads = F.rms_norm(x, (x.shape[-1],), weight, eps).unflatten(-1, (num_heads, -1))
        if cos is None:
            return heads
        even, odd = heads.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(heads)

    p = problem((2, 9, 4, 16), torch.device("cpu"), dtype=dtype, kind=kind)
    actual, expected = results(norm_rope, **p), results(separately, **p)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_compiles_whole(backend, kind, request):
    device = request.getfixturevalue("triton_device") if backend == "triton" else torch.device("cpu")
    torch._dynamo.reset()
    p = problem((2, 5, 2, 6), device, kind=kind)
    compiled = torch.compile(norm_rope, backend="aot_eager", fullgraph=True)
    actual = results(lambda **x: compiled(**x, backend=backend), **p)
    expected = results(lambda **x: norm_rope(**x, backend=backend), **p)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name])


def test_compiled_once_for_any_number_of_tokens():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(partial(norm_rope, num_heads=2, eps=EPS), backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for tokens in (5, 9, 14):
        p = problem((2, tokens, 2, 6), torch.device("cpu"))
        p.pop("dout")
        inputs = {name: p[name] for name in ("x", "weight", "cos", "sin")}
        torch.testing.assert_close(compiled(**inputs), norm_rope(**p))
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1]


def test_triton_runs_again_where_a_block_is_computed_again(triton_device, monkeypatch):
    from vsa_kernels.norm_rope import triton_norm_rope

    p = problem((1, 3, 2, 6), triton_device)
    expected = results(lambda **x: norm_rope(**x, backend="triton"), **p)
    forward, calls = triton_norm_rope.forward, []
    monkeypatch.setattr(triton_norm_rope, "forward", lambda *a: calls.append(a) or forward(*a))

    def again(**inputs: Any) -> Tensor:
        return checkpointed_except_attention(lambda x: norm_rope(**inputs | {"x": x}, backend="triton"), inputs["x"])

    actual = results(again, **p)
    assert len(calls) == 2
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_triton_opcheck(rotated, with_bias, triton_device):
    p = problem((2, 5, 2, 6), triton_device, "packed")
    bias = p["weight"].detach().clone().requires_grad_() if with_bias else None
    arguments = (p["x"], p["weight"], bias, *((p["cos"], p["sin"]) if rotated else (None, None)))
    torch.library.opcheck(norm_rope_fwd, (*arguments, 2, EPS))
    _, rstd = norm_rope_fwd(*arguments, 2, EPS)
    constants = (None if x is None else x.detach() for x in arguments)
    torch.library.opcheck(norm_rope_bwd, (p["dout"], *constants, rstd.detach()))


def test_an_empty_batch_gives_an_empty_result(device):
    for backend in ("reference", "triton") if device.type == "cuda" else ("reference",):
        p = problem((0, 5, 2, 6), device, kind=KINDS[0])
        actual = results(lambda p=p, backend=backend, **x: norm_rope(**x, backend=backend), **p)
        shapes = [[0, 5, 2, 6], [0, 5, WIDTH], [12], [12, WIDTH], [12]]
        assert [list(x.shape) for x in actual.values()] == shapes
        assert not any(actual[name].any() for name in ("dweight", "dmatrix", "dbias"))


def test_shapes_of_fake_tensors():
    x = torch.empty(2, 5, 12, device="meta", dtype=torch.bfloat16, requires_grad=True)
    table = torch.empty(5, 3, device="meta")
    weight = torch.empty(12, device="meta", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.empty(12, device="meta", requires_grad=True)
    out, rstd = norm_rope_fwd(x, weight, bias, table, table, 2, EPS)
    assert (list(out.shape), out.dtype, rstd.dtype) == ([2, 5, 2, 6], torch.bfloat16, torch.float32)
    inputs = (x, weight, bias)
    for grad, of in zip(torch.autograd.grad(out, inputs, torch.empty_like(out)), inputs, strict=True):
        assert (grad.shape, grad.dtype) == (of.shape, of.dtype)


GOOD: dict[str, Any] = {
    "x": torch.zeros(1, 4, 12), "weight": torch.zeros(12), "cos": torch.zeros(4, 3), "sin": torch.zeros(4, 3),
    "num_heads": 2, "eps": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": torch.zeros(4, 12)}, r"x must be a float \[B, tokens, channels\] with tokens, got .* \[4, 12\]"),
        ({"x": torch.zeros(1, 4, 12).int()}, "x must be a float .* got torch.int32"),
        ({"num_heads": 5}, "num_heads must divide the 12 channels of x into heads of an even size, got 5"),
        ({"num_heads": 4}, "num_heads must divide the 12 channels of x into heads of an even size, got 4"),
        ({"num_heads": 0}, "num_heads must divide .* got 0"),
        ({"weight": torch.zeros(6)}, r"weight must be a float \[12\] like x, got torch.float32 \[6\]"),
        ({"projection": (torch.zeros(8, 12), torch.zeros(8))}, r"weight must be a float \[8\] like projection"),
        ({"projection": (torch.zeros(12, 6), torch.zeros(12))}, r"projection must be a float \[channels, 12\] like x"),
        ({"projection": (torch.zeros(12, 12), torch.zeros(6))}, r"bias of projection must be a float \[12\] like it"),
        ({"projection": (torch.zeros(10, 12), torch.zeros(10)), "num_heads": 3}, "the 10 channels of projection"),
        ({"cos": None}, "cos and sin must be given together, got only sin"),
        ({"cos": torch.zeros(5, 3)}, r"cos must be float32 \[4, 3\], got torch.float32 \[5, 3\]"),
        ({"sin": torch.zeros(4, 3).double()}, r"sin must be float32 \[4, 3\], got torch.float64"),
        ({"sin": torch.zeros(4, 3, requires_grad=True)}, "sin must be a constant, got a tensor that requires a gradi"),
        ({"cos": torch.zeros(4, 3, device="meta")}, "cos must be on cpu like x, got meta"),
        ({"weight": torch.zeros(12, device="meta")}, "weight must be on cpu like x, got meta"),
        ({"eps": -1.0}, "eps must be finite and at least 0, got -1.0"),
        ({"eps": float("nan")}, "eps must be finite and at least 0, got nan"),
        ({"backend": "gather"}, "backend must be reference, triton or None"),
        ({"backend": "triton", "x": torch.zeros(1, 4, 12).double()}, "backend triton takes bfloat16, .* torch.float64"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(wrong, message):
    norm_rope(**GOOD)
    with pytest.raises(ValueError, match=message) as caught:
        norm_rope(**GOOD | wrong)
    assert "\n" not in str(caught.value)

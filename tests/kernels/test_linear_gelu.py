"""Linear layer and GELU, by Triton kernels and by torch, against their definition in fp64."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from vsa_kernels import linear_gelu
from vsa_kernels.linear_gelu.op import bias_gelu_bwd, bias_gelu_fwd

from tests.kernels.elementwise import TOLERANCE, assert_close, dtypes
from tests.kernels.interpreted import further, poisoned_outputs  # noqa: F401 (the fixture)
from vsa.models.recompute import checkpointed_except_attention

# leading dims, C, F: odd sizes, more columns than one block has, several tiles of rows, a vector
SHAPES = [((2, 5), 6, 10), ((37,), 3, 300), ((1, 130), 4, 9), ((), 5, 3), ((2, 3, 7), 8, 256), ((1, 1), 1, 1)]


def problem(shape: tuple[Any, ...], device: torch.device, dtype=torch.float32) -> dict[str, Any]:
    """Tokens, weight and bias with hidden values around the bend of GELU, and a gradient."""
    lead, channels, hidden = shape
    g = torch.Generator().manual_seed(channels)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(size, generator=g)).to(device, dtype)

    leaves = {
        "x": normal(*lead, channels),
        "weight": normal(hidden, channels, scale=1.5 / math.sqrt(channels)),
        "bias": normal(hidden),
    }
    return {name: x.requires_grad_() for name, x in leaves.items()} | {"dout": normal(*lead, hidden)}


def define(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    u = x.double() @ weight.double().T + bias.double()
    return 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))


def results(function: Any, dout: Tensor, **inputs: Any) -> dict[str, Tensor]:
    """Output and gradients."""
    out = function(**inputs)
    grads = torch.autograd.grad(out, list(inputs.values()), dout.to(out.dtype))
    return {"out": out} | {f"d{name}": grad for name, grad in zip(inputs, grads, strict=True)}


def assert_defined(shape: tuple[Any, ...], backend: str, device: torch.device) -> None:
    for dtype in dtypes(device, backend == "triton"):
        p = problem(shape, device, dtype)
        expected, actual = results(define, **p), results(partial(linear_gelu, backend=backend), **p)
        assert actual["out"].is_contiguous()
        assert all(x.dtype == dtype for x in actual.values())
        assert_close(actual, expected, dtype)

        def without_bias(**inputs: Any) -> Tensor:
            return linear_gelu(**inputs | {"bias": 0 * inputs["bias"]}, backend=backend)

        with pytest.raises(AssertionError):
            assert_close(results(without_bias, **p), expected, dtype)
        if dtype == torch.float32 and math.prod(shape[0]) > 1:
            # the other form of GELU differs by 5e-4 at most
            with pytest.raises(AssertionError):
                assert_close(results(lambda x, weight, bias: F.gelu(F.linear(x, weight, bias)), **p), expected, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_the_definition(shape, device):
    assert_defined(shape, "reference", device)


@pytest.mark.parametrize("shape", [*SHAPES[:4], *map(further, SHAPES[4:])], ids=str)
def test_triton_is_the_definition(shape, triton_device):
    assert_defined(shape, "triton", triton_device)


@pytest.mark.parametrize("size", [(23296, 8960), (131072, 3072), (4099, 2047)], ids=str)
def test_triton_at_the_sizes_of_models(size, triton_device):
    if triton_device.type == "cpu":
        pytest.skip("takes minutes in the interpreter")
    g = torch.Generator(triton_device).manual_seed(0)
    x, dout = (torch.randn(size, generator=g, device=triton_device, dtype=torch.bfloat16) for _ in range(2))
    bias = torch.randn(size[1], generator=g, device=triton_device).requires_grad_()
    p = {"x": x.requires_grad_(), "bias": bias, "dout": dout}
    actual, again = (results(bias_gelu_fwd, **p) for _ in range(2))
    assert all(torch.equal(actual[name], again[name]) for name in actual)
    columns = slice(0, None, 97)
    some = {name: x.detach()[..., columns].clone() for name, x in p.items()}
    dout = some.pop("dout")
    exact = results(
        lambda x, bias: _gelu(x.double() + bias.double()), dout, **{k: v.requires_grad_() for k, v in some.items()}
    )
    assert_close({name: x[..., columns] for name, x in actual.items()}, exact, torch.bfloat16)
    # sums over the tokens are in fp32, of values that are not rounded yet
    assert (actual["dbias"][columns].double() - exact["dbias"].double()).norm() < 1e-4 * exact["dbias"].double().norm()


def _gelu(u: Tensor) -> Tensor:
    return 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))


def test_triton_adds_the_bias_gradients_of_several_programs(triton_device, monkeypatch):
    from vsa_kernels import partial_sums
    from vsa_kernels.linear_gelu import triton_bias_gelu

    # nine programs for each of two blocks of columns, the last one short, and five steps of their sum
    monkeypatch.setattr(partial_sums, "_PARTIALS", 2)
    monkeypatch.setattr(triton_bias_gelu, "_TILE_ROWS", 4)
    assert_defined(((2, 67), 3, 300), "triton", triton_device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_triton_is_finite_for_every_finite_value(dtype, triton_device):
    if triton_device.type == "cpu" and dtype != torch.float32:
        pytest.skip("the interpreter is wrong in half precision")
    largest = torch.finfo(dtype).max
    values = torch.tensor([-largest, -1e4, -20, -16, -5, -0.0, 0, 1e-6, 5, 16, 20, 1e4, largest], device=triton_device)
    x = values.to(dtype).requires_grad_()
    bias = torch.zeros_like(x).requires_grad_()
    actual = results(bias_gelu_fwd, torch.ones_like(x), x=x, bias=bias)
    exact = results(
        lambda x, bias: F.gelu((x + bias).double().clamp(-1e4, None), approximate="tanh"),
        torch.ones_like(x),
        x=x,
        bias=bias,
    )
    assert all(y.isfinite().all() for y in actual.values())
    inner = slice(1, -1)
    for name in ("out", "dx"):
        torch.testing.assert_close(
            actual[name][inner].double(), exact[name][inner].double(), rtol=TOLERANCE[dtype], atol=1e-6
        )
    assert (actual["out"][-1], actual["dx"][0], actual["dx"][-1]) == (largest, 0, 1)


def test_triton_keeps_a_bad_token_to_itself(triton_device):
    p = problem(((5,), 4, 9), triton_device)
    p["x"].data[2, 3] = torch.nan
    actual = results(partial(linear_gelu, backend="triton"), **p)
    for name in ("out", "dx"):
        assert actual[name].isnan().any(-1).tolist() == [False, False, True, False, False]


def test_triton_takes_any_strides(triton_device):
    p = problem(((4, 6), 3, 10), triton_device)
    expected = results(partial(linear_gelu, backend="reference"), **p)
    views = {name: x.detach().movedim(0, -1).contiguous().movedim(-1, 0) for name, x in p.items()}
    dout = views.pop("dout")
    actual = results(partial(linear_gelu, backend="triton"), dout, **{k: v.requires_grad_() for k, v in views.items()})
    assert_close(actual, expected, torch.float32)
    x, bias = torch.randn(6, 10, 4, device=triton_device).transpose(1, 2), torch.randn(10, device=triton_device)
    torch.testing.assert_close(bias_gelu_fwd(x, bias), F.gelu(x + bias, approximate="tanh"))


def test_triton_offsets_past_two_billion(triton_device):
    if triton_device.type == "cpu":
        pytest.skip("needs 30 GB of device memory")
    rows, width = 2**19 + 3, 4096
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device=triton_device)
    x[-1] = torch.linspace(-3, 3, width)
    bias = torch.zeros(width, device=triton_device)
    assert_last = partial(torch.testing.assert_close, rtol=2e-2, atol=1e-3)
    assert_last(bias_gelu_fwd(x, bias)[-1], F.gelu(x[-1], approximate="tanh"))
    dx, dbias = bias_gelu_bwd(x, x, bias)
    last = x[-1].float().requires_grad_()
    (expected,) = torch.autograd.grad(F.gelu(last, approximate="tanh"), last, x[-1].float())
    assert_last(dx[-1].float(), expected)
    assert_last(dbias, expected)


@pytest.mark.parametrize("other", [torch.float32, torch.float64])
def test_triton_takes_a_bias_of_another_dtype(other, triton_device):
    x = torch.randn(3, 10, device=triton_device).requires_grad_()
    bias = torch.randn(10, device=triton_device, dtype=other).requires_grad_()
    actual = results(bias_gelu_fwd, torch.ones_like(x), x=x, bias=bias)
    assert (actual["out"].dtype, actual["dx"].dtype, actual["dbias"].dtype) == (torch.float32, torch.float32, other)
    assert_close(
        actual,
        results(lambda x, bias: _gelu(x.double() + bias.double()), torch.ones_like(x), x=x, bias=bias),
        torch.float32,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_reference_is_torchs_layer_bit_for_bit(dtype):
    """Runs on a CPU with one seed keep every digit of their losses."""
    p = problem(((2, 9), 16, 24), torch.device("cpu"), dtype)
    actual = results(linear_gelu, **p)
    expected = results(lambda x, weight, bias: F.gelu(F.linear(x, weight, bias), approximate="tanh"), **p)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_compiles_whole(backend, request):
    device = request.getfixturevalue("triton_device") if backend == "triton" else torch.device("cpu")
    torch._dynamo.reset()
    p = problem(((2, 5), 6, 10), device)
    compiled = torch.compile(linear_gelu, backend="aot_eager", fullgraph=True)
    actual, expected = (results(partial(function, backend=backend), **p) for function in (compiled, linear_gelu))
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name])


def test_compiled_once_for_any_number_of_tokens():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear_gelu, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for tokens in (5, 9, 14):
        p = problem(((2, tokens), 6, 10), torch.device("cpu"))
        p.pop("dout")
        torch.testing.assert_close(compiled(**p), linear_gelu(**p))
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1]


def test_triton_runs_again_where_a_block_is_computed_again(triton_device, monkeypatch):
    from vsa_kernels.linear_gelu import triton_bias_gelu

    p = problem(((1, 3), 4, 6), triton_device)
    expected = results(partial(linear_gelu, backend="triton"), **p)
    forward, calls = triton_bias_gelu.forward, []
    monkeypatch.setattr(triton_bias_gelu, "forward", lambda *a: calls.append(a) or forward(*a))

    def again(x: Tensor, **others: Tensor) -> Tensor:
        return checkpointed_except_attention(lambda y: linear_gelu(y, **others, backend="triton"), x)

    actual = results(again, **p)
    assert len(calls) == 2
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_triton_opcheck(triton_device):
    x, bias = (torch.randn(*size, device=triton_device, requires_grad=True) for size in ((2, 5, 6), (6,)))
    torch.library.opcheck(bias_gelu_fwd, (x, bias))
    torch.library.opcheck(bias_gelu_bwd, (torch.randn_like(x), x.detach(), bias.detach()))


def test_an_empty_batch_gives_an_empty_result(device):
    for backend in ("reference", "triton") if device.type == "cuda" else ("reference",):
        actual = results(partial(linear_gelu, backend=backend), **problem(((0, 5), 4, 6), device))
        assert actual["out"].shape == (0, 5, 6)
        assert actual["dx"].shape == (0, 5, 4)
        assert actual["dbias"].abs().sum() == 0
    # the op itself needs no GPU for nothing
    dx, dbias = bias_gelu_bwd(torch.empty(0, 6), torch.empty(0, 6), torch.ones(6))
    assert (dx.shape, dbias.tolist()) == ((0, 6), [0.0] * 6)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "tokens that are no floats": ({"x": torch.zeros(2, 4, dtype=torch.int32)}, "x must be a float"),
    "another width": ({"weight": torch.zeros(6, 5)}, r"weight must be a float \[hidden, 4\] like the channels of x"),
    "no matrix": ({"weight": torch.zeros(4)}, r"weight must be a float \[hidden, 4\]"),
    "another bias": ({"bias": torch.zeros(4)}, r"bias must be a float \[6\] like weight, got torch.float32 \[4\]"),
    "an unknown backend": ({"backend": "gather"}, "backend must be reference, triton or None"),
    "another device": ({"bias": torch.zeros(6, device="meta")}, "bias"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_by_name(name):
    overrides, message = WRONG[name]
    p = {"x": torch.zeros(2, 4), "weight": torch.zeros(6, 4), "bias": torch.zeros(6)}
    with pytest.raises(ValueError, match=message):
        linear_gelu(**p | overrides)

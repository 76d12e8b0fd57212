"""The ops under PyTorch's modes: autocast lowers their inputs, forward-mode AD is refused, transforms pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from vsa_kernels import Blocks, block_mean_pool, block_sparse_attn, linear_gelu, norm_rope, residual_norm, select_topk
from vsa_kernels.coarse_fine import coarse_attn, coarse_fine_attn

SIZES = [5, 3, 8]


def attend(q: Tensor, k: Tensor, v: Tensor, *_gates: Tensor, backend: str | None = None) -> tuple[Tensor, ...]:
    blocks = Blocks.from_sizes(SIZES, q.device)
    index = select_topk(torch.arange(18.0, device=q.device).view(1, 2, 3, 3).sin(), 2)
    return block_sparse_attn(q, k, v, index, q_blocks=blocks, kv_blocks=blocks, backend=backend)


def operate(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, backend: str | None = None) -> tuple[Tensor, ...]:
    blocks = Blocks.from_sizes(SIZES, q.device)
    return (coarse_fine_attn(q, k, v, *gates, q_blocks=blocks, kv_blocks=blocks, topk=2, backend=backend).out,)


def average(q: Tensor, k: Tensor, v: Tensor, *_gates: Tensor, backend: str | None = None) -> tuple[Tensor, ...]:
    blocks = Blocks.from_sizes(SIZES, q.device)
    return coarse_attn(q, k, v, q_blocks=blocks, kv_blocks=blocks)


def pool(q: Tensor, *_others: Tensor, backend: str | None = None) -> tuple[Tensor, ...]:
    return (block_mean_pool(q, Blocks.from_sizes(SIZES, q.device)),)


def rotate(q: Tensor, *_others: Tensor, backend: str | None = None) -> tuple[Tensor, ...]:
    angle = torch.arange(16.0 * 8, device=q.device).view(16, 8)
    weight = torch.ones(32, device=q.device, dtype=q.dtype)
    return (norm_rope(q.flatten(2), weight, angle.cos(), angle.sin(), num_heads=2, eps=1e-6),)


def widen(q: Tensor, *_others: Tensor, backend: str | None = None) -> tuple[Tensor, ...]:
    weight = (torch.arange(24.0 * 32, device=q.device).view(24, 32) / 100).sin()
    return (linear_gelu(q.flatten(2), weight.to(q.dtype), weight[:, 0].to(q.dtype)),)


def norm_sum(q: Tensor, k: Tensor, *_others: Tensor, backend: str | None = None) -> tuple[Tensor, ...]:
    weight = torch.arange(32.0, device=q.device).sin()
    return residual_norm(q.flatten(2), k.flatten(2), None, weight, weight, eps=1e-6)


def inputs_of(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and both gates: multiples of 1/8, the same in every dtype."""
    g = torch.Generator().manual_seed(0)
    return [(torch.randint(-16, 16, (1, 16, 2, 16), generator=g) / 8).to(device, dtype) for _ in range(5)]


def gradients(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor | None]:
    some = [x for x in outputs if x.requires_grad]
    weights = [torch.arange(x.numel(), device=x.device).view(x.shape).sin().to(x.dtype) for x in some]
    return list(torch.autograd.grad(some, inputs, weights, allow_unused=True))


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", [attend, operate, average], ids=lambda op: op.__name__)
def test_autocast_is_a_cast_of_the_inputs(op, half, backend, device):
    """Nothing else of the computation changes, whatever dtypes come in; gradients come back in theirs."""
    half_inputs = [x.requires_grad_() for x in inputs_of(device, half)]
    expected = op(*half_inputs, backend=backend)
    expected_grads = gradients(expected, half_inputs)
    # after an fp32 norm q and k are fp32 where v is not; or the other way round
    for dtypes in ([torch.float32] * 5, [half, half, torch.float32, half, torch.float32]):
        leaves = [x.to(t).requires_grad_() for x, t in zip(inputs_of(device), dtypes, strict=True)]
        with torch.autocast(device.type, half):
            actual = op(*leaves, backend=backend)
            # a backward may run under it too
            inside = gradients(actual, leaves) if op is attend else None
            actual = op(*leaves, backend=backend) if op is attend else actual
        assert actual[0].dtype == half
        for a, b in zip(actual, expected, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        for grads in (gradients(actual, leaves), inside):
            for grad, expected_grad, dtype in zip(grads or [], expected_grads, dtypes, strict=False):
                assert (grad is None) == (expected_grad is None)
                if grad is not None and expected_grad is not None:
                    assert grad.dtype == dtype
                    assert torch.equal(grad, expected_grad.to(dtype))
    if op is not average:
        with pytest.raises(ValueError, match="have the same float dtype"):
            op(*leaves)


def test_autocast_leaves_fp64_alone(device):
    with torch.autocast(device.type, torch.bfloat16):
        out, lse = attend(*inputs_of(device, torch.float64))
    assert out.dtype == lse.dtype == torch.float64


def test_autocast_in_a_compiled_call(device):
    torch._dynamo.reset()
    compiled = torch.compile(operate, backend="aot_eager", fullgraph=True)
    leaves = inputs_of(device)
    for enabled in (True, False, True):
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            actual, expected = compiled(*leaves)[0], operate(*leaves)[0]
        assert actual.dtype == expected.dtype == (torch.bfloat16 if enabled else torch.float32)
        torch.testing.assert_close(actual, expected)


def scalar(op: Any) -> Any:
    return lambda *xs: sum(x.float().square().sum() for x in op(*xs))


jvp, jacfwd, grad, vmap = torch.func.jvp, torch.func.jacfwd, torch.func.grad, torch.func.vmap
# of a function of q, with its value and a tangent
TRANSFORMS = {
    "jvp": lambda f, q: jvp(f, (q,), (q,)),
    "jacfwd": lambda f, q: jacfwd(lambda x: f(x * q))(torch.ones((), device=q.device)),
    "jvp of grad": lambda f, q: jvp(grad(f), (q,), (q,)),
    "grad of jvp": lambda f, q: grad(lambda x: jvp(f, (x,), (q,))[1])(q),
    "jvp of vmap": lambda f, q: jvp(vmap(f), (q[None],), (q[None],)),
}


@pytest.mark.parametrize("op", [attend, operate, average, pool, rotate, widen, norm_sum], ids=lambda op: op.__name__)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_tangent_is_refused(op, transform, device):
    """A registered op drops it: the output would count as a constant."""
    q, *rest = inputs_of(device)
    with pytest.raises(ValueError, match="the ops of vsa_kernels have no forward-mode derivative") as error:
        TRANSFORMS[transform](lambda x: scalar(op)(x, *rest), q)
    # what the message recommends works, and nothing else is recommended
    assert str(error.value).endswith(": use reverse mode, backward() or torch.autograd.grad")
    torch.autograd.grad(scalar(op)(q.requires_grad_(), *rest), q)
    q.requires_grad_(False)
    if op not in (pool, rotate, widen, norm_sum):
        with pytest.raises(ValueError, match="forward-mode"):
            TRANSFORMS[transform](lambda x: scalar(op)(q, rest[0], x, *rest[2:]), rest[1])


@pytest.mark.parametrize("op", [attend, operate, average, pool, rotate, widen, norm_sum], ids=lambda op: op.__name__)
def test_dual_tensors_are_refused(op, device):
    q, *rest = inputs_of(device)
    with forward_ad.dual_level():
        # inside of a level, tensors without a tangent pass: a teacher beside a student
        op(q, *rest)
        for requires_grad in (False, True):
            dual = forward_ad.make_dual(q.clone().requires_grad_(requires_grad), q)
            with pytest.raises(ValueError, match="forward-mode"):
                op(dual, *rest)
            op(dual.detach(), *rest)


@pytest.mark.parametrize("op", [attend, operate, average, pool, rotate, widen, norm_sum], ids=lambda op: op.__name__)
def test_other_modes_pass(op, device):
    q, *rest = inputs_of(device)
    value = scalar(op)(q, *rest)
    # a teacher inside of a transformed function
    primal, tangent = jvp(lambda x: x.sum() + scalar(op)(q, *rest), (q,), (q,))
    assert tangent == q.sum()
    assert primal == q.sum() + value
    with torch.inference_mode():
        assert scalar(op)(q, *rest) == value
    both = torch.stack([q, 2 * q])
    for actual, *alone in zip(vmap(lambda x: op(x, *rest))(both), *(op(x, *rest) for x in both), strict=True):
        torch.testing.assert_close(actual, torch.stack(alone))

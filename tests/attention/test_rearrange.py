"""Tokens in another order: values and gradients bit for bit those of the definition, without adding anything up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.profiler import profile

from vsa.attention.rearrange import rearrange


def permutation(length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    return order, order.argsort()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.booleans(),
)
def test_gradients_are_copies_of_the_definitions(length, batch, dtype, expanded):
    order, inverse = permutation(length, seed=length)
    x = torch.randn(batch, 3, length, 2).to(dtype).transpose(1, 2).requires_grad_()
    out = rearrange(x, order, inverse)
    assert torch.equal(out, torch.stack([x[:, i] for i in order.tolist()], dim=1))
    # the gradient of a sum over the tokens is one value that all of them share
    grad = torch.randn(batch, 1 if expanded else length, 3, 2).to(dtype).expand_as(out)
    (actual,) = torch.autograd.grad(out, x, grad)
    expected = torch.empty_like(grad)
    for place, token in enumerate(order.tolist()):
        expected[:, token] = grad[:, place]
    assert actual.dtype == dtype
    assert torch.equal(actual, expected)


def test_the_other_direction_is_another_gradient():
    order, inverse = permutation(9)
    assert not torch.equal(order, inverse)
    x, grad = torch.randn(1, 9, 2, requires_grad=True), torch.randn(1, 9, 2)
    (right,) = torch.autograd.grad(rearrange(x, order, inverse), x, grad)
    (wrong,) = torch.autograd.grad(rearrange(x, order, order), x, grad)
    assert torch.equal(right, grad[:, inverse])
    assert not torch.equal(wrong, right)


@pytest.mark.parametrize(("move", "adds"), [(rearrange, False), (lambda x, order, _: x.index_select(1, order), True)])
def test_nothing_is_added_up(move: Callable[..., Tensor], adds: bool):
    x = torch.randn(2, 11, 3, requires_grad=True)
    out = move(x, *permutation(11))
    with profile() as calls:
        out.backward(torch.randn_like(out))
    assert any("index_add" in event.name for event in calls.function_events or ()) == adds


def test_further_derivatives_and_transforms():
    order, inverse = permutation(5)
    x = torch.randn(2, 5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: rearrange(y, order, inverse), x)
    assert torch.autograd.gradgradcheck(lambda y: rearrange(y, order, inverse), x)

    def cubes(y: Tensor) -> Tensor:
        return (rearrange(y, order, inverse)[:, :2] ** 3).sum()

    rows = torch.randn(3, 2, 5, 2, dtype=torch.float64)
    grads = torch.func.vmap(torch.func.grad(cubes))(rows)
    assert torch.equal(grads, torch.stack([torch.func.grad(cubes)(row) for row in rows]))
    selection = torch.isin(torch.arange(5), order[:2])[:, None]
    torch.testing.assert_close(grads, torch.where(selection, 3 * rows**2, 0))
    # never dropped: the output would count as a constant
    with pytest.raises(RuntimeError, match="forward"):
        torch.func.jvp(lambda y: rearrange(y, order, inverse), (rows[0],), (rows[0],))

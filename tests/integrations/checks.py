"""What every family must fulfil; each file names its models."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from tests.attention.neighborhood.oracle import grid_mask
from tests.integrations.oracle import masked_attention
from tests.integrations.tiny import GRID, TILE, TILES, Case, difference, randn
from vsa.attention.neighborhood.method import NeighborhoodAttention
from vsa.integrations.diffusers import apply, remove

TOPK = 3


def check_all_tiles_equal_the_model(case: Case) -> None:
    with torch.no_grad():
        expected = case.run()
        for options in (
            dict(sparsity=0, tile_thw=TILE),
            dict(topk=TILES, tile_thw=TILE),
            # 105 tokens in runs of 64
            dict(topk=2, partition="hilbert_run"),
            dict(method="full"),
        ):
            apply(case.model, **options)
            assert difference(case.run(), expected) < 1e-5, options
            remove(case.model)
        # control: one tile less
        apply(case.model, topk=TILES - 1, tile_thw=TILE)
        assert difference(case.run(), expected) > 1e-4


@torch.no_grad()
def check_sparse_equals_masked_model(case: Case, side: Literal["first", "last"] = "last", most: float = 0.4) -> None:
    with masked_attention(GRID, TILE, TOPK, text=case.text, text_side=side) as shares:
        expected = case.run()
    # one call per layer saw tiles, and few of them
    assert len(shares) == 2
    assert max(shares) < most
    with masked_attention(GRID, (4, 2, 2), TOPK, text=case.text, text_side=side):
        other_tile = case.run()
    other_side = other_tile
    if case.text:
        with masked_attention(GRID, TILE, TOPK, text=case.text, text_side="first" if side == "last" else "last"):
            other_side = case.run()
    apply(case.model, topk=TOPK, tile_thw=TILE)
    actual = case.run()
    assert difference(actual, expected) < 1e-5
    assert difference(actual, other_tile) > 1e-2
    assert difference(actual, other_side) > 1e-2
    # the order of the tiles is nobody's business
    remove(case.model)
    apply(case.model, topk=TOPK, tile_thw=TILE, block_order="raster")
    assert difference(case.run(), expected) < 1e-5


@torch.no_grad()
def check_remove_is_exact(case: Case) -> None:
    model = case.model
    expected, keys = case.run(), list(model.state_dict())
    processors = dict(model.attn_processors)
    state = torch.random.get_rng_state()
    apply(model, topk=1, tile_thw=TILE, gates="coarse_and_fine")
    assert torch.equal(torch.random.get_rng_state(), state)
    # cross-attention and the text's own attention are not touched, every joint or self-attention is
    names = {name for name, processor in model.attn_processors.items() if processor is not processors[name]}
    assert len(names) == 2
    assert all("attn2" not in name and "refiner" not in name for name in names)
    assert not torch.equal(case.run(), expected)
    assert sum("to_gate_" in name for name in model.state_dict()) == 2 * 2 * 2
    remove(model)
    assert all(processor is processors[name] for name, processor in model.attn_processors.items())
    assert list(model.state_dict()) == keys
    assert torch.equal(case.run(), expected)
    assert not model._forward_pre_hooks
    assert not hasattr(model, "_applied_attention")


@torch.no_grad()
def check_a_window(case: Case, side: Literal["first", "last"] = "last") -> None:
    """Neighborhood attention is the model with a mask over tokens, and text in the same softmax."""
    window, stride = (2, 4, 3), (1, 2, 1)
    method = partial(NeighborhoodAttention, window_thw=window, stride_thw=stride, tile_thw=TILE)
    mask = torch.ones(2 * (case.text + math.prod(GRID),), dtype=torch.bool)
    first = case.text if side == "first" else 0
    inside = slice(first, first + math.prod(GRID))
    mask[inside, inside] = grid_mask(GRID, window, stride)
    plain, calls = F.scaled_dot_product_attention, []

    def masked(query, key, value, attn_mask=None, **options):
        if query.shape[2] == key.shape[2] == len(mask):
            calls.append(attn_mask)
            attn_mask = mask
        return plain(query, key, value, attn_mask=attn_mask, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", masked)
        expected = case.run()
    assert len(calls) == 2
    dense = case.run()
    apply(case.model, method)
    assert difference(case.run(), expected) < 1e-5
    # control: the window matters
    assert difference(expected, dense) > 1e-2
    remove(case.model)
    apply(case.model, "neighborhood", settings={"window_thw": window, "stride_thw": stride})
    assert difference(case.run(), expected) < 1e-5
    remove(case.model)
    for budget in ({"topk": 2}, {"sparsity": 0.5}):
        with pytest.raises(ValueError, match="NeighborhoodAttention selects no tiles, got topk="):
            apply(case.model, method, **budget)
    assert not hasattr(case.model, "_applied_attention")
    assert torch.equal(case.run(), dense)


def gradients(case: Case) -> dict[str, torch.Tensor]:
    """Gradients of a fixed projection of the output to the latents and all parameters that it depends on."""
    case.model.zero_grad()
    latents = case.inputs["hidden_states"].clone().requires_grad_()
    out = case.run(hidden_states=latents)
    out.backward(randn(*out.shape, seed=5))
    grads = {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}
    return {**grads, "latents": latents.grad}


def check_gradients_equal_the_masked_model(
    case: Case,
    topk: int,
    side: Literal["first", "last"] = "last",
    *,
    checkpointing: bool = False,
    tolerance: float = 1e-5,
) -> None:
    masked = partial(masked_attention, GRID, TILE, text=case.text, text_side=side)
    with masked(topk):
        expected = gradients(case)
    with masked(topk - 1):
        other = gradients(case)
    if checkpointing:
        case.model.enable_gradient_checkpointing()
        case.model.train()
    apply(case.model, topk=topk, tile_thw=TILE)
    actual = gradients(case)
    assert actual.keys() == expected.keys()
    assert max(difference(actual[name], expected[name]) for name in expected) < tolerance
    assert max(difference(actual[name], other[name]) for name in expected) > max(1e-3, 10 * tolerance)


def check_gates_train(case: Case) -> None:
    """Gates start without effect, get a gradient, and change the output once they moved."""
    with torch.no_grad():
        apply(case.model, topk=TOPK, tile_thw=TILE)
        expected = case.run()
        remove(case.model)
    apply(case.model, topk=TOPK, tile_thw=TILE, gates="coarse")
    out = case.run()
    assert difference(out, expected) < 1e-6
    out.square().mean().backward()
    gates = {name: p for name, p in case.model.named_parameters() if "to_gate_compress" in name}
    assert len(gates) == 4
    for name, gate in gates.items():
        assert gate.grad is not None, name
        assert gate.grad.abs().max() > 1e-8, name
        gate.data.sub_(gate.grad, alpha=1.0)
    with torch.no_grad():
        assert difference(case.run(), expected) > 1e-4

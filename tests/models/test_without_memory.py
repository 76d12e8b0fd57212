"""Networks that are only looked at: names and shapes of real ones, and nothing is drawn."""

from __future__ import annotations

import torch
from torch import nn

from vsa.models.init import without_memory


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Conv3d(4, 2, 1))


def test_a_network_without_memory_has_names_and_shapes_and_draws_nothing():
    def state() -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(p.shape)) for name, p in network.named_parameters()]

    network = make()
    expected, before = state(), torch.get_rng_state()
    with without_memory():
        network = make()
        real = torch.ones(5, device="cpu")
        assert nn.init.normal_(real) is real
    assert state() == expected
    assert all(p.is_meta for p in network.parameters())
    assert torch.equal(real, torch.ones(5))
    assert torch.equal(torch.get_rng_state(), before)
    # control: outside the initialisation draws again
    assert not torch.equal(nn.init.normal_(real), torch.ones(5))

"""GAN term of distillation (optional): a classifier on features of the critic (DMD2, section 4.3).

B samples, L tokens, C model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vsa.models.sharding import sharded
from vsa.settings import Count, Positive, validated


@validated
@dataclass(frozen=True, kw_only=True)
class Gan:
    """Weights of the GAN term and the layers that it uses.

    Args:
        layers: blocks of the critic whose outputs are classified.
        generator_weight: weight of the generator's GAN loss.
        critic_weight: weight of the classifier's loss, which also trains the critic's features.

    The update of the generator backpropagates through the critic and leaves gradients there that are discarded; until
    then they take the memory of one more network's gradients.

    Source: the weights are those of the published code.
    """

    layers: tuple[Count, ...]
    generator_weight: Positive = 5e-3
    critic_weight: Positive = 1e-2

    def __post_init__(self):
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"gan.layers must name blocks of the critic, each once, got {list(self.layers)}")

    def build(
        self, dim: int, num_layers: int, *, seed: int, mesh: DeviceMesh | None, offload: bool = False
    ) -> Discriminator:
        """The classifier on features of width `dim`, sharded over `mesh`, as `vsa.models.sharding.sharded` does."""
        outside = [layer for layer in self.layers if not 0 <= layer < num_layers]
        if outside:
            raise ValueError(f"gan.layers must be layers of the critic, 0 to {num_layers - 1}, got {outside}")
        # drawn on the CPU, so that the weights are the same on every device
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            # it is small, and computes in fp32 whatever the critic's dtype
            return sharded(Discriminator(dim, self.layers), mesh, offload=offload)


class Discriminator(nn.Module):
    """Classifier of real against generated data: per layer, linear in the normalised features, averaged over tokens.

    Args:
        dim: C.
        layers: blocks of the critic whose features it reads.
    """

    def __init__(self, dim: int, layers: tuple[int, ...]):
        super().__init__()
        self.layers = layers
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.heads = nn.ModuleList(nn.Linear(dim, 1) for _ in layers)

    def forward(self, features: Mapping[int, Tensor]) -> Tensor:
        """Logits `[B, layers]` of features `[B, L, C]` by layer, high for real."""
        rows = zip(self.layers, self.heads, strict=True)
        return torch.cat([head(self.norm(features[layer].float()).mean(1)) for layer, head in rows], 1)

"""Conditioning of the critic on the step of the generator's list that generated its input."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class StepEmbedding(nn.Module):
    """Learned embedding of the steps of the generator's list, added to the critic's time embedding.

    It is initialised with zeros, so that the critic starts as the teacher.

    Without it, one critic tracks the mixture of the outputs of all steps. The generator can match this mixture with the
    teacher's distribution although its steps have opposite errors, while only the output of the last step is used
    (docs/benchmarks/distillation.md has a case).

    Args:
        num_steps: length of the step list.
        dim: width of the critic.
    """

    def __init__(self, num_steps: int, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_steps, dim))

    def forward(self, index: int) -> Tensor:
        """The embedding `[dim]` of one step, fp32."""
        # a copy, because a view would become invalid with the gathered table
        return self.weight[index].clone()

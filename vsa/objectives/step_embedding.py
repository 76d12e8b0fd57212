"""Telling the critic of a distillation which step of the list made its input."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class StepEmbedding(nn.Module):
    """A vector for every step of the generator's list, added to the critic's time embedding.

    All are zero at first: the critic begins as the teacher.

    One critic for all steps follows the mixture of their outputs, and the generator can bring that mixture to the
    teacher's distribution with steps that are off in opposite directions, while only the last step's output is looked
    at (benchmarks/README.md has a case).

    Args:
        num_steps: length of the step list.
        dim: width of the critic.
    """

    def __init__(self, num_steps: int, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_steps, dim))

    def forward(self, index: int) -> Tensor:
        """`[dim]`, fp32."""
        # a view of it would not outlast the gathered table
        return self.weight[index].clone()

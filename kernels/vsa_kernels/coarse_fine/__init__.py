"""The VSA operator: coarse attention between block means selects the blocks of the fine attention."""

from __future__ import annotations

from vsa_kernels.coarse_fine.api import coarse_fine_attn
from vsa_kernels.coarse_fine.reference import (
    CoarseFineOutput,
    CoarseOutput,
    Stages,
    coarse_attn,
    coarse_fine_stages,
    combine,
)

__all__ = [
    "CoarseFineOutput",
    "CoarseOutput",
    "Stages",
    "coarse_attn",
    "coarse_fine_attn",
    "coarse_fine_stages",
    "combine",
]

"""The whole VSA operator: coarse attention between block means chooses the blocks of the fine attention."""

from __future__ import annotations

from vsa_kernels.coarse_fine.api import coarse_fine_attn
from vsa_kernels.coarse_fine.reference import CoarseFineOutput, CoarseOutput, coarse_attn

__all__ = ["CoarseFineOutput", "CoarseOutput", "coarse_attn", "coarse_fine_attn"]

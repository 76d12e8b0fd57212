"""Which tokens a program computes: neighbours in a sample or, with two rows of parameters, tokens of one row.

B batch, L tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.launch import cdiv
from vsa_kernels.partial_sums import add_partials


@triton.jit
def places_of_program(i, L, split, firsts, ROWS: tl.constexpr, ORDERED: tl.constexpr):
    """Sample and parameter row of program i, its first place, and the end of the places of this row.

    Without an order, a place is a token. The first `firsts` programs, of all samples, have the first row.
    """
    i_m, start, end = 0, 0, L
    if ORDERED:
        i_m = (i >= firsts).to(tl.int32)
        i -= i_m * firsts
        start = i_m * split
        end = tl.where(i_m == 0, split, L)
    programs = tl.cdiv(end - start, ROWS)
    return (i // programs).to(tl.int64), i_m, start + i % programs * ROWS, end


class Programs(NamedTuple):
    """Programs of all samples by parameter row; `arguments` are those of `places_of_program`."""

    by_row: tuple[int, ...]
    arguments: tuple[Tensor | None, int, int]

    @property
    def number(self) -> int:
        return sum(self.by_row)


def programs_of(batch: int, tokens: int, order: Tensor | None, split: int, rows: int) -> Programs:
    """Programs of `rows` tokens each; order and split as in `api.residual_norm`."""
    if order is None:
        return Programs((batch * cdiv(tokens, rows),), (None, 0, 0))
    by_row = (batch * cdiv(split, rows), batch * cdiv(tokens - split, rows))
    return Programs(by_row, (order, split, by_row[0]))


def add_by_row(partials: Tensor, like: Tensor, programs: Programs) -> Tensor:
    """The gradient of a parameter `[C]` or `[B, M, C]` from fp32 partial sums `[number of programs, C]`."""
    if like.ndim == 1 or len(programs.by_row) == 1:
        return add_partials(partials.view(len(like) if like.ndim == 3 else 1, -1, like.shape[-1]), _empty(like))
    rows = [
        add_partials(part.view(len(like), -1, like.shape[-1]), _empty(like[:, :1]))
        for part in partials.split(programs.by_row)
    ]
    return torch.cat(rows, 1)


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(like.shape)

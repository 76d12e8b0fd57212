"""`SIZES`: what property tests draw their sizes from, small ones and some past every padding and split of the code."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy


class Sizes(NamedTuple):
    """Strategies of sizes.

    Args:
        columns: kv blocks of a row; lists are padded to multiples of 32 entries.
        block: tokens of a block; kernels divide a block of more than 128 tokens into parts.
        texts: lengths of the texts of two passes, in one or two text tiles of 8 tokens.
    """

    columns: SearchStrategy[int]
    block: SearchStrategy[int]
    texts: SearchStrategy[tuple[int, int]]


SIZES = Sizes(
    columns=st.integers(1, 9) | st.sampled_from([31, 32, 33, 40, 65]),
    block=st.integers(1, 7) | st.sampled_from([128, 129, 150]),
    texts=st.tuples(st.integers(1, 5), st.integers(6, 12)),
)

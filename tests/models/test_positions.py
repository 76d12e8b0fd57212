"""Absolute positions and the RoPE base: what they are, and that they tell the ends of an axis apart."""

import math

import pytest
import torch

from vsa.models.rope import rope_tables, sincos_table

CPU = torch.device("cpu")


@pytest.mark.parametrize(("grid", "dim"), [((2, 3, 5), 12), ((4, 8, 8), 96), ((1, 7, 1), 20)])
def test_sincos_table_is_written_out(grid, dim):
    table = sincos_table(grid, dim, CPU)
    pairs = dim // 6
    assert table.shape == (math.prod(grid), dim)
    for row, place in enumerate((t, h, w) for t in range(grid[0]) for h in range(grid[1]) for w in range(grid[2])):
        expected = []
        for position in place:
            angles = [position * 100 ** (-i / pairs) for i in range(pairs)]
            expected += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        expected += [0.0] * (dim - 6 * pairs)
        torch.testing.assert_close(table[row], torch.tensor(expected), rtol=0, atol=1e-6)


def test_every_place_has_its_own_row():
    table = sincos_table((4, 8, 8), 96, CPU)
    assert torch.cdist(table, table).fill_diagonal_(9).min() > 0.5


def test_theta_moves_the_slow_channels_only():
    wan, small = rope_tables((4, 8, 8), 32, CPU)[0], rope_tables((4, 8, 8), 32, CPU, 10.0)[0]
    # the first pair of the time axis turns by one radian a token whatever the base
    torch.testing.assert_close(wan[:, 0], small[:, 0])
    assert (wan[:, 1] - small[:, 1]).abs().max() > 0.1

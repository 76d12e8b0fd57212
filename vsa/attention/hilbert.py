# The curve is that of gilbert3d, of which this file is a rewrite. Its licence asks to keep this notice:
#
# BSD 2-Clause License
#
# Copyright (c) 2018, Jakub Červený
# All rights reserved.
#
# Redistribution and use in source and binary forms, with or without modification, are permitted provided that the
# following conditions are met:
#
# * Redistributions of source code must retain the above copyright notice, this list of conditions and the following
#   disclaimer.
#
# * Redistributions in binary form must reproduce the above copyright notice, this list of conditions and the following
#   disclaimer in the documentation and/or other materials provided with the distribution.
#
# THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS" AND ANY EXPRESS OR IMPLIED WARRANTIES,
# INCLUDING, BUT NOT LIMITED TO, THE IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR A PARTICULAR PURPOSE ARE
# DISCLAIMED. IN NO EVENT SHALL THE COPYRIGHT HOLDER OR CONTRIBUTORS BE LIABLE FOR ANY DIRECT, INDIRECT, INCIDENTAL,
# SPECIAL, EXEMPLARY, OR CONSEQUENTIAL DAMAGES (INCLUDING, BUT NOT LIMITED TO, PROCUREMENT OF SUBSTITUTE GOODS OR
# SERVICES; LOSS OF USE, DATA, OR PROFITS; OR BUSINESS INTERRUPTION) HOWEVER CAUSED AND ON ANY THEORY OF LIABILITY,
# WHETHER IN CONTRACT, STRICT LIABILITY, OR TORT (INCLUDING NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF THE USE
# OF THIS SOFTWARE, EVEN IF ADVISED OF THE POSSIBILITY OF SUCH DAMAGE.
"""A space-filling curve through any box: neighbours on the curve are neighbours in space.

The curve generalises Hilbert's curve to boxes whose sides are not powers of two. It runs through a box from one corner
to the other end of the main axis, over the eight octants in Gray-code order. Consecutive octants in a straight line are
merged, which leaves five smaller boxes of the same kind.

Source: Jakub Červený, gilbert3d of "gilbert: space-filling curve for rectangular domains of arbitrary size"
(https://github.com/jakubcerveny/gilbert, BSD-2-Clause). The cuts, their order and thresholds are those of gilbert3d.
The main axis (here the longest even side, there the longest side) and the order of a box that is one cell long differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

# an axis of a box: its coordinate, its direction (+1 or -1) and its number of cells
Axis = tuple[int, int, int]
Cell = tuple[int, int, int]


def hilbert_order(grid_thw: tuple[int, int, int]) -> Tensor:
    """Raster indices of a box's cells in the order of a 3-D Hilbert-like curve.

    Consecutive cells touch each other. Even sides allow unit steps everywhere. Odd sides force some diagonal steps,
    because no path of unit steps connects two corners of the same colour of a checkerboard.

    Args:
        grid_thw: cells along time, height and width.

    Returns:
        int64 `[T * H * W]` on the CPU.

    Source: gilbert3d (see the module). DFSAttn and SpargeAttn (section 3.7) reorder tokens along such a curve.
    """
    axes: list[Axis] = [(dim, 1, size) for dim, size in enumerate(grid_thw)]
    # the longest even side is the main axis, since only an even one allows unit steps throughout
    main = max(axes, key=lambda axis: (axis[2] % 2 == 0, axis[2]))
    sides = [axis for axis in axes if axis is not main]
    _, height, width = grid_thw
    cells: list[Cell] = []
    _walk((0, 0, 0), main, sides[0], sides[1], cells)
    return torch.tensor([(t * height + h) * width + w for t, h, w in cells], dtype=torch.int64, device="cpu")


def _move(cell: Cell, axis: Axis, steps: int) -> Cell:
    dim, sign, _ = axis
    target = list(cell)
    target[dim] += sign * steps
    return target[0], target[1], target[2]


def _split(axis: Axis) -> tuple[Axis, Axis]:
    """Two halves; the first one even where the length allows, so that walks along it take unit steps."""
    dim, sign, size = axis
    first = size // 2
    if first % 2 and size > 2:
        first += 1
    return (dim, sign, first), (dim, sign, size - first)


def _back(axis: Axis) -> Axis:
    dim, sign, size = axis
    return dim, -sign, size


def _walk(start: Cell, a: Axis, b: Axis, c: Axis, cells: list[Cell]) -> None:
    """Append the cells of the box spanned by a, b, c, from `start` to the other end of `a`."""
    na, nb, nc = a[2], b[2], c[2]
    if nb == 1 and nc == 1:
        cells.extend(_move(start, a, i) for i in range(na))
        return
    if na == 1:
        # one cell long: sweep the plane of the two other sides and end in any corner
        lead, side = (b, c) if nb >= nc else (c, b)
        _walk(start, lead, side, a, cells)
        return
    if 2 * na > 3 * max(nb, nc):
        a1, a2 = _split(a)
        _walk(start, a1, b, c, cells)
        _walk(_move(start, a, a1[2]), a2, b, c, cells)
        return
    if nb < nc:
        b, c, nb, nc = c, b, nc, nb
    a1, a2 = _split(a)
    b1, b2 = _split(b)
    end = _move(start, a, na - 1)
    if nc == 1 or 3 * nb > 4 * nc:
        # flat, or much wider than thick: a 2-D step over the whole thickness
        _walk(start, b1, a1, c, cells)
        _walk(_move(start, b, b1[2]), a, b2, c, cells)
        _walk(_move(end, b, b1[2] - 1), _back(b1), _back(a2), c, cells)
        return
    c1, c2 = _split(c)
    _walk(start, b1, c1, a1, cells)
    _walk(_move(start, b, b1[2]), c, a1, b2, cells)
    _walk(_move(_move(start, b, b1[2] - 1), c, nc - 1), a, _back(b1), _back(c2), cells)
    _walk(_move(_move(end, b, b1[2]), c, nc - 1), _back(c), _back(a2), b2, cells)
    _walk(_move(end, b, b1[2] - 1), _back(b1), _back(a2), c1, cells)

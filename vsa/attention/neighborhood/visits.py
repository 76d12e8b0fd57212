"""Numbers of kv tiles that the query tiles of neighborhood attention visit, from the windows without a token mask.

n tokens of an axis, Nq / Nkv query / kv tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from vsa.attention.neighborhood.axis import AxisWindow

Tiling = Literal["static", "dynamic"]
"""Position of the kv tiles: static divides the grid once, dynamic starts at the first key that the query tile sees."""

# pairs of query and kv tiles that are compared at once
PAIRS_AT_ONCE = 1 << 18

# the first element of each of several runs and the one after its last, which is at most the first in an empty run
Runs = tuple[Tensor, Tensor]


@dataclass
class Visits:
    """Kv tiles that the worst query tile visits, the sum over all query tiles, and the query-key pairs in them."""

    worst: int = 0
    summed: int = 0
    computed: int = 0


def count_visits(
    choices: Sequence[Sequence[AxisWindow]], q_size: int, kv_size: int, tiling: Tiling = "static"
) -> list[Visits]:
    """Counts for tiles that are runs of the flattened axes (with one axis: along this axis), for every combination of
    the windows.

    Args:
        choices: alternative windows of each axis; the last axis runs fastest.
        q_size, kv_size: tokens of a tile; the last tile is shorter where they do not divide the number of tokens.
    """
    combinations = list(itertools.product(*choices))
    if tiling == "dynamic" and len(combinations) > 1:
        return [count_visits([[axis] for axis in axes], q_size, kv_size, tiling)[0] for axes in combinations]
    sizes = [axes[0].size for axes in choices]
    tokens = math.prod(sizes)
    q_size, kv_size = min(q_size, tokens), min(kv_size, tokens)
    result = [Visits() for _ in combinations]
    offset = torch.arange(0, tokens, kv_size, device="cpu")
    for start in torch.arange(0, tokens, q_size, device="cpu").split(max(1, PAIRS_AT_ONCE // len(offset))):
        stop = (start + q_size).clamp(max=tokens)
        q_boxes = _boxes(start, stop, sizes)
        first = _first_key(combinations[0], q_boxes, tokens)[:, None] if tiling == "dynamic" else 0
        kv_start = (first + offset).clamp(max=tokens)
        kv_stop = (kv_start + kv_size).clamp(max=tokens)
        pairs = list(itertools.product(q_boxes, _boxes(kv_start, kv_stop, sizes)))
        visited = _visited(choices, [[(q[i], kv[i]) for q, kv in pairs] for i in range(len(sizes))])
        for visits, visible in zip(result, visited, strict=True):
            count = visible.sum(1)
            visits.worst, visits.summed = max(visits.worst, int(count.max())), visits.summed + int(count.sum())
            visits.computed += int((visible * (kv_stop - kv_start)).sum(1) @ (stop - start))
    return result


def _visited(choices: Sequence[Sequence[AxisWindow]], runs: list[list[tuple[Runs, Runs]]]) -> Iterator[Tensor]:
    """Visited pairs of tiles, bool `[Nq, Nkv]`, for every combination of the windows.

    Args:
        runs: runs of queries and of keys for each axis; the first runs of all axes make a pair of boxes, and so on.
    """

    def seen(axis: AxisWindow, pairs: list[tuple[Runs, Runs]]) -> Tensor:
        return torch.stack([_sees_some(axis, queries, keys) for queries, keys in pairs])

    # the pairs of the first axis are needed only once, so they are not stored
    inner = [[seen(axis, pairs) for axis in axes] for axes, pairs in zip(choices[1:], runs[1:], strict=True)]
    for axis in choices[0]:
        for boxes in itertools.product([seen(axis, runs[0])], *inner):
            yield reduce(torch.logical_and, boxes).any(0)


def _boxes(start: Tensor, stop: Tensor, sizes: Sequence[int]) -> list[list[Runs]]:
    """Runs of a flattened grid as unions of boxes with one run per axis; boxes that are empty for all are left out."""
    if len(sizes) == 1:
        return [[(start, stop)]] if bool((start < stop).any()) else []
    inner, sizes = math.prod(sizes[1:]), sizes[1:]
    head = start // inner
    tail = torch.maximum((stop - 1) // inner, head)
    boxes = [
        [(head, head + 1), *box]
        for box in _boxes(start - head * inner, torch.minimum(stop - head * inner, torch.tensor(inner)), sizes)
    ]
    if bool((head + 1 < tail).any()):
        boxes.append([(head + 1, tail), *((torch.zeros_like(head), torch.full_like(head, n)) for n in sizes)])
    rest = torch.where(head == tail, 0, stop - tail * inner)
    return boxes + [[(tail, tail + 1), *box] for box in _boxes(torch.zeros_like(rest), rest, sizes)]


def _groups(axis: AxisWindow, queries: Runs) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each dilation group in runs of queries: its residue, and the positions of the first visible key of its
    queries and of the one after the last. The visible keys are one interval, since the windows of neighbours in a group
    start and end in the order of the queries and overlap or touch."""
    (first, stop), d = axis.span, axis.dilation
    start, end = queries
    for offset in range(min(d, int((end - start).max()))):
        query = (start + offset).clamp(max=axis.size - 1)
        last = query + (end - 1 - query).clamp(min=0) // d * d
        yield query % d, first[query], torch.where(start + offset < end, stop[last], 0)


def _sees_some(axis: AxisWindow, queries: Runs, keys: Runs) -> Tensor:
    """bool `[Nq, Nkv]`: whether any query of one run sees any key of the other. Key runs may differ by query run."""
    result = torch.zeros(1, 1, dtype=torch.bool, device="cpu")
    for residue, first, stop in _groups(axis, queries):
        low, high = keys
        if axis.dilation > 1:
            # positions in the group of its first token at or after the bounds
            low, high = ((key + axis.dilation - 1 - residue[:, None]) // axis.dilation for key in keys)
        result = result | (torch.maximum(low, first[:, None]) < torch.minimum(high, stop[:, None]))
    return result


def _first_key(axes: Sequence[AxisWindow], boxes: list[list[Runs]], tokens: int) -> Tensor:
    """The first key that each query tile sees, int64 `[Nq]`."""
    result = torch.full_like(boxes[0][0][0], tokens)
    for box in boxes:
        key = torch.zeros_like(result)
        for axis, queries in zip(axes, box, strict=True):
            firsts = [
                torch.where(stop > 0, residue + axis.dilation * first, tokens)
                for residue, first, stop in _groups(axis, queries)
            ]
            key = key * axis.size + reduce(torch.minimum, firsts)
        result = torch.minimum(result, key)
    return result

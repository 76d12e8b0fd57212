"""Measurement of the density, recall, error and time of methods on one capture.

B batch, L tokens of a row, H heads, D head dim, n sampled query tokens, of the video alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from vsa_kernels import BlockIndex, block_sparse_attn

from vsa.attention.base import AttentionMethod
from vsa.attention.context import INDEX, AttnContext, recorded_index
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import TileLayout
from vsa.attention.scores import per_head
from vsa.attention.stats import dense_weights, sample_tokens
from vsa.errors import is_out_of_memory
from vsa.evaluation.comparison.captures import Capture
from vsa.evaluation.comparison.computed import Computed, computed_pairs
from vsa.evaluation.comparison.methods import Method
from vsa.evaluation.comparison.timing import fast_dense, interleaved_ms


@dataclass(frozen=True, kw_only=True)
class Row:
    """Results of a method on a capture.

    Args:
        method: label of the method.
        family: label without the budget.
        capture: name of the capture.
        layer: index of the layer.
        timestep: timestep of the capture, None for random fields.
        topk: kv tiles per query tile, None for methods that select no tiles.
        tiles: number of kv tiles of the grid, None for methods that select no tiles.
        density: computed token pairs over all pairs.
        visited: token pairs in visited tiles over all pairs.
        recall: share of the exact softmax mass on the computed pairs, averaged over sampled queries, heads and samples;
            None for methods that attend to no tokens.
        head_recall: the recall of each head of each sample; None like `recall`.
        error_l1: sum |out - exact| / sum |exact| over the outputs of the sampled queries.
        error_l2: the same ratio of root sums of squares.
        ms: median time of the layer, prediction and attention, without projections and permutations.
        attention_ms: time of attention to the listed tiles.
        prediction_ms: time of the rest: pooling, scores, selection, lists, coarse outputs, pooled tails and gates. It
            is at least 0, since the parts of a call are timed separately.
        speedup: time of dense attention in the same rounds over `ms`.
        repeats: number of timed calls.
    """

    method: str
    family: str
    capture: str
    layer: int
    timestep: float | None
    topk: int | None
    tiles: int | None
    density: float
    visited: float
    recall: float | None
    head_recall: Sequence[float] | None
    error_l1: float
    error_l2: float
    ms: float
    attention_ms: float
    prediction_ms: float
    speedup: float
    repeats: int

    @property
    def recall_p5(self) -> float | None:
        """5th percentile of `head_recall`, between its neighbours by linear interpolation."""
        return None if self.head_recall is None else float(np.quantile(self.head_recall, 0.05))


@torch.no_grad()
def measure(
    capture: Capture,
    methods: Sequence[Method],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    queries: int | None = 256,
    repeats: int = 5,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> list[Row]:
    """Measure each method that fits into memory; the errors of dense attention, the first one, are those of the dtype.

    Recall and errors are relative to exact fp32 attention of the same (rounded) q, k and v, for sampled query tokens.

    Args:
        capture: q, k, v.
        methods: methods, dense attention first.
        device: compute device.
        dtype: dtype of q, k, v.
        queries: number of sampled query tokens, None for all.
        repeats: number of timed calls of each method.
        seed: seed of the sampled queries.
        progress: function called with 1 for every method.
    """
    device = torch.device(device)
    q, k, v = (x.to(device, dtype) for x in (capture.q, capture.k, capture.v))
    permuted: dict[int, tuple[Tensor, ...]] = {}
    with fast_dense(device):
        prepared = []
        for method in methods:
            try:
                prepared.append(_Prepared(method, capture, (q, k, v), permuted))
            except (RuntimeError, MemoryError) as error:
                if not (prepared and is_out_of_memory(error)):
                    raise
        # with known lists, attention is also timed separately
        calls = [call for one in prepared for call in (one, one.attention) if call is not None]
        timings = iter(interleaved_ms(calls, repeats, device))
        times = [(next(timings), None if one.attention is None else next(timings)) for one in prepared]
        video = math.prod(capture.grid_thw)
        sampled = sum(capture.before) + sample_tokens(video, queries, seed=seed).to(device)
        accuracies = _accuracy(prepared, (q, k, v), sampled, progress)
    dense_ms = statistics.median(times[0][0])
    rows = []
    for one, (whole, alone), accuracy in zip(prepared, times, accuracies, strict=True):
        if accuracy is None:
            continue
        head_recall, l1, l2 = accuracy
        ms = statistics.median(whole)
        # a part of the time of the layer: noise may make it longer where it is timed alone
        attention = ms if alone is None else min(ms, statistics.median(alone))
        selects = one.method.selects
        rows.append(
            Row(
                method=one.asked.label,
                family=one.asked.family,
                capture=capture.name,
                layer=capture.layer,
                timestep=capture.timestep,
                topk=one.ctx.kept(one.q) if selects else None,
                tiles=one.layout.num_video_tiles if selects else None,
                density=one.computed.density,
                visited=one.computed.visited,
                recall=None if head_recall is None else statistics.fmean(head_recall),
                head_recall=head_recall,
                error_l1=l1,
                error_l2=l2,
                ms=ms,
                attention_ms=attention,
                prediction_ms=ms - attention,
                speedup=dense_ms / ms,
                repeats=len(whole),
            )
        )
    return rows


def left_out(asked: Sequence[Method], rows: Sequence[Row]) -> list[str]:
    """Notes on methods that are missing on some captures."""
    counts = {label: sum(row.method == label for row in rows) for label in (method.label for method in asked)}
    most = max(counts.values(), default=0)
    return [
        f"{label} is left out on {most - count} of {most} captures: it did not fit into memory"
        for label, count in counts.items()
        if count < most
    ]


class _Prepared:
    """A method prepared for a capture; a first call determines the pairs that it computes."""

    def __init__(
        self,
        asked: Method,
        capture: Capture,
        qkv: tuple[Tensor, Tensor, Tensor],
        permuted: dict[int, tuple[Tensor, ...]],
    ):
        q = qkv[0]
        batch, length, heads, dim = q.shape
        self.asked = asked
        with torch.random.fork_rng(devices=[]):
            attention = asked.make(dim=heads * dim, num_heads=heads, head_dim=dim, layer_idx=capture.layer)
        self.method: AttentionMethod = attention.to(q.device, q.dtype).eval()
        self.layout: TileLayout = self.method.layout(capture.segments, q.device)
        # methods that share a layout share the permuted tokens
        self.q, self.k, self.v = permuted.setdefault(
            id(self.layout), tuple(self.layout.permute(x).contiguous() for x in qkv)
        )
        if asked.trained:
            self.extra = {name: self.layout.permute(x.to(q)) for name, x in capture.extra.items()}
        else:
            # initial gates do not depend on the hidden states
            self.extra = self.method.project(q.new_zeros(batch, length, heads * dim))
        topk = capture.topk if asked.trained and capture.topk is not None else asked.kept(self.layout)
        self.ctx = AttnContext(layout=self.layout, topk=KeptTiles((topk,)), layer_idx=capture.layer)
        recorded: dict[str, Tensor] = {}

        def record(_: int, tensors: dict[str, Tensor]) -> None:
            recorded.update({name: tensors[name] for name in INDEX if name in tensors})

        recording = replace(self.ctx, recorder=record)
        self.method.attend_combine(self.q, self.k, self.v, self.extra, recording)
        self.computed: Computed = computed_pairs(self.method, self.layout, recorded)
        self.index = _bounded(recorded_index(recorded)) if recorded else None
        self.attention = None if self.index is None else self._attention

    def __call__(self) -> Tensor:
        return self.method.attend_combine(self.q, self.k, self.v, self.extra, self.ctx)

    def _attention(self) -> Tensor:
        assert self.index is not None
        q, blocks = self.layout.take_video(self.q), self.layout.video_blocks
        return block_sparse_attn(q, self.k, self.v, self.index, q_blocks=blocks, kv_blocks=self.layout.kv_blocks)[0]


def _bounded(index: BlockIndex) -> BlockIndex:
    """The index with known bounds of its lists, so that no backend reads them from the device while it is timed."""
    counts = index.kv_num_blocks
    return replace(index, max_blocks=int(counts.max()), min_blocks=int(counts.min()))


def _accuracy(
    prepared: Sequence[_Prepared],
    qkv: tuple[Tensor, Tensor, Tensor],
    sampled: Tensor,
    progress: Callable[[int], None] | None,
) -> list[tuple[list[float] | None, float, float] | None]:
    """Recall by head, L1 and L2 error of each method; None where its output and the exact one exceed the memory."""
    chunks = list(_exact(qkv, sampled))
    accuracies: list[tuple[list[float] | None, float, float] | None] = []
    for one in prepared:
        try:
            out = one().float()
        except (RuntimeError, MemoryError) as error:
            if not (accuracies and is_out_of_memory(error)):
                raise
            accuracies.append(None)
            continue
        sums = torch.zeros(4, dtype=torch.float64, device=sampled.device)
        mass = 0.0
        for tokens, weights, exact in chunks:
            # the same tokens in the order of the method's layout
            own = one.layout.inverse[tokens]
            missed = out[:, own] - exact
            parts = (missed.abs(), exact.abs(), missed.square(), exact.square())
            sums += torch.stack([x.sum(dtype=torch.float64) for x in parts])
            if one.computed.rows is not None:
                covered = weights * one.computed.rows(own)[..., one.layout.inverse]
                # [B, H]
                mass = mass + covered.sum((-2, -1), dtype=torch.float64)
        l1, size_l1, l2, size_l2 = sums.tolist()
        head_recall = (mass / len(sampled)).flatten().tolist() if isinstance(mass, Tensor) else None
        accuracies.append((head_recall, l1 / size_l1, math.sqrt(l2 / size_l2)))
        if progress is not None:
            progress(1)
    return accuracies


def _exact(qkv: tuple[Tensor, Tensor, Tensor], sampled: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Chunks of tokens `[n]` with their exact fp32 attention weights `[B, H, n, L]` and outputs `[B, n, H, D]`."""
    q, k, v = qkv
    values = per_head(v.float().transpose(1, 2), q.shape[2])
    for tokens, weights in dense_weights(q, k, sampled):
        yield tokens, weights, (weights @ values).transpose(1, 2)

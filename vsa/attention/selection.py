"""Row rules: the kv tiles that a query tile keeps, given its row of scores.

Every attention method selects with `select_blocks`. A rule keeps the best entries of a row and only says how many, so
the union of two rules is the one that keeps more (`RowRule` takes the largest count).

B batch, H heads, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from vsa_kernels import BlockIndex, select_share, select_topk
from vsa_kernels.selection import Crossing, order_keys, weight_units, within_share
from vsa_kernels.selection.api import list_capacity

from vsa.attention.kept_tiles import KeptTiles
from vsa.settings import AtLeastOne, PositiveShare, validated

Over = Literal["row", "head", "layer"]
"""Entries that compete with each other: those of a row, of all rows of a head, or of all rows of all heads."""

_UNITS = 1 << 32
"""Integer units of the shares of a head: sums of integers are exact and the same on every device."""
_FIRST_DIM = {"row": 3, "head": 2, "layer": 1}
"""First of the dims `[B, H, Nq, Nkv]` that compete with each other."""


@validated
@dataclass(frozen=True, kw_only=True)
class RowRule:
    """Number of a row's best candidates that are kept: the largest of the counts that the options give, at least one.

    Args:
        topk: number of candidates to keep.
        top_p: share of the softmax over the row's logits; 1 keeps every candidate, those of weight 0 too.
        crossing: treatment of the entry that reaches the share. keep: the smallest set whose sum is at least top_p
            (FG-Attn, NABLA, FastVideo's BSA); drop: the largest set whose sum is at most top_p (SpargeAttn's listing,
            LongCat); exceed: the smallest set whose sum is more than top_p (SVG2).
        deviations: standard deviations above the row's mean that a kept score exceeds (Sol-Attn's beta).
        over: row; head: all rows of a head compete for `topk` entries a row on average (VSA2) or for `top_p` of the
            head's sum (VMoBA), or are compared with the head's mean and deviation, so that rows may keep different
            numbers; layer: the same for all rows of all heads of a sample. The best candidate of every row is kept
            whatever the others have; it ranks first and counts, so that `topk` * Nq entries of a head, or `topk` * H *
            Nq of a layer, are kept exactly. Scores of different rows are compared and summed directly, so they must be
            shares, not logits.
    """

    topk: AtLeastOne | None = None
    top_p: PositiveShare | None = None
    crossing: Crossing = "keep"
    deviations: float | None = None
    over: Over = "row"

    def __post_init__(self) -> None:
        if self.topk is None and self.top_p is None and self.deviations is None:
            raise ValueError("a row rule needs topk, top_p or deviations, got none")

    @property
    def is_topk(self) -> bool:
        """Whether every row keeps the same count."""
        return self.top_p is None and self.deviations is None and self.over == "row"

    @property
    def is_share(self) -> bool:
        """Whether every row keeps a share of its own softmax and nothing else."""
        return self.topk is None and self.top_p is not None and self.deviations is None and self.over == "row"


_TOPK = RowRule(topk=1)
_SHARES = {crossing: RowRule(top_p=1, crossing=crossing) for crossing in get_args(Crossing)}


class Shares(NamedTuple):
    """A separate `top_p` for every head or row.

    Args:
        shares: float `[H]` or `[B|1, H|1, Nq|1]` on the device of the scores, above 0; 1 or more keeps every candidate.
        crossing: see `RowRule`.
    """

    shares: Tensor
    crossing: Crossing = "drop"


def sparge_top_p(tau: float) -> RowRule:
    """SpargeAttn's TopCdf: the largest set whose sum is at most tau, or the best entry alone where it exceeds tau.

    The entry that crosses tau is dropped: one entry fewer than with `keep` unless a sum is exactly tau. The
    listing of the paper may keep nothing at all; its code keeps at least one entry, as this does.

    Source: SpargeAttn (arXiv 2502.18137), Algorithm 1 and its code.
    """
    return RowRule(top_p=tau, crossing="drop")


def select_blocks(
    scores: Tensor,
    rule: RowRule | KeptTiles | Shares,
    *,
    topk: KeptTiles | None = None,
    candidates: Tensor | None = None,
    always: Tensor | None = None,
    first: Tensor | None = None,
    union: Tensor | None = None,
    backend: str | None = None,
) -> BlockIndex:
    """Block selection: the kv blocks that a rule keeps in every row, as ragged ascending lists.

    Exact and deterministic: of equal scores (0.0 and -0.0 are equal) the lowest index comes first (over a head or
    layer: the lowest head, then row, then index); NaN ranks below -inf and has weight 0. The selection is not
    differentiable and never waits for the device. Over a head or layer no list has a bound that the host knows, so the
    lists have room for Nkv blocks.

    Args:
        scores: `[B, H, Nq, Nkv]` any float dtype; logits, or shares in [0, 1] for a rule over a head or layer.
        rule: number of blocks to keep: `KeptTiles` is the count of one layer or its counts by sample, `Shares` a share
            of the row per head or row.
        topk: count that replaces that of a `RowRule` with `topk`, such as the count of a schedule.
        candidates: blocks that compete; None: all. A row without candidates lists only the blocks of the masks below.
        always: blocks that are listed whatever their score and do not compete (text).
        first: candidates that rank before all others and count towards the rule (a local window inside the budget).
        union: blocks listed in addition to those that the rule keeps among all candidates (a static index).
            All four masks are bool `[Nq, Nkv]`, or `[B, H, Nq, Nkv]` with any of these dims 1.
        backend: backend of `select_topk`, for a plain top-k with masks `[Nq, Nkv]`, or of `select_share`, for a plain
            share of a row.

    Source: the rules are those of VSA (top-k), SpargeAttn, FG-Attn and SVG2 (top-p, see `RowRule`), SpargeAttention2
    (arXiv 2602.13515, the larger of top-k and top-p), Sol-Attn (arXiv 2607.24027, mean + beta * std) and VSA2 (arXiv
    2609.32882, one budget for the rows of a head).
    """
    # a compiled block cannot construct a rule
    count, rule, shares = _parts_of(rule, topk)
    by_head = any(mask is not None and mask.dim() == 4 for mask in (candidates, always))
    if first is None and union is None and rule.is_topk and shares is None and not by_head:
        if isinstance(count, KeptTiles):
            return _topk_per_sample(scores, count, candidates, always, backend)
        return select_topk(scores, count or 1, candidates=candidates, always=always, backend=backend)
    if first is None and union is None and rule.is_share and count is None and shares is not None:
        masks = {"candidates": candidates, "always": always}
        return select_share(scores, shares, crossing=rule.crossing, **masks, backend=backend)
    _check(scores, shares, candidates=candidates, always=always, first=first, union=union)
    candidates, always, first, union = (
        mask if mask is None or mask.dim() == 4 else mask[None, None] for mask in (candidates, always, first, union)
    )
    compete = torch.ones_like(scores[:1, :1], dtype=torch.bool) if candidates is None else candidates
    compete = compete if always is None else compete & ~always
    compete = compete.expand(*compete.shape[:2], *scores.shape[2:])
    selection = _by_rule(scores.detach(), compete, None if first is None else first & compete, rule, count, shares)
    for mask in (always, union):
        selection = selection if mask is None else selection | mask
    return BlockIndex.from_dense(selection)


def _parts_of(
    rule: RowRule | KeptTiles | Shares, topk: KeptTiles | None
) -> tuple[KeptTiles | int | None, RowRule, Tensor | float | None]:
    """The top-k, one number unless samples differ, the remaining rule, and the share, a tensor by head or row."""
    if isinstance(rule, Shares):
        return None, _SHARES[rule.crossing], rule.shares
    if isinstance(rule, KeptTiles):
        rule, topk = _TOPK, rule
    if topk is None or rule.topk is None:
        return rule.topk, rule, rule.top_p
    return topk.count if topk.samples is None else topk, rule, rule.top_p


def _topk_per_sample(
    scores: Tensor, topk: KeptTiles, candidates: Tensor | None, always: Tensor | None, backend: str | None
) -> BlockIndex:
    """Selection with the rows of all samples as rows of one sample, each with the top-k of its own sample."""
    batch, _, num_q, num_kv = scores.shape
    rows = scores.transpose(0, 1).flatten(1, 2)[None]
    assert topk.samples is not None
    counts = topk.samples.repeat_interleave(num_q, output_size=batch * num_q)
    masks = {"candidates": candidates, "always": always}
    masks = {name: None if mask is None else mask.repeat(batch, 1) for name, mask in masks.items()}
    index = select_topk(rows, counts, **masks, backend=backend)
    # the capacity of the lists is the largest length that the host knows
    most = min(topk.count, num_kv) if always is None else None
    capacity = num_kv if most is None else list_capacity(most, num_kv)
    indices = index.kv_indices[0, ..., :capacity].unflatten(1, (batch, num_q)).transpose(0, 1).contiguous()
    lengths = index.kv_num_blocks[0].unflatten(1, (batch, num_q)).transpose(0, 1).contiguous()
    return replace(index, kv_indices=indices, kv_num_blocks=lengths, max_blocks=most, min_blocks=None)


def _by_rule(
    scores: Tensor,
    compete: Tensor,
    first: Tensor | None,
    rule: RowRule,
    topk: KeptTiles | int | None,
    shares: Tensor | float | None,
) -> Tensor:
    """Entries that the rule keeps, bool `[B, H, Nq, Nkv]`."""
    keys = order_keys(scores)
    lowest, highest = torch.iinfo(keys.dtype).min, torch.iinfo(keys.dtype).max
    keys = keys.masked_fill(~compete, lowest)
    # at least the best candidate is kept, one of `first` where the row has any
    leading = keys if first is None else keys.masked_fill(first.any(-1, keepdim=True) & ~first, lowest)
    column = torch.arange(keys.shape[-1], device=keys.device)
    best = (column == leading.argmax(-1, keepdim=True)) & compete

    def grouped(x: Tensor) -> Tensor:
        """`[B|1, H|1, Nq, n]` with the dims that compete as the last one, of M entries."""
        x = x.expand(-1, scores.shape[1], -1, -1) if rule.over == "layer" else x
        return x.flatten(_FIRST_DIM[rule.over])

    candidates, selection = grouped(compete), grouped(best)
    if rule.deviations is not None:
        selection = selection | _above(grouped(scores), candidates, rule.deviations)
    if topk is not None or shares is not None:
        # the best of every row before all others; no score has the highest key
        keys = grouped(keys.masked_fill(best, highest))
        # stable, so that equal keys stay in ascending order of their index
        ranking = torch.sort(keys, dim=-1, descending=True, stable=True).indices
        if first is not None:
            behind = ~grouped(first | best).expand_as(keys).gather(-1, ranking)
            ranking = ranking.gather(-1, torch.sort(behind.to(torch.int8), dim=-1, stable=True).indices)
        slots = torch.zeros_like(ranking, dtype=torch.bool)
        if topk is not None:
            # rows without a candidate add nothing to the budget of their group
            budget = grouped(compete.any(-1, keepdim=True)).sum(-1, keepdim=True)
            if isinstance(topk, KeptTiles):
                assert topk.samples is not None
                budget = budget * topk.samples.view(-1, *[1] * (keys.dim() - 1))
            else:
                budget = budget * topk
            counts = budget.minimum(candidates.sum(-1, keepdim=True))
            slots = slots | (torch.arange(keys.shape[-1], device=keys.device) < counts)
        if shares is not None:
            if isinstance(shares, Tensor):
                # [H, 1, 1] or [B|1, H|1, Nq|1, 1]
                shares = shares.double()[:, None, None] if shares.dim() == 1 else shares.double()[..., None]
            if rule.over == "row":
                units = weight_units(scores, compete)
            else:
                # NaN has weight 0, inf that of a whole row
                weights = scores.masked_fill(~compete, 0).nan_to_num(0.0).clamp(0, 1)
                units = grouped((weights.double() * _UNITS).round().long())
            slots = slots | within_share(units.gather(-1, ranking), shares, rule.crossing)
        selection = selection | torch.zeros_like(slots).scatter_(-1, ranking, slots)
    return (selection & candidates).expand_as(grouped(scores)).reshape(scores.shape)


def _above(scores: Tensor, candidates: Tensor, deviations: float) -> Tensor:
    """Bool mask of scores `[..., M]` above mean + deviations * std of the candidates."""
    values = scores.double().masked_fill(~candidates, 0)
    count = candidates.sum(-1, keepdim=True).clamp(min=1)
    mean = values.sum(-1, keepdim=True) / count
    spread = (values - mean).masked_fill(~candidates, 0).square().sum(-1, keepdim=True) / count
    return (values > mean + deviations * spread.sqrt()) & candidates


def _check(scores: Tensor, shares: Tensor | float | None, **masks: Tensor | None) -> None:
    if scores.ndim != 4 or not scores.is_floating_point() or 0 in scores.shape[1:]:
        raise ValueError(f"scores must be a float [B, H, Nq, Nkv], got {scores.dtype} {list(scores.shape)}")
    rows = scores.shape[:3]
    if isinstance(shares, Tensor) and not (
        (shares.dim() == 1 and shares.shape[0] in (1, rows[1]))
        or (shares.dim() == 3 and all(n in (1, m) for n, m in zip(shares.shape, rows, strict=True)))
    ):
        raise ValueError(f"shares must be {[rows[1]]} or {list(rows)}, got {list(shares.shape)}")
    for name, mask in masks.items():
        if mask is None:
            continue
        plain, sizes = mask.shape == scores.shape[2:], tuple(zip(mask.shape, scores.shape, strict=False))
        if mask.dtype != torch.bool or not (plain or (mask.dim() == 4 and all(n in (1, m) for n, m in sizes))):
            fits = f"{list(scores.shape[2:])} or {list(scores.shape)}"
            raise ValueError(f"{name} must be bool {fits}, got {mask.dtype} {list(mask.shape)}")
        if mask.device != scores.device:
            raise ValueError(f"{name} must be on {scores.device} like scores, got {mask.device}")

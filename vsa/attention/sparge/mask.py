"""The first stage of SpargeAttn: selection of the kv blocks of each query block.

With mean queries qm and keys km of blocks, s = 1/sqrt(D):

    sim(X)    similarity of the tokens of a block
    P_i       softmax over similar kv blocks j of  s qm_i km_j
    kept_i    the largest set of the best j whose P_i sums to at most tau, at least one   (TopCdf)
    always    all of a row i with sim(Q_i) < theta, all of a column j with sim(K_j) < theta

The mean does not represent a block whose tokens differ, so blocks of low similarity are always computed.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim, Nq / Nkv query / kv blocks.

Source: SpargeAttn (arXiv 2502.18137), sections 3.2 to 3.4, and its code (thu-ml/SpargeAttn); `Readings` lists where the
two differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from vsa_kernels import BlockIndex, block_mean_and_similarity, block_mean_pool, mean_scores
from vsa_kernels.block_index import Blocks, by_block

from vsa.attention.scores import per_head
from vsa.attention.selection import RowRule, SampleTopk, Shares, select_blocks
from vsa.settings import checked

Span = tuple[int, int]


@checked
@dataclass(frozen=True, kw_only=True)
class Readings:
    """Options for the points in which the paper, its code and a natural reading differ.

    Args:
        similarity: cosine, the mean cosine of all pairs of a block's tokens, a token with itself included, which is the
            squared norm of the mean of the normalised tokens (code, and the text of the paper); or gram,
            mean(X X^T) / max(X X^T) (the paper's formula). Both are in [0, 1], 1 for equal tokens, 0 for a block of
            zeros.
        scaled: true: logits have the factor s (code); false: they do not (paper).
        smooth_k: subtract the mean of the keys over the sequence before keys are compared (code). This changes sim(K)
            but not P, since keys share a large common part.
        ragged_differs: treat a block that is shorter than the others as not similar, so that it is always computed. The
            code does so by a division 0/0, although nothing is special about its tokens.
        attention_sink: list the first kv block of the row's own sample in every row; it also competes like the others.
        causal: show kv block j to query block i if the first token of j is before the end of i. This selects blocks
            only; the attention itself has to mask tokens of the last visible block.
    """

    similarity: Literal["cosine", "gram"] = "cosine"
    scaled: bool = True
    smooth_k: bool = True
    ragged_differs: bool = False
    attention_sink: bool = False
    causal: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockStatistics:
    """Scores and similarities of blocks, from which the first stage selects given tau and theta.

    Args:
        scores: `[B, H, Nq, Nkv]` logits of block means, at least fp32.
        q_similarity: `[B, H, Nq]` similarity of the tokens of each query block.
        kv_similarity: `[B, H, Nkv]` similarity of the tokens of each kv block.
        visible: bool `[Nq, Nkv]`, blocks that a row may list; None: all.
        always: bool `[Nq, Nkv]`, blocks that a row always lists and that do not compete (text); None: none.
        sink: bool `[Nq, Nkv]`, blocks that a row lists in addition to the selected ones; None: none.
    """

    scores: Tensor
    q_similarity: Tensor
    kv_similarity: Tensor
    visible: Tensor | None = None
    always: Tensor | None = None
    sink: Tensor | None = None


@torch.no_grad()
def block_statistics(
    q: Tensor,
    k: Tensor,
    q_blocks: Blocks,
    kv_blocks: Blocks,
    readings: Readings = Readings(),
    *,
    samples: Sequence[Span] = (),
    candidates: Tensor | None = None,
    always: Tensor | None = None,
) -> BlockStatistics:
    """Scores and similarities of blocks.

    Args:
        q: `[B, L, H, D]` queries.
        k: `[B, S, Hkv, D]` keys.
        q_blocks: partition of the L query tokens.
        kv_blocks: partition of the S kv tokens.
        readings: see `Readings`.
        samples: token ranges of the keys that have their own mean (`smooth_k`); empty: one range.
        candidates: bool `[Nq, Nkv]`, blocks of the row's own sample that compete; None: all.
        always: bool `[Nq, Nkv]`, blocks that are always listed and do not compete (text); None: none.
    """
    heads, half, center = q.shape[2], q.dtype.itemsize == 2, None
    if readings.smooth_k and len(samples) > 1:
        wide = torch.promote_types(k.dtype, torch.float32)
        k = torch.cat([k[:, a:b] - k[:, a:b].mean(1, keepdim=True, dtype=wide) for a, b in samples], dim=1)
    elif readings.smooth_k:
        center = _mean_token(k, kv_blocks)
    q_mean, q_similarity = mean_and_similarity(q, q_blocks, readings)
    k_mean, k_similarity = mean_and_similarity(k, kv_blocks, readings, center)
    scores = mean_scores(q_mean, k_mean, scale=None if readings.scaled else 1.0, half=half)
    visible = candidates
    if readings.causal:
        before = kv_blocks.offsets[:-1] < q_blocks.offsets[1:, None]
        visible = before if visible is None else before & visible
    return BlockStatistics(
        scores=scores,
        q_similarity=q_similarity.transpose(1, 2),
        kv_similarity=per_head(k_similarity.transpose(1, 2), heads),
        visible=visible,
        always=always,
        sink=_sink(visible, scores) if readings.attention_sink else None,
    )


def _mean_token(x: Tensor, blocks: Blocks) -> Tensor:
    """Mean `[B, H, D]`, at least fp32, of all tokens x `[B, L, H, D]`, from the means of their blocks."""
    means = block_mean_pool(x, blocks)
    return ((blocks.sizes.to(means.dtype) / x.shape[1]) @ means.flatten(2)).view(means[:, 0].shape)


def _sink(visible: Tensor | None, scores: Tensor) -> Tensor:
    """The first visible block of each row."""
    if visible is None:
        visible = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device)
    return visible & (visible.cumsum(-1) == 1)


@torch.no_grad()
def mean_and_similarity(
    x: Tensor, blocks: Blocks, readings: Readings = Readings(), center: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Means `[B, N, H, D]` and similarities `[B, N, H]` of the tokens of each block, at least fp32.

    Args:
        x: `[B, L, H, D]` tokens.
        blocks: partition of the L tokens.
        readings: `similarity` and `ragged_differs` apply; a short block that counts as different has similarity -inf.
        center: `[B, H, D]`, subtracted from every token; None: zeros.
    """
    if readings.similarity == "cosine":
        means, similarity = block_mean_and_similarity(x, blocks, center=center)
    else:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide if center is None else wide - center[:, None]
        means = block_mean_pool(wide, blocks)
        # no product of two tokens exceeds the largest squared norm
        largest = by_block(wide.square().sum(-1, keepdim=True), blocks).amax((2, 4))
        similarity = means.square().sum(-1) / largest.masked_fill(largest == 0, 1)
    if readings.ragged_differs:
        similarity = similarity.masked_fill((blocks.sizes < blocks.max_size)[:, None], -torch.inf)
    return means, similarity


@torch.no_grad()
def first_stage(known: BlockStatistics, rule: RowRule | Shares | SampleTopk | int, theta: float | Tensor) -> BlockIndex:
    """First stage of SpargeAttn: the kv blocks of every query block.

    Args:
        known: scores and similarities.
        rule: `sparge_top_p(tau)`, `Shares` with a tau per head, or a top-k (the code's other interface).
        theta: similarity below which a block is always computed; a tensor `[H]` has one value per head. A negative
            value turns this off, except for blocks with NaN, which are always computed.
    """
    threshold = theta[:, None] if isinstance(theta, Tensor) else theta
    # negated, so that a block with a NaN similarity is computed
    rows, columns = (~(similarity >= threshold) for similarity in (known.q_similarity, known.kv_similarity))
    # blocks that are always listed do not compete
    forced, compete = columns[..., None, :], known.visible
    if isinstance(rule, RowRule) and rule.is_share:
        assert rule.top_p is not None
        share = torch.full_like(known.q_similarity, rule.top_p, dtype=torch.float64)
        rule = Shares(share.masked_fill_(rows, 1.0), rule.crossing)
    elif isinstance(rule, Shares):
        rule = Shares(torch.where(rows, 1.0, rule.shares[:, None].double()), rule.crossing)
    else:
        forced = forced | rows[..., None]
    if known.visible is not None:
        forced = forced & known.visible
    if known.always is not None:
        forced = forced | known.always
    return select_blocks(known.scores, rule, candidates=compete, always=forced, union=known.sink)

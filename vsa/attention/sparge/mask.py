"""The first stage of SpargeAttn: selection of the kv blocks of each query block.

With mean queries qm and keys km of blocks, s = 1/sqrt(D):

    sim(X)    similarity of the tokens of a block
    P_i       softmax over similar kv blocks j of  s qm_i km_j
    kept_i    the largest set of the best j whose P_i sums to at most tau, at least one   (TopCdf)
    always    all of a row i with sim(Q_i) < theta, all of a column j with sim(K_j) < theta

The mean does not represent a block whose tokens differ, so blocks of low similarity are always computed.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim, Nq / Nkv query / kv blocks.

Where the paper and its code differ, this follows the code: sim(X) is the mean cosine of all pairs of a block's tokens,
a token with itself included (the paper's formula is mean(X X^T) / max(X X^T)), 1 for equal tokens and 0 for a block of
zeros; the logits have the factor s; and the mean of the keys over the sequence is subtracted before keys are compared,
which changes sim(K) but not P, since keys share a large common part. A block that is shorter than the others is one
like any other, although the code treats it as not similar by a division 0/0.

Source: SpargeAttn (arXiv 2502.18137), sections 3.2 to 3.4, and its code (thu-ml/SpargeAttn).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vsa_kernels import BlockIndex, block_mean_and_similarity, block_mean_pool, mean_scores
from vsa_kernels.block_index import Blocks

from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.scores import per_head
from vsa.attention.selection import RowRule, Shares, select_blocks

Span = tuple[int, int]

READINGS = {"similarity": "cosine", "scaled": True, "smooth_k": True, "ragged_differs": False, "attention_sink": False}
"""Settings that files of version 0.1 hold, with the only values that are left."""


def without_readings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from a file without those of `READINGS`.

    Raises:
        ValueError: one of them has another value.
    """
    for name, value in READINGS.items():
        if settings.get(name, value) != value:
            raise ValueError(f"{name}={settings[name]} of SpargeAttn is not supported, only {value}")
    return {name: value for name, value in settings.items() if name not in READINGS}


@dataclass(frozen=True, kw_only=True)
class BlockStatistics:
    """Scores and similarities of blocks, from which the first stage selects given tau and theta.

    Args:
        scores: `[B, H, Nq, Nkv]` logits of block means, at least fp32.
        q_similarity: `[B, H, Nq]` similarity of the tokens of each query block.
        kv_similarity: `[B, H, Nkv]` similarity of the tokens of each kv block.
        visible: bool `[Nq, Nkv]`, blocks that a row may list; None: all.
        always: bool `[Nq, Nkv]`, blocks that a row always lists and that do not compete (text); None: none.
    """

    scores: Tensor
    q_similarity: Tensor
    kv_similarity: Tensor
    visible: Tensor | None = None
    always: Tensor | None = None


@torch.no_grad()
def block_statistics(
    q: Tensor,
    k: Tensor,
    q_blocks: Blocks,
    kv_blocks: Blocks,
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
        samples: token ranges of the keys that have their own mean; empty: one range.
        candidates: bool `[Nq, Nkv]`, blocks of the row's own sample that compete; None: all.
        always: bool `[Nq, Nkv]`, blocks that are always listed and do not compete (text); None: none.
    """
    heads, half, center = q.shape[2], q.dtype.itemsize == 2, None
    if len(samples) > 1:
        wide = torch.promote_types(k.dtype, torch.float32)
        k = torch.cat([k[:, a:b] - k[:, a:b].mean(1, keepdim=True, dtype=wide) for a, b in samples], dim=1)
    else:
        center = _mean_token(k, kv_blocks)
    q_mean, q_similarity = block_mean_and_similarity(q, q_blocks)
    k_mean, k_similarity = block_mean_and_similarity(k, kv_blocks, center=center)
    return BlockStatistics(
        scores=mean_scores(q_mean, k_mean, half=half),
        q_similarity=q_similarity.transpose(1, 2),
        kv_similarity=per_head(k_similarity.transpose(1, 2), heads),
        visible=candidates,
        always=always,
    )


def _mean_token(x: Tensor, blocks: Blocks) -> Tensor:
    """Mean `[B, H, D]`, at least fp32, of all tokens x `[B, L, H, D]`, from the means of their blocks."""
    means = block_mean_pool(x, blocks)
    return ((blocks.sizes.to(means.dtype) / x.shape[1]) @ means.flatten(2)).view(means[:, 0].shape)


@torch.no_grad()
def first_stage(known: BlockStatistics, rule: RowRule | Shares | KeptTiles, theta: float | Tensor) -> BlockIndex:
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
    return select_blocks(known.scores, rule, candidates=compete, always=forced)

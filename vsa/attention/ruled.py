"""Row rules as settings: how many kv tiles a query tile keeps, for methods that rank tiles by scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from vsa_kernels import BlockIndex

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.selection import Over, RowRule, select_blocks
from vsa.settings import PositiveShare, validated

Rule = Literal["topk", "top_p", "larger_of_both", "mean_plus_std"]
_NEEDS = {"topk": (), "top_p": ("top_p",), "larger_of_both": ("top_p",), "mean_plus_std": ("deviations",)}


@validated
class RuledAttention(AttentionMethod):
    """A method whose query tiles select kv tiles by scores and a row rule.

    The sparsity schedule sets the top-k: the number of tiles of every row (over=row), the mean of the rows that share
    a budget (over=head and layer), or the least number of a row (larger_of_both). top_p and mean_plus_std have no
    top-k: a schedule does not apply to them, and they keep as many tiles at every step.

    Args:
        rule: topk; top_p, the fewest tiles that hold a share of the row's softmax; larger_of_both, the larger of these
            two numbers (SpargeAttention2); mean_plus_std, tiles whose score is `deviations` standard deviations above
            the mean of its row (Sol-Attn). Every row keeps at least one tile.
        over: row; head or layer: all rows of a head, or of all heads of a sample, share one budget or threshold, for
            which logits become shares of their row (a softmax) that are compared over rows; see `RowRule`.
        top_p: share of top_p and larger_of_both.
        deviations: standard deviations of mean_plus_std.
        expected_density: share of the tiles that a rule other than topk is expected to keep, for estimates and for the
            number of steps of a FLOP budget; runs are charged for what their lists hold. None: all tiles for top_p, the
            top-k for larger_of_both, the share of a normal distribution for mean_plus_std.
        **layer: see `AttentionMethod`.
    """

    takes_query_parts = True

    def __init__(
        self,
        *,
        rule: Rule = "topk",
        over: Over = "row",
        top_p: PositiveShare | None = None,
        deviations: float | None = None,
        expected_density: PositiveShare | None = None,
        **layer: Any,
    ):
        super().__init__(**layer)
        for name, value in (("top_p", top_p), ("deviations", deviations)):
            if (name in _NEEDS[rule]) != (value is not None):
                expected = "a number" if name in _NEEDS[rule] else "null"
                raise ValueError(f"{name}={value} with rule={rule}: expected {expected}")
        if rule == "topk" and expected_density is not None:
            raise ValueError(f"expected_density={expected_density} with rule=topk: its number of tiles is known")
        self.rule, self.top_p, self.deviations, self.expected_density = rule, top_p, deviations, expected_density
        self.over: Over = over
        self.selects = rule in ("topk", "larger_of_both")
        self.predicts = not self.selects
        # a compiled block cannot construct a rule; None: a plain top-k
        self.row_rule: RowRule | None = None
        if (rule, over) != ("topk", "row"):
            count = 1 if self.selects else None
            self.row_rule = RowRule(topk=count, top_p=top_p, deviations=deviations, over=over)

    @property
    def measured(self) -> bool:
        return self.rule != "topk"

    @property
    def expected_share(self) -> float:  # type: ignore[override]
        if self.expected_density is not None:
            return self.expected_density
        if self.deviations is not None:
            return math.erfc(self.deviations / math.sqrt(2)) / 2
        return 0.0 if self.rule == "larger_of_both" else 1.0

    def choose(
        self,
        scores: Tensor,
        topk: KeptTiles,
        ctx: AttnContext,
        *,
        logits_of: Callable[[Tensor], Tensor | None],
        candidates: Tensor | None = None,
        always: Tensor | None = None,
        **masks: Any,
    ) -> BlockIndex:
        """The kv tiles that the rule keeps.

        Args:
            scores: `[B, H, Nq, Nkv]`; inf for tiles that are kept whatever the others have.
            topk: count of the layer.
            ctx: context of the layer; ranks that share a budget select together.
            logits_of: gives the logits of an attention map for the scores; None: there is no such map, and shares are
                those of the scores, at least 0, in their row.
            candidates, always, **masks: see `select_blocks`.
        """
        if (rule := self.row_rule) is None:
            return select_blocks(scores, topk, candidates=candidates, always=always, **masks)
        if rule.over != "row" or rule.top_p is not None:
            logits = logits_of(scores)
            scores = scores.log() if logits is None else logits
        if rule.over != "row":
            if (samples := len(ctx.layout.sample_spans)) > 1:
                raise ValueError(f"over={rule.over} shares a budget inside a sample, got {samples} in a row")
            # inf has no softmax
            damaged = scores == math.inf
            hidden = damaged if candidates is None else damaged | ~candidates
            hidden = hidden if always is None else hidden | always
            scores = scores.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(damaged, math.inf)
        masks |= {"candidates": candidates, "always": always}
        ranks = ctx.across
        if ranks is None or rule.over == "row" or (rule.over == "head" and ranks.groups == ranks.ranks.size):
            return select_blocks(scores, rule, topk=topk, **masks)
        for name, mask in masks.items():
            masks[name] = None if mask is None else ranks.of_all(mask.expand(scores.shape).to(torch.uint8)).bool()
        return ranks.own_lists(select_blocks(ranks.of_all(scores), rule, topk=topk, **masks))

"""Attention methods of a comparison, with the names of their configs and a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vsa.attention.base import AttentionMethod
from vsa.attention.kept_tiles import Budget
from vsa.attention.layout import TileLayout
from vsa.attention.tiling import Grid
from vsa.config import attention_config, build, shown
from vsa.settings import AtLeastOne, ShareBelowOne, fits

BUDGETS = {"topk": AtLeastOne, "sparsity": ShareBelowOne}
SLIDING_TILE = "sliding_tile"
AS_TRAINED = "as trained"


@dataclass(frozen=True, kw_only=True)
class Method:
    """An attention method with its settings and budget.

    Args:
        label: text of the user.
        family: label without the budget.
        config: `_partial_` config node.
        topk: kv tiles per query tile; None with `sparsity`, or for a method without a budget.
        sparsity: share of kv tiles skipped.
        trained: whether to use the gates and the top-k of the captured model; otherwise gates have initial values.
        predicts: see `AttentionMethod.predicts`.
    """

    label: str
    family: str
    config: Mapping[str, Any]
    topk: int | None = None
    sparsity: float | None = None
    trained: bool = False
    predicts: bool = False

    @property
    def selects(self) -> bool:
        """Whether it has a budget, because it selects tiles."""
        return self.topk is not None or self.sparsity is not None

    def make(self, *, dim: int, num_heads: int, head_dim: int, layer_idx: int) -> AttentionMethod:
        """The method of a layer; a factory for a network."""
        return build(self.config)(dim=dim, num_heads=num_heads, head_dim=head_dim, layer_idx=layer_idx)

    def kept(self, layout: TileLayout) -> int:
        """Number of tiles that a query tile keeps in a layout; all for methods without a budget."""
        tiles = layout.num_video_tiles
        if self.sparsity is not None:
            return Budget(sparsity=self.sparsity).tiles(tiles)
        if self.topk is not None and self.topk > tiles:
            raise ValueError(
                f"{self.label}: topk {self.topk} is above the {tiles} tiles of {layout.segments[0].grid_thw}"
            )
        return self.topk or tiles


def parse_method(text: str, *, tile_thw: Grid = (4, 4, 4)) -> Method:
    """A method from its name, budget and settings: `video_sparse topk=32`, `staged stages=f score=mass sparsity=0.9`.

    `sliding_tile` is sliding tile attention: `neighborhood` whose windows move by whole tiles, stride_thw = tile_thw.

    Args:
        text: words separated by spaces; `topk` or `sparsity` is the budget, other keys are settings of the method.
        tile_thw: default tokens per tile.
    """
    name, *words = text.split() or [""]
    budget: dict[str, Any] = {}
    settings = []
    for word in words:
        key, _, value = word.removeprefix("attention.").partition("=")
        if key in BUDGETS:
            budget[key] = _budget(text, key, value)
        else:
            settings.append(word)
    try:
        config = _config(name, settings, tile_thw)
        # raises errors of the constructor now instead of after the first methods were measured
        layer = build(config)(dim=24, num_heads=1, head_dim=24, layer_idx=0)
    except ValueError as error:
        raise ValueError(f"method {text!r}: {error}") from None
    if layer.selects and len(budget) != 1:
        raise ValueError(f"method {text!r}: it selects tiles, expected either topk=K or sparsity=SHARE")
    if budget and not layer.selects:
        raise ValueError(f"method {text!r}: {name} selects no tiles, so {next(iter(budget))} does not apply")
    label, family = " ".join([name, *words]), " ".join([name, *settings])
    return Method(label=label, family=family, config=config, predicts=layer.predicts, **budget)


def _config(name: str, settings: Sequence[str], tile_thw: Grid) -> dict[str, Any]:
    if name != SLIDING_TILE:
        return attention_config(name, settings, tile_thw=tile_thw)
    for word in settings:
        if word.removeprefix("attention.").startswith("stride_thw="):
            raise ValueError(f"{word}: the stride of {SLIDING_TILE} is its tile_thw")
    own = [f"tile_thw=[{','.join(map(str, tile_thw))}]", *settings, "stride_thw=${attention.tile_thw}"]
    return attention_config("neighborhood", own, tile_thw=tile_thw)


def _budget(text: str, key: str, value: str) -> int | float:
    try:
        number = int(value) if key == "topk" else float(value)
    except ValueError:
        number = None
    if not fits(number, BUDGETS[key]):
        expected = "an integer of at least 1" if key == "topk" else "a share from 0 to below 1"
        raise ValueError(f"method {text!r}: {key}={shown(value)}: expected {expected}")
    assert number is not None
    return number


def parse_methods(texts: Sequence[str], *, tile_thw: Grid = (4, 4, 4)) -> list[Method]:
    """Distinct methods in their order, with dense attention in front."""
    unique = dict.fromkeys(" ".join(text.split()) for text in ["full", *texts])
    return [parse_method(text, tile_thw=tile_thw) for text in unique]

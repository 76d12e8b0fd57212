"""Factories of the attention layers that `apply` installs, by the name of a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from vsa.attention.base import AttentionMethod, own_settings
from vsa.attention.layout import BlockOrder, Partition, Segment, TileLayout
from vsa.attention.named import example_of, layers_of
from vsa.attention.video_sparse import Backend, VideoSparseAttention
from vsa.integrations.diffusers.ungated import UngatedVideoSparse

MethodFactory = Callable[..., AttentionMethod]
"""Called as `factory(dim=, num_heads=, head_dim=, layer_idx=)`, once per layer."""

Gates = Literal["none", "coarse", "coarse_and_fine"]


def named_factory(
    method: str, tiled: Mapping[str, Any], settings: Mapping[str, Any], backend: Backend | None
) -> MethodFactory:
    """Factory of a method's layers by its name, with the options of video_sparse or the settings of another one."""
    if method == "video_sparse":
        return video_sparse_factory(**tiled, backend=backend)
    # hydra is imported only where a config is built
    from vsa.config import attention_config, target_class

    node = attention_config(method)
    cls, own = target_class(node["_target_"]), {name: value for name, value in node.items() if name[0] != "_"}
    if unknown := sorted(set(settings) - set(own_settings(cls))):
        raise ValueError(f"settings of {method}: unknown {unknown}, expected some of {', '.join(own_settings(cls))}")
    factory = layers_of(cls, {**own, **settings}, backend)
    if modules := example_of(factory).extra_modules():
        raise ValueError(
            f"{method} with these settings has parameters to train ({', '.join(modules)}): load_sparse(folder) loads a "
            "checkpoint that has them"
        )
    return factory


def video_sparse_factory(
    *,
    tile_thw: Sequence[int] = (4, 4, 4),
    partition: Partition = "cube",
    block_order: BlockOrder = "nested",
    gates: Gates = "none",
    gate_settings: Mapping[str, Any] | None = None,
    backend: Backend | None = None,
) -> MethodFactory:
    """Factory of the layers of video_sparse; arguments as in `apply` and `Family`."""
    if gates not in ("none", "coarse", "coarse_and_fine"):
        raise ValueError(f"gates must be none, coarse or coarse_and_fine, got {gates!r}")
    tiles = tuple(tile_thw)
    if len(tiles) != 3 or min(tiles) < 1:
        raise ValueError(f"tile_thw must be three positive sizes, got {tiles}")
    layout: dict[str, Any] = {"tile_thw": tiles, "partition": partition, "block_order": block_order}
    # raises for an unknown name now instead of in the first forward
    TileLayout.build((Segment(tiles),), **layout)
    if gates == "none":
        return partial(UngatedVideoSparse, **layout, backend=backend)
    fine_gate = gates == "coarse_and_fine"
    return partial(VideoSparseAttention, **layout, **(gate_settings or {}), fine_gate=fine_gate, backend=backend)

"""Captures: queries, keys and values for the comparison of methods, recorded from a model or read from a file.

B batch, L tokens of a row in raster order, text included, H / Hkv query / kv heads, D head dim.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.layout import Segment, TileLayout
from vsa.attention.tiling import Grid
from vsa.checkpoints.weight_files import finite
from vsa.files import atomic_file, open_tensors, parse_json
from vsa.settings import AtLeastOne, Count

Keep = Callable[..., None]
"""Function of layer, context, q, k, v and extra tensors of an attention call, in the layout's order."""

FORMAT = "vsa-captures-1"
MEANING = (
    "N.q, N.k, N.v [B, L, H, D] of capture N: queries, keys and values of one self-attention after qk-norm and RoPE, "
    "tokens in raster order of grid_thw (time, height, width), with the texts of `before` and `after` around them; "
    "logits are q k^T / sqrt(D). N.extra.NAME [B, L, H, D]: gates of the model's own method"
)
_CAPTURE = {
    "name": str,
    "grid_thw": tuple[AtLeastOne, AtLeastOne, AtLeastOne],
    "layer": Count,
    "timestep": float | None,
    "topk": int | None,
    "before?": [AtLeastOne],
    "after?": [AtLeastOne],
}
_FACTS = {"source": str, "attention": dict[str, Any] | None, "captures": [_CAPTURE]}


@dataclass(frozen=True, kw_only=True)
class Capture:
    """q, k and v of one layer in one forward pass.

    Args:
        name: name of the clip or of the random field.
        grid_thw: token grid.
        q: `[B, L, H, D]`, after qk-norm and RoPE.
        k: `[B, L, Hkv, D]`.
        v: `[B, L, Hkv, D]`.
        layer: index of the layer.
        timestep: timestep in [0, 1000]; None for random fields.
        extra: outputs of `project` of the model's own method, `[B, L, H, D]` each.
        topk: tiles that the model's own method keeps in this layer.
        before, after: tokens of the texts in front of the video and behind it in the row, text by text.
    """

    name: str
    grid_thw: Grid
    q: Tensor
    k: Tensor
    v: Tensor
    layer: int = 0
    timestep: float | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    topk: int | None = None
    before: Sequence[int] = ()
    after: Sequence[int] = ()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The row."""
        before, after = ([Segment((1, 1, n), kind="text") for n in lengths] for lengths in (self.before, self.after))
        return (*before, Segment(self.grid_thw), *after)

    @property
    def place(self) -> str:
        """Origin of the capture, for humans."""
        at = "" if self.timestep is None else f", layer {self.layer}, timestep {self.timestep:g}"
        return f"{self.name}{at}"


@dataclass(frozen=True, kw_only=True)
class Captures:
    """The captures of a comparison.

    Args:
        items: captures, at least one.
        source: origin of the captures, for humans.
        attention: config of the model's own method, if it is known and not dense.
    """

    items: Sequence[Capture]
    source: str
    attention: Mapping[str, Any] | None = None


class Watched(AttentionMethod):
    """Wrapper of a layer's method that passes its inputs to `keep`."""

    def __init__(self, method: AttentionMethod, keep: Keep):
        sizes = {name: getattr(method, name) for name in ("dim", "num_heads", "head_dim", "layer_idx")}
        super().__init__(**sizes)
        self.method, self.keep, self.takes_text = method, keep, method.takes_text
        self.is_dense, self.selects, self.predicts = method.is_dense, method.selects, method.predicts

    def extra_modules(self) -> dict[str, torch.nn.Module]:
        return self.method.extra_modules()

    def layout(self, segments: Sequence[Segment], device: torch.device | str | None = None) -> TileLayout:
        return self.method.layout(segments, device)

    def project(self, x: Tensor) -> dict[str, Tensor]:
        return self.method.project(x)

    def attend_combine(self, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        self.keep(self.layer_idx, ctx, q, k, v, extra)
        return self.method.attend_combine(q, k, v, extra, ctx)

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        self.keep(self.layer_idx, ctx, q, k, v, extra)
        return self.method.attend_dense(q, k, v, extra, ctx)


def save_captures(captures: Captures, path: Path) -> Path:
    """Write captures to a safetensors file whose metadata describes them; see `MEANING`."""
    tensors, descriptions = {}, []
    for i, item in enumerate(captures.items):
        named_tensors = {"q": item.q, "k": item.k, "v": item.v}
        named_tensors |= {f"extra.{name}": x for name, x in item.extra.items()}
        tensors |= {f"{i}.{name}": x.contiguous() for name, x in named_tensors.items()}
        descriptions.append({name: getattr(item, name) for name in (key.removesuffix("?") for key in _CAPTURE)})
    facts = {"source": captures.source, "attention": captures.attention, "captures": descriptions}
    with atomic_file(path) as temporary:
        save_file(tensors, temporary, metadata={"format": FORMAT, "meaning": MEANING, "captures": json.dumps(facts)})
    return path


def load_captures(path: Path) -> Captures:
    """Read captures from a file of `save_captures`, or another file of its format."""
    if not path.exists():
        raise ValueError(f"no such file of captures: {path}")
    try:
        with open_tensors(path) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path} holds no captures: expected format {FORMAT}, got {metadata.get('format')}")
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = parse_json(metadata["captures"], path, _FACTS)
            items = [_item(tensors, i, description) for i, description in enumerate(facts["captures"])]
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is not a complete file of captures: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from None
    if not items:
        raise ValueError(f"{path} holds no captures")
    return Captures(items=items, source=facts["source"], attention=facts["attention"])


def _item(tensors: Mapping[str, Tensor], i: int, description: Mapping[str, Any]) -> Capture:
    t, h, w = description["grid_thw"]
    q, k, v = (finite(tensors[f"{i}.{name}"], f"{i}.{name}", "captures") for name in "qkv")
    text = sum(description.get("before", [])) + sum(description.get("after", []))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.shape[1] != t * h * w + text:
            of = f"{t, h, w} and {text} of text" if text else f"{t, h, w}"
            raise ValueError(
                f"{i}.{name} must be [B, L, H, D] with the {t * h * w + text} tokens of {of}, got {list(x.shape)}"
            )
    prefix = f"{i}.extra."
    extra = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
    return Capture(**{**description, "grid_thw": (t, h, w)}, q=q, k=k, v=v, extra=extra)

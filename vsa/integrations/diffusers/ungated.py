"""Video sparse attention for models without trained gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vsa.attention.context import AttnContext
from vsa.attention.video_sparse import VideoSparseAttention


class UngatedVideoSparse(VideoSparseAttention):
    """Video sparse attention of a model without trained gates: coarse gate 0, so the output is the fine stage.

    A coarse gate of 1 instead would add a second attention output to every layer.

    Args:
        options: arguments of `VideoSparseAttention`.
    """

    def __init__(self, **options: Any):
        # on the meta device, because the unused gates of a 14B model would have a billion parameters
        with torch.device("meta"):
            super().__init__(**options, fine_gate=False)
        del self.to_gate_compress

    def extra_modules(self) -> dict[str, nn.Module]:
        return {}

    def project(self, x: Tensor) -> dict[str, Tensor]:
        return {}

    def combine(self, parts: dict[str, Tensor], extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        return parts["fine"]

    def attend_combine(self, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        return self.combine(self.attend(q, k, v, ctx), extra, ctx)

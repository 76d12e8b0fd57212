"""A whole training step of a video DiT: forward, backward and AdamW, prepared as a training run prepares it.

B batch, L tokens, H heads, D head dim.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.full import FullAttention
from vsa.attention.layout import Segment, TileLayout
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.models.video_dit import VideoDiT
from vsa.training.parallel import ParallelPlan, parallelize

from .problems import Shape

_CONFIGS = Path(__file__).parents[2] / "configs" / "model"
_MODELS = {(12, 64): "dit_120m", (12, 128): "wan_1_3b", (40, 128): "wan_14b"}
"""Model config by heads and head dim."""

_KINDS = {
    "attention": ("_fwd_kernel", "_dq_kernel", "_dkv_kernel", "fmha", "flash", "sdpa", "_pool", "_topk", "_scores"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "xmma"),
    "optimizer": ("multi_tensor_apply", "adam"),
    "copies": ("memcpy", "memset", "copy", "cat"),
}
"""What a GPU kernel belongs to, by parts of its name, in the order of trial; others: elementwise and norms. Dense
cross-attention counts as attention."""


class FreeAttention(AttentionMethod):
    """Attention that costs nothing, `out = v`: the ceiling of what any sparsity can gain."""

    def layout(self, segments: Sequence[Segment], device: torch.device | str | None = None) -> TileLayout:
        return TileLayout.build(segments, tile_thw=None, device=device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        # a little of q and k, so that their projections are computed and have gradients
        return {"out": v + (q + k) * 1e-3}

    def combine(self, parts: dict[str, Tensor], extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        return parts["out"]

    def pairs(self, layout: TileLayout, topk: int) -> float:
        return 0.0


class TrainingStep:
    """One network with its optimizer and a fixed random batch.

    Args:
        shape: token grid, heads, head dim, top-k, batch.
        attention: `dense`, `free` or the backend of sparse attention.
        compile: compile the blocks.
        device: where it runs; on CUDA as in training: FSDP2, bf16 compute over fp32 weights.
    """

    def __init__(self, shape: Shape, attention: str, compile: bool, device: torch.device):
        name = _MODELS.get((shape.heads, shape.head_dim))
        size: dict[str, Any] = {"num_layers": 2, "ffn_dim": 4 * shape.heads * shape.head_dim, "text_dim": 32}
        if name is not None:
            size = yaml.safe_load((_CONFIGS / f"{name}.yaml").read_text())
            del size["_target_"]
        size |= {"num_attention_heads": shape.heads, "attention_head_dim": shape.head_dim}
        factory: Any = {"dense": FullAttention, "free": FreeAttention}.get(attention)
        if factory is None:
            factory = partial(
                VideoSparseAttention, tile_thw=shape.tile_thw, fine_gate=False, gate_init="model", backend=attention
            )
        torch.manual_seed(0)
        self.topk = shape.topk
        with device:
            self.model = VideoDiT(attention=factory, **size)
            t, h, w = shape.grid_thw
            self.x_t, self.target = (
                torch.randn(shape.batch, self.model.in_channels, t, 2 * h, 2 * w, generator=_generator(device, seed))
                for seed in (1, 2)
            )
            self.text = torch.randn(shape.batch, 512, self.model.text_dim, generator=_generator(device, 3))
            self.timestep = torch.full((shape.batch,), 500.0)
        mesh = _mesh() if device.type == "cuda" else None
        parallelize(self.model, mesh, ParallelPlan(activation_checkpointing=True, compile=compile))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def __call__(self) -> None:
        velocity = self.model(self.x_t, self.timestep, self.text, topk=self.topk)
        (velocity.float() - self.target).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def breakdown(self) -> dict[str, float]:
        """Milliseconds of GPU time of one step by kind of kernel."""
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            self()
            torch.cuda.synchronize()
        found = dict.fromkeys((*_KINDS, "elementwise and norms"), 0.0)
        for event in profiled.key_averages():
            name = event.key.lower()
            kind = next((k for k, parts in _KINDS.items() if any(p in name for p in parts)), "elementwise and norms")
            found[kind] += event.self_device_time_total / 1e3
        return {kind: round(ms, 2) for kind, ms in found.items()}


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _mesh() -> Any:
    # one process, as in a run on one GPU
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    return torch.distributed.device_mesh.init_device_mesh("cuda", (1,))

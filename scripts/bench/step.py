"""A training step of a video DiT, prepared as in training: forward, backward and AdamW.

B batch, L tokens, H heads, D head dim.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.full import FullAttention
from vsa.attention.layout import TileLayout
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.models.network import Network
from vsa.models.recompute import Level
from vsa.models.video_dit import VideoDiT
from vsa.training.optimizer import AdamW, Constant
from vsa.training.parallel import ParallelPlan, parallelize

from .problems import Shape
from .timing import Strategy

TEXT_TOKENS = 512
"""Tokens of a caption, including padding."""

_CONFIGS = Path(__file__).parents[2] / "configs" / "model"
_MODELS = {(12, 64): "dit_120m", (12, 128): "wan_1_3b", (40, 128): "wan_14b"}
"""Model config by heads and head dim."""


class FreeAttention(AttentionMethod):
    """Attention without cost, `out = v`: an upper bound of the gain of any sparsity."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        # a small term of q and k, so that their projections are computed and have gradients
        return {"out": v + (q + k) * 1e-3}

    def pairs(self, layout: TileLayout, topk: float) -> float:
        return 0.0


class TrainingStep:
    """One network with its optimizer and a fixed random batch.

    Args:
        shape: token grid, heads, head dim, top-k, batch.
        attention: `dense`, `free` or the backend of sparse attention.
        compile: whether the blocks are compiled.
        level: level of activation checkpointing.
        device: compute device; on CUDA, bf16 compute over fp32 weights as in training.
        strategy: `plain`, as in training on one device, or `fsdp`, FSDP2 over this single process.
    """

    def __init__(
        self, shape: Shape, attention: str, compile: bool, level: Level, device: torch.device, strategy: Strategy
    ):
        torch.manual_seed(0)
        self.topk = shape.topk
        self.model = video_dit(shape, attention, device)
        with device:
            self.x_t, self.target = (
                torch.randn(latent_size(shape, self.model), generator=random_source(device, seed)) for seed in (1, 2)
            )
            self.text = torch.randn(shape.batch, TEXT_TOKENS, self.model.text_dim, generator=random_source(device, 3))
            self.timestep = torch.full((shape.batch,), 500.0)
        mesh = one_process_mesh(device) if strategy == "fsdp" else None
        parallelize(self.model, mesh, ParallelPlan(activation_checkpointing=level, compile=compile), device.type)
        self.optimizer = AdamW(lr=1e-5, schedule=Constant()).build(self.model, self.model.parameter_roles())

    def __call__(self) -> None:
        velocity = self.model(self.x_t, self.timestep, self.text, topk=self.topk)
        (velocity.float() - self.target).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def named_model(shape: Shape) -> str | None:
    """Name of the model config with the heads of the shape, None if there is none."""
    return _MODELS.get((shape.heads, shape.head_dim))


def video_dit(shape: Shape, attention: str, device: torch.device) -> VideoDiT:
    """A network with the heads of the shape and random weights; two layers unless it is a named model.

    Args:
        shape: heads, head dim, tile.
        attention: `dense`, `free` or the backend of sparse attention.
        device: device of the parameters.
    """
    with device:
        return VideoDiT(attention=attention_of(shape, attention, fine_gate=False), **model_size(shape))


def model_size(shape: Shape) -> dict[str, Any]:
    """Arguments of `VideoDiT` for the heads of the shape: those of the named model, or of two layers."""
    name = named_model(shape)
    size: dict[str, Any] = {"num_layers": 2, "ffn_dim": 4 * shape.heads * shape.head_dim, "text_dim": 32}
    if name is not None:
        size = yaml.safe_load((_CONFIGS / f"{name}.yaml").read_text())
        del size["_target_"]
    return size | {"num_attention_heads": shape.heads, "attention_head_dim": shape.head_dim}


def attention_of(shape: Shape, name: str, **options: Any) -> Any:
    """Factory of the attention method of a layer, called with the sizes of the layer.

    Args:
        shape: shape whose tile is used.
        name: `dense`, `free` or the backend of sparse attention.
        options: options of sparse attention.
    """
    if name in ("dense", "free"):
        return FullAttention if name == "dense" else FreeAttention
    options |= {"tile_thw": shape.tile_thw, "gate_init": "model", "backend": name}
    return partial(VideoSparseAttention, **options)


def random_source(device: torch.device, seed: int) -> torch.Generator:
    """A new random generator."""
    return torch.Generator(device).manual_seed(seed)


def one_process_mesh(device: torch.device) -> Any:
    """A device mesh of this single process."""
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531", "RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update({**alone, **os.environ})
    return torch.distributed.device_mesh.init_device_mesh(device.type, (1,))


@torch.no_grad()
def fill_zeros(model: nn.Module) -> None:
    """Fill parameters that are initialised to zero with small random values, and open the gates of self-attention.

    An initialised network returns zeros for any input, and products with zeros draw less power.
    """
    for name, p in model.named_parameters():
        if not p.any():
            p.normal_(std=0.02)
        elif name.endswith("scale_shift_table") and p.shape[1] == 6:
            # the residual gate of the self-attention, near its value in trained models
            p[:, 2] += 1
        elif name.endswith(("attn1.norm_q.weight", "attn1.norm_k.weight")):
            # makes attention weights uneven
            p.fill_(1.5)


def latent_size(shape: Shape, model: Network) -> tuple[int, ...]:
    """`[B, C, T, H, W]` of the shape's latents."""
    t, h, w = (n * p for n, p in zip(shape.grid_thw, model.patch_size, strict=True))
    return shape.batch, model.out_channels, t, h, w

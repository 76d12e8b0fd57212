"""Inputs of an estimate: networks with their numbers of passes, sizes, and parallelism."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from vsa_kernels import BlockIndex
from vsa_kernels.block_sparse.dispatch import kernels_of
from vsa_kernels.block_sparse.mask import BlockMask

from vsa.attention.base import AttentionMethod
from vsa.attention.kept_tiles import KeptTiles
from vsa.checkpoints.moments import Moments, moment_bytes
from vsa.data.parallel_dims import ParallelDims
from vsa.models.network import Network
from vsa.models.recompute import Level
from vsa.training.estimate.block import BlockShape

FORWARD, TRAINING = False, True
"""Kinds of passes: forward only, and forward with backward."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedNetwork:
    """One network of a run.

    Args:
        name: its role.
        model: network on the meta device; parameters that do not require gradients are frozen.
        passes: mean number of passes of a sample per step, by kind.
        updates: mean number of optimizer updates per step; 0 without an optimizer.
        moments: form of the optimizer's moments.
    """

    name: str
    model: Network
    passes: Mapping[bool, float]
    updates: float = 0.0
    moments: Moments = "fp32"

    @cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def trained(self) -> int:
        """Number of trained parameters."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad) if self.updates else 0

    @property
    def frozen(self) -> int:
        """Number of parameters that are not trained."""
        return self.parameters - self.trained

    @cached_property
    def moment_bytes(self) -> int:
        """Bytes of the optimizer's moments."""
        trained = [p for p in self.model.parameters() if p.requires_grad] if self.updates else []
        return sum(moment_bytes(p.shape, self.moments) for p in trained)

    @cached_property
    def block_parameters(self) -> Sequence[int]:
        """Number of parameters of every block."""
        return [sum(p.numel() for p in block.parameters()) for block in self.model.blocks]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The properties of a training run that determine memory and time.

    Args:
        networks: the networks, the trained one first.
        latent_shape: `[C, T, H, W]` of a sample.
        text: tokens of a caption.
        topk: kv tiles per query tile, the most of a training, for networks that select tiles.
        batch: samples of a micro-batch on one rank.
        micro_batches: micro-batches per step.
        dims: parallel dimensions of the GPUs.
        sharded: whether FSDP2 holds the parameters and gathers them in bf16 for every pass.
        reduce_each: whether gradients are reduced after every micro-batch.
        averaged: whether an average of the first network's weights is kept.
        level: level of activation checkpointing.
        compiled: whether blocks are compiled.
        chip: compute capability of the GPU, which decides about kernels; None: unknown, one without a workspace.
        keeps_gradients: whether gradients stay allocated until the next step's backward (Lightning's own order).
        fused: whether AdamW updates without temporaries, as it does on GPUs.
        frozen_rounded: whether parameters that are not trained are held in bf16.
        offloaded: whether the host holds parameters, gradients, moments and averages.
    """

    networks: Sequence[PlannedNetwork]
    latent_shape: tuple[int, ...]
    text: int
    topk: KeptTiles
    batch: int
    micro_batches: int = 1
    dims: ParallelDims = field(default_factory=ParallelDims)
    sharded: bool = True
    reduce_each: bool = False
    averaged: bool = True
    level: Level = "none"
    compiled: bool = False
    chip: tuple[int, int] | None = None
    keeps_gradients: bool = True
    fused: bool = True
    frozen_rounded: bool = False
    offloaded: bool = False

    @property
    def samples(self) -> int:
        """Samples of a step on all ranks."""
        return self.batch * self.micro_batches * self.dims.data_size

    def tokens(self, network: PlannedNetwork) -> int:
        """Tokens of a sample on a rank."""
        return -(-network.model.layout_for(self.latent_shape).num_tokens // self.dims.sequence)

    def blocks(self, network: PlannedNetwork) -> Mapping[BlockShape, int]:
        """Kinds of blocks of a network, with the sizes of a micro-batch, and the number of layers of each."""
        tiles = network.model.layout_for(self.latent_shape).num_video_tiles
        kinds = Counter(
            (len(method.extra_modules()), method.operator, tiles if runs_operator(method, tiles, self.topk) else 0)
            for method in network.model.attention_layers
        )
        return {self._block(network, *kind): layers for kind, layers in kinds.items()}

    def _block(self, network: PlannedNetwork, gates: int, operator: str, tiles: int) -> BlockShape:
        topk = int(max(self.topk.layers))
        return BlockShape(
            tokens=self.batch * self.tokens(network),
            text=self.batch * self.text,
            dim=network.model.dim,
            ffn_dim=network.model.ffn_dim,
            heads=network.model.num_heads,
            gates=gates,
            operator=operator,
            # of all heads; a rank that shares the sample has all tiles of some
            tiles=-(-self.batch * tiles // self.dims.sequence),
            # index lists are padded to a multiple of 32
            capacity=-(-topk // 32) * 32,
            workspace=self._workspace(network, topk) if tiles else 0,
            compiled=self.compiled,
        )

    def _workspace(self, network: PlannedNetwork, topk: int) -> int:
        """Bytes that the operator's backward takes and gives back."""
        if self.chip is None:
            return 0
        layout, heads = network.model.layout_for(self.latent_shape), network.model.num_heads
        blocks, heads = layout.blocks, heads // math.gcd(heads, self.dims.sequence)
        with torch.device("meta"):
            x = torch.empty(self.batch, layout.num_tokens, heads, network.model.head_dim, dtype=torch.bfloat16)
            lists = torch.empty(1, 1, blocks.num, topk, dtype=torch.int32)
        index = BlockIndex(kv_indices=lists, kv_num_blocks=lists[..., 0])
        mask = BlockMask(index=index, q_blocks=blocks, kv_blocks=blocks, kv_valid=None)
        return kernels_of(x, x, x, mask, self.chip).workspace

    def linear(self, network: PlannedNetwork, recomputed: Level | None = None) -> float:
        """FLOPs of the linear layers in the forward of a sample, or of those that the backward computes again."""
        return _linear(network, self.tokens(network), self.text, recomputed)


@lru_cache(maxsize=64)
def _linear(network: PlannedNetwork, tokens: int, text: int, recomputed: Level | None) -> float:
    return network.model.linear_flops(num_tokens=tokens, text_len=text, recomputed=recomputed)


def runs_operator(method: AttentionMethod, tiles: int, topk: KeptTiles) -> bool:
    """Whether a layer selects tiles, and fewer than all of them."""
    return method.selects and min(topk.layers) < tiles

"""A run of a tiny model with random weights, for tests of everything that reads runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vsa.training.checkpointing import write_checkpoint
from vsa.training.config import build, model_factory

LATENT_SHAPE = (16, 4, 8, 8)


def make_config(*, attention: str = "video_sparse") -> dict[str, Any]:
    """Config of a two-layer model: 64 tokens, 8 tiles of 2 x 2 x 2."""
    methods = {
        "video_sparse": {"_target_": "vsa.attention.video_sparse.VideoSparseAttention", "tile_thw": [2, 2, 2]},
        "full": {"_target_": "vsa.attention.full.FullAttention"},
    }
    return {
        "model": {
            "_target_": "vsa.models.video_dit.VideoDiT",
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "ffn_dim": 48,
            "num_layers": 2,
            "text_dim": 64,
            "freq_dim": 32,
        },
        "attention": {**methods[attention], "_partial_": True},
        "sparsity": {"_target_": "vsa.attention.schedule.ConstantSparsity", "topk": None, "sparsity": 0.75},
        "data": {
            "codec": {"_target_": "vsa.data.codecs.HaarCodec"},
            "text_encoder": {"_target_": "vsa.data.text.HashedNgramEncoder"},
        },
        "task": {
            "objective": {
                "shift": {"_target_": "vsa.diffusion.flow_matching.FlowShift", "kind": "constant", "value": 3.0}
            }
        },
    }


def write_run(
    folder: Path, *, attention: str = "video_sparse", with_ema: bool = True, config: dict[str, Any] | None = None
) -> Path:
    """Write a run folder with one checkpoint (step 7) whose weights are random everywhere; returns the run folder."""
    config = make_config(attention=attention) if config is None else config
    generator = torch.Generator().manual_seed(0)
    shapes = {name: p.shape for name, p in model_factory(make_config(attention=attention))().named_parameters()}
    # random output heads and gates too: a zero head would make every test of the sampler pass
    groups = {
        name: {key: 0.15 * torch.randn(shape, generator=generator) for key, shape in shapes.items()}
        for name in (["model", "ema"] if with_ema else ["model"])
    }
    codec, text_encoder = build(make_config()["data"]["codec"]), build(make_config()["data"]["text_encoder"])
    state = {
        "step": 7,
        "config": config,
        "latent_mean": torch.linspace(-0.5, 0.5, 16).tolist(),
        "latent_std": torch.linspace(0.5, 2, 16).tolist(),
        "codec": {"id": codec.id, "hash": codec.hash},
        "text_encoder": {"id": text_encoder.id, "hash": text_encoder.hash},
        "latent_shapes": [[16, 1, 8, 8], list(LATENT_SHAPE)],
    }
    write_checkpoint(folder / "checkpoints", groups, state)
    return folder


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., dict[str, Any]]:
    """`tiny_config(attention="video_sparse" | "full")` makes the config of a tiny run."""
    return make_config


@pytest.fixture(scope="session")
def write_tiny_run() -> Callable[..., Path]:
    """`write_tiny_run(folder, attention=, with_ema=, config=)` writes a tiny run."""
    return write_run


@pytest.fixture(scope="module")
def tiny_run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of a tiny sparse run."""
    return write_run(tmp_path_factory.mktemp("run"))

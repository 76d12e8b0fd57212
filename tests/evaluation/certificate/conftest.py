"""A tiny Wan pipeline and an export of its transformer, and how tests certify them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.tiny_wan import make_pipeline
from tests.integrations import tiny
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.golden import write_golden
from vsa.checkpoints.sparse_config import SparseAttentionConfig
from vsa.checkpoints.wan import export_pretrained
from vsa.checkpoints.weight_source import open_network
from vsa.evaluation.certificate.subject import CertifySettings
from vsa.models.video_dit import VideoDiT

# latents of 2 x 6 x 10 are 2 x 3 x 5 tokens in 12 tiles
TILE, TILES, GRID, LATENTS = (1, 2, 2), 12, (2, 3, 5), (2, 6, 10)
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="session")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pipe = make_pipeline()
    tiny.stirred(pipe.transformer)
    folder = tmp_path_factory.mktemp("wan") / "wan"
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def export(wan: Path) -> Path:
    """The pipeline's transformer with gates that do something, and golden tensors."""
    dense, _ = open_network(wan)
    sizes: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 32, "freq_dim": 32}
    sizes |= {"in_channels": 16, "out_channels": 16, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 64}

    def attention(**layer: Any) -> VideoSparseAttention:
        return VideoSparseAttention(**layer, tile_thw=TILE, fine_gate=False)

    model = VideoDiT(attention=attention, **sizes)
    model.load_state_dict(dense.state_dict(), strict=False)
    for block in model.blocks:
        block.to_gate_compress.bias.data.fill_(0.5)
    config = SparseAttentionConfig(
        method="video_sparse",
        tile_thw=TILE,
        partition="cube",
        block_order="nested",
        fine_gate=False,
        gate_keys=tuple(name for name in model.state_dict() if "to_gate_" in name),
        grid_topk=((3, 4),),
        num_tiles=(TILES,),
        grids=(GRID,),
        guidance_scale=3.0,
    )
    folder = export_pretrained(model, wan.parent / "export", sparse=config)
    write_golden(open_network(folder)[0], folder)
    return folder


def settings(model: Path, **options: Any) -> CertifySettings:
    few = {"steps": 2, "timesteps": (500.0,), "repeats": 1, "queries": 30, "device": "cpu"}
    return CertifySettings(**{"model": str(model), **few, **options})


def record_of(page: Path) -> dict[str, Any]:
    return json.loads(page.with_suffix(".json").read_text())

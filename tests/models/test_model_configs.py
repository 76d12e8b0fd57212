from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from vsa.attention.full import FullAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.models.video_dit import VideoDiT

FOLDER = Path(__file__).parents[2] / "configs" / "model"
COARSE_GATE_ONLY = partial(VideoSparseAttention, fine_gate=False)

# published or counted by hand (training.md section 3), parameters in millions
COUNTS = [
    ("dit_tiny", FullAttention, 0.699),
    ("dit_60m", FullAttention, 58.47),
    ("dit_120m", FullAttention, 121.6),
    ("dit_410m", FullAttention, 416.3),
    ("dit_1_4b", FullAttention, 1419),
    ("wan_1_3b", FullAttention, 1419),
    ("wan_1_3b", COARSE_GATE_ONLY, 1490),
    ("wan_1_3b", VideoSparseAttention, 1561),
    ("wan_5b", FullAttention, 5000),
    ("wan_5b", COARSE_GATE_ONLY, 5283),
    ("wan_14b", FullAttention, 14290),
    ("wan_14b", COARSE_GATE_ONLY, 15340),
]


def build(name: str, attention) -> VideoDiT:
    with torch.device("meta"):
        return instantiate(OmegaConf.load(FOLDER / f"{name}.yaml"), attention=attention)


@pytest.mark.parametrize(("name", "attention", "millions"), COUNTS)
def test_parameter_counts(name, attention, millions):
    count = sum(p.numel() for p in build(name, attention).parameters()) / 1e6
    assert count == pytest.approx(millions, rel=5e-4)


def test_every_config_is_counted():
    # the sizes of these two are those of the weights
    assert {path.stem for path in FOLDER.glob("*.yaml")} - {"from_checkpoint", "diffusers"} == {
        name for name, _, _ in COUNTS
    }


def test_work_of_the_papers_120m_model():
    model = build("dit_120m", VideoSparseAttention)
    tokens = 16 * 32 * 32
    work = model.flops((16, 16, 64, 64), 32)
    # the paper's accounting: 2.84 GFLOP per token dense, and the attention term an eighth of it at 32 of 256 tiles
    assert work.dense_equivalent / tokens == pytest.approx(2.844e9, rel=1e-3)
    dense_attention = 3.5 * 4 * tokens * 768 * 12
    assert work.self_attention / tokens == pytest.approx(dense_attention / 8, rel=3e-3)


def test_work_of_the_410m_model_gives_the_papers_ratio():
    model = build("dit_410m", VideoSparseAttention)
    work = model.flops((16, 16, 64, 64), 32)
    dense = work.dense_equivalent
    sparse = dense - 3.5 * 4 * float(16384) ** 2 * 1024 * 24 * 7 / 8
    assert dense / sparse == pytest.approx(2.53, abs=0.02)

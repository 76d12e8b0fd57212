"""A sparse export in diffusers' layout, with the VAE and the text encoder of a Wan pipeline."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.data.tiny_wan import save_pipeline
from tests.evaluation.inspection.conftest import inspect_on_cpu
from vsa.attention.full import FullAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.sparse_config import SparseAttentionConfig
from vsa.checkpoints.wan import export_pretrained
from vsa.data.codecs import WanVAE
from vsa.data.toy_videos import render_clip
from vsa.data.video_files import write_video
from vsa.evaluation.attention_map import token_times
from vsa.evaluation.inspection.clip import open_clip, open_inspected
from vsa.models.video_dit import VideoDiT

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

SIZES = dict(
    num_attention_heads=2,
    attention_head_dim=12,
    text_dim=32,
    freq_dim=32,
    ffn_dim=32,
    num_layers=2,
    rope_max_seq_len=64,
)


def make(attention) -> VideoDiT:
    torch.manual_seed(0)
    model = VideoDiT(attention=attention, **SIZES)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make(partial(VideoSparseAttention, tile_thw=(1, 2, 2), fine_gate=False))
    config = SparseAttentionConfig(
        method="video_sparse",
        tile_thw=(1, 2, 2),
        partition="cube",
        block_order="nested",
        fine_gate=False,
        gate_keys=tuple(name for name in model.state_dict() if "to_gate_" in name),
        grid_topk=((3, 4),),
        num_tiles=(12,),
        # 5 frames of 48 x 80 pixels
        grids=((2, 3, 5),),
    )
    return export_pretrained(model, tmp_path_factory.mktemp("export") / "sparse", sparse=config)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline(tmp_path_factory.mktemp("wan") / "pipeline")


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    write_video(tmp_path / "b.mp4", render_clip(0, 1, size=(9, 60, 100))[0])
    return tmp_path / "b.mp4"


@pytest.mark.usefixtures("no_pictures")
def test_an_export_is_inspected_as_it_is_sampled(export: Path, pipeline: Path, clip: Path):
    folder, inspection, _ = inspect_on_cpu(
        export, clip, caption="a red circle", timesteps=[600], pipeline=str(pipeline)
    )
    assert folder == clip.parent / "inspect"
    assert (folder / "inspect.html").is_file()
    # of every layer its own top-k
    assert inspection.selected.sum(-1)[0].unique(dim=-1).flatten().tolist() == [3, 3, 4, 4]
    run = open_inspected(str(export), pipeline=str(pipeline))
    sample = open_clip(run, str(clip), "a red circle")
    assert sample.video.shape == (5, 48, 80, 3)
    vae = WanVAE(str(pipeline))
    assert torch.equal(sample.latents, vae.encode(sample.video))
    assert sample.latents.shape == (16, 2, 6, 10)
    assert run.text_padding == "zeros"
    assert torch.equal(run.latent_mean, vae.statistics[0])
    # the first latent frame holds one frame
    assert token_times(run.codec, 5, 1) == [0, 1, 1, 1, 1]


def test_what_an_export_cannot_be_inspected_with(export: Path, pipeline: Path, clip: Path, tmp_path: Path):
    dense, wan = export_pretrained(make(FullAttention), tmp_path / "dense", sparse=None), str(pipeline)
    for message, checkpoint, sample, options in (
        (r"name it with --pipeline .*`vsa convert --like", export, clip, {"caption": ""}),
        ("--weights ema applies to runs only", export, clip, {"weights": "ema", "pipeline": wan}),
        (r"sample id \(run .*sparse has no data", export, "some-id", {"pipeline": wan}),
        ("dense is a dense model: it selects no tiles", dense, clip, {"pipeline": wan}),
    ):
        with pytest.raises(ValueError, match=message):
            inspect_on_cpu(checkpoint, sample, **options)

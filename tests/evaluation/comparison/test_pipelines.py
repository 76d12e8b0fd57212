"""Captures and denoising runs of a diffusers pipeline, against its own processors under masks made by brute force."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.commands import run_command
from tests.data.tiny_wan import make_pipeline, make_vae
from tests.integrations import tiny
from tests.integrations.oracle import masked_attention
from vsa.attention.denoising import DenoisingPlan
from vsa.cli.compare_attention import compare_attention
from vsa.data.codecs import WanVAE
from vsa.data.toy_videos import render_clip
from vsa.data.video_files import write_video
from vsa.diffusion.flow_matching import noise_like
from vsa.evaluation.comparison import pipelines
from vsa.evaluation.comparison.methods import parse_methods
from vsa.evaluation.comparison.pipelines import PipelineModel, transformer_at
from vsa.evaluation.comparison.settings import CompareSettings
from vsa.evaluation.inspection.clip import Clip
from vsa.evaluation.video_metrics import psnr
from vsa.integrations.diffusers import applied_attention
from vsa.integrations.diffusers.pipeline import ClipSettings, generate_videos, open_pipeline
from vsa.sampling.pipeline import clip_seeds

# 5 frames of 48 x 80 pixels: 2 x 3 x 5 tokens in 10 tiles of 3
GRID, TILE, TILES = (2, 3, 5), (1, 3, 1), 10
CLIP = ClipSettings(size=(48, 80), frames=5, guidance=3.0, steps=3)
PROMPTS = ["a red circle moving left", "a cat"]


@pytest.fixture(scope="module")
def pipe() -> Any:
    pipeline = make_pipeline()
    tiny.stirred(pipeline.transformer)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def model(pipe, tmp_path_factory: pytest.TempPathFactory) -> PipelineModel:
    folder = tmp_path_factory.mktemp("pipeline")
    make_vae().save_pretrained(folder / "vae")
    return PipelineModel(pipe, WanVAE(str(folder)), source="here", latents=(2, 6, 10))


def asked(**options: Any) -> CompareSettings:
    return CompareSettings(
        pipeline="here", prompts=PROMPTS, steps=CLIP.steps, guidance=CLIP.guidance, seed=2, **options
    )


@contextmanager
def hearing() -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """q, k, v `[B, L, H, D]` of the self-attention calls of an untouched model."""
    plain, calls = F.scaled_dot_product_attention, []

    def attention(query, key, value, *rest, **more):
        if query.shape[2] == key.shape[2] == 30:
            calls.append(tuple(x.transpose(1, 2).clone() for x in (query, key, value)))
        return plain(query, key, value, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attention)
        yield calls


@torch.no_grad()
def test_captures_are_what_the_pipelines_own_layers_see(pipe, model):
    latents = tiny.randn(16, 2, 6, 10, seed=3)
    clip = Clip(name="a.mp4", caption=PROMPTS[0], video=torch.zeros(5, 48, 80, 3, dtype=torch.uint8), latents=latents)
    captures = model.capture([clip], layers=(0, 1), timesteps=(900.0, 250.0), seed=4)
    assert [(item.name, item.layer, item.timestep) for item in captures.items] == [
        ("a.mp4", layer, timestep) for timestep in (900, 250) for layer in (0, 1)
    ]
    text, _ = pipe.encode_prompt(PROMPTS[0], do_classifier_free_guidance=False, max_sequence_length=512)
    # those of the VAE
    mean, std = (torch.linspace(*ends, 16).view(1, -1, 1, 1, 1) for ends in ((-1, 1), (0.5, 3)))
    clean = (latents[None] - mean) / std
    noise = noise_like(clean, clip_seeds(4, [""]))
    with hearing() as calls:
        for sigma in (0.9, 0.25):
            x_t = (1 - sigma) * clean + sigma * noise
            pipe.transformer(x_t, torch.tensor([1000 * sigma]), text)
    assert len(calls) == len(captures.items) == 4
    for item, expected in zip(captures.items, calls, strict=True):
        assert (item.grid_thw, item.topk, dict(item.extra)) == (GRID, None, {})
        for ours, theirs in zip((item.q, item.k, item.v), expected, strict=True):
            assert ours.shape == (1, 30, 2, 12)
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    # controls: another layer, another noise level
    for other in (calls[1], calls[2]):
        assert (captures.items[0].q - other[0]).abs().max() > 0.01
    assert applied_attention(pipe.transformer) is None
    (alone,) = model.capture([clip], layers=(1,), timesteps=(250.0,), seed=4).items
    assert torch.equal(alone.q, captures.items[3].q)


def test_a_method_denoises_as_the_pipeline_under_its_mask(pipe, model):
    methods = parse_methods(["video_sparse topk=3", "video_sparse topk=10", "spatial_full"], tile_thw=TILE)
    steps: list[int] = []
    rows = model.denoise(PROMPTS[:1], methods, model.prepare(methods, asked()), steps.append)
    assert model.settings == CLIP
    assert sum(steps) == len(methods) * CLIP.steps
    full, few, every, spatial = rows
    assert (full.density, full.psnr, full.ssim) == (1, None, None)
    # a frame of two
    assert (every.density, spatial.density) == (1, 0.5)

    latents: list[Tensor] = []

    def sample() -> Tensor:
        seeds = clip_seeds(2, PROMPTS[:1]).tolist()
        with torch.no_grad():
            return generate_videos(pipe, PROMPTS[:1], seeds=seeds, keep=latents.append, **CLIP._asdict())

    # nothing is left in the pipeline
    dense = sample()
    with masked_attention(GRID, TILE, 3) as shares:
        masked = sample()
    assert few.density == pytest.approx(sum(shares) / len(shares))
    assert len(shares) == CLIP.steps * 2 * 2
    assert few.psnr == pytest.approx(psnr(masked, dense), abs=0.1)
    assert few.cosine == pytest.approx(float(F.cosine_similarity(*(x.flatten() for x in latents), dim=0)), abs=1e-3)
    # those of which the clips are decoded
    mean, std = (torch.tensor(pipe.vae.config[f"latents_{name}"]).view(1, -1, 1, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        decoded = pipe.vae.decode(latents[0] * std + mean).sample.clamp(-1, 1)
    pixels = ((decoded + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 4, 1)
    assert psnr(pixels, dense) > 60
    # control: other tiles are other clips
    with masked_attention(GRID, TILE, 1):
        assert abs(psnr(sample(), dense) - (few.psnr or 0)) > 0.3
    assert every.psnr is not None
    assert every.psnr > (few.psnr or 0) + 3
    assert all(row.seconds > 0 for row in rows)


@pytest.mark.slow
def test_a_plan_is_of_all_but_dense_attention(model):
    methods = parse_methods(["video_sparse topk=3", "spatial_full"], tile_thw=TILE)
    plan = model.prepare(methods, asked(denoising={"dense_steps": 1, "step_topk": [(2, 5)]}))
    rows = model.denoise(PROMPTS[:1], methods, plan)
    # all tiles, its own 3, and 5; attention that selects none is dense in the first step
    assert [row.density for row in rows] == pytest.approx([1, (1 + 0.3 + 0.5) / 3, (1 + 2 * 0.5) / 3])
    alone = model.denoise(PROMPTS[:1], methods, DenoisingPlan(dense_steps=3))
    assert [row.density for row in alone] == [1, 1, 1]
    assert min(row.psnr or 0 for row in alone[1:]) > 80


@pytest.mark.parametrize(
    ("methods", "options", "message"),
    [
        (["video_sparse topk=11"], {}, r"video_sparse topk=11: topk 11 is above the 10 tiles of \(2, 3, 5\)"),
        (["video_sparse topk=3"], {"dense_layers": (2,)}, "has layer 2, but the model's layers are 0 to 1"),
        (["spatial_full"], {"refresh": 2}, "denoising has refresh=2, but full, spatial_full selects no tiles"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_sampled(model, methods, options, message):
    with pytest.raises(ValueError, match=message):
        model.prepare(parse_methods(methods, tile_thw=TILE), asked(denoising=options))


def test_each_of_two_transformers_has_its_noise_levels():
    scheduler = SimpleNamespace(config=SimpleNamespace(num_train_timesteps=1000))
    both = SimpleNamespace(
        transformer="high", transformer_2="low", scheduler=scheduler, config=SimpleNamespace(boundary_ratio=0.9)
    )
    assert [transformer_at(both, t) for t in (1000, 900, 899, 0)] == ["high", "high", "low", "low"]
    both.transformer_2 = None
    assert [transformer_at(both, t) for t in (1000, 0)] == ["high", "high"]


@pytest.mark.slow
def test_a_pipeline_by_command(pipe, tmp_path: Path):
    pipe.save_pretrained(tmp_path / "wan")
    write_video(tmp_path / "a.mp4", render_clip(0, 0, size=(16, 64, 96))[0])
    (tmp_path / "a.txt").write_text("a red circle\n")
    words = ["--pipeline", tmp_path / "wan", "--clips", tmp_path / "a.mp4", "--prompt", PROMPTS[0], "--steps", "2"]
    words += ["--latents", "2", "6", "10", "--tile", *map(str, TILE), "--method", "video_sparse topk=3"]
    words += ["--timesteps", "500", "--repeats", "1", "--device", "cpu", "--save", tmp_path / "q.safetensors"]
    run_command(compare_attention, *words, "--out", tmp_path / "out")
    source = str(tmp_path / "wan")
    opened = PipelineModel(open_pipeline(source), WanVAE(source), source=source, latents=(2, 6, 10))
    assert opened.grid_thw == GRID
    record = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [(row["method"], row["layer"]) for row in record["rows"]] == [
        (name, layer) for layer in (0, 1) for name in ("full", "video_sparse topk=3")
    ]
    assert [row["density"] for row in record["denoising"]] == pytest.approx([1, 0.3])
    assert (record["sampling"]["frames"], record["sampling"]["size"]) == (5, [48, 80])
    again = ["--captures", tmp_path / "q.safetensors", "--tile", *map(str, TILE), "--method", "video_sparse topk=3"]
    run_command(compare_attention, *again, "--repeats", "1", "--device", "cpu", "--out", tmp_path / "again")
    file = json.loads((tmp_path / "again" / "comparison.json").read_text())
    assert [row["error_l1"] for row in file["rows"]] == pytest.approx([row["error_l1"] for row in record["rows"]])


@pytest.mark.parametrize("predicts", [True, False])
def test_densities_are_measured_where_they_differ(predicts, monkeypatch):
    values = iter((0.5, 0.25))
    monkeypatch.setattr(pipelines._Densities, "_measure", lambda *_: next(values))
    method = SimpleNamespace(predicts=predicts)
    densities = pipelines._Densities()
    for dense in (True, False, False):
        densities.add(method, 0, SimpleNamespace(topk=3, dense=dense), None, None, None, {})
    assert densities.calls == [1.0, 0.5, 0.25 if predicts else 0.5]

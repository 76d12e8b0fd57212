"""A tiny WanPipeline end to end, and sample.py --pipeline as a user runs it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from PIL import Image

from tests.data.tiny_wan import make_pipeline, make_vae
from tests.integrations import tiny
from tests.integrations.oracle import masked_attention
from tests.tiny_runs import vsa_command
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.sparse_config import SparseAttentionConfig, read_sparse_config, write_sparse_config
from vsa.checkpoints.wan import export_pretrained
from vsa.checkpoints.weight_source import open_network
from vsa.data.video_files import read_video
from vsa.diffusion.rollout import rollout_noise
from vsa.diffusion.sampler import guide, sample_few_step
from vsa.integrations.diffusers import applied_attention, apply, remove
from vsa.integrations.diffusers.few_step import FewStepScheduler
from vsa.integrations.diffusers.pipeline import (
    clip_settings,
    generate_videos,
    open_pipeline,
    token_grid,
    trained_settings,
)
from vsa.models.video_dit import VideoDiT
from vsa.sampling.pipeline import clip_seeds

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

# 5 frames of 48 x 80 pixels: latents 2 x 6 x 10, tokens 2 x 3 x 5
FRAMES, SIZE, GRID = 5, (48, 80), (2, 3, 5)
TILE, TILES = (1, 2, 2), 12
PROMPTS = ["a red circle moving left slowly", "a cat sits on the mat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pipe = make_pipeline()
    tiny.stirred(pipe.transformer)
    path = tmp_path_factory.mktemp("wan") / "pipeline"
    pipe.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def exported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pipeline's transformer with gates that do something."""
    dense, _ = open_network(folder)

    def attention(**layer: Any) -> VideoSparseAttention:
        return VideoSparseAttention(**layer, tile_thw=TILE, fine_gate=False)

    options = dict(num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16, text_dim=32)
    model = VideoDiT(attention=attention, **options, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=64)
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
    )
    return export_pretrained(model, tmp_path_factory.mktemp("export") / "sparse", sparse=config)


def latents(pipe: WanPipeline, guidance: float = 3.0) -> torch.Tensor:
    """Two steps with classifier-free guidance."""
    return pipe(
        prompt=PROMPTS[0],
        negative_prompt="",
        height=SIZE[0],
        width=SIZE[1],
        num_frames=FRAMES,
        num_inference_steps=2,
        guidance_scale=guidance,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).frames


@torch.no_grad()
def test_pipeline_equals_the_pipeline_under_a_tile_mask(folder):
    pipe = WanPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    dense = latents(pipe)
    with masked_attention(GRID, TILE, 3) as shares:
        expected = latents(pipe)
    # two layers, two steps, two passes of guidance
    assert len(shares) == 8
    apply(pipe.transformer, topk=3, tile_thw=TILE)
    actual = latents(pipe)
    assert tiny.difference(actual, expected) < 1e-5
    assert tiny.difference(actual, dense) > 1e-3
    remove(pipe.transformer)
    assert torch.equal(latents(pipe), dense)
    apply(pipe.transformer, sparsity=0, tile_thw=TILE)
    assert tiny.difference(latents(pipe), dense) < 1e-5


@torch.no_grad()
def test_dense_steps_of_a_pipeline_start_over_with_every_call(folder):
    pipe = open_pipeline(folder, topk=3, tile_thw=TILE, denoising={"dense_steps": 1})
    once = latents(pipe)
    assert torch.equal(latents(pipe), once)
    dense_pipe, sparse_pipe = open_pipeline(folder), open_pipeline(folder, topk=3, tile_thw=TILE)
    assert tiny.difference(once, latents(dense_pipe)) > 1e-4
    assert tiny.difference(once, latents(sparse_pipe)) > 1e-4
    both = open_pipeline(folder, topk=3, tile_thw=TILE, denoising={"dense_steps": 2})
    assert tiny.difference(latents(both), latents(dense_pipe)) < 1e-5


@torch.no_grad()
def test_sparse_transformer_is_found_in_a_pipeline_or_given(folder, exported, tmp_path):
    pipe = open_pipeline(folder, transformer=exported)
    expected = latents(pipe)
    # diffusers saves the gates; without their settings nobody may use or drop them
    pipe.save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"sparse_attention\.json is missing"):
        open_pipeline(tmp_path / "whole")
    (tmp_path / "whole" / "transformer" / "sparse_attention.json").write_bytes(
        (exported / "sparse_attention.json").read_bytes()
    )
    within = open_pipeline(tmp_path / "whole")
    assert applied_attention(within.transformer) is not None
    assert tiny.difference(latents(within), expected) < 1e-6
    # control: the same weights without their gates
    assert tiny.difference(latents(open_pipeline(folder, topk=3, tile_thw=TILE)), expected) > 1e-3


@torch.no_grad()
def test_a_clip_depends_on_its_own_seed_and_prompt(folder):
    pipe = open_pipeline(folder, topk=3, tile_thw=TILE)
    common = dict(size=SIZE, frames=FRAMES, steps=2, guidance=3.0)
    steps: list[int] = []
    both = generate_videos(pipe, PROMPTS, seeds=[1, 2], batch_size=2, progress=steps.append, **common)
    assert (both.shape, both.dtype, sum(steps)) == ((2, FRAMES, *SIZE, 3), torch.uint8, 4)
    apart = generate_videos(pipe, PROMPTS, seeds=[1, 2], batch_size=1, **common)
    assert (both.int() - apart.int()).abs().max() <= 1
    other = generate_videos(pipe, PROMPTS[:1], seeds=[2], **common)
    assert (other[0].int() - apart[0].int()).abs().max() > 1


def test_dtype_is_that_of_the_networks_but_the_vae(folder, exported):
    for options in (dict(topk=3, tile_thw=TILE), dict(transformer=exported)):
        pipe = open_pipeline(folder, dtype=torch.bfloat16, **options)
        dtypes = [m.dtype for m in (pipe.transformer, pipe.text_encoder, pipe.vae)]
        assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]
        videos = generate_videos(pipe, PROMPTS[:1], seeds=[1], size=SIZE, frames=FRAMES, steps=1, guidance=3.0)
        assert videos.float().std() > 1


def test_flow_shift_reaches_either_scheduler(folder, tmp_path):
    assert open_pipeline(folder, flow_shift=7.0).scheduler.config.shift == 7
    pipe = make_pipeline()
    pipe.scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=2.0)
    pipe.save_pretrained(tmp_path / "unipc")
    assert open_pipeline(tmp_path / "unipc", flow_shift=5.0).scheduler.config.flow_shift == 5
    assert open_pipeline(tmp_path / "unipc").scheduler.config.flow_shift == 2


def changed(exported: Path, folder: Path, **changes: Any) -> Path:
    """A copy of an export with other settings."""
    shutil.copytree(exported, folder)
    write_sparse_config(folder, replace(read_sparse_config(folder), **changes))
    return folder


def test_flow_shift_of_a_sparse_transformer_unless_another_is_given(folder, exported, tmp_path):
    transformer = changed(exported, tmp_path / "shifted", flow_shift=7.0)
    assert open_pipeline(folder, transformer=transformer).scheduler.config.shift == 7
    assert open_pipeline(folder, transformer=transformer, flow_shift=2.0).scheduler.config.shift == 2
    # without one the pipeline's stays
    assert open_pipeline(folder, transformer=exported).scheduler.config.shift == 3


@torch.no_grad()
def test_dense_steps_and_ranges_of_a_sparse_transformer(folder, exported, tmp_path):
    plain = latents(open_pipeline(folder, transformer=exported))
    every = latents(open_pipeline(folder, transformer=exported, sparsity=0.0))
    assert tiny.difference(plain, every) > 1e-4
    full = ((TILES, TILES),)
    # two steps: the first from pure noise, the second in the later half
    always = [
        {"dense_steps": 2},
        {"topk_ranges": ((0.0, 1.0, full),)},
        {"dense_steps": 1, "topk_ranges": ((0.5, 1.0, full),)},
    ]
    for i, changes in enumerate(always):
        pipe = open_pipeline(folder, transformer=changed(exported, tmp_path / f"always{i}", **changes))
        assert tiny.difference(latents(pipe), every) < 1e-5
    results = [plain, every]
    once = [
        {"dense_steps": 1},
        {"topk_ranges": ((0.5, 1.0, full),)},
    ]
    for i, changes in enumerate(once):
        results.append(latents(open_pipeline(folder, transformer=changed(exported, tmp_path / f"once{i}", **changes))))
    for i, one in enumerate(results):
        assert all(tiny.difference(one, other) > 1e-5 for other in results[:i])


def test_settings_of_a_clip_are_those_trained_with(folder, exported, tmp_path):
    assert clip_settings(open_pipeline(folder)) == ((480, 832), 81, 5.0, 50)
    # tokens 2 x 3 x 5 and 3 x 2 x 4
    more = dict(grids=(GRID, (3, 2, 4)), num_tiles=(TILES, 6), grid_topk=((3, 4), (2, 2)))
    pipe = open_pipeline(folder, transformer=changed(exported, tmp_path / "a", **more, guidance_scale=2.5))
    assert clip_settings(pipe) == (SIZE, FRAMES, 2.5, 50)
    assert clip_settings(pipe, frames=9, steps=3) == ((32, 64), 9, 2.5, 3)
    assert clip_settings(pipe, size=(32, 64)) == ((32, 64), 9, 2.5, 50)
    # a size of no trained grid: the reference says the rest
    assert clip_settings(pipe, size=(64, 64), guidance=1.0) == ((64, 64), FRAMES, 1.0, 50)
    for size, frames, grid in ((SIZE, FRAMES, GRID), ((32, 64), 9, (3, 2, 4)), ((16, 16), 1, (1, 1, 1))):
        assert token_grid(pipe, size, frames) == grid
    additive = changed(exported, tmp_path / "b", guidance_scale=2.5, guidance_form="additive")
    # cond + 2.5 (cond - uncond) is 3.5 in the form of the pipeline
    assert clip_settings(open_pipeline(folder, transformer=additive)).guidance == 3.5


STEPS = (1000.0, 757.0, 2500 / 6)
SEEDS = torch.tensor([1, 2**62 + 1])


@pytest.fixture(scope="module")
def distilled(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export that says it is sampled at `STEPS`."""
    # the shift has no effect beside a list
    return changed(exported, tmp_path_factory.mktemp("few") / "distilled", step_list=STEPS, flow_shift=7.0)


def few_step_latents(pipe: Any, prompts: list[str], seeds: torch.Tensor, guidance: float = 1.0) -> torch.Tensor:
    noise = pipe.scheduler.start(torch.empty(len(seeds), 16, 2, 6, 10), seeds)
    clip = dict(height=SIZE[0], width=SIZE[1], num_frames=FRAMES, guidance_scale=guidance)
    return pipe(prompt=prompts, latents=noise, output_type="latent", **clip).frames


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_pipeline_samples_a_list_of_steps_as_the_training_does(folder, distilled, guidance, dtype):
    pipe = open_pipeline(folder, transformer=distilled, dtype=dtype)
    actual = few_step_latents(pipe, PROMPTS, SEEDS, guidance)
    cond, uncond = pipe.encode_prompt(PROMPTS, ["", ""], max_sequence_length=512)

    def velocity(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        def of(text: torch.Tensor) -> torch.Tensor:
            return pipe.transformer(x.to(dtype), timestep, text.to(dtype), return_dict=False)[0]

        return of(cond) if guidance == 1 else guide(of(cond), of(uncond), guidance)

    noise = rollout_noise(actual, SEEDS, 0)
    expected = sample_few_step(velocity, noise, STEPS, fresh=partial(rollout_noise, actual, SEEDS))
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected)
    # controls: other fresh noise, the list without its last step, other weights of the passes
    other = sample_few_step(velocity, noise, STEPS, fresh=partial(rollout_noise, actual, SEEDS + 1))
    assert tiny.difference(other, actual) > 1e-2
    shorter = sample_few_step(velocity, noise, STEPS[:2], fresh=partial(rollout_noise, actual, SEEDS))
    assert tiny.difference(shorter, actual) > 1e-2
    assert tiny.difference(few_step_latents(pipe, PROMPTS, SEEDS, 2.0), actual) > 1e-3


@pytest.mark.parametrize("steps", [(700.0,), (1000.0, 999.0, 2500 / 3, 0.5)], ids=["one", "four"])
def test_steps_of_the_scheduler_are_those_of_the_sampler(steps):
    noise = rollout_noise(torch.empty(2, 3, 4), SEEDS, 0)

    def velocity(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return (x + timestep[:, None, None] / 300).cos().bfloat16()

    scheduler = FewStepScheduler(steps)
    x = scheduler.start(torch.empty(2, 3, 4), SEEDS)
    scheduler.set_timesteps(50, device="cpu")
    for t in scheduler.timesteps:
        x = scheduler.step(velocity(x, t.expand(2)), t, x).prev_sample
    fresh = partial(rollout_noise, noise, SEEDS)
    assert torch.equal(x, sample_few_step(velocity, noise, steps, fresh=fresh))
    # control: another level
    assert not torch.equal(x, sample_few_step(velocity, noise, (*steps[:-1], steps[-1] / 2), fresh=fresh))


@torch.no_grad()
def test_a_few_step_clip_depends_on_its_own_seed_and_prompt(folder, distilled):
    pipe = open_pipeline(folder, transformer=distilled)
    both = few_step_latents(pipe, PROMPTS, SEEDS)
    for i in range(2):
        alone = few_step_latents(pipe, PROMPTS[i : i + 1], SEEDS[i : i + 1])
        assert tiny.difference(alone[0], both[i]) < 1e-5
        assert tiny.difference(alone[0], both[1 - i]) > 1e-2

    passes: list[int] = []
    pipe.transformer.register_forward_pre_hook(lambda module, args: passes.append(1))
    steps: list[int] = []
    common = dict(size=SIZE, frames=FRAMES, guidance=clip_settings(pipe).guidance)
    videos = generate_videos(pipe, PROMPTS, seeds=SEEDS.tolist(), batch_size=2, progress=steps.append, **common)
    # one pass per step, without a second one for guidance
    assert (len(passes), sum(steps)) == (3, 6)
    noise = pipe.scheduler.start(torch.empty(2, 16, 2, 6, 10), SEEDS)
    clip = dict(height=SIZE[0], width=SIZE[1], num_frames=FRAMES, guidance_scale=1.0)
    expected = pipe(prompt=PROMPTS, latents=noise, output_type="np", **clip).frames
    assert (videos.numpy() == (expected * 255).round().astype("uint8")).all()
    apart = generate_videos(pipe, PROMPTS, seeds=SEEDS.tolist(), batch_size=1, **common)
    assert (videos.int() - apart.int()).abs().max() <= 1
    swapped = generate_videos(pipe, PROMPTS, seeds=SEEDS.flip(0).tolist(), batch_size=2, **common)
    assert (videos.int() - swapped.int()).abs().max() > 1


def test_settings_of_a_few_step_clip(folder, distilled, exported, tmp_path):
    # nothing is said about guidance: one pass, not the five of other models
    assert clip_settings(open_pipeline(folder, transformer=distilled)) == (SIZE, FRAMES, 1.0, 3)
    transformer = changed(distilled, tmp_path / "guided", guidance_scale=2.0)
    pipe = open_pipeline(folder, transformer=transformer)
    assert clip_settings(pipe) == (SIZE, FRAMES, 2.0, 3)
    assert clip_settings(pipe, guidance=4.0).guidance == 4
    reason = r"does not apply: the transformer is distilled to the steps \[1000\.0, 757\.0, 416\.6"
    with pytest.raises(ValueError, match=f"steps 3 {reason}"):
        clip_settings(pipe, steps=3)
    with pytest.raises(ValueError, match=f"steps 9 {reason}"):
        generate_videos(pipe, PROMPTS[:1], seeds=[1], size=SIZE, frames=FRAMES, steps=9, guidance=1.0)
    with pytest.raises(ValueError, match=rf"flow shift 5\.0 {reason}"):
        open_pipeline(folder, transformer=distilled, flow_shift=5.0)
    rising = changed(exported, tmp_path / "rising", step_list=(500.0, 757.0))
    with pytest.raises(ValueError, match=r"timesteps must be strictly decreasing .* got \[500\.0, 757\.0\]"):
        open_pipeline(folder, transformer=rising)


@torch.no_grad()
def test_a_few_step_pipeline_does_not_run_without_seeds_of_its_own(folder, distilled):
    pipe = open_pipeline(folder, transformer=distilled)
    message = r"a few-step generator needs the seeds of its clips: scheduler\.start\(\) before each call"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            latents(pipe)
        # seeds of one call are not those of the next
        few_step_latents(pipe, PROMPTS[:1], SEEDS[:1])
    for batch in (1, 2):
        common = dict(size=SIZE, frames=FRAMES, guidance=1.0, batch_size=batch)
        with pytest.raises(ValueError, match="one seed for each of the 2 prompts, got 1"):
            generate_videos(pipe, PROMPTS, seeds=[1], **common)


@torch.no_grad()
def test_a_few_step_pipeline_is_saved_with_its_steps(folder, distilled, tmp_path):
    pipe = open_pipeline(folder, transformer=distilled)
    expected = few_step_latents(pipe, PROMPTS, SEEDS)
    pipe.save_pretrained(tmp_path / "sparse")
    shutil.copy(distilled / "sparse_attention.json", tmp_path / "sparse" / "transformer")
    assert torch.equal(few_step_latents(open_pipeline(tmp_path / "sparse"), PROMPTS, SEEDS), expected)
    # a dense generator has no other file for them
    dense = open_pipeline(folder)
    dense.scheduler = FewStepScheduler([1000, 500])
    expected = few_step_latents(dense, PROMPTS, SEEDS)
    dense.save_pretrained(tmp_path / "dense")
    again = open_pipeline(tmp_path / "dense")
    assert torch.equal(few_step_latents(again, PROMPTS, SEEDS), expected)
    assert clip_settings(again)[2:] == (1.0, 2)
    with pytest.raises(ValueError, match=r"FewStepScheduler has no flow shift to set to 5\.0"):
        open_pipeline(tmp_path / "dense", flow_shift=5.0)


@pytest.mark.parametrize("settings", [True, False], ids=["with_settings", "without"])
@pytest.mark.parametrize("hub", [False, True], ids=["folder", "hub"])
def test_gates_in_the_second_transformer_are_not_dropped(hub, settings, folder, exported, tmp_path, monkeypatch):
    pipe = WanPipeline.from_pretrained(folder)
    two = tmp_path / "two"
    WanPipeline(**{**pipe.components, "transformer_2": pipe.transformer}, boundary_ratio=0.5).save_pretrained(two)
    # two dense ones are fine, and a sparse one in place of each
    assert open_pipeline(two).transformer_2 is not None
    given = open_pipeline(two, transformer_2=exported)
    assert [applied_attention(model) is None for model in (given.transformer, given.transformer_2)] == [True, False]
    shutil.rmtree(two / "transformer_2")
    shutil.copytree(exported, two / "transformer_2")
    if not settings:
        (two / "transformer_2" / "sparse_attention.json").unlink()
    source: Any = two
    if hub:
        source, load = "somebody/something", WanPipeline.from_pretrained
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda hub_id, allow_patterns: str(two))
        monkeypatch.setattr(WanPipeline, "from_pretrained", lambda name, **options: load(two, **options))
    if not settings:
        with pytest.raises(ValueError, match=r"sparse_attention.json"):
            open_pipeline(source)
        return
    both = open_pipeline(source, transformer=exported)
    clip = {"seeds": [1], "size": (48, 80), "frames": 5, "steps": 4, "guidance": 1.0}
    videos = {}
    for name, each in {"given": given, "own": open_pipeline(source), "both": both}.items():
        latents: list[torch.Tensor] = []
        generate_videos(each, PROMPTS[:1], keep=latents.append, **clip)
        videos[name] = latents[0]
    assert torch.equal(videos["given"], videos["own"])
    # the control: a sparse one for high noise too
    assert not torch.equal(videos["both"], videos["own"])
    assert trained_settings(both) is not None
    with pytest.raises(ValueError, match=r"transformer_2=.* does not apply: .* has one transformer"):
        open_pipeline(folder, transformer_2=exported)


SMALL = ["--size", "48", "80", "--frames", "5", "--steps", "2", "--device", "cpu", "--guidance", "3"]


def test_sample_writes_clips_and_what_made_them(folder, exported, tmp_path):
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    shared = ["--pipeline", str(folder), *SMALL, *prompts, "--seed", "3", "--shift", "5"]
    runs = {
        "dense": [],
        "put_in": ["--topk", "3", "--tile", "1", "2", "2", "--dense-steps", "1"],
        "exported": ["--transformer", str(exported)],
        "exported_half": ["--transformer", str(exported), "--sparsity", "0.5"],
    }
    records = {}
    for name, options in runs.items():
        vsa_command("sample", *shared, *options, "--out", str(tmp_path / name))
        records[name] = json.loads((tmp_path / name / "samples.json").read_text())
        for clip in records[name]["clips"]:
            video, fps = read_video(tmp_path / name / clip["mp4"])
            assert (tuple(video.shape), fps) == ((5, 48, 80, 3), 16)
        assert (tmp_path / name / "contact_sheet.png").is_file()
    assert [clip["prompt"] for clip in records["dense"]["clips"]] == PROMPTS
    assert {name: records["put_in"][name] for name in ("seed", "steps", "guidance", "flow_shift", "dense_steps")} == {
        "seed": 3,
        "steps": 2,
        "guidance": 3,
        "flow_shift": 5,
        "dense_steps": 1,
    }
    assert records["exported"]["step_list"] is None
    settings = {name: record["attention"].get("transformer", {}) for name, record in records.items()}
    assert {
        name: (values.get("topk"), values.get("num_tiles"), values.get("gates")) for name, values in settings.items()
    } == {
        "dense": (None, None, None),
        "put_in": (3, TILES, []),
        "exported": ([3, 4], TILES, ["to_gate_compress"]),
        "exported_half": (6, TILES, ["to_gate_compress"]),
    }
    clips = {(tmp_path / name / "000-a-red-circle-moving-left-slowly.mp4").read_bytes() for name in runs}
    assert len(clips) == len(runs)


def test_sample_takes_what_a_sparse_transformer_was_trained_with(folder, exported, tmp_path, capsys):
    settings = dict(flow_shift=7.0, guidance_scale=2.5, dense_steps=1, dense_layers=(1,))
    own = changed(exported, tmp_path / "own", **settings)
    shared = ["--pipeline", str(folder), "--transformer", str(own), "--prompt", "x", "--steps", "2", "--device", "cpu"]
    vsa_command("sample", *shared, "--out", str(tmp_path / "a"))
    record = json.loads((tmp_path / "a" / "samples.json").read_text())
    expected = dict(size=list(SIZE), frames=FRAMES, guidance=2.5, flow_shift=7, dense_steps=1, dense_layers=[1])
    assert {name: record[name] for name in expected} == expected
    assert record["attention"]["transformer"]["grid_thw"] == list(GRID)
    assert record["attention"]["transformer"]["topk"] == [3, TILES]
    assert "was not trained on the clip's grid" not in capsys.readouterr().out

    options = ["--size", "32", "64", "--frames", "9", "--guidance", "1", "--shift", "2"]
    vsa_command("sample", *shared, *options, "--out", str(tmp_path / "b"))
    record = json.loads((tmp_path / "b" / "samples.json").read_text())
    assert [record[name] for name in ("size", "frames", "guidance", "flow_shift")] == [[32, 64], 9, 1, 2]
    lines = [line for line in capsys.readouterr().out.splitlines() if "trained on" in line]
    assert lines == ["the model was not trained on the clip's grid of 3x2x4 tokens, but on: 2x3x5"]


def test_sample_runs_a_list_of_steps(folder, distilled, tmp_path):
    shared = ["--pipeline", str(folder), "--transformer", str(distilled), "--device", "cpu"]
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    vsa_command("sample", *shared, *prompts, "--seed", "3", "--out", str(tmp_path / "a"))
    record = json.loads((tmp_path / "a" / "samples.json").read_text())
    expected = dict(
        steps=3, step_list=list(STEPS), guidance=1, flow_shift=None, scheduler="FewStepScheduler", size=list(SIZE)
    )
    assert {name: record[name] for name in expected} == expected
    # a clip is the same in another batch, as the file shows
    vsa_command("sample", *shared, *prompts, "--seed", "3", "--batch-size", "2", "--out", str(tmp_path / "b"))
    shown = [("a", 1), ("b", 1), ("a", 0)]
    one, two, other = (read_video(tmp_path / name / record["clips"][i]["mp4"])[0].float() for name, i in shown)
    # the mean, because the mp4 makes more of a level that rounds the other way
    assert (one - two).abs().mean() < 0.2
    # control: the other clip
    assert (one - other).abs().mean() > 0.5
    for option, value, name in (("--steps", "50", "steps 50"), ("--shift", "5", r"flow shift 5\.0")):
        with pytest.raises(ValueError, match=rf"{name} does not apply: .* \[1000\.0, 757\.0, 416\.6"):
            vsa_command("sample", *shared, *prompts, option, value, "--out", str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "50", "80"], "height and width must be multiples of 16, got 50x80"),
        (["--frames", "6"], r"frames must be 1 \+ a multiple of 4, got 6"),
        (["--topk", "99", "--tile", "1", "2", "2"], "topk=99 is above the number of tiles, 12"),
        (["--topk", "2", "--sparsity", "0.5"], "exactly one of topk and sparsity"),
        (
            ["--method", "spargel", "--topk", "2"],
            "attention=spargel: unknown method, expected one of compressed_kv, .*, video_sparse",
        ),
        (["--method", "neighborhood window_thw=[3,3,3]"], "window of time must be at most its 2 tokens, got 3"),
        (
            ["--method", "neighborhood window=3"],
            "attention.window=3: unknown setting, did you mean",
        ),
        (["--method", "neighborhood window_thw=0"], "attention.window_thw=0: expected a list of 3 values"),
        (["--method", "full window_thw=[2,3,3]"], r"attention.window_thw=\[2,3,3\]: unknown setting"),
        (
            ["--method", "video_sparse tile_thw=[2,2,2]"],
            r"--method video_sparse: its settings are --tile, .*, got tile_thw=\[2,2,2\]",
        ),
        (["--method", "staged"], r"parameters to train \(to_gate_compress\): load_sparse\(folder\) loads a"),
        (["--dense-steps", "2"], "exactly one of topk and sparsity"),
        (["--latent-shape", "1", "2", "3", "4"], "--latent-shape applies to a run folder only"),
        (["--attention"], "--attention applies to a run folder only"),
    ],
)
def test_sample_refuses_and_writes_nothing(folder, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        vsa_command(
            "sample", "--pipeline", str(folder), "--prompt", "x", *SMALL, "--out", str(tmp_path / "out"), *options
        )
    assert not (tmp_path / "out").exists()


def test_sample_with_windows(folder, tmp_path):
    words = ["--method", "neighborhood window_thw=[2,3,2] stride_thw=[1,1,2]"]
    vsa_command("sample", "--pipeline", str(folder), "--prompt", "x", *SMALL, *words, "--out", str(tmp_path / "out"))
    record = json.loads((tmp_path / "out" / "samples.json").read_text())
    description = record["attention"]["transformer"]
    assert (description["method"], description["window_thw"], description["stride_thw"]) == (
        "NeighborhoodAttention",
        [2, 3, 2],
        [1, 1, 2],
    )


def test_sample_refuses_a_wrong_source(folder, exported, tmp_path):
    with pytest.raises(ValueError, match="expected a run folder or --pipeline, got run=None and pipeline=None"):
        vsa_command("sample", "--prompt", "x")
    with pytest.raises(ValueError, match="expected a run folder or --pipeline, got run=a and pipeline=b"):
        vsa_command("sample", "a", "--pipeline", "b", "--prompt", "x")
    with pytest.raises(ValueError, match="--tile applies to --pipeline only"):
        vsa_command("sample", "run", "--tile", "1", "2", "2", "--prompt", "x")
    with pytest.raises(ValueError, match="no such folder"):
        vsa_command("sample", "--pipeline", str(tmp_path / "nowhere"), "--prompt", "x")
    with pytest.raises(ValueError, match=r"sparse_attention\.json is missing"):
        vsa_command("sample", "--pipeline", str(folder), "--transformer", str(folder), "--prompt", "x")
    with pytest.raises(ValueError, match=r"tile_thw=\(1, 2, 2\) does not apply to the sparse transformer"):
        vsa_command(
            "sample",
            "--pipeline",
            str(folder),
            "--transformer",
            str(exported),
            "--tile",
            "1",
            "2",
            "2",
            "--prompt",
            "x",
        )
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(ValueError, match="expected a WanPipeline, got FluxPipeline"):
        vsa_command("sample", "--pipeline", str(tmp_path), "--prompt", "x")


@torch.no_grad()
def test_a_pipeline_continues_a_picture(folder, tmp_path):
    """Wan2.2 TI2V: the first latent frame is clean and at timestep 0, against diffusers' own pipeline."""
    sizes = dict(num_attention_heads=2, attention_head_dim=12, in_channels=48, out_channels=48, text_dim=32)
    torch.manual_seed(0)
    model = WanTransformer3DModel(**sizes, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=64)
    parts = make_pipeline().components | {"transformer": tiny.stirred(model), "vae": make_vae(channels=48)}
    WanPipeline(**parts, expand_timesteps=True).save_pretrained(tmp_path / "ti2v")
    pictures = [Image.fromarray(np.random.default_rng(i).integers(0, 256, (64, 96, 3), np.uint8)) for i in range(2)]
    for i, picture in enumerate(pictures):
        picture.save(tmp_path / f"{i}.png")
    words = ["--size", "64", "96", "--frames", "5", "--steps", "2", "--guidance", "3", "--device", "cpu"]
    words += ["--prompt", PROMPTS[0], "--prompt", PROMPTS[1]]
    given = ["--first-frame", str(tmp_path / "0.png"), "--first-frame", str(tmp_path / "1.png")]
    clips = {}
    for name, own in {"dense": given, "whole": [*given, "--sparsity", "0", "--tile", "1", "2", "2"]}.items():
        out = tmp_path / name
        with mock.patch("vsa.sampling.clip_folder.write_clips") as written:
            vsa_command("sample", "--pipeline", str(tmp_path / "ti2v"), *words, *own, "--out", str(out))
        clips[name] = written.call_args.args[2].int()
    pipe = WanImageToVideoPipeline.from_pretrained(tmp_path / "ti2v", image_encoder=None, image_processor=None)
    pipe.set_progress_bar_config(disable=True)
    clip = dict(height=64, width=96, num_frames=5, num_inference_steps=2, guidance_scale=3.0, output_type="np")
    for i, seed in enumerate(clip_seeds(0, PROMPTS).tolist()):
        own = dict(prompt=PROMPTS[i], negative_prompt="", **clip)
        frames = []
        for picture in pictures:
            result = pipe(picture, generator=torch.Generator().manual_seed(seed), **own)
            frames.append(torch.from_numpy(result.frames * 255).round())
        for name in clips:
            assert (clips[name][i] - frames[i][0]).abs().max() <= 1
        # control: the other picture
        assert (clips["dense"][i] - frames[1 - i][0]).abs().max() > 5
    with pytest.raises(ValueError, match=r"--first-frame needs a pipeline with expand_timesteps"):
        vsa_command("sample", "--pipeline", str(folder), *words, *given, "--out", str(tmp_path / "no"))

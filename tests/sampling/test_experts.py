"""The two experts of Wan2.2 A14B: runs of each, one pipeline of both, against diffusers' WanPipeline."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file
from torch import Tensor

from tests.commands import run_command
from tests.data.tiny_wan import make_pipeline
from tests.integrations import tiny
from tests.tiny_runs import make_config, vsa_command, write_run
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.cli.convert import convert
from vsa.diffusion.flow_matching import noise_like
from vsa.evaluation.video_metrics import psnr
from vsa.integrations.diffusers import applied_attention
from vsa.integrations.diffusers.pipeline import open_pipeline
from vsa.sampling.experts import with_low
from vsa.sampling.pipeline import clip_seeds, encode_prompts, generate, load_run, sample_latents

BOUNDARY, HIGH, LOW = 0.875, [0.875, 1.0], [0.0, 0.875]
STEPS, SHIFT, PROMPTS = 4, 3.0, ["a red circle", "a blue square"]
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of two dense experts in the size of the runs."""
    pipe, sizes = make_pipeline(), make_config()["model"]
    torch.manual_seed(1)
    own: dict[str, Any] = {name: value for name, value in sizes.items() if name != "_target_"}
    parts = {name: WanTransformer3DModel(**own) for name in ("transformer", "transformer_2")}
    for part in parts.values():
        tiny.stirred(part)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    folder = tmp_path_factory.mktemp("wan") / "a14b"
    WanPipeline(**pipe.components | parts | {"scheduler": scheduler}, boundary_ratio=BOUNDARY).save_pretrained(folder)
    return folder


def run_of(
    folder: Path, levels: list[float], attention: str = "video_sparse", seed: int = 0, topk: int | None = None
) -> Path:
    own = make_config(attention=attention)
    if topk is not None:
        own["sparsity"] |= {"topk": topk, "sparsity": None}
    own["data"]["text_padding"] = "zeros"
    own["task"]["objective"]["noise_range"] = levels
    return write_run(folder, attention=attention, config=own, seed=seed)


def latents_of(pipe: Any, prompts: list[str], noise: Tensor, encoder: Any) -> Tensor:
    """Clips of a pipeline from the noise, at the noise levels of our Euler steps, with guidance 3."""
    set_timesteps = partial(type(pipe.scheduler).set_timesteps, pipe.scheduler)
    sigmas = torch.linspace(1, 0, STEPS + 1)[:-1].tolist()
    pipe.scheduler.set_timesteps = lambda steps, device: set_timesteps(sigmas=sigmas, device=device)
    pipe.set_progress_bar_config(disable=True)
    texts = [encode_prompts(encoder, list(part), "cpu", "zeros")[0] for part in (prompts, [""] * len(prompts))]
    names = ("prompt_embeds", "negative_prompt_embeds")
    size = {"height": 64, "width": 64, "num_frames": 13}
    # clips of the tiny VAE are as wide as their latents
    size |= {name: noise.shape[axis] * pipe.vae_scale_factor_spatial for name, axis in (("height", 3), ("width", 4))}
    clip = dict(zip(names, texts, strict=True), latents=noise.clone(), guidance_scale=3.0, num_inference_steps=STEPS)
    return pipe(**clip, **size, output_type="latent").frames


@torch.no_grad()
@pytest.mark.parametrize("attention", ["full", "video_sparse"])
def test_both_experts_are_exported_and_sampled_as_by_diffusers(wan, tmp_path, attention):
    high, low = (run_of(tmp_path / f"{seed}", range_, attention, seed) for seed, range_ in enumerate((HIGH, LOW)))
    out = tmp_path / "out"
    run_command(convert, high, out, "--transformer-2", low, "--pipeline", wan)
    for name, run in (("transformer", high), ("transformer_2", low)):
        written, trained = load_file(out / name / WEIGHTS), resolve_checkpoint(run).open("ema")
        assert written.keys() == set(trained.keys)
        assert all(torch.equal(value, trained.read(key)) for key, value in written.items())
    copied = {path.relative_to(wan) for path in wan.rglob("*") if path.is_file() and "transformer" not in str(path)}
    assert all((out / path).read_bytes() == (wan / path).read_bytes() for path in copied)
    assert json.loads((out / "model_index.json").read_text())["boundary_ratio"] == BOUNDARY

    runs = [load_run(run, device="cpu") for run in (high, low)]
    both = with_low(*runs)
    settings = both.settings(steps=STEPS, guidance=3.0, flow_shift=SHIFT)
    seeds = clip_seeds(0, PROMPTS)
    sample = partial(sample_latents, text_encoder=both.text_encoder, prompts=PROMPTS, seeds=seeds, settings=settings)
    noise = noise_like(torch.empty(2, *settings.latent_shape), seeds)
    pipe = WanPipeline.from_pretrained(out) if attention == "full" else open_pipeline(out)
    assert (applied_attention(pipe.transformer_2) is None) == (attention == "full")
    expected = latents_of(pipe, PROMPTS, noise, both.text_encoder)
    assert tiny.difference(sample(both), expected) < 1e-5
    # controls: one expert alone, and the experts exchanged
    for other in (run.model for run in runs):
        assert tiny.difference(sample(other), expected) > 1e-2
    pipe.transformer, pipe.transformer_2 = pipe.transformer_2, pipe.transformer
    assert tiny.difference(latents_of(pipe, PROMPTS, noise, both.text_encoder), expected) > 1e-2


def test_one_expert_takes_its_place_by_its_noise_levels(wan, tmp_path):
    low = run_of(tmp_path / "low", [0.1, 0.8])
    run_command(convert, low, tmp_path / "out", "--pipeline", wan, "--no-golden")
    assert (tmp_path / "out" / "transformer_2" / "sparse_attention.json").is_file()
    assert (tmp_path / "out" / "transformer" / WEIGHTS).read_bytes() == (wan / "transformer" / WEIGHTS).read_bytes()


def test_runs_of_experts_are_sampled_and_evaluated_together(tmp_path):
    high, low = (run_of(tmp_path / f"{seed}", range_, seed=seed) for seed, range_ in enumerate((HIGH, LOW)))
    words = ["--prompt", PROMPTS[0], "--steps", "2", "--device", "cpu"]
    vsa_command("sample", str(high), "--transformer-2", str(low), *words)
    record = json.loads((high / "samples" / "samples.json").read_text())
    assert record["transformer_2"] == str(resolve_checkpoint(low).path)
    vsa_command("evaluate", str(high), "--transformer-2", str(low), *words, "--no-val-loss", "--seed", "0")
    (path,) = (high / "evaluation").glob("*.json")
    both = with_low(load_run(high, device="cpu"), load_run(low, device="cpu"))
    for run, equal in ((both, True), (replace(both, low=None), False)):
        settings = [run.settings(steps=2, at=at) for at in ("current", "dense")]
        expected = psnr(*(generate(run, PROMPTS[:1], own) for own in settings))
        assert (json.loads(path.read_text())["metrics"]["psnr"] == pytest.approx(expected, abs=1e-3)) == equal


def test_a_wrong_expert_is_one_line(wan, tmp_path):
    high, low, whole = (
        run_of(tmp_path / name, levels) for name, levels in zip("abc", (HIGH, LOW, [0.0, 1.0]), strict=True)
    )
    wide = run_of(tmp_path / "wide", [0.5, 1.0])
    out, words = tmp_path / "out", ["--prompt", "x", "--device", "cpu"]
    cases = {
        r"b/.* is an expert for noise levels 0 to 0.875, .*a14b/transformer is for 0.875 to 1$": [
            low,
            "--transformer-2",
            high,
        ],
        r"a/.* for noise levels 0.875 to 1, .*a14b/transformer_2 is for 0 to 0.875$": [high, "--transformer-2", high],
        r"wide/.* for noise levels 0.5 to 1, .*a14b/transformer_2 is for 0 to 0.875$": [wide],
        r"c/.* does not say its noise levels, and .* has two transformers: give": [whole],
    }
    for message, own in cases.items():
        with pytest.raises(ValueError, match=message):
            run_command(convert, own[0], out, *own[1:], "--pipeline", wan)
    for message, own in {
        "--transformer-2 .* needs --pipeline": ["--transformer-2", low],
        "expected a folder with model_index.json": ["--pipeline", tmp_path],
        "makes a pipeline of diffusers, got --to wan": ["--pipeline", wan, "--to", "wan"],
    }.items():
        with pytest.raises(ValueError, match=message):
            run_command(convert, high, out, *own)
    other = run_of(tmp_path / "other", HIGH)
    make_pipeline().save_pretrained(tmp_path / "one")
    with pytest.raises(ValueError, match="has one transformer"):
        run_command(convert, other, out, "--pipeline", tmp_path / "one", "--transformer-2", low)
    with pytest.raises(ValueError, match=r"config.json has .*attention_head_dim=12, the model has 16"):
        run_command(convert, other, out, "--pipeline", tmp_path / "one")
    assert not out.exists()
    for first, second in ((low, high), (high, whole), (wide, low)):
        with pytest.raises(ValueError, match=r"are for noise levels .*: expected the expert of high noise, then with"):
            vsa_command("sample", str(first), "--transformer-2", str(second), *words)
    few = run_of(tmp_path / "few", LOW, topk=3)
    with pytest.raises(ValueError, match=r"topk=.*: both experts need the same"):
        vsa_command("sample", str(high), "--transformer-2", str(few), *words)
    vsa_command("sample", str(high), "--transformer-2", str(few), *words, "--steps", "1", "--sparsity", "0")

"""One denoising plan in a run, in its export and in a diffusers transformer: the same clips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations import tiny
from tests.tiny_runs import make_config, vsa_command, write_run
from vsa.attention.denoising import DenoisingPlan
from vsa.checkpoints.convert import Conversion, convert
from vsa.checkpoints.sparse_config import read_sparse_config
from vsa.checkpoints.weight_source import open_weights
from vsa.diffusion.flow_matching import noise_like
from vsa.diffusion.sampler import euler_sigmas, guide, sample_euler
from vsa.integrations.diffusers import (
    applied_attention,
    apply,
    load_sparse,
    percents_of,
    plan_of_percents,
    plan_of_ratios,
    ratios_of,
    remove,
)
from vsa.sampling.pipeline import SampleSettings, SamplingPipeline, clip_seeds, encode_prompts, load_run, sample_latents

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

PROMPTS = ["a red circle moving left slowly", "a blue square moving up"]
PLANS: dict[str, dict[str, Any]] = {
    "refresh": {"dense_steps": 1, "refresh": 2},
    "ranges, shared": {"topk_ranges": [[0, 0.6, 5]], "sparsity_ranges": [[0.8, 1, 0.5]], "shared_cache": True},
    "steps, layers": {"step_topk": [[2, 4]], "refresh": [[1, 2]], "dense_layers": [1]},
    "kept and shared": {"refresh": 4, "shared_cache": True},
}


def in_run(run: SamplingPipeline, settings: SampleSettings) -> Tensor:
    return sample_latents(run.model, run.text_encoder, PROMPTS, clip_seeds(0, PROMPTS), settings)


@torch.no_grad()
def in_transformer(transformer: Any, run: SamplingPipeline, settings: SampleSettings) -> Tensor:
    """Two passes a step, the conditional one first, as Wan's pipelines do."""
    cond, uncond = (encode_prompts(run.text_encoder, texts, "cpu", "zeros")[0] for texts in (PROMPTS, ["", ""]))

    def velocity(x: Tensor, timestep: Tensor) -> Tensor:
        passes = (transformer(x, timestep, text, return_dict=False)[0] for text in (cond, uncond))
        return guide(*passes, settings.guidance)

    noise = noise_like(torch.empty(2, *settings.latent_shape), clip_seeds(0, PROMPTS))
    return sample_euler(velocity, noise, euler_sigmas(settings.steps, settings.flow_shift))


def write_planned(folder: Path, plan: dict[str, Any] | None) -> Path:
    config = {**make_config(), "callbacks": {"samples": {"steps": 6, "guidance": 3.0, "flow_shift": 4.0}}}
    config["data"]["text_padding"] = "zeros"
    if plan is not None:
        target = "vsa.attention.denoising.DenoisingPlan"
        config["sparsity"] = {**config["sparsity"], "denoising": {"_target_": target, **plan}}
    return write_run(folder, config=config)


@pytest.mark.parametrize("name", PLANS)
def test_a_run_its_export_and_the_transformer_make_the_same_clips(name, tmp_path: Path):
    folder = write_planned(tmp_path / "run", PLANS[name])
    run = load_run(folder, device="cpu")
    settings = run.settings()
    assert settings.denoising == DenoisingPlan(**PLANS[name])
    clips = in_run(run, settings)
    vsa_command("convert", folder, tmp_path / "export", "--no-golden")
    transformer = load_sparse(tmp_path / "export")
    assert tiny.difference(in_transformer(transformer, run, settings), clips) < 1e-4
    # a second clip starts over
    assert tiny.difference(in_transformer(transformer, run, settings), clips) < 1e-4
    vsa_command("convert", tmp_path / "export", tmp_path / "back", "--to", "run")
    back = load_run(tmp_path / "back", device="cpu")
    assert tiny.difference(in_run(back, back.settings()), clips) < 1e-5
    # controls: the same weights without a plan, and with one option less
    plain = write_planned(tmp_path / "plain", None)
    other = load_run(plain, device="cpu")
    assert tiny.difference(in_run(other, other.settings()), clips) > 1e-3
    # put in place from outside, it is the same plan
    for each in (other, back):
        assert tiny.difference(in_run(each, each.settings(denoising=PLANS[name])), clips) < 1e-5
    base = {"sparsity": 0.75, "denoising": PLANS[name]}
    assert tiny.difference(in_run(back, back.settings(**base)), clips) < 1e-5
    again = load_sparse(tmp_path / "export", **base)
    assert tiny.difference(in_transformer(again, run, settings), clips) < 1e-4


def test_what_an_export_says_of_a_plan(tmp_path: Path):
    plan = {"topk_ranges": [[0, 0.5, 6]], "step_sparsity": [[3, 0.5]], "refresh": [[2, 3]], "shared_cache": True}
    plan |= {"dense_layers": [1], "dense_steps": 2}
    folder = write_planned(tmp_path / "run", plan)
    vsa_command("convert", folder, tmp_path / "export", "--no-golden")
    sparse = read_sparse_config(tmp_path / "export")
    assert sparse.num_tiles == (8, 4)
    assert sparse.topk_ranges == ((0, 0.5, ((6, 6), (4, 4))),)
    assert sparse.step_topk == ((3, ((4, 4), (2, 2))),)
    assert (sparse.dense_layers, sparse.dense_steps, sparse.refresh, sparse.shared_cache) == ((1,), 2, ((2, 3),), True)
    assert [sparse.layer_topk(8, progress=0.2, step=step) for step in (1, 2, 3)] == [(8, 8), (6, 8), (4, 8)]
    assert '"schema_version": 2' in (tmp_path / "export" / "sparse_attention.json").read_text()
    # without anything new the file is one of version 1, byte for byte what other engines read
    vsa_command("convert", write_planned(tmp_path / "old", {"dense_steps": 1}), tmp_path / "v1")
    text = (tmp_path / "v1" / "sparse_attention.json").read_text()
    assert '"schema_version": 1' in text
    assert "refresh" not in text


@torch.no_grad()
def test_guidance_in_one_batch_follows_its_conditional_half():
    case = tiny.ltx()
    name = "hidden_states"
    same = torch.cat([case.inputs[name][:1]] * 2)
    outs: dict[Any, Tensor] = {}
    for shared in (False, True):
        attention = apply(case.model, topk=3, tile_thw=tiny.TILE, denoising=DenoisingPlan(shared_cache=shared))
        for guided, latents in ((True, same), (False, case.inputs[name])):
            outs[shared, guided] = case.run(**{name: latents})
        assert attention.plan.shared_cache == shared
        remove(case.model)
    # pipelines put the unconditional half first
    assert tiny.difference(outs[True, True][1], outs[False, True][1]) < 1e-6
    assert tiny.difference(outs[True, True][0], outs[False, True][0]) > 1e-4
    # two clips are no guidance
    assert torch.equal(outs[True, False], outs[False, False])


@torch.no_grad()
def test_clips_of_one_step_do_not_share():
    case = tiny.wan()
    apply(case.model, topk=3, tile_thw=tiny.TILE)
    text = "encoder_hidden_states"
    clips = [
        {"hidden_states": tiny.randn(2, 4, 3, 10, 14, seed=s), "timestep": torch.full((2,), 999.0)} for s in (1, 2)
    ]
    own = [case.run(**clip) for clip in clips]
    uncond = [case.run(**clip, **{text: -case.inputs[text]}) for clip in clips]
    remove(case.model)
    apply(case.model, topk=3, tile_thw=tiny.TILE, denoising=DenoisingPlan(shared_cache=True))
    for clip, alone, theirs in zip(clips, own, uncond, strict=True):
        assert torch.equal(case.run(**clip), alone)
        assert (applied_attention(case.model).step, applied_attention(case.model).number) == (0, 0)
        assert tiny.difference(case.run(**clip, **{text: -case.inputs[text]}), theirs) > 1e-5
        assert applied_attention(case.model).number == 1


def test_a_plan_is_said_once_and_fits():
    case = tiny.wan()
    with pytest.raises(ValueError, match="dense_steps is set twice: dense_steps=2, and dense_steps=1 in denoising"):
        apply(case.model, topk=3, dense_steps=2, denoising=DenoisingPlan(dense_steps=1))
    with pytest.raises(ValueError, match=r"denoising has refresh=2, but FullAttention selects no tiles"):
        apply(case.model, "full", denoising=DenoisingPlan(refresh=2))
    assert applied_attention(case.model) is None
    with pytest.raises(ValueError, match=r"dense_layers must be in 0\.\.1, got 2"):
        apply(case.model, topk=3, denoising=DenoisingPlan(dense_layers=[2]))


def at(case: tiny.Case, sigma: float) -> None:
    """One forward at a noise level."""
    given = torch.full_like(case.inputs["timestep"], round(1000 * sigma))
    if "timestep_indices" in case.inputs:
        # of the conditions, of text and video, and of audio, in MiniMax-H3 from noise to clean
        given = torch.tensor([1.0, 1 - sigma, 1 - sigma])
    case.run(timestep=given)


FAMILIES = (
    tiny.wan,
    tiny.ltx,
    tiny.ltx2,
    tiny.hunyuan,
    tiny.hunyuan15,
    tiny.kandinsky5,
    tiny.cogvideox,
    tiny.minimax_h3,
)


@torch.no_grad()
@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_schedules_of_other_engines_run_in_every_family(make):
    case, tiles, sigmas = make(), tiny.TILES, (0.96, 0.84, 0.6, 0.4, 0.1)
    # sglang's form: dense, dense, then a share of the tiles rounded up
    applied = apply(case.model, sparsity=0, tile_thw=tiny.TILE, denoising=plan_of_ratios([1.0, 1.0, 0.55, 0.25]))
    kept = [(at(case, sigma), applied.describe()["topk"])[1] for sigma in sigmas]
    assert kept == [tiles, tiles, 7, 3, 3]
    remove(case.model)
    # ComfyUI's: sparse between 40% and 90% of the schedule, noise levels 0.857 and 0.4 at shift 4
    plan = plan_of_percents(0.4, 0.9, 0.75, flow_shift=4)
    applied = apply(case.model, sparsity=0, tile_thw=tiny.TILE, denoising=plan)
    assert [(at(case, sigma), applied.describe()["topk"])[1] for sigma in (0.96, 0.84, 0.5, 0.3)] == [
        tiles,
        3,
        3,
        tiles,
    ]


def test_exports_say_their_schedules_in_the_forms_of_other_engines(tmp_path: Path):
    config = read_sparse_config(exported(tmp_path / "a", plan_of_ratios([1.0, 1.0, 0.5, 0.25])))
    assert ratios_of(config, [1.0, 0.9, 0.7, 0.5, 0.2]) == [1, 1, 0.5, 0.25, 0.25]
    with pytest.raises(ValueError, match="expected one range of noise levels with all 8 tiles outside of it, got 0"):
        percents_of(config)
    config = read_sparse_config(exported(tmp_path / "b", plan_of_percents(0.4, 0.9, 0.75, flow_shift=4)))
    assert percents_of(config, flow_shift=4) == (0.4, 0.9, 0.75)
    # by noise level
    assert percents_of(config) == pytest.approx((1 - 6 / 7, 1 - 4 / 13, 0.75), abs=1e-6)
    assert ratios_of(config, [0.9, 0.8, 0.5, 0.2]) == [1, 0.25, 0.25, 1]


def exported(folder: Path, plan: DenoisingPlan) -> Path:
    """An export of a run without a budget of its own."""
    config = make_config()
    target = "vsa.attention.denoising.DenoisingPlan"
    config["sparsity"] |= {"sparsity": 0.0, "denoising": {"_target_": target, **plan.changes()}}
    config["data"]["text_padding"] = "zeros"
    convert(open_weights(write_run(folder / "run", config=config)), folder / "out", Conversion(golden=False))
    return folder / "out"

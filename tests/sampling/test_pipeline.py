"""Runs become clips: weights, prompts, guidance, settings and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from diffusers.schedulers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from torch import Tensor, nn

from vsa.checkpoints.run_checkpoint import read_checkpoint
from vsa.checkpoints.sampling_settings import sampling_of
from vsa.checkpoints.state_file import write_state
from vsa.data.toy_videos import render_clip, score_clip
from vsa.diffusion.flow_matching import noise_like
from vsa.diffusion.rollout import rollout, rollout_noise
from vsa.evaluation.attention_map import draw_attention, record_attention
from vsa.models.video_dit import VideoDiT
from vsa.sampling.first_frames import with_pictures
from vsa.sampling.pipeline import (
    SampleSettings,
    SamplingPipeline,
    clip_seeds,
    decode_latents,
    encode_prompts,
    generate,
    load_run,
    sample_latents,
)
from vsa.sampling.record import settings_dict

LATENT_SHAPE = (16, 4, 8, 8)
STEPS = (1000.0, 757.0, 522.0)
PROMPTS = ["a red circle moving left slowly", "a blue square moving up", "", "a green cross moving down quickly"]


@pytest.fixture(scope="module")
def run(tiny_run_dir: Path) -> SamplingPipeline:
    return load_run(tiny_run_dir, device="cpu")


@pytest.mark.parametrize("weights", ["ema", "model"])
def test_load_run_takes_the_named_weights(tiny_run_dir: Path, weights):
    tiny_run = load_run(tiny_run_dir, weights=weights, device="cpu")
    tensors = read_checkpoint(tiny_run_dir / "checkpoints" / "step-00000007").tensors(weights)
    for name, parameter in tiny_run.model.named_parameters():
        assert torch.equal(parameter, tensors[name]), name
        assert not parameter.requires_grad
    assert not tiny_run.model.training
    assert (tiny_run.step, tiny_run.weights) == (7, weights)


def test_settings_left_out_come_from_the_run(run: SamplingPipeline):
    settings = run.settings()
    assert settings.latent_shape == LATENT_SHAPE
    assert settings.flow_shift == 3.0
    assert settings.topk.number == 2  # a quarter of 8 tiles
    assert run.settings(sparsity=0.5).topk.number == 4
    assert run.settings(topk=7).topk.number == 7
    assert run.settings(latent_shape=[16, 1, 8, 8]).topk.number == 1


def test_a_run_is_sampled_as_it_samples_itself(tiny_config, write_tiny_run, tmp_path: Path):
    own = {"steps": 7, "guidance": 2.5, "flow_shift": 4.0, "prompts": ["x"], "seed": 3}
    cases: list[tuple[dict | None, tuple[int, float, float]]] = [
        (own, (7, 2.5, 4.0)),
        # as every run wrote it before there was a flow shift; 3 is the one of the training
        ({"steps": 7, "guidance": 2.5}, (7, 2.5, 3.0)),
        ({**own, "flow_shift": None}, (7, 2.5, 3.0)),
        (None, (32, 1.0, 3.0)),
    ]
    for i, (samples, expected) in enumerate(cases):
        config = {**tiny_config(), "callbacks": {"samples": samples}}
        tiny_run = load_run(write_tiny_run(tmp_path / str(i), config=config), device="cpu")
        defaults = tiny_run.settings()
        assert (defaults.steps, defaults.guidance, defaults.flow_shift) == expected
        explicit = tiny_run.settings(steps=2, guidance=1.5, flow_shift=9.0)
        assert (explicit.steps, explicit.guidance, explicit.flow_shift) == (2, 1.5, 9.0)
    assert (sampling_of({}), sampling_of({"callbacks": None})) == ({}, {})


def test_clips_of_a_run_in_training_have_its_flow_shift(training):
    common = ("callbacks.samples.prompts=[a red circle]", "callbacks.samples.steps=2", "trainer.max_steps=1")
    shifts = {}
    for run, own in (("own", ("callbacks.samples.flow_shift=7",)), ("trained", ())):
        training(*common, *own, f"run={run}", "task.objective.shift.value=3")
        record = json.loads((training.folder(run) / "samples" / "step-00000001" / "samples.json").read_text())
        settings = load_run(training.folder(run), device="cpu").settings()
        assert (settings.steps, settings.flow_shift) == (record["steps"], record["flow_shift"])
        shifts[run] = record["flow_shift"]
    assert shifts == {"own": 7, "trained": 3}
    with pytest.raises(ValueError, match="flow_shift=0: expected a number above 0, or null, got 0"):
        training(*common, "callbacks.samples.flow_shift=0", "run=refused")
    assert not training.folder("refused").exists()


def test_averaged_weights_are_taken_where_there_are_any(write_tiny_run, tmp_path: Path):
    assert load_run(write_tiny_run(tmp_path / "both"), device="cpu").weights == "ema"
    plain = write_tiny_run(tmp_path / "plain", with_ema=False)
    assert load_run(plain, device="cpu").weights == "model"
    with pytest.raises(ValueError, match="step-00000007 has no ema weights"):
        load_run(plain, weights="ema")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"topk": 2, "sparsity": 0.5}, "at most one of topk and sparsity, got topk=2 and sparsity=0.5"),
        ({"topk": 9}, "topk 9 is above the number of tiles 8"),
        ({"topk": 0}, "topk must be at least 1, got 0"),
        ({"sparsity": 1.0}, r"\[0, 1\), got 1.0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"flow_shift": 0.0}, "flow shift must be above 0 and finite, got 0.0"),
        # an all-black clip without a word
        ({"guidance": float("nan")}, "guidance must be a finite number, got nan"),
        ({"latent_shape": [16, 4, 7, 8]}, r"\(16, 4, 7, 8\)"),
        ({"latent_shape": [4, 8, 8]}, r"\(4, 8, 8\)"),
    ],
)
def test_settings_refuse(run: SamplingPipeline, kwargs: dict, message: str):
    with pytest.raises(ValueError, match=message):
        run.settings(**kwargs)


def test_samples_equal_a_loop_with_diffusers_scheduler_and_two_passes(run: SamplingPipeline):
    settings = run.settings(steps=5, guidance=3.5, seed=11)
    seeds = clip_seeds(11, PROMPTS[:2])
    ours = sample_latents(run.model, run.text_encoder, PROMPTS[:2], seeds, settings)

    null = run.text_encoder.encode("")[None]
    for i in range(2):
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 5, 5).tolist())
        text = run.text_encoder.encode(PROMPTS[i])[None]
        x = noise_like(torch.zeros(1, *LATENT_SHAPE), seeds[i : i + 1])
        for t in scheduler.timesteps:
            with torch.no_grad():
                cond = run.model(x, t.expand(1), text, None, topk=settings.topk)
                uncond = run.model(x, t.expand(1), null, None, topk=settings.topk)
            x = scheduler.step(uncond + 3.5 * (cond - uncond), t, x, return_dict=False)[0]
        torch.testing.assert_close(ours[i : i + 1], x, atol=1e-4, rtol=1e-4)
    without_guidance = sample_latents(run.model, run.text_encoder, PROMPTS[:2], seeds, replace(settings, guidance=1.0))
    assert (without_guidance - ours).abs().max() > 1e-2


def test_a_clip_does_not_depend_on_its_batch_and_depends_on_prompt_and_seed(run: SamplingPipeline):
    settings = run.settings(steps=3, guidance=2.0, seed=5)
    steps: list[int] = []
    videos = generate(run, PROMPTS, settings, steps.append)
    assert videos.shape == (4, 16, 64, 64, 3)
    assert videos.dtype == torch.uint8
    assert sum(steps) == 4 * 3
    for size in (1, 3):
        other = generate(run, PROMPTS, replace(settings, batch_size=size))
        assert (other.int() - videos.int()).abs().max() <= 1
    assert torch.equal(generate(run, PROMPTS, settings), videos)
    first = generate(run, PROMPTS[:1], settings)[0]
    assert (first.int() - videos[0].int()).abs().max() <= 1
    assert (generate(run, [PROMPTS[1]], settings)[0].int() - first.int()).abs().max() > 5
    assert (generate(run, PROMPTS[:1], replace(settings, seed=6))[0].int() - first.int()).abs().max() > 50


def test_sampling_leaves_the_global_random_state_alone(tiny_run_dir: Path):
    state = torch.random.get_rng_state()
    tiny_run = load_run(tiny_run_dir, device="cpu")
    generate(tiny_run, PROMPTS[:1], tiny_run.settings(steps=1))
    assert torch.equal(state, torch.random.get_rng_state())


def test_prompts_are_padded_and_masked(run: SamplingPipeline):
    text, mask = encode_prompts(run.text_encoder, PROMPTS, "cpu")
    assert text.shape == (4, run.text_encoder.max_tokens, 64)
    for i, prompt in enumerate(PROMPTS):
        row = run.text_encoder.encode(prompt)
        assert int(mask[i].sum()) == len(row)
        assert torch.equal(text[i, mask[i]], row)
        assert (text[i, ~mask[i]] == 0).all()


def test_the_noise_of_a_clip_is_that_of_its_prompt(run: SamplingPipeline):
    prompts = [*(f"a square {n}" for n in range(40)), *["a square 1"] * 10]
    seeds = torch.cat([clip_seeds(s, prompts) for s in range(20)])
    assert len(set(seeds.tolist())) == 1000
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    assert torch.equal(clip_seeds(3, [prompts[n] for n in order]), clip_seeds(3, prompts)[order])
    # and so are the clips, repeated prompts in their order
    settings = run.settings(steps=2)
    clips = generate(run, [PROMPTS[0], PROMPTS[1], PROMPTS[0]], settings)
    assert torch.equal(generate(run, [PROMPTS[1], PROMPTS[0], PROMPTS[0]], settings), clips[[1, 0, 2]])
    assert not torch.equal(clips[0], clips[2])


class Oracle(nn.Module):
    """A velocity field that leads each prompt's noise to a known clip."""

    def __init__(self, run: SamplingPipeline, targets: dict[str, Tensor]):
        super().__init__()
        self.inner = run.model
        texts = encode_prompts(run.text_encoder, list(targets), "cpu")[0]
        self.targets = list(zip(texts, targets.values(), strict=True))

    def forward(
        self, x: Tensor, timestep: Tensor, text: Tensor, mask: Tensor, *, topk: int, denoising: object
    ) -> Tensor:
        target = torch.stack([next(t for e, t in self.targets if torch.equal(e, row)) for row in text])
        return (x - target) / (timestep / 1000).view(-1, 1, 1, 1, 1)


def test_a_perfect_model_gives_the_clip_of_its_prompt(run: SamplingPipeline):
    clips = [render_clip(3, i, size=(16, 64, 64)) for i in range(3)]
    mean, std = run.latent_mean.view(-1, 1, 1, 1), run.latent_std.view(-1, 1, 1, 1)
    targets = {caption: (run.codec.encode(video) - mean) / std for video, caption, _ in clips}
    oracle = replace(run, model=cast(VideoDiT, Oracle(run, targets)))
    prompts = list(reversed(targets))
    videos = generate(oracle, prompts, run.settings(steps=4))
    for prompt, video in zip(prompts, videos, strict=True):
        original = next(v for v, c, _ in clips if c == prompt)
        assert (video.int() - run.codec.decode(run.codec.encode(original)).int()).abs().max() <= 1
        assert score_clip(video, prompt) == {"colour": True, "direction": True, "shape": True}


class Still(nn.Module):
    """A velocity field that repeats the first latent frame, and refuses one that is not clean at timestep 0."""

    def __init__(self, run: SamplingPipeline, first: Tensor):
        super().__init__()
        self.inner, self.first = run.model, first
        self.in_channels, self.out_channels = run.model.in_channels, run.model.out_channels

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        return self.inner.grid(shape)

    def forward(
        self, x: Tensor, timestep: Tensor, text: Tensor, mask: Tensor, *, topk: int, denoising: object
    ) -> Tensor:
        given, rest = timestep.unbind(1)
        assert given.eq(0).all()
        assert rest.gt(0).all()
        assert all(torch.equal(row[:, :1], self.first) for row in x)
        return (x - self.first) / (rest / 1000).view(-1, 1, 1, 1, 1)


@pytest.mark.parametrize("steps", [None, STEPS])
def test_a_clip_continues_its_first_frame(run: SamplingPipeline, steps):
    picture = render_clip(3, 0, size=(16, 64, 64))[0][0]
    first = run.statistics.normalise(run.codec.encode(picture[None])[None])[0]
    still = replace(run, model=cast(VideoDiT, Still(run, first)), step_list=steps, continues=True)
    how = {"steps": 3, "guidance": 2.0} if steps is None else {}
    settings = replace(run, step_list=steps).settings(**how)
    videos = generate(with_pictures(still, [picture]), PROMPTS[:2], settings)
    shown = run.codec.decode(run.codec.encode(picture[None].repeat(4, 1, 1, 1)))
    assert (videos.unflatten(1, (4, 4)).int() - shown.int()).abs().max() <= 1
    with pytest.raises(ValueError, match="first_frame=0: it cannot continue a first frame"):
        with_pictures(run, [picture])


def test_decode_undoes_the_normalisation(run: SamplingPipeline):
    video = render_clip(0, 0, size=(16, 64, 64))[0]
    raw = run.codec.encode(video)
    mean, std = run.latent_mean.view(-1, 1, 1, 1), run.latent_std.view(-1, 1, 1, 1)
    videos = decode_latents(run.codec, ((raw - mean) / std)[None], run.statistics)
    assert (videos[0].int() - run.codec.decode(raw).int()).abs().max() <= 1


def test_record_attention_gives_the_selection_of_every_layer(run: SamplingPipeline):
    text, mask = encode_prompts(run.text_encoder, PROMPTS[:1], "cpu")
    latents = torch.randn(1, *LATENT_SHAPE, generator=torch.Generator().manual_seed(0))
    records = record_attention(run.model, latents, text, mask, sigma=0.5, topk=3)
    assert sorted(records) == [0, 1]
    for tensors in records.values():
        counts, indices = tensors["kv_num_blocks"], tensors["kv_indices"]
        assert (counts == 3).all()
        tiles = indices[..., :3].expand(1, 2, 8, 3)
        assert ((tiles >= 0) & (tiles < 8)).all()
        assert (tiles.diff(dim=-1) > 0).all()


def test_draw_attention(run: SamplingPipeline, tmp_path: Path):
    out = draw_attention(run, PROMPTS[0], run.settings(steps=2), tmp_path / "tiles.png")
    assert np.asarray(Image.open(out)).std() > 1


def test_draw_attention_refuses_dense_attention(write_tiny_run, tmp_path: Path):
    dense = load_run(write_tiny_run(tmp_path, attention="full"), device="cpu")
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_attention(dense, PROMPTS[0], dense.settings(steps=1), tmp_path / "tiles.png")
    assert not (tmp_path / "tiles.png").exists()


def test_settings_are_plain_json(run: SamplingPipeline):
    record = json.loads(json.dumps(settings_dict(run.settings(topk=2), run)))
    assert record["sparsity"] == 0.75
    assert record["num_tiles"] == 8
    assert record["checkpoint"].endswith("step-00000007")


def without(config: dict, key: str) -> dict:
    return {k: v for k, v in config.items() if k != key}


def test_load_run_refuses_what_cannot_work(tmp_path: Path, tiny_run_dir: Path, tiny_config, write_tiny_run):
    with pytest.raises(ValueError, match=r"no such folder: .*nowhere"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="weights must be ema or model, got 'best'"):
        load_run(tiny_run_dir, weights="best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the config of checkpoint .* lacks sparsity"):
        load_run(write_tiny_run(tmp_path / "b", config=without(tiny_config(), "sparsity")))
    config = tiny_config()
    config["data"] = without(config["data"], "codec")
    with pytest.raises(ValueError, match=r"the config of checkpoint .* lacks data\.codec"):
        load_run(write_tiny_run(tmp_path / "c", config=config))
    config = tiny_config()
    config["data"]["text_encoder"]["max_tokens"] = 9
    with pytest.raises(ValueError, match=r"data\.text_encoder of checkpoint .* is hashed-ngrams-64x9 with hash"):
        load_run(write_tiny_run(tmp_path / "d", config=config))
    config = tiny_config()
    config["data"]["codec"] = {"_target_": "os.system", "command": f"touch {tmp_path / 'owned'}"}
    with pytest.raises(ValueError, match=r"os\.system is not allowed"):
        load_run(write_tiny_run(tmp_path / "e", config=config))
    assert not (tmp_path / "owned").exists()


def parts(node: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Keys of all objects in a config."""
    for name, inner in node.items():
        if isinstance(inner, dict):
            yield (*key, name)
            yield from parts(inner, (*key, name))


def test_parts_of_another_kind_in_a_stored_config_are_refused(tmp_path: Path, tiny_run_dir: Path, tiny_config):
    """Each object of the config in turn is missing, or is what it should not be."""
    shutil.copytree(tiny_run_dir, tmp_path / "run")
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    state = json.loads((checkpoint / "state.json").read_text())
    stored = json.dumps({**state["config"], "callbacks": {"samples": {"steps": 2}}})
    keys, refused = [*parts(json.loads(stored))], 0
    assert {("task", "objective", "shift"), ("callbacks", "samples"), ("data", "codec")} <= {*keys}
    state = {name: value for name, value in state.items() if name not in ("schema", "digest")}
    for key in keys:
        for value in (..., "text", [["a"]]):
            config = json.loads(stored)
            node = config
            for name in key[:-1]:
                node = node[name]
            node.pop(key[-1]) if value is ... else node.update({key[-1]: value})
            write_state(checkpoint, state | {"config": config})
            # a traceback is any other error
            with suppress(ValueError):
                load_run(tmp_path / "run")
                refused -= 1
            refused += 1
    assert refused > 2 * len(keys)


# distilled generators


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory, tiny_config, write_tiny_run) -> SamplingPipeline:
    """A run with a step list, whose config says how the clips of its teacher are sampled."""
    samples = {"steps": 7, "guidance": 2.5, "flow_shift": 4.0, "prompts": ["x"]}
    config = {**tiny_config(), "callbacks": {"samples": samples}}
    folder = write_tiny_run(tmp_path_factory.mktemp("distilled"), config=config, step_list=STEPS)
    return load_run(folder, device="cpu")


def test_a_distilled_run_is_sampled_at_its_step_list(distilled: SamplingPipeline, run: SamplingPipeline):
    assert (distilled.step_list, run.step_list) == (STEPS, None)
    settings = distilled.settings()
    assert (settings.steps, settings.step_list, settings.guidance, settings.flow_shift) == (3, STEPS, 1.0, 1.0)
    assert distilled.settings(guidance=2.0).guidance == 2.0
    assert distilled.settings(sparsity=0.5).topk.number == 4
    record = json.loads(json.dumps(settings_dict(settings, distilled)))
    assert (record["steps"], record["step_list"]) == (3, list(STEPS))
    assert settings_dict(run.settings(), run)["step_list"] is None


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_clips_of_a_distilled_run_are_the_rollouts_of_its_training(
    distilled: SamplingPipeline, count: int, guidance: float
):
    short_run = replace(distilled, step_list=STEPS[:count])
    settings = short_run.settings(guidance=guidance)
    seeds = clip_seeds(11, PROMPTS[:3])
    clips = {}
    for size in (1, 2, 3):
        part = seeds[:size]
        text, mask = encode_prompts(short_run.text_encoder, PROMPTS[:size], "cpu")
        null, null_mask = encode_prompts(short_run.text_encoder, [""] * size, "cpu")

        def velocity(x: Tensor, t: Tensor, text=text, mask=mask, null=null, null_mask=null_mask) -> Tensor:
            if guidance == 1:
                return short_run.model(x, t, text, mask, topk=settings.topk)
            both = torch.cat([text, null]), torch.cat([mask, null_mask])
            cond, uncond = short_run.model(torch.cat([x, x]), torch.cat([t, t]), *both, topk=settings.topk).chunk(2)
            return uncond + guidance * (cond - uncond)

        steps: list[int] = []
        prompts = PROMPTS[:size]
        clips[size] = sample_latents(short_run.model, short_run.text_encoder, prompts, part, settings, steps.append)
        expected = rollout(velocity, torch.empty(size, *LATENT_SHAPE), part, STEPS[:count], count - 1)
        assert torch.equal(clips[size], expected)
        assert steps == [size] * count
    for size in (1, 2):
        torch.testing.assert_close(clips[size], clips[3][:size], atol=1e-4, rtol=1e-4)
    # controls: seeds, prompts and steps are looked at
    encoder = short_run.text_encoder
    assert (clips[3][1] - clips[3][0]).abs().max() > 0.1
    assert (sample_latents(short_run.model, encoder, PROMPTS[:3], seeds + 1, settings) - clips[3]).abs().max() > 0.1
    euler = replace(short_run, step_list=None).settings(steps=count, guidance=guidance)
    if count > 1:
        assert (sample_latents(short_run.model, encoder, PROMPTS[:3], seeds, euler) - clips[3]).abs().max() > 0.1


def test_fresh_noise_of_a_clip_is_that_of_its_seed(distilled: SamplingPipeline, monkeypatch: pytest.MonkeyPatch):
    settings, seeds = distilled.settings(), clip_seeds(3, PROMPTS[:2])
    clips = sample_latents(distilled.model, distilled.text_encoder, PROMPTS[:2], seeds, settings)
    # one draw for the whole batch, which the bound on batches must not let pass
    monkeypatch.setattr(
        "vsa.sampling.pipeline.rollout_noise", lambda x, s, i: rollout_noise(x, s[:1].expand(len(s)), i)
    )
    shared = sample_latents(distilled.model, distilled.text_encoder, PROMPTS[:2], seeds, settings)
    assert torch.equal(shared[0], clips[0])
    assert (shared[1] - clips[1]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"steps": 32}, "steps 32 does not apply to .*step-00000007: it is distilled .* [1000.0, 757.0, 522.0]"),
        ({"steps": 3}, "steps 3 does not apply"),
        ({"flow_shift": 4.0}, "flow_shift 4.0 does not apply .* [1000.0, 757.0, 522.0]"),
    ],
)
def test_a_distilled_run_refuses_other_steps(distilled: SamplingPipeline, kwargs: dict, message: str):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        distilled.settings(**kwargs)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 4}, "needs 3 steps and flow shift 1, got steps=4 and flow_shift=1.0"),
        ({"flow_shift": 3.0}, "got steps=3 and flow_shift=3.0"),
        ({"steps": 2, "step_list": (500.0, 757.0)}, r"must be strictly decreasing .* \[500.0, 757.0\]"),
        ({"steps": 0, "step_list": ()}, "steps must be at least 1, got 0"),
    ],
)
def test_settings_that_contradict_a_step_list_are_refused(distilled: SamplingPipeline, changed: dict, message: str):
    settings = distilled.settings()
    assert isinstance(replace(settings, guidance=2.0), SampleSettings)
    with pytest.raises(ValueError, match=message):
        replace(settings, **changed)


def test_a_checkpoint_with_a_bad_step_list_is_refused(write_tiny_run, tmp_path: Path):
    with pytest.raises(ValueError, match=r"must be strictly decreasing .* \[757.0, 1000.0\]"):
        load_run(write_tiny_run(tmp_path, step_list=(757.0, 1000.0)))


def test_generate_needs_a_prompt(run: SamplingPipeline):
    with pytest.raises(ValueError, match="at least one prompt"):
        generate(run, [], run.settings())

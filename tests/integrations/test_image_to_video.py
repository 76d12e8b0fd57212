"""Image-to-video models of Wan from videos to clips: encoded, trained, exported, and sampled as diffusers samples."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import diffusers
import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.tiny_wan import make_image_pipeline, save_pipeline
from tests.integrations.tiny import difference
from tests.tiny_runs import TinyTraining, vsa_command
from tests.training.distillations import DISTILL
from tests.training.test_finetune import LORA
from vsa.checkpoints.convert import Conversion, convert
from vsa.checkpoints.weight_source import open_weights
from vsa.config import build
from vsa.data.codecs import WanVAE
from vsa.data.shard_writer import ShardWriter
from vsa.data.shards import LatentReader
from vsa.data.text import UMT5Encoder
from vsa.diffusion.flow_matching import noise_like
from vsa.integrations.diffusers import load_sparse
from vsa.sampling.first_frames import frames_of, with_pictures
from vsa.sampling.pipeline import clip_seeds, load_run, sample_latents

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")

WORDS = ("a red circle", "a blue square", "a cat", "a fox")
# of the clips: 8 tiles of one token
FRAMES, SIZE, LATENT = 5, 32, (16, 2, 4, 4)
GONE = ("model.num_layers", "model.num_attention_heads", "model.attention_head_dim", "model.ffn_dim", "model.freq_dim")


class Made:
    """A pipeline of image-to-video, clips that its encoders encoded, and runs, which the tests of a module share.

    Args:
        folder: folder for all of it.
        clip: whether it has CLIP, as Wan2.1; else as Wan2.2 A14B.
    """

    def __init__(self, folder: Path, clip: bool):
        self.clip, self.pipeline = clip, save_pipeline(folder / "pipeline", lambda: make_image_pipeline(clip=clip))
        self.runs, self.shards = TinyTraining(folder / "outputs", pytest.MonkeyPatch()), folder / "shards"
        self.codec, self.text = WanVAE(str(self.pipeline)), UMT5Encoder(str(self.pipeline), dtype="float32")
        how: Any = {"codec": self.codec, "text_encoder": self.text, "dtype": "float32"}
        generator, self.seen = torch.Generator().manual_seed(0), Seen()
        with ShardWriter(self.shards, **how, image_encoder=self.codec.image_encoder) as writer:
            for i in range(16):
                video = torch.randint(0, 256, (FRAMES, SIZE, SIZE, 3), generator=generator, dtype=torch.uint8)
                words = [f"{WORDS[i % 4]} {'left' if i < 4 else 'right'}"]
                writer.add(f"clip{i}", self.codec.encode(video), words, {}, **self.codec.image_inputs(video))

    @cached_property
    def trained(self) -> Path:
        """Run folder of a sparse finetune with a teacher."""
        samples = ("callbacks.samples.prompts=[a cat left,other]", "callbacks.samples.steps=1")
        self.train("run=whole", *TEACHER, *samples, "trainer.max_steps=2", callbacks=(self.seen,))
        return self.runs.folder("whole")

    @cached_property
    def exported(self) -> Path:
        """Folder of its weights for diffusers."""
        folder = self.shards.parent / "exported"
        convert(open_weights(self.trained, "model"), folder, Conversion())
        return folder

    def train(self, *settings: str, callbacks: Any = ()) -> None:
        task = () if any(setting.startswith("task=") for setting in settings) else ("task=finetune",)
        data = ("data=wan", f"data.root={self.shards}", f"data.codec.source={self.pipeline}", "data.num_workers=0")
        start = ("start=dense", "model=from_checkpoint", f"init_from={self.pipeline}")
        tiles = ("attention.tile_thw=[1,1,1]", "data.val_least=4", "data.batch_size=2")
        dropped = (f"~{key}" for key in (*GONE, "data.toy.size", "data.toy.count"))
        self.runs(*dropped, *start, *data, *task, *tiles, *settings, callbacks=callbacks)


class Seen(L.Callback):
    """The first batch, and the first forward of student and teacher: arguments and output."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if not hasattr(self, "batch"):
            self.batch = batch
            for name, network in (("student", pl_module.model), ("teacher", pl_module._teacher.network)):
                network.register_forward_hook(partial(self._keep, name), with_kwargs=True)

    def _keep(self, name, network, args, kwargs, output):
        if not hasattr(self, name):
            setattr(self, name, (args, kwargs, output.detach().clone()))


TEACHER = ("task.objective.velocity=0.5", "task.objective.attention=0.5", "data.caption_dropout=0.5")


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["wan2.1", "wan2.2"])
def made(request, tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("i2v"), request.param)


def test_student_and_teacher_get_the_first_frames(made):
    assert made.trained
    reader, seen = LatentReader(made.shards), made.seen
    for name in ("cond_latents", "image_embeds"):
        rows = [reader.image_inputs(i).get(name) for i in seen.batch.sample_ids]
        for _, given, _ in (seen.student, seen.teacher):
            assert (given[name] is None) == (rows[0] is None) == (name == "image_embeds" and not made.clip)
            assert given[name] is None or torch.equal(given[name], torch.stack(rows))
    (x, timestep), given, out = seen.teacher
    model = diffusers.WanTransformer3DModel.from_pretrained(made.pipeline / "transformer")
    inputs = {"hidden_states": torch.cat([x, given["cond_latents"]], 1), "timestep": timestep}
    inputs |= {"encoder_hidden_states": given["text"], "encoder_hidden_states_image": given["image_embeds"]}
    with torch.no_grad():
        assert difference(out, model(**inputs).sample) < 1e-5
        # control: the other clip's first frame
        inputs["hidden_states"] = torch.cat([x, given["cond_latents"].flip(0)], 1)
        assert difference(out, model(**inputs).sample) > 1e-4


@torch.no_grad()
def test_its_export_samples_pictures_as_diffusers_does(made, tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
    run, prompts = load_run(made.trained, weights="model", device="cpu"), ["a cat left"]
    settings, seeds = run.settings(steps=2, guidance=3.0, topk=4, flow_shift=3.0), clip_seeds(0, prompts)
    continued = with_pictures(run, [torch.from_numpy(picture)])
    ours, other = (
        sample_latents(run.model, run.text_encoder, prompts, seeds, settings, given=frames_of(each, prompts, LATENT))
        for each in (continued, run)
    )
    pipe = make_image_pipeline(clip=made.clip)
    pipe.transformer = load_sparse(made.exported, topk=4)
    weights = open_weights(made.trained, "model")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in pipe.transformer.state_dict().items())
    steps = pipe.scheduler.set_timesteps
    # ours end at 0
    pipe.scheduler.set_timesteps = lambda count, device: steps(sigmas=[1.0, 0.5], device=device)
    how = {"height": SIZE, "width": SIZE, "num_frames": FRAMES, "num_inference_steps": 2, "guidance_scale": 3.0}
    how |= {"latents": noise_like(ours, seeds), "output_type": "latent"}
    expected = pipe(Image.fromarray(picture), prompts[0], **how).frames
    assert difference(ours, expected) < 1e-5
    # control: the first frame of a held-out clip
    assert difference(other, expected) > 1e-3
    Image.fromarray(picture).save(tmp_path / "picture.png")
    quick = ("--prompt", "a cat left", "--steps", "1", "--device", "cpu", "--out", tmp_path / "clips")
    with pytest.raises(ValueError, match="is an image-to-video model: name a picture with --first-frame PICTURE"):
        vsa_command("sample", made.trained, *quick)
    vsa_command("sample", made.exported, *quick, "--first-frame", tmp_path / "picture.png")
    assert len(list((tmp_path / "clips").glob("*.mp4"))) == 1
    # the pipeline has another image encoder by now
    replaced = replace(run, image_encoder="0123")
    if made.clip:
        with pytest.raises(ValueError, match=r"has image encoder clip-5x16, hash .* made with hash 0123"):
            frames_of(with_pictures(replaced, [torch.from_numpy(picture)]), prompts, LATENT)


def test_its_own_clips_continue_held_out_ones(made):
    (samples,) = (made.trained / "samples").glob("step-*")
    assert len(list(samples.glob("*.gif"))) == 2
    data = build(made.runs.last("whole").config["data"])
    data.setup()
    refs = data.held_out[LATENT]
    known = next(i for i, ref in enumerate(refs) if i > 0)
    caption = data.store.text(refs[known], 0)[0]
    frames = data.first_frames(["unknown", caption], LATENT)["cond_latents"]
    assert torch.equal(frames[0], data.store.image_inputs(refs[0])["cond_latents"])
    assert torch.equal(frames[1], data.store.image_inputs(refs[known])["cond_latents"])
    with pytest.raises(ValueError, match="no held-out sample of latents 16x9x4x4 gives a first frame"):
        data.first_frames(["a"], (16, 9, 4, 4))
    vsa_command("evaluate", made.trained, "--prompt", caption, "--steps", "1", "--device", "cpu")
    (results,) = (made.trained / "evaluation").glob("step-*.json")
    assert json.loads(results.read_text())["metrics"]["psnr"] > 0


def test_adapters_and_few_steps_train(made):
    made.train("run=lora", LORA, "trainer.max_steps=2")
    before, merged = open_weights(made.pipeline), open_weights(made.runs.folder("lora"), "model")
    assert any(not torch.equal(before[name], merged[name]) for name in before)
    assert any(merged[name].any() for name in merged if ".to_gate_compress.weight" in name)
    made.train("run=distilled", *DISTILL, "task.objective.velocity=0.5", "trainer.max_steps=2")
    assert load_run(made.runs.folder("distilled"), device="cpu").step_list


def test_a_run_without_held_out_clips_samples_none(made, caplog):
    made.train("run=alone", "callbacks.samples.prompts=[a]", "data.val_fraction=0", "trainer.max_steps=1")
    assert "no clips will be sampled: none of their size is held out" in caplog.text
    assert not (made.runs.folder("alone") / "samples").exists()


def test_sets_that_do_not_fit_are_refused(made, tmp_path):
    lacking, few = tmp_path / "lacking", "encode them with vsa encode --model PIPELINE, the model's pipeline"
    with ShardWriter(lacking, codec=made.codec, text_encoder=made.text) as writer:
        for i in range(8):
            writer.add(f"clip{i}", torch.zeros(LATENT), ["a"], {})
    with pytest.raises(ValueError, match=rf"takes 20 channels of image condition .* the data have 0: {few}"):
        made.train("run=lacking", f"data.root={lacking}")
    plain = save_pipeline(tmp_path / "plain", lambda: make_image_pipeline(clip=not made.clip))
    ours, theirs = ("no tokens", "tokens of width 16") if made.clip else ("tokens of width 16", "no tokens")
    with pytest.raises(ValueError, match=rf"takes {ours} of an image encoder .* the data have {theirs}: {few}"):
        made.train("run=other", f"init_from={plain}")
    with pytest.raises(ValueError, match=rf"takes 0 channels of image condition .* the data have 20: {few}"):
        made.train("run=text", f"init_from={save_pipeline(tmp_path / 'text')}")

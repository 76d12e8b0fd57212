"""Wrong input through the real commands: one line that names key and value, status 1, nothing half-written."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from vsa.cli import main
from vsa.config import did_you_mean
from vsa.data.toy_videos import ToyClips, write_toy_videos
from vsa.training import hydra_guard
from vsa.training.launch import INPUT_ERRORS
from vsa.training.train import train

BAD_SETTINGS = [
    (["resume=auto"], "resume=auto: expected settings of their own: resume.allow"),
    (["callbacks.ema=x"], "callbacks.ema=x: "),
    (["logger.csv=3"], "logger.csv=3: "),
    (["sparsity.topk=9", "sparsity.sparsity=null"], "topk=9 is above the number of tiles, 8"),
    (["sparsity.topk=4"], "exactly one of topk and sparsity, got topk=4 and sparsity=0.5"),
    (["sparsity.sparsity=1.0"], "sparsity.sparsity=1.0: expected a number of at least 0 and below 1, or null, got 1.0"),
    (["sparsity.sparsity=null"], "got topk=None and sparsity=None"),
    (["data.toy.size=[8,56,64]"], "(16, 2, 7, 8)"),
    (["data.toy.size=[8,60,64]"], "60"),
    (["data.codec.channels=8"], "model.in_channels=16, but data.codec makes latents of 8 channels"),
    (["model.out_channels=8"], "model.out_channels=8"),
    (["model.text_dim=32"], "model.text_dim=32, but data.text_encoder makes tokens of width 64"),
    (["model.attention_head_dim=7"], "attention_head_dim must be even and at least 6 for 3-D RoPE, got 7"),
    (["model.num_attention_heads=0"], "model.num_attention_heads=0: expected an integer from 1 to 4096, got 0"),
    (["attention.tile_thw=[0,2,2]"], "attention.tile_thw=[0,2,2]: expected a list of 3 values, each an integer of at"),
    (["attention.partition=spiral"], "attention.partition=spiral: expected one of cube, hilbert_run, raster_run, hil"),
    (["attention.backend=nope"], "attention.backend=nope: expected one of reference, gather, triton, cudnn, or null"),
    (["attention=nope"], "attention/nope"),
    (
        ["attention=neighborhood"],
        "sparsity.sparsity=0.5 does not apply to attention=neighborhood: it",
    ),
    (["model=nope"], "model/nope"),
    (["experiment=nope"], "experiment/nope"),
    (["trainer.max_stepz=3"], "trainer.max_stepz=3: unknown setting, did you mean trainer.max_steps?"),
    (["nope=3"], "nope=3: unknown setting"),
    (["+trainer.nope=3"], "trainer.nope=3: unknown setting"),
    (["+model.nope=3"], "model.nope=3: unknown setting"),
    (["+data.nope=3"], "data.nope=3: unknown setting"),
    (["task.parallel.sequence=2"], "task.parallel.sequence=2 must divide the number of ranks, which is 1"),
    (["data.batch_size=0"], "data.batch_size=0: expected an integer of at least 1, got 0"),
    (["data.batch_size=6", "trainer.accumulate_grad_batches=4"], "data.batch_size=6 must be a multiple of the 4"),
    (["data.val_fraction=1.5"], "data.val_fraction=1.5: expected a number of at least 0 and below 1, got 1.5"),
    (["data.caption_dropout=2"], "data.caption_dropout=2: expected a number from 0 to 1, got 2"),
    (
        ["optim.decay_roles=[tables]"],
        "optim.decay_roles=[tables]: expected a list of values, each one of matrix,",
    ),
    (["optim.lr=-1"], "optim.lr=-1: expected a number above 0 and of at most 1, got -1"),
    (
        ["task.objective.distribution=cauchy"],
        "task.objective.distribution=cauchy: expected one of logit_normal, uniform",
    ),
    (
        ["task.objective.weighting=cauchy"],
        "task.objective.weighting=cauchy: expected one of uniform, sigma_sqrt, cosmap",
    ),
    (["task.latent_scale=none_of_them"], "task.latent_scale=none_of_them: expected one of channel, shared"),
    (["callbacks.ema.decay=1.5"], "callbacks.ema.decay=1.5: expected a number of at least 0 and below 1, got 1.5"),
    (["callbacks.checkpoint.keep=1"], "callbacks.checkpoint.keep=1: expected an integer of at least 2, got 1"),
    (
        ["callbacks.checkpoint.every_n_steps=0"],
        "callbacks.checkpoint.every_n_steps=0: expected an integer of at least 1",
    ),
    (["callbacks.samples._target_=os.system"], "callbacks.samples._target_=os.system is not allowed"),
    (["ckpt_path=last"], "no valid checkpoint in"),
    (["ckpt_path=missing/run"], "missing/run"),
    (["init_from=missing/run"], "missing/run"),
    (["flop_budget=-1"], "flop_budget=-1: expected a number above 0, or null, got -1"),
    (["model=dit_120m", "data=folder", "data.root=missing/shards", "model.text_dim=64"], "missing/shards"),
    (["trainer.accelerator=tpu9"], "trainer.accelerator=tpu9: not available here; available: auto, cpu"),
    *(
        []
        if torch.cuda.is_available()
        else [(["trainer.accelerator=gpu"], "trainer.accelerator=gpu: not available here; available: auto, cpu")]
    ),
    (["trainer.precision=99"], "99"),
    (["trainer.precision=bf16-mixed"], "trainer.precision=bf16-mixed is not supported, expected 32-true"),
    (["data.num_workers=-1"], "data.num_workers=-1: expected an integer from 0 to 256, got -1"),
    # never started
    (["data.num_workers=9999"], "data.num_workers=9999: expected an integer from 0 to 256, got 9999"),
    (["trainer.val_check_interval=0"], "trainer.val_check_interval=0: expected an integer of at least 1, or null, got"),
    (["trainer.val_check_interval=0.5"], "trainer.val_check_interval=0.5: expected an integer of at least 1"),
    (["trainer.limit_train_batches=0"], "trainer.limit_train_batches=0: set trainer.max_steps instead"),
    (["trainer.limit_train_batches=2"], "trainer.limit_train_batches=2: set trainer.max_steps instead"),
    (["trainer.limit_val_batches=0.5"], "trainer.limit_val_batches=0.5: expected an integer of at least 0"),
    (["trainer.overfit_batches=0.5"], "trainer.overfit_batches=0.5: expected an integer of at least 0, got 0.5"),
    (["trainer.max_epochs=0"], "trainer.max_epochs=0: expected an integer of at least 1 or -1, or null, got 0"),
    (
        ["trainer.max_steps=99999999999999999999"],
        "expected an integer from -1 to 1000000000000, got 99999999999999999999",
    ),
    (["trainer.num_sanity_val_steps=2"], "trainer.num_sanity_val_steps=2: expected 0, got 2"),
    (["seed=12345678901234567890"], "seed=12345678901234567890: expected an integer from 0 to 9223372036854775807"),
    (["data.videos=/nope", "data=folder"], "data.videos=/nope: no such folder"),
    (["callbacks=null"], "callbacks=null: expected the name of a file of this group"),
    (["~logger"], "logger=null: expected settings by name, logger.NAME=null leaves one out"),
    (["lora=adapters"], "lora=...: task.lora is no setting of this task: leave lora out, or choose another task"),
    (["run=" + "x" * 300], "is too long for a folder and what lies beside it: at most 200 bytes"),
    (["name='" + "\u00e9" * 120 + "'"], "is too long for a folder and what lies beside it: at most 200 bytes"),
    (["run_dir=outputs/" + "x" * 250], "is too long for a folder and what lies beside it: at most 200 bytes"),
    (["overwrite=no"], "overwrite=no: expected true or false, got 'no'"),
    (
        ["callbacks.samples.prompts=hello"],
        "callbacks.samples.prompts=hello: expected a list of values, each text, or null",
    ),
    (["trainer.log_every_n_steps=0"], "trainer.log_every_n_steps=0: expected an integer of at least 1, got 0"),
    (["optim.lr=fast"], "optim.lr=fast: expected a number above 0 and of at most 1, got 'fast'"),
    (["optim.lr=1e30"], "optim.lr=1e+30: expected a number above 0 and of at most 1, got 1e+30"),
    (["optim.lr=nan"], "optim.lr=nan: expected a number above 0"),
    (
        ["optim.betas=0.9"],
        "optim.betas=0.9: expected a list of 2 values, each a number of at least 0 and",
    ),
    (["optim.weight_decay=-9"], "optim.weight_decay=-9: expected a number of at least 0, got -9"),
    (["task.grad_clip=-1"], "task.grad_clip=-1: expected a number of at least 0, got -1"),
    (["task.grad_clip=nan"], "task.grad_clip=nan: expected a number of at least 0, got nan"),
    (["task.max_skipped=-1"], "task.max_skipped=-1: expected an integer of at least 0, got -1"),
    (["trainer.max_steps=many"], "trainer.max_steps=many: expected an integer from -1 to 1000000000000, got"),
    (["trainer.gradient_clip_val=1"], "trainer.gradient_clip_val=1: set task.grad_clip instead"),
    (["model.num_layers=two"], "model.num_layers=two: expected an integer from 1 to 4096, got 'two'"),
    (["model.num_layers=2.5"], "model.num_layers=2.5: expected an integer from 1 to 4096, got 2.5"),
    (["seed=abc"], "seed=abc: expected an integer from 0 to 9223372036854775807, got 'abc'"),
    (["attention.tile_thw=big"], "attention.tile_thw=big: expected a list of 3 values"),
    (["data.batch_size=2.5"], "data.batch_size=2.5: expected an integer of at least 1, got 2.5"),
    (["sparsity.sparsity=2"], "sparsity.sparsity=2: expected a number of at least 0 and below 1, or null, got 2"),
    (["sparsity.sparsty=0.5"], "sparsity.sparsty=0.5: unknown setting, did you mean sparsity.sparsity?"),
    # what another choice has, and no hint to a key that merely stands in the same group or ends alike
    (["task.trainable=[x]"], "task.trainable=[x]: unknown setting; task.trainable is a setting of task=finetune"),
    (
        ["task.objective.velocity=1"],
        "unknown setting; task.objective.velocity is a setting of task=distill, task=finetune",
    ),
    (["data.root=x"], "data.root=x: unknown setting; data.root is a setting of data=folder, data=toy, data=wan"),
    (["attention.dense_layers=3"], "unknown setting, did you mean sparsity.dense_layers?"),
    (["output_dir=null"], "output_dir=null: expected text, got null"),
    # all at once
    (
        ["seed=x", "model.eps=0", "optim.lrr=1"],
        "got 'x'; model.eps=0: expected a number above 0, got 0; optim.lrr=1: unknown",
    ),
    (["run=.."], "run=.. is not a name"),
    (
        ["model.num_attention_heads=256", "model.attention_head_dim=4096"],
        "the model is too large for the memory here: 30,786,706,210,928 parameters",
    ),
    (
        ["model.num_attention_heads=4096", "model.attention_head_dim=4096"],
        "the model is too large for the memory here: 7,881,305,438,027,888 parameters",
    ),
]


# one for each place where a command meets them: hydra's groups, targets, types, folders, objects, the model, the data
BY_COMMAND = (
    "attention=nope",
    "attention=neighborhood",
    "callbacks.samples._target_=os.system",
    "seed=x",
    "callbacks=null",
    "lora=adapters",
    "run=..",
    "trainer.precision=99",
    "ckpt_path=last",
    "data.toy.size=[8,56,64]",
    "model.num_attention_heads=256",
    "data=folder",
)
GROUPS = ("attention=nope", "model=nope", "experiment=nope", "data=folder")
"""Choices of groups, which hydra alone composes."""


def quick_by_command(overrides: list[str]) -> bool:
    return bool({*BY_COMMAND, *GROUPS} & set(overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(*case, marks=[] if quick_by_command(case[0]) else pytest.mark.slow, id=str(case[0])[:60])
        for case in BAD_SETTINGS
    ],
)
def test_wrong_settings(command_line, tiny_overrides, tmp_path, monkeypatch, overrides, message):
    monkeypatch.chdir(tmp_path)
    keys = {o.partition("=")[0].lstrip("+") for o in overrides}
    # a group that is chosen anew drops the tiny settings inside it
    base_overrides = [o for o in tiny_overrides if o.partition("=")[0] not in keys]
    if "data=folder" in overrides:
        base_overrides = [o for o in base_overrides if not o.startswith(("data.toy", "data="))]
    if "attention=nope" in overrides or "model=nope" in overrides:
        base_overrides = [o for o in base_overrides if not o.startswith(("attention.", "model."))]
    status, _, err = command_line("train.py", *base_overrides, "output_dir=out", *overrides)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status == 1, err
    assert len(lines) == 1, err
    assert message in lines[0]
    assert "Traceback" not in err
    # no folders either
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def composed(tiny_overrides) -> Callable[[list[str]], DictConfig]:
    """The tiny config, composed once, with other values."""
    tiny = hydra_guard.composed(*tiny_overrides, "output_dir=out")

    def config(overrides: list[str]) -> DictConfig:
        cfg = copy.deepcopy(tiny)
        for override in OverridesParser.create().parse_overrides(overrides):
            OmegaConf.update(cfg, override.key_or_group, override.value(), force_add=True)
        return cfg

    return config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        # the larger of two models that are too large: counting its parameters takes seconds
        pytest.param(*case, marks=pytest.mark.slow) if "model.num_attention_heads=4096" in case[0] else case
        for case in BAD_SETTINGS
        if not quick_by_command(case[0])
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_settings_are_refused_before_anything_is_written(composed, tmp_path, monkeypatch, overrides, message):
    monkeypatch.chdir(tmp_path)
    # what becomes of an error in a command, test_wrong_settings looks at
    with pytest.raises((ValueError, OSError, *INPUT_ERRORS)) as error:
        train(composed(overrides))
    assert message in " ".join(str(error.value).split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("task.trainers", "task.objective.shift.table"),
        ("data.zoot", "data.drop"),
        ("data.layers_nm", "sparsity.dense_layers"),
        ("task.objective.volume", "task.objective.logit_std"),
    ],
)
def test_no_hint_leads_to_an_unrelated_setting(key, near):
    assert did_you_mean(key, {near}) == ""
    # controls: the same last word, and a slip of the finger
    assert did_you_mean(key, {near, f"x.{key.rpartition('.')[2]}"}).startswith(", did you mean x.")
    assert did_you_mean(f"{near}s", {near}) == f", did you mean {near}?"


def test_a_setting_that_is_another_choices_is_told_with_it():
    assert did_you_mean("sparsity.sparsity", {"callbacks.samples.sparsity"}) == (
        "; sparsity.sparsity is a setting of sparsity=constant, sparsity=cosine, sparsity=linear"
    )
    assert did_you_mean("model.num_layers", {"sparsity.dense_layers"}).startswith("; model.num_layers is a setting of ")


def test_a_traceback_on_request(command_line, tiny_overrides, tmp_path):
    arguments = [*tiny_overrides, f"output_dir={tmp_path}", "sparsity.topk=4"]
    with pytest.raises(ValueError, match="got topk=4"):
        command_line("train.py", *arguments, full_errors=True)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of clips and one of their shards; tests change copies."""
    folder = tmp_path_factory.mktemp("untouched")
    write_toy_videos(ToyClips(count=6, size=(8, 64, 64)), folder / "clips")
    with pytest.raises(SystemExit) as end:
        main(["encode", str(folder / "clips"), str(folder / "shards"), "--text", "ngrams"])
    assert not end.value.code
    return folder


@pytest.fixture
def clips(untouched, tmp_path):
    return shutil.copytree(untouched / "clips", tmp_path / "clips")


def encode(command_line, clips, out, *arguments):
    return command_line("encode", str(clips), str(out), "--text", "ngrams", *arguments)


def test_a_video_that_does_not_decode(command_line, clips, tmp_path):
    victim = sorted(clips.glob("*.mp4"))[3]
    victim.write_bytes(victim.read_bytes()[:200])
    status, _, err = encode(command_line, clips, tmp_path / "shards")
    assert status == 1
    assert err.splitlines()[-1].startswith("error: ")
    assert victim.name in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not list((tmp_path / "shards").glob("index.json"))
    assert not [p for p in (tmp_path / "shards").glob("*.tar")]


def test_a_caption_file_that_names_a_missing_video(command_line, clips, tmp_path):
    captions = tmp_path / "mine.jsonl"
    captions.write_text(json.dumps({"video": "gone.mp4", "captions": ["x"]}) + "\n")
    status, _, err = encode(command_line, clips, tmp_path / "shards", "--captions", str(captions))
    assert status == 1
    line = err.splitlines()[-1]
    assert line.startswith("error: ")
    assert "gone.mp4" in line
    assert "mine.jsonl" in line
    assert not (tmp_path / "shards" / "index.json").exists()


@pytest.fixture
def shards(untouched, tmp_path):
    return shutil.copytree(untouched / "shards", tmp_path / "shards")


def from_shards(tiny_overrides, shards, tmp_path, *overrides):
    base_overrides = [o for o in tiny_overrides if not o.startswith(("data.toy", "data="))]
    return [
        *base_overrides,
        "data=folder",
        f"data.root={shards}",
        "data.num_workers=0",
        f"output_dir={tmp_path / 'out'}",
        *overrides,
    ]


def test_a_shard_cut_short(command_line, tiny_overrides, shards, tmp_path):
    arguments = from_shards(tiny_overrides, shards, tmp_path, "trainer.max_steps=1", "data.val_fraction=0")
    assert command_line("train.py", *arguments, "run=whole")[0] == 0
    for which in ("latents", "text"):
        victim = next(shards.glob(f"{which}-*.tar"))
        whole = victim.read_bytes()
        victim.write_bytes(whole[:-512])
        status, _, err = command_line("train.py", *arguments)
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert (status, len(lines)) == (1, 1), err
        assert victim.name in lines[0]
        assert "Traceback" not in err
        assert [p.name for p in (tmp_path / "out" / "pretrain").iterdir()] == ["whole"]
        victim.write_bytes(whole)


def test_a_flipped_bit_in_a_shard(command_line, tiny_overrides, shards, tmp_path):
    victim = next(shards.glob("latents-*.tar"))
    data = bytearray(victim.read_bytes())
    data[1536 + 512] ^= 1
    for at in range(1024, len(data) - 1024, 2048):
        data[at] ^= 1
    victim.write_bytes(data)
    arguments = from_shards(tiny_overrides, shards, tmp_path, "trainer.max_steps=4", "data.val_fraction=0")
    status, _, err = command_line("train.py", *arguments)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (status, len(lines)) == (1, 1), err
    assert victim.name in lines[0]


def test_shards_of_another_encoder(command_line, tiny_overrides, shards, tmp_path):
    arguments = from_shards(tiny_overrides, shards, tmp_path, "data.text_encoder.max_tokens=7")
    status, _, err = command_line("train.py", *arguments)
    assert status == 1
    assert "the shards were encoded with text encoder" in err
    assert "Traceback" not in err

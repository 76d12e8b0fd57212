"""Which settings a resumed run may change: every one of the run is refused with both values, the rest is free."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.training.test_configs import CONFIGS, compose_run
from vsa.config import resolved
from vsa.training.config_changes import Change, changed_settings, listed, refuse_changes, refuse_unknown_keys


def test_changed_settings_are_listed_by_key():
    before: Any = OmegaConf.to_container(compose_run("sparsity=linear", "+trainer.devices_before=1"), resolve=True)
    now = compose_run("run=other", "output_dir=elsewhere", "optim.lr=1", "callbacks.ema=null", f"data.root={'x' * 50}")
    changes = listed(changed_settings(before, now)).split(", ")
    assert "optim.lr 0.0006 -> 1" in changes
    assert "callbacks.ema EMA -> null" in changes
    assert "sparsity LinearSparsity -> ConstantSparsity" in changes
    assert f"data.root data/toy/shards -> {'x' * 37}..." in changes
    # task.optim follows optim, and where a run stands does not matter
    assert not [change for change in changes if change.startswith(("task.", "run", "output_dir"))]
    assert len(changes) == 5
    assert changed_settings(before, compose_run("sparsity=linear", "+trainer.devices_before=1", "run=b")) == []
    more = [Change(key=str(i), before=0, now=1, free=True) for i in range(10)]
    assert listed(more).split(", ")[-2:] == ["7 0 -> 1", "and 2 more"]


OF_THE_RUN = [
    ("optim=adamw_cosine", "trainer.max_steps=2000", "optim.schedule.total_steps"),
    ("", "optim.schedule.warmup_steps=1", "optim.schedule.warmup_steps"),
    ("sparsity=linear", "sparsity.total_steps=7", "sparsity.total_steps"),
    ("sparsity=linear", "sparsity.dense_steps=7", "sparsity.dense_steps"),
    ("sparsity=linear", "sparsity=cosine", "sparsity"),
    ("sparsity.topk=4 sparsity.sparsity=null", "sparsity.topk=5", "sparsity.topk"),
    ("", "optim.lr=0.1", "optim.lr"),
    ("", "optim.betas=[0.8,0.9]", "optim.betas"),
    ("", "+optim.lr_factors={gate:2}", "optim.lr_factors"),
    ("", "+task.grad_clip=3", "task.grad_clip"),
    ("", "+callbacks.ema.decay=0.5", "callbacks.ema.decay"),
    ("", "callbacks.ema=null", "callbacks.ema"),
    ("", "~callbacks.ema", "callbacks.ema"),
    ("", "+data.caption_dropout=0.5", "data.caption_dropout"),
    ("", "+task.objective.logit_mean=1", "task.objective.logit_mean"),
    ("", "+task.latent_scale=shared", "task.latent_scale"),
    ("", "model.num_layers=3", "model.num_layers"),
    ("", "attention=full", "attention"),
    ("", "tile_thw=[2,2,2]", "tile_thw"),
    ("", "start=dense", "start.gate_init"),
    ("", "seed=4", "seed"),
    ("", "+attention.score=subblock_lse", "attention.score"),
    ("+attention.score=subblock_softmax", "attention.score=subblock_lse", "attention.score"),
    ("attention=pooled_tail", "+attention.tail=double_count", "attention.tail"),
    ("attention=pooled_tail +attention.levels=2", "+attention.node_thw=[8,8,8]", "attention.node_thw"),
    # its results differ from run to run, those of the other backends do not
    ("", "+attention.backend=cudnn", "attention.backend"),
    ("+attention.backend=cudnn", "attention.backend=triton", "attention.backend"),
    ("", "+trainer.overfit_batches=2", "trainer.overfit_batches"),
    ("sparsity=missed_mass callbacks=diagnostics", "+callbacks.diagnostics.every_n_steps=7", "callbacks.diagnostics"),
]


@pytest.mark.parametrize(("common", "change", "key"), OF_THE_RUN)
def test_what_a_run_is_made_of_stays(common, change, key):
    before = json.loads(json.dumps(resolved(compose_run(*common.split()))))
    now = compose_run(*common.split(), change)
    changes = changed_settings(before, now)
    with pytest.raises(ValueError, match=rf"^PATH was trained with .*{key}\S*=.*, the settings have .*resume.allow=\["):
        refuse_changes(changes, ["other"], Path("PATH"))
    # the key, a group above it, and the settings that follow it
    first = key.partition(".")[0]
    assert [c for c in refuse_changes(changes, [first], Path("PATH"))]
    assert refuse_changes(changed_settings(before, compose_run(*common.split())), [], Path("PATH")) == []


def test_settings_that_came_after_a_checkpoint_have_their_defaults():
    before = json.loads(json.dumps(resolved(compose_run("attention=pooled_tail"))))
    for name in ("score", "score_thw", "score_seed", "tail", "levels", "node_thw", "order"):
        del before["attention"][name]
    assert changed_settings(before, compose_run("attention=pooled_tail")) == []


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("optim.lrr", "optim.lr or optim.lr_factors or optim"),
        ("lr", "optim.lr"),
        ("optim.lr.x", "optim.lr"),
        ("callbacks.emma", "callbacks.ema"),
        ("nothing", ""),
    ],
)
def test_a_key_that_no_setting_has_cannot_be_allowed(key, near):
    cfg = compose_run()
    advice = f", did you mean {re.escape(near)}" if near else "$"
    with pytest.raises(ValueError, match=rf"^resume\.allow=\[seed,{key}\]: unknown setting {key}{advice}"):
        refuse_unknown_keys(["seed", key], cfg, json.loads(json.dumps(resolved(cfg))))


def test_keys_of_either_config_can_be_allowed():
    cfg = compose_run("callbacks.ema=null")
    before = json.loads(json.dumps(resolved(compose_run("+optim.lr_factors={gate:2}"))))
    # settings, groups of them, patterns, and what only a constructor or only the checkpoint has
    every = ["optim.lr", "optim", "data.*", "optim.lr_factors.gate", "callbacks.ema.decay", "task.grad_clip"]
    refuse_unknown_keys(every, cfg, before)
    refuse_unknown_keys(["optim.lr_factors"], cfg, {})
    with pytest.raises(ValueError, match=r"unknown setting optim\.lr_factors\.gate.*; unknown setting callbacks\.ema"):
        refuse_unknown_keys(every, cfg, {})


FREE_CHANGES = [
    "trainer=ddp",
    "trainer.max_steps=2000",
    "trainer.log_every_n_steps=3",
    "trainer.val_check_interval=7",
    "trainer.accumulate_grad_batches=2",
    "data.num_workers=3",
    "data.root=elsewhere",
    "logger=wandb",
    "callbacks.checkpoint.every_n_steps=3",
    "+callbacks.checkpoint.keep=3",
    "callbacks=diagnostics",
    "+task.parallel.compile=true",
    "+attention.backend=gather",
    "run=other",
    "resume.allow=[optim.lr]",
    "flop_budget=1e15",
]


def test_an_older_config_that_names_the_run_folder_resumes():
    # an adaptive schedule depends on the diagnostics
    cfg = compose_run("sparsity=missed_mass", "callbacks=diagnostics")
    before = json.loads(json.dumps(resolved(cfg)))
    for name in ("checkpoint", "samples", "nan_dump", "diagnostics"):
        before["callbacks"][name]["run_dir"] = "outputs/pretrain/default"
    before["logger"]["csv"]["root_dir"] = "outputs/pretrain/default"
    assert changed_settings(before, cfg) == []
    # control
    before["callbacks"]["diagnostics"]["every_n_steps"] = 3
    assert [change.key for change in changed_settings(before, cfg)] == ["callbacks.diagnostics.every_n_steps"]


def test_adapters_of_a_config_that_lists_them_resume():
    now = compose_run("task=finetune", "lora=adapters")
    before = json.loads(json.dumps(resolved(now)))
    assert before["task"]["lora"]["targets"] is None
    # as written when the default was this list
    before["task"]["lora"]["targets"] = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
    assert changed_settings(before, now) == []
    before["task"]["lora"]["targets"].pop()
    assert [change.key for change in changed_settings(before, now)] == ["task.lora.targets"]


def test_devices_logging_and_intervals_are_free():
    before = json.loads(json.dumps(resolved(compose_run())))
    changes = changed_settings(before, compose_run(*FREE_CHANGES))
    assert [change.key for change in changes if not change.free] == []
    assert len(changes) > 8


@pytest.mark.parametrize("path", sorted((CONFIGS / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_experiments_resume_from_this_and_an_earlier_version(path):
    cfg = compose_run(f"experiment={path.stem}")
    before = json.loads(json.dumps(resolved(cfg)))
    assert changed_settings(before, cfg) == []
    # groups that came later, and a setting that is no more
    del before["resume"], before["callbacks"]["throughput"]
    before["model"]["of_before"] = before["of_before"] = 1
    assert changed_settings(before, cfg) == []

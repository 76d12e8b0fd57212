"""Configs of checkpoints that were written before classes moved."""

import json

import pytest

from tests.states import state_of, write_older_state
from vsa.checkpoints.run_checkpoint import read_checkpoint, resolve_checkpoint
from vsa.config import check_targets
from vsa.moved import MOVED, moved_target, moved_targets

BEFORE = [
    "vsa.attention.annealing.CosineSparsity",
    "vsa.attention.annealing.LinearSparsity",
    "vsa.attention.annealing.MissedMassSparsity",
    "vsa.attention.annealing.StaircaseSparsity",
    "vsa.attention.schedule.ConstantSparsity",
    "vsa.attention.schedule.TokenBudgetSparsity",
    "vsa.data.toy_datamodule.ToyOnlineDataModule",
    "vsa.training.distill.DistillModule",
    "vsa.training.distill_loss.DistributionMatching",
    "vsa.training.finetune.FinetuneLoss",
    "vsa.training.finetune.FinetuneModule",
    "vsa.training.gan.Gan",
    "vsa.training.health.CollapseRule",
    "vsa.training.lora.LoRA",
    "vsa.training.optim.AdamW",
    "vsa.training.optim.Constant",
    "vsa.training.optim.Cosine",
    "vsa.training.optim.WSD",
    "vsa.training.pretrain.FlowMatchingLoss",
    "vsa.training.pretrain.PretrainModule",
]
"""Every class of ours that configs of version 0.1.0, or of a commit after it, named and that stands elsewhere today."""


@pytest.mark.parametrize("target", BEFORE)
def test_a_class_of_before_is_found(target):
    with pytest.raises(ValueError, match=f"a.b._target_={target} does not exist: it is {moved_target(target)} now"):
        check_targets({"a": {"b": {"_target_": target}}})
    check_targets({"_target_": moved_target(target)})
    assert moved_target(target).rpartition(".")[2] == target.rpartition(".")[2]


def test_every_row_is_of_use():
    assert {max((old for old in MOVED if t.startswith(old)), key=len) for t in BEFORE} == set(MOVED)


def test_names_of_today_stay():
    config = {"a": [{"_target_": "vsa.training.optimizer.AdamW", "note": "vsa.training.optim.AdamW"}], "_target_": 1}
    assert moved_targets(config) == config


def test_a_run_of_before_is_read_and_resumed(training):
    training("trainer.max_steps=2")
    path = training.last().path
    text = json.dumps(state_of(path))
    for old, new in (("optim.AdamW", "optimizer.AdamW"), ("pretrain.P", "modules.pretrain.P")):
        assert f"vsa.training.{new}" in text
        text = text.replace(f"vsa.training.{new}", f"vsa.training.{old}")
    write_older_state(path, json.loads(text))
    assert read_checkpoint(path).state["config"]["optim"]["_target_"] == "vsa.training.optimizer.AdamW"
    trainer = training("trainer.max_steps=3", "ckpt_path=last")
    assert trainer.global_step == 3
    state = json.loads((resolve_checkpoint("last", training.folder()).path / "state.json").read_text())
    assert state["config"]["optim"]["_target_"] == "vsa.training.optimizer.AdamW"

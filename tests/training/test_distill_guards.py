"""Distillation: updates that are skipped, runs that are stopped, settings that are refused."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch import nn

from tests.states import rewrite_state
from tests.training.distillations import (
    DENSE,
    At,
    checkpoints,
    different,
    everything,
)
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.training.parallel import build_model, refuse_shared_parameters

# guards


@pytest.mark.parametrize(("network", "other"), [("model", "fake_score"), ("fake_score", "model")])
def test_a_non_finite_gradient_skips_the_update_of_its_network(distill, training, network, other):
    bad = network

    def poison(trainer, module):
        guard = module.clipper if bad == "model" else module.fake_score.clipper
        call = type(guard).__call__

        class Poisoned(type(guard)):
            def __call__(self, optimizer, iteration):
                if iteration == 2:
                    optimizer.param_groups[0]["params"][0].grad.fill_(math.nan)
                return call(self, optimizer, iteration)

        guard.__class__ = Poisoned

    common = ("task.generator_every=1", "callbacks.checkpoint.every_n_steps=1", "callbacks.checkpoint.keep=9")
    distill(*common, "trainer.max_steps=4", "run=poisoned", callbacks=(At(0, before=poison),))
    states = [everything(checkpoint) for checkpoint in checkpoints(training.folder("poisoned"))]
    optimizers = {"model": {"model", "optimizer", "ema"}, "fake_score": {"fake_score", "fake_score_optimizer"}}
    assert different(states[1], states[2]) == optimizers[other]
    assert different(states[2], states[3]) == optimizers["model"] | optimizers["fake_score"]
    names = {"model": "skipped_steps", "fake_score": "fake_score/skipped_steps"}
    last = training.metrics("poisoned")[4]
    assert (last[names[network]], last[names[other]]) == ("1", "0")
    assert last["updates/generator"] == ("3" if network == "model" else "4")


def test_networks_that_stay_non_finite_stop_the_run(distill):
    def poison(trainer, module):
        with torch.no_grad():
            next(module.fake_score.network.parameters()).fill_(math.nan)

    with pytest.raises(FloatingPointError, match="gradients of fake_score were not finite for 3 steps in a row"):
        distill("task.max_skipped=3", "task.generator_every=100", "task.fake_score_warmup=1",
                callbacks=(At(1, before=poison),))  # fmt: skip


def test_a_collapsed_generator_stops_the_run_and_the_count_is_resumed(distill, training):
    def blank(trainer, module):
        # velocity = x / sigma would be zero data; a huge head is blown up data
        with torch.no_grad():
            module.model.proj_out.weight.mul_(1e4)

    common = ("task.generator_every=100", "task.fake_score_warmup=50", "task.collapse.patience=3", "run=collapsed",
              "task.objective.timesteps=[1000,500]", "trainer.max_steps=20",
              "callbacks.checkpoint.every_n_steps=1")  # fmt: skip
    message = "the generator has collapsed: .*3 batches in a row had latents of standard deviation"
    with pytest.raises(FloatingPointError, match=message):
        distill(*common, callbacks=(At(1, before=blank),))
    checkpoint = training.last("collapsed")
    assert checkpoint.state["collapse"] == {"collapsed_in_row": 2}
    # the next last-step rollout is the third also in a resumed run
    with pytest.raises(FloatingPointError, match=message):
        distill(*common, "ckpt_path=last")
    assert training.last("collapsed").state["collapse"] == {"collapsed_in_row": 2}
    # without the rule it goes on
    distill(*common, "task.collapse=null", "trainer.max_steps=7", "run=careless", callbacks=(At(1, before=blank),))


# bad input


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("task.objective.timesteps=[1000,757,757]",), r"must be strictly decreasing .* got \[1000, 757, 757\]"),
        (("task.objective.timesteps=[757,522]",), r"must start at 1000 \(pure noise\), got \[757, 522\]"),
        (("task.objective.timesteps=[1000,0]",), r"timesteps=\[1000,0\]: expected .* a number above 0"),
        (("task.objective.timesteps=[]",), "timesteps must be strictly decreasing"),
        (("task.negative_prompt=null",), r"guidance=2.5 \(standard\) needs a negative embedding.*negative_prompt=null"),
        (("task.negative_prompt=ugly", "task.objective.guidance=1"), "negative_prompt='ugly' has no effect"),
        (("task.objective.cfg_form=other",), "cfg_form=other: expected one of standard, additive, got 'other'"),
        (("task.objective.source=magic",), "source=magic: expected one of simulate, data_latent, got 'magic'"),
        (("task.objective.min_ratio=0.9", "task.objective.max_ratio=0.5"), "min_ratio=0.9, max_ratio=0.5"),
        (("task.objective.velocity=-1",), "velocity=-1: expected a number of at least 0, got -1"),
        (("task.generator_every=0",), "generator_every=0: expected an integer of at least 1, got 0"),
        (("task.fake_score_warmup=-1",), "task.fake_score_warmup=-1: expected an integer of at least 0, got -1"),
        (("task.gates=maybe",), "task.gates=maybe: expected one of initial, required, got 'maybe'"),
        (("task.gates=required",), "lacks 4 gate tensors"),
        (("task.collapse.min_std=2",), "task.collapse.min_std=2: expected a number of at least 0 and below 1, got 2"),
        (("model.num_attention_heads=2",), r"has model.num_attention_heads=1, the model has 2"),
        (("model.ffn_dim=36",), r"\(24, 12\)"),
        (("init_from=null",), "task.teacher=null and init_from=null: name a dense checkpoint"),
        (("task.teacher=nowhere",), "no such folder: nowhere"),
        (
            ("attention@task.fake_score_attention=video_sparse", "task.fake_score_attention.gate_init=model"),
            r"as fake_score .* needs gate_init=identity",
        ),
        (
            ("attention@task.fake_score_attention=sparge",),
            r"^task.fake_score_attention=sparge is training-free: .* set task.fake_score_attention.allow_training=true",
        ),
        (("data.batch_size=6", "trainer.accumulate_grad_batches=4"), "data.batch_size=6 must be a multiple of the 4"),
        (("flop_budget=1e12",), "flop_budget"),
        (("callbacks.samples.prompts=[a]",), "callbacks.samples.flow_shift=null"),
    ],
)  # fmt: skip
def test_refused_with_one_line_before_anything_is_written(distill, training, overrides, message):
    with pytest.raises(ValueError, match=message) as error:
        distill("run=refused", *overrides)
    assert "\n" not in str(error.value)
    assert not training.folder("refused").exists()


def test_a_teacher_of_other_latents_is_refused(distill, training, teacher_dir):
    training(*DENSE, "run=scaled", "task.latent_scale=shared", "overwrite=true")
    with pytest.raises(ValueError, match="latents of another scale than the teacher"):
        distill(f"task.teacher={training.folder('scaled')}", "run=refused")


@pytest.mark.parametrize("role", ["init_from", "task.teacher"])
def test_an_expert_is_not_distilled(distill, training, teacher_dir, tmp_path, role):
    expert = tmp_path / "expert"
    shutil.copytree(teacher_dir, expert)
    checkpoint = resolve_checkpoint(expert)
    config = checkpoint.state["config"]
    config["task"]["objective"]["noise_range"] = [0.0, 0.875]
    rewrite_state(checkpoint.path, config=config)
    with pytest.raises(
        ValueError, match=r"expert.* is an expert for noise levels 0 to 0.875, a distillation needs one network for all"
    ):
        distill(f"{role}={expert}", "run=refused")
    assert not training.folder("refused").exists()


def test_a_checkpoint_of_another_task_is_no_distillation(distill, training, teacher_dir):
    with pytest.raises(
        ValueError, match=r"is a checkpoint of vsa.training.modules.pretrain.PretrainModule, the settings have"
    ):
        distill("init_from=null", f"task.teacher={teacher_dir}", f"ckpt_path={teacher_dir}", "run=wrong")


def test_roles_that_share_a_parameter_are_refused():
    torch.manual_seed(0)
    a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    refuse_shared_parameters({"generator": a, "fake_score": b})
    b.weight = a.weight
    with pytest.raises(ValueError, match=r"generator and fake_score share a parameter \(weight and weight\)"):
        refuse_shared_parameters({"generator": a, "fake_score": b})
    # also where only the memory is the same
    b.weight = nn.Parameter(a.weight.detach())
    with pytest.raises(ValueError, match="generator and fake_score share"):
        refuse_shared_parameters({"generator": a, "fake_score": b})


def test_a_shared_network_is_refused_at_the_start(distill, monkeypatch):
    models = []

    def keep(*arguments, **keywords):
        models.append(build_model(*arguments, **keywords))
        return models[-1]

    monkeypatch.setattr("vsa.training.modules.base.build_model", keep)
    monkeypatch.setattr("vsa.training.modules.critic.build_model", lambda *arguments, **keywords: models[0])
    with pytest.raises(ValueError, match="generator and fake_score share a parameter"):
        distill()

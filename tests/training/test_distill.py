"""Distillation: the iteration against a plain loop, resumes at every phase, several ranks, guards and refusals."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file as library_load
from safetensors.torch import save_file as library_save
from torch import nn

from tests.commands import run_command
from tests.tiny_runs import TinyTraining
from tests.training.distillations import (
    DENSE,
    DISTILL,
    GAN,
    TOLD,
    At,
    Keep,
    different,
    everything,
    largest_difference,
)
from tests.training.ranks import run_ranks
from vsa.checkpoints.run_checkpoint import Checkpoint
from vsa.cli.convert import convert
from vsa.config import build_task
from vsa.diffusion.flow_matching import FlowShift, mixed_generator, noise_like
from vsa.diffusion.rollout import rollout_index, stream_seeds
from vsa.models.video_dit import VideoDiT
from vsa.objectives.distribution_matching import DistributionMatching
from vsa.objectives.flow_matching import VALIDATION_SEED
from vsa.sampling.pipeline import load_run
from vsa.training.parallel import build_model, refuse_shared_parameters
from vsa.training.run_state import tensors_of

# the iteration


def plain_sigmas(seed: int, iteration: int, slots: int, update: str) -> torch.Tensor:
    """Noise levels by their definition: stratified, shifted by 3, clamped."""
    generator = mixed_generator("sigma", mixed_generator("score", update, seed).initial_seed(), iteration)
    strata = torch.randperm(slots, generator=generator)
    u = (strata + torch.rand(slots, generator=generator, dtype=torch.float64)) / slots
    return (3 * u / (1 + 2 * u)).clamp(0.02, 0.98)


def plain_loop(kept: Keep, iterations: int, every: int, topk: int) -> dict[str, VideoDiT]:
    """DMD2 written out sample by sample, in the order of the text book: no trainer, no shared functions of the loss."""
    nets = kept.start
    for role in ("generator", "fake_score"):
        nets[role].requires_grad_(True)
    adam = {
        role: torch.optim.AdamW(groups(nets[role]), lr=0.01, betas=(0.0, 0.99), eps=0.01, weight_decay=0.01)
        for role in ("generator", "fake_score")
    }
    updates = 0
    for iteration, batch in enumerate(kept.batches[:iterations]):
        latents = (batch.latents - kept.mean.view(1, -1, 1, 1, 1)) / kept.std.view(1, -1, 1, 1, 1)

        def generated(update, i, grad, iteration=iteration, batch=batch, latents=latents):
            one = slice(i, i + 1)
            seeds = stream_seeds(batch.seeds[one], f"{update} rollout")
            index = rollout_index(seed=0, iteration=iteration, num_steps=3, update=update)
            x = noise_like(latents[one], seeds)
            x0 = torch.zeros_like(x)
            for step, level in enumerate((1.0, 0.757, 0.522)[: index + 1]):
                if step > 0:
                    x = (1 - level) * x0 + level * noise_like(x, stream_seeds(seeds, f"step {step}"))
                with torch.set_grad_enabled(grad and step == index):
                    x0 = x - level * says(nets["generator"], x, level, batch.text[one], batch.text_mask[one])
            sigma = plain_sigmas(0, iteration, len(batch.seeds), update)[batch.slots[i]].float()
            noise = noise_like(x0, stream_seeds(batch.seeds[one], f"{update} score"))
            return x0, ((1 - sigma) * x0 + sigma * noise).detach(), float(sigma), noise

        def says(net, x, sigma, text, mask):
            return net(x, torch.tensor([1000 * sigma]), text, mask, topk=topk)

        if iteration % every == 0:
            for i in range(len(batch.seeds)):
                text, mask = batch.text[i : i + 1], batch.text_mask[i : i + 1]
                x0, x_t, sigma, _ = generated("generator", i, True)
                with torch.no_grad():
                    fake = x_t - sigma * says(nets["fake_score"], x_t, sigma, text, mask)
                    cond = says(nets["real_score"], x_t, sigma, text, mask)
                    uncond = says(nets["real_score"], x_t, sigma, kept.negative.text, kept.negative.mask)
                    real = x_t - sigma * (uncond + 2.5 * (cond - uncond))
                    gradient = (fake - real) / (x0 - real).abs().mean()
                (0.5 * (x0 - (x0 - gradient).detach()).square().mean() / len(batch.seeds)).backward()
            step(adam["generator"], nets["generator"], 0.01 * min(1, (updates + 1) / 3))
            updates += 1
        for i in range(len(batch.seeds)):
            x0, x_t, sigma, noise = generated("fake_score", i, False)
            velocity = says(nets["fake_score"], x_t, sigma, batch.text[i : i + 1], batch.text_mask[i : i + 1])
            ((velocity - (noise - x0.detach())).square().mean() / len(batch.seeds)).backward()
        step(adam["fake_score"], nets["fake_score"], 0.01)
    return nets


def groups(net: VideoDiT) -> list[dict]:
    roles = net.parameter_roles()
    decays = [p for n, p in net.named_parameters() if roles[n] in ("matrix", "gate", "head")]
    others = [p for n, p in net.named_parameters() if roles[n] not in ("matrix", "gate", "head")]
    return [{"params": decays}, {"params": others, "weight_decay": 0.0}]


def step(optimizer: torch.optim.Optimizer, net: nn.Module, lr: float) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()


def test_iterations_are_those_of_a_plain_loop(distill, training):
    kept = Keep()
    distill("task.generator_every=2", "trainer.max_steps=5", "run=module", callbacks=(kept,))
    before = {role: {n: p.clone() for n, p in net.named_parameters()} for role, net in kept.start.items()}
    found = training.last("module")
    nets = plain_loop(kept, 5, every=2, topk=4)
    for role, group in (("generator", "model"), ("fake_score", "fake_score")):
        ours, plain = found.tensors(group), dict(nets[role].named_parameters())
        assert largest_difference(ours, plain) < 2e-6, role
        # control: it went somewhere, and further than the bound
        assert largest_difference(ours, before[role]) > 1e-4, role
    assert largest_difference(dict(nets["real_score"].named_parameters()), before["real_score"]) == 0


SHORT = ("task.generator_every=1", "trainer.max_steps=3", "callbacks.ema=null")


@pytest.fixture(scope="module")
def as_is(teacher_dir, tmp_path_factory) -> dict[str, dict[str, torch.Tensor]]:
    """Generator and critic after three iterations with the settings as they are."""
    training = TinyTraining(tmp_path_factory.mktemp("as_is"), pytest.MonkeyPatch())
    training(*DISTILL, f"init_from={teacher_dir}", *SHORT)
    return {group: training.last().tensors(group) for group in ("model", "fake_score")}


# a Hydra choice and settings of it
SPARSE_SCORE = ";".join(("attention@task.{0}_attention=video_sparse", "task.{0}_attention.tile_thw=[1,2,2]"))


@pytest.mark.parametrize(
    ("change", "groups"),
    [
        ("task.objective.guidance=1", {"model", "fake_score"}),
        ("task.objective.cfg_form=additive", {"model", "fake_score"}),
        ("task.negative_prompt=a red circle", {"model", "fake_score"}),
        ("task.objective.source=data_latent", {"model", "fake_score"}),
        ("task.objective.velocity=1", {"model", "fake_score"}),
        ("task.objective.timesteps=[1000,500]", {"model", "fake_score"}),
        ("task.objective.timesteps_shift=5", {"model", "fake_score"}),
        ("task.objective.max_ratio=0.5", {"model", "fake_score"}),
        ("task.objective.min_ratio=0.5", {"model", "fake_score"}),
        ("task.objective.shift.value=9", {"model", "fake_score"}),
        ("task.fake_score_warmup=1", {"model", "fake_score"}),
        ("task.generator_every=2", {"model", "fake_score"}),
        ("task.fake_score_optim.lr=0.02", {"model", "fake_score"}),
        (SPARSE_SCORE.format("fake_score"), {"model"}),
        (SPARSE_SCORE.format("real_score"), {"model", "fake_score"}),
    ],
)  # fmt: skip
def test_every_setting_reaches_the_iteration(distill, training, as_is, change, groups):
    distill(*SHORT, "run=changed", *change.split(";"))
    for group in groups:
        assert largest_difference(as_is[group], training.last("changed").tensors(group)) > 0


def test_the_same_settings_make_the_same_iteration(distill, training, as_is):
    # control of the test above
    distill(*SHORT, "run=again")
    for group, tensors in as_is.items():
        assert largest_difference(tensors, training.last("again").tensors(group)) == 0


def test_accumulated_micro_batches_are_one_batch(distill, training):
    short = ("task.generator_every=2", "trainer.max_steps=4")
    distill(*short, "run=one")
    distill(*short, "run=four", "trainer.accumulate_grad_batches=4")
    assert training.last("four").step == 4
    one, four = everything(training.last("one")), everything(training.last("four"))
    assert largest_difference(one, four) < 1e-6
    for step, row in training.metrics("one").items():
        for name in ("fake_score/loss", "dmd/gap", "generated/std", "grad_norm/total"):
            other = training.metrics("four")[step][name]
            assert (row[name] == "") == (other == "")
            assert row[name] == "" or float(row[name]) == pytest.approx(float(other), rel=1e-5)


def test_only_its_own_network_gets_gradients_in_an_update(distill):
    seen = {}

    def watch(trainer, module):
        def guarded(name, guard):
            def check(optimizer, iteration):
                nets = {
                    "generator": module.model,
                    "fake_score": module.fake_score.network,
                    "real": module.teacher.network,
                }
                seen[name] = {role for role, net in nets.items() if any(p.grad is not None for p in net.parameters())}
                return guard(optimizer, iteration)

            check.__dict__ = {"skipped": False, "skipped_total": 0, "state_dict": guard.state_dict, "step": guard.step}
            return check

        module.clipper = guarded("generator", module.clipper)
        module.fake_score.clipper = guarded("fake_score", module.fake_score.clipper)

    distill("trainer.max_steps=1", callbacks=(At(0, before=watch),))
    assert seen == {"generator": {"generator"}, "fake_score": {"fake_score"}}


def test_updates_schedules_and_averages_count_their_own_network(distill, training):
    kept = Keep()
    trainer = distill(
        *("task.generator_every=4", "task.fake_score_warmup=3", "run=counted", "callbacks.checkpoint.every_n_steps=1"),
        *("callbacks.checkpoint.keep=12", "task.fake_score_optim.schedule.warmup_steps=6", "sparsity=linear"),
        *("sparsity.topk=2", "sparsity.dense_steps=2", "sparsity.total_steps=9", "~sparsity.sparsity"),
        callbacks=(kept,),
    )
    assert trainer.global_step == 12
    rows = training.metrics("counted")
    # turns at iterations 3, 7 and 11 (from 0): steps 4, 8 and 12
    assert [int(rows[s]["updates/generator"]) for s in sorted(rows)] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert [int(rows[s]["updates/fake_score"]) for s in sorted(rows)] == list(range(1, 13))
    assert [bool(rows[s]["dmd/gap"]) for s in sorted(rows)] == [s in (4, 8, 12) for s in range(1, 13)]
    generator, critic = zip(*kept.lrs, strict=True)
    # three warm-up updates of its own
    assert generator == pytest.approx([0.01 * n / 3 for n in (1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)])
    assert critic == pytest.approx([0.01 * min(1, n / 6) for n in range(1, 13)])
    # sparsity counts iterations
    assert [int(float(rows[s]["sparsity/topk"])) for s in sorted(rows)][:2] == [8, 8]
    assert int(float(rows[12]["sparsity/topk"])) == 2
    path = training.folder("counted") / "checkpoints"
    states = [everything(Checkpoint(path=p, state=training_state(p))) for p in sorted(path.glob("step-*"))]
    always, turn = {"fake_score", "fake_score_optimizer"}, {"model", "optimizer", "ema"}
    # the generator has no moments before its first update, in step 4
    assert {len(state) for state in states[:3]} < {len(state) for state in states}
    for step, (before, after) in enumerate(pairwise(states), 2):
        if step != 4:
            assert different(before, after) == (always | turn if step in (8, 12) else always), step


def training_state(path: Path) -> dict:
    return json.loads((path / "state.json").read_text())


def test_flops_of_an_iteration_are_those_of_its_passes(distill, training, teacher_dir):
    found = {}

    def count(trainer, module):
        (batch,) = kept.batches[-1:]
        shape, text = tuple(batch.latents.shape[1:]), batch.text.shape[1]

        def flops(net, training):
            return net.flops(shape, 4, text, training=training).executed

        critic = rollout_index(seed=0, iteration=trainer.global_step - 1, num_steps=3, update="fake_score")
        own = rollout_index(seed=0, iteration=trainer.global_step - 1, num_steps=3, update="generator")
        generator, dense = module.model, module.teacher.network
        total = (critic + 1) * flops(generator, False) + flops(dense, True)
        if trainer.global_step == 1:
            # the generator's rollout, the critic, the teacher twice
            total += own * flops(generator, False) + flops(generator, True) + 3 * flops(dense, False)
        found[trainer.global_step] = (module.step_flops(batch, trainer.global_step - 1).executed, total)

    kept = Keep()
    distill("trainer.max_steps=3", callbacks=(kept, *(At(i, after=count) for i in range(3))))
    assert len(found) == 3
    for ours, plain in found.values():
        assert ours == pytest.approx(plain)


def test_critic_and_teacher_start_from_the_teacher_and_gates_at_identity(distill, teacher_dir, training):
    kept = Keep()
    distill("trainer.max_steps=1", callbacks=(kept,))
    ema = Checkpoint(path=teacher_dir / "checkpoints" / "step-00000004", state={"files": {}}).tensors("ema")
    for role in ("fake_score", "real_score"):
        assert largest_difference(dict(kept.start[role].named_parameters()), ema) == 0
    generator = dict(kept.start["generator"].named_parameters())
    gates = {name for name in generator if "to_gate" in name}
    assert gates
    assert all(not generator[name].any() for name in gates)
    assert largest_difference({n: p for n, p in generator.items() if n not in gates}, ema) == 0


def test_a_sparse_checkpoint_keeps_its_gates(distill, training, teacher_dir):
    training(
        *("task=finetune", "start=dense", f"init_from={teacher_dir}"),
        *("run=sparse", "trainer.max_steps=3"),
    )
    kept = Keep()
    training(
        *(*DISTILL, f"init_from={training.folder('sparse')}", f"task.teacher={teacher_dir}", "task.gates=required"),
        *("trainer.max_steps=1", "run=gated"),
        callbacks=(kept,),
    )
    ema = training.last("sparse").tensors("ema")
    assert any(value.any() for name, value in ema.items() if "to_gate" in name)
    assert largest_difference(dict(kept.start["generator"].named_parameters()), ema) == 0


# resume


@pytest.mark.parametrize("phase", range(5))
def test_a_run_killed_at_any_phase_resumes_bit_for_bit(distill, training, phase, tmp_path_factory):
    common = (
        *("task.generator_every=5", "callbacks.checkpoint.every_n_steps=1", "trainer.accumulate_grad_batches=2"),
        *("sparsity=linear", "sparsity.topk=2", "sparsity.dense_steps=1", "sparsity.total_steps=10"),
        *("~sparsity.sparsity", "task.fake_score_warmup=1", "trainer.val_check_interval=8"),
    )
    distill(*common, "run=straight")
    iteration = 5 + phase

    def killed() -> None:
        def kill(trainer, module):
            os.kill(os.getpid(), signal.SIGKILL)

        distill(*common, "run=killed", callbacks=(At(iteration, before=kill),))

    child = multiprocessing.get_context("fork").Process(target=killed)
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    assert training.last("killed").step == iteration
    half = everything(training.last("killed"))
    distill(*common, "run=killed", "ckpt_path=last")
    end = everything(training.last("straight"))
    assert different(everything(training.last("killed")), end) == set()
    assert different(half, end) == {"model", "ema", "optimizer", "fake_score", "fake_score_optimizer"}
    straight, resumed = training.metrics("straight"), training.metrics("killed")
    assert set(straight) == set(resumed)
    timed = ("throughput/step_seconds", "throughput/tokens_per_second", "throughput/tflops")
    for step, row in straight.items():
        ours, theirs = ({k: v for k, v in r.items() if v and not k.startswith(timed)} for r in (row, resumed[step]))
        assert ours == theirs, step
    states = [
        {k: v for k, v in training.last(run).state.items() if k not in ("config", "files")}
        for run in ("straight", "killed")
    ]
    assert states[0] == states[1]


def test_what_a_checkpoint_leaves_out_would_be_missed(distill, training):
    """The control of the resume: each group that is changed changes the run."""
    common = ("task.generator_every=2", "trainer.max_steps=6", "callbacks.ema=null")
    distill(*common, "run=straight")
    end = everything(training.last("straight"))
    stop = At(3, before=lambda trainer, module: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        distill(*common, "run=half", callbacks=(stop,))
    for group in ("model", "optimizer", "fake_score", "fake_score_optimizer"):
        shutil.copytree(training.folder("half"), training.folder(group))

        def scale(trainer, module, group=group):
            tensors = tensors_of(module.parts())[group]
            with torch.no_grad():
                for value in tensors.values():
                    value.mul_(1.01)

        distill(*common, f"run={group}", "ckpt_path=last", callbacks=(At(4, before=scale),))
        assert different(everything(training.last(group)), end)


def test_a_resume_with_another_cycle_or_teacher_is_refused(distill, training, teacher_dir):
    distill("task.generator_every=2", "trainer.max_steps=3", "run=cycle")
    same = ("trainer.max_steps=5", "run=cycle", "ckpt_path=last")
    for overrides, message in (
        (("task.generator_every=1",), "was trained with task.generator_every=2, the settings have 1"),
        (("task.generator_every=2", "task.fake_score_warmup=4"), "task.fake_score_warmup=0, the settings have 4"),
        (("task.generator_every=2", "task.objective.timesteps=[1000,300]"), r"the timesteps=\[1000.0, 757.0, 522.0\]"),
        (("task.generator_every=2", "task.teacher=elsewhere"), r"is not to be found \(no such folder: elsewhere"),
        (("task.generator_every=2", "task.objective.source=data_latent"), "with task.objective.source=simulate, the"),
    ):
        with pytest.raises(ValueError, match=message):
            distill(*same, *overrides)
    sparse = ("start=dense", f"init_from={teacher_dir}")
    with pytest.raises(ValueError, match=r"is a checkpoint of vsa\.training\.modules\.distill\.DistillModule"):
        training("task=finetune", *sparse, *same)
    path = training.last("cycle").path / "state.json"
    state = json.loads(path.read_text())
    for key in ("collapse", "fake_score", "step_list", "teacher"):
        path.write_text(json.dumps({name: value for name, value in state.items() if name != key}))
        with pytest.raises(ValueError, match=f"not a complete checkpoint of this run: missing {key}"):
            distill(*same, "task.generator_every=2", f"ckpt_path={path.parent}")
    path.write_text(json.dumps(state))
    # what may change: learning rates, guidance, the rule
    distill(*same, "task.generator_every=2", "optim.lr=0.02", "task.objective.guidance=1", "task.collapse=null")
    assert training.last("cycle").step == 5


def test_a_folder_as_teacher_is_pinned_by_what_it_was(distill, training, tmp_path):
    """Weights in diffusers' layout are read once: what becomes of their folder meanwhile changes nothing."""
    folder = tmp_path / "dense"
    # diffusers has no absolute positions
    plain = "model.absolute_positions=false"
    training(*DENSE, plain, "run=plain", "trainer.max_steps=2")
    run_command(convert, training.folder("plain"), folder, "--to", "diffusers")
    own = (plain, "task.latent_scale=shared", f"task.teacher={folder}", f"init_from={folder}", "task.generator_every=1")
    gone = At(1, before=lambda trainer, module: folder.rename(tmp_path / "away"))
    distill(*own, "trainer.max_steps=3", "run=moved", "callbacks.checkpoint.every_n_steps=1", callbacks=(gone,))
    shutil.copytree(tmp_path / "away", folder)
    distill(*own, "trainer.max_steps=4", "run=moved", "ckpt_path=last")
    digest = training.last("moved").state["teacher"]["digest"]
    assert digest
    weights = next(folder.glob("*.safetensors"))
    library_save({name: value * 1.01 for name, value in library_load(weights).items()}, weights)
    with pytest.raises(ValueError, match=r"is not what .*moved.* began with, or has changed since"):
        distill(*own, "trainer.max_steps=5", "run=moved", "ckpt_path=last")


def test_a_distilled_model_is_no_teacher(distill, training, teacher_dir):
    dense = [o for o in DISTILL if not o.startswith("attention.")]
    training(
        *dense, "attention=full", "~attention.tile_thw", f"init_from={teacher_dir}", "run=few", "trainer.max_steps=1"
    )
    with pytest.raises(ValueError, match=r"is distilled already, to the timesteps \[1000.0, 757.0, 522.0\]"):
        distill(f"init_from={training.folder('few')}", "run=again")


def test_the_frozen_teacher_is_outside_of_the_checkpoint_and_pinned(distill, training, teacher_dir, tmp_path):
    own = tmp_path / "teacher"
    shutil.copytree(teacher_dir, own)
    distill(f"init_from={own}", "trainer.max_steps=2", "run=pinned")
    state = training.last("pinned").state
    assert Path(state["teacher"]["source"]).is_relative_to(own)
    assert {name.removesuffix(".safetensors") for name in state["files"]} == {
        "model", "ema", "optimizer", "fake_score", "fake_score_optimizer",
    }  # fmt: skip
    # the start is gone, the teacher is found where it was; another one in its place is refused
    distill(f"init_from={own}", "trainer.max_steps=3", "run=pinned", "ckpt_path=last")
    assert training.last("pinned").step == 3
    # moved, and named where it is now
    own.rename(tmp_path / "moved")
    again = ("trainer.max_steps=4", "run=pinned", "ckpt_path=last")
    with pytest.raises(ValueError, match=r"is not to be found .* say where to with task\.teacher="):
        distill(f"init_from={own}", *again)
    distill(f"init_from={own}", f"task.teacher={tmp_path / 'moved'}", *again)
    assert training.last("pinned").step == 4
    training(*DENSE, "seed=1", "run=other", "overwrite=true")
    shutil.copytree(training.folder("other"), own)
    with pytest.raises(ValueError, match=r"is not what .*pinned.* began with, or has changed since"):
        distill(f"init_from={own}", f"task.teacher={own}", "trainer.max_steps=5", "run=pinned", "ckpt_path=last")


# several ranks


@pytest.mark.parametrize(
    ("trainer", "term"),
    [
        ("fsdp", ()),
        pytest.param("fsdp", (GAN, TOLD), marks=pytest.mark.slow),
        pytest.param("ddp", (), marks=pytest.mark.slow),
    ],
)
def test_two_ranks_are_one(distill, training, trainer, term):
    common = (*term, "task.generator_every=5", "trainer.val_check_interval=6", "callbacks.checkpoint.every_n_steps=6")
    distill(*common, "run=one")
    spread = (
        f"trainer={trainer}",
        "trainer.accelerator=cpu",
        "trainer.accumulate_grad_batches=2",
        "trainer.val_check_interval=12",
    )

    def on_rank(rank: int) -> None:
        distill(*common, *spread, "run=two")
        source = training.folder("one") / "checkpoints" / "step-00000006"
        distill(*common, *spread, "run=resumed", f"ckpt_path={source}")

    run_ranks(2, on_rank)
    one = everything(training.last("one"))
    assert largest_difference(one, everything(training.last("two"))) < 1e-6
    assert largest_difference(one, everything(training.last("resumed"))) < 1e-6
    rows, others = training.metrics("one"), training.metrics("two")
    for step, row in rows.items():
        for name in ("fake_score/loss", "dmd/gap", "generated/std", "fake_score/grad_norm/total", "val/gap", "val/std"):
            assert (row[name] == "") == (others[step][name] == "")
            assert row[name] == "" or float(row[name]) == pytest.approx(float(others[step][name]), rel=1e-5), name
    assert {step for step, row in rows.items() if row["val/gap"]} == {6, 12}
    # control: the second half moved everything by more
    half = everything(Checkpoint(path=training.folder("one") / "checkpoints" / "step-00000006", state=training_state(
        training.folder("one") / "checkpoints" / "step-00000006")))  # fmt: skip
    assert largest_difference(half, one) > 1e-3


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
    folder = training.folder("poisoned") / "checkpoints"
    states = [everything(Checkpoint(path=p, state=training_state(p))) for p in sorted(folder.glob("step-*"))]
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
              "trainer.max_steps=40", "callbacks.checkpoint.every_n_steps=1")  # fmt: skip
    message = "the generator has collapsed: .*3 batches in a row had latents of standard deviation"
    with pytest.raises(FloatingPointError, match=message):
        distill(*common, callbacks=(At(1, before=blank),))
    stopped = training.last("collapsed")
    assert stopped.state["collapse"] == {"collapsed_in_row": 2}
    # the next last-step rollout is the third also in a resumed run
    with pytest.raises(FloatingPointError, match=message):
        distill(*common, "ckpt_path=last")
    assert training.last("collapsed").state["collapse"] == {"collapsed_in_row": 2}
    # without the rule it goes on
    distill(*common, "task.collapse=null", "trainer.max_steps=22", "run=careless", callbacks=(At(1, before=blank),))


# what comes out


def test_a_learning_rate_that_ends_before_the_run_is_refused(distill):
    wsd = ("optim=adamw_wsd", "optim.lr=0.01", "optim.schedule.total_steps=2", "task.generator_every=5")
    with pytest.raises(ValueError, match=r"total_steps=2, but the generator has 3 updates in trainer.max_steps=12"):
        distill(*wsd)
    distill(*wsd, "trainer.max_steps=10")


def test_a_distilled_run_is_sampled_at_its_list(distill, training):
    distill(
        "trainer.max_steps=1", "task.objective.timesteps=[1000,600]", "task.objective.timesteps_shift=2", "run=short"
    )
    run = load_run(training.folder("short"))
    assert run.step_list == pytest.approx((1000, 750))
    assert run.settings().steps == 2
    assert run.settings().guidance == 1


def test_validation_has_the_topk_of_the_last_iteration(distill, monkeypatch):
    update, seen = DistributionMatching.generator_update, []

    def spy(self, *args, seed, topk, **kwargs):
        if seed >= VALIDATION_SEED:
            seen.append(topk)
        return update(self, *args, seed=seed, topk=topk, **kwargs)

    monkeypatch.setattr(DistributionMatching, "generator_update", spy)
    stairs = ("sparsity=staircase", "sparsity.topk=2", "sparsity.dense_steps=1", "sparsity.interval=1")
    distill(*stairs, "~sparsity.sparsity", "sparsity.tiles=2", "trainer.max_steps=3", "trainer.val_check_interval=1")
    assert sorted(set(seen), reverse=True) == [8, 6, 4]


def test_curves_are_drawn(distill, training):
    distill("trainer.max_steps=3", "trainer.val_check_interval=2", "run=drawn")
    module = build_task(training.config(*DISTILL))
    module.draw_curves(training.folder("drawn") / "metrics.csv", training.folder("drawn") / "loss.png", "drawn")
    assert (training.folder("drawn") / "loss.png").stat().st_size > 10_000


# bad input


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("task.objective.timesteps=[1000,757,757]",), r"timesteps must fall strictly .* got \[1000, 757, 757\]"),
        (("task.objective.timesteps=[757,522]",), r"must start at 1000, which is pure noise, got \[757, 522\]"),
        (("task.objective.timesteps=[1000,0]",), r"timesteps=\[1000,0\]: expected .* a number above 0"),
        (("task.objective.timesteps=[]",), "timesteps must fall strictly"),
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
        (("data.batch_size=6", "trainer.accumulate_grad_batches=4"), "data.batch_size=6 is not divisible by the 4"),
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
    made = []

    def keep(*arguments, **keywords):
        made.append(build_model(*arguments, **keywords))
        return made[-1]

    monkeypatch.setattr("vsa.training.modules.base.build_model", keep)
    monkeypatch.setattr("vsa.training.modules.critic.build_model", lambda *arguments, **keywords: made[0])
    with pytest.raises(ValueError, match="generator and fake_score share a parameter"):
        distill()


def test_objective_names_what_it_needs():
    shift = FlowShift()
    assert not DistributionMatching(shift=shift, guidance=1).guided
    assert not DistributionMatching(shift=shift, guidance=0, cfg_form="additive").guided
    assert DistributionMatching(shift=shift, guidance=3.5, cfg_form="additive").guided
    warped = DistributionMatching(shift=shift, timesteps=(1000, 500), timesteps_shift=8)
    assert warped.step_list == pytest.approx((1000, 8000 / 9))

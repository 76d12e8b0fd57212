"""Distillation: the iteration against a plain loop, the networks it starts from, and what comes out."""

from __future__ import annotations

import copy
import functools
import json
from itertools import pairwise

import pytest
import torch
from torch import nn

import vsa.training.callbacks.step_profile as step_profile
from tests.states import largest_difference
from tests.tiny_runs import TinyTraining
from tests.training.distillations import (
    DISTILL,
    At,
    Keep,
    checkpoints,
    different,
    everything,
)
from vsa.checkpoints.run_checkpoint import read_checkpoint
from vsa.config import build_task
from vsa.diffusion.flow_matching import FlowShift, noise_like
from vsa.diffusion.rollout import rollout_index, stream_seeds
from vsa.models.video_dit import VideoDiT
from vsa.noise import mixed_generator
from vsa.objectives.distribution_matching import DistributionMatching
from vsa.objectives.flow_matching import VALIDATION_SEED
from vsa.sampling.pipeline import load_run
from vsa.training.step_flops import StepFlops

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

        def generate(update, i, grad, iteration=iteration, batch=batch, latents=latents):
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
                x0, x_t, sigma, _ = generate("generator", i, True)
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
            x0, x_t, sigma, noise = generate("fake_score", i, False)
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


@pytest.fixture(scope="module")
def kept_run(teacher_dir, tmp_path_factory) -> tuple[Keep, TinyTraining]:
    """A run of five iterations, its batches and the networks as they started."""
    record, training = Keep(), TinyTraining(tmp_path_factory.mktemp("kept"), pytest.MonkeyPatch())
    long = ("task.generator_every=2", "trainer.max_steps=5", "trainer.val_check_interval=2")
    training(*DISTILL, f"init_from={teacher_dir}", *long, callbacks=(record,))
    return record, training


def test_iterations_are_those_of_a_plain_loop(kept_run):
    record, training = copy.copy(kept_run[0]), kept_run[1]
    record.start = copy.deepcopy(record.start)
    before = {role: {n: p.clone() for n, p in net.named_parameters()} for role, net in record.start.items()}
    checkpoint = training.last()
    nets = plain_loop(record, 5, every=2, topk=4)
    for role, group in (("generator", "model"), ("fake_score", "fake_score")):
        ours, plain = checkpoint.tensors(group), dict(nets[role].named_parameters())
        assert largest_difference(ours, plain) < 2e-6, role
        # control: it went somewhere, and further than the bound
        assert largest_difference(ours, before[role]) > 1e-4, role
    assert largest_difference(dict(nets["real_score"].named_parameters()), before["real_score"]) == 0


SHORT = ("task.generator_every=1", "trainer.max_steps=2", "callbacks.ema=null")


@pytest.fixture(scope="module")
def as_is(teacher_dir, tmp_path_factory) -> dict[str, dict[str, torch.Tensor]]:
    """Generator and critic after three iterations with the settings as they are."""
    training = TinyTraining(tmp_path_factory.mktemp("as_is"), pytest.MonkeyPatch())
    training(*DISTILL, f"init_from={teacher_dir}", *SHORT)
    return {group: training.last().tensors(group) for group in ("model", "fake_score")}


also = functools.partial(pytest.param, marks=pytest.mark.slow)
# a Hydra choice and settings of it
SPARSE_SCORE = ";".join(("attention@task.{0}_attention=video_sparse", "task.{0}_attention.tile_thw=[1,2,2]"))


@pytest.mark.parametrize(
    ("change", "groups"),
    [
        also("task.objective.guidance=1", {"model", "fake_score"}),
        also("task.objective.cfg_form=additive", {"model", "fake_score"}),
        ("task.negative_prompt=a red circle", {"model", "fake_score"}),
        ("task.objective.source=data_latent", {"model", "fake_score"}),
        also("task.objective.velocity=1", {"model", "fake_score"}),
        also("task.objective.timesteps=[1000,500]", {"model", "fake_score"}),
        also("task.objective.timesteps_shift=5", {"model", "fake_score"}),
        also("task.objective.max_ratio=0.5", {"model", "fake_score"}),
        also("task.objective.min_ratio=0.5", {"model", "fake_score"}),
        also("task.objective.shift.value=9", {"model", "fake_score"}),
        also("task.fake_score_warmup=1", {"model", "fake_score"}),
        also("task.generator_every=2", {"model", "fake_score"}),
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
    short = ("task.generator_every=1", "trainer.max_steps=2")
    distill(*short, "run=one")
    distill(*short, "run=four", "trainer.accumulate_grad_batches=4")
    assert training.last("four").step == 2
    one, four = everything(training.last("one")), everything(training.last("four"))
    assert largest_difference(one, four) < 1e-6
    for step, row in training.metrics("one").items():
        for name in ("fake_score/loss", "dmd/gap", "generated/std", "grad_norm/total"):
            other = training.metrics("four")[step][name]
            assert (row[name] == "") == (other == "")
            assert row[name] == "" or float(row[name]) == pytest.approx(float(other), rel=1e-5)


def test_only_its_own_network_gets_gradients_in_an_update(distill):
    roles = {}

    def watch(trainer, module):
        def spy_on(name, guard):
            def check(optimizer, iteration):
                nets = {
                    "generator": module.model,
                    "fake_score": module.fake_score.network,
                    "real": module.teacher.network,
                }
                roles[name] = {role for role, net in nets.items() if any(p.grad is not None for p in net.parameters())}
                return guard(optimizer, iteration)

            names = ("skipped", "skipped_total", "unread", "state_dict", "step", "refuse_all_dropped")
            check.__dict__ = {name: getattr(guard, name) for name in names}
            return check

        module.clipper = spy_on("generator", module.clipper)
        module.fake_score.clipper = spy_on("fake_score", module.fake_score.clipper)

    distill("trainer.max_steps=1", callbacks=(At(0, before=watch),))
    assert roles == {"generator": {"generator"}, "fake_score": {"fake_score"}}


def test_updates_schedules_and_averages_count_their_own_network(distill, training):
    record = Keep()
    trainer = distill(
        *("task.generator_every=4", "task.fake_score_warmup=3", "run=counted", "callbacks.checkpoint.every_n_steps=1"),
        *("callbacks.checkpoint.keep=12", "task.fake_score_optim.schedule.warmup_steps=6", "sparsity=linear"),
        *("sparsity.topk=2", "sparsity.dense_steps=2", "sparsity.total_steps=9", "~sparsity.sparsity"),
        callbacks=(record,),
    )
    assert trainer.global_step == 12
    rows = training.metrics("counted")
    # turns at iterations 3, 7 and 11 (from 0): steps 4, 8 and 12
    assert [int(rows[s]["updates/generator"]) for s in sorted(rows)] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert [int(rows[s]["updates/fake_score"]) for s in sorted(rows)] == list(range(1, 13))
    assert [bool(rows[s]["dmd/gap"]) for s in sorted(rows)] == [s in (4, 8, 12) for s in range(1, 13)]
    generator, critic = zip(*record.lrs, strict=True)
    # three warm-up updates of its own
    assert generator == pytest.approx([0.01 * n / 3 for n in (1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)])
    assert critic == pytest.approx([0.01 * min(1, n / 6) for n in range(1, 13)])
    # sparsity counts iterations
    assert [int(float(rows[s]["sparsity/topk"])) for s in sorted(rows)][:2] == [8, 8]
    assert int(float(rows[12]["sparsity/topk"])) == 2
    states = [everything(checkpoint) for checkpoint in checkpoints(training.folder("counted"))]
    always, turn = {"fake_score", "fake_score_optimizer"}, {"model", "optimizer", "ema"}
    # the generator has no moments before its first update, in step 4
    assert {len(state) for state in states[:3]} < {len(state) for state in states}
    for step, (before, after) in enumerate(pairwise(states), 2):
        if step != 4:
            assert different(before, after) == (always | turn if step in (8, 12) else always), step


def test_flops_of_an_iteration_are_those_of_its_passes(distill, training, teacher_dir):
    flops_by_step = {}

    def count(trainer, module):
        (batch,) = record.batches[-1:]
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
        flops_by_step[trainer.global_step] = (StepFlops(module)(batch, trainer.global_step - 1).executed, total)

    record = Keep()
    distill("trainer.max_steps=3", callbacks=(record, *(At(i, after=count) for i in range(3))))
    assert len(flops_by_step) == 3
    for ours, plain in flops_by_step.values():
        assert ours == pytest.approx(plain)


@pytest.mark.slow
def test_a_profile_counts_the_updates_of_each_network(distill, training, monkeypatch):
    monkeypatch.setattr(step_profile, "copy_bandwidth", lambda device: 1e3)
    trainer = distill("debug=profile", "trainer.max_steps=5", "task.generator_every=2")
    module = trainer.lightning_module
    kinds = json.loads((training.folder("profile") / "profile.json").read_text())["kinds"]
    turns = [module.cycle.is_generators_turn(iteration) for iteration in (3, 4)]
    share = sum(turns) / len(turns)
    assert share == 0.5
    generator, critic = (sum(p.numel() for p in n.parameters()) for n in (module.model, module.fake_score))
    assert kinds["gradient norms"]["floor"] == pytest.approx(12 * (share * generator + critic))
    assert kinds["averaged weights"]["floor"] == pytest.approx(12 * share * generator)
    assert kinds["gradient norms"]["milliseconds"] > 0


def test_critic_and_teacher_start_from_the_teacher_and_gates_at_identity(kept_run, teacher_dir):
    record, _ = kept_run
    ema = read_checkpoint(teacher_dir / "checkpoints" / "step-00000004").tensors("ema")
    for role in ("fake_score", "real_score"):
        assert largest_difference(dict(record.start[role].named_parameters()), ema) == 0
    generator = dict(record.start["generator"].named_parameters())
    gates = {name for name in generator if "to_gate" in name}
    assert gates
    assert all(not generator[name].any() for name in gates)
    assert largest_difference({n: p for n, p in generator.items() if n not in gates}, ema) == 0


def test_a_sparse_checkpoint_keeps_its_gates(distill, training, teacher_dir):
    training(
        *("task=finetune", "start=dense", f"init_from={teacher_dir}"),
        *("run=sparse", "trainer.max_steps=3"),
    )
    record = Keep()
    training(
        *(*DISTILL, f"init_from={training.folder('sparse')}", f"task.teacher={teacher_dir}", "task.gates=required"),
        *("trainer.max_steps=1", "run=gated"),
        callbacks=(record,),
    )
    ema = training.last("sparse").tensors("ema")
    assert any(value.any() for name, value in ema.items() if "to_gate" in name)
    assert largest_difference(dict(record.start["generator"].named_parameters()), ema) == 0


# what comes out


def test_a_learning_rate_that_ends_before_the_run_is_refused(distill):
    wsd = ("optim=adamw_wsd", "optim.lr=0.01", "optim.schedule.total_steps=2", "task.generator_every=2")
    with pytest.raises(ValueError, match=r"total_steps=2, but the generator has 3 updates in trainer.max_steps=6"):
        distill(*wsd, "trainer.max_steps=6")
    distill(*wsd, "trainer.max_steps=4")


def test_a_distilled_run_is_sampled_at_its_list(distill, training):
    distill(
        "trainer.max_steps=1", "task.objective.timesteps=[1000,600]", "task.objective.timesteps_shift=2", "run=short"
    )
    run = load_run(training.folder("short"), device="cpu")
    assert run.step_list == pytest.approx((1000, 750))
    assert run.settings().steps == 2
    assert run.settings().guidance == 1


def test_validation_has_the_topk_of_the_last_iteration(distill, monkeypatch):
    update, topks = DistributionMatching.generator_update, []

    def spy(self, *args, seed, topk, **kwargs):
        if seed >= VALIDATION_SEED:
            topks.append(topk)
        return update(self, *args, seed=seed, topk=topk, **kwargs)

    monkeypatch.setattr(DistributionMatching, "generator_update", spy)
    stairs = ("sparsity=staircase", "sparsity.topk=2", "sparsity.dense_steps=1", "sparsity.interval=1")
    distill(*stairs, "~sparsity.sparsity", "sparsity.tiles=2", "trainer.max_steps=3", "trainer.val_check_interval=1")
    assert sorted({topk.number for topk in topks}, reverse=True) == [8, 6, 4]


def test_curves_are_drawn(kept_run, tmp_path):
    _, training = kept_run
    module = build_task(training.config(*DISTILL))
    module.draw_curves(training.folder() / "metrics.csv", tmp_path / "loss.png", "drawn")
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_objective_names_what_it_needs():
    shift = FlowShift()
    assert not DistributionMatching(shift=shift, guidance=1).guided
    assert not DistributionMatching(shift=shift, guidance=0, cfg_form="additive").guided
    assert DistributionMatching(shift=shift, guidance=3.5, cfg_form="additive").guided
    objective = DistributionMatching(shift=shift, timesteps=(1000, 500), timesteps_shift=8)
    assert objective.step_list == pytest.approx((1000, 8000 / 9))

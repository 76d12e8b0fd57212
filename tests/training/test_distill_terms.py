"""The GAN term of a distillation, and a critic that is told the step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.states import largest_difference
from tests.training.distillations import (
    GAN,
    TOLD,
    At,
    Keep,
    different,
    everything,
)
from vsa.diffusion.rollout import rollout_index
from vsa.objectives.discriminator import Gan
from vsa.training.gradients import GradientClipper

# the GAN term


def test_gan_term_trains_classifier_and_generator_and_resumes(distill, training):
    short = ("task.generator_every=1", "trainer.max_steps=2", "callbacks.checkpoint.every_n_steps=1")
    distill(*short, "run=without")
    distill(*short, GAN, "run=with", "trainer.accumulate_grad_batches=2")
    checkpoint = training.last("with")
    start = torch.manual_seed(0) and Gan(layers=(0, 1)).build(12, 2, seed=0, mesh=None)
    assert largest_difference(checkpoint.tensors("discriminator"), dict(start.named_parameters())) > 1e-3
    for group in ("model", "fake_score"):
        assert largest_difference(checkpoint.tensors(group), training.last("without").tensors(group)) > 1e-5
    row = training.metrics("with")[2]
    assert all(row[name] for name in ("generator/loss_gan", "fake_score/loss_gan", "fake_score/loss"))
    # logits near zero: softplus(0), once and twice
    assert float(row["generator/loss_gan"]) == pytest.approx(math.log(2), rel=0.5)
    assert float(row["fake_score/loss_gan"]) == pytest.approx(2 * math.log(2), rel=0.5)
    half = training.folder("with") / "checkpoints" / "step-00000001"
    distill(*short, GAN, "run=resumed", "trainer.accumulate_grad_batches=2", f"ckpt_path={half}")
    assert different(everything(training.last("resumed")), everything(checkpoint)) == set()
    for run, overrides in (("with", ()), ("without", (GAN,))):
        with pytest.raises(ValueError, match=rf"was trained {run} objective\.gan"):
            distill(*short, "trainer.max_steps=3", f"run={run}", "ckpt_path=last", "resume.allow=[task]", *overrides)


def test_the_critic_steps_on_its_own_update_alone(distill):
    """A GAN term's way to the generator leads through the critic, whose gradients from there must be gone."""
    errors = []

    def watch(trainer, module):
        class Watched(GradientClipper):
            def __call__(self, optimizer, iteration):
                (batch,) = module._batches
                terms = module.objective.fake_score_update(
                    module.networks,
                    batch,
                    module.statistics.normalise(batch.latents),
                    seed=0,
                    iteration=iteration,
                    topk=4,
                )
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                expected = torch.autograd.grad(terms.loss.mean(), parameters)
                errors.append(max(float((p.grad - g).abs().max()) for p, g in zip(parameters, expected, strict=True)))
                return super().__call__(optimizer, iteration)

        module.fake_score.clipper.__class__ = Watched

    distill(GAN, "task.generator_every=1", "trainer.max_steps=2", callbacks=(At(0, before=watch),))
    assert len(errors) == 2
    assert max(errors) < 1e-6


def test_gan_gradient_of_the_generator_is_that_of_its_own_data(distill):
    """By finite differences of the classifier's loss along the gradient that reaches the generator."""
    result = {}

    def look(trainer, module):
        batch = record.batches[-1]
        objective = replace(module.objective, gan=replace(module.objective.gan, generator_weight=1.0))
        networks = module.networks

        def loss():
            terms = objective.generator_update(
                networks,
                batch,
                module.statistics.normalise(batch.latents),
                module._negative,
                seed=0,
                iteration=0,
                topk=4,
                index=0,
            )
            return terms.parts["gan"].double().sum()

        weight = module.model.proj_out.weight
        with torch.no_grad():
            for head in module.fake_score.discriminator.heads:
                head.weight.mul_(20)
        (gradient,) = torch.autograd.grad(loss(), weight)
        with torch.no_grad():
            direction = gradient / gradient.norm()
            values = []
            for sign in (1, -1):
                weight.add_(sign * 1e-2 * direction)
                values.append(loss())
                weight.sub_(sign * 1e-2 * direction)
        result["slope"], result["norm"] = float(values[0] - values[1]) / 2e-2, float(gradient.norm())

    record = Keep()
    distill(GAN, "trainer.max_steps=1", callbacks=(record, At(0, after=look)))
    assert result["norm"] > 1e-4
    assert result["slope"] == pytest.approx(result["norm"], rel=0.02)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("[2]", r"gan.layers must be layers of the critic, 0 to 1, got \[2\]"),
        ("[]", "each once, got"),
        ("[0,0]", "each once"),
    ],
)
def test_layers_that_are_not_there_are_refused(distill, layers, message):
    with pytest.raises(ValueError, match=message):
        distill(f"task.objective.gan={{_target_:vsa.objectives.discriminator.Gan,layers:{layers}}}")


# a critic that is told the step


def test_a_critic_is_told_the_step_by_a_bias_of_its_time_embedding(distill):
    def look(trainer, module):
        networks, batch = module.networks, record.batches[-1]
        latents = module.statistics.normalise(batch.latents)
        bias, rows = networks.fake_score.condition_embedder.time_embedder.linear_2.bias, networks.fake_steps.weight

        def losses(step_aware: bool, index: int, iteration: int) -> list[float]:
            """Of both updates, with the row of a step: what each pass of the critic goes into."""
            objective = replace(module.objective, step_aware=step_aware)
            nets = networks if step_aware else replace(networks, fake_steps=None)
            common = {"seed": 0, "iteration": iteration, "topk": 4}
            ours = objective.generator_update(nets, batch, latents, module._negative, **common, index=index)
            critic = objective.fake_score_update(nets, batch, latents, **common)
            assert critic.index == index
            values = (ours.raw_norm, ours.parts["gan"], critic.parts["flow"], critic.parts["gan"])
            return [float(value.sum()) for value in values]

        # an iteration whose critic sees the step
        iterations = [
            next(i for i in range(99) if rollout_index(seed=0, iteration=i, num_steps=3, update="fake_score") == index)
            for index in range(3)
        ]
        with torch.no_grad():
            for head in networks.discriminator.heads:
                head.weight.mul_(20)
            rows.zero_()
            plain = [losses(False, index, i) for index, i in enumerate(iterations)]
            assert [losses(True, index, i) for index, i in enumerate(iterations)] == plain
            rows[1] = torch.linspace(-1, 1, rows.shape[1])
            by_row = [losses(True, index, i) for index, i in enumerate(iterations)]
            bias += rows[1]
            by_bias = losses(False, 1, iterations[1])
            bias -= rows[1]
        assert by_row[0] == plain[0]
        assert by_row[2] == plain[2]
        assert by_row[1] == pytest.approx(by_bias, rel=1e-5)
        # control: in each of the passes
        assert all(abs(a / b - 1) > 1e-4 for a, b in zip(by_row[1], plain[1], strict=True))

    record = Keep()
    distill(TOLD, GAN, "trainer.max_steps=1", callbacks=(record, At(0, after=look)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("task.objective.step_aware=off",), "task.objective.step_aware=off: expected true or false, got 'off'"),
        (
            (TOLD, "task.objective.timesteps=[1000]"),
            r"step_aware needs several steps, got objective.timesteps=\[1000\]",
        ),
    ],
)
def test_what_tells_no_step_apart_is_refused(distill, settings, message):
    with pytest.raises(ValueError, match=message):
        distill(*settings)


@pytest.mark.slow
def test_a_told_critic_learns_the_steps_apart_and_resumes(distill, training):
    short = ("trainer.max_steps=2", "callbacks.checkpoint.every_n_steps=1")
    distill(*short, TOLD, "run=told")
    distill(*short, "run=mixture")
    checkpoint = training.last("told")
    rows = checkpoint.tensors("fake_steps")["weight"]
    indices = {rollout_index(seed=0, iteration=i, num_steps=3, update="fake_score") for i in range(2)}
    # a row whose step was not drawn would not show that they are told apart
    assert {index for index in range(3) if rows[index].any()} == indices < {0, 1, 2}
    half = training.folder("told") / "checkpoints" / "step-00000001"
    distill(*short, TOLD, "run=resumed", f"ckpt_path={half}")
    assert different(everything(training.last("resumed")), everything(checkpoint)) == set()
    for run, overrides, word in (("told", (), "with"), ("mixture", (TOLD,), "without")):
        with pytest.raises(ValueError, match=rf"was trained {word} objective\.step_aware"):
            distill(*short, "trainer.max_steps=3", f"run={run}", "ckpt_path=last", "resume.allow=[task]", *overrides)

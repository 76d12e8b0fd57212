"""Rows about numbers that are not finite: no network changes by a bit, and the step is replayed, on two ranks too."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.tiny_runs import TinyTraining, one_thread, training  # noqa: F401
from tests.training.conftest import distill, teacher_dir  # noqa: F401
from tests.training.ranks import run_ranks
from tests.training.test_replay import Spoil, dumps_of
from vsa.checkpoints.run_checkpoint import read_checkpoint
from vsa.models.sharding import local
from vsa.training.callbacks.ema import EMA
from vsa.training.replay import replay_step

NAN, INF = math.nan, math.inf
STEP = 5
"""The step with the fault, which updates both networks of a distillation."""

NETWORKS = ("generator", "fake_score", "real_score")
PLACES: tuple[tuple[str, float, bool], ...] = (
    *((what, value, False) for what in ("loss", "gradient") for value in (NAN, INF, -INF)),
    *((what, value, False) for what in (*NETWORKS, "gradients", "latents", "block") for value in (NAN, INF)),
    ("text", NAN, False),
    *((what, NAN, True) for what in ("loss", "gradient")),
)
"""What gets a value (a network: its output), the value, and whether it gets it in all further steps."""


class Fault(L.Callback):
    """Puts a value in at a step, and keeps the state that a dropped update must leave as it was."""

    def __init__(self, what: str, value: float, always: bool):
        self.what, self.value, self.always = what, value, always
        self.now, self.before = False, dict[str, dict[str, Tensor]]()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        network: nn.Module | None = pl_module.model.blocks[0] if self.what == "block" else None
        if self.what in NETWORKS:
            network = getattr(pl_module.networks, self.what)
        if network is not None:
            network.register_forward_hook(lambda _, __, out: plus(out, self.value) if self.now else out)
        if self.what == "loss":
            backward = pl_module.manual_backward
            pl_module.manual_backward = lambda loss: backward(loss * (self.value if self.now else 1))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.now = trainer.global_step >= STEP if self.always else trainer.global_step == STEP
        self.before = {name: kept(trainer, pl_module, name) for name in pl_module.clippers}
        if self.now and self.what in ("latents", "text"):
            getattr(batch, self.what).view(-1)[0] = self.value

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        if self.now and self.what in ("gradient", "gradients"):
            grads = [p.grad for p in pl_module.model.parameters() if p.grad is not None]
            for grad in grads[:1] if self.what == "gradient" else grads:
                grad.view(-1)[0] = self.value


class Compare(L.Callback):
    """After all other callbacks of a step: which tensors of a dropped update have changed."""

    order = 9

    def __init__(self, fault: Fault):
        self.fault, self.dropped, self.changed = fault, 0, list[str]()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        for name, clipper in pl_module.clippers.items():
            distilled = self.fault.what in NETWORKS
            turn = name != "model" or not distilled or pl_module.cycle.is_generators_turn(STEP)
            if self.fault.now and turn and clipper.skipped:
                before, after = self.fault.before[name], kept(trainer, pl_module, name)
                self.dropped += 1
                self.changed += [key for key, value in before.items() if not torch.equal(value, after[key])]
                self.changed += sorted(set(after) ^ set(before))


def plus(output: Any, value: float) -> Any:
    return output + value if isinstance(output, Tensor) else type(output)(plus(each, value) for each in output)


def kept(trainer: L.Trainer, module: Any, network: str) -> dict[str, Tensor]:
    """Weights, optimizer moments and weight average of a network."""
    owner = module.model if network == "model" else module.fake_score.network
    optimizer = trainer.optimizers[0 if network == "model" else 1]
    tensors = {f"weight {name}": p.detach().clone() for name, p in owner.named_parameters()}
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        tensors |= {f"{key} {number}": value.clone() for key, value in optimizer.state.get(parameter, {}).items()}
    averages = [each for each in trainer.callbacks if isinstance(each, EMA) and network == "model"]  # type: ignore[attr-defined]
    return tensors | {f"average {name}": value.clone() for ema in averages for name, value in ema.average.items()}


@pytest.mark.soak("NaN and infinity in loss, gradients, data and networks", attempts=len(PLACES), short=2)
def test_numbers_that_are_not_finite(training: TinyTraining, request, attempt: int):  # noqa: F811
    what, value, always = PLACES[attempt % len(PLACES)]
    train = request.getfixturevalue("distill") if what in NETWORKS else training
    fault = Fault(what, value, always)
    compare, settings = Compare(fault), ("trainer.max_steps=16", f"seed={attempt}", "name=pretrain")
    if always:
        with pytest.raises(FloatingPointError, match="10 steps in a row"):
            train(*settings, callbacks=(fault, compare))
        assert compare.dropped >= 9
    else:
        train(*settings, callbacks=(fault, compare))
        last = training.metrics()[16]
        assert compare.dropped
        counted = sum(float(last.get(key) or 0) for key in ("skipped_steps", "fake_score/skipped_steps"))
        assert counted == compare.dropped
        assert math.isfinite(float(last["fake_score/loss" if what in NETWORKS else "train/loss"]))
    assert compare.changed == []


WEIGHT = "model.blocks.1.attn1.to_q"
SPOILT = (
    ("latents", NAN, "latents of sample"),
    (f"{WEIGHT}.weight", INF, f"weight {WEIGHT}.weight"),
    ("latents", INF, "latents of sample"),
    # finite, and the output or its gradient overflows fp32
    (f"{WEIGHT}.weight", 3e38, f"output of {WEIGHT}"),
)


@pytest.mark.soak("replay of a dropped step", attempts=20, short=1)
def test_replay_of_a_dropped_step(training: TinyTraining, attempt: int):  # noqa: F811
    (what, value, first), draw = SPOILT[attempt % len(SPOILT)], random.Random(attempt)
    step, accumulate = draw.randrange(8), draw.choice((1, 2))
    settings = (f"seed={attempt}", f"trainer.accumulate_grad_batches={accumulate}", f"trainer.max_steps={step + 2}")
    with suppress(FloatingPointError):
        training(*settings, callbacks=(Spoil(what, step=step, value=value),))
    result = replay_step(dumps_of(training.folder())[0], accelerator="cpu")
    assert result.reproduced
    assert result.step == step
    assert first in str(result.first)


@pytest.mark.soak("replay of a dropped step of two ranks", attempts=10, short=0)
def test_replay_of_a_dropped_step_of_two_ranks(training: TinyTraining, attempt: int):  # noqa: F811
    """One process replays both, and names the sample of the one that had the value."""
    draw, value = random.Random(attempt), (NAN, INF)[attempt // 2 % 2]
    step, accumulate = draw.randrange(8), draw.choice((1, 2))
    settings = (f"seed={attempt}", f"trainer.accumulate_grad_batches={accumulate}", f"trainer.max_steps={step + 2}")
    settings += ("trainer=fsdp", "data.batch_size=8")

    def on_rank(rank: int) -> None:
        training(*settings, callbacks=(Spoil("latents", step=step, value=value),) if rank == attempt % 2 else ())

    run_ranks(2, on_rank)
    assert training.metrics()[step + 2]["skipped_steps"] == "1"
    (result,) = [replay_step(path, accelerator="cpu") for path in dumps_of(training.folder())]
    assert (result.reproduced, result.step, len(result.losses)) == (True, step, 2 * accumulate)
    assert "latents of sample" in str(result.first)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.soak("NaN and infinity in a gradient on several GPUs", attempts=4, short=1)
def test_a_gradient_that_is_not_finite_on_gpus(training: TinyTraining, attempt: int):  # noqa: F811
    """In one element on one rank: no rank takes the step, and training continues."""
    world, step, rank = torch.cuda.device_count(), random.Random(attempt).randint(2, 6), attempt % 2
    settings = ("trainer=fsdp", "trainer.accelerator=gpu", f"data.batch_size={2 * world}", "trainer.max_steps=8")
    settings += ("callbacks.checkpoint.every_n_steps=1", "callbacks.checkpoint.keep=20")

    class Poison(L.Callback):
        def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
            if trainer.global_step == step and trainer.global_rank == rank:
                grads = [local(p.grad) for p in pl_module.parameters() if p.grad is not None]
                next(grad for grad in grads if grad.numel()).view(-1)[0] = (NAN, INF)[attempt // 2 % 2]

    run_ranks(world, lambda _: training(*settings, callbacks=(Poison(),)) and None)
    folder = training.folder() / "checkpoints"
    before, after = (read_checkpoint(folder / f"step-{at:08d}").tensors("model") for at in (step, step + 1))
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert training.metrics()[step + 1]["skipped_steps"] == "1"

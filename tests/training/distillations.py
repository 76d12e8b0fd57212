"""What tests of distillation share: settings of tiny runs, and looks at what they leave."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import lightning as L
import torch

from vsa.checkpoints.run_checkpoint import Checkpoint

DENSE = ("attention=full", "~attention.tile_thw", "run=dense", "trainer.max_steps=4")
# the large eps keeps Adam from turning rounding of near-zero gradients into whole steps
DISTILL = (
    "task=distill",
    "start=dense",
    "optim.betas=[0.0,0.99]",
    "optim.eps=0.01",
    "optim.schedule.warmup_steps=3",
    "task.objective.guidance=2.5",
    "task.objective.shift.value=3",
    "trainer.max_steps=12",
    "callbacks.ema.decay=0.5",
)

ROOT = Path(__file__).parents[2]
GAN = (
    "task.objective.gan={_target_:vsa.objectives.discriminator.Gan,layers:[0,1],generator_weight:0.5,critic_weight:0.5}"
)

TOLD = "task.objective.step_aware=true"


def everything(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint: weights and moments of generator and critic, the average."""
    groups = checkpoint.groups
    assert {"model", "optimizer", "fake_score", "fake_score_optimizer"} <= set(groups)
    return {f"{group}/{key}": value for group in groups for key, value in checkpoint.tensors(group).items()}


def different(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> set[str]:
    """Groups with a tensor that differs in any bit."""
    assert set(a) == set(b)
    return {name.partition("/")[0] for name in a if not torch.equal(a[name], b[name])}


class At(L.Callback):
    """Calls a function with (trainer, module) before the micro-batch of an iteration, or after it."""

    def __init__(self, iteration: int, before=None, after=None):
        self.iteration, self.before, self.after = iteration, before, after

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.before is not None and trainer.global_step == self.iteration:
            self.before(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.after is not None and trainer.global_step == self.iteration + 1:
            self.after(trainer, pl_module)


class Keep(L.Callback):
    """Batches, and the three networks as they start."""

    def __init__(self):
        self.batches, self.lrs, self.start = [], [], {}

    def on_train_start(self, trainer, pl_module):
        roles = {"generator": pl_module.model, "fake_score": pl_module.fake_score.network}
        self.start = {role: copy.deepcopy(net) for role, net in roles.items()}
        self.start["real_score"] = copy.deepcopy(pl_module.teacher.network)
        self.negative = pl_module._negative
        self.mean, self.std = pl_module.statistics.mean, pl_module.statistics.std

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.lrs.append(tuple(optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers))


def checkpoints(run: Path) -> list[Checkpoint]:
    """Those of a run, the oldest first."""
    paths = sorted((run / "checkpoints").glob("step-*"))
    return [Checkpoint(path=path, state=json.loads((path / "state.json").read_text())) for path in paths]

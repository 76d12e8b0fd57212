"""Replay of a dropped step, with a check of every tensor."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vsa.checkpoints.run_checkpoint import latest_checkpoint
from vsa.config import build_task, stored_data
from vsa.data.batch import VideoBatch
from vsa.files import check_kind
from vsa.models.sharding import local
from vsa.settings import AtLeastOne
from vsa.training.callbacks.nan_dump import NETWORKS, batch_file, read_batches
from vsa.training.run_state import REPLAY, RunStart


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Result of a replay.

    Args:
        step: optimizer step, from 0.
        network: network whose update was dropped.
        recorded: loss of every micro-batch when the update was dropped, as `float.hex`.
        losses: the same losses in the replay.
        first: the first non-finite tensor; None: all were finite.
    """

    step: int
    network: str
    recorded: tuple[str, ...]
    losses: tuple[str, ...]
    first: str | None

    @property
    def reproduced(self) -> bool:
        """Whether the losses are bitwise equal and a tensor was non-finite again."""
        return self.first is not None and self.losses == self.recorded

    def lines(self) -> list[str]:
        """The report in lines."""
        same = (
            "the same bit for bit"
            if self.losses == self.recorded
            else f"not those recorded ({_formatted(self.recorded)})"
        )
        return [
            f"step {self.step}, {self.network}: losses {_formatted(self.losses)}, {same}",
            f"first not finite: {self.first}" if self.first else "every tensor was finite: the cause lies elsewhere",
            "reproduced" if self.reproduced else "not reproduced",
        ]


def _formatted(losses: Sequence[str]) -> str:
    return ", ".join(f"{float.fromhex(loss):.9g}" for loss in losses)


def replay_step(path: Path, *, accelerator: str = "auto") -> Replayed:
    """Run the step of a dump of `NanDump` again; the batches of several ranks become micro-batches of one.

    Args:
        path: folder of the dump.
        accelerator: kind of device, as `trainer.accelerator`.

    Raises:
        ValueError: the folder is not a dump, is damaged, or the data of the run are missing.
    """
    if not (path / NETWORKS).is_dir():
        raise ValueError(f"{path} is not a folder of a dropped step: expected RUN/nan-dumps/step-N-NETWORK")
    checkpoint = latest_checkpoint(path / NETWORKS)
    about: Mapping[str, Any] = checkpoint.state.get(REPLAY) or {}
    if not about:
        raise ValueError(f"{checkpoint.path} is a checkpoint of a run, not of a dropped step")
    check_kind(about, {"network": str, "ranks": AtLeastOne}, checkpoint.path, REPLAY)
    batches, recorded = [], []
    for rank in range(about["ranks"]):
        own, losses = read_batches(path / batch_file(rank))
        if other := [batch.step for batch in own if batch.step != checkpoint.step]:
            raise ValueError(f"{path / batch_file(rank)} has a batch of step {other[0]}, expected {checkpoint.step}")
        batches += own
        recorded += losses
    cfg: Any = OmegaConf.create(dict(checkpoint.config))
    datamodule = stored_data(checkpoint.config)
    start = RunStart(resume=checkpoint, config=checkpoint.state["config"])
    module = build_task(cfg, start=start)
    module.check_weights(datamodule)
    # the data module provides statistics and encoders, the batches come from the dump
    datamodule.train_dataloader = lambda: DataLoader(_Batches(batches), batch_size=None)
    look = _Look(checkpoint.step, about["network"])
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=1,
        callbacks=[look],
        logger=False,
        max_steps=checkpoint.step + 1,
        max_epochs=-1,
        accumulate_grad_batches=len(batches),
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=datamodule)
    return Replayed(
        step=checkpoint.step,
        network=about["network"],
        recorded=tuple(recorded),
        # further losses belong to a network that is updated later in the step
        losses=tuple(look.losses[: len(recorded)]),
        first=look.first,
    )


class _Batches(torch.utils.data.IterableDataset):
    def __init__(self, batches: Sequence[VideoBatch]):
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[VideoBatch]:
        return iter(self._batches)


class _Look(L.Callback):
    """Finds the first non-finite tensor: weights, batch, outputs of modules in their order, gradients."""

    def __init__(self, step: int, network: str):
        self._step, self._network = step, network
        self._micro_batch = 0
        self.first: str | None = None
        self.losses: list[str] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for clipper in pl_module.clippers.values():
            # a dropped update is reported at the end instead
            clipper.max_skipped = sys.maxsize
        if self._network == "fake_score":
            # the dump has the weights of the generator after its update
            pl_module.cycle = replace(pl_module.cycle, fake_score_warmup=self._step + 1)
        for name, parameter in pl_module.named_parameters():
            self._see(f"weight {name}", parameter)
            if parameter.requires_grad:
                gradient = f"gradient of weight {name}"
                parameter.register_post_accumulate_grad_hook(lambda own, said=gradient: self._see(said, own.grad))
        for name, module in pl_module.named_modules():
            if name:
                module.register_forward_hook(partial(self._see_output, name))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: VideoBatch, batch_idx: int) -> None:
        self._micro_batch = batch_idx
        channels = sum(x.shape[1] for x in (batch.latents, batch.cond_latents) if x is not None)
        image, model = None if batch.image_embeds is None else batch.image_embeds.shape[2], pl_module.model
        if (channels, batch.text.shape[2], image) != (model.in_channels, model.text_dim, model.image_dim):
            shapes = f"latents {list(batch.latents.shape)} and text {list(batch.text.shape)}"
            raise ValueError(f"batch {batch_idx} of the dump has {shapes}, which do not fit its networks")
        for name in ("latents", "text", "cond_latents", "image_embeds"):
            value = getattr(batch, name)
            for sample, row in zip(batch.sample_ids, value if value is not None else (), strict=False):
                self._see(f"{name} of sample {sample}", row)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses = [float(loss).hex() for loss in pl_module.step_losses]

    def _see_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in _tensors(output):
            self._see(f"output of {name}", tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._see, f"gradient of the output of {name}"))

    def _see(self, name: str, tensor: Tensor | None) -> None:
        if self.first is not None or tensor is None or not tensor.is_floating_point():
            return
        tensor = local(tensor.detach())
        if bad := int((~tensor.isfinite()).sum()):
            self.first = f"{name} ({bad} of {tensor.numel()} values, micro-batch {self._micro_batch})"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)

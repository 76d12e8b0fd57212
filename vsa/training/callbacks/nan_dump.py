"""Dumps of a step with non-finite gradients, whose update was dropped, for `vsa replay`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from vsa.checkpoints.run_checkpoint import write_checkpoint
from vsa.checkpoints.weight_files import save_tensors
from vsa.data.batch import VideoBatch
from vsa.files import atomic_file, open_tensors, parse_json, shown, typed
from vsa.settings import Count, validated
from vsa.training.modules.base import DiffusionModule
from vsa.training.run_state import REPLAY, networks_of, parts_of, values_of

FOLDER = "nan-dumps"
NETWORKS = "networks"
"""Folder of the networks within a dump; under the name that runs use, a dump would be mistaken for a run."""

# tensors of a batch with their dimensions
_TENSORS = {"latents": 5, "text": 3, "text_mask": 2, "cond_latents": 5, "image_embeds": 3, "seeds": 1, "slots": 1}
_OPTIONAL = ("text_mask", "cond_latents", "image_embeds")
_FACTS = {"sample_ids": list[str], "captions": list[str], "num_slots": Count, "step": Count, "loss": str}


@validated
class NanDump(L.Callback):
    """Writes networks, batches, losses and settings of a step to `run_dir/nan-dumps` when its gradients are not finite.

    The size of a dump is mostly that of the trained weights, 4 bytes per parameter; optimizer state and averages are
    left out. While further dumps are allowed, the micro-batches of the last two steps stay in memory, because the norm
    of the gradients may be read one step later.

    Args:
        run_dir: the run folder.
        dumps: maximum number of dumps of a run; 0 disables them.
    """

    def __init__(self, run_dir: str, dumps: Count = 1):
        self.folder, self.dumps = Path(run_dir) / FOLDER, dumps
        self._left = 0
        # of the current step and of the one before it
        self._batches: dict[int, list[VideoBatch]] = {}
        self._losses_before: list[Tensor] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        # a resumed run counts the dumps of its folder; the folder of a new run is empty
        dump_count = len(list(self.folder.glob("step-*"))) if trainer.is_global_zero else 0
        self._left = self.dumps - int(trainer.strategy.broadcast(dump_count))
        for network, clipper in pl_module.clippers.items():
            clipper.on_drop = partial(self._dump, trainer, pl_module, network)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: DiffusionModule, batch: VideoBatch, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if batch_idx % pl_module.accumulate == 0:
            # this hook comes before that of the module, which clears the losses
            self._losses_before = list(pl_module.step_losses)
            self._batches = {step - 1: self._batches.get(step - 1, []), step: []}
        if self._left > 0:
            # a replay draws the noise, which would stay page-locked until the step ends
            self._batches[step].append(replace(batch, noise=None))

    def _dump(self, trainer: L.Trainer, module: DiffusionModule, network: str, step: int) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        path = self.folder / f"step-{step:08d}-{network}"
        batches = self._batches[step]
        micro_batches = len(batches)
        losses = module.step_losses if step == max(self._batches) else self._losses_before
        # collective operations: every rank takes part, even if it cannot write
        parts = parts_of(trainer)
        about = {"network": network, "micro_batches": micro_batches, "ranks": module.dims.data_size}
        own = path / batch_file(module.dims.data_rank(trainer.global_rank))
        state = {**module.record(), **values_of(parts), "step": step, REPLAY: about}
        # this step is already counted as skipped, but a checkpoint never has more skipped steps than steps
        state |= {name: min(state[name], step) for name in ("skipped_steps", "skipped_in_row")}
        tensors = networks_of(parts)
        size = sum(t.numel() * t.element_size() for group in tensors.values() for t in group.values())
        failure: OSError | None = None
        with module.status.paused():
            try:
                write_batches(own, batches, losses[-micro_batches:])
            except OSError as error:
                failure = error
            if trainer.strategy.reduce_boolean_decision(failure is not None, all=False):
                # a replay needs the batches of every rank
                failure = failure or OSError("another rank could not write its batches")
            else:
                try:
                    write_checkpoint(path / NETWORKS, tensors, state, together=trainer.world_size > 1)
                except OSError as error:
                    failure = error
        line = f"step {step}: gradients of {network} are not finite, the update is dropped"
        if failure is None:
            rank_zero_info(f"{line}: vsa replay {typed(path)} runs it again ({size / 1e6:,.1f} MB)")
        else:
            rank_zero_info(f"{line}; the dump for vsa replay could not be written: {failure}")


def batch_file(rank: int) -> str:
    """Name of the file with the batches of a data-parallel rank."""
    return f"batches-{rank}.safetensors"


def write_batches(path: Path, batches: list[VideoBatch], losses: list[Tensor]) -> None:
    """Write the micro-batches of a step, each with its exact loss."""
    tensors: dict[str, Tensor] = {}
    facts: list[Mapping[str, Any]] = []
    for number, (batch, loss) in enumerate(zip(batches, losses, strict=True)):
        values = {name: getattr(batch, name) for name in _TENSORS}
        tensors |= {f"{number}/{name}": t.detach().cpu().contiguous() for name, t in values.items() if t is not None}
        facts.append(
            {
                "sample_ids": batch.sample_ids,
                "captions": batch.captions,
                "num_slots": batch.num_slots,
                "step": batch.step,
                "loss": float(loss).hex(),
            }
        )
    with atomic_file(path) as temporary:
        save_tensors(tensors, temporary, {"batches": json.dumps(facts)})


def read_batches(path: Path) -> tuple[list[VideoBatch], list[str]]:
    """Read the file of `write_batches`: micro-batches, and their losses as hexadecimal floats.

    Raises:
        ValueError: the file is missing, damaged, or its tensors do not fit together; names it.
    """
    batches, losses = [], []
    try:
        file = open_tensors(path)
    except FileNotFoundError:
        raise ValueError(f"{path.parent} is not complete: {path.name} is missing") from None
    facts: list[Any] = parse_json((file.metadata() or {}).get("batches", "null"), f"{path}, batches", [_FACTS])
    if not facts:
        raise ValueError(f"{path} holds no batches")
    for number, fact in enumerate(facts):
        keys = {name: f"{number}/{name}" for name in _TENSORS}
        own: Any = {name: file.get_tensor(key) if key in file.keys() else None for name, key in keys.items()}  # noqa: SIM118
        for name, dims in _TENSORS.items():
            tensor, size = own[name], len(fact["sample_ids"])
            if tensor is None and name not in _OPTIONAL:
                raise ValueError(f"{path} lacks {keys[name]}")
            if tensor is not None and (
                tensor.ndim != dims or len(tensor) != size or tensor.is_floating_point() != (dims > 2)
            ):
                what = f"shape {list(tensor.shape)} and {str(tensor.dtype).removeprefix('torch.')}"
                raise ValueError(f"{path}: {keys[name]} has {what}, expected {dims} dimensions of {size} samples")
        try:
            float.fromhex(fact["loss"])
        except (ValueError, OverflowError):
            raise ValueError(f"{path} has loss={shown(fact['loss'])}, expected a hexadecimal number") from None
        losses.append(fact.pop("loss"))
        fact |= {name: tuple(fact[name]) for name in ("sample_ids", "captions")}
        batches.append(VideoBatch(**own, **fact))
    return batches, losses

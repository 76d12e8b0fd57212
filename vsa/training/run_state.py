"""What the checkpoints of a run hold: parts by name, which saving and resuming loop over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from vsa.checkpoints.run_checkpoint import Checkpoint, list_checkpoints, read_together, step_of
from vsa.checkpoints.state_file import one_line
from vsa.checkpoints.tensor_state import load_model_tensors, load_optimizer_tensors, optimizer_state, without_state
from vsa.checkpoints.weight_files import refuse_other_tensors
from vsa.checkpoints.weight_source import WeightSource
from vsa.training.deadline import Deadline

Owner = nn.Module | torch.optim.Optimizer | Mapping[str, Tensor]
"""Whose tensors a file of a checkpoint holds: a network, its optimizer, or tensors by name that are filled in place."""

TOP_LEVEL = ("status", "gradients", "data", "metrics")
"""Parts whose values stand at the top of `state.json`; those of others stand under the part's name."""

NEWER = ("sparsity_state", "loss_window", "bad_samples", "loss_spikes")
"""Parts that checkpoints of the first schema may lack: they are loaded from nothing."""

WITHOUT_GRADIENT = "without_gradient"
"""Name in `state.json` of the parameters whose optimizer state is rightly missing, by group."""

LEVEL = "activation_checkpointing"
"""Name in `state.json` of the level that a run was trained with; earlier checkpoints lack it."""

REPLAY = "replay"
"""In the state of a checkpoint of networks alone, which one step is replayed from."""

SETTINGS = {"ema": "callbacks.ema", "discriminator": "objective.gan", "fake_steps": "objective.step_aware"}
"""What decides whether there is a group of tensors."""


class Stateful(Protocol):
    """A part of a run that its checkpoints hold."""

    def state_dict(self) -> Mapping[str, Any]:
        """Plain values for JSON; a collective."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Take them back, before any network is made; what stands at the top level gets all of `state.json`."""


@runtime_checkable
class HasTensors(Stateful, Protocol):
    """A part with tensors, each group a file."""

    def tensors(self) -> Mapping[str, Owner]:
        """Groups by name."""
        ...


class Weights:
    """Networks with their optimizers.

    Args:
        groups: their groups of tensors, once they are made.
    """

    def __init__(self, groups: Callable[[], Mapping[str, Owner]]):
        self.tensors = groups

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Any, /) -> None:
        pass


class RunStart:
    """How a run begins.

    Args:
        resume: the checkpoint it goes on from.
        weights: what a new run takes its weights from; None: they are random.
        config: the resolved settings, which build the model again for sampling.
        micro_batches: of an optimizer step, for a module that steps its own optimizers.
        changes: settings of the run that were allowed to change when it was resumed, for the record.
        newest: `resume` is the newest one of its folder, and one before it takes its place when it is damaged.
        changes_since: gives the changes since that one.
    """

    # no dataclass: hydra would take one for settings
    def __init__(
        self,
        *,
        resume: Checkpoint | None = None,
        weights: WeightSource | None = None,
        config: Mapping[str, Any] | None = None,
        micro_batches: int = 1,
        changes: Sequence[Mapping[str, Any]] = (),
        newest: bool = False,
        changes_since: Callable[[Checkpoint], Sequence[Mapping[str, Any]]] = lambda checkpoint: (),
    ):
        self.resume, self.weights = resume, weights
        self.config = config or {}
        self.micro_batches = micro_batches
        self.changes, self.changes_since = changes, changes_since
        self.newest = newest


NEW_RUN = RunStart()


@dataclass
class RunStatus:
    """What the parts of a run tell each other.

    Attributes:
        flops_total: executed training FLOPs.
        paused_seconds: spent on what is no training.
        paused_now: whether no step is made or waited for.
        stage: steps, where there is one to finish and to save when a signal comes; end, where every rank is done.
        received: signal that ends the run, or `DEADLINE`, known to all ranks.
        deadline: when it has to stop by itself.
        saved: checkpoint written last, or the one the run went on from.
        prompt: caption of a clip that was asked for.
    """

    flops_total: float = 0.0
    paused_seconds: float = 0.0
    paused_now: bool = False
    stage: Literal["start", "steps", "end"] = "start"
    received: int | None = None
    deadline: Deadline | None = None
    saved: Path | None = None
    prompt: str | None = None

    @contextmanager
    def paused(self):
        """Leave what happens inside out of the measured time."""
        start, before = perf_counter(), self.paused_now
        self.paused_now = True
        yield
        self.paused_now = before
        self.paused_seconds += perf_counter() - start

    def state_dict(self) -> Mapping[str, Any]:
        return {"flops_total": self.flops_total}

    def load_state_dict(self, state: Any, /) -> None:
        self.flops_total = state["flops_total"]


def parts_of(trainer: L.Trainer) -> dict[str, Any]:
    """All parts of a run by name: those of its module, its data, and callbacks and loggers that name themselves one."""
    owners: Any = trainer
    named: list[Any] = [owner for owner in (*owners.callbacks, *trainer.loggers) if hasattr(owner, "part")]
    return {**owners.lightning_module.parts(), "data": owners.datamodule, **{owner.part: owner for owner in named}}


def values_of(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """Values of the parts for `state.json`."""
    values: dict[str, Any] = {}
    for name, part in parts.items():
        state = part.state_dict()
        if name in TOP_LEVEL:
            values |= state
        elif state or not isinstance(part, HasTensors):
            values[name] = state
    optimizers = {k: v for k, v in _groups(parts).items() if isinstance(v, torch.optim.Optimizer)}
    return {**values, WITHOUT_GRADIENT: {group: without_state(owner) for group, owner in optimizers.items()}}


def tensors_of(parts: Mapping[str, Stateful]) -> dict[str, dict[str, Tensor]]:
    """Tensors of the parts by group and name."""
    return {group: _tensors(owner) for group, owner in _groups(parts).items()}


def networks_of(parts: Mapping[str, Stateful]) -> dict[str, dict[str, Tensor]]:
    """Tensors of the networks alone, by group and name: what a step can be replayed from."""
    return {group: _tensors(owner) for group, owner in _groups(parts).items() if isinstance(owner, nn.Module)}


def _groups(parts: Mapping[str, Stateful]) -> dict[str, Owner]:
    return {k: v for part in parts.values() if isinstance(part, HasTensors) for k, v in part.tensors().items()}


def _tensors(owner: Owner) -> dict[str, Tensor]:
    if isinstance(owner, nn.Module):
        return dict(owner.named_parameters())
    return optimizer_state(owner) if isinstance(owner, torch.optim.Optimizer) else dict(owner)


def read_by_all(trainer: L.Trainer, checkpoint: Checkpoint, *, newest: bool) -> Checkpoint:
    """A checkpoint to resume of which every byte was read, by all ranks together where that was left to them.

    Args:
        trainer: of the run; a collective.
        checkpoint: what rank 0 chose.
        newest: one before it takes its place when it is damaged.

    Raises:
        ValueError: it is damaged, or all are.
    """
    if checkpoint.verified:
        return checkpoint
    own = checkpoint.path
    older = [path for path in list_checkpoints(own.parent) if step_of(path) < checkpoint.step] if newest else []
    # what rank 0 sees counts
    for path in trainer.strategy.broadcast([str(path) for path in (own, *reversed(older))]):
        try:
            return read_together(path)
        except ValueError as error:
            if not newest:
                raise
            rank_zero_info(f"skipped a damaged checkpoint: {error}")
    raise ValueError(f"no valid checkpoint in {own.parent}")


def refuse_missing(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raise ValueError that names the values a checkpoint lacks."""
    missing = [name for name in names if name not in checkpoint.state]
    if missing:
        raise ValueError(f"{checkpoint.path} is not a complete checkpoint of this run: missing {', '.join(missing)}")


def load_values(parts: Mapping[str, Stateful], record: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Put the values of all parts back.

    Args:
        parts: of the run.
        record: what else its checkpoints say, which has to be there.
        checkpoint: to go on from.

    Raises:
        ValueError: names what is missing, or what a part refuses.
    """
    # a callback that the run had not
    added = [name for name in ("loss_spikes",) if not checkpoint.state.get("config", {}).get("callbacks", {}).get(name)]
    newer = NEWER if checkpoint.schema == 1 else tuple(added)
    if checkpoint.schema > 1:
        refuse_missing(checkpoint, (*(name for name in record if name != LEVEL), WITHOUT_GRADIENT))
    own = {name: part for name, part in parts.items() if not isinstance(part, HasTensors)}
    refuse_missing(checkpoint, (name for name in own if name not in TOP_LEVEL + newer))
    refuse_missing(checkpoint, (key for name in own if name in TOP_LEVEL for key in own[name].state_dict()))
    for name, part in parts.items():
        try:
            part.load_state_dict(checkpoint.state if name in TOP_LEVEL else checkpoint.state.get(name) or {})
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"{checkpoint.path} has a damaged state of {name} ({one_line(error)})") from None


@torch.no_grad()
def load_tensors(parts: Mapping[str, Stateful], checkpoint: Checkpoint) -> None:
    """Put the tensors of all parts back.

    Raises:
        ValueError: names a group that only one side has, or a tensor that does not fit or is missing.
    """
    groups = _groups(parts)
    if REPLAY in checkpoint.state:
        groups = {group: owner for group, owner in groups.items() if isinstance(owner, nn.Module)}
    saved = set(checkpoint.groups)
    # an average may be left behind
    for group in sorted((set(groups) ^ saved) - ({"ema"} - set(groups))):
        word = "without" if group in groups else "with"
        raise ValueError(f"{checkpoint.path} was trained {word} {SETTINGS.get(group, group)}")
    for group, owner in groups.items():
        tensors = checkpoint.open(group)
        what = str(checkpoint.path) if group in ("model", "optimizer") else f"{group} of {checkpoint.path}"
        if isinstance(owner, nn.Module):
            load_model_tensors(owner, tensors, what)
        elif isinstance(owner, torch.optim.Optimizer):
            without = None if checkpoint.schema == 1 else checkpoint.state[WITHOUT_GRADIENT].get(group, ())
            load_optimizer_tensors(owner, tensors, what, without=without, most_updates=checkpoint.step)
        else:
            refuse_other_tensors({name: tuple(value.shape) for name, value in owner.items()}, tensors.shapes, what)
            for name, value in owner.items():
                tensors.fill(value, name)

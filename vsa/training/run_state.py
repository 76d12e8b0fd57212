"""State of a run in its checkpoints: named parts, which saving and resuming iterate over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from vsa.training.measured_flops import MeasuredFlops

Owner = nn.Module | torch.optim.Optimizer | Mapping[str, Tensor]
"""Owner of the tensors in a file of a checkpoint: a network, an optimizer, or tensors by name, filled in place."""

TOP_LEVEL = ("status", "gradients", "data", "metrics")
"""Parts whose values are at the top level of `state.json`; those of others are under the part's name."""

WITHOUT_GRADIENT = "without_gradient"
"""Name in `state.json` of the parameters without optimizer state, since they have no gradient, by group."""

LEVEL = "activation_checkpointing"
"""Name in `state.json` of the level that a run was trained with; earlier checkpoints lack it."""

BACKEND = "attention_backend"
"""Name in `state.json` and `run.json` of the backend that computes attention; earlier checkpoints lack it."""

REVISION = "revision"
"""Name in `state.json` of the revisions of data sets that have grown."""

REPLAY = "replay"
"""Key in the state of a checkpoint that contains networks only, for the replay of one step."""

SETTINGS = {"ema": "callbacks.ema", "discriminator": "objective.gan", "fake_steps": "objective.step_aware"}
"""Setting that adds a group of tensors, by group."""


class Stateful(Protocol):
    """A part of a run that its checkpoints contain."""

    def state_dict(self) -> Mapping[str, Any]:
        """Plain values for JSON; a collective operation."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Restore the values, before any network is built; parts at the top level get all of `state.json`."""


@runtime_checkable
class HasTensors(Stateful, Protocol):
    """A part with tensors; each group is stored in one file."""

    def tensors(self) -> Mapping[str, Owner]:
        """Owners of tensors by group."""
        ...


class Weights:
    """Networks with their optimizers.

    Args:
        groups: function that returns their groups of tensors; called once they are built.
    """

    def __init__(self, groups: Callable[[], Mapping[str, Owner]]):
        self.tensors = groups

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Any, /) -> None:
        pass


class RunStart:
    """The start of a run: new, from initial weights, or resumed.

    Args:
        resume: checkpoint to resume.
        weights: source of the initial weights of a new run; None: random weights.
        config: the resolved settings, which build the model again for sampling.
        changes: settings that were allowed to change on resume, for the record.
        newest: whether `resume` is the newest checkpoint of its folder, replaced by an earlier one if it is damaged.
        changes_since: function that returns the changes since such an earlier checkpoint.
    """

    # not a dataclass, which Hydra would convert to settings
    def __init__(
        self,
        *,
        resume: Checkpoint | None = None,
        weights: WeightSource | None = None,
        config: Mapping[str, Any] | None = None,
        changes: Sequence[Mapping[str, Any]] = (),
        newest: bool = False,
        changes_since: Callable[[Checkpoint], Sequence[Mapping[str, Any]]] = lambda checkpoint: (),
    ):
        self.resume, self.weights = resume, weights
        self.config = config or {}
        self.changes, self.changes_since = changes, changes_since
        self.newest = newest

    def agree(self, trainer: L.Trainer) -> bool:
        """Resume the newest checkpoint that is intact on all ranks, a collective operation; whether it is another."""
        assert self.resume is not None
        chosen_path = self.resume.path
        self.resume = read_by_all(trainer, self.resume, newest=self.newest)
        if self.resume.path == chosen_path:
            return False
        rank_zero_info(f"resuming from {self.resume.path}")
        self.changes = self.changes_since(self.resume)
        return True


NEW_RUN = RunStart()


def _seconds_when_idle() -> float:
    """The clock of the host, once the GPU in use has finished its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return perf_counter()


@dataclass
class RunStatus:
    """Shared state of the parts of a run.

    Attributes:
        flops_total: executed training FLOPs, without those of `measured`.
        measured: FLOPs of selected tiles whose number depends on q and k.
        trained_seconds: seconds from the start of the first step to the end of the last one, without pauses.
        paused_seconds: seconds spent outside training steps.
        paused_now: whether the run is outside training steps at present.
        stage: start; steps: a signal finishes the step and saves; end: every rank is done.
        received: signal that ends the run, or `DEADLINE`, known to all ranks.
        deadline: deadline at which the run stops by itself.
        saved: last written checkpoint, or the resumed one.
        prompt: caption of a sampled clip.
    """

    flops_total: float = 0.0
    measured: MeasuredFlops = field(default_factory=MeasuredFlops)
    trained_seconds: float = 0.0
    paused_seconds: float = 0.0
    paused_now: bool = False
    stage: Literal["start", "steps", "end"] = "start"
    received: int | None = None
    deadline: Deadline | None = None
    saved: Path | None = None
    prompt: str | None = None

    @contextmanager
    def paused(self):
        """Exclude the time within the context, which may be nested, from the measured training time.

        Begins and ends once the device is idle, since steps are timed by its clock.
        """
        before = self.paused_now
        start = 0.0 if before else _seconds_when_idle()
        self.paused_now = True
        yield
        self.paused_now = before
        if not before:
            self.paused_seconds += _seconds_when_idle() - start

    def state_dict(self) -> Mapping[str, Any]:
        return {"flops_total": self.flops_total, **self.measured.state_dict()}

    def load_state_dict(self, state: Any, /) -> None:
        self.flops_total = state["flops_total"]
        self.measured.load_state_dict(state)


def parts_of(trainer: L.Trainer) -> dict[str, Any]:
    """All parts of a run by name: of its module and data, and callbacks and loggers with an attribute `part`."""
    owners: Any = trainer
    components: list[Any] = [owner for owner in (*owners.callbacks, *trainer.loggers) if hasattr(owner, "part")]
    return {**owners.lightning_module.parts(), "data": owners.datamodule, **{owner.part: owner for owner in components}}


def values_of(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """Values of the parts, for `state.json`."""
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
    """Tensors of the parts, by group and name."""
    return {group: _tensors(owner) for group, owner in _groups(parts).items()}


def networks_of(parts: Mapping[str, Stateful]) -> dict[str, dict[str, Tensor]]:
    """Tensors of the networks only, by group and name, for the replay of a step."""
    return {group: _tensors(owner) for group, owner in _groups(parts).items() if isinstance(owner, nn.Module)}


def _groups(parts: Mapping[str, Stateful]) -> dict[str, Owner]:
    return {k: v for part in parts.values() if isinstance(part, HasTensors) for k, v in part.tensors().items()}


def _tensors(owner: Owner) -> dict[str, Tensor]:
    if isinstance(owner, nn.Module):
        return dict(owner.named_parameters())
    return optimizer_state(owner) if isinstance(owner, torch.optim.Optimizer) else dict(owner)


def read_by_all(trainer: L.Trainer, checkpoint: Checkpoint, *, newest: bool) -> Checkpoint:
    """A fully verified checkpoint to resume; if rank 0 left the verification to the ranks, each reads a part of it.

    Args:
        trainer: trainer of the run; the call is a collective operation.
        checkpoint: checkpoint that rank 0 chose.
        newest: whether an earlier checkpoint may replace a damaged one.

    Raises:
        ValueError: the checkpoint, or every possible one, is damaged.
    """
    if checkpoint.verified:
        return checkpoint
    own = checkpoint.path
    older = [path for path in list_checkpoints(own.parent) if step_of(path) < checkpoint.step] if newest else []
    # all ranks use the list of rank 0
    for path in trainer.strategy.broadcast([str(path) for path in (own, *reversed(older))]):
        try:
            return read_together(path)
        except ValueError as error:
            if not newest:
                raise
            rank_zero_info(f"skipped a damaged checkpoint: {error}")
    raise ValueError(f"no valid checkpoint in {own.parent}")


def refuse_missing(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raise ValueError with the names of values that are missing in a checkpoint."""
    missing = [name for name in names if name not in checkpoint.state]
    if missing:
        raise ValueError(f"{checkpoint.path} is not a complete checkpoint of this run: missing {', '.join(missing)}")


def load_values(parts: Mapping[str, Stateful], record: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Restore the values of all parts.

    Args:
        parts: parts of the run.
        record: further values that its checkpoints must contain.
        checkpoint: checkpoint to resume.

    Raises:
        ValueError: names what is missing, or what a part refuses.
    """
    # checkpoints of before `auto` do not have the level
    parallel = checkpoint.state.get("config", {}).get("task", {}).get("parallel") or {}
    optional = (BACKEND,) if parallel.get("activation_checkpointing") == "auto" else (BACKEND, LEVEL)
    refuse_missing(checkpoint, (*(name for name in record if name not in optional), WITHOUT_GRADIENT))
    # a callback that the run did not have before
    added = [name for name in ("loss_spikes",) if not checkpoint.state.get("config", {}).get("callbacks", {}).get(name)]
    own = {name: part for name, part in parts.items() if not isinstance(part, HasTensors)}
    refuse_missing(checkpoint, (name for name in own if name not in (*TOP_LEVEL, *added)))
    values = (key for name in own if name in TOP_LEVEL for key in own[name].state_dict())
    # a data set that had not grown yet has no revision
    refuse_missing(checkpoint, (key for key in values if key != REVISION))
    for name, part in parts.items():
        try:
            part.load_state_dict(checkpoint.state if name in TOP_LEVEL else checkpoint.state.get(name) or {})
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"{checkpoint.path} has a damaged state of {name} ({one_line(error)})") from None


@torch.no_grad()
def load_tensors(parts: Mapping[str, Stateful], checkpoint: Checkpoint) -> None:
    """Restore the tensors of all parts.

    Raises:
        ValueError: names a group that is missing or unexpected, or a tensor that is missing or does not fit.
    """
    groups = _groups(parts)
    if REPLAY in checkpoint.state:
        groups = {group: owner for group, owner in groups.items() if isinstance(owner, nn.Module)}
    saved = set(checkpoint.groups)
    # an average that the run no longer uses is ignored
    for group in sorted((set(groups) ^ saved) - ({"ema"} - set(groups))):
        word = "without" if group in groups else "with"
        raise ValueError(f"{checkpoint.path} was trained {word} {SETTINGS.get(group, group)}")
    for group, owner in groups.items():
        tensors = checkpoint.open(group)
        what = str(checkpoint.path) if group in ("model", "optimizer") else f"{group} of {checkpoint.path}"
        if isinstance(owner, nn.Module):
            load_model_tensors(owner, tensors, what)
        elif isinstance(owner, torch.optim.Optimizer):
            without = checkpoint.state[WITHOUT_GRADIENT].get(group, ())
            load_optimizer_tensors(owner, tensors, what, without=without, most_updates=checkpoint.step)
        else:
            refuse_other_tensors({name: tuple(value.shape) for name, value in owner.items()}, tensors.shapes, what)
            for name, value in owner.items():
                tensors.fill(value, name)

"""A frozen teacher network of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from vsa.attention.sequence import SequenceRanks
from vsa.checkpoints.run_checkpoint import Checkpoint
from vsa.checkpoints.wan import Gates, gate_names
from vsa.checkpoints.weight_source import WeightSource, open_weights
from vsa.models.init import without_memory
from vsa.models.network import Network
from vsa.training.parallel import ParallelPlan, build_model

if TYPE_CHECKING:
    # not imported at run time, since the data module imports the video libraries
    from vsa.data.plan_datamodule import PlanDataModule


def gates_from_dense(model: Network) -> Gates:
    """Gates of `model` after loading a dense checkpoint: initial, or absent if it has none."""
    return "initial" if gate_names(model) else "absent"


def refuse_other_network(start: WeightSource, make: Callable[[], Network], role: str) -> None:
    """Raise ValueError if dense weights do not fit the network that `make` builds; nothing is allocated."""
    with without_memory():
        network = make()
    try:
        start.check(network, gates_from_dense(network))
    except ValueError as error:
        # names the role, since the settings may not name its weights explicitly
        raise ValueError(f"as {role}: {error}") from None


class Teacher:
    """The source of the teacher and its network, which checkpoints and optimizers do not contain.

    Args:
        make: factory of the network.
        spec: dense checkpoint; None: the initial weights of the run.
    """

    def __init__(self, make: Callable[[], Network], spec: str | None):
        self._make, self._spec = make, spec
        self._start: WeightSource | None = None
        self._digest = ""
        # in a list, so that the LightningModule does not register the network as a submodule
        self._network: list[Network] = []

    @property
    def start(self) -> WeightSource:
        """Its weights, after `find`."""
        assert self._start is not None
        return self._start

    @property
    def places(self) -> list[Path]:
        """See `WeightSource.places`."""
        return self.start.places

    def planned(self) -> Network:
        """Its network on the meta device."""
        with without_memory():
            return self._make()

    @property
    def network(self) -> Network:
        """Its network, after `build`."""
        return self._network[0]

    def find(self, resume: Checkpoint | None, init_from: WeightSource | None, data: PlanDataModule) -> None:
        """Open the weights, on resume those that the run began with, and refuse a mismatch with network or data.

        Raises:
            ValueError: the weights are missing, were changed since, or do not fit.
        """
        self._start = self._choose(resume, init_from)
        # computed once, since the folder may be changed or removed before a checkpoint is written
        self._digest = self.start.digest
        if self.start.step_list is not None:
            raise ValueError(
                f"the teacher {self.start.source} is distilled already, to the timesteps "
                f"{list(self.start.step_list)}: it cannot teach other noise levels, name a dense one"
            )
        refuse_other_network(self.start, self._make, "teacher (task.teacher, else init_from)")
        self.start.check_data(data)

    def _choose(self, resume: Checkpoint | None, init_from: WeightSource | None) -> WeightSource:
        saved = resume.state.get("teacher") if resume is not None else None
        if resume is not None and saved is not None:
            began = resume.state.get("config", {}).get("task", {}).get("teacher")
            # the weights may have been moved; the digest identifies them
            source = saved["source"] if self._spec in (None, began) else self._spec
            try:
                start = open_weights(source)
            except (ValueError, OSError) as error:
                where = "if it was moved, set task.teacher= to its new place"
                raise ValueError(f"the teacher of {resume.path} cannot be opened ({error}): {where}") from None
            if start.digest != saved["digest"]:
                raise ValueError(
                    f"the teacher {source} is not what {resume.path} began with, or has changed since "
                    f"(digest {saved['digest'][:12]}, now {start.digest[:12]})"
                )
            return start
        if self._spec is not None:
            return open_weights(self._spec)
        if init_from is None:
            where = "the resumed run had no teacher" if resume is not None else "init_from=null"
            raise ValueError(f"task.teacher=null and {where}: name a dense checkpoint")
        return init_from

    def build(self, mesh: DeviceMesh | None, plan: ParallelPlan, sequence: SequenceRanks | None) -> None:
        """Build the network, frozen; `load` fills its weights."""

        def make() -> Network:
            return self._make().eval().requires_grad_(False)

        if not self._network:
            # it has no backward
            own = replace(plan, activation_checkpointing="none")
            with torch.random.fork_rng(devices=[]):
                self._network.append(build_model(make, mesh, own, initialise=None, sequence=sequence))

    def load(self, device: torch.device) -> None:
        """Load the weights and move the network to `device`, unless it is sharded and has its place."""
        self.start.load(self.network, gates_from_dense(self.network))
        if not isinstance(self.network, FSDPModule):
            self.network.to(device)

    def state(self) -> dict[str, Any]:
        """Description that identifies these weights on resume, for `state.json`."""
        path = Path(self.start.source)
        return {"source": str(path.resolve()) if path.exists() else self.start.source, "digest": self._digest}

"""A frozen network that a run learns from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from vsa.checkpoints.run_checkpoint import Checkpoint
from vsa.checkpoints.wan import Gates, gate_names
from vsa.checkpoints.weight_source import WeightSource, open_weights
from vsa.models.init import without_memory
from vsa.models.video_dit import VideoDiT
from vsa.training.parallel import ParallelPlan, build_model

if TYPE_CHECKING:
    # the data module loads the video libraries
    from vsa.data.datamodule import PlanDataModule


def gates_from_dense(model: VideoDiT) -> Gates:
    """What gates a dense checkpoint leaves `model` with."""
    return "initial" if gate_names(model) else "absent"


def refuse_other_network(start: WeightSource, make: Callable[[], VideoDiT], role: str) -> None:
    """Raise ValueError when dense weights do not fit the network that `make` builds; no memory is taken."""
    with without_memory():
        network = make()
    try:
        start.check(network, gates_from_dense(network))
    except ValueError as error:
        # the settings may name no such weights at all
        raise ValueError(f"as {role}: {error}") from None


class Teacher:
    """Where the teacher comes from, and its network, which neither checkpoints nor optimizers see.

    Args:
        make: builds its network.
        spec: dense checkpoint; None: what the run starts from.
    """

    def __init__(self, make: Callable[[], VideoDiT], spec: str | None):
        self._make, self._spec = make, spec
        self._start: WeightSource | None = None
        self._digest = ""
        # no attribute that is a module: the LightningModule that holds this must not find it
        self._network: list[VideoDiT] = []

    @property
    def start(self) -> WeightSource:
        """Its weights, once `find` has found them."""
        assert self._start is not None
        return self._start

    def planned(self) -> VideoDiT:
        """Its network without memory."""
        with without_memory():
            return self._make()

    @property
    def network(self) -> VideoDiT:
        """Its network, once `build` has made it."""
        return self._network[0]

    def find(self, resume: Checkpoint | None, init_from: WeightSource | None, data: PlanDataModule) -> None:
        """Find the weights, on resume those that the run began with, and refuse what does not fit network or data.

        Raises:
            ValueError: there are none, they changed since, or what differs.
        """
        self._start = self._choose(resume, init_from)
        # once: its folder may be another one, or gone, when a checkpoint is written
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
            # it may stand elsewhere by now; what it is, its digest says
            source = saved["source"] if self._spec in (None, began) else self._spec
            try:
                start = open_weights(source)
            except (ValueError, OSError) as error:
                where = "if it was moved, say where to with task.teacher="
                raise ValueError(f"the teacher of {resume.path} is not to be found ({error}): {where}") from None
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

    def build(self, mesh: DeviceMesh | None, plan: ParallelPlan) -> None:
        """Make the network, frozen; its weights come with `load`."""

        def make() -> VideoDiT:
            return self._make().eval().requires_grad_(False)

        if not self._network:
            # it has no backward
            own = replace(plan, activation_checkpointing="none")
            with torch.random.fork_rng(devices=[]):
                self._network.append(build_model(make, mesh, own, initialise=None))

    def load(self, device: torch.device) -> None:
        """Fill the network and put it on `device`."""
        self.start.load(self.network, gates_from_dense(self.network))
        self.network.to(device)

    def state(self) -> dict[str, Any]:
        """What finds these weights again, from any folder, for `state.json`."""
        path = Path(self.start.source)
        return {"source": str(path.resolve()) if path.exists() else self.start.source, "digest": self._digest}

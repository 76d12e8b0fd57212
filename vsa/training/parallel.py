"""Parallelism of a model: activation checkpointing, compile and sharding, in this order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from vsa.attention.sequence import SequenceRanks
from vsa.data.parallel_dims import ParallelDims
from vsa.errors import is_out_of_memory, too_large
from vsa.models.compute_dtype import ComputeDtype, compute_in, hold_rounded, rounds_to
from vsa.models.init import without_memory
from vsa.models.network import Network
from vsa.models.recompute import LEVELS, Level
from vsa.models.sharding import local, offloading, place
from vsa.settings import AtLeastOne, Positive, validated
from vsa.signals import Stopped
from vsa.training.fills import Fills
from vsa.training.hosts import connect_hosts
from vsa.training.lightning_compat import MeshStrategy, stop_watching
from vsa.training.out_of_memory import out_of_memory_line
from vsa.training.run_state import LEVEL
from vsa.training.watch import RankMonitor, Timeouts


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Settings of `parallelize`.

    Args:
        activation_checkpointing: parts of each block that the backward pass recomputes to save memory: none, attention
            (norms and linear layers around the attentions, not the attentions themselves), attention_mlp (also the
            feed-forward layer), or full. auto: the least recomputation that fits into the memory of the GPU by the
            estimate of `vsa plan`, with a margin; a resumed run keeps the level of its checkpoint.
        compile: whether each block is compiled by `torch.compile`.
        compute_dtype: see `vsa.models.compute_dtype.ComputeDtype`; sampling follows it.
        frozen: form of the parameters that are not trained (beside adapters, or of a teacher): float32, or rounded,
            once and not at every use, with half the memory and the same results; on one device.
        sequence: number of consecutive ranks that share a sample, each with some of its tokens and, in attention, some
            of the heads; it divides the number of ranks.
        offload: whether parameters, gradients, moments and averages stay in the memory of the host and the optimizer
            runs there, with FSDP2; a GPU holds the layers that it computes.
    """

    activation_checkpointing: Literal["auto", "none", "attention", "attention_mlp", "full"] = "auto"
    compile: bool = False
    compute_dtype: ComputeDtype = "auto"
    frozen: Literal["float32", "rounded"] = "float32"
    sequence: AtLeastOne = 1
    offload: bool = False

    @property
    def level(self) -> Level:
        """Of activation checkpointing; of auto none, until one is chosen."""
        return "none" if self.activation_checkpointing == "auto" else self.activation_checkpointing

    def at(self, level: Level) -> ParallelPlan:
        """The plan with a level in place of `auto`; a level that is set stays."""
        return replace(self, activation_checkpointing=level) if self.activation_checkpointing == "auto" else self

    def resumed(self, state: Mapping[str, Any]) -> ParallelPlan:
        """Under `auto`, the plan with the level of a checkpoint, so that the run stays the same bit for bit."""
        # a checkpoint that does not say its level is older than `auto`, and none was the default then
        settings = state.get("config", {}).get("task", {}).get("parallel") or {}
        level = state.get(LEVEL, settings.get("activation_checkpointing", "none"))
        return self.at(level) if level in LEVELS else self

    def refuse_misfit(self, *, sharded: bool) -> None:
        """Raise ValueError for settings that need FSDP2 (`sharded`), or that it does not take."""
        if self.offload and not sharded:
            raise ValueError("task.parallel.offload=true is for FSDP2: set trainer=fsdp, which one GPU takes too")
        if self.frozen == "rounded" and sharded:
            raise ValueError("task.parallel.frozen=rounded is for one device without FSDP2, which shards fp32 weights")


def parallelize(model: Network, mesh: DeviceMesh | None, plan: ParallelPlan, device_type: str) -> None:
    """Prepare `model` in place: activation checkpointing, per-block compile, FSDP2 over `mesh` (None: no sharding).

    Gradients are reduced, and accumulated over micro-batches, in fp32. Inputs are not cast: timesteps and modulation
    need fp32, and the model casts the inputs of matrix products.

    Args:
        model: model on any device.
        mesh: mesh for the sharding of parameters, which rounds them when it gathers them; without one each layer
            rounds.
        plan: the settings.
        device_type: type of the device on which the model will run.
    """
    low = rounds_to(plan.compute_dtype, device_type)
    model.activation_checkpointing = plan.level
    if plan.compile:
        model.compile_blocks()
    plan.refuse_misfit(sharded=mesh is not None)
    if mesh is None:
        if low is not None and plan.frozen == "rounded":
            hold_rounded(model, low)
        compute_in(model, low)
    else:
        reduced = torch.float32 if low else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduced, cast_forward_inputs=False)
        stay = offloading(plan.offload, device_type)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=stay)
        # also reshard the root after its forward, since averages and checkpoints read shards at any time
        fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=stay, reshard_after_forward=True)


def every_parameter(name: str) -> bool:
    """`initialise` of a new network without initial weights."""
    return True


def build_model(
    make: Callable[[], Network],
    mesh: DeviceMesh | None,
    plan: ParallelPlan,
    *,
    initialise: Callable[[str], bool] | None = every_parameter,
    sequence: SequenceRanks | None = None,
) -> Network:
    """The network that `make` builds, prepared by `parallelize`, on the default device or on that of the mesh.

    Initial values are drawn on the CPU, so that they are the same on every device. With a mesh, the network is built on
    the meta device, sharded, and filled one parameter at a time, so no rank ever holds the whole model. Weights and
    random state are bitwise equal to those without a mesh. Where most parameters are loaded next, nothing is drawn for
    them.

    Args:
        make: factory of the network.
        mesh: mesh for the sharding of parameters; None: no sharding.
        plan: further settings.
        initialise: whether to initialise the parameter of a name (None: none); the others must be loaded next.
        sequence: the ranks that share a sample.
    """
    device_type = torch.get_default_device().type if mesh is None else mesh.device_type
    if mesh is None and initialise is every_parameter:
        with torch.device("cpu"):
            model = make()
        parallelize(model, None, plan, device_type)
        with _named_when_too_large(model):
            # parameters move one by one: the device holds the model once, and the CPU the remaining parameters
            return model.to(torch.get_default_device())
    if initialise is None:
        with without_memory():
            model = make()
        values = {}
    else:
        fills = Fills(draws=initialise is every_parameter)
        with torch.device("meta"), fills:
            model = make()
        # sharding replaces the parameters
        values = {name: fills.of(name, p) for name, p in model.named_parameters() if initialise(name)}
    parallelize(model, mesh, plan, device_type)
    model.sequence = sequence
    with _named_when_too_large(model):
        model.to_empty(device=torch.get_default_device() if mesh is None else "cpu" if plan.offload else device_type)
    parameters = dict(model.named_parameters())
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name, value in values.items():
            parameter = parameters[name]
            local(parameter).copy_(local(place(value(), parameter)))
    return model


@contextmanager
def _named_when_too_large(model: Network) -> Iterator[None]:
    """Add the size of the model to an out-of-memory error."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(too_large(lambda: model, error)) from error


def refuse_shared_parameters(networks: Mapping[str, nn.Module]) -> None:
    """Raise ValueError if two roles share a parameter, so that training one would change the other."""
    owners: dict[int, tuple[str, str]] = {}
    for role, network in networks.items():
        for name, parameter in network.named_parameters():
            place = local(parameter).untyped_storage().data_ptr()
            # an empty shard has no storage
            other, theirs = owners.setdefault(place, (role, name)) if place else (role, name)
            if other != role:
                raise ValueError(f"{other} and {role} share a parameter ({theirs} and {name}): each needs its own")


@validated
class ShardedDataParallel(MeshStrategy):
    """FSDP2 for a module that shards its networks over `device_mesh` in `configure_model`.

    Every rank trains on its own part of the batch.

    Args:
        replicate: number of copies of the model. The ranks are divided into as many groups, each with one sharded copy:
            1 shards over all ranks (FSDP), "all" puts the whole model on every rank (DDP), other numbers are HSDP.
        reduce_each: reduction of gradients after every micro-batch instead of once per step: more communication, but
            gradients need the memory of a shard and not of the whole model.
        timeout: seconds without a heartbeat of a rank, or without progress of all ranks, after which the others end.
        first_timeout: the same until the first step is done, which includes compilation and the start of workers; also
            the time limit for the ranks to connect.
    """

    hosts: dist.ProcessGroup | None = None
    """The ranks, for what their hosts agree on while GPUs compute; None: those of all collectives."""

    watch: RankMonitor | None = None
    """Monitor of the run, which ends this rank if it can only wait."""

    sequence: int = 1
    """Number of consecutive ranks that share a sample, `task.parallel.sequence`."""

    sequence_ranks: SequenceRanks | None = None
    """Those of this rank, once the ranks are connected; None where every rank has its own samples."""

    def __init__(
        self,
        replicate: AtLeastOne | Literal["all"] = 1,
        reduce_each: bool = False,
        timeout: Positive = 600.0,
        first_timeout: Positive = 1800.0,
    ):
        super().__init__(timeout=timedelta(seconds=max(timeout, first_timeout)))
        self._timeouts = Timeouts(step=timeout, first=first_timeout)
        self._replicate = replicate
        self._reduce_each = reduce_each

    def setup_environment(self) -> None:
        # checked before ranks connect: a rank that fails here would leave the others waiting
        self.set_world_ranks()
        _ = self.dims
        if self.watch is not None:
            stop_watching()
            self.watch.starts(self.started)
        if self.offload and self.root_device.type == "cuda":
            # norms of shards in the memory of the hosts are summed there
            self._process_group_backend = "cpu:gloo,cuda:nccl"
        try:
            super().setup_environment()
        except torch.distributed.DistError as error:
            reason = str(error).partition("\n")[0]
            raise ConnectionError(
                f"the {self.world_size} ranks have not met within trainer.strategy.first_timeout="
                f"{self._timeouts.first:g} s: {reason}"
            ) from error
        if self.watch is not None and self.world_size > 1:
            self.watch.meet(self._timeouts)
        if self.world_size > 1:
            self.hosts = connect_hosts(
                self.root_device, timedelta(seconds=max(self._timeouts.step, self._timeouts.first))
            )

    def on_exception(self, exception: BaseException) -> None:
        if self.watch is not None:
            if (line := out_of_memory_line(self.lightning_module, exception)) is not None:
                self.watch.fails(line)
            self.watch.settle(exception)
            self.watch.dismiss()
        super().on_exception(exception)

    @property
    def offload(self) -> bool:
        """Whether the module keeps its shards in the memory of the host."""
        plan: ParallelPlan | None = getattr(self.lightning_module, "parallel", None)
        return plan is not None and plan.offload

    def model_to_device(self) -> None:
        # all parameters are in their place, those that the host keeps too
        if not self.offload:
            super().model_to_device()

    @property
    def dims(self) -> ParallelDims:
        """The parallel dimensions of all ranks; ValueError if they do not divide the ranks."""
        return ParallelDims.of_settings({"replicate": self._replicate}, self.world_size, self.sequence)

    def make_mesh(self) -> DeviceMesh:
        if (size := self.sequence) > 1:
            shape, names = (self.dims.data_size, size), ("data", "sequence")
            own = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)["sequence"]
            self.sequence_ranks = SequenceRanks(group=own.get_group().group_name, size=size, rank=own.get_local_rank())
        # parameters are sharded over all ranks, whatever share of a sample they have
        shape = (self.dims.replicate, self.dims.shard)
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        # with a mesh of one axis there is no second reduction
        return mesh["dp_shard"] if self.dims.replicate == 1 else mesh

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """No reduction of gradients within the context, for all but the last micro-batch."""
        assert self.model is not None
        sharded = [m for m in self.model.modules() if isinstance(m, FSDPModule)] if not self._reduce_each else []
        for module in sharded:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in sharded:
                module.set_requires_gradient_sync(True, recurse=False)


def reduced_when(strategy: Any, last: bool) -> AbstractContextManager[None]:
    """Reduce the gradients of backwards within the context only if it is the last one of a step."""
    sums = not last and isinstance(strategy, ShardedDataParallel)
    return strategy.block_backward_sync() if sums else nullcontext()


@contextmanager
def rank_zero_reports(*errors: type[Exception], patience: float = 5.0) -> Iterator[None]:
    """Let rank 0 report an error that all ranks have; the launcher stops the other ranks when it exits.

    Args:
        errors: exceptions that the other ranks delay.
        patience: seconds after which another rank reports its error, because it is the only one to fail.
    """
    try:
        yield
    except errors:
        if rank_zero_only.rank != 0:
            try:
                time.sleep(patience)
            except Stopped:
                # by the launcher, as rank 0 has ended
                raise SystemExit(1) from None
        else:
            # the processes that this one started may end while it reports
            stop_watching()
        raise


def choose_strategy(strategy: Any, *, processes: int) -> Any:
    """The strategy of a run: FSDP2 for several processes, none for a single one.

    Args:
        strategy: value of the config, "auto" or a node that builds `ShardedDataParallel`.
        processes: number of processes on all nodes.

    Raises:
        ValueError: another strategy. Modules call their networks directly, so that Lightning's DDP, which reduces
            gradients in a wrapper of the module, would not reduce them.
    """
    if strategy == "auto":
        return ShardedDataParallel() if processes > 1 else "auto"
    if isinstance(strategy, str):
        raise ValueError(
            f"trainer.strategy={strategy} is not supported: leave it at auto, or choose trainer=fsdp or trainer=ddp"
        )
    return strategy

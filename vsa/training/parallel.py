"""How a model is spread over devices and prepared for them: checkpointing, compile, sharding, in that order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from vsa.errors import MemoryRanOut, is_out_of_memory, too_large
from vsa.models.compute_dtype import compute_in
from vsa.models.init import without_memory
from vsa.models.recompute import Level
from vsa.models.sharding import local, place
from vsa.models.video_dit import VideoDiT
from vsa.settings import AtLeastOne, Positive, checked
from vsa.training.lightning_compat import MeshStrategy, stop_watching
from vsa.training.watch import Timeouts, Watch

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """What `parallelize` applies.

    Args:
        activation_checkpointing: what each block computes again in the backward pass, for memory: none, attention
            (norms and products around the attentions, not these themselves), attention_mlp (the feed-forward layer
            too), or full; auto: the least that fits into the memory of the GPU by the estimate of `vsa plan`, one
            level more when memory runs out all the same, and what its checkpoint was trained with in a resumed run.
        compile: `torch.compile` each block.
        compute_dtype: what parameters, which stay fp32, are rounded to where they are used; auto: bfloat16 on CUDA,
            float32 elsewhere.
    """

    activation_checkpointing: Literal["auto", "none", "attention", "attention_mlp", "full"] = "auto"
    compile: bool = False
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"

    @property
    def level(self) -> Level:
        """Of activation checkpointing; of auto none, until one is chosen."""
        return "none" if self.activation_checkpointing == "auto" else self.activation_checkpointing

    def rounds_to(self, device_type: str) -> torch.dtype | None:
        """The dtype that parameters are rounded to on a kind of device; None: they are used as they are."""
        low = device_type == "cuda" if self.compute_dtype == "auto" else self.compute_dtype == "bfloat16"
        return torch.bfloat16 if low else None


def parallelize(model: VideoDiT, mesh: DeviceMesh | None, plan: ParallelPlan, device_type: str) -> None:
    """Prepare `model` in place: activation checkpointing, per-block compile, FSDP2 over `mesh` (None: no sharding).

    Gradients are reduced, and those of several micro-batches summed, in fp32. Inputs are not cast: timesteps and
    modulation need fp32, the model casts what enters a matrix product.

    Args:
        model: on any device.
        mesh: what its parameters are sharded over; they are rounded when they are gathered, without one by each layer.
        plan: what is applied.
        device_type: of the device that it will run on.
    """
    low = plan.rounds_to(device_type)
    model.activation_checkpointing = plan.level
    if plan.compile:
        model.compile_blocks()
    if mesh is None:
        compute_in(model, low)
    else:
        reduced = torch.float32 if low else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduced, cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        # the root too is resharded after its forward: averages and checkpoints read shards at any time
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def build_model(
    make: Callable[[], VideoDiT],
    mesh: DeviceMesh | None,
    plan: ParallelPlan,
    *,
    initialise: Callable[[str], bool] | None = lambda name: True,
) -> VideoDiT:
    """The network that `make` builds, prepared by `parallelize`, on the default device or on that of the mesh.

    Values are drawn on the CPU, so that they are the same on every device. With a mesh the network is made on the meta
    device, sharded, and filled one parameter at a time, so no rank ever holds the whole model. The weights and the
    random state are those of a build without a mesh, bit for bit.

    Args:
        make: builds the network.
        mesh: what the parameters are sharded over; None: not at all.
        plan: what else is applied.
        initialise: whether a parameter of this name gets its value (None: none does); the others are loaded next.
    """
    if mesh is None:
        return _build_whole(make, plan, torch.get_default_device(), draw=initialise is not None)
    fills = _Fills()
    with torch.device("meta"), fills if initialise else nullcontext():
        model = make()
    # sharding puts other parameters in their place
    parameters = model.named_parameters()
    values = {name: fills.of(name, p) for name, p in parameters if initialise and initialise(name)}
    parallelize(model, mesh, plan, mesh.device_type)
    with _named_when_too_large(model):
        model.to_empty(device=mesh.device_type)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name, value in values.items():
            parameter = model.get_parameter(name)
            local(parameter).copy_(local(place(value(), parameter)))
    return model


def _build_whole(make: Callable[[], VideoDiT], plan: ParallelPlan, device: torch.device, *, draw: bool) -> VideoDiT:
    with torch.device("cpu") if draw else without_memory():
        model = make()
    parallelize(model, None, plan, device.type)
    with _named_when_too_large(model):
        # one parameter after the other: the device holds the model once, and the CPU what has not moved yet
        return model.to(device) if draw else model.to_empty(device=device)


@contextmanager
def _named_when_too_large(model: VideoDiT) -> Iterator[None]:
    """Say how large the model is when it does not fit."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(too_large(lambda: model, error)) from error


class _Fills(TorchDispatchMode):
    """Remembers how tensors made on the meta device were last filled.

    Random values are drawn and dropped meanwhile: the random state moves as it does on a real device.
    """

    FUNCTIONS = (aten.normal_.default, aten.uniform_.default, aten.fill_.Scalar, aten.zero_.default)

    def __init__(self):
        super().__init__()
        # by storage, which all views of a parameter share; the tensor keeps its address from being used again
        self._last: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}
        # one buffer for all: freed ones would lie in pieces between what is remembered
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.FUNCTIONS or not args[0].is_meta:
            return func(*args, **(kwargs or {}))
        tensor: Tensor = args[0]
        state = torch.get_rng_state()

        def fill() -> Tensor:
            return func(self._buffer_for(tensor), *args[1:], **(kwargs or {}))

        def fill_again() -> Tensor:
            torch.set_rng_state(state)
            return fill()

        if torch.Tag.nondeterministic_seeded in func.tags:
            fill()
        self._last[tensor.untyped_storage()._cdata] = (tensor, fill_again)
        return tensor

    def _buffer_for(self, like: Tensor) -> Tensor:
        size = like.numel() * like.element_size()
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._buffer[:size].view(like.dtype).view(like.shape)

    def of(self, name: str, parameter: nn.Parameter) -> Callable[[], Tensor]:
        """The function that makes the value of `parameter` on the CPU, good until the next one is made."""
        tensor, fill_again = self._last[parameter.untyped_storage()._cdata]
        assert tensor.shape == parameter.shape, name
        return fill_again


def refuse_shared_parameters(networks: Mapping[str, nn.Module]) -> None:
    """Raise ValueError when two roles hold the same parameter, so that training one would change the other."""
    owners: dict[int, tuple[str, str]] = {}
    for role, network in networks.items():
        for name, parameter in network.named_parameters():
            place = local(parameter).untyped_storage().data_ptr()
            # an empty shard lies nowhere
            other, theirs = owners.setdefault(place, (role, name)) if place else (role, name)
            if other != role:
                raise ValueError(f"{other} and {role} share a parameter ({theirs} and {name}): each needs its own")


@checked
class ShardedDataParallel(MeshStrategy):
    """FSDP2 for a module that shards its networks over `device_mesh` in `configure_model`.

    Every rank trains on its own part of the batch.

    Args:
        replicate: copies of the model. The ranks fall into that many groups, each holding one copy in shards: 1 shards
            over all ranks (FSDP), "all" gives every rank the whole model (DDP), a number between is HSDP.
        reduce_each: with gradient accumulation, reduce the gradients of every micro-batch and not once a step: more
            traffic, but the memory of a shard's gradients and not of the whole model's.
        timeout: seconds without a sign of life of a rank, or without any progress of one, after which the others end.
        first_timeout: the same until the first step is made, which compiles and starts workers; also for the ranks to
            meet.

    Raises:
        ValueError: the ranks do not divide into that many copies (once they are known).
    """

    watch: Watch | None = None
    """What ends this rank where it can only wait; the run's own."""

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
        # refused before ranks connect: one that has failed would leave the others without a partner
        self.set_world_ranks()
        if self.world_size % self._copies:
            raise ValueError(f"trainer.strategy.replicate={self._copies} does not divide the {self.world_size} ranks")
        if self.watch is not None:
            stop_watching()
            self.watch.starts(self.started)
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

    def on_exception(self, exception: BaseException) -> None:
        if self.watch is not None:
            if isinstance(exception, MemoryRanOut):
                self.watch.fails(str(exception))
            self.watch.settle(exception)
            self.watch.dismiss()
        super().on_exception(exception)

    @property
    def _copies(self) -> int:
        return self._replicate if isinstance(self._replicate, int) else self.world_size

    def make_mesh(self) -> DeviceMesh:
        shape = (self._copies, self.world_size // self._copies)
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        # a mesh of one axis spares a second reduction
        return mesh["dp_shard"] if self._copies == 1 else mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """No reduction of gradients inside: what Lightning asks for in all but the last micro-batch."""
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
    """Gradients of a backward inside are reduced over ranks only when it is the last one of a step."""
    sums = not last and isinstance(strategy, ShardedDataParallel)
    return strategy.block_backward_sync() if sums else nullcontext()


@contextmanager
def rank_zero_reports(*errors: type[Exception], patience: float = 5.0) -> Iterator[None]:
    """Of ranks that fail for one reason let rank 0 report: launchers end the others when it exits.

    Args:
        errors: what is held back on the other ranks.
        patience: seconds, after which a rank whose failure is its own reports it.
    """
    try:
        yield
    except errors:
        if rank_zero_only.rank != 0:
            time.sleep(patience)
        else:
            # while this one reports, those it started may end
            stop_watching()
        raise


def choose_strategy(strategy: Any, *, processes: int) -> Any:
    """The strategy of a run: FSDP2 for several processes, none for a single one.

    Args:
        strategy: what the config says, "auto" or a node that builds `ShardedDataParallel`.
        processes: of all nodes.

    Raises:
        ValueError: another strategy: modules that step their own optimizers call their networks directly, so that
            Lightning's DDP, which reduces gradients in a wrapper around the module, would leave them unreduced.
    """
    if strategy == "auto":
        return ShardedDataParallel() if processes > 1 else "auto"
    if isinstance(strategy, str):
        raise ValueError(
            f"trainer.strategy={strategy} is not supported: leave it at auto, or choose trainer=fsdp or trainer=ddp"
        )
    return strategy

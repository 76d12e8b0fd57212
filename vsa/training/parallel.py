"""How a model is spread and prepared for a device: checkpointing, compile, sharding, in that order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from vsa.models.video_dit import VideoDiT


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """What `parallelize` applies.

    Args:
        activation_checkpointing: recompute each block in the backward pass.
        compile: `torch.compile` each block.
    """

    activation_checkpointing: bool = False
    compile: bool = False


def parallelize(model: VideoDiT, mesh: DeviceMesh | None, plan: ParallelPlan) -> None:
    """Prepare `model` in place: activation checkpointing, per-block compile, FSDP2 over `mesh` (None: no sharding).

    Parameters stay fp32; sharded compute is bf16 with fp32 gradient reduction. Inputs are not cast: timesteps and
    modulation need fp32, the model casts what enters a matrix product.
    """
    model.activation_checkpointing = plan.activation_checkpointing
    if plan.compile:
        model.compile_blocks()
    if mesh is not None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        # the root too is resharded after its forward: averages and checkpoints read shards at any time
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def default_strategy(devices: int | str, num_nodes: int = 1) -> Strategy | str:
    """FSDP2 on CUDA, also for one device (bf16 compute over fp32 parameters); plain on the CPU.

    Args:
        devices: GPUs per node; anything but a number takes all there are.
        num_nodes: nodes.
    """
    if torch.cuda.is_available():
        # left to itself, lightning counts nodes here and not devices
        per_node = devices if isinstance(devices, int) else torch.cuda.device_count()
        return ModelParallelStrategy(data_parallel_size=per_node * num_nodes, tensor_parallel_size=1)
    return "auto"

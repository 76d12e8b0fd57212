"""Estimated memory and time of a step, from shapes and measured rates.

N parameters; a rank holds N / shards of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from vsa.models.recompute import LEVELS, Level
from vsa.training.estimate.block import (
    HALF,
    SINGLE,
    block_traffic,
    head_bytes,
    head_traffic,
    kept_bytes,
    turn_bytes,
)
from vsa.training.estimate.gpus import GIB, Gpu
from vsa.training.estimate.job import FORWARD, TRAINING, Job, PlannedNetwork, runs_operator

CONTEXT = 0.8 * GIB
"""Bytes of the CUDA context, libraries and buffers of collectives; assumed, not measured."""

SLACK = 0.04
"""Fragmentation of the allocator as a fraction of the memory in use; assumed, not measured."""

_GATHER, _REDUCE = 14, 14
"""Bytes per parameter that FSDP2 reads and writes for a gather (cast, collective, split) and for a reduction."""

_KEYS = 128
"""Number of keys in a tile of dense attention kernels."""

_LAUNCHES = 0.013
"""Seconds that the host takes to launch the forward and backward of a compiled block: a step of 6 blocks takes 78 to 83
ms with sparse attention, of which the GPU works 38 (docs/race.md, step times). Hosts differ by a factor of two."""

Parts = Mapping[str, float]


def memory(job: Job) -> Parts:
    """Bytes on one rank by part, at the peak of a step, without fragmentation of the allocator."""
    resident = {} if job.offloaded else _state(job)
    moments = [moment for n in job.networks if n.trained for moment in _moments(job, n)]
    return {**resident, **max(moments, key=lambda parts: sum(parts.values()))}


def _state(job: Job) -> Parts:
    """Bytes of a rank's state between two steps."""
    rounded = (SINGLE - HALF) * job.frozen_rounded
    return {
        "parameters": sum(_held(n.parameters, job) - rounded * n.frozen for n in job.networks),
        "optimizer moments": sum(n.moment_bytes for n in job.networks) / job.dims.shard,
        "averaged weights": _held(job.networks[0].parameters, job) if job.averaged else 0.0,
    }


def host_bytes(job: Job) -> float:
    """Bytes in the memory of the host, by rank, that `task.parallel.offload` takes from the GPU."""
    return (sum(_state(job).values()) + sum(_held(n.trained, job) for n in job.networks)) * job.offloaded


def whole_memory(job: Job) -> Parts:
    """Bytes of GPU memory that a rank needs, by part."""
    parts = memory(job)
    return {**parts, "assumed context and allocator": sum(parts.values()) * SLACK + CONTEXT}


def total_memory(job: Job) -> float:
    """Bytes of GPU memory that a rank needs."""
    return sum(whole_memory(job).values())


def _held(parameters: float, job: Job) -> float:
    """fp32 bytes of this rank's shard."""
    return SINGLE * parameters / job.dims.shard


def _moments(job: Job, network: PlannedNetwork) -> list[Parts]:
    """Bytes of a network's update at the points of a step that can be its peak."""
    blocks = job.blocks(network)
    gradients = _held(network.trained, job)
    if job.offloaded:
        # of the parameters that are reduced together, in bf16 and fp32, until the host has its shard
        gradients = (HALF + SINGLE) * float(max(_together(network)))
    if job.micro_batches > 1 and job.sharded and not job.reduce_each:
        # unsharded sum until the last micro-batch
        gradients = SINGLE * float(network.trained)
    # the outermost layers, the current block and, in shards, the prefetched one
    largest = max(job.networks, key=lambda n: n.parameters) if job.sharded else network
    outside = _together(largest)[0]
    rounded = HALF * (outside + (1.0 + job.sharded) * max(largest.block_parameters))
    if job.offloaded:
        # the shards of those two blocks come in fp32
        rounded += _held(2 * max(largest.block_parameters), job)
    if not job.sharded and job.level in ("none", "attention"):
        # layers round their parameters where they use them; what is not computed again keeps the result
        rounded = HALF * float(network.parameters)
    if job.frozen_rounded:
        rounded = min(rounded, HALF * float(network.trained))
    activations = sum(layers * kept_bytes(shape, job.level) for shape, layers in blocks.items())
    one, turn = (max(count(shape, job.level) for shape in blocks) for count in (kept_bytes, turn_bytes))
    head = max(map(head_bytes, blocks))
    begun = gradients if job.micro_batches > 1 or job.offloaded else 0.0
    before = gradients if job.keeps_gradients else begun
    work = {"parameters in bf16": rounded}
    return [
        {**work, "gradients": before, "activations": activations, "last layers": head},
        {**work, "gradients": begun, "activations": activations, "a block in its backward": turn},
        {**work, "gradients": gradients, "activations": one, "a block in its backward": turn},
        {"gradients": gradients} | ({} if job.fused else {"AdamW's temporaries": _held(network.trained, job)}),
    ]


def _together(network: PlannedNetwork) -> list[int]:
    """Numbers of parameters that FSDP2 gathers together: those outside of the blocks, and those of every block."""
    return [network.parameters - sum(network.block_parameters), *network.block_parameters]


def fitting(job: Job, available: float) -> dict[Level, int]:
    """The largest micro-batch of every level that fits into `available` bytes; 0 if not even one sample fits."""
    result: dict[Level, int] = {}
    for level in LEVELS:
        own = replace(job, level=level)

        def fits(batch: int, own: Job = own) -> bool:
            return total_memory(replace(own, batch=batch)) <= available

        most = 1
        while most < 4096 and fits(most):
            most *= 2
        least = most // 2
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if fits(middle) else (least, middle)
        result[level] = least
    return result


def step_seconds(job: Job, gpu: Gpu) -> Parts:
    """Seconds of an optimizer step on one rank by part; without communication if the link's rate is unknown.

    Raises:
        ValueError: names the unknown rates of this kind of GPU.
    """
    if gpu.lacks:
        raise ValueError(f"{gpu.name} has no measured {', '.join(gpu.lacks)}")
    assert gpu.matrix_flops
    assert gpu.copy_bytes
    assert gpu.cross_flops
    assert gpu.sharding_bytes
    assert gpu.optimizer_parameters
    samples = job.batch * job.micro_batches
    parts, host = defaultdict[str, float](float), 0.0
    for network in job.networks:
        blocks, layers = job.blocks(network), len(network.model.blocks)
        head = head_traffic(next(iter(blocks)))
        linear, again = job.linear(network), job.linear(network, job.level)
        for kind, times in network.passes.items():
            training = kind == TRAINING
            host += job.micro_batches * times * layers * _LAUNCHES * (1 if training else 1 / 3)
            twice = training and job.level == "full"
            fraction = again / linear if training else 0.0
            parts["linear layers"] += samples * times * linear * (3 if training else 1) / gpu.matrix_flops
            parts["linear layers"] += samples * times * again * training / gpu.matrix_flops
            parts["attention"] += samples * times * _attention(job, network, gpu, training=training, twice=twice)
            # the kernel computes whole tiles of keys
            keys = -(-job.text // _KEYS) * _KEYS
            cross = 4 * network.model.dim * job.tokens(network) * keys * layers * ((3.5 if training else 1) + twice)
            parts["attention to text"] += samples * times * cross / gpu.cross_flops
            # recomputation repeats elementwise work in proportion to its products
            moved = head.forward + head.backward * training
            for shape, count in blocks.items():
                traffic = block_traffic(shape)
                moved += count * (traffic.forward * (1 + min(1.0, fraction)) + traffic.backward * training)
            parts["elementwise and norms"] += job.micro_batches * times * moved / gpu.copy_bytes
            if job.sharded:
                copied = _GATHER * (2 if training else 1) * network.parameters * job.micro_batches * times
                parts["copies of parameters"] += copied / gpu.sharding_bytes
            else:
                # rounded for every pass, and gradients brought back to fp32
                copied = (SINGLE + HALF) * (1 + training + twice) * network.parameters * job.micro_batches * times
                parts["copies of parameters"] += copied / gpu.copy_bytes
        own = network.trained / job.dims.shard
        if job.sharded:
            reductions = job.micro_batches if job.reduce_each else 1
            copied = _REDUCE * network.trained * network.updates * reductions
            parts["copies of parameters"] += copied / gpu.sharding_bytes
        # 8-bit moments too, whose rate was not measured
        parts["optimizer"] += own * network.updates / gpu.optimizer_parameters
        # gradients are read for the norm, then read and written for clipping
        parts["gradient norms"] += 12 * own * network.updates / gpu.copy_bytes
    if job.averaged:
        parts["averaged weights"] = (
            12 * job.networks[0].parameters / job.dims.shard * job.networks[0].updates / gpu.copy_bytes
        )
    if job.dims.ranks > 1 and gpu.link_bytes:
        parts["communication, exposed"] = _exposed(job, gpu, sum(parts.values()))
        if job.dims.sequence > 1:
            parts["tokens between ranks"] = _travel(job) / gpu.link_bytes
    # the GPU works while the host launches
    parts["waiting for the host"] = max(0.0, host - sum(parts.values()))
    return parts


def _attention(job: Job, network: PlannedNetwork, gpu: Gpu, *, training: bool, twice: bool) -> float:
    """Seconds of self-attention for a sample."""
    model = network.model
    layout = model.layout_for(job.latent_shape)
    tiles = layout.num_video_tiles
    runs = [runs_operator(method, tiles, job.topk) for method in model.attention_layers]
    seconds = 0.0
    for operator in set(runs):
        rates = gpu.operator_flops if operator else gpu.dense_flops
        assert rates is not None
        rate = rates[min(rates, key=lambda dim: abs(dim - model.head_dim))]
        each = model.pairs(layout, job.topk if operator else None)
        pairs = sum(count for count, own in zip(each, runs, strict=True) if own == operator)
        if operator:
            # a partly filled tile costs as much as a full one
            pairs *= (tiles * layout.video_blocks.max_size / layout.num_tokens) ** 2
        seconds += rate.seconds(4 * model.dim * pairs, forwards=2 if twice else 1, backward=training)
    return seconds / job.dims.sequence


def _travel(job: Job) -> float:
    """Bytes of q, k, v and attention outputs that a rank sends in a step, of ranks that share a sample."""
    total, share = 0.0, (job.dims.sequence - 1) / job.dims.sequence
    for network in job.networks:
        # the backward sends as much, and a level computes q, k and v again
        passes = network.passes.get(FORWARD, 0.0)
        passes += (2 if job.level == "none" else 2.75) * network.passes.get(TRAINING, 0.0)
        rows = job.batch * job.micro_batches * job.tokens(network) * len(network.model.blocks)
        total += 4 * HALF * passes * rows * network.model.dim * share
    return total


def _exposed(job: Job, gpu: Gpu, computing: float) -> float:
    """Seconds of collectives not hidden by computation: at least the first gather and the last reduction, otherwise
    the time by which communication exceeds computation."""
    assert gpu.link_bytes
    share = (job.dims.shard - 1) / job.dims.shard
    total = edges = 0.0
    for network in job.networks:
        passes = network.passes.get(FORWARD, 0.0) + 2 * network.passes.get(TRAINING, 0.0)
        gathers = HALF * network.parameters * passes * job.micro_batches
        reductions = SINGLE * network.trained * network.updates * (job.micro_batches if job.reduce_each else 1)
        total += share * (gathers + reductions) / gpu.link_bytes
        edges += share * (HALF * passes + SINGLE * network.updates) * max(network.block_parameters) / gpu.link_bytes
    return max(edges, total - computing)

"""Refusals of a job whose settings, data and checkpoint do not fit each other, before a network is allocated."""

from __future__ import annotations

import math
import socket
from typing import Any, NamedTuple

import lightning as L
import torch.distributed as dist

from vsa.attention.sparsity import SparsitySchedule
from vsa.checkpoints.run_checkpoint import Checkpoint
from vsa.checkpoints.state_file import one_line
from vsa.checkpoints.weights import WeightSource
from vsa.data.parallel_dims import ParallelDims
from vsa.diffusion.latent_statistics import LatentStatistics
from vsa.models.network import Network
from vsa.training.hosts import hosts_of
from vsa.training.run_state import refuse_missing


class JobSize(NamedTuple):
    """Size of a job, from the settings of the trainer.

    Attributes:
        micro_batches: micro-batches of an optimizer step on one rank.
        dims: parallel dimensions of its ranks.
        max_steps: number of optimizer steps; negative: unlimited.
    """

    micro_batches: int
    dims: ParallelDims
    max_steps: int


def refuse_misfit(model: Network, sparsity: SparsitySchedule, data: Any, size: JobSize) -> None:
    """Raise ValueError, with the mismatch, if data and settings do not fit the model.

    Args:
        model: model on the meta device.
        sparsity: top-k by optimizer step.
        data: data module after `setup`.
        size: size of the job.
    """
    # the stream would refuse an indivisible batch too, but it is created after the run folder is opened
    size.dims.micro_batch(data.batch_size, size.micro_batches)
    expected = model.in_channels - model.out_channels
    if data.cond_channels != expected:
        raise ValueError(
            f"the model takes {expected} channels of image condition (model.in_channels - model.out_channels), "
            f"the data have {data.cond_channels}: encode them with vsa encode --model PIPELINE, the model's pipeline"
        )
    width = data.image_encoder and data.image_encoder.dim
    if width != model.image_dim:
        theirs, ours = (f"tokens of width {dim}" if dim else "no tokens" for dim in (width, model.image_dim))
        raise ValueError(
            f"the model takes {ours} of an image encoder (model.image_dim), the data have {theirs}: encode them with "
            "vsa encode --model PIPELINE, the model's pipeline"
        )
    shapes = list(data.buckets)
    if (ranks := size.dims.sequence) > 1:
        model.refuse_division(shapes, ranks)
    # a top-k above the tiles of every bucket is an error; smaller buckets clamp it
    tiles = max(model.layout_for(shape).num_video_tiles for shape in shapes)
    if tiles == 1 and model.selects:
        largest = max(shapes, key=lambda shape: math.prod(shape[1:]))
        method = next(method for method in model.attention_layers if method.selects)
        # kv tiles as large as those of the queries are named as theirs; runs along a curve have tokens
        settings = {getattr(method, name, None): name for name in ("kv_tile_thw", "tile_thw", "tokens")}
        tile, name = next((tile, name) for tile, name in settings.items() if tile is not None)
        raise ValueError(
            f"attention.{name}={[*tile] if isinstance(tile, tuple) else tile} makes one tile of the largest latents, "
            f"{largest}: there is nothing to select"
        )
    # attention that selects no tiles ignores the top-k
    sparsity.check(tiles if model.selects else 1, len(model.blocks))


def refuse_ranks_apart(trainer: L.Trainer, data: Any, statistics: LatentStatistics) -> None:
    """Raise ValueError on all ranks if one sees other data than rank 0, as on a host with other files; a collective
    operation.

    Args:
        trainer: trainer of the run.
        data: data module after `setup`.
        statistics: statistics that normalise latents.
    """
    if trainer.world_size == 1:
        return
    ranks: list[Any] = [None] * trainer.world_size
    own = (data.plan_hash, statistics.mean.tolist(), statistics.std.tolist())
    seen = f"on {socket.gethostname()} {sum(data.buckets.values()):,} training samples (plan {data.plan_hash[:12]})"
    dist.all_gather_object(ranks, (own, seen), group=hosts_of(trainer.strategy))
    for rank, (theirs, there) in enumerate(ranks):
        if theirs != ranks[0][0]:
            raise ValueError(
                f"rank {rank} sees other data than rank 0: {there}, and {ranks[0][1]}: every host needs the same files "
                "under the data's folders"
            )


def refuse_other_noise(weights: WeightSource, levels: tuple[float, float] | None) -> None:
    """Raise ValueError if weights are an expert for other noise levels than those of the training.

    A few-step generator goes from noise to data, so an expert, whose scores hold at its levels alone, neither starts
    nor teaches a distillation.

    Args:
        weights: weights that a training starts from.
        levels: lowest and highest noise level of its objective; None: those of a distillation, which are all.
    """
    own = weights.noise_range
    if own is None:
        return
    low, high = (f"{level:g}" for level in own)
    if levels is None:
        raise ValueError(
            f"{weights.source} is an expert for noise levels {low} to {high}, a distillation needs one network for all "
            "of them: distil Wan2.1 or Wan2.2 TI2V, or finetune the expert and sample it with many steps"
        )
    if not own[0] <= levels[0] < levels[1] <= own[1]:
        raise ValueError(
            f"{weights.source} is an expert for noise levels {low} to {high}, task.objective.noise_range is "
            f"[{levels[0]:g},{levels[1]:g}]: set [{low},{high}], or name the other expert"
        )


def refuse_other_data(checkpoint: Checkpoint, data: Any, statistics: LatentStatistics) -> None:
    """Raise ValueError for a checkpoint of other data; samples of the same names may have been encoded again.

    Args:
        checkpoint: checkpoint to resume.
        data: data module after `setup`.
        statistics: statistics that normalise latents.
    """
    refuse_missing(checkpoint, ("latent_mean",))
    now = {**data.state_dict(), "latent_mean": statistics.mean.tolist()}
    if data.plan.later:
        # a phase may bring further shapes
        now["latent_shapes"] = [shape for shape in checkpoint.state["latent_shapes"] if shape in now["latent_shapes"]]
    for name in ("codec", "text_encoder", "image_encoder", "latent_shapes", "latent_mean"):
        if checkpoint.state.get(name) != now.get(name):
            raise ValueError(
                f"{checkpoint.path} was trained on data with {name}={one_line(checkpoint.state.get(name))}, these have "
                f"{one_line(now.get(name))}: use init_from="
            )

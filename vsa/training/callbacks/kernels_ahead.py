"""Compilation of the kernels of a run while its networks are built."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import nn
from vsa_kernels.compile_ahead import Compilation, compile_ahead, recorded_launches

from vsa.attention.denoising import DenoisingTopk, Topk
from vsa.attention.sparsity import SparsitySchedule
from vsa.models.compute_dtype import compute_in
from vsa.training.display import never_fatal
from vsa.training.estimate.job import TRAINING, Job, PlannedNetwork, layout_of
from vsa.training.estimate.run import jobs_of
from vsa.training.modules.base import DiffusionModule

MOST_PROCESSES = 16
"""Each holds some hundred MiB for a few seconds."""


class KernelsAhead(L.Callback):
    """Starts the compilation of the kernels that a run launches on a GPU in its first and its last step.

    They are found by passes of two blocks per network on the meta device. A kernel that is not found, or not compiled
    in time, is compiled at its first launch.

    Args:
        cfg: config of the run.
    """

    def __init__(self, cfg: Any):
        self._cfg = cfg
        self._compilation: Compilation | None = None

    def setup(self, trainer: L.Trainer, pl_module: DiffusionModule, stage: str) -> None:
        device = trainer.strategy.root_device
        if device.type != "cuda":
            return
        from triton import knobs

        # the ranks of a node share one cache; torch.compile would give each its own, after the first kernels
        os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
        if trainer.local_rank:
            return
        with never_fatal("the compilation of kernels ahead of the first step"):
            datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
            text, ranks = datamodule.text_encoder.max_tokens, trainer.world_size
            jobs = jobs_of(self._cfg, pl_module, datamodule.buckets, text, ranks=ranks)
            # a schedule may end with other kernels, for sparse attention where it began with dense
            steps = [0 if pl_module.resume is None else pl_module.resume.step, max(0, trainer.max_steps - 1)]
            passes = passes_of(jobs, pl_module.sparsity, steps)
            capability = torch.cuda.get_device_capability(device)
            launches = launches_of(passes, pl_module.compute_dtype(device.type), capability)
            processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
            self._compilation = compile_ahead(launches, capability, processes)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._compilation is not None and self._compilation.ended:
            self._end()

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        self._end()

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self._end()

    def _end(self) -> None:
        compilation, self._compilation = self._compilation, None
        if compilation is None:
            return
        with never_fatal("the compilation of kernels ahead of the first step"):
            if compilation.ended:
                compilation.wait()
        compilation.stop()


def passes_of(
    jobs: Callable[[int], Sequence[tuple[float, Job]]], sparsity: SparsitySchedule, steps: Iterable[int]
) -> list[tuple[Job, Topk]]:
    """The passes of some optimizer steps that may launch different kernels: micro-batches, each with a top-k.

    Args:
        jobs: micro-batches of a step.
        sparsity: top-k by optimizer step.
        steps: the optimizer steps.
    """
    found: dict[Any, tuple[Job, Topk]] = {}
    for step in steps:
        for _, job in jobs(step):
            network = job.networks[0]
            tiles, layers = layout_of(network, job.latent_shape).num_video_tiles, len(network.model.blocks)
            topk = sparsity.topk_per_layer(step, tiles, layers) if network.model.selects else tiles
            for key, value in _of_one_layer(topk, tiles):
                found.setdefault((job.latent_shape, key), (job, value))
    return list(found.values())


def _of_one_layer(topk: Topk, tiles: int) -> Iterator[tuple[Any, Topk]]:
    """Numbers for single layers, with equal keys where kernels are the same."""
    if isinstance(topk, DenoisingTopk):
        rows = [row if isinstance(row, int) else row[-1] for row in topk.rows]
        *ranges, base = rows
        ranges = [(start, stop, row) for (start, stop, _), row in zip(topk.ranges, ranges, strict=True)]
        value = replace(topk, base=base, ranges=tuple(ranges), steps=())
        yield value, value
        return
    for number in (topk,) if isinstance(topk, int) else topk:
        # dense attention, what Triton knows about an integer, and the capacity of lists
        yield (number >= tiles, number == 1, number % 16, -(-number // 32)), number


def launches_of(
    passes: Iterable[tuple[Job, Topk]], compute_dtype: torch.dtype | None, capability: tuple[int, int]
) -> list[bytes]:
    """What the networks of a run launch, for `vsa_kernels.compile_ahead`; they keep two blocks afterwards.

    Args:
        passes: micro-batches, each with its top-k.
        compute_dtype: dtype that parameters are rounded to.
        capability: compute capability of the GPU.
    """
    with recorded_launches(capability) as launches:
        for job, topk in passes:
            for network in job.networks:
                try:
                    _run(network, job, topk, compute_dtype)
                except Exception:
                    # attention that reads values, or that needs a GPU: what came before it is known
                    continue
    return launches


def _run(network: PlannedNetwork, job: Job, topk: Topk, compute_dtype: torch.dtype | None) -> None:
    model = network.model
    # the first one may get an input without a gradient, all others launch what the second one does
    model.blocks = nn.ModuleList(list(model.blocks)[:2])
    if job.sharded and compute_dtype is not None:
        # FSDP2 rounds every parameter that it gathers
        model.to(compute_dtype)
    else:
        compute_in(model, compute_dtype)
    latents = torch.empty(job.batch, model.in_channels, *job.latent_shape[1:], device="meta")
    timestep = torch.empty(job.batch, device="meta")
    text = torch.empty(job.batch, job.text, model.text_dim, device="meta")
    for kind in network.passes:
        with torch.set_grad_enabled(kind == TRAINING):
            out = model(latents, timestep, text, topk=topk)
        if out.requires_grad:
            out.sum().backward()

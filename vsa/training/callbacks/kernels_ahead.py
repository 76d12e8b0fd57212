"""Compilation of the kernels of a run while its networks are built."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import lightning as L
import torch
from torch import nn
from vsa_kernels.compile_ahead import Compilation, compile_ahead, recorded_launches

from vsa.models.compute_dtype import compute_in
from vsa.training.display import never_fatal
from vsa.training.estimate.job import TRAINING, Job, PlannedNetwork
from vsa.training.estimate.run import jobs_of
from vsa.training.modules.base import DiffusionModule

MOST_PROCESSES = 16
"""Each holds some hundred MiB for a few seconds."""


class KernelsAhead(L.Callback):
    """Starts the compilation of the kernels that the first and the last step of a run launch on a GPU.

    They are found by passes of one block per network on the meta device. A kernel that is not found, or not compiled in
    time, is compiled at its first launch.

    Args:
        cfg: config of the run.
    """

    def __init__(self, cfg: Any):
        self._cfg = cfg
        self._compilation: Compilation | None = None

    def setup(self, trainer: L.Trainer, pl_module: DiffusionModule, stage: str) -> None:
        device = trainer.strategy.root_device
        # the ranks of a node share the cache
        if device.type != "cuda" or trainer.local_rank:
            return
        with never_fatal("the compilation of kernels ahead of the first step"):
            from triton import knobs

            # otherwise torch.compile names another folder of its own, after the first kernels are written
            os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
            datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
            text, ranks = datamodule.text_encoder.max_tokens, trainer.world_size
            jobs = jobs_of(self._cfg, pl_module, datamodule.buckets, text, ranks=ranks)
            # a schedule may end with other kernels, for sparse attention where it began with dense
            steps = [0 if pl_module.resume is None else pl_module.resume.step, max(0, trainer.max_steps - 1)]
            low = pl_module.compute_dtype(device.type)
            capability = torch.cuda.get_device_capability(device)
            launches = launches_of([job for step in steps for _, job in jobs(step)], low, capability)
            processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
            self._compilation = compile_ahead(launches, capability, processes)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._compilation is not None and self._compilation.ended:
            self._end()

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        if self._compilation is not None:
            self._end()

    def _end(self) -> None:
        compilation, self._compilation = self._compilation, None
        assert compilation is not None
        with never_fatal("the compilation of kernels ahead of the first step"):
            if compilation.ended:
                compilation.wait()
        compilation.stop()


def launches_of(jobs: Iterable[Job], compute_dtype: torch.dtype | None, capability: tuple[int, int]) -> list[bytes]:
    """What the networks of a run launch, for `vsa_kernels.compile_ahead`; they keep one block afterwards.

    Args:
        jobs: micro-batches of the run.
        compute_dtype: dtype that parameters are rounded to.
        capability: compute capability of the GPU.
    """
    with recorded_launches(capability) as launches:
        for job in jobs:
            for network in job.networks:
                # attention that reads values of tensors is followed until it does
                with suppress(NotImplementedError):
                    _run(network, job, compute_dtype)
    return launches


def _run(network: PlannedNetwork, job: Job, compute_dtype: torch.dtype | None) -> None:
    model = network.model
    # all blocks launch the same kernels
    model.blocks = nn.ModuleList(list(model.blocks)[:1])
    if job.sharded and compute_dtype is not None:
        # FSDP2 rounds every parameter that it gathers
        model.to(compute_dtype)
    else:
        compute_in(model, compute_dtype)
    latents = torch.empty(job.batch, model.in_channels, *job.latent_shape[1:], device="meta")
    timestep = torch.empty(job.batch, device="meta")
    text = torch.empty(job.batch, job.text, model.text_dim, device="meta")
    for topk in {job.topk} if isinstance(job.topk, int) else set(job.topk):
        for kind in network.passes:
            with torch.set_grad_enabled(kind == TRAINING):
                out = model(latents, timestep, text, topk=topk)
            if out.requires_grad:
                out.sum().backward()

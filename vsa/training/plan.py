"""`vsa plan`: memory, time and cost of a run on a given kind of GPU, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vsa.config import build, build_task, check_settings, check_targets, resolved
from vsa.data.parallel_dims import ParallelDims
from vsa.data.sample_store import follow_codec
from vsa.training.budgets import check_budget, is_counted, steps_of_budget
from vsa.training.estimate.gpus import GIB, GPUS, MEASURED_BY, Gpu, how_to_measure, known_gpu
from vsa.training.estimate.run import estimate_of, full_lines, with_dense_attention
from vsa.training.model_sizes import fill_model

Grid = tuple[int, int, int]


def plan(cfg: Any, *, gpu: str, gib: float | None, grid: Grid | None) -> None:
    """Print the estimate of a run on a kind of GPU.

    Args:
        cfg: config of the run.
        gpu: kind of GPU.
        gib: memory of one GPU if it differs from that of the kind.
        grid: tokens of a sample along time, height and width; None: those of the data.

    Raises:
        ValueError: an invalid setting, an unknown kind of GPU, or a run that does not fit.
    """
    if cfg.get("sweep"):
        raise ValueError("a plan is for a single run: leave sweep= out")
    fill_model(cfg)
    check_targets(cfg)
    check_settings(cfg)
    kind = gpu_of(gpu, gib)
    module = build_task(cfg)
    check_budget(cfg, module)
    shapes, image = _samples(cfg, module, grid)
    text = resolved(cfg.data.text_encoder)["max_tokens"]
    # schedules that end with the run depend on this setting
    cfg.trainer.max_steps = steps_of_budget(cfg, shapes, text, image)
    module = build_task(cfg)
    dims = ParallelDims.of_settings(cfg.trainer.strategy, _ranks(cfg.trainer), module.parallel.sequence)
    if dims.sequence > 1:
        for network in module.planned_networks():
            network.model.refuse_division(shapes, dims.sequence)
    estimate = estimate_of(cfg, module, shapes, text, kind, dims=dims, counted=is_counted(cfg))
    print("\n".join(full_lines(str(cfg.name), estimate, with_dense_attention(module))))
    if (refusal := estimate.refusal()) is not None:
        raise ValueError(refusal)


def gpu_of(name: str, gib: float | None = None) -> Gpu:
    """A kind of GPU, with memory `gib` if set; ValueError for an unknown kind without memory, or an invalid memory."""
    if gib is not None and not gib > 0:
        raise ValueError(f"--memory {gib:g}: expected GiB above 0")
    gpu = known_gpu(name)
    if gpu is None and gib is None:
        names = ", ".join(kind.name for kind in GPUS)
        raise ValueError(
            f"--gpu {name}: unknown kind of GPU, give its memory (--memory GIB; vsa info there shows it), "
            f"known kinds: {names}; for times it also needs a row of vsa/training/estimate/gpus.py with measured "
            f"rates: {how_to_measure(MEASURED_BY)}"
        )
    gpu = gpu or Gpu(name=name, memory=0.0, sources={})
    return gpu if gib is None else replace(gpu, memory=gib * GIB)


def _ranks(trainer: Any) -> int:
    devices = trainer.devices
    if (isinstance(devices, str) and not devices.isdecimal()) or devices == -1:
        raise ValueError(f"trainer.devices={devices}: a plan needs a number of GPUs, as in trainer.devices=8")
    count = int(devices) if isinstance(devices, int | str) else len(devices)
    return count * trainer.get("num_nodes", 1)


def _samples(cfg: Any, module: Any, grid: Sequence[int] | None) -> tuple[dict[tuple[int, ...], int], int]:
    """Number of samples by latent shape, and tokens of their first frames."""
    if grid is not None:
        if min(grid) < 1:
            raise ValueError(f"--grid {' '.join(map(str, grid))}: expected token counts above 0")
        model = module.planned_networks()[0].model
        return {(model.in_channels, *(n * p for n, p in zip(grid, model.patch_size, strict=True))): 1}, 0
    try:
        follow_codec(cfg.data)
        datamodule = build(cfg.data)
        datamodule.setup("fit")
    except (OSError, ValueError) as error:
        raise ValueError(f"{error}; without data give the tokens of a sample: --grid T H W") from error
    image = datamodule.image_encoder
    return datamodule.buckets, 0 if image is None else image.tokens


def planning(gpu: str, gib: float | None, grid: Grid | None) -> Any:
    """The Hydra job of a plan."""
    return partial(plan, gpu=gpu, gib=gib, grid=grid)

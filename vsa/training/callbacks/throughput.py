"""Tokens and FLOPs per second, by the clock of the device, without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch

from vsa.attention.kept_tiles import KeptTiles
from vsa.data.batch import VideoBatch
from vsa.training.measured_flops import MeasuredFlops
from vsa.training.modules.base import DiffusionModule
from vsa.training.rank_times import CollectiveClock, RankTimes
from vsa.training.run_state import RunStatus
from vsa.training.step_flops import StepFlops, expected_topk
from vsa.transfer import DeviceTimestamp

PEAK_BF16_TFLOPS = {
    "H100 PCIe": 756,
    "H100": 989,
    "H200": 989,
    "H800": 989,
    "GH200": 989,
    "B200": 2250,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "RTX 4090": 165,
    "RTX 5090": 209,
}
"""Dense bf16 tensor-core peak in TFLOP/s by a part of the device name (vendors' datasheets)."""


def peak_tflops(device: torch.device) -> float | None:
    """bf16 peak of the GPU in TFLOP/s; None if it is unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((float(peak) for part, peak in PEAK_BF16_TFLOPS.items() if part in name), None)


class Throughput(L.Callback):
    """Logs step time, tokens/s, executed and dense-equivalent TFLOP/s, MFU on known GPUs, and the sparsity.

    Top-k, density and executed tile pairs are means over the layers; the effective sparsity is the share of tile pairs
    skipped, over all layers. If layers differ, the top-k of each is logged too. FLOPs follow the paper's formula with
    the pairs that a method executes (methods.md 1.4). Times exclude validation, sampling and saving.

    With several ranks, `ranks/step_seconds_N` is the time of rank N for forward and backward without waiting for
    others, and `ranks/data_seconds_N` its wait for data. The log names a rank that is a fifth slower over 50 steps.
    """

    _ranks: RankTimes | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        self._flops, self._measured = StepFlops(pl_module, measured=True), pl_module.status.measured.total
        self._restart(DeviceTimestamp(pl_module.device), pl_module.status)
        if trainer.world_size > 1:
            self._clock = CollectiveClock().__enter__()
            self._ranks = RankTimes(self._clock, lambda: time.perf_counter() - pl_module.status.paused_seconds)

    def teardown(self, trainer: L.Trainer, pl_module: DiffusionModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: DiffusionModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._ranks is not None:
            self._clock.__exit__()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: DiffusionModule, batch: Any, batch_idx: int) -> None:
        networks = (network for network, *_ in pl_module.passes(trainer.global_step))
        pl_module.status.measured.begin((n for n in networks if n.measured), pl_module.device)
        if self._ranks is not None:
            self._ranks.begins()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: DiffusionModule, optimizer: Any) -> None:
        if self._ranks is not None:
            self._ranks.computed()

    def _restart(self, now: DeviceTimestamp, status: RunStatus) -> None:
        self._started, self._paused_before = now, status.paused_seconds
        self._steps = self._tokens = 0
        self._executed = self._dense = 0.0

    def on_validation_start(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        self._validation = pl_module.status.paused()
        self._validation.__enter__()

    def on_validation_end(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        self._validation.__exit__(None, None, None)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: VideoBatch, batch_idx: int
    ) -> None:
        pl_module.status.measured.end()
        last = (batch_idx + 1) % pl_module.accumulate == 0
        if self._ranks is not None:
            self._ranks.ends(step=last)
        if last:
            self._count(trainer, pl_module, batch)
        if self._ranks is not None:
            self._ranks.waits()

    def _count(self, trainer: L.Trainer, pl_module: Any, batch: VideoBatch) -> None:
        model, shape = pl_module.model, tuple(batch.latents.shape[1:])
        step = trainer.global_step
        topk = expected_topk(pl_module, model, pl_module.topk_after(shape, step), shape)
        layout = model.layout_for(shape)
        flops = self._flops(batch, step - 1)
        self._steps += 1
        self._tokens += layout.num_tokens * batch.num_slots
        self._executed += flops.executed * batch.num_slots
        self._dense += flops.dense_equivalent * batch.num_slots
        pl_module.status.flops_total += flops.executed * batch.num_slots
        if not pl_module.log_lines.due(step):
            return
        status, flops_total = pl_module.status, {"throughput/flops_total": pl_module.status.flops_total}
        if status.measured.used:
            status.measured.collect(line=True)
            pl_module.log_lines.add(partial(_measured, status.measured, flops_total.popitem()[1]), step)
            budget = pl_module.start.config.get("flop_budget")
            if budget is not None and status.flops_total + status.measured.read() >= budget:
                # the number of steps was planned with the expected share of tiles
                trainer.fit_loop.epoch_loop.max_steps = step
        now, peak = DeviceTimestamp(pl_module.device), peak_tflops(pl_module.device)
        pl_module.log_lines.add(self._speeds(now, status, peak, trainer.world_size), step)
        metrics = {**flops_total, **sparsity_metrics(model.computed_tiles(layout, topk), layout.num_video_tiles)}
        if self._ranks is not None:
            metrics |= self._ranks.metrics(trainer)
        if peak is not None:
            metrics["throughput/memory_gib"] = torch.cuda.max_memory_allocated(pl_module.device) / 2**30
        pl_module.log_lines.add(metrics, step)
        self._restart(now, status)

    def _speeds(
        self, now: DeviceTimestamp, status: RunStatus, peak: float | None, ranks: int
    ) -> Callable[[], dict[str, float]]:
        """Function that waits until the device has done the steps counted `now`, for their times."""
        started, paused = self._started, status.paused_seconds - self._paused_before
        steps, tokens, executed, dense = self._steps, self._tokens, self._executed, self._dense

        def speeds() -> dict[str, float]:
            measured = status.measured.read() - self._measured
            self._measured += measured
            seconds = max(now.seconds_since(started) - paused, 1e-9)
            metrics = {
                "throughput/step_seconds": seconds / steps,
                "throughput/tokens_per_second": tokens / seconds,
                "throughput/tflops_executed": (executed + measured) / seconds / 1e12,
                "throughput/tflops_dense_equivalent": dense / seconds / 1e12,
            }
            if peak is not None:
                metrics["throughput/mfu"] = (executed + measured) / seconds / 1e12 / peak / ranks
            return metrics

        return speeds


def _measured(measured: MeasuredFlops, others: float) -> dict[str, float]:
    """Executed FLOPs with all `others`, and the density of the lists since the last log line; waits for the device."""
    return {"throughput/flops_total": others + measured.read(), "sparsity/measured_density": measured.density}


def sparsity_metrics(topk: KeptTiles, num_tiles: int) -> dict[str, float]:
    """Sparsity metrics of a log line.

    Args:
        topk: tiles per query tile; a mean if it varies with the denoising progress or if the method does not select.
        num_tiles: number of video tiles of a sample.
    """
    mean = topk.mean(num_tiles)
    metrics = {
        "sparsity/topk": mean,
        "sparsity/density": mean / num_tiles,
        "sparsity/tile_pairs": mean * num_tiles,
        "sparsity/effective": 1 - mean / num_tiles,
    }
    if len(set(topk.layers)) > 1:
        metrics |= {f"sparsity/topk_layer_{layer}": float(k) for layer, k in enumerate(topk.layers)}
    return metrics

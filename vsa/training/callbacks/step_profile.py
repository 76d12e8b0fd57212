"""`debug=profile`: a table of where the time of a step goes, from a few steps under torch's profiler."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from vsa.checkpoints.tensor_state import optimizer_state
from vsa.data.batch import VideoBatch
from vsa.files import write_whole
from vsa.machine import seconds_now
from vsa.models.sharding import local
from vsa.settings import AtLeastOne, validated
from vsa.training.callbacks.ema import EMA
from vsa.training.lightning_compat import stop_without_validation, use_profiler
from vsa.training.modules.base import DiffusionModule
from vsa.training.step_flops import StepFlops
from vsa.training.step_times import AVERAGE, NORMS, OPERATOR, OPTIMIZER, StepTimes, step_times

WINDOW = "profiled steps"
_WAITED_FOR = 8
"""Rows of what the host did while the device waited for it; profile.json has all."""


class Regions(Profiler):
    """Lightning's hooks and loops as named regions of the trace."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[str, Any] = {}

    def start(self, action_name: str) -> None:
        self._open[action_name] = record_function(action_name)
        self._open[action_name].__enter__()

    def stop(self, action_name: str) -> None:
        if (region := self._open.pop(action_name, None)) is not None:
            region.__exit__(None, None, None)


@validated
class StepProfile(L.Callback):
    """Times `steps` plain steps, then traces `steps` more, prints where their time goes, and ends the run.

    It writes the table as `profile.json`, and `trace.json.gz` for chrome://tracing or ui.perfetto.dev. The table
    compares each time with its floor: FLOPs at the speed of a large matrix product, or bytes at the bandwidth of a
    large copy, both measured on the device afterwards. What activation checkpointing computes again is part of the
    floors of linear layers and of other attention, not of the operator's. The profiler itself takes host time, so the
    table has the time of a step with and without it. Where the device waits for the host, the table lists the calls and
    regions that took longest. With several ranks only rank 0 is traced.

    Args:
        run_dir: folder of the two files.
        steps: number of traced steps; fewer in a short run.
        warm_up: number of steps before the timed ones.
    """

    # after all other callbacks, whose work belongs to the step
    order = 3

    def __init__(self, run_dir: str, steps: AtLeastOne = 5, warm_up: AtLeastOne = 10):
        self.folder, self.steps, self.warm_up = Path(run_dir), steps, warm_up
        self._stack = ExitStack()
        # of the traced steps
        self._updates: Counter[Optimizer] = Counter()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        use_profiler(trainer, Regions())

    def on_train_start(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        self._first, remaining_steps = trainer.global_step, trainer.max_steps - trainer.global_step
        if trainer.max_steps >= 0:
            if remaining_steps < 3:
                raise ValueError(
                    f"a profile takes at least 3 steps, trainer.max_steps={trainer.max_steps} leaves {remaining_steps}"
                )
            self.steps = min(self.steps, (remaining_steps - 1) // 2)
            self.warm_up = min(self.warm_up, remaining_steps - 2 * self.steps)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: VideoBatch, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % pl_module.accumulate:
            return
        steps_after_warm_up = trainer.global_step - self._first - self.warm_up
        if steps_after_warm_up == 0:
            self._began = seconds_now(pl_module.device)
        elif steps_after_warm_up == self.steps:
            self._plain = (seconds_now(pl_module.device) - self._began) / self.steps * 1e3
            if trainer.is_global_zero:
                kinds = [ProfilerActivity.CPU]
                kinds += [ProfilerActivity.CUDA] if pl_module.device.type == "cuda" else []
                self._profile = self._stack.enter_context(profile(activities=kinds, record_shapes=True))
                self._stack.enter_context(record_function(WINDOW))
                for optimizer in trainer.optimizers:
                    self._stack.callback(optimizer.register_step_post_hook(self._count_update).remove)
        elif steps_after_warm_up == 2 * self.steps:
            seconds_now(pl_module.device)
            self._stack.close()
            if trainer.is_global_zero:
                self._report(trainer, pl_module, batch)
            stop_without_validation(trainer)

    def _count_update(self, optimizer: Optimizer, *call: Any) -> None:
        # a dropped update has no gradients
        self._updates[optimizer] += any(p.grad is not None for group in optimizer.param_groups for p in group["params"])

    def _moved_per_step(self, trainer: L.Trainer, module: DiffusionModule) -> dict[str, float]:
        """Bytes that the updates of this rank read and write in a traced step, by kind."""
        bytes_by_kind: dict[str, float] = dict.fromkeys((NORMS, OPTIMIZER, AVERAGE), 0.0)
        for optimizer, clipper in zip(trainer.optimizers, module.clippers.values(), strict=True):
            times = self._updates[optimizer] / self.steps
            bytes_by_kind[NORMS] += times * clip_bytes(optimizer, clipper.clip)
            bytes_by_kind[OPTIMIZER] += times * update_bytes(optimizer)
        average = next((c.average for c in trainer.callbacks if isinstance(c, EMA)), {})  # type: ignore[attr-defined]
        times = self._updates[module.raw_optimizer] / self.steps
        bytes_by_kind[AVERAGE] = times * average_bytes(average, module.model)
        return bytes_by_kind

    def _report(self, trainer: L.Trainer, module: Any, batch: VideoBatch) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "trace.json.gz"
        self._profile.export_chrome_trace(str(path))
        with gzip.open(path) as file:
            times = step_times(json.load(file)["traceEvents"], WINDOW, self.steps)
        device = module.device
        flops = StepFlops(module)(batch, module.global_step - 1)
        operator = flops.selected * len(batch.sample_ids) * module.accumulate
        speed, bandwidth = matrix_speed(device), copy_bandwidth(device)
        bytes_by_kind = {**times.bytes, **self._moved_per_step(trainer, module)}
        floors = {
            OPERATOR: operator / speed * 1e3,
            **{kind: total / speed * 1e3 for kind, total in times.flops.items()},
            **{kind: total / bandwidth * 1e3 for kind, total in bytes_by_kind.items()},
        }
        # none for what does not run, or has no sizes in the trace
        floors = {kind: floor for kind, floor in floors.items() if floor}
        name = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        )
        record = {
            "device": name,
            "torch": torch.__version__,
            "steps": self.steps,
            "milliseconds": self._plain,
            "profiled_milliseconds": times.total,
            "kinds": {
                kind: {"milliseconds": ms, "floor": floors.get(kind)}
                for kind, ms in times.milliseconds.items()
                if ms or kind in floors
            },
            "waited_for": {
                name: {"milliseconds": ms, "calls": calls} for name, (ms, calls) in times.waited_for.items()
            },
            "communication_hidden_milliseconds": times.hidden,
            "matrix_flops_per_second": speed,
            "copy_bytes_per_second": bandwidth,
        }
        write_whole(self.folder / "profile.json", json.dumps(record, indent=1))
        rank_zero_info(_table(times, floors, record))
        rank_zero_info(f"trace: {path}")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # the run may have failed while it was traced
        self._stack.close()


def update_bytes(optimizer: Optimizer) -> int:
    """Bytes that an update reads and writes: parameters and the optimizer's state both ways, and gradients.

    Counts the shards of this rank of all parameters that have been updated; a gradient has the dtype of its parameter.
    """
    return 3 * _size(optimizer.state) + 2 * _size(optimizer_state(optimizer).values())


def clip_bytes(optimizer: Optimizer, clip: float) -> int:
    """Bytes that a `GradientClipper` reads and writes: gradients for their norm and, if it clips, once more both ways.

    Args:
        optimizer: optimizer after an update.
        clip: largest global gradient norm; 0: no clipping.
    """
    return (3 if clip > 0 else 1) * _size(optimizer.state)


def average_bytes(average: Mapping[str, Tensor], model: nn.Module) -> int:
    """Bytes that an update of averaged weights reads and writes: averages both ways, and parameters.

    Args:
        average: averages of `EMA`, by parameter name.
        model: the network with these parameters.
    """
    return 2 * _size(average.values()) + _size(model.get_parameter(name) for name in average)


def _size(tensors: Iterable[Tensor]) -> int:
    """Bytes of the shards of this rank."""
    return sum(local(tensor).nbytes for tensor in tensors)


def _table(times: StepTimes, floors: dict[str, float], record: dict[str, Any]) -> str:
    table = Table(title=f"one step on {record['device']}, mean of {record['steps']}")
    table.add_column("part")
    for heading in ("ms", "share", "floor, ms"):
        table.add_column(heading, justify="right")
    for kind, ms in times.milliseconds.items():
        if ms or kind in floors:
            floor = f"{floors[kind]:.3g}" if kind in floors else ""
            table.add_row(kind, f"{ms:.3g}", f"{ms / times.total:.1%}", floor)
    if times.waited_for:
        table.add_section()
        table.add_row("the host's part, by the innermost call")
    for name, (ms, calls) in list(times.waited_for.items())[:_WAITED_FOR]:
        number = f", {calls:.3g} call{'' if calls == 1 else 's'}" if calls else ""
        table.add_row(f"  {escape(name)}{number}", f"{ms:.3g}", f"{ms / times.total:.1%}")
    table.add_section()
    table.add_row("the step, profiled", f"{times.total:.4g}")
    table.add_row("the step without the profiler", f"{record['milliseconds']:.4g}")
    if times.hidden:
        table.add_row("communication behind computation", f"{times.hidden:.3g}")
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
        console.print(
            f"floors: {record['matrix_flops_per_second'] / 1e12:.3g} TFLOP/s in a matrix product, "
            f"{record['copy_bytes_per_second'] / 1e9:.4g} GB/s in a copy, measured here"
        )
    return capture.get()


def matrix_speed(device: torch.device) -> float:
    """Measured FLOPs per second of a large matrix product, in bf16 on a GPU and fp32 on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b, device)


def copy_bandwidth(device: torch.device) -> float:
    """Measured bytes per second, read plus written, of a copy larger than any cache."""
    source = torch.empty((1 << 30) if device.type == "cuda" else (1 << 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source), device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of five calls, after one warm-up call."""
    call()
    times = []
    for _ in range(5):
        began = seconds_now(device)
        call()
        times.append(seconds_now(device) - began)
    return min(times)

"""Timing of ops, and the resulting rows of a report."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.profiler import profile, record_function

from vsa.models.recompute import Level
from vsa.training.step_times import DATA, HOST, IDLE, step_times

from .captured import Rankings

Strategy = Literal["plain", "fsdp"]
FORWARD, BACKWARD, BOTH = "forward", "backward", "forward + backward"
# time budget of one op and pass on a GPU without --repeats, and the fewest and the most timed calls
_BUDGET_MS, _FEWEST, _MOST = 300, 5, 200
_WARM_MS = 50
# the same for calls that take seconds, which have their own warm-up
_LONG_BUDGET_MS, _LONG_FEWEST, _LONG_MOST = 5_000, 2, 10
# larger than any L2 cache
_FLUSH_BYTES = 256 << 20
# some milliseconds, longer than the host needs to queue one call
_AHEAD_CYCLES = 8_000_000


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the command line.

    Args:
        backends: backends of vsa_kernels.
        peers: peers to compare with.
        lists: kind of block lists.
        rankings: source of captured and synthesised lists.
        device: compute device.
        dtype: dtype of the tokens.
        repeats: timed calls of each op and pass; None: 7 on a CPU, as many as fit into 0.3 s (5 to 200) on a GPU, or
            into 5 s (2 to 10) for calls with their own warm-up.
        ahead: `Op.ahead` of all ops.
        modes: modes of whole networks, `eager` and `compiled`.
        levels: levels of activation checkpointing in training steps, see `vsa.models.recompute`.
        strategies: strategies of training steps.
    """

    backends: list[str]
    peers: list[str]
    lists: str
    device: torch.device
    dtype: torch.dtype
    repeats: int | None
    ahead: bool = False
    modes: tuple[str, ...] = ("eager",)
    levels: tuple[Level, ...] = ("full",)
    strategies: tuple[Strategy, ...] = ("plain",)
    rankings: Rankings | None = None


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operation to time.

    Args:
        name: name in the report.
        call: the forward, which holds its inputs in its closure.
        inputs: tensors to differentiate with respect to.
        dout: gradient of the result of `call`, or of each of its results.
        head_dim: D.
        pairs: useful token pairs over batch and heads; 0: no TFLOP/s.
        executed: token pairs that are multiplied.
        products: matrix products of the backward per pair (5 are needed; a split backward recomputes 2).
        passes: passes to time.
        ahead: whether, on a GPU, the host queues a whole call before its time starts.
        against: names of baselines; the first one that was measured is used.
        warm_up: function that runs once instead of the usual warm-up, for calls that take seconds, which are then timed
            less often.
    """

    name: str
    call: Callable[[], Any]
    inputs: tuple[Tensor, ...] = ()
    dout: Tensor | tuple[Tensor, ...] | None = None
    head_dim: int = 0
    pairs: int = 0
    executed: int = 0
    products: int = 5
    passes: tuple[str, ...] = (FORWARD, BOTH)
    ahead: bool = False
    against: tuple[str, ...] = ("dense-cudnn", "dense-fa2", "dense")
    warm_up: Callable[[], Any] | None = None

    def step(self, kind: str) -> None:
        """Run one call of a pass; the first call of the backward alone runs the forward too."""
        if kind == BOTH:
            torch.autograd.grad(self.call(), self.inputs, self.dout, allow_unused=True)
        elif kind == BACKWARD and self.inputs:
            torch.autograd.grad(self.result, self.inputs, self.dout, retain_graph=True)
        else:
            with torch.no_grad():
                self.call()

    @cached_property
    def result(self) -> Any:
        """What `call` returns, kept for the backward alone."""
        return self.call()

    def flops(self, kind: str) -> tuple[int, int]:
        """Executed and useful floating-point operations of a pass."""
        forward, backward = (4 if kind != BACKWARD else 0), (1 if kind != FORWARD else 0)
        useful_factor, executed_factor = forward + 10 * backward, forward + 2 * self.products * backward
        return executed_factor * self.head_dim * self.executed, useful_factor * self.head_dim * self.pairs


Skipped = dict[str, str]
"""Why an op was not measured, by its name."""


class Measured(NamedTuple):
    """Rows of a report, the skipped ops with their reasons, and notes about the rows."""

    rows: list[dict[str, Any]]
    skipped: Skipped
    notes: tuple[str, ...] = ()


def attempt(ops: list[Op], skipped: Skipped, name: str, make: Callable[[], Op]) -> None:
    """Append the op of a peer after each of its passes has run, or record why it cannot run here."""
    try:
        op = make()
        for kind in op.passes:
            op.step(kind)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    # a peer may raise any exception, which must not end the measurement of the others
    except Exception as error:
        skipped[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        say(f"  {name} skipped: {skipped[name]}")
        return
    ops.append(op)


def must_notice(check: Callable[[], object], checked: str, fault: str) -> None:
    """Raise ValueError if a check passes on a damaged result; `checked` and `fault` name both in the message."""
    try:
        check()
    except (ValueError, AssertionError):
        return
    raise ValueError(f"the check of {checked} does not notice {fault}, no speed is printed")


def say(line: str) -> None:
    """Print a line of progress on stderr."""
    print(line, file=sys.stderr, flush=True)


def measure(ops: Sequence[Op], setup: Setup) -> list[dict[str, Any]]:
    """Rows of the ops, in order."""
    ops = [replace(op, ahead=op.ahead or setup.ahead) for op in ops]
    steps = [(op, kind) for op in ops for kind in op.passes]
    if setup.device.type == "cuda":
        flush = flush_buffer(setup.device)
        samples = [_cuda_samples(op, kind, setup.repeats, flush) for op, kind in steps]
    else:
        samples = _cpu_samples(steps, setup.repeats or 7)
    rows = [_row(op, kind, *sample) for (op, kind), sample in zip(steps, samples, strict=True)]
    by_step = {(row["op"], row["pass"]): row for row in rows}
    for (op, kind), row in zip(steps, rows, strict=True):
        against(row, next((by_step[name, kind] for name in op.against if (name, kind) in by_step), None))
    return rows


Samples = tuple[list[float], int | None]
"""Milliseconds of each call, and the bytes one call allocates at its peak."""


def _cuda_samples(op: Op, kind: str, repeats: int | None, flush: Tensor) -> Samples:
    """Time calls that are queued one after the other, each with cold caches."""
    step = partial(op.step, kind)
    (op.warm_up or step)()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if op.warm_up is not None:
        times = gpu_times(step, 1, flush, op.ahead)
        peak = torch.cuda.max_memory_allocated() - before
        count = repeats or min(_LONG_MOST, max(_LONG_FEWEST, int(_LONG_BUDGET_MS / times[0])))
        times += gpu_times(step, count - 1, flush, op.ahead)
    else:
        step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        (estimate,) = gpu_times(step, 1, flush, op.ahead)
        for _ in range(min(20, int(_WARM_MS / estimate) + 1)):
            step()
        count = repeats or min(_MOST, max(_FEWEST, int(_BUDGET_MS / estimate)))
        times = gpu_times(step, count, flush, op.ahead)
    say(f"  {op.name}, {kind}: {statistics.median(times):.3f} ms")
    return times, peak


def flush_buffer(device: torch.device) -> Tensor:
    """Buffer that `gpu_times` overwrites to clear the L2 cache."""
    return torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device=device)


def gpu_times(step: Callable[[], object], count: int, flush: Tensor, ahead: bool) -> list[float]:
    """Milliseconds of each of `count` calls on the GPU.

    Args:
        step: the call.
        count: number of calls.
        flush: see `flush_buffer`.
        ahead: whether the GPU waits until the whole call is queued, so that the launch time of the host does not count.
    """
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in events:
        flush.zero_()
        if ahead:
            torch.cuda._sleep(_AHEAD_CYCLES)
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def added(name: str, parts: Sequence[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    """The row of an op that consists of others: the weighted sum of their times."""
    row = {key: value for key, value in parts[0][1].items() if key not in ("gpu_ms", "baseline", "speedup")}
    row |= {key: round(sum(w * part[key] for w, part in parts), 4) for key in row if key.endswith("_ms")}
    row |= {"op": name, "repeats": min(part["repeats"] for _, part in parts), "peak_extra_mib": None}
    return row | {"executed_tflops": None, "useful_tflops": None, "summed": True}


def against(row: dict[str, Any], baseline: dict[str, Any] | None) -> None:
    """Add to `row` its speed-up over `baseline`, None without a baseline."""
    row |= {"baseline": None, "speedup": None}
    if baseline is not None:
        row |= {"baseline": baseline["op"], "speedup": round(baseline["median_ms"] / row["median_ms"], 3)}


def breakdown(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of GPU time of one call by kind, as in the profile of a training step."""
    with profile() as profiled, record_function("call"):
        call()
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    times = step_times(trace, "call", steps=1).milliseconds
    return {kind: round(ms, 2) for kind, ms in times.items() if ms and kind not in (DATA, HOST, IDLE)}


def _cpu_samples(steps: Sequence[tuple[Op, str]], repeats: int) -> list[Samples]:
    """Time the ops in turns, so that load on the machine affects all of them equally."""
    times: list[list[float]] = [[] for _ in steps]
    # the first two turns warm up caches and the allocator
    for turn in range(-2, repeats):
        for (op, kind), op_times in zip(steps, times, strict=True):
            if turn < 0 and op.warm_up is not None:
                op.warm_up()
                continue
            begin = time.perf_counter()
            op.step(kind)
            if turn >= 0:
                op_times.append((time.perf_counter() - begin) * 1e3)
    return [(op_times, None) for op_times in times]


def _row(op: Op, kind: str, times: list[float], peak: int | None) -> dict[str, Any]:
    median = statistics.median(times)
    row: dict[str, Any] = {"op": op.name, "pass": kind, "median_ms": round(median, 4)}
    row |= {"min_ms": round(min(times), 4), "max_ms": round(max(times), 4), "repeats": len(times)}
    # peak memory is known only on a GPU
    if peak is not None:
        low, high = torch.tensor(times).quantile(torch.tensor([0.2, 0.8])).tolist()
        row |= {"p20_ms": round(low, 4), "p80_ms": round(high, 4), "ahead": op.ahead}
    executed, useful = (round(flops / median / 1e9, 4) if flops else None for flops in op.flops(kind))
    row |= {"executed_tflops": executed, "useful_tflops": useful}
    row["peak_extra_mib"] = None if peak is None else round(peak / 2**20, 1)
    return row

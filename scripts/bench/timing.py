"""Timing one op after the other, and the rows of a report that come of it."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward + backward"
# of timed calls of one op and pass on a GPU, unless --repeats says how many; and the fewest and the most of them
_BUDGET_MS, _FEWEST, _MOST = 300, 5, 200
_WARM_MS = 50
# larger than any L2 cache
_FLUSH_BYTES = 256 << 20
# some milliseconds: more than the host needs to queue one call
_AHEAD_CYCLES = 8_000_000


@dataclass(frozen=True, kw_only=True)
class Op:
    """Something to time.

    Args:
        name: in the report.
        call: the forward; inputs come from its closure.
        inputs: tensors to differentiate by.
        dout: gradient of the result of `call`.
        head_dim: D.
        pairs: token pairs that count, over batch and heads; 0: no TFLOP/s.
        executed: token pairs that are multiplied.
        products: matrix products of the backward per pair (5 are needed; a split backward recomputes 2).
        passes: what can be timed.
        ahead: on a GPU, let the host queue a whole call before its time starts.
        against: ops whose time this one's is compared with, the first that was measured.
    """

    name: str
    call: Callable[[], Any]
    inputs: tuple[Tensor, ...] = ()
    dout: Tensor | None = None
    head_dim: int = 0
    pairs: int = 0
    executed: int = 0
    products: int = 5
    passes: tuple[str, ...] = (FORWARD, BOTH)
    ahead: bool = False
    against: tuple[str, ...] = ("dense-cudnn", "dense-fa2", "dense")

    def step(self, kind: str) -> None:
        """One call of a pass."""
        if kind == BOTH:
            torch.autograd.grad(self.call(), self.inputs, self.dout, allow_unused=True)
        else:
            with torch.no_grad():
                self.call()

    def flops(self, kind: str) -> tuple[int, int]:
        """Executed and useful floating-point operations of a pass."""
        needed, done = (14, 4 + 2 * self.products) if kind == BOTH else (4, 4)
        return done * self.head_dim * self.executed, needed * self.head_dim * self.pairs


Skipped = dict[str, str]
"""Why an op was not measured, by its name."""


def attempt(ops: list[Op], skipped: Skipped, name: str, make: Callable[[], Op]) -> None:
    """Append a peer's op once each of its passes has run, or note why it cannot run here."""
    try:
        op = make()
        for kind in op.passes:
            op.step(kind)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    # whatever a peer refuses with: it is its own business, our measurement goes on
    except Exception as error:
        skipped[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        say(f"  {name} skipped: {skipped[name]}")
        return
    ops.append(op)


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def measure(ops: Sequence[Op], device: torch.device, repeats: int | None, ahead: bool = False) -> list[dict[str, Any]]:
    """Rows of the ops, in order.

    Args:
        ops: what to time.
        device: where they run.
        repeats: timed calls of each op and pass; None: 7 on a CPU, as many as take 0.3 s (5 to 200) on a GPU.
        ahead: see `Op`, for all ops.
    """
    ops = [replace(op, ahead=op.ahead or ahead) for op in ops]
    steps = [(op, kind) for op in ops for kind in op.passes]
    if device.type == "cuda":
        flush = flush_buffer(device)
        samples = [_cuda_samples(op, kind, repeats, flush) for op, kind in steps]
    else:
        samples = _cpu_samples(steps, repeats or 7)
    rows = [_row(op, kind, times, peak, device) for (op, kind), (times, peak) in zip(steps, samples, strict=True)]
    medians = {(row["op"], row["pass"]): row["median_ms"] for row in rows}
    for (op, kind), row in zip(steps, rows, strict=True):
        row["baseline"] = next((name for name in op.against if (name, kind) in medians), None)
        row["speedup"] = None
        if row["baseline"] is not None:
            row["speedup"] = round(medians[row["baseline"], kind] / row["median_ms"], 3)
    return rows


Samples = tuple[list[float], int | None]
"""Milliseconds of each call, and the bytes one call allocates at its peak."""


def _cuda_samples(op: Op, kind: str, repeats: int | None, flush: Tensor) -> Samples:
    """Calls queued one after the other, each with cold caches."""
    step = partial(op.step, kind)
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
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
    """What `gpu_times` overwrites to empty the L2 cache."""
    return torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device=device)


def gpu_times(step: Callable[[], object], count: int, flush: Tensor, ahead: bool) -> list[float]:
    """Milliseconds of each of `count` calls on the GPU.

    Args:
        step: the call.
        count: of calls.
        flush: see `flush_buffer`.
        ahead: the GPU waits until a call is queued whole: launches that take the host longer than the GPU do not count.
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


def _cpu_samples(steps: Sequence[tuple[Op, str]], repeats: int) -> list[Samples]:
    """Calls taken in turns, so that a busy machine slows all ops alike."""
    times: list[list[float]] = [[] for _ in steps]
    # the first turns warm caches and the allocator up
    for turn in range(-2, repeats):
        for (op, kind), taken in zip(steps, times, strict=True):
            begin = time.perf_counter()
            op.step(kind)
            if turn >= 0:
                taken.append((time.perf_counter() - begin) * 1e3)
    return [(taken, None) for taken in times]


def _row(op: Op, kind: str, times: list[float], peak: int | None, device: torch.device) -> dict[str, Any]:
    median = statistics.median(times)
    row: dict[str, Any] = {
        "op": op.name,
        "pass": kind,
        "median_ms": round(median, 4),
        "min_ms": round(min(times), 4),
        "max_ms": round(max(times), 4),
        "repeats": len(times),
    }
    if device.type == "cuda":
        low, high = torch.tensor(times).quantile(torch.tensor([0.2, 0.8])).tolist()
        row |= {"p20_ms": round(low, 4), "p80_ms": round(high, 4), "ahead": op.ahead}
    executed, useful = (round(flops / median / 1e9, 4) if flops else None for flops in op.flops(kind))
    row |= {"executed_tflops": executed, "useful_tflops": useful}
    row["peak_extra_mib"] = None if peak is None else round(peak / 2**20, 1)
    return row

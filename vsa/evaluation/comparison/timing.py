"""Timing of calls in alternation, so that the load and the temperature of the machine affect all of them equally."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

LONG_SECONDS = 2.0
"""Seconds; a call whose first run takes longer is timed by a single further run."""
# larger than any L2 cache
_FLUSH_BYTES = 256 << 20


def interleaved_ms(calls: Sequence[Callable[[], Any]], repeats: int, device: torch.device) -> list[list[float]]:
    """Milliseconds of each run of each call: by events with cold caches on a GPU, by wall clock on a CPU.

    Args:
        calls: calls to time, one after the other in every round, after one warm-up run each.
        repeats: number of rounds.
        device: device of the calls.
    """
    cuda = device.type == "cuda"
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device) if cuda else None
    first = []
    for call in calls:
        begin = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize(device)
        first.append(time.perf_counter() - begin)
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats):
        for call, seconds, call_times in zip(calls, first, times, strict=True):
            if turn and seconds > LONG_SECONDS:
                continue
            call_times.append(_cpu_ms(call) if flush is None else _gpu_ms(call, flush))
    return times


def _cpu_ms(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def _gpu_ms(call: Callable[[], Any], flush: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def fast_dense(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which dense attention uses cuDNN on a GPU, or the fastest available kernel."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True) if device.type == "cuda" else nullcontext()

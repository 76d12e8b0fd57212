"""Time of a training step by part, from a trace of torch's profiler.

A trace is the list of events in Chrome's format: operators and regions of each host thread, launches, and, on a GPU,
kernels and copies, matched to their launch by a correlation id. Times in the trace are microseconds.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from vsa_kernels.operators import elementwise_ops

OPERATOR, ATTENTION, LINEAR = "sparse attention operator", "other attention", "linear layers"
ELEMENTWISE, COPIES = "elementwise and norms", "copies and casts"
NORMS, OPTIMIZER, AVERAGE = "gradient norms", "optimizer", "averaged weights"
COMMUNICATION, DATA = "communication, exposed", "waiting for data"
HOST, IDLE = "host: launches and Python", "idle: host and device wait"
REGIONS = {
    # forward and backward, whose kernels have kinds of their own
    ".training_step": None,
    ".backward": None,
    "]EMA": AVERAGE,
    ".on_before_optimizer_step": NORMS,
    "GradientClipper": NORMS,
    "Optimizer.step#": OPTIMIZER,
    "[Callback]": "logging and callbacks",
    ".batch_to_device": "data to the device",
    ".transfer_batch_to_device": "data to the device",
}
"""Kinds of time that correspond to a host region, by a part of its name; the innermost region applies."""
FETCH = ".train_dataloader_next"
KINDS: tuple[str, ...] = (
    OPERATOR, ATTENTION, LINEAR, ELEMENTWISE, COPIES, *dict.fromkeys(filter(None, REGIONS.values())),
    COMMUNICATION, DATA, HOST, IDLE,
)  # fmt: skip

_LINEAR = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution"}
_SDPA = "aten::_scaled_dot_product_"
_ATTENTION = ("scaled_dot_product", "flash_attention", "flex_attention", "efficient_attention")
_COPIES = ("copy", "aten::cat", "aten::clone", "aten::contiguous", "memcpy", "memset", "fsdp::", "chunk_cat")
_COMPILED = re.compile(r"triton_[a-z]+_fused_(.*)_\d+")
_MOVES = re.compile(
    "_(to_copy|copy|unsafe_view|view|as_strided|reshape|clone|transpose|permute|unsqueeze|squeeze|expand|t|"
    "select_backward|select|slice_backward|slice|split_with_sizes|split|unbind|cat|stack|detach)(?=_|$)"
)
_ON_GPU, _LAUNCHES = {"kernel", "gpu_memcpy", "gpu_memset"}, {"cuda_runtime", "cuda_driver"}
_OURS = "vsa_kernels::"
# the kind of object in the name of a hook: [Strategy]SingleDeviceStrategy.backward
_OWNER = re.compile(r"^\[\w+\]\.?")
# the hash in the name of a compiled graph
_GRAPH = re.compile(r"(?<=CompiledFxGraph) \w+| ?## ?")
_BYTES = {
    "float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "int": 4, "long int": 8, "bool": 1, "unsigned char": 1,
}  # fmt: skip

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Mean times of one step in a trace.

    Args:
        milliseconds: time of each kind of `KINDS`; their sum is the time of the step.
        hidden: milliseconds of communication concurrent with computation.
        flops: FLOPs of linear layers, and of dense attention outside of the sparse operator, from the sizes of their
            arguments.
        bytes: bytes that elementwise operators and copies read and write, from the sizes of their arguments.
        waited_for: what the time `HOST` went to if the trace has kernels, from the longest: milliseconds of each call
            without the calls inside it, and its number.
    """

    milliseconds: Mapping[str, float]
    hidden: float
    flops: Mapping[str, float]
    bytes: Mapping[str, float]
    waited_for: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Milliseconds of the step."""
        return sum(self.milliseconds.values())


@dataclass(kw_only=True)
class _Call:
    """A host event with its caller."""

    name: str
    start: float
    stop: float
    arguments: Mapping[str, Any]
    is_operator: bool
    is_launch: bool
    parent: _Call | None
    inner: float = field(default=0.0)
    calls_operators: bool = field(default=False)

    def names(self) -> Iterable[str]:
        """Names from the innermost call outwards."""
        call: _Call | None = self
        while call is not None:
            yield call.name
            call = call.parent


def step_times(trace: Sequence[Mapping[str, Any]], window: str, steps: int) -> StepTimes:
    """Time of each kind per step, within the region `window` of a trace.

    If the trace has kernels, times are device times, and while the device is idle, times of the host; otherwise they
    are times of the thread that contains the window. Idle is the time in which that thread waits for a device without
    work; where Python itself sleeps, the trace does not show it, and the time counts for the host.

    Args:
        trace: list of events.
        window: name of a region that contains the steps completely.
        steps: number of steps in the region.

    Raises:
        ValueError: the region is missing.
    """
    regions = [e for e in trace if e.get("ph") == "X" and e.get("name") == window and e.get("cat") == "user_annotation"]
    if not regions:
        raise ValueError(f"the trace has no region {window!r}")
    start, thread = float(regions[0]["ts"]), regions[0]["tid"]
    stop = start + float(regions[0]["dur"])
    calls, launched = _calls(trace, window)
    own = [c for c in calls.get(thread, []) if start <= c.start < stop]
    kernels = [e for e in trace if e.get("ph") == "X" and e.get("cat") in _ON_GPU and start <= float(e["ts"]) < stop]
    if kernels:
        spent, hidden, waits = _device_times(kernels, launched, own, (start, stop))
        others = [of for key, of in calls.items() if key != thread and any(c.is_operator for c in of)]
        waited_for = _waited_for(waits, own, others)
    else:
        spent, hidden, waited_for = _host_times(own, stop - start), 0.0, {}
    inside = [c for of_thread in calls.values() for c in of_thread if start <= c.start < stop and c.is_operator]
    flops, bytes_by_kind = {LINEAR: 0.0, ATTENTION: 0.0}, {ELEMENTWISE: 0.0, COPIES: 0.0}
    for call in inside:
        kind = _kind(call.name, call)
        if kind in flops:
            flops[kind] += _product_flops(call) if kind == LINEAR else _attention_flops(call)
        # norm and rotation allocate their results by operators that move nothing
        elif kind in bytes_by_kind and (not call.calls_operators or call.name.startswith(_OURS)):
            bytes_by_kind[kind] += _bytes(call)
    return StepTimes(
        milliseconds={kind: us / 1e3 / steps for kind, us in spent.items()},
        hidden=hidden / 1e3 / steps,
        flops={kind: total / steps for kind, total in flops.items()},
        bytes={kind: total / steps for kind, total in bytes_by_kind.items()},
        waited_for={name: (us / 1e3 / steps, number / steps) for name, (us, number) in waited_for.items()},
    )


def _calls(trace: Sequence[Mapping[str, Any]], window: str) -> tuple[dict[Any, list[_Call]], dict[Any, _Call]]:
    """Calls of every thread in order of their start, and the launch of every correlation id."""
    events = [
        e
        for e in trace
        if e.get("ph") == "X" and e.get("cat") in {"cpu_op", "user_annotation", *_LAUNCHES} and e["name"] != window
    ]
    events.sort(key=lambda e: (str(e["tid"]), float(e["ts"]), -float(e["dur"])))
    calls: dict[Any, list[_Call]] = {}
    launched: dict[Any, _Call] = {}
    stack: list[_Call] = []
    thread = None
    for event in events:
        if event["tid"] != thread:
            thread, stack = event["tid"], []
        start = float(event["ts"])
        while stack and stack[-1].stop <= start:
            stack.pop()
        call = _Call(
            name=event["name"],
            start=start,
            stop=start + float(event["dur"]),
            arguments=event.get("args", {}),
            is_operator=event["cat"] == "cpu_op",
            is_launch=event["cat"] in _LAUNCHES,
            parent=stack[-1] if stack else None,
        )
        if call.is_launch:
            launched[call.arguments.get("correlation")] = call
        if call.parent is not None:
            call.parent.inner += call.stop - call.start
            call.parent.calls_operators |= call.is_operator
        stack.append(call)
        calls.setdefault(thread, []).append(call)
    return calls, launched


def _kind(name: str, call: _Call | None) -> str:
    """Kind of a kernel or an operator, by its name and its callers."""
    names = [] if call is None else list(call.names())
    if "nccl" in name.lower():
        return COMMUNICATION
    elementwise = tuple(_OURS + op for op in elementwise_ops())
    if any(n.startswith(_OURS) and not n.startswith(elementwise) for n in names):
        return OPERATOR
    if any(part in n for n in names for part in _ATTENTION):
        return ATTENTION
    for n in names:
        # the innermost region with an assigned kind
        part = next((part for part in REGIONS if part in n), None)
        if part is not None:
            if (region := REGIONS[part]) is not None:
                return region
            break
    if any(n in _LINEAR for n in names):
        return LINEAR
    return COPIES if any(only_moves(n.lower()) for n in (name, *names[:2])) else ELEMENTWISE


def only_moves(name: str) -> bool:
    """Whether a kernel or an operator, by its name in lower case, only moves data or changes its dtype."""
    if (compiled := _COMPILED.fullmatch(name)) is not None:
        # named after all operators that were fused into it
        return not _MOVES.sub("", f"_{compiled[1]}").strip("_")
    return any(part in name for part in _COPIES)


def _device_times(
    kernels: Sequence[Mapping[str, Any]], launched: Mapping[Any, _Call], own: Sequence[_Call], window: Interval
) -> tuple[dict[str, float], float, Sequence[Interval]]:
    """Microseconds of each kind, and of communication concurrent with computation, and when the host was waited for."""
    spent = dict.fromkeys(KINDS, 0.0)
    computing: list[Interval] = []
    moving: list[Interval] = []
    reached = window[0]
    for event in sorted(kernels, key=lambda e: float(e["ts"])):
        start = float(event["ts"])
        stop = min(start + float(event["dur"]), window[1])
        kind = _kind(event["name"], launched.get(event.get("args", {}).get("correlation")))
        if kind == COMMUNICATION:
            moving.append((start, stop))
            continue
        computing.append((start, stop))
        # where kernels on several streams overlap, the time counts for the first one
        spent[kind] += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    busy, either = merged(computing), merged([*computing, *moving])
    spent[COMMUNICATION] = _length(either) - _length(busy)
    idle = _without((window,), either)
    fetching = merged([(c.start, c.stop) for c in own if c.name.endswith(FETCH)])
    rest = _without(idle, fetching)
    spent[DATA] = _length(idle) - _length(rest)
    waiting = merged([(c.start, c.stop) for c in own if c.name.endswith("Synchronize")])
    waits = _without(rest, waiting)
    spent[HOST] = _length(waits)
    spent[IDLE] = _length(rest) - spent[HOST]
    return spent, _length(merged(moving)) - spent[COMMUNICATION], waits


def _waited_for(
    waits: Sequence[Interval], own: Sequence[_Call], others: Sequence[Sequence[_Call]]
) -> dict[str, tuple[float, float]]:
    """Microseconds of `waits` by the innermost call, and number of these calls."""
    spent: dict[str, float] = defaultdict(float)
    seen: dict[str, set[int]] = defaultdict(set)
    rest = waits
    # while a thread of the backward works, the step's own waits for it
    for calls in (*others, own):
        before = _length_before(rest)
        for start, stop, call in _innermost(calls):
            if (us := before(stop) - before(start)) > 0:
                spent[_title(call)] += us
                seen[_title(call)].add(id(call))
        rest = _without(rest, merged((call.start, call.stop) for call in calls))
    if rest:
        spent["Python elsewhere"] = _length(rest)
    return {name: (us, len(seen[name])) for name, us in sorted(spent.items(), key=lambda item: -item[1])}


def _title(call: _Call) -> str:
    """What a call is listed as: an operator or a launch by its name, a region as the Python in it."""
    name = _GRAPH.sub("", call.name)
    return name if call.is_operator or call.is_launch else f"Python in {_OWNER.sub('', name)}"


def _innermost(calls: Sequence[_Call]) -> Iterator[tuple[float, float, _Call]]:
    """Disjoint parts of the time of a thread's calls, each with the innermost call."""
    stack: list[_Call] = []
    at = -math.inf
    for call in [*calls, None]:
        reached = math.inf if call is None else call.start
        while stack and stack[-1].stop <= reached:
            done = stack.pop()
            yield at, max(at, done.stop), done
            at = max(at, done.stop)
        if call is not None:
            if stack:
                yield at, reached, stack[-1]
            at = reached
            stack.append(call)


def _length_before(intervals: Sequence[Interval]) -> Callable[[float], float]:
    """The length of ascending, disjoint intervals up to a time."""
    starts = [a for a, _ in intervals]
    sums = [0.0, *accumulate(b - a for a, b in intervals)]

    def before(time: float) -> float:
        i = bisect_right(starts, time)
        return sums[i] - max(0.0, intervals[i - 1][1] - time) if i else 0.0

    return before


def _host_times(own: Sequence[_Call], total: float) -> dict[str, float]:
    """Microseconds of each kind, of calls without the calls inside them."""
    spent = dict.fromkeys(KINDS, 0.0)
    for call in own:
        alone = call.stop - call.start - call.inner
        if call.is_operator:
            spent[_kind(call.name, call)] += alone
        elif call.name.endswith(FETCH):
            spent[DATA] += alone
    spent[HOST] = total - sum(spent.values())
    return spent


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, ascending and disjoint."""
    result: list[Interval] = []
    for start, stop in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], stop))
        else:
            result.append((start, stop))
    return result


def _without(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """The parts of ascending intervals outside the ascending holes."""
    result = []
    stops = [stop for _, stop in holes]
    for start, stop in intervals:
        at = start
        for a, b in holes[bisect_left(stops, start) :]:
            if a >= stop:
                break
            if a > at:
                result.append((at, a))
            at = max(at, b)
        if at < stop:
            result.append((at, stop))
    return result


def _length(intervals: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)


def _product_flops(call: _Call) -> float:
    """FLOPs of a matrix product; a multiply-add counts as two."""
    # the factors come after the term that is added and before the result of a compiled call
    first = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}.get(call.name)
    factors = () if first is None else call.arguments.get("Input Dims", ())[first : first + 2]
    if len(factors) < 2:
        return 0.0
    (*outer, rows, inner), (*_, columns) = factors
    return 2.0 * rows * inner * columns * (outer[0] if outer else 1)


def _attention_flops(call: _Call) -> float:
    """FLOPs of dense attention: two products of queries and keys forward, five backward."""
    backward = call.name.endswith("_backward")
    # the backward has the gradient of the result before them
    factors = call.arguments.get("Input Dims", ())[backward : backward + 2]
    if not call.name.startswith(_SDPA) or len(factors) < 2:
        return 0.0
    (*outer, queries, channels), (*_, keys, _) = factors
    return (5 if backward else 2) * 2.0 * math.prod(outer) * queries * keys * channels


def _bytes(call: _Call) -> float:
    """Bytes of the arguments of an operator, plus a result of the size of the largest argument."""
    sizes = []
    for dims, kind in zip(call.arguments.get("Input Dims", ()), call.arguments.get("Input type", ()), strict=False):
        size = _BYTES.get(kind, 0)
        if not size or any(isinstance(n, list) for n in dims):
            continue
        for n in dims:
            size *= n
        sizes.append(size)
    # compiled kernels have their results among their arguments
    return sum(sizes) + (0 if call.name.startswith("triton_") else max(sizes, default=0))

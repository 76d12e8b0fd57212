"""Traces whose times are known by construction, and one of torch's own."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile, record_function

from vsa.training.step_times import (
    ATTENTION,
    COMMUNICATION,
    COPIES,
    DATA,
    ELEMENTWISE,
    HOST,
    IDLE,
    LINEAR,
    NORMS,
    OPERATOR,
    merged,
    step_times,
)

MM = {"Input Dims": [[8, 4], [4, 16]], "Input type": ["float", "float"]}
# 2 x 3 heads of 4 channels, 20 queries and 6 keys
QKV = [[2, 3, 20, 4], [2, 3, 6, 4], [2, 3, 6, 4]]
ADD = {"Input Dims": [[8, 16], [8, 16], []], "Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"]}


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def launch(op, ts, correlation, tid=1, **args):
    """An operator of 4 us with its launch inside."""
    inside = event("cuda_runtime", "cudaLaunchKernel", ts + 1, 2, tid, correlation=correlation)
    return [event("cpu_op", op, ts, 4, tid, **args), inside]


def kernel(name, ts, dur, correlation, stream=7, cat="kernel"):
    return event(cat, name, ts, dur, stream, correlation=correlation)


WINDOW = [event("user_annotation", "window", 0, 1000)]


def gpu_trace():
    """1000 us of two steps: host at 0 to 300, the device from 100 on."""
    strategy, module = "[Strategy]S.training_step", "[LightningModule]M.on_before_optimizer_step"
    return [
        *WINDOW,
        event("user_annotation", "[_TrainingEpochLoop].train_dataloader_next", 0, 60),
        # lightning calls everything from the optimizer
        event("user_annotation", "Optimizer.step#AdamW.step", 60, 200),
        event("user_annotation", strategy, 61, 60),
        event("cpu_op", "vsa_kernels::coarse_fine_fwd", 62, 10),
        *launch("aten::copy_", 63, 1),
        *launch("aten::_scaled_dot_product_cudnn_attention", 75, 2, **{"Input Dims": QKV}),
        *launch("aten::mm", 80, 3, **MM),
        *launch("aten::add", 90, 4, **ADD),
        *launch("aten::copy_", 100, 5, **ADD),
        # operators of ours, but elementwise
        *launch("vsa_kernels::norm_rope_fwd", 105, 10, **ADD),
        *launch("vsa_kernels::bias_gelu_fwd", 107, 12, **ADD),
        *launch("vsa_kernels::residual_norm_bwd", 108, 13, tid=2, **ADD),
        event("cpu_op", "aten::empty", 105, 1),
        event("user_annotation", module, 125, 20),
        *launch("aten::linalg_vector_norm", 126, 6),
        event("cuda_runtime", "cudaStreamSynchronize", 132, 10),
        *launch("aten::_fused_adamw_", 150, 7),
        # the backward is of another thread
        *launch("aten::mm", 110, 8, tid=2, **MM),
        *launch("aten::_scaled_dot_product_cudnn_attention_backward", 115, 11, tid=2, **{"Input Dims": [QKV[0], *QKV]}),
        # the device has work until 660, the thread itself from 680 on; the other thread is not the step's
        event("cuda_runtime", "cudaStreamSynchronize", 600, 80),
        event("cuda_runtime", "cudaEventSynchronize", 850, 50, tid=2),
        # before and behind the window
        *launch("aten::mm", -20, 20, **MM),
        kernel("gemm", -10, 5, 20),
        kernel("warm_up", 100, 50, 1),
        kernel("cudnn_sdpa", 150, 100, 2),
        kernel("nvjet", 250, 100, 3),
        kernel("vectorized", 350, 30, 4),
        kernel("Memcpy DtoD", 380, 20, 5, cat="gpu_memcpy"),
        kernel("norm", 400, 10, 6),
        kernel("multi_tensor", 410, 90, 7),
        kernel("nvjet", 500, 100, 8),
        # 40 us behind the last product, 60 us alone
        kernel("ncclDevKernel_AllGather", 560, 100, 9, stream=20),
        # on two streams at once
        kernel("elementwise", 700, 50, 4),
        kernel("elementwise", 720, 50, 4, stream=8),
        kernel("_norm_rope_kernel", 770, 30, 10),
        kernel("cudnn_sdpa_bprop", 800, 20, 11),
        kernel("_bias_gelu_kernel", 820, 20, 12),
        kernel("_residual_norm_grad_kernel", 840, 10, 13),
    ]


def test_every_microsecond_of_a_device_has_one_kind():
    times = step_times(gpu_trace(), "window", 2)
    microseconds = {kind: 2e3 * ms for kind, ms in times.milliseconds.items() if ms}
    assert microseconds == pytest.approx(
        {
            OPERATOR: 50,
            ATTENTION: 100 + 20,
            LINEAR: 200,
            ELEMENTWISE: 30 + 70 + 30 + 20 + 10,
            COPIES: 20,
            NORMS: 10,
            "optimizer": 90,
            COMMUNICATION: 60,
            DATA: 60,
            # 60 to 100, 680 to 700, 850 to 1000
            HOST: 40 + 20 + 150,
            IDLE: 20,
        }
    )
    assert times.total == pytest.approx(0.5)
    assert 2e3 * times.hidden == pytest.approx(40)
    assert times.flops == {LINEAR: 2 * 2 * 8 * 4 * 16 / 2, ATTENTION: 14 * 2 * 3 * 20 * 6 * 4 / 2}
    assert times.bytes == {ELEMENTWISE: 4 * 3 * 8 * 16 * 2 / 2, COPIES: 3 * 8 * 16 * 2 / 2}


def test_what_a_device_waits_for_is_told_by_the_innermost_call():
    waited_for = step_times(gpu_trace(), "window", 2).waited_for
    assert {name: (2e3 * ms, 2 * calls) for name, (ms, calls) in waited_for.items()} == {
        # 680 to 700 and 900 to 1000
        "Python elsewhere": (pytest.approx(120), 0),
        # of the backward's thread
        "cudaEventSynchronize": (pytest.approx(50), 1),
        "Python in S.training_step": (pytest.approx(17), 1),
        "cudaLaunchKernel": (pytest.approx(8), 4),
        "vsa_kernels::coarse_fine_fwd": (pytest.approx(6), 1),
        "aten::copy_": (pytest.approx(2), 1),
        "aten::_scaled_dot_product_cudnn_attention": (pytest.approx(2), 1),
        "aten::mm": (pytest.approx(2), 1),
        "aten::add": (pytest.approx(2), 1),
        "Python in Optimizer.step#AdamW.step": (pytest.approx(1), 1),
    }
    assert list(waited_for) == sorted(waited_for, key=lambda name: -waited_for[name][0])


def test_graphs_are_told_without_their_hash_and_the_backward_before_the_thread_that_waits_for_it():
    def graph(name, ts, tid):
        return event("cpu_op", f"## Call CompiledFxGraph {name} ##", ts, 100, tid)

    trace = [
        *WINDOW,
        event("user_annotation", "[X]M.backward[0]", 100, 600),
        graph("fab1", 150, 2),
        graph("fzz2", 300, 2),
    ]
    trace += [*launch("aten::mm", 0, 1), kernel("gemm", 20, 80, 1)]
    # a thread without operators launches no kernel: the one that locks memory for the loader
    trace += [event("cuda_runtime", "cudaHostAlloc", 400, 500, 3)]
    waited_for = step_times(trace, "window", 1).waited_for
    assert waited_for == {
        # 100 to 700, without the two graphs
        "Python in M.backward[0]": (pytest.approx(0.4), 1),
        # 4 to 20 and 700 to 1000
        "Python elsewhere": (pytest.approx(0.316), 0),
        "Call CompiledFxGraph": (pytest.approx(0.2), 2),
        "aten::mm": (pytest.approx(0.002), 1),
        "cudaLaunchKernel": (pytest.approx(0.002), 1),
    }


def test_a_call_counts_where_its_own_time_is_waited_for():
    inner = [event("cpu_op", "aten::linear", 210, 80), event("cuda_runtime", "cudaLaunchKernel", 220, 60)]
    trace = [*WINDOW, event("cpu_op", "aten::linear", 200, 100), *inner, *launch("aten::mm", -20, 1)]
    # the device waits from 230 to 250, inside the launch, and from 292 to 1000
    trace += [kernel("gemm", 0, 230, 1), kernel("gemm", 250, 42, 1)]
    waited_for = step_times(trace, "window", 1).waited_for
    assert waited_for == {
        "Python elsewhere": (pytest.approx(0.7), 0),
        "cudaLaunchKernel": (pytest.approx(0.02), 1),
        "aten::linear": (pytest.approx(0.008), 1),
    }


@given(st.data())
def test_calls_that_a_device_waits_for_add_up_to_the_time_of_the_host(data):
    """Nested calls at random on three threads, kernels at random beside them."""
    moments = sorted(data.draw(st.lists(st.integers(0, 999), min_size=2, max_size=30, unique=True)))

    def nested(inside, tid):
        if len(inside) < 2:
            return []
        cut = data.draw(st.integers(1, len(inside) - 1))
        name, cat = data.draw(st.sampled_from([("aten::x", "cpu_op"), ("y", "user_annotation")]))
        own = event(cat, name, inside[0], inside[cut] - inside[0], tid)
        return [own, *nested(inside[1:cut], tid), *nested(inside[cut:], tid)]

    trace = [
        *WINDOW,
        *nested(moments, 1),
        *nested(moments[::2], 2),
        *nested(moments[1::3], 3),
        *launch("aten::mm", -20, 1),
    ]
    starts = data.draw(st.lists(st.integers(0, 990), min_size=1, max_size=8, unique=True))
    times = step_times([*trace, *(kernel("gemm", ts, 25, 1) for ts in starts)], "window", 1)
    assert sum(ms for ms, _ in times.waited_for.values()) == pytest.approx(times.milliseconds[HOST])


def test_compiled_kernels_are_copies_if_they_only_move_or_round():
    names = {
        "triton_poi_fused__to_copy_3": COPIES,
        "triton_poi_fused__to_copy_transpose_view_11": COPIES,
        "triton_poi_fused__to_copy_t_0": COPIES,
        "triton_poi_fused_split_with_sizes_4": COPIES,
        "triton_poi_fused_add_clone_2": ELEMENTWISE,
        "triton_poi_fused_tanh_view_5": ELEMENTWISE,
        "triton_red_fused__to_copy_gelu_gelu_backward_sum_view_6": ELEMENTWISE,
        "triton_per_fused__to_copy_add_mul_native_layer_norm_view_14": ELEMENTWISE,
    }
    trace = [*WINDOW]
    for n, name in enumerate(names):
        trace += [*launch(name, 100 * n, n), kernel(name, 100 * n + 10, 1 + n, n)]
    times = step_times(trace, "window", 1).milliseconds
    for kind in (COPIES, ELEMENTWISE):
        assert times[kind] * 1e3 == pytest.approx(sum(1 + n for n, of in enumerate(names.values()) if of == kind))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("aten::mm", [[8, 4], [4, 16]]),
        # compiled calls have their result among the arguments
        ("aten::mm", [[8, 4], [4, 16], [8, 16]]),
        ("aten::addmm", [[16], [8, 4], [4, 16], [], [], [8, 16]]),
        ("aten::addmm", [[8, 16], [8, 4], [4, 16], [], []]),
    ],
)
def test_flops_of_a_product_are_those_of_its_factors(name, sizes):
    trace = [*WINDOW, *launch(name, 10, 1, **{"Input Dims": sizes}), kernel("nvjet", 20, 5, 1)]
    assert step_times(trace, "window", 1).flops[LINEAR] == 2 * 8 * 4 * 16


def test_every_attention_of_torch_has_its_factors_where_they_are_read():
    ops = [op for op in torch._C._jit_get_all_schemas() if op.name.startswith("aten::_scaled_dot_product_")]
    assert {"aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_cudnn_attention_backward"} <= {
        op.name for op in ops
    }
    for op in ops:
        first = int(op.name.endswith("_backward"))
        assert [argument.name for argument in op.arguments[first : first + 2]] == ["query", "key"], op.name


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_a_trace_is_counted_once_forward_and_backward(tmp_path, masked):
    q, k, v = (torch.randn(2, 3, n, 4, requires_grad=True) for n in (20, 6, 6))
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool) if masked else None
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof, record_function("mine"):
        scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    times = step_times(json.loads((tmp_path / "trace.json").read_text())["traceEvents"], "mine", 1)
    assert times.flops == {LINEAR: 0, ATTENTION: 14 * 2 * 3 * 20 * 6 * 4}


def test_norms_of_manual_steps_are_no_part_of_the_training_step():
    strategy, clipper = "[Strategy]S.training_step", "GradientClipper"
    trace = [
        *WINDOW,
        event("user_annotation", strategy, 0, 500),
        event("user_annotation", clipper, 100, 100),
        event("cpu_op", "aten::_foreach_norm", 110, 50),
        event("cpu_op", "aten::add", 300, 50),
    ]
    times = step_times(trace, "window", 1).milliseconds
    assert (times[NORMS], times[ELEMENTWISE]) == pytest.approx((0.05, 0.05))


def test_the_thread_of_the_window_decides_where_there_is_no_device():
    trace = [
        *WINDOW,
        event("user_annotation", "[_TrainingEpochLoop].train_dataloader_next", 10, 100),
        # the part that computes is no wait
        event("cpu_op", "aten::stack", 50, 20),
        event("cpu_op", "aten::linear", 200, 100),
        event("cpu_op", "aten::addmm", 220, 60, **MM),
        event("user_annotation", "[Callback]EMA.on_train_batch_end", 400, 100),
        event("cpu_op", "aten::_foreach_lerp_", 410, 50),
        event("cpu_op", "aten::mm", 0, 900, tid=3, **MM),
    ]
    microseconds = {kind: 1e3 * ms for kind, ms in step_times(trace, "window", 1).milliseconds.items() if ms}
    assert microseconds == pytest.approx(
        {ELEMENTWISE: 20 + 40, LINEAR: 60, "averaged weights": 50, DATA: 80, HOST: 750}
    )


def test_a_trace_of_torch_is_read(tmp_path):
    a, b = torch.randn(64, 32), torch.randn(32, 128)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof, record_function("mine"):
        for _ in range(3):
            (a @ b).relu_()
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    times = step_times(trace, "mine", 3)
    assert times.flops[LINEAR] == 2 * 64 * 32 * 128
    assert times.milliseconds[LINEAR] > 0
    assert times.milliseconds[ELEMENTWISE] > 0
    assert times.milliseconds[OPERATOR] == 0
    window = next(e for e in trace if e.get("name") == "mine" and e.get("cat") == "user_annotation")
    # the end of the region is a sum, whose last digit is that of the clock
    assert times.total == pytest.approx(window["dur"] / 3e3, abs=math.ulp(window["ts"]) / 1e3)
    with pytest.raises(ValueError, match="the trace has no region 'other'"):
        step_times(trace, "other", 1)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), max_size=12))
def test_a_union_holds_what_any_interval_holds(spans):
    intervals = [(a, a + n) for a, n in spans]
    union = merged(intervals)
    points = {i for a, b in union for i in range(int(a), int(b))}
    assert points == {i for a, b in intervals for i in range(a, b)}
    assert all(b < c for (_, b), (c, _) in pairwise(union))

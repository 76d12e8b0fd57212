"""The records of the operators, and that everything that asks about operators reads them."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode
from vsa_kernels.operators import OPERATORS, Operator, declare
from vsa_kernels.testing import Call, make_case, tokens

from scripts import sanitize_kernels
from scripts.bench import cases as bench_cases
from scripts.bench.timing import Setup
from tests.kernels import aot
from tests.training.test_step_times import WINDOW, event
from vsa.models.recompute import _keep_attention, checkpointed_except_attention
from vsa.training.estimate.block import BlockShape, kept_bytes
from vsa.training.step_times import ELEMENTWISE, OPERATOR, step_times

RECOMPUTED = {
    f"{name}_{direction}"
    for name in ("norm_rope", "bias_gelu", "residual_norm", "gated_residual")
    for direction in ("fwd", "bwd")
}
KEPT = {
    "block_mean_and_similarity", "block_mean_pool_bwd", "block_mean_pool_fwd", "block_sparse_bwd", "block_sparse_fwd",
    "coarse_fine_bwd", "coarse_fine_fwd", "gathered_fwd", "group_tiles", "mean_scores", "select_share", "select_topk",
    "subblock_scores", "skipping_fwd", "tail_bwd", "tail_fwd",
}  # fmt: skip


def registered_ops():
    """Names of the ops of the package that torch knows."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("vsa_kernels::") for name in names if name.startswith("vsa_kernels::")}


def undeclared():
    return registered_ops() - {op for operator in OPERATORS.values() for op in operator.ops}


@pytest.fixture
def library():
    """Ops of this test, gone after it."""
    with torch.library._scoped_library("vsa_kernels", "FRAGMENT") as scoped:
        yield scoped


@pytest.fixture
def toy(library, monkeypatch):
    """An operator that doubles its input, as a function that declares it elementwise or not."""
    library.define("toy_fwd(Tensor x) -> Tensor")
    library.impl("toy_fwd", torch.library.fallthrough_kernel, "Autograd")
    runs = []
    library.impl("toy_fwd", lambda x: runs.append(len(x)) or 2 * x.detach(), "CompositeExplicitAutograd")
    monkeypatch.setitem(OPERATORS, "toy", None)

    def declared(**traits):
        declare(Operator(name="toy", module=__name__, ops={"toy_fwd": lambda x, **_: 7 * x[0]}, **traits))
        return runs

    return declared


def test_every_op_belongs_to_one_operator(library):
    ops = [op for operator in OPERATORS.values() for op in operator.ops]
    assert len(ops) == len(set(ops))
    assert not undeclared()
    library.define("forgotten(Tensor x) -> Tensor")
    assert undeclared() == {"forgotten"}
    with pytest.raises(ValueError, match="vsa_kernels::forgotten belongs to no operator: declare it in"):
        _keep_attention(None, torch.ops.vsa_kernels.forgotten.default)


def test_the_same_ops_as_ever_are_recomputed():
    policies = {op: _keep_attention(None, getattr(torch.ops.vsa_kernels, op).default) for op in registered_ops()}
    recomputed = {op for op, policy in policies.items() if policy == CheckpointPolicy.PREFER_RECOMPUTE}
    kept = {op for op, policy in policies.items() if policy == CheckpointPolicy.MUST_SAVE}
    assert (recomputed, kept) == (RECOMPUTED, KEPT)


@pytest.mark.parametrize("elementwise", [True, False])
def test_a_toy_is_found_by_checkpointing_step_times_and_flop_counts(toy, elementwise):
    runs = toy(moved=(2, 0) if elementwise else (0, 0))

    def block(x):
        return (torch.ops.vsa_kernels.toy_fwd(x.sin()) * x).cos()

    checkpointed_except_attention(block, torch.randn(5, requires_grad=True)).sum().backward()
    assert runs == (2 if elementwise else 1) * [5]
    trace = [*WINDOW, event("cpu_op", "vsa_kernels::toy_fwd", 10, 100)]
    times = step_times(trace, "window", steps=1).milliseconds
    assert times[ELEMENTWISE if elementwise else OPERATOR] == 0.1
    with FlopCounterMode(display=False) as counter:
        torch.ops.vsa_kernels.toy_fwd(torch.randn(5))
    assert counter.get_total_flops() == 35


def test_a_toy_is_found_by_the_estimate(toy):
    toy(result_bytes=lambda *sizes: sum(sizes))
    shape = BlockShape(tokens=100, text=7, dim=64, ffn_dim=128, heads=4, tiles=3, capacity=32)
    plain, own = (kept_bytes(s, "attention_mlp") for s in (replace(shape, tiles=0), replace(shape, operator="toy")))
    assert own - plain == 100 + 4 + 16 + 3 + 32 - (100 * 64 * 2 + 4 * 100 * 4)


def cases_of_toy(case):
    """A call that doubles the tokens of a case, as `cases.py` of a folder has them."""

    def double(x, *, backend):
        SEEN.append((backend, tuple(x.shape)))
        return 2 * x

    yield Call(double, (tokens(case),))


SEEN = []


@pytest.fixture
def toy_with_cases(toy, monkeypatch):
    toy(moved=(2, 2), sizes={"model": (1, 50, 2, 6)})
    cases = ModuleType(f"{__package__}.cases")
    cases.toy = cases_of_toy
    monkeypatch.setitem(sys.modules, cases.__name__, cases)
    SEEN.clear()


def test_a_toy_is_sanitized(toy_with_cases, monkeypatch):
    monkeypatch.setattr("scripts.sanitize_kernels.OPERATORS", {"toy": OPERATORS["toy"]})
    sanitize_kernels.problem(3, torch.device("cpu"))
    assert [backend for backend, _ in SEEN] == ["triton"]


def test_a_toy_is_timed(toy_with_cases, capsys):
    cases = bench_cases.operator_cases()
    assert set(cases) == {name for name in OPERATORS if OPERATORS[name].sizes} > {"toy"}
    setup = Setup(
        backends=["triton"], peers=[], lists="random", device=torch.device("cpu"), dtype=torch.float32, repeats=1
    )
    assert "toy on triton" in cases["toy"].check("triton", setup)[0]
    (shape,) = cases["toy"].shapes(argparse.Namespace(shapes=["model"]), setup.device)
    rows = cases["toy"].run(shape, setup).rows
    assert [(row["op"], row["pass"]) for row in rows[-2:]] == [("triton", "forward"), ("triton", "forward + backward")]
    assert ("triton", (1, 50, 12)) in SEEN


def test_a_toy_is_compiled(toy_with_cases):
    stages = {stage.__name__: stage for stage in aot.all_stages()}
    assert set(OPERATORS) <= set(stages)
    stages["toy"](aot.Problem(heads=2, head_dim=16, num=4))
    # at the sizes of the problem, and at those of models
    assert SEEN == [("triton", (2, 4 * 64, 32)), ("triton", (2, 999, 12))]
    assert "toy bf16 128 64x64" in [label for label, _ in aot.plan("quick")]


@pytest.mark.parametrize("name", [name for name in OPERATORS if OPERATORS[name].elementwise])
def test_tensors_moved_are_the_large_arguments_and_results(name):
    operator, moved = OPERATORS[name], {"fwd": 0, "bwd": 0}

    class Large(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            op = str(func).split(".")
            if op[0] == "vsa_kernels":
                tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
                moved[op[1][-3:]] += sum(x.numel() == 2 * 50 * 32 for x in tensors)
            return result

    call = next(operator.cases(make_case([50], [1], batch=2, heads=2, kv_heads=2, head_dim=16)))
    inputs = tuple(x.detach().to("meta").requires_grad_(x.requires_grad) for x in call.inputs)
    with Large():
        call._replace(inputs=inputs).run("triton")
    assert operator.moved == (moved["fwd"], moved["bwd"])


def test_every_case_runs_on_the_plain_backend():
    case = make_case(
        [5, 16, 1], [7, 9], batch=2, heads=2, index_batch=1, index_heads=1, head_dim=8, fine=True, kv_valid=True
    )
    for operator in OPERATORS.values():
        calls = list(operator.cases(case))
        assert calls
        for call in calls:
            results, gradients = call.run("reference")
            assert all(x.isfinite().all() for x in (*results, *gradients)), operator.name

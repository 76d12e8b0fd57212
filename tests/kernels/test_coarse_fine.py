"""The whole VSA operator against a dense definition in fp64, and as PyTorch sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from vsa_kernels import BlockIndex, Blocks, block_sparse_attn, select_topk
from vsa_kernels.coarse_fine import api, coarse_attn, coarse_fine_attn, coarse_fine_stages, combine
from vsa_kernels.coarse_fine.api import list_capacity
from vsa_kernels.coarse_fine.op import coarse_fine_bwd, coarse_fine_fwd
from vsa_kernels.testing import assert_within_budget

from tests.kernels.interpreted import further

NAMES = ("dq", "dk", "dv", "dgate_coarse", "dgate_fine")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Inputs of one call, the gradient of its output, and the block sizes."""

    inputs: tuple[Tensor, ...]
    dout: Tensor
    q_sizes: list[int]
    kv_sizes: list[int]
    topk: int

    @property
    def blocks(self) -> dict[str, Blocks]:
        device = self.dout.device
        q_blocks = Blocks.from_sizes(self.q_sizes, device)
        if self.q_sizes == self.kv_sizes:
            return {"q_blocks": q_blocks, "kv_blocks": q_blocks}
        return {"q_blocks": q_blocks, "kv_blocks": Blocks.from_sizes(self.kv_sizes, device)}

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        return [x.detach().to(dtype or x.dtype).requires_grad_() for x in self.inputs]


def make_problem(
    q_sizes, kv_sizes, *, heads=1, kv_heads=1, head_dim=16, topk=2, gated=True, batch=2, device="cpu", dtype=None
) -> Problem:
    """A random problem; fp32 on a CPU, bf16 on a GPU."""
    g = torch.Generator().manual_seed(0)
    dtype = dtype or (torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16)

    def tokens(sizes, num_heads):
        x = torch.randn(batch, sum(sizes), num_heads, head_dim, generator=g)
        # blocks that differ in their means, so that the coarse stage has something to choose between
        means = torch.randn(len(sizes), num_heads, head_dim, generator=g)
        return (x + means.repeat_interleave(torch.tensor(sizes), 0)).to(device, dtype)

    q, dout, *gates = (tokens(q_sizes, heads) for _ in range(4))
    k, v = (tokens(kv_sizes, kv_heads) for _ in range(2))
    inputs = (q, k, v, *gates[: 1 + gated])
    return Problem(inputs=inputs, dout=dout, q_sizes=list(q_sizes), kv_sizes=list(kv_sizes), topk=topk)


CASES = {
    "uniform": partial(make_problem, [8] * 5, [8] * 5, heads=2, kv_heads=2),
    "ragged": partial(make_problem, [7, 3, 12, 1], [7, 3, 12, 1], heads=2, kv_heads=2, gated=False),
    "cross": partial(make_problem, [5, 9], [4, 1, 6, 3, 2], heads=4, kv_heads=2, head_dim=32, topk=3),
    "long": partial(make_problem, [70, 33], [16] * 6, heads=1, head_dim=48, topk=4, gated=False, batch=1),
    "all": partial(make_problem, [6, 4, 4], [6, 4, 4], heads=2, kv_heads=1, topk=3, batch=1),
}


def run(problem: Problem, backend: str, inputs: list[Tensor]):
    q, k, v, gate_coarse, *gate_fine = inputs
    gate_fine = gate_fine[0] if gate_fine else None
    return coarse_fine_attn(q, k, v, gate_coarse, gate_fine, **problem.blocks, topk=problem.topk, backend=backend)


def gradients(problem: Problem, out: Tensor, inputs: list[Tensor]) -> dict[str, Tensor]:
    grads = torch.autograd.grad(out, inputs, problem.dout.to(out.dtype))
    return {"out": out.detach(), **dict(zip(NAMES, grads, strict=False))}


def define(problem: Problem, kept: Tensor, *, share: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    """Output, gradients and scores in fp64 by one dense matrix of tokens.

    Args:
        kept: bool `[B, H, Nq, Nkv]`, the selected blocks.
        share: False leaves out what the coarse stage sends back through the means, which is wrong.
    """
    inputs = problem.leaves(torch.float64)
    q, k, v, gate_coarse, *gate_fine = (x.transpose(1, 2) for x in inputs)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))

    def belongs(sizes):
        ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        return F.one_hot(ids).double().T.to(q.device)

    rows, cols = belongs(problem.q_sizes), belongs(problem.kv_sizes)
    scale = q.shape[-1] ** -0.5
    qm, km, vm = ((m / m.sum(1, keepdim=True)) @ x for m, x in ((rows, q), (cols, k), (cols, v)))
    scores = qm @ km.transpose(-1, -2) * scale
    coarse = scores.softmax(-1) @ vm
    if not share:
        coarse = coarse.detach()
    mask = (rows.T @ kept.double() @ cols) > 0
    fine = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, -math.inf).softmax(-1) @ v
    out = gate_coarse * (rows.T @ coarse) + (gate_fine[0] * fine if gate_fine else fine)
    return gradients(problem, out.transpose(1, 2), inputs), scores.detach()


def compose(problem: Problem, index: BlockIndex) -> dict[str, Tensor]:
    """The plain computation in the inputs' dtype with a given selection: the size of the error that is allowed."""
    inputs = problem.leaves()
    q, k, v, gate_coarse, *gate_fine = inputs
    coarse, _ = coarse_attn(q, k, v, **problem.blocks)
    fine, _ = block_sparse_attn(q, k, v, index, **problem.blocks, backend="reference")
    gate = gate_fine[0] if gate_fine else None
    return gradients(problem, combine(fine, coarse, gate_coarse, gate, problem.blocks["q_blocks"]), inputs)


def assert_chosen(kept: Tensor, scores: Tensor, topk: int, tolerance: float) -> None:
    """Every row keeps topk blocks, and none that is worse than one it leaves out."""
    assert (kept.sum(-1) == min(topk, kept.shape[-1])).all()
    worst = scores.masked_fill(~kept, math.inf).amin(-1)
    best_left = scores.masked_fill(kept, -math.inf).amax(-1)
    assert (worst >= best_left - tolerance).all()


def exchange(kept: Tensor) -> Tensor:
    """The selection of the first row with one block exchanged for one that it does not list."""
    wrong = kept.clone()
    row = wrong[0, 0, 0]
    listed_block, other_block = int(row.int().argmax()), int(row.int().argmin())
    row[listed_block], row[other_block] = False, True
    return wrong


@pytest.mark.parametrize("name", list(CASES))
def test_triton_equals_the_definition(name, triton_device):
    problem = CASES[name](device=triton_device)
    inputs = problem.leaves()
    result = run(problem, "triton", inputs)
    actual = gradients(problem, result.out, inputs)
    selection = result.index.to_dense(len(problem.kv_sizes))
    exact, scores = define(problem, selection)
    tolerance = 1e-5 if problem.dout.dtype == torch.float32 else 4e-3 * float(scores.abs().max())
    assert_chosen(selection, scores, problem.topk, tolerance)
    indices = result.index.kv_indices[..., : min(problem.topk, len(problem.kv_sizes))]
    assert (indices.diff(dim=-1) > 0).all()
    plain = compose(problem, result.index)
    for key, value in exact.items():
        assert_within_budget(actual[key], plain[key], value, key)
    # controls: the same tolerances refuse a gradient without the coarse stage's share, and another block
    control, _ = define(problem, selection, share=False)
    for key in ("dq", "dk", "dv"):
        with pytest.raises(AssertionError, match=key):
            assert_within_budget(control[key].to(actual[key]), plain[key], exact[key], key)
    if not selection.all():
        with pytest.raises(AssertionError):
            assert_chosen(exchange(selection), scores, problem.topk, tolerance)
        wrong = define(problem, exchange(selection))[0]["out"].to(actual["out"])
        with pytest.raises(AssertionError, match="out"):
            assert_within_budget(wrong, plain["out"], exact["out"], "out")


@pytest.mark.parametrize("backend", ["reference", "gather"])
@pytest.mark.parametrize("name", list(CASES))
def test_composition_equals_the_definition(name, backend):
    problem = CASES[name](dtype=torch.float64)
    inputs = problem.leaves()
    result = run(problem, backend, inputs)
    selection = result.index.to_dense(len(problem.kv_sizes))
    exact, scores = define(problem, selection)
    assert_chosen(selection, scores, problem.topk, 0)
    for key, value in gradients(problem, result.out, inputs).items():
        torch.testing.assert_close(value, exact[key], atol=1e-11, rtol=1e-11, msg=key)
    control, _ = define(problem, selection, share=False)
    assert (exact["dk"] - control["dk"]).abs().max() > 1e-3


def test_a_scale_of_0_takes_means(triton_device):
    problem = CASES["all"](device=triton_device)
    q, k, v, gate_coarse, gate_fine = problem.inputs
    actual = coarse_fine_attn(
        q, k, v, gate_coarse, gate_fine, **problem.blocks, topk=3, scale=0.0, backend="triton"
    ).out
    values = v.float().repeat_interleave(2, 2)
    means = torch.stack([part.mean(1) for part in values.split(problem.kv_sizes, 1)]).mean(0)
    expected = gate_coarse.float() * means[:, None] + gate_fine.float() * values.mean(1, keepdim=True)
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=1e-5 if actual.dtype == torch.float32 else 0.05)


def test_scores_in_several_chunks(triton_device, monkeypatch):
    """What the limit on the memory of the scores changes: nothing but the number of launches."""
    from vsa_kernels.coarse_fine import triton_op

    problem = CASES["cross"](device=triton_device)
    whole = run(problem, "triton", problem.leaves())
    calls = []
    real = triton_op.coarse_scores
    monkeypatch.setattr(triton_op, "coarse_scores", lambda *args, **rest: calls.append(args[4]) or real(*args, **rest))
    monkeypatch.setattr(triton_op, "_SCORE_BYTES", 3 * 4 * len(problem.q_sizes) * len(problem.kv_sizes))
    chunked = run(problem, "triton", problem.leaves())
    assert calls == [3, 3, 2]
    assert torch.equal(chunked.index.kv_indices[..., :3], whole.index.kv_indices[..., :3])
    assert torch.equal(chunked.index.kv_num_blocks, whole.index.kv_num_blocks)
    assert torch.equal(chunked.out, whole.out)


def permuted(x: Tensor) -> Tensor:
    """The same values, laid out heads first."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("sizes", [[8] * 3, [5, 130]], ids=str)
def test_gates(sizes, gated, triton_device):
    """combine and its backward on strided inputs, against the formula; a broadcast gradient too."""
    from vsa_kernels.coarse_fine import triton_gate

    problem = make_problem(sizes, sizes, heads=3, head_dim=48, gated=gated, device=triton_device)
    blocks = problem.blocks["q_blocks"]
    fine, _, _, gate_coarse, *rest = (permuted(x) for x in problem.inputs)
    gate_fine = rest[0] if gated else None
    coarse = torch.randn(2, len(sizes), 3, 48, device=triton_device)
    leaves = [x.double().requires_grad_() for x in (fine, coarse, gate_coarse, *rest)]
    exact = combine(leaves[0], leaves[1], leaves[2], leaves[3] if gated else None, blocks)
    half = fine.dtype != torch.float32
    close = partial(torch.testing.assert_close, atol=2e-2 if half else 1e-5, rtol=1e-2 if half else 1e-5)
    close(triton_gate.combine(fine, coarse, gate_coarse, gate_fine, blocks).double(), exact)
    for dout in (permuted(problem.dout), problem.dout[:, :1, :1, :1].expand_as(fine)):
        grads = torch.autograd.grad(exact, leaves, dout.double(), retain_graph=True)
        actual = triton_gate.combine_backward(dout, fine, coarse, gate_coarse, gate_fine, blocks)
        expected = [grads[0], grads[1], grads[2], *([grads[3]] if gated else [])]
        mine = [actual.dfine, actual.dcoarse, actual.dgate_coarse, *([actual.dgate_fine] if gated else [])]
        for a, b in zip(mine, expected, strict=True):
            close(a.double(), b)
        delta = (actual.dfine.double() * fine.double()).sum(-1).transpose(1, 2)
        torch.testing.assert_close(actual.delta.double(), delta, atol=1e-4, rtol=1e-4)
        delta = (actual.dcoarse.double() * coarse.double()).sum(-1).transpose(1, 2)
        torch.testing.assert_close(actual.delta_coarse.double(), delta, atol=1e-3, rtol=1e-4)
        assert (actual.dgate_fine is None) == (not gated)


def op_arguments(problem: Problem, inputs: list[Tensor]) -> tuple:
    q, kv = problem.blocks["q_blocks"], problem.blocks["kv_blocks"]
    gates = (*inputs[3:], None)[:2]
    sizes = (q.offsets, q.max_size, q.min_size, kv.offsets, kv.max_size, kv.min_size)
    return (*inputs[:3], *gates, *sizes, problem.topk, list_capacity(problem.topk, kv.num), 0.3)


@pytest.mark.parametrize(
    ("change", "gated"), [(torch.Tensor.contiguous, True), further(permuted, False)], ids=["contiguous", "permuted"]
)
def test_opcheck(change, gated, triton_device):
    # small: opcheck runs the op many times
    problem = make_problem([2, 1], [1, 2], heads=2, topk=1, batch=1, gated=gated, device=triton_device)
    args = op_arguments(problem, [change(x).requires_grad_() for x in problem.inputs])
    torch.library.opcheck(coarse_fine_fwd, args)
    detached_args = [x.detach() if isinstance(x, Tensor) else x for x in args]
    _, *saved_tensors = coarse_fine_fwd(*detached_args)
    torch.library.opcheck(coarse_fine_bwd, (change(problem.dout), *saved_tensors, *detached_args))


def test_backward_repeats_bit_for_bit(triton_device):
    problem = CASES["ragged"](device=triton_device, batch=1)
    inputs = problem.leaves()
    # the many repeats of `block_sparse_attn` have a test of their own
    first, second = (gradients(problem, run(problem, "triton", inputs).out, inputs) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_checkpoint_that_keeps_the_op_runs_it_once(triton_device, monkeypatch):
    """Selective activation checkpointing by the op's name keeps the selection that out and lse belong to."""
    from vsa_kernels.coarse_fine import triton_op

    problem = make_problem([3, 4], [2, 3, 2], heads=2, batch=1, device=triton_device)
    calls = []
    real = triton_op.forward
    monkeypatch.setattr(triton_op, "forward", lambda *args: calls.append(1) or real(*args))
    plain = problem.leaves()
    expected = gradients(problem, run(problem, "triton", [2 * x for x in plain]).out, plain)

    def policy(_ctx, op, *_args, **_kwargs):
        is_operator = op is torch.ops.vsa_kernels.coarse_fine_fwd.default
        return CheckpointPolicy.MUST_SAVE if is_operator else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    for context_fn, runs in ((contexts, 1), (None, 2)):
        calls.clear()
        inputs = problem.leaves()
        options = {} if context_fn is None else {"context_fn": context_fn}
        out = checkpoint(
            lambda *x: run(problem, "triton", [2 * y for y in x]).out, *inputs, use_reentrant=False, **options
        )
        actual = gradients(problem, out, inputs)
        assert len(calls) == runs
        assert all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.fixture
def hollow(monkeypatch):
    """The op on any device, with tensors of the right shapes in place of the kernels: for tests of the graph alone."""
    from vsa_kernels.coarse_fine import triton_op

    def forward(call):
        q, topk, capacity = call.q, call.topk, call.capacity
        (B, L, H, D), Hkv, q_blocks, kv_blocks = q.shape, call.k.shape[2], call.q_blocks, call.kv_blocks
        rows, lists = (B, H, q_blocks.num), torch.arange(capacity, dtype=torch.int32).clamp(max=topk - 1)
        mean = (q.new_zeros(B, n.num, h, D) for n, h in ((q_blocks, H), (kv_blocks, Hkv), (kv_blocks, Hkv)))
        indices, counts = lists.expand(*rows, capacity).contiguous(), torch.full(rows, topk, dtype=torch.int32)
        coarse = q.new_zeros(B, q_blocks.num, H, D)
        return (topk * q, q.clone(), q.new_zeros(B, H, L), coarse, q.new_zeros(rows), indices, counts, *mean)

    def backward(dout, saved, call):
        assert saved.kv_indices.shape[-1] == call.capacity == list_capacity(call.topk, call.kv_blocks.num)
        assert (saved.kv_num_blocks == call.topk).all()
        return [call.topk * dout, *(torch.zeros_like(x) for x in (call.k, call.v, *call[3:5]) if x is not None)]

    monkeypatch.setattr(triton_op, "forward", forward)
    monkeypatch.setattr(triton_op, "backward", backward)
    monkeypatch.setattr(api, "resolve_backend", lambda *_: "triton")


def layer(q, k, v, gate_coarse, gate_fine, blocks, topk):
    result = coarse_fine_attn(
        q.sin(), k, v, gate_coarse, gate_fine, q_blocks=blocks, kv_blocks=blocks, topk=topk, backend="triton"
    )
    return result.out.square()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[2] * 70, [1, 3] * 35], ids=["uniform", "ragged"])
def test_topk_that_changes_every_step_recompiles_once(sizes, hollow):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    blocks = Blocks.from_sizes(sizes)
    inputs = [torch.randn(1, 140, 2, 4, requires_grad=True) for _ in range(5)]
    graphs = []
    # capacities 32, 64 and 70, and every block
    for topk in (8, *range(100, 0, -3)):
        out = compiled(*inputs, blocks, topk)
        count = min(topk, 70)
        torch.testing.assert_close(out, (count * inputs[0].sin()).square())
        grad = torch.autograd.grad(out.sum(), inputs)[0]
        torch.testing.assert_close(grad, 2 * count**2 * inputs[0].sin() * inputs[0].cos())
        graphs.append(counter.frame_count)
    assert graphs[0] == 1
    assert graphs[-1] == 2, f"compiled graphs after each topk: {graphs}"


@pytest.mark.parametrize("gated", [True, False])
def test_one_call_is_one_node(gated, hollow):
    torch._dynamo.reset()
    nodes: dict[str, list[str]] = {"forward": [], "backward": []}

    def compiler(graph, _, name):
        nodes[name] += [str(node.target) for node in graph.graph.nodes if "vsa_kernels" in str(node.target)]
        return make_boxed_func(graph.forward)

    forward, backward = (partial(compiler, name=name) for name in nodes)
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    inputs = [torch.randn(1, 12, 2, 4, requires_grad=True) for _ in range(4 + gated)]
    arguments = inputs if gated else [*inputs, None]
    out = torch.compile(layer, backend=backend, fullgraph=True)(*arguments, Blocks.from_sizes([3, 5, 4]), 2)
    torch.autograd.grad(out.sum(), inputs)
    assert nodes == {
        "forward": ["vsa_kernels.coarse_fine_fwd.default"],
        "backward": ["vsa_kernels.coarse_fine_bwd.default"],
    }


def test_compiled_equals_eager(triton_device):
    torch._dynamo.reset()
    problem = make_problem([3, 2, 4], [3, 2, 4], heads=2, batch=1, gated=False, device=triton_device)
    q_blocks = problem.blocks["q_blocks"]

    def call(*inputs):
        return layer(*inputs, None, q_blocks, 2)

    results = []
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        inputs = problem.leaves()
        results.append(gradients(problem, function(*inputs), inputs))
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def test_flops_are_the_executed_ones(hollow):
    """The op counts what its composition counts, and two and a half times that in the backward."""
    blocks = Blocks.from_sizes([4] * 10)
    inputs = [torch.randn(2, 40, 3, 8, requires_grad=True) for _ in range(5)]
    with FlopCounterMode(display=False) as counter:
        out = layer(*inputs, blocks, 2)
        forward = counter.get_total_flops()
        out.sum().backward()
    pairs = 2 * 3 * (10 * 10 + 40 * (2 * 4))
    assert forward == 4 * pairs * 8
    assert counter.get_total_flops() - forward == 10 * pairs * 8
    with FlopCounterMode(display=False) as counter:
        coarse_fine_stages(*inputs[:3], q_blocks=blocks, kv_blocks=blocks, topk=2, backend="gather")
    assert counter.get_total_flops() == forward


def test_list_capacity_is_that_of_select_topk():
    for num_kv in (1, 31, 32, 70):
        scores = torch.randn(1, 1, 1, num_kv)
        for topk in (1, 2, 31, 32, 33, 64, 65, 70, 100):
            assert list_capacity(topk, num_kv) == select_topk(scores, topk).kv_indices.shape[-1]


def test_meta_tensors_need_no_kernel(monkeypatch):
    monkeypatch.setattr(api, "resolve_backend", lambda *_: "triton")
    blocks = Blocks(offsets=torch.zeros(101, dtype=torch.int32, device="meta"), max_size=5, min_size=3)
    q = torch.empty(2, 400, 4, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    k = torch.empty(2, 400, 2, 16, device="meta", dtype=torch.bfloat16)
    result = coarse_fine_attn(q, k, k, q, None, q_blocks=blocks, kv_blocks=blocks, topk=40)
    assert (result.out.shape, result.out.dtype) == (q.shape, torch.bfloat16)
    assert (result.lse.shape, result.lse.dtype) == ((2, 4, 400), torch.float32)
    assert (result.coarse.shape, result.coarse.dtype) == ((2, 100, 4, 16), torch.float32)
    # 40 rounded up to a multiple of 32
    assert result.index.kv_indices.shape == (2, 4, 100, 64)
    assert (result.index.max_blocks, result.index.min_blocks) == (40, 40)
    assert result.out.requires_grad
    assert not any(x.requires_grad for x in (result.fine, result.lse, result.coarse))
    (grad,) = torch.autograd.grad(result.out.sum(), q)
    assert (grad.shape, grad.dtype) == (q.shape, torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk": 0}, "topk must be at least 1, got 0"),
        ({"k": torch.zeros(1, 8, 1, 16)}, "k and v must have the same shape"),
        ({"v": torch.zeros(1, 8, 2, 16, dtype=torch.float64)}, "have the same float dtype"),
        ({"gate_coarse": torch.zeros(1, 8, 1, 16)}, r"gate_coarse must be torch.float32 \[1, 8, 2, 16\] like q"),
        ({"gate_fine": torch.zeros(1, 8, 2, 16).half()}, "gate_fine must be torch.float32 .* got torch.float16"),
        ({"backend": "cuda"}, "backend must be one of"),
        ({"candidates": torch.ones(2, 3).bool()}, r"candidates must be bool \[2, 2\], got torch.bool \[2, 3\]"),
        ({"always": torch.ones(2, 2)}, r"always must be bool \[2, 2\], got torch.float32 \[2, 2\]"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_input(change, message):
    x, blocks = torch.zeros(1, 8, 2, 16), Blocks.from_sizes([4, 4])
    good = dict.fromkeys(("q", "k", "v", "gate_coarse", "gate_fine"), x) | {"q_blocks": blocks, "kv_blocks": blocks}
    with pytest.raises(ValueError, match=message):
        coarse_fine_attn(**(good | {"topk": 1} | change))

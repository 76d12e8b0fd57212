"""The recall that the backward measures against dense attention in fp64, and what it must leave alone."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint
from vsa_kernels import Blocks, block_sparse_attn, coarse_fine_attn
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.coarse_fine.op import coarse_fine_bwd, coarse_fine_fwd
from vsa_kernels.recall import RecallBuffer
from vsa_kernels.testing import Case, make_case


def dense(case: Case) -> tuple[Tensor, Tensor]:
    """Probability mass and unselected-to-selected ratio of every pair of blocks, fp64 `[B, H, Nq, Nkv]` each.

    Both are the mean over the query block's rows of sum over the kv block of exp(s - lse of the selected blocks); the
    first is 0 at unselected blocks, the second is what a probe must find, times the number of unselected blocks.
    """
    q, k = case.q.double(), case.k.double().repeat_interleave(case.q.shape[2] // case.k.shape[2], 2)
    logits = torch.einsum("blhd,bshd->bhls", q, k) * q.shape[-1] ** -0.5
    q_sizes, kv_sizes = case.q_blocks.sizes.long(), case.kv_blocks.sizes.long()
    if case.kv_valid is not None:
        place = torch.cat([torch.arange(int(n)) for n in kv_sizes]).to(q.device)
        gone = place >= case.kv_valid.repeat_interleave(kv_sizes, 1)
        logits = logits.masked_fill(gone[:, None, None], -math.inf)
    B, H, L, _ = logits.shape
    kept = case.index.to_dense(len(kv_sizes)).expand(B, H, -1, -1)
    spread = kept.repeat_interleave(q_sizes, 2).repeat_interleave(kv_sizes, 3)
    lse = logits.masked_fill(~spread, -math.inf).logsumexp(-1, keepdim=True)
    # a query without kv tokens has no ratio and counts as 0
    p = (logits - lse).exp().masked_fill(lse == -math.inf, 0)
    belongs = torch.zeros(L, len(q_sizes), dtype=torch.float64, device=q.device)
    belongs[
        torch.arange(L, device=q.device), torch.arange(len(q_sizes), device=q.device).repeat_interleave(q_sizes)
    ] = 1
    to_block = torch.arange(len(kv_sizes), device=q.device).repeat_interleave(kv_sizes)
    by_block = torch.zeros(B, H, L, len(kv_sizes), dtype=torch.float64, device=q.device).index_add_(3, to_block, p)
    pairs = (belongs / belongs.sum(0)).T @ by_block
    left = (~kept).sum(-1, keepdim=True)
    return pairs.masked_fill(~kept, 0), (pairs * left).masked_fill(kept, 0)


def buffer_of(case: Case, seed: int = 0) -> RecallBuffer:
    B, _, H, _ = case.q.shape
    sizes = {"batch": B, "heads": H, "topk": case.index.kv_indices.shape[-1], "seed": seed}
    return RecallBuffer.allocate(case.q_blocks, case.kv_blocks, **sizes)


def backward(case: Case, buffer: RecallBuffer | None) -> tuple[Tensor, ...]:
    """dq, dk, dv by the host function; the buffer starts as garbage."""
    from vsa_kernels.block_sparse import triton_bwd

    blocks = {"q_blocks": case.q_blocks, "kv_blocks": case.kv_blocks, "kv_valid": case.kv_valid}
    out, lse = block_sparse_attn(case.q, case.k, case.v, case.index, **blocks, backend="triton")
    recall = None
    if buffer is not None:
        buffer.record.fill_(math.nan)
        recall = triton_bwd.Recall(buffer.record, buffer.probe.fill_(1 << 30), buffer.seed)
    delta = triton_bwd.delta(case.dout, out, lse, case.dlse)
    mask = BlockMask(index=case.index, **blocks)
    scale = case.q.shape[-1] ** -0.5
    return triton_bwd.backward(case.dout, delta, lse, case.q, case.k, case.v, mask, scale, recall=recall)


def by_block(case: Case, buffer: RecallBuffer) -> Tensor:
    """The mass of the buffer at its kv blocks, `[B, H, Nq, Nkv]`; entries past a count must be 0."""
    B, _, H, _ = case.q.shape
    indices, counts = (x.expand(B, H, *x.shape[2:]) for x in (case.index.kv_indices, case.index.kv_num_blocks))
    inside = torch.arange(buffer.mass.shape[-1], device=indices.device) < counts[..., None]
    assert (buffer.mass[~inside] == 0).all()
    at = torch.where(inside[..., : indices.shape[-1]], indices, 0).long()
    empty = torch.zeros(B, H, at.shape[2], case.kv_blocks.num, device=at.device)
    return empty.scatter_add_(3, at, buffer.mass[..., : at.shape[-1]])


CASES = {
    "uniform": partial(make_case, [32] * 2, [32] * 4, heads=2),
    "ragged": partial(make_case, [7, 20, 1], [9, 30, 3, 16], batch=2, heads=2, kv_heads=1, index_heads=1),
    "valid": partial(make_case, [16, 9], [16, 12, 5], batch=2, kv_valid=True),
    # several tiles on both sides
    "large": partial(make_case, [140, 70], [130, 40, 100, 3]),
    "large even": partial(make_case, [128, 128], [128] * 3, density=0.4),
    "empty rows": partial(make_case, [16] * 4, [16] * 3, density=0.3, seed=1),
    "all": partial(make_case, [16, 16], [16] * 3, density=1.1),
}


def case_of(name: str, device: torch.device) -> Case:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return CASES[name](dtype=dtype, device=device, head_dim=16 if device.type == "cpu" else 128)


@pytest.mark.parametrize("name", list(CASES))
def test_mass_and_ratio_equal_the_dense_ones(name, triton_device):
    case = case_of(name, triton_device)
    buffer = buffer_of(case, seed=3)
    known, plain = backward(case, buffer), backward(case, None)
    assert all(torch.equal(a, b) for a, b in zip(known, plain, strict=True))
    mass, ratios = dense(case)
    close = partial(torch.testing.assert_close, rtol=2e-3, atol=2e-6, check_dtype=False)
    close(by_block(case, buffer), mass)
    kept = case.index.to_dense(case.kv_blocks.num).expand_as(mass)
    assert torch.equal(buffer.probe == -1, kept.all(-1))
    probe = buffer.probe.clamp(min=0).long()[..., None]
    assert not (kept.gather(3, probe)[..., 0] & (buffer.probe >= 0)).any()
    close(buffer.ratio, ratios.gather(3, probe)[..., 0])
    # control: two entries exchanged
    wrong = mass.clone()
    flat = wrong.view(-1)
    first, last = int(flat.argmax()), int(flat.argmin())
    flat[first], flat[last] = mass.min(), mass.max()
    with pytest.raises(AssertionError):
        close(by_block(case, buffer), wrong)


def test_the_probe_is_uniform_and_the_ratio_unbiased(triton_device, monkeypatch):
    """One problem in copies with draws of their own: 160 probes of 5 unselected blocks, 1,920 on a GPU."""
    from vsa_kernels.block_sparse import triton_bwd

    # what costs time and is not looked at
    monkeypatch.setattr(triton_bwd, "_run_dkv", lambda *_: (None, None))
    copies = 40 if triton_device.type == "cpu" else 480
    case = make_case([4], [2] * 8, dtype=torch.float32, device=triton_device)
    lists = torch.tensor([1, 4, 5], dtype=torch.int32, device=triton_device).expand(1, 1, 1, 3).contiguous()
    index = replace(case.index, kv_indices=lists, kv_num_blocks=torch.full_like(lists[..., 0], 3))
    case = replace(case, index=index)
    mass, ratios = dense(case)
    values = ratios[0, 0, 0, [0, 2, 3, 6, 7]]
    many = {x: getattr(case, x).expand(copies, -1, -1, -1) for x in ("q", "k", "v", "dout")}
    many = replace(case, **many, dlse=case.dlse.expand(copies, -1, -1))
    found, probes = [], []
    for seed in range(4):
        buffer = buffer_of(many, seed)
        backward(many, buffer)
        found.append(buffer.ratio.double().flatten())
        probes.append(buffer.probe.flatten())
    found, probes = torch.cat(found), torch.cat(probes)
    # exact by enumeration: the mean over all possible probes is the ratio of all unselected to all selected mass
    exact = float(values.mean())
    torch.testing.assert_close(exact, float((values / 5).sum() / mass.sum()), rtol=1e-6, atol=0)
    # 4 standard errors of the mean of independent draws
    error = 4 * float(values.std(correction=0)) / len(found) ** 0.5
    assert error < 0.5 * exact
    assert abs(float(found.mean()) - exact) < error
    counts = torch.bincount(probes.long(), minlength=8)
    assert (counts[[1, 4, 5]] == 0).all()
    share = len(found) / 5
    # four degrees of freedom: 23.5 is exceeded once in 10,000 times
    assert float(((counts[[0, 2, 3, 6, 7]] - share) ** 2 / share).sum()) < 23.5
    # control: draws that never reach the heaviest block are noticed
    biased = found[probes != int(ratios[0, 0, 0].argmax())]
    assert abs(float(biased.mean()) - exact) > error


SIZES = [5, 9, 12, 3]


def inputs_of(device: torch.device) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    heads = (2, 1, 1, 2)
    return [torch.randn(1, sum(SIZES), h, 16, generator=g).to(device, dtype).requires_grad_() for h in heads]


def operator(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, blocks: Blocks, topk: int, recall: RecallBuffer | None):
    sides = {"q_blocks": blocks, "kv_blocks": blocks}
    return coarse_fine_attn(q, k, v, gate, None, **sides, topk=topk, backend="triton", recall=recall)


def make_buffer(blocks: Blocks, **changes: int) -> RecallBuffer:
    return RecallBuffer.allocate(blocks, blocks, **({"batch": 1, "heads": 2, "topk": 2} | changes))


def test_the_operator_fills_the_buffer_and_changes_nothing(triton_device):
    blocks, inputs = Blocks.from_sizes(SIZES, triton_device), inputs_of(triton_device)
    # wider than needed
    buffer = make_buffer(blocks, topk=5)
    results = []
    for recall in (None, buffer, buffer):
        result = operator(*inputs, blocks, 2, recall)
        assert recall is None or results[1:] or (buffer.record == 0).all()
        results.append((result.out, *torch.autograd.grad(result.out.square().sum(), inputs)))
        if len(results) == 2:
            first = buffer.record.clone(), buffer.probe.clone()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert torch.equal(first[0], buffer.record)
    assert torch.equal(first[1], buffer.probe)
    close = partial(torch.testing.assert_close, rtol=2e-3, atol=2e-6, check_dtype=False)
    case = make_case(SIZES, SIZES, batch=1, heads=2, kv_heads=1, device=triton_device)
    q, k, v, _ = (x.detach() for x in inputs)
    case = replace(case, q=q, k=k, v=v, index=result.index)
    mass, ratios = dense(case)
    close(by_block(case, buffer), mass)
    close(buffer.mass.sum(-1), torch.ones_like(buffer.ratio))
    close(buffer.ratio, ratios.gather(3, buffer.probe.long()[..., None])[..., 0])
    # another seed, other probes, the same masses
    buffer.reseed(7)
    torch.autograd.grad(operator(*inputs, blocks, 2, buffer).out.sum(), inputs)
    assert torch.equal(first[0][..., :-1], buffer.mass)
    assert not torch.equal(first[1], buffer.probe)


def test_a_gradient_with_everything_selected_misses_nothing(triton_device):
    blocks, inputs = Blocks.from_sizes(SIZES, triton_device), inputs_of(triton_device)
    buffer = make_buffer(blocks, topk=9)
    operator(*inputs, blocks, 9, buffer).out.sum().backward()
    assert (buffer.probe == -1).all()
    assert (buffer.ratio == 0).all()
    share = buffer.missed_share()
    assert (share.per_head == 0).all()
    assert share.overall == 0


def test_missed_share_weighs_rows():
    blocks = Blocks.from_sizes([1, 3])
    buffer = RecallBuffer.allocate(blocks, blocks, batch=1, heads=3, topk=1)
    buffer.ratio.copy_(torch.tensor([[[4.0, 0.0], [0.0, 4.0], [math.inf, 1.0]]]))
    share = buffer.missed_share()
    torch.testing.assert_close(share.per_head, torch.tensor([[0.5, 0.75, 1.0]]))
    assert share.overall == 1
    buffer.ratio[0, 2] = 2.0
    torch.testing.assert_close(buffer.missed_share().overall, torch.tensor(2 / 3))


def test_off_by_default(triton_device, monkeypatch):
    """Without a buffer the kernel is compiled without the code and gets none, and no probe is looked at."""
    from vsa_kernels.block_sparse import triton_bwd

    blocks, inputs = Blocks.from_sizes(SIZES, triton_device), inputs_of(triton_device)
    seen: list[tuple[bool, bool] | str] = []
    real = triton_bwd.launch

    def launch(kernel, grid, *args, **constants):
        if kernel is triton_bwd._dq_kernel:
            seen.append((constants["MASS"], args[kernel.arg_names.index("strips")] is not None))
        if kernel is triton_bwd._probe_kernel:
            seen.append("probe")
        real(kernel, grid, *args, **constants)

    monkeypatch.setattr(triton_bwd, "launch", launch)
    for recall in (None, make_buffer(blocks)):
        torch.autograd.grad(operator(*inputs, blocks, 2, recall).out.sum(), inputs)
    # the coarse stage and the fine stage of each call
    off, on = (False, False), (True, True)
    assert seen == [off, off, off, on, "probe"]


def test_opcheck(triton_device):
    blocks = Blocks.from_sizes([2, 1], triton_device)
    inputs = [x[:, :3].detach().clone().requires_grad_() for x in inputs_of(triton_device)]
    buffer = make_buffer(blocks, topk=1)
    sizes = (blocks.offsets, blocks.max_size, blocks.min_size)
    args = (*inputs, None, *sizes, *sizes, 1, 2, 0.3)
    # the buffers are written by the backward, of which the check of the forward's autograd knows nothing
    torch.library.opcheck(coarse_fine_fwd, (*args, buffer.record, buffer.probe, buffer.seed))
    detached = [x.detach() if isinstance(x, Tensor) else x for x in args]
    out, *saved = coarse_fine_fwd(*detached)
    torch.library.opcheck(coarse_fine_bwd, (out, *saved, *detached[:12], 0.3, buffer.seed, 3))


def test_compiled_it_is_one_node_and_fills_the_buffer(triton_device):
    torch._dynamo.reset()
    nodes: dict[str, list[str]] = {"forward": [], "backward": []}

    def compiler(graph, _, name):
        nodes[name] += [str(node.target) for node in graph.graph.nodes if "vsa_kernels" in str(node.target)]
        return make_boxed_func(graph.forward)

    forward, backward_ = (partial(compiler, name=name) for name in nodes)
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward_)
    blocks, inputs = Blocks.from_sizes(SIZES, triton_device), inputs_of(triton_device)
    buffers = [make_buffer(blocks, seed=5) for _ in range(2)]

    def call(*args):
        return operator(args[0].sin(), *args[1:]).out.square()

    compiled = torch.compile(call, backend=backend, fullgraph=True)
    grads = []
    for function, buffer in zip((call, compiled), buffers, strict=True):
        grads.append(torch.autograd.grad(function(*inputs, blocks, 2, buffer).sum(), inputs))
    assert nodes == {
        "forward": ["vsa_kernels.coarse_fine_fwd.default"],
        "backward": ["vsa_kernels.coarse_fine_bwd.default"],
    }
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    # a second step with other probes goes through the same graphs
    for step in (1, 2):
        assert (buffers[0].ratio > 0).all()
        assert torch.equal(buffers[0].record, buffers[1].record)
        assert torch.equal(buffers[0].probe, buffers[1].probe)
        for function, buffer in zip((call, compiled), buffers, strict=True):
            buffer.reseed(step)
            torch.autograd.grad(function(*inputs, blocks, 2, buffer).sum(), inputs)
    assert len(nodes["backward"]) == 1


def test_checkpointed(triton_device):
    blocks, inputs = Blocks.from_sizes(SIZES, triton_device), inputs_of(triton_device)
    buffers = [make_buffer(blocks) for _ in range(3)]

    def call(buffer, *args):
        return operator(*args, blocks, 2, buffer).out

    call(buffers[0], *inputs).sum().backward()
    checkpoint(partial(call, buffers[1]), *inputs, use_reentrant=False).sum().backward()
    # what is saved is moved elsewhere, the buffer is not
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        out = call(buffers[2], *inputs)
    out.sum().backward()
    for buffer in buffers[1:]:
        assert torch.equal(buffers[0].record, buffer.record)
        assert torch.equal(buffers[0].probe, buffer.probe)


@pytest.mark.parametrize(
    ("changes", "backend", "message"),
    [
        ({}, "gather", "recall needs backend triton, got gather"),
        ({"batch": 2}, "triton", r"recall must hold \[1, 2, 4\] rows of at least 4 blocks, got \[2, 2, 4\] of 4"),
        ({"heads": 1}, "triton", r"got \[1, 1, 4\] of 4"),
        ({"topk": 1}, "triton", r"at least 70 blocks, got \[1, 2, 70\] of 32"),
    ],
    ids=["backend", "batch", "heads", "capacity"],
)
def test_bad_input(changes, backend, message, triton_device):
    sizes = [1] * 70 if "topk" in changes else SIZES
    topk = 70 if "topk" in changes else 2
    blocks = Blocks.from_sizes(sizes, triton_device)
    q, k, v, gate = (torch.zeros(1, sum(sizes), h, 16, device=triton_device) for h in (2, 1, 1, 2))
    sides = {"q_blocks": blocks, "kv_blocks": blocks}
    with pytest.raises(ValueError, match=message):
        coarse_fine_attn(
            q, k, v, gate, None, **sides, topk=topk, backend=backend, recall=make_buffer(blocks, **changes)
        )

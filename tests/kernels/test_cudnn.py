"""Backend `cudnn`: its refusals, and the arguments that the package gets, here a stand-in that computes the definition.

On a Hopper GPU with the package the same cases run through the package itself.
"""

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from vsa_kernels import dispatch
from vsa_kernels.block_index import BlockIndex, Blocks
from vsa_kernels.block_sparse import block_sparse_attn, block_sparse_attn_backward
from vsa_kernels.coarse_fine import coarse_fine_attn
from vsa_kernels.testing import assert_right, assert_within_budget, define, make_case, run

from vsa.machine import describe_here

DIM = 128


def logits_of(q, k, index, counts, block, scale):
    """fp32 logits [B, H, L, S] of one block after the other, -inf where a block is not listed."""
    assert index.is_contiguous()
    assert index.dtype == torch.int32
    assert index.shape[:3] == (q.shape[0], q.shape[2], q.shape[1] // block)
    # neighbours of the list are read too, so that they must be blocks
    assert int(index.min()) >= 0
    assert int(index.max()) < k.shape[1] // block
    logits = torch.einsum("blhd,bshd->bhls", q.float(), k.float()) * scale
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    for b, h, n in torch.cartesian_prod(*map(torch.arange, index.shape[:3])).tolist():
        count = index.shape[3] if counts is None else int(counts[b, h, n])
        for j in index[b, h, n, :count].tolist():
            seen[b, h, n * block : (n + 1) * block, j * block : (j + 1) * block] = True
    return logits.masked_fill(~seen, -torch.inf)


class Package(ModuleType):
    """The package's two functions with its layout `bshd`, on any device."""

    def block_sparse_attention_forward(
        self, q, k, v, *, q2k_block_index, q2k_block_nums, sparse_block_size, softmax_scale, layout,
        allow_empty_block_nums,
    ):  # fmt: skip
        assert layout == "bshd"
        logits = logits_of(q, k, q2k_block_index, q2k_block_nums, sparse_block_size, softmax_scale)
        lse = torch.logsumexp(logits, -1)
        assert allow_empty_block_nums or bool(lse.isfinite().all())
        out = torch.einsum("bhls,bshd->blhd", (logits - lse.nan_to_num(neginf=0)[..., None]).exp(), v.float())
        return {"o_tensor": out.to(q.dtype), "lse_tensor": lse}

    def block_sparse_attention_backward(
        self, dout, q, k, v, out, lse, *, q2k_block_index, q2k_block_nums, sparse_block_size, softmax_scale, layout,
        dq_tensor, dk_tensor, dv_tensor,
    ):  # fmt: skip
        assert layout == "bshd"
        assert q.dtype == out.dtype == dout.dtype
        logits = logits_of(q, k, q2k_block_index, q2k_block_nums, sparse_block_size, softmax_scale)
        p = (logits - lse.nan_to_num(neginf=0)[..., None]).exp()
        dout, out, q, k, v = (x.float() for x in (dout, out, q, k, v))
        delta = (dout * out).sum(-1).transpose(1, 2)
        ds = p * (torch.einsum("blhd,bshd->bhls", dout, v) - delta[..., None]) * softmax_scale
        dq_tensor.copy_(torch.einsum("bhls,bshd->blhd", ds, k))
        dk_tensor.copy_(torch.einsum("bhls,blhd->bshd", ds, q))
        dv_tensor.copy_(torch.einsum("bhls,blhd->bshd", p, dout))


def has_package() -> bool:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return hopper and importlib.util.find_spec("cudnn") is not None


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def cudnn_device(request, monkeypatch) -> torch.device:
    if request.param == "cuda":
        if not has_package():
            pytest.skip("needs a Hopper GPU and nvidia-cudnn-frontend")
    else:
        monkeypatch.setitem(sys.modules, "cudnn", ModuleType("cudnn"))
        monkeypatch.setitem(sys.modules, "cudnn.block_sparse_attention", Package("cudnn.block_sparse_attention"))
        monkeypatch.setattr(dispatch, "_cudnn_refusal", lambda *_: None)
    return torch.device(request.param)


def case_of(device, block=64, q_blocks=3, kv_blocks=4, **how):
    how = {"batch": 1, "heads": 2, "kv_heads": 2, "head_dim": DIM, "dtype": torch.bfloat16, **how}
    case = make_case([block] * q_blocks, [block] * kv_blocks, device=device, **how)
    return replace(case, dlse=torch.zeros_like(case.dlse))


def run_cudnn(case):
    """As `run`, with no gradient of lse at all."""
    q, k, v = (x.detach().requires_grad_() for x in (case.q, case.k, case.v))
    out, lse = block_sparse_attn(q, k, v, case.index, **case.blocks, scale=case.scale, backend="cudnn")
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), case.dout), strict=True)) | {
        "out": out.detach(), "lse": lse.detach(),
    }  # fmt: skip


def equal_lists(case, count=2):
    """The case with lists of `count` blocks, a length that the host knows."""
    index = BlockIndex.from_dense(torch.rand(1, 1, case.q_blocks.num, case.kv_blocks.num, device=case.q.device) > 2)
    indices = torch.arange(count, dtype=torch.int32, device=case.q.device).expand_as(index.kv_indices[..., :count])
    counts = torch.full_like(index.kv_num_blocks, count)
    return replace(case, index=BlockIndex(kv_indices=indices, kv_num_blocks=counts, max_blocks=count, min_blocks=count))


@pytest.mark.parametrize("block", [64, 128])
def test_agrees_with_the_definition(cudnn_device, block):
    case = case_of(cudnn_device, block, density=0.3)
    assert int(case.index.kv_num_blocks.min()) == 0
    assert_right(case, run_cudnn(case))
    assert_right(equal_lists(case), run_cudnn(equal_lists(case)))
    # the comparison notices a wrong scale
    with pytest.raises(AssertionError):
        assert_right(case, run_cudnn(replace(case, scale=0.5)))


def test_one_list_for_all_heads_and_views(cudnn_device):
    case = case_of(cudnn_device, index_batch=1, index_heads=1)
    # q, k and v side by side in memory, as from one projection
    fused = torch.cat((case.q, case.k[:, : case.q.shape[1]], case.v[:, : case.q.shape[1]]), -1)
    q, k, v = fused.split(DIM, -1)
    blocks = {"q_blocks": case.q_blocks, "kv_blocks": case.q_blocks}
    index = BlockIndex.from_dense(torch.eye(3, dtype=torch.bool, device=cudnn_device)[None, None])
    case = replace(case, q=q, k=k, v=v, index=index, **blocks)
    assert_right(case, run_cudnn(case))


def test_empty_lists_of_no_capacity(cudnn_device):
    case = case_of(cudnn_device, density=0.0)
    nothing = replace(case.index, kv_indices=case.index.kv_indices[..., :0])
    got = run_cudnn(replace(case, index=nothing))
    assert bool((got["lse"] == -torch.inf).all())
    assert all(not bool(got[name].any()) for name in ("out", "dq", "dk", "dv"))


def test_total_lse_and_out_of_a_larger_softmax(cudnn_device):
    whole = case_of(cudnn_device, density=1.0, kv_blocks=4)
    exact, plain = define(whole), run(whole, "reference")
    size, half = 2 * 64, Blocks.from_sizes([64, 64], cudnn_device)
    index = BlockIndex.from_dense(torch.ones(1, 1, 3, 2, dtype=torch.bool, device=cudnn_device))
    parts = [
        block_sparse_attn_backward(
            *(whole.dout, exact["out"].float(), exact["lse"].float(), whole.q, whole.k[:, at], whole.v[:, at], index),
            q_blocks=whole.q_blocks, kv_blocks=half, backend="cudnn",
        )
        for at in (slice(0, size), slice(size, None))
    ]  # fmt: skip
    dq, (dk, dv) = parts[0][0] + parts[1][0], (torch.cat([p[i] for p in parts], 1) for i in (1, 2))
    for name, got in (("dq", dq), ("dk", dk), ("dv", dv)):
        assert_within_budget(got, plain[name], exact[name], name)
    with pytest.raises(AssertionError):
        assert_within_budget(parts[0][0], plain["dq"], exact["dq"], "dq")


def test_a_gradient_of_lse_is_refused(cudnn_device):
    case = case_of(cudnn_device)
    with pytest.raises(ValueError, match="backend cudnn has no gradient of lse: set backend=triton"):
        run(case, "cudnn")
    with pytest.raises(ValueError, match="no gradient of lse"):
        block_sparse_attn_backward(
            *(case.dout, case.q, case.dlse, case.q, case.k, case.v, case.index),
            **case.blocks, backend="cudnn", dlse=case.dlse,
        )  # fmt: skip


def test_compiles_whole(cudnn_device):
    case = case_of(cudnn_device, density=1.0)
    gates = torch.ones_like(case.q)

    def attend(q, k, v):
        how = {"q_blocks": case.q_blocks, "kv_blocks": case.kv_blocks, "topk": 2, "backend": "cudnn"}
        return coarse_fine_attn(q, k, v, gates, None, **how).out * 2

    results = []
    for call in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
        out = call(*leaves)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, case.dout)))
    for eager, compiled in zip(*results, strict=True):
        # the package sums dq in any order
        torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=2e-2)


def test_shapes_without_the_package(cudnn_device):
    case = case_of("meta")
    out, lse = block_sparse_attn(case.q, case.k, case.v, case.index, **case.blocks, backend="cudnn")
    assert out.shape == case.q.shape
    assert (lse.shape, lse.dtype) == ((1, 2, 3 * 64), torch.float32)


REFUSED = {
    "ragged": (
        lambda: make_case([64, 40], [64, 64], head_dim=DIM, dtype=torch.bfloat16),
        "takes equal blocks, got q_blocks of 40 to 64 tokens: set backend=triton",
    ),
    "block size": (
        lambda: make_case([32], [32], head_dim=DIM, dtype=torch.bfloat16),
        "takes blocks of 64 or of 128 tokens on both sides, got q_blocks of 32 and kv_blocks of 32 tokens: set",
    ),
    "two sizes": (
        lambda: make_case([128], [64], head_dim=DIM, dtype=torch.bfloat16),
        "got q_blocks of 128 and kv_blocks of 64 tokens",
    ),
    "heads": (lambda: case_of("cpu", kv_heads=1), "as many kv heads as query heads, got 2 and 1"),
    "kv_valid": (lambda: case_of("cpu", kv_valid=True), "takes no kv_valid: set backend=triton"),
    "masks": (lambda: case_of("cpu", fine=True), "takes no mask_bits in index: set backend=triton"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_calls_name_the_reason(monkeypatch, name):
    monkeypatch.setattr(dispatch, "_cudnn_refusal", lambda *_: None)
    make, reason = REFUSED[name]
    with pytest.raises(ValueError, match=f"^backend cudnn .*{reason}"):
        run(make(), "cudnn")


def test_gpu_package_dtype_and_head_dim_are_named(monkeypatch):
    here, there = torch.device("cpu"), torch.device("meta")

    def refusal(device, dtype=torch.bfloat16, head_dim=DIM) -> str:
        with pytest.raises(ValueError, match=r"^backend cudnn ") as error:
            dispatch.resolve_backend("cudnn", device, dtype, head_dim)
        return str(error.value)

    assert refusal(here).endswith("needs a GPU of compute capability 9.0, got cpu: set backend=triton")
    monkeypatch.setattr(dispatch, "_has", lambda package: False)
    assert refusal(there).endswith("needs the package nvidia-cudnn-frontend: pip install 'vsa-train[cudnn]'")
    monkeypatch.setattr(dispatch, "_has", lambda package: True)
    assert "takes bfloat16, got torch.float16" in refusal(there, torch.float16)
    assert "takes a head dim of 128, got 64: set backend=triton" in refusal(there, head_dim=64)
    assert dispatch.resolve_backend("cudnn", there, torch.bfloat16, DIM) == "cudnn"
    # never by itself
    assert dispatch.resolve_backend(None, here, torch.bfloat16, DIM) == "gather"
    assert any(line.startswith("backend   cudnn on cpu: does not run: backend cudnn needs") for line in describe_here())

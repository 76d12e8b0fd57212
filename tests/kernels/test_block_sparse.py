"""`block_sparse_attn` against a dense masked softmax in fp64, and the properties that follow from its meaning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from vsa_kernels import BlockIndex, Blocks, block_sparse_attn, merge_attn
from vsa_kernels.block_sparse import gather, reference
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.op import block_sparse_bwd, block_sparse_fwd
from vsa_kernels.testing import Case, assert_within_budget, define, expand_mask, make_case, run, summed_terms

from tests.sizes import SIZES

BACKENDS = ("reference", "gather")
NAMES = ("out", "lse", "dq", "dk", "dv")
RAGGED = dict(q_sizes=[5, 9, 3, 10, 1], kv_sizes=[7, 2, 11, 1, 6, 4], batch=2, heads=4, kv_heads=2)

sizes = st.lists(st.integers(1, 7), min_size=1, max_size=6) | st.lists(SIZES.block, min_size=1, max_size=2)
uniform = st.builds(lambda size, n: [size] * n, st.integers(1, 6), st.integers(1, 6))


@st.composite
def cases(draw) -> Case:
    group, kv_heads, batch = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    return make_case(
        draw(sizes | uniform),
        draw(sizes | uniform),
        batch=batch,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 4, 7])),
        density=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])),
        index_batch=draw(st.sampled_from([1, batch])),
        index_heads=draw(st.sampled_from([1, group * kv_heads])),
        fine=draw(st.booleans()),
        kv_valid=draw(st.booleans()),
        dtype=torch.float64,
        seed=draw(st.integers(0, 1 << 20)),
    )


@settings(max_examples=150, deadline=None)
@given(cases())
def test_both_backends_are_the_dense_masked_softmax(case):
    exact = define(case)
    for backend in BACKENDS:
        actual = run(case, backend)
        for name in NAMES:
            torch.testing.assert_close(actual[name], exact[name], rtol=1e-9, atol=1e-10, msg=f"{backend} {name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fine", [False, True], ids=["plain", "fine"])
def test_error_stays_in_the_budget_of_the_dtype(dtype, fine, device):
    case = make_case(**RAGGED, head_dim=32, fine=fine, kv_valid=fine, dtype=dtype, device=device)
    exact, plain, actual = define(case), run(case, "reference"), run(case, "gather")
    for name in NAMES:
        assert actual[name].dtype == (torch.float32 if name == "lse" else dtype)
        assert_within_budget(actual[name], plain[name], exact[name], name)


def _drop_a_block(case: Case) -> Case:
    counts = case.index.kv_num_blocks.clone()
    counts[0, 0, counts[0, 0].argmax()] -= 1
    return replace(case, index=replace(case.index, kv_num_blocks=counts))


def _swap_an_index(case: Case) -> Case:
    mask = case.index.to_dense(case.kv_blocks.num)
    row = next(r for r in range(case.q_blocks.num) if 0 < int(mask[0, 0, r].sum()) < case.kv_blocks.num)
    indices = case.index.kv_indices.clone()
    indices[0, 0, row, 0] = (~mask[0, 0, row]).nonzero()[0, 0]
    return replace(case, index=replace(case.index, kv_indices=indices))


@pytest.mark.parametrize(
    "damage", [_drop_a_block, _swap_an_index, lambda c: replace(c, scale=1.0)], ids=["drop", "swap", "scale"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_budget_notices_damage(damage, dtype, device):
    case = make_case(**RAGGED, head_dim=32, dtype=dtype, device=device)
    exact, plain, wrong = define(case), run(case, "reference"), run(damage(case), "gather")
    for name in NAMES:
        with pytest.raises(AssertionError, match=name):
            assert_within_budget(wrong[name], plain[name], exact[name], name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend):
    case = make_case([2, 3], [1, 3, 2], heads=2, fine=True, density=0.8, head_dim=3, dtype=torch.float64, seed=2)
    some = expand_mask(case).any(-1)
    assert some.any()

    def f(q, k, v):
        mask = dict(q_blocks=case.q_blocks, kv_blocks=case.kv_blocks, backend=backend)
        out, lse = block_sparse_attn(q, k, v, case.index, **mask)
        return out, lse[some]

    assert torch.autograd.gradcheck(f, tuple(x.requires_grad_() for x in (case.q, case.k, case.v)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scale_of_0_takes_the_mean(backend, device):
    case = replace(make_case(**RAGGED, fine=True, dtype=torch.float64, device=device), scale=0.0)
    exact, actual = define(case), run(case, backend)
    for name in NAMES:
        torch.testing.assert_close(actual[name], exact[name], rtol=1e-12, atol=1e-12, msg=f"{backend} {name}")
    assert torch.allclose(actual["lse"].exp(), expand_mask(case).sum(-1).to(actual["lse"]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_block_listed_is_dense_attention(backend, device):
    case = make_case([4] * 6, [4] * 5, heads=2, kv_heads=2, batch=2, density=1.0, device=device)
    q, k, v = (x.transpose(1, 2) for x in (case.q, case.k, case.v))
    dense = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    torch.testing.assert_close(run(case, backend)["out"], dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_blocks(backend, device):
    case = make_case([3, 4], [5, 2], batch=2, heads=2, density=0.0, device=device)
    actual = run(case, backend)
    assert (actual["out"] == 0).all()
    assert (actual["lse"] == -torch.inf).all()
    assert all((actual[name] == 0).all() for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_undefined_lse_gradient_of_an_empty_row_stays_there(backend, device):
    case = make_case([3, 4], [5, 2], density=1.0, device=device)
    counts = torch.tensor([[[0, 2]]], dtype=torch.int32, device=device)
    case = replace(case, index=replace(case.index, kv_num_blocks=counts))
    clean = run(case, backend)
    # what autograd of logaddexp(-inf, -inf) hands back
    dlse = case.dlse.clone()
    dlse[..., :3] = torch.nan
    actual = run(replace(case, dlse=dlse), backend)
    for name in NAMES:
        assert torch.equal(actual[name], clean[name])


def assert_alone_is_with_zeros(case: Case, backend: str) -> None:
    """An output without a gradient counts as one with a gradient of 0, and without any launch for zeros."""
    for used in ("out", "lse"):
        leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
        out, lse = block_sparse_attn(*leaves, case.index, **case.blocks, kv_valid=case.kv_valid, backend=backend)
        x, grad = (out, case.dout) if used == "out" else (lse, case.dlse.to(lse.dtype))
        alone = torch.autograd.grad(x, leaves, grad)
        zeros = {"out": {"dlse": torch.zeros_like(case.dlse)}, "lse": {"dout": torch.zeros_like(case.dout)}}[used]
        whole = run(replace(case, **zeros), backend)
        for name, actual in zip(("dq", "dk", "dv"), alone, strict=True):
            assert torch.equal(actual, whole[name])
            # dv has nothing of dlse
            if name != "dv" or used == "lse":
                assert not torch.equal(actual, run(case, backend)[name])


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_that_are_not_used(backend, device):
    assert_alone_is_with_zeros(make_case(**RAGGED, density=0.6, kv_valid=True, device=device), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_unselected_blocks_get_exactly_zero_gradient(backend, device):
    case = make_case([4] * 3, [4] * 4, heads=2, kv_heads=1, density=1.0, device=device)
    mask = torch.tensor([True, False, True, False], device=device).expand(1, 1, 3, 4)
    actual = run(replace(case, index=BlockIndex.from_dense(mask)), backend)
    for name in ("dk", "dv"):
        blocks = actual[name].view(4, -1)
        assert (blocks[1::2] == 0).all()
        assert (blocks[::2] != 0).any(-1).all()


def test_nan_reaches_only_the_rows_that_select_its_block(device):
    case = make_case([4, 4, 3, 4], [5, 4, 5], heads=2, kv_heads=2, density=0.5, seed=3, device=device)
    exact = define(case)
    bad_block = slice(5, 9)
    k, v = case.k.clone(), case.v.clone()
    k[:, bad_block, 0], v[:, bad_block, 0] = torch.nan, torch.nan
    actual = run(replace(case, k=k, v=v), "gather")
    nan_queries = expand_mask(case)[..., bad_block].any(-1).to(device)
    assert nan_queries[:, 0].any()
    assert not nan_queries[:, 0].all()
    nan_queries[:, 1] = False
    assert torch.equal(actual["lse"].isnan(), nan_queries)
    assert torch.equal(actual["out"].isnan().all(-1).transpose(1, 2), nan_queries)
    assert torch.equal(actual["dq"].isnan().any(-1).transpose(1, 2), nan_queries)
    clean_queries = ~nan_queries
    torch.testing.assert_close(actual["lse"][clean_queries], exact["lse"][clean_queries].float(), rtol=1e-5, atol=1e-5)
    # the other head never saw it
    for name in ("dk", "dv"):
        assert not actual[name][:, :, 1].isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_past_kv_valid_may_hold_anything(backend, device):
    case = make_case(**RAGGED, kv_valid=True, device=device)
    assert case.kv_valid is not None
    block = torch.repeat_interleave(torch.arange(case.kv_blocks.num, device=device), case.kv_blocks.sizes)
    place = torch.arange(len(block), device=device) - case.kv_blocks.offsets[block]
    missing = place >= case.kv_valid[:, block]
    k, v = (x.masked_fill(missing[..., None, None], torch.nan) for x in (case.k, case.v))
    clean, actual = run(case, backend), run(replace(case, k=k, v=v), backend)
    for name in NAMES:
        assert torch.equal(actual[name], clean[name])
    assert (actual["dk"][missing] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits(backend, device):
    case = make_case(**RAGGED, device=device)
    case = replace(case, q=case.q * 100, k=case.k * 100)
    exact, actual = define(case), run(case, backend)
    assert exact["lse"][exact["lse"].isfinite()].abs().max() > 1e4
    torch.testing.assert_close(actual["out"].double(), exact["out"], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(actual["lse"].double(), exact["lse"], rtol=1e-5, atol=1e-2)
    assert all(actual[name].isfinite().all() for name in ("dq", "dk", "dv"))


def _wrong_gradients(case: Case, backend: str) -> dict[str, dict[str, torch.Tensor]]:
    """What backwards give that round the logits or their lse to half precision: large ones lose whole units there."""
    dim = case.q.shape[-1]
    mask = BlockMask(index=case.index, q_blocks=case.q_blocks, kv_blocks=case.kv_blocks, kv_valid=None)
    args = (case.q, case.k, case.v, *mask.flatten(), dim**-0.5, backend)
    out, lse = block_sparse_fwd(*args)
    grads = block_sparse_bwd(case.dout, case.dlse, out, lse.to(torch.bfloat16).float(), *args)
    # the scale multiplied into q, as a kernel may be tempted to
    factor = 1.44 * dim**-0.5
    results = run(replace(case, q=(case.q * factor).to(torch.bfloat16).to(case.q.dtype), scale=1 / 1.44), backend)
    results["dq"] = results["dq"] * factor
    names = ("dq", "dk", "dv")
    return {"lse": dict(zip(names, grads, strict=True)), "scale": {name: results[name] for name in names}}


@pytest.mark.parametrize("head_dim", [64, 128])
def test_backward_of_large_activations(head_dim, device):
    """q and k of 30 standard deviations, logits of some thousands, in bf16 against fp64."""
    sides = {"heads": 2, "kv_heads": 1, "head_dim": head_dim, "density": 0.8, "dtype": torch.bfloat16}
    case = make_case([64, 40, 64], [64, 64, 21], **sides, device=device)
    case = replace(case, q=case.q * 30, k=case.k * 30)
    exact, plain, actual, terms = define(case), run(case, "reference"), run(case, "gather"), summed_terms(case)
    assert exact["lse"].abs().max() > 2000
    eps = torch.finfo(torch.bfloat16).eps
    for name in NAMES:
        assert_within_budget(actual[name], plain[name], exact[name], name, terms[name])
        if name != "lse":
            # the reference has no other to compare with: what it sums is rounded once before and once after
            assert (plain[name] - exact[name]).abs().max() <= eps * terms[name], name
    for wrong in _wrong_gradients(case, "gather").values():
        for name, x in wrong.items():
            with pytest.raises(AssertionError, match=name):
                assert_within_budget(x, plain[name], exact[name], name, terms[name])
    for name, x in _wrong_gradients(case, "reference")["lse"].items():
        assert (x - exact[name]).abs().max() > eps * terms[name], name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_reference_rounds_the_gradient_of_the_logits(dtype):
    """To the inputs' dtype, as a fused kernel does before its second products: all budgets are multiples of that error.

    Two queries and two keys without a common direction: all logits 0, and with an lse of 0 all p are 1, so that the
    gradient of a logit is dout v - delta. With u = 2^-10 these are 1 - 3u and 1 + 5u for the first query, which bf16
    rounds to 1 - 4u and 1 + 8u, and 1 and 1 + 8u for the second; what is summed up from them is exact.
    """
    u = 2.0**-10
    q, k = (torch.tensor(x, dtype=dtype).view(1, 2, 1, 2) for x in ([0, 1, 0, -1], [-1, 0, 1, 0]))
    v, dout = (torch.tensor(x, dtype=dtype).view(1, 2, 1, 2) for x in ([1, 0, 1 + 8 * u, 0], [1, 0, 1, 0]))
    delta = torch.tensor([3 * u, 0]).view(1, 1, 2)
    blocks = Blocks.from_sizes([2])
    index = BlockIndex.from_dense(torch.ones(1, 1, 1, 1, dtype=torch.bool))
    mask = BlockMask(index=index, q_blocks=blocks, kv_blocks=blocks, kv_valid=None)
    dq, dk, dv = reference.backward(dout, delta, torch.zeros(1, 1, 2), q, k, v, mask, 1.0)
    rounded = dtype == torch.bfloat16
    # its gradients' difference, and that to the other query's
    assert dq.flatten().tolist() == [12 * u if rounded else 8 * u, 0, 8 * u, 0]
    assert dk.flatten().tolist() == [0, -4 * u if rounded else -3 * u, 0, 0 if rounded else -3 * u]
    assert dv.flatten().tolist() == [2, 0, 2, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_permuting_kv_blocks_changes_nothing(backend, device):
    case = make_case([3] * 4, [5] * 6, heads=2, kv_heads=2, dtype=torch.float64, device=device)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0)).to(device)
    k, v = (x.unflatten(1, (6, 5))[:, order].flatten(1, 2) for x in (case.k, case.v))
    index = BlockIndex.from_dense(case.index.to_dense(6)[..., order])
    actual, expected = run(replace(case, k=k, v=v, index=index), backend), run(case, backend)
    torch.testing.assert_close(actual["out"], expected["out"])
    torch.testing.assert_close(actual["dq"], expected["dq"])
    torch.testing.assert_close(actual["dk"], expected["dk"].unflatten(1, (6, 5))[:, order].flatten(1, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_permuting_query_blocks_permutes_the_output(backend, device):
    case = make_case([3] * 4, [5] * 6, heads=2, kv_heads=2, dtype=torch.float64, device=device)
    order = torch.tensor([2, 0, 3, 1], device=device)
    q, dout = (x.unflatten(1, (4, 3))[:, order].flatten(1, 2) for x in (case.q, case.dout))
    dlse = case.dlse.unflatten(2, (4, 3))[:, :, order].flatten(2, 3)
    index = BlockIndex.from_dense(case.index.to_dense(6)[:, :, order])
    actual, expected = run(replace(case, q=q, dout=dout, dlse=dlse, index=index), backend), run(case, backend)
    torch.testing.assert_close(actual["out"], expected["out"].unflatten(1, (4, 3))[:, order].flatten(1, 2))
    torch.testing.assert_close(actual["dv"], expected["dv"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_over_disjoint_blocks_merge_by_their_lse(backend, device):
    case = make_case([4, 3], [5, 2, 3, 4], heads=2, kv_heads=2, density=1.0, dtype=torch.float64, device=device)
    first = torch.tensor([[[[1, 0, 1, 0], [0, 1, 1, 0]]]], dtype=torch.bool, device=device)
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.v))
    blocks = dict(q_blocks=case.q_blocks, kv_blocks=case.kv_blocks, backend=backend)
    parts = [block_sparse_attn(q, k, v, BlockIndex.from_dense(m), **blocks) for m in (first, ~first)]
    out, _ = merge_attn(*zip(*parts, strict=True))
    grads = torch.autograd.grad(out, (q, k, v), case.dout)
    whole = run(replace(case, dlse=torch.zeros_like(case.dlse)), backend)
    torch.testing.assert_close(out, whole["out"])
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        torch.testing.assert_close(grad, whole[name])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sample_alone_equals_itself_in_a_batch(backend, device):
    case = make_case(**RAGGED, kv_valid=True, device=device)
    assert case.kv_valid is not None
    index = replace(case.index, kv_indices=case.index.kv_indices[1:], kv_num_blocks=case.index.kv_num_blocks[1:])
    tensors = {name: getattr(case, name)[1:] for name in ("q", "k", "v", "dout", "dlse", "kv_valid")}
    alone, both = run(replace(case, index=index, **tensors), backend), run(case, backend)
    for name in NAMES:
        torch.testing.assert_close(alone[name], both[name][1:], rtol=1e-6, atol=1e-6)


def test_gather_repeats_bit_for_bit(device):
    case = make_case([8] * 24, [8] * 24, batch=2, heads=4, kv_heads=2, density=0.4, device=device)
    first, second = run(case, "gather"), run(case, "gather")
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


@pytest.mark.parametrize("backend", ["reference", "gather"])
def test_the_layout_of_the_gradient_changes_no_bit(backend, device):
    case = make_case([9, 16, 4], [8, 11, 7, 8], heads=2, head_dim=24, density=0.9, device=device)
    last = case.dout.transpose(-1, -2).contiguous().transpose(-1, -2)
    once = case.dout[..., :1, :].expand_as(case.dout)
    for dout in (last, once):
        even, odd = (run(replace(case, dout=x), backend) for x in (dout.contiguous(), dout))
        assert all(torch.equal(even[name], odd[name]) for name in even)
    # control
    other = run(replace(case, dout=last * 1.01), backend)
    assert not torch.equal(other["dq"], run(case, backend)["dq"])


def test_known_bounds_change_nothing(device):
    case = make_case([4] * 5, [4] * 6, heads=2, density=1.0, device=device)
    indices = torch.stack([torch.randperm(6)[:6] for _ in range(10)]).view(1, 2, 5, 6)
    indices = torch.cat([indices[..., :3].sort(-1).values, indices[..., 3:]], -1).int().to(device)
    counts = torch.full((1, 2, 5), 3, dtype=torch.int32, device=device)
    index = BlockIndex(kv_indices=indices, kv_num_blocks=counts)
    expected = run(replace(case, index=index), "gather")
    for bounds in ({"max_blocks": 3, "min_blocks": 3}, {"max_blocks": 5, "min_blocks": 0}):
        actual = run(replace(case, index=replace(index, **bounds)), "gather")
        for name in NAMES:
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-6, atol=1e-6)


def test_chunks_do_not_change_the_result(monkeypatch):
    case = make_case([4, 3, 4, 2, 4], [4] * 6, batch=2, heads=2, kv_heads=1, dtype=torch.float64)
    expected = run(case, "gather")
    monkeypatch.setattr("vsa_kernels.block_sparse.gather._CHUNK_BYTES_CPU", 1)
    actual = run(case, "gather")
    for name in NAMES:
        torch.testing.assert_close(actual[name], expected[name])


def test_extra_memory_is_bounded():
    class Largest(TorchDispatchMode):
        """Bytes of the largest tensor any operation makes."""

        def __init__(self):
            super().__init__()
            self.bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple) else (result,):
                if isinstance(x, torch.Tensor):
                    self.bytes = max(self.bytes, x.numel() * x.element_size())
            return result

    case = make_case([16] * 128, [16] * 128, density=0.25, dtype=torch.float32)
    mask = BlockMask(index=case.index, q_blocks=case.q_blocks, kv_blocks=case.kv_blocks, kv_valid=None)
    peak_bytes = {}
    for backend in (reference, gather):
        with Largest() as largest:
            out, lse = backend.forward(case.q, case.k, case.v, mask, 0.25)
            delta = (case.dout * out).sum(-1).transpose(1, 2)
            backend.backward(case.dout, delta, lse, case.q, case.k, case.v, mask, 0.25)
        peak_bytes[backend] = largest.bytes
    assert peak_bytes[reference] == 4 * 2048 * 2048
    assert peak_bytes[gather] <= gather._CHUNK_BYTES_CPU


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_output_may_be_used(backend):
    case = make_case([4, 3], [5, 2], density=1.0)
    q = case.q.requires_grad_()
    blocks = dict(q_blocks=case.q_blocks, kv_blocks=case.kv_blocks, backend=backend)
    out, _ = block_sparse_attn(q, case.k, case.v, case.index, **blocks)
    (dq,) = torch.autograd.grad(out, q, case.dout)
    expected = run(replace(case, dlse=torch.zeros_like(case.dlse)), backend)["dq"]
    torch.testing.assert_close(dq, expected)


def _with_index(**changes):
    return lambda c: replace(c, index=replace(c.index, **changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, k=c.k[:, :-1]), "k and v must have the same shape"),
        (lambda c: replace(c, k=c.k[..., :-1], v=c.v[..., :-1]), "have the same batch and head dim"),
        (lambda c: replace(c, q=c.q[:, :, :3]), "multiple of kv heads, got 3 and 2"),
        (lambda c: replace(c, k=c.k.double()), "have the same float dtype"),
        (lambda c: replace(c, q_blocks=Blocks.from_sizes([28])), "1 rows, one per query block, got 5"),
        (_with_index(kv_num_blocks=torch.ones(1, dtype=torch.int32)), "kv_num_blocks must be"),
        (_with_index(mask_bits=torch.ones(1, 10, 11, dtype=torch.bool)), "needs kv_num_full_blocks"),
        (lambda c: replace(c, kv_valid=torch.ones(1, 6, dtype=torch.int32)), r"kv_valid must be \[2, 6\]"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        run(change(make_case(**RAGGED)), "gather")


def test_a_device_mix_is_refused():
    case = make_case([2], [2])
    with pytest.raises(ValueError, match="kv_num_blocks must be on cpu like q, got meta"):
        run(replace(case, index=replace(case.index, kv_num_blocks=case.index.kv_num_blocks.to("meta"))), "gather")


def _values(name: str, at: tuple, value: int):
    def change(case: Case) -> Case:
        x = getattr(case.index, name).clone()
        x[at] = value
        return replace(case, index=replace(case.index, **{name: x}))

    return change


def _bounds(most: int | None, least: int | None):
    return lambda c: replace(c, index=replace(c.index, max_blocks=most, min_blocks=least))


def _offsets(values: list[int]):
    return lambda c: replace(c, kv_blocks=replace(c.kv_blocks, offsets=torch.tensor(values, dtype=torch.int32)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c, None),
        (_values("kv_indices", (0, 1, 2, 1), 6), r"kv_indices must be in 0\.\.5, got 0\.\.6"),
        (_values("kv_indices", (0, 1, 2, 0), -1), "got -1.."),
        (_values("kv_indices", (1, 0, 1, 1), 0), r"must ascend in a row, got 0 then 0 in row \[1, 0, 1\]"),
        (_values("kv_num_blocks", (0, 0, 0), 7), "kv_num_blocks must be in 0..6, got 6..7"),
        (_bounds(6, 6), None),
        (_bounds(7, None), "max_blocks must be in 6..6 as kv_num_blocks is, got 7"),
        (_bounds(1, 1), "max_blocks must be in 6..6 .* got 1"),
        (_bounds(6, 7), "min_blocks must be in 0..6 .* got 7"),
        (_bounds(None, -1), "min_blocks must be in 0..6 .* got -1"),
        (_offsets([0, 7, 9, 8, 21, 27, 31]), "kv_blocks.offsets must ascend, got 9 then 8 at block 2"),
        (_offsets([0, 7, 9, 20, 21, 27, 30]), "kv_blocks.offsets must run from 0 to 31, got 0 to 30"),
        (_offsets([0, 6, 9, 20, 21, 27, 31]), None),
        (_offsets([0, 5, 9, 18, 21, 27, 31]), "kv_blocks must have max_size 9 and min_size 3"),
    ],
)
def test_values_are_checked_when_asked(change, message):
    case = make_case(**RAGGED, density=1.0)
    case = change(case)
    mask = dict(q_blocks=case.q_blocks, kv_blocks=case.kv_blocks, backend="reference", check_values=True)
    if message is None:
        block_sparse_attn(case.q, case.k, case.v, case.index, **mask)
        return
    with pytest.raises(ValueError, match=message):
        block_sparse_attn(case.q, case.k, case.v, case.index, **mask)


def test_values_of_fine_masks_are_checked():
    case = make_case(**RAGGED, fine=True, kv_valid=True)
    mask = dict(q_blocks=case.q_blocks, kv_blocks=case.kv_blocks, backend="reference", check_values=True)
    block_sparse_attn(case.q, case.k, case.v, case.index, kv_valid=case.kv_valid, **mask)
    with pytest.raises(ValueError, match="kv_valid must be between"):
        block_sparse_attn(case.q, case.k, case.v, case.index, kv_valid=case.kv_valid + 9, **mask)
    index = case.index
    assert index.mask_ids is not None
    assert index.mask_bits is not None
    for broken, message in (
        (replace(index, mask_ids=index.mask_ids + len(index.mask_bits)), "mask_ids must be in 0.."),
        (replace(index, mask_ids=index.mask_ids - len(index.mask_bits)), "mask_ids must be in 0.."),
        (replace(index, kv_num_full_blocks=index.kv_num_blocks + 1), "kv_num_full_blocks must"),
        (
            replace(index, kv_num_full_blocks=(index.kv_num_blocks + 1).clamp(max=6)),
            r"full_blocks must be .* got -1\.\.",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            block_sparse_attn(case.q, case.k, case.v, broken, **mask)


def test_wrong_bounds_are_wrong_numbers_without_the_check():
    """What the check is for: the backends trust the bounds."""
    case = make_case(**RAGGED, density=1.0)
    wrong = _bounds(1, 1)(case)
    assert not torch.allclose(run(wrong, "gather")["out"], run(case, "gather")["out"], atol=0.1)


def test_a_named_backend_is_never_replaced():
    with pytest.raises(ValueError, match=r"reference, gather, triton, cudnn or None .* got 'flash'"):
        run(make_case([2], [2]), "flash")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c, "needs a CUDA device of capability 8.0 or newer"),
        (lambda c: c.to(torch.float64), "takes bfloat16, float16 and float32, got torch.float64"),
        (lambda c: make_case([2], [2], head_dim=257), "head dim of at most 256, got 257"),
    ],
    ids=["device", "dtype", "head_dim"],
)
def test_triton_says_why_it_cannot_run(change, reason, monkeypatch):
    monkeypatch.setattr("vsa_kernels.dispatch._can_launch", lambda device: False)
    with pytest.raises(ValueError, match=f"backend triton .*{reason}"):
        run(change(make_case([2], [2])), "triton")

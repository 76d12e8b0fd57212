"""Fine masks in the Triton kernels: the packed words bit by bit, results and gradients against the fp64 definition,
and every damage that a mask can suffer on its way.

In the interpreter the problems are small and fp32; on a GPU they are bf16 with the tiles of production.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from vsa_kernels import BlockIndex, Blocks, block_sparse_attn
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.op import block_sparse_bwd, block_sparse_fwd
from vsa_kernels.testing import (
    Case,
    assert_right,
    assert_within_budget,
    define,
    expand_mask,
    make_case,
    run,
    summed_terms,
)

from tests.kernels.interpreted import further, fuzz

NAMES = ("out", "lse", "dq", "dk", "dv")


def half(device: torch.device) -> torch.dtype:
    # the interpreter is wrong in bf16
    return torch.float32 if device.type == "cpu" else torch.bfloat16


@fuzz(4, 30)
@given(st.integers(1, 4), st.integers(1, 140), st.integers(1, 140), st.booleans(), st.integers(0, 99))
def test_packed_words(triton_device, masks, rows, columns, transposed, seed):
    from vsa_kernels.block_sparse.triton_masks import pack_words

    bits = torch.rand(masks, rows, columns, generator=torch.Generator().manual_seed(seed)) < 0.5
    device_bits = bits.to(triton_device)
    if transposed:
        device_bits = device_bits.transpose(1, 2).contiguous().transpose(1, 2)
    words = pack_words(device_bits).cpu()
    assert words.shape == (masks, -(-columns // 64), rows)
    unpacked_bits = (words[..., None] >> torch.arange(64)) & 1
    # [masks, words, rows, 64] -> [masks, rows, words * 64]
    unpacked_bits = unpacked_bits.transpose(1, 2).flatten(2).bool()
    assert torch.equal(unpacked_bits[..., :columns], bits)
    assert not unpacked_bits[..., columns:].any()


SIZES = [
    ([16, 16], [16, 16, 16]),
    ([128, 128], [64, 64]),
    ([64, 64], [64, 64, 64]),
    ([130, 70], [100, 130, 7]),
    ([256, 256], [128, 128]),
    ([60, 3, 55], [200, 1, 150]),
    ([16, 7, 16], [8, 8, 8, 5]),
]


@pytest.mark.parametrize(
    ("q_sizes", "kv_sizes", "valid"),
    [([40, 9], [130, 5], True), *(further(*sizes, valid) for sizes in SIZES for valid in (False, True))],
    ids=str,
)
def test_block_sizes(q_sizes, kv_sizes, valid, triton_device):
    """Blocks of several tiles, ragged ones, grouped heads, one index for all samples or heads, shortened blocks."""
    small = triton_device.type == "cpu"
    case = make_case(
        *(q_sizes, kv_sizes),
        batch=1 if small else 2,
        heads=2 if small else 4,
        kv_heads=1 if small else 2,
        head_dim=16 if small else 64,
        density=0.8,
        index_batch=1,
        index_heads=1 if valid else None,
        fine=True,
        kv_valid=valid,
        dtype=half(triton_device),
        device=triton_device,
        seed=2,
    )
    assert_right(case, run(case, "triton"))


@pytest.mark.parametrize("head_dim", [48, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_head_dims(head_dim, dtype, triton_device):
    if triton_device.type == "cpu":
        pytest.skip("the tiles of one head dim are those of the next in the interpreter")
    sides = {"heads": 4, "kv_heads": 2, "head_dim": head_dim, "fine": True, "dtype": dtype, "device": triton_device}
    for sizes in (([64, 64, 64], [64, 64]), ([128, 70], [64, 21, 64])):
        case = make_case(*sizes, density=0.8, **sides)
        assert_right(case, run(case, "triton"), str(sizes))


def masked(case: Case, bits: Tensor, ids: Tensor, full: int = 0) -> Case:
    """The case with every block listed by every row, after `full` entries with masks `bits[ids]`, ids `[Nq, Nkv]`."""
    num_q, num_kv = case.q_blocks.num, case.kv_blocks.num
    at = case.q.device
    lists = torch.arange(num_kv, dtype=torch.int32).repeat(1, 1, num_q, 1)
    counts = torch.full((1, 1, num_q), num_kv, dtype=torch.int32)
    index = BlockIndex(
        kv_indices=lists.to(at),
        kv_num_blocks=counts.to(at),
        kv_num_full_blocks=torch.full_like(counts, full).to(at),
        mask_ids=ids.int().expand(1, 1, -1, -1).contiguous().to(at),
        mask_bits=bits.to(at),
    )
    return replace(case, index=index)


def windows(case: Case, window: int) -> Case:
    """A band over the whole sequence: each query sees `window` keys around its own place."""
    num_q, num_kv = case.q_blocks.num, case.kv_blocks.num
    q, kv = case.q_blocks.max_size, case.kv_blocks.max_size
    place_q, place_kv = torch.arange(num_q * q), torch.arange(num_kv * kv)
    first = (place_q - window // 2).clamp(0, num_kv * kv - window)[:, None]
    mask = (place_kv >= first) & (place_kv < first + window)
    blocks = mask.view(num_q, q, num_kv, kv).transpose(1, 2)
    whole, some = blocks.all(-1).all(-1), blocks.any(-1).any(-1)
    bits, ids = blocks.flatten(0, 1).unique(dim=0, return_inverse=True)
    ids = ids.view(num_q, num_kv)
    lists, mask_ids = (torch.full((1, 1, num_q, num_kv), 1 << 30, dtype=torch.int32) for _ in range(2))
    for n in range(num_q):
        full, part = (x[n].nonzero().squeeze(-1) for x in (whole, some & ~whole))
        both = torch.cat([full, part])
        lists[0, 0, n, : len(both)] = both.int()
        mask_ids[0, 0, n, len(full) : len(both)] = ids[n, part].int()
    counts, full = (x.sum(-1, dtype=torch.int32).view(1, 1, -1) for x in (some, whole))
    tensors = {"kv_indices": lists, "kv_num_blocks": counts, "kv_num_full_blocks": full, "mask_ids": mask_ids}
    index = BlockIndex(**{name: x.to(case.q.device) for name, x in tensors.items()}, mask_bits=bits.to(case.q.device))
    case = replace(case, index=index)
    assert torch.equal(expand_mask(case)[0, 0], mask)
    return case


@pytest.mark.parametrize("window", [20, further(5), further(40)])
def test_windows(window, triton_device):
    """A neighborhood: a row has full blocks and masked ones on both sides of them."""
    size = 16 if triton_device.type == "cpu" else 64
    sides = {"heads": 2, "kv_heads": 1, "head_dim": 16 if size == 16 else 128}
    case = make_case([size] * 4, [size] * 4, **sides, dtype=half(triton_device), device=triton_device)
    case = windows(case, window * size // 16)
    assert_right(case, run(case, "triton"))


def test_queries_that_see_nothing(triton_device):
    size = 16 if triton_device.type == "cpu" else 64
    case = make_case([size] * 3, [size] * 2, dtype=half(triton_device), device=triton_device)
    # the first block's queries see nothing, half of the second's everything, the last key is seen by none
    bits = torch.ones(3, size, size, dtype=torch.bool)
    bits[0], bits[1, size // 2 :], bits[2, :, -1] = False, False, False
    case = masked(case, bits, torch.tensor([[0, 0], [1, 0], [2, 2]]))
    actual = run(case, "triton")
    assert_right(case, actual)
    blind = ~expand_mask(case).any(-1)[0, 0]
    assert int(blind.sum()) == size + size // 2
    assert (actual["out"][:, blind] == 0).all()
    assert (actual["dq"][:, blind] == 0).all()
    assert (actual["lse"][..., blind] == -torch.inf).all()
    for name in ("dk", "dv"):
        unseen = [*range(size + size - 1, 2 * size)]
        assert (actual[name][:, unseen] == 0).all()
    # the gradient of a lse of -inf may be anything
    dlse = case.dlse.masked_fill(blind.to(triton_device), torch.nan)
    again = run(replace(case, dlse=dlse), "triton")
    assert all(torch.equal(again[name], actual[name]) for name in NAMES)


@pytest.mark.parametrize("full", [further(0), further(1), further(3)])
def test_masks_that_hide_nothing_change_no_bit(full, triton_device):
    sizes = ([16, 9, 16], [16, 16, 5]) if triton_device.type == "cpu" else ([64, 50, 64], [64, 64, 13])
    case = make_case(*sizes, heads=2, kv_heads=1, density=1.0, dtype=half(triton_device), device=triton_device)
    expected = run(case, "triton")
    bits = torch.ones(1, case.q_blocks.max_size, case.kv_blocks.max_size, dtype=torch.bool)
    actual = run(masked(case, bits, torch.zeros(3, 3), full), "triton")
    if triton_device.type == "cuda":
        # which products and sums become one instruction is up to the compiler of each kernel
        return assert_right(case, actual)
    for name in NAMES:
        # sums of dk and dv run over full entries first: the same order with all or none
        if full in (0, 3) or name not in ("dk", "dv"):
            assert torch.equal(actual[name], expected[name]), name


def _changed(case: Case, **changes: Tensor) -> Case:
    return replace(case, index=replace(case.index, **changes))


def _flip(case: Case) -> Case:
    assert case.index.mask_bits is not None
    bits = case.index.mask_bits.clone()
    bits[0, 3, 5] = ~bits[0, 3, 5]
    return _changed(case, mask_bits=bits)


def _swap(case: Case) -> Case:
    assert case.index.mask_ids is not None
    ids = case.index.mask_ids.clone()
    ids[0, 0, 1, [0, 1]] = ids[0, 0, 1, [1, 0]]
    return _changed(case, mask_ids=ids)


def _shift(dim: int) -> Callable[[Case], Case]:
    def shift(case: Case) -> Case:
        assert case.index.mask_bits is not None
        return _changed(case, mask_bits=case.index.mask_bits.roll(1, dim))

    return shift


def _one_more_full(case: Case) -> Case:
    assert case.index.kv_num_full_blocks is not None
    return _changed(case, kv_num_full_blocks=case.index.kv_num_full_blocks + 1)


DAMAGES = {
    "bit": _flip, "ids": _swap, "masks": _shift(0), "rows": _shift(1), "columns": _shift(2), "full": _one_more_full,
}  # fmt: skip


@pytest.fixture
def damageable(triton_device) -> tuple[Case, dict[str, Any]]:
    """A problem whose outputs all hang on every bit, and what its budget is made of."""
    size = 16 if triton_device.type == "cpu" else 64
    case = make_case([size] * 2, [size] * 2, head_dim=32, dtype=half(triton_device), device=triton_device)
    bits = torch.rand(3, size, size, generator=torch.Generator().manual_seed(1)) < 0.5
    # visible, and where the logits and gradients of bf16 are no smaller than its rounding
    bits[0, 3, 5] = True
    q, k, v, dout = (x.clone() for x in (case.q, case.k, case.v, case.dout))
    for rows, x in ((3, q), (5, k), (5, v), (3, dout)):
        x[:, rows] = 1
    case = masked(replace(case, q=q, k=k, v=v, dout=dout), bits, torch.tensor([[0, 1], [2, 1]]))
    return case, {"exact": define(case), "plain": run(case, "reference"), "terms": summed_terms(case)}


@pytest.mark.parametrize("damage", ["bit", "full", *(further(name) for name in DAMAGES if name not in ("bit", "full"))])
def test_the_budget_notices_a_damaged_mask(damage, damageable, triton_device):
    case, references = damageable
    actual, wrong = run(case, "triton"), run(DAMAGES[damage](case), "triton")
    for name in NAMES:
        budget = (references["plain"][name], references["exact"][name], name, references["terms"][name])
        assert_within_budget(actual[name], *budget)
        with pytest.raises(AssertionError, match=name):
            assert_within_budget(wrong[name], *budget)


@pytest.mark.parametrize("head_dim", [further(16), further(128)])
def test_backward_repeats_bit_for_bit(head_dim, triton_device):
    small = triton_device.type == "cpu"
    sizes, times = ([16, 9], 1) if small else ([64, 50, 64, 13] * 12, 100)
    case = make_case(
        *(sizes, sizes),
        heads=2 if small else 4,
        kv_heads=1 if small else 2,
        head_dim=head_dim,
        fine=True,
        dtype=half(triton_device),
        device=triton_device,
    )
    first = run(case, "triton")
    for _ in range(times):
        again = run(case, "triton")
        assert all(torch.equal(again[name], first[name]) for name in NAMES)


@pytest.mark.parametrize("grouped", [further(True), further(False)])
def test_opcheck(grouped, triton_device):
    case = make_case(
        [16, 5], [16, 3], batch=2, heads=2, kv_heads=2 - grouped, fine=True, kv_valid=grouped, device=triton_device
    )
    mask = BlockMask(index=case.index, q_blocks=case.q_blocks, kv_blocks=case.kv_blocks, kv_valid=case.kv_valid)
    args = (*(x.clone().requires_grad_() for x in (case.q, case.k, case.v)), *mask.flatten(), 0.3, "triton")
    # the other checks compile: below
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(block_sparse_fwd, args, test_utils=tests)
    out, lse = block_sparse_fwd(*args)
    backward = (case.dout, case.dlse, out.detach(), lse.detach(), *(x.detach() for x in args[:3]), *args[3:])
    torch.library.opcheck(block_sparse_bwd, backward, test_utils=tests)


@pytest.mark.parametrize("rows", [further([16, 16])], ids=str)
def test_compiled(rows, triton_device):
    """Whole graph, forward and backward; another number of masks and of full entries compiles nothing."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    case = make_case(rows, [16, 16], head_dim=16, dtype=half(triton_device), device=triton_device)
    blocks = {"q_blocks": case.q_blocks, "kv_blocks": case.kv_blocks}

    def attend(q: Tensor, k: Tensor, v: Tensor, index: BlockIndex, q_blocks: Blocks, kv_blocks: Blocks) -> Tensor:
        return block_sparse_attn(q, k, v, index, q_blocks=q_blocks, kv_blocks=kv_blocks, backend="triton")[0]

    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    g = torch.Generator().manual_seed(0)
    for masks, full in ((5, 0), (7, 1), (6, 2)):
        bits, ids = torch.rand(masks, 16, 16, generator=g) < 0.5, torch.randint(0, masks, (2, 2), generator=g)
        index = masked(case, bits, ids, full).index
        results = []
        for function in (attend, compiled):
            leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
            out = function(*leaves, index, **blocks)
            results.append((out, *torch.autograd.grad(out, leaves, case.dout)))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count == 1

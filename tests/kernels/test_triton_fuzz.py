"""Random problems through the `triton` backend against the fp64 definition, and what only long runs and large
buffers show: repeats, memory growth, offsets past 2^31 elements.

In the interpreter the problems are small and fp32; on a GPU there are 1,000 in all dtypes, drawn from few compile keys.
"""

from __future__ import annotations

import random
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from vsa_kernels import BlockIndex, Blocks, block_mean_pool, block_sparse_attn, select_topk
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.op import block_sparse_bwd, block_sparse_fwd
from vsa_kernels.testing import Case, assert_right, assert_within_budget, define, make_case, run

from tests.kernels.interpreted import INTERPRETED, further

NAMES = ("out", "lse", "dq", "dk", "dv")
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Key:
    """What a kernel is compiled for; everything else of a problem is drawn at random."""

    dtype: torch.dtype
    head_dim: int
    blocks: tuple[int, int]
    even: bool
    valid: bool
    fine: bool
    group: int
    permuted: bool


def _keys(seed: int, device: torch.device) -> list[Key]:
    rng = random.Random(seed)
    if device.type == "cpu":
        dtypes, dims, shapes, count = (torch.float32,), (16, 24, 32), ((16, 16), (8, 20), (24, 16), (40, 8)), 12
    else:
        dtypes, dims, count = (*HALF, *HALF, torch.float32), (16, 48, 64, 80, 128, 256), 40
        shapes = ((64, 64), (64, 64), (64, 16), (128, 64), (128, 128), (256, 256), (40, 100))
    keys = {
        Key(
            dtype=dtypes[i % len(dtypes)],
            head_dim=rng.choice(dims),
            blocks=shapes[i % len(shapes)],
            even=rng.random() < 0.5 and all(size % 16 == 0 for size in shapes[i % len(shapes)]),
            valid=rng.random() < 0.3,
            fine=rng.random() < 0.4,
            group=rng.choice([1, 1, 2, 3]),
            permuted=rng.random() < 0.4,
        )
        for i in range(count)
    }
    return sorted(keys, key=repr)


def _sizes(rng: random.Random, largest: int, even: bool, most: int) -> list[int]:
    # one and sixteen blocks are left out: Triton compiles a kernel again for sizes that are 1 or a multiple of 16
    num = rng.randint(2, most)
    if even:
        return [largest] * num
    sizes = [largest, *(rng.choice([1, largest - 1, rng.randint(1, largest)]) for _ in range(num - 1))]
    rng.shuffle(sizes)
    # nor are all as large as the largest by chance: that would be another key
    if sum(sizes) % 16 == 0 or min(sizes) == largest:
        sizes.append(3)
    return sizes


def _problem(seed: int, key: Key, device: torch.device) -> tuple[Case, Case]:
    """A case in an odd memory layout with NaN wherever nothing may be read, and the same case without both."""
    rng = random.Random(seed)
    small = device.type == "cpu"
    most = 4 if small else 7
    q_sizes = _sizes(rng, key.blocks[0], key.even, most)
    kv_sizes = _sizes(rng, key.blocks[1], key.even, most)
    batch, kv_heads = rng.randint(1, 2), rng.randint(1 + (key.group == 1), 2)
    heads = kv_heads * key.group
    case = make_case(
        q_sizes,
        kv_sizes,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=key.head_dim,
        density=rng.choice([0.0, 0.2, 0.5, 0.5, 1.0]),
        index_batch=rng.choice([1, batch]),
        index_heads=rng.choice([1, heads]),
        fine=key.fine,
        kv_valid=key.valid,
        dtype=key.dtype,
        device=device,
        seed=seed,
    )
    case = replace(case, scale=rng.choice([None, None, 0.3]), index=_odd_rows(rng, case.index))
    hard = _poisoned(case)
    if key.permuted:
        q, k, v, dout = (_strided(rng, x) for x in (hard.q, hard.k, hard.v, hard.dout))
        hard = replace(hard, q=q, k=k, v=v, dout=dout)
    return hard, case


def _odd_rows(rng: random.Random, index: BlockIndex) -> BlockIndex:
    # a row without blocks, and two rows with one list
    by_row = {
        name: getattr(index, name).clone()
        for name in ("kv_indices", "kv_num_blocks", "kv_num_full_blocks", "mask_ids")
        if getattr(index, name) is not None
    }
    a, b, c = (rng.randrange(index.kv_num_blocks.shape[2]) for _ in range(3))
    if rng.random() < 0.3:
        for name in {"kv_num_blocks", "kv_num_full_blocks"} & by_row.keys():
            by_row[name][:, :, a] = 0
    if rng.random() < 0.3:
        for x in by_row.values():
            x[:, :, b] = x[:, :, c].clone()
    return replace(index, **by_row)


def _strided(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    """The values of x `[B, L, H, D]` in another memory order, with NaN between the rows."""
    order = rng.choice([(0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3)])
    wide = x.new_full([*(x.shape[d] for d in order[:3]), x.shape[3] + 16], torch.nan)
    wide = wide[..., : x.shape[3]].permute([order.index(d) for d in range(4)])
    return wide.copy_(x)


def _poisoned(case: Case) -> Case:
    # tokens past kv_valid may hold anything
    if case.kv_valid is None:
        return case
    block = torch.repeat_interleave(torch.arange(case.kv_blocks.num, device=case.k.device), case.kv_blocks.sizes.long())
    place = torch.arange(len(block), device=block.device) - case.kv_blocks.offsets[block]
    missing = (place >= case.kv_valid[:, block])[..., None, None]
    k, v = case.k.clone(), case.v.clone()
    return replace(case, k=k.masked_fill_(missing, torch.nan), v=v.masked_fill_(missing, torch.nan))


def _forward_backward(case: Case) -> tuple[torch.Tensor, ...]:
    """out, lse, dq, dk, dv in the calling thread, without autograd."""
    mask = BlockMask(index=case.index, q_blocks=case.q_blocks, kv_blocks=case.kv_blocks, kv_valid=case.kv_valid)
    args = (case.q, case.k, case.v, *mask.flatten(), case.scale or case.q.shape[3] ** -0.5, "triton")
    with torch.no_grad():
        out, lse = block_sparse_fwd(*args)
        return out, lse, *block_sparse_bwd(case.dout, case.dlse, out, lse, *args)


@pytest.fixture
def compiled(monkeypatch) -> dict[str, set[Any]]:
    """What kernels were compiled for, by their name."""
    import triton

    keys: dict[str, set[Any]] = defaultdict(set)

    def add(*, fn, key, **_):
        # once where two threads needed the same at the same time
        keys[fn.name.split(".")[-1]].add(key)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", add)
    return keys


def test_ragged_blocks_are_not_even_by_chance():
    for largest in (10, 16, 40, 100):
        for seed in range(500):
            sizes = _sizes(random.Random(seed), largest, False, 4)
            assert min(sizes) < largest == max(sizes)
            assert sum(sizes) % 16


def assert_solved(seed: int, key: Key, device: torch.device) -> None:
    hard, case = _problem(seed, key, device)
    actual = run(hard, "triton")
    assert all(x.dtype == (torch.float32 if name == "lse" else key.dtype) for name, x in actual.items())
    assert_right(case, actual, f"problem {seed} {key}")


@pytest.mark.parametrize("half", [0, further(1)])
def test_random_problems(half, triton_device, compiled):
    keys = _keys(7, triton_device)
    assert len(keys) <= 40
    # one for each key in the interpreter
    problems = len(keys) if triton_device.type == "cpu" else 1000
    if triton_device.type == "cuda":
        # compilers run in threads and release the interpreter lock
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda key: _forward_backward(_problem(0, key, triton_device)[0]), keys))
    for seed in range(half, problems, 2):
        assert_solved(seed, keys[seed % len(keys)], triton_device)
    kernels = ("_fwd_kernel", "_dq_kernel", "_dkv_kernel")
    counts = {name: len(compiled[name]) for name in kernels}
    assert max(counts.values()) <= len(keys), f"more compilations than keys: {counts}"


@pytest.mark.soak("Triton kernels in the interpreter against fp64", attempts=60, short=0)
@pytest.mark.skipif(not INTERPRETED, reason="a GPU has all of them in test_random_problems")
def test_further_random_problems(triton_device, attempt):
    keys = _keys(7, triton_device)
    seed = len(keys) + attempt
    assert_solved(seed, keys[seed % len(keys)], triton_device)


def test_a_damaged_problem_is_noticed(triton_device):
    dtype = torch.float32 if triton_device.type == "cpu" else torch.bfloat16
    case = make_case([16, 7], [16, 5, 16], heads=2, kv_heads=2, density=1.0, dtype=dtype, device=triton_device)
    exact, plain = define(case), run(case, "reference")
    k = case.k.clone()
    # the last row of a block is read from its neighbour
    k[:, 20] = k[:, 21]
    wrong = run(replace(case, k=k), "triton")
    for name in NAMES:
        with pytest.raises(AssertionError, match=name):
            assert_within_budget(wrong[name], plain[name], exact[name], name)


def test_backward_repeats_bit_for_bit(triton_device):
    small = triton_device.type == "cpu"
    sizes, times = ([16, 9, 16, 5], 1) if small else ([64, 50, 64, 13] * 12, 1000)
    case = make_case(
        *(sizes, sizes),
        heads=4,
        kv_heads=2,
        head_dim=16 if small else 64,
        dtype=torch.float32 if small else torch.bfloat16,
        device=triton_device,
    )
    first = _forward_backward(case)
    same = torch.ones((), dtype=torch.bool, device=triton_device)
    for _ in range(times):
        again = _forward_backward(case)
        same &= torch.stack([(a == b).all() for a, b in zip(again, first, strict=True)]).all()
    assert not any(x.isnan().any() for x in first)
    assert same


def test_logits_of_ten_thousand(triton_device):
    dtypes = (torch.float32,) if triton_device.type == "cpu" else (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        case = make_case([16, 9, 13], [16, 5, 16, 11], heads=2, kv_heads=2, dtype=dtype, device=triton_device)
        case = replace(case, q=case.q * 100, k=case.k * 100)
        exact, plain, actual = define(case), run(case, "reference"), run(case, "triton")
        assert exact["lse"][exact["lse"].isfinite()].abs().max() > 1e4
        torch.testing.assert_close(actual["lse"].double(), exact["lse"], rtol=1e-5, atol=1e-2)
        for name in ("out", "dq", "dk", "dv"):
            assert actual[name].isfinite().all(), name
            # rounding of the logits alone is 1e-3 here
            far = (actual[name] - exact[name]).abs().max() / exact[name].abs().max()
            near = (plain[name] - exact[name]).abs().max() / exact[name].abs().max()
            assert far < 2 * near + 2e-2, f"{dtype} {name}: {far:.3g} against {near:.3g}"


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_memory_does_not_grow():
    blocks = Blocks.from_sizes([64, 60, 64, 17] * 10, "cuda")
    tokens = int(blocks.offsets[-1])
    q, k, v = (torch.randn(1, tokens, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def step(topk: int) -> None:
        pooled_q, pooled_k = block_mean_pool(q, blocks), block_mean_pool(k, blocks)
        index = select_topk(torch.einsum("bnhd,bmhd->bhnm", pooled_q, pooled_k), topk)
        out, lse = block_sparse_attn(q, k, v, index, q_blocks=blocks, kv_blocks=blocks, backend="triton")
        (out.float().sum() + lse.sum()).backward()
        q.grad = k.grad = v.grad = None

    def memory() -> tuple[int, int]:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    for i in range(80):
        step(1 + i % 40)
    before = memory()
    for i in range(500):
        step(1 + i % 40)
    assert memory() == before


@pytest.mark.gpu
@needs_gpu
@pytest.mark.soak("strides past 2**31 on a GPU")
@pytest.mark.parametrize("far", ["batch", "token", "head", "fused"])
def test_offsets_past_2_31_elements(far):
    size, D = 1 << 31, 64
    # elements between neighbours along (batch, token, head), and how many of each
    strides, shape = {
        "batch": ((size + 64, 8 * D, D), (2, 124, 2)),
        "token": ((8 * D, 1 << 21, D), (1, 1084, 2)),
        "head": ((8 * D, 8 * D, size + 64), (1, 124, 2)),
        # q, k, v and dout of 24 heads side by side, as one projection for attention and MLP makes them
        "fused": ((0, 16 * 24 * D, D), (1, size // (16 * 24 * D) // 64 * 64 + 124, 24)),
    }[far]
    # what is read by mistake is NaN
    buffer = torch.full((size + (1 << 28),), torch.nan, device="cuda", dtype=torch.bfloat16)
    # with a ragged block contiguous tensors take the same kernel as strided ones
    sizes = [64] * (shape[1] // 64) + [60]
    heads = {"heads": shape[2], "kv_heads": shape[2], "index_heads": 1 if far == "fused" else None}
    # of a thousand blocks a few, of a few blocks half
    density = min(0.5, 40 / len(sizes))
    case = make_case(
        *(sizes, sizes), batch=shape[0], **heads, density=density, head_dim=D, dtype=torch.bfloat16, device="cuda"
    )
    names = ("q", "k", "v", "dout")
    views = {}
    for i, name in enumerate(names):
        # q, k, v and dout lie beside each other inside the steps of the smaller stride
        apart = {"head": D, "fused": shape[2] * D}.get(far, 2 * D)
        views[name] = buffer.as_strided((*shape, D), (*strides, 1), apart * i)
        views[name].copy_(getattr(case, name))
    expected = _forward_backward(case)
    actual = _forward_backward(replace(case, **views))
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.gpu
@needs_gpu
@pytest.mark.soak("strides past 2**31 on a GPU")
def test_outputs_past_2_31_elements():
    H, D = 32, 128
    num = (1 << 31) // (H * D * 64) + 2
    q = torch.empty(1, num * 64, H, D, device="cuda", dtype=torch.bfloat16).normal_()
    k, v = (torch.randn(1, 64, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert q.numel() > 1 << 31

    def case(part: torch.Tensor) -> Case:
        rows = part.shape[1] // 64
        index = BlockIndex(
            kv_indices=torch.zeros(1, 1, rows, 1, dtype=torch.int32, device="cuda"),
            kv_num_blocks=torch.ones(1, 1, rows, dtype=torch.int32, device="cuda"),
        )
        return Case(
            q=part,
            k=k,
            v=v,
            dout=part,
            index=index,
            dlse=torch.zeros(1, H, part.shape[1], device="cuda"),
            q_blocks=Blocks(offsets=torch.arange(0, rows * 64 + 1, 64).int().cuda(), max_size=64, min_size=64),
            kv_blocks=Blocks.from_sizes([64], "cuda"),
        )

    actual, expected = _forward_backward(case(q)), _forward_backward(case(q[:, -256:]))
    assert torch.equal(actual[0][:, -256:], expected[0])
    assert torch.equal(actual[1][..., -256:], expected[1])
    assert torch.equal(actual[2][:, -256:], expected[2])
    assert actual[3].isfinite().all()
    assert actual[4].isfinite().all()

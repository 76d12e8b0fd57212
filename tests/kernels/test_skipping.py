"""Attention that skips against an online softmax of one row after another, in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from vsa_kernels import BlockIndex, Blocks, block_sparse_attn, skipping_attn

from tests.kernels.interpreted import further

CASES = {
    # tokens, query sizes, kv sizes, slice rows, kv heads
    "even": ((64, 96), [16] * 4, [32] * 3, 4, 2),
    "ragged": ((55, 83), [16, 16, 16, 7], [32, 32, 19], 4, 2),
    "mixed": ((45, 61), [16, 3, 16, 10], [16, 32, 13], 8, 1),
}


def problem(case, dtype=torch.float64):
    """Most queries look at the first kv block, so that later ones are skipped."""
    (queries, keys), q_sizes, kv_sizes, slice_rows, kv_heads = CASES[case]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, h, 16, generator=generator, dtype=torch.float64)
        for n, h in ((queries, 2), (keys, kv_heads), (keys, kv_heads))
    )
    mask = torch.rand(2, 2, len(q_sizes), len(kv_sizes), generator=generator) < 0.8
    mask[0, 0, 1] = False
    towards = torch.randn(16, generator=generator, dtype=torch.float64)
    q, k[:, : kv_sizes[0]] = q + towards, k[:, : kv_sizes[0]] + towards / 2
    blocks = {"q_blocks": Blocks.from_sizes(q_sizes), "kv_blocks": Blocks.from_sizes(kv_sizes)}
    return (
        [x.to(dtype) for x in (q, k, v)],
        mask,
        blocks,
        {"slice_rows": slice_rows, "thresholds": torch.tensor([-2.0, -0.5], dtype=torch.float64)},
    )


def oracle(q, k, v, mask, *, q_blocks, kv_blocks, slice_rows, thresholds, keeps_sum=True):
    """Row by row; a slice looks at all its rows before any of them goes on."""
    out, skips = torch.zeros_like(q, dtype=torch.float64), torch.zeros(*mask.shape[:3], dtype=torch.int32)
    q_at, kv_at = q_blocks.offsets.tolist(), kv_blocks.offsets.tolist()
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    for b, h, i in torch.cartesian_prod(*[torch.arange(n) for n in mask.shape[:3]]).tolist():
        for start in range(q_at[i], q_at[i + 1], slice_rows):
            rows = range(start, min(start + slice_rows, q_at[i + 1]))
            top, total = dict.fromkeys(rows, -math.inf), dict.fromkeys(rows, 0.0)
            sums = {row: torch.zeros(q.shape[-1], dtype=torch.float64) for row in rows}
            for j in mask[b, h, i].nonzero()[:, 0].tolist():
                keys = slice(kv_at[j], kv_at[j + 1])
                logits = {r: k[b, keys, h // group] @ q[b, r, h] * q.shape[-1] ** -0.5 for r in rows}
                local = {r: float(logits[r].max()) for r in rows}
                new = {r: max(top[r], local[r]) for r in rows}
                skip = max(local[r] - new[r] for r in rows) < float(thresholds[h])
                skips[b, h, i] += skip
                for r in rows:
                    p, factor = (logits[r] - new[r]).exp(), math.exp(top[r] - new[r])
                    total[r] = total[r] * factor + (0.0 if skip and not keeps_sum else float(p.sum()))
                    sums[r] = sums[r] * factor + (0 if skip else p @ v[b, keys, h // group])
                    top[r] = new[r]
            for r in rows:
                out[b, r, h] = sums[r] / (total[r] or 1.0)
    return out, skips


@pytest.mark.parametrize(("case", "keeps_sum"), [("even", False), ("ragged", True), ("ragged", False), ("mixed", True)])
def test_the_reference_is_the_definition(case, keeps_sum):
    qkv, mask, blocks, options = problem(case)
    out, skips = skipping_attn(*qkv, BlockIndex.from_dense(mask), **blocks, **options, keeps_sum=keeps_sum)
    expected, counts = oracle(*qkv, mask, **blocks, **options, keeps_sum=keeps_sum)
    assert torch.allclose(out, expected, atol=1e-12)
    assert torch.equal(skips, counts)
    assert 0 < counts.sum() < mask.sum() * 4
    # the other denominator, other slices and thresholds are noticed
    for change in ({"keeps_sum": not keeps_sum}, {"slice_rows": 1}, {"thresholds": options["thresholds"] / 2}):
        other, _ = oracle(*qkv, mask, **blocks, **options | {"keeps_sum": keeps_sum} | change)
        assert not torch.allclose(out, other, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_without_a_threshold_nothing_is_skipped(case):
    qkv, mask, blocks, options = problem(case)
    index = BlockIndex.from_dense(mask)
    none = options | {"thresholds": torch.full((2,), -math.inf)}
    out, skips = skipping_attn(*qkv, index, **blocks, **none)
    assert torch.allclose(out, block_sparse_attn(*qkv, index, **blocks)[0], atol=1e-12)
    assert not skips.any()


@pytest.mark.parametrize(
    ("case", "keeps_sum"), [("ragged", True), ("mixed", False), further("even", False), further("mixed", True)]
)
def test_triton_is_the_reference(case, keeps_sum, triton_device):
    qkv, mask, blocks, options = problem(case, torch.float32)
    qkv, mask = [x[:1] for x in qkv], mask[:1]
    expected, counts = skipping_attn(*qkv, BlockIndex.from_dense(mask), **blocks, **options, keeps_sum=keeps_sum)
    on = lambda x: x.to(triton_device)  # noqa: E731
    device_blocks = {
        name: Blocks(offsets=on(x.offsets), max_size=x.max_size, min_size=x.min_size) for name, x in blocks.items()
    }
    index = BlockIndex.from_dense(on(mask))
    options["thresholds"] = on(options["thresholds"])
    call = {**device_blocks, **options, "keeps_sum": keeps_sum, "backend": "triton"}
    out, skips = skipping_attn(*map(on, qkv), index, **call)
    assert torch.allclose(out.cpu(), expected, atol=2e-6)
    assert torch.equal(skips.cpu(), counts)
    # the tolerance would show a slice that was kept
    looser, _ = skipping_attn(*map(on, qkv), index, **call | {"thresholds": options["thresholds"] * 1.5})
    assert not torch.allclose(looser.cpu(), expected, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_a_gpu(dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1000, h, 128, generator=generator).to("cuda", dtype) for h in (4, 2, 2))
    q_blocks = Blocks.from_sizes([128] * 7 + [104], "cuda")
    kv_blocks = Blocks.from_sizes([64] * 15 + [40], "cuda")
    index = BlockIndex.from_dense(torch.rand(1, 4, 8, 16, generator=generator).cuda() < 0.7)
    call = {"q_blocks": q_blocks, "kv_blocks": kv_blocks, "thresholds": torch.tensor([-1e9, -0.5, -0.05, 0.5]).cuda()}
    out, skips = skipping_attn(q * 3, k, v, index, **call, backend="triton")
    # the same decisions as in fp64, but for ties
    exact, counts = skipping_attn((q * 3).double(), k.double(), v.double(), index, **call, backend="reference")
    plain, _ = skipping_attn(q * 3, k, v, index, **call, backend="reference")
    assert (skips - counts).abs().sum() <= 4
    assert counts[:, 0].sum() == 0
    assert counts.sum() > 300
    error, own = ((x.double() - exact).square().mean().sqrt() for x in (out, plain))
    assert error <= 2 * own + 1e-4


@pytest.mark.slow
def test_the_op_is_registered_as_torch_wants():
    qkv, mask, blocks, options = problem("ragged", torch.float32)
    index = BlockIndex.from_dense(mask)
    partitions = (x for b in blocks.values() for x in (b.offsets, b.max_size, b.min_size))
    arguments = (*qkv, index.kv_indices, index.kv_num_blocks, None, *partitions, options["thresholds"])
    call = (*arguments, 4, True, 0.25, "reference")
    torch.library.opcheck(
        torch.ops.vsa_kernels.skipping_fwd.default, call, test_utils=("test_schema", "test_faketensor")
    )


def test_bad_input():
    qkv, mask, blocks, options = problem("even", torch.float32)
    index = BlockIndex.from_dense(mask)
    for message, change in {
        "thresholds must be float \\[2\\], got torch.float32 \\[3\\]": {"thresholds": torch.zeros(3)},
        "slice_rows must be at least 1, got 0": {"slice_rows": 0},
        "backend triton takes blocks of at most 128 tokens .* got 32 and 3": {"slice_rows": 3, "backend": "triton"},
    }.items():
        with pytest.raises(ValueError, match=message):
            skipping_attn(*qkv, index, **blocks, **options | change)

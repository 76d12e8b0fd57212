"""Scores of blocks from sub-blocks against a definition cell by cell in fp64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from vsa_kernels import subblock_scores
from vsa_kernels.block_index import Blocks
from vsa_kernels.selection.op import subblock_scores_op

from tests.kernels.interpreted import INTERPRETED, further

SHAPES = {
    # sub-blocks of each query and kv block, heads, kv heads, head dim
    "even": ([8] * 6, [8] * 6, 2, 2, 32),
    "large": ([16] * 9, [16] * 9, 1, 1, 64),
    "ragged": ([3, 8, 1, 5, 8, 8, 2, 7, 8], [6, 1, 2, 8, 3], 4, 2, 20),
    "different": ([4, 4, 2], [16, 7, 16, 12], 2, 1, 16),
    "one": ([5], [3], 1, 1, 8),
    "single": ([1] * 70, [1] * 131, 1, 1, 16),
}


def problem(name, device="cpu"):
    q_sizes, kv_sizes, heads, kv_heads, head_dim = SHAPES[name]
    g = torch.Generator().manual_seed(1)
    q = 3 * torch.randn(2, sum(q_sizes), heads, head_dim, generator=g)
    k = torch.randn(2, sum(kv_sizes), kv_heads, head_dim, generator=g)
    weights = torch.randint(1, 9, (sum(kv_sizes),), generator=g).float()
    candidates = torch.rand(len(q_sizes), len(kv_sizes), generator=g) < 0.7
    candidates[:, 0] = True
    options = {
        "q_groups": Blocks.from_sizes(q_sizes, device),
        "kv_groups": Blocks.from_sizes(kv_sizes, device),
        "weights": weights.to(device),
        "candidates": candidates.to(device),
    }
    return (q.to(device), k.to(device)), options


def defined(q, k, *, q_groups, kv_groups, form, weights=None, candidates=None, scale=None):
    """Each cell by slices of its own; a softmax over all candidates of a row first."""
    q, k, group = q.double().cpu(), k.double().cpu(), q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    q_at, kv_at = q_groups.offsets.tolist(), kv_groups.offsets.tolist()
    out = torch.zeros(q.shape[0], q.shape[2], q_groups.num, kv_groups.num, dtype=torch.float64)
    for b, h, i in itertools.product(*map(range, out.shape[:3])):
        rows = q[b, q_at[i] : q_at[i + 1], h]
        logits = rows @ k[b, :, h // group].T * scale
        if weights is not None:
            logits = logits + weights.double().cpu().log()
        listed = [j for j in range(kv_groups.num) if candidates is None or candidates[i, j]]
        columns = [n for j in listed for n in range(kv_at[j], kv_at[j + 1])]
        shares = torch.zeros_like(logits)
        shares[:, columns] = logits[:, columns].softmax(-1)
        cells = [slice(kv_at[j], kv_at[j + 1]) for j in range(kv_groups.num)]
        if form == "softmax":
            out[b, h, i] = torch.stack([shares[:, cell].sum() / len(rows) for cell in cells])
        else:
            row = torch.stack([logits[:, cell].flatten().logsumexp(0) for cell in cells])
            out[b, h, i] = row if candidates is None else row.where(candidates[i].cpu(), -math.inf)
    return out


def error(actual, expected):
    actual = actual.double().cpu()
    finite = expected.isfinite()
    assert torch.equal(actual[~finite], expected[~finite])
    # of values above 10, relative to them
    return float(((actual - expected).abs() / expected.abs().clamp(min=10))[finite].max()) * 10


@pytest.mark.parametrize("form", ["softmax", "lse"])
@pytest.mark.parametrize("name", SHAPES)
def test_reference(name, form):
    means, options = problem(name)
    expected = defined(*means, **options, form=form)
    assert error(subblock_scores(*means, **options, form=form, backend="reference"), expected) < 1e-5
    exact = subblock_scores(*(x.double() for x in means), **options, form=form)
    assert error(exact, expected) < 1e-12
    plain = {**options, "weights": None, "candidates": None}
    assert error(subblock_scores(*means, **plain, form=form), defined(*means, **plain, form=form)) < 1e-5


@pytest.mark.parametrize("form", ["softmax", "lse"])
@pytest.mark.parametrize("name", [further(name) if name in ("large", "single") else name for name in SHAPES])
def test_triton(name, form, triton_device):
    means, options = problem(name, triton_device)
    expected = defined(*means, **options, form=form)
    assert error(subblock_scores(*means, **options, form=form, backend="triton"), expected) < 1e-5
    plain = {**options, "weights": None, "candidates": None, "scale": 0.7}
    unmasked = defined(*means, **plain, form=form)
    assert error(subblock_scores(*means, **plain, form=form, backend="triton"), unmasked) < 2e-5
    # the controls: without weights, and with those of another order
    if name != "one":
        for weights in (None, options["weights"].flip(0)):
            wrong = subblock_scores(*means, **{**options, "weights": weights}, form=form, backend="triton")
            assert error(wrong, expected) > 1e-2


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no products of bf16")
@pytest.mark.parametrize("form", ["softmax", "lse"])
@pytest.mark.parametrize("name", SHAPES)
def test_means_of_half_precision(name, form, triton_device):
    means, options = problem(name, triton_device)
    rounded = [x.bfloat16().float() for x in means]
    expected = defined(*rounded, **options, form=form)
    scores = subblock_scores(*means, **options, form=form, half=True, backend="triton")
    assert error(scores, expected) < 1e-5
    # the control: means that are not rounded; the only block has a share of 1 whatever its logits
    if (name, form) != ("one", "softmax"):
        assert error(scores, defined(*means, **options, form=form)) > 1e-4


def test_triton_where_a_row_has_no_candidates(triton_device):
    means, options = problem("ragged", triton_device)
    options["candidates"][3] = False
    for backend in ("reference", "triton"):
        assert subblock_scores(*means, **options, backend=backend)[:, :, 3].eq(0).all()
        assert subblock_scores(*means, **options, form="lse", backend=backend)[:, :, 3].isneginf().all()


def test_triton_at_large_logits_and_damage(triton_device):
    means, options = problem("ragged", triton_device)
    large = means[0] * 300, means[1]
    expected = defined(*large, **options, form="softmax")
    # logits of thousands in fp32
    assert error(subblock_scores(*large, **options, backend="triton"), expected) < 2e-2
    broken = means[1].clone()
    broken[0, 4] = math.nan
    for form in ("softmax", "lse"):
        scores = subblock_scores(means[0], broken, **options, form=form, backend="triton")
        assert scores[0].isnan().any()
        assert not scores[1].isnan().any()


def test_operator():
    means, options = problem("ragged")
    flat = [x for name in ("q_groups", "kv_groups") for x in vars(options[name]).values()]
    arguments = (*means, *flat, options["weights"].log(), options["candidates"], 0.3, True, False, "reference")
    outcomes = torch.library.opcheck(subblock_scores_op, arguments, test_utils=("test_schema", "test_faketensor"))
    assert set(outcomes.values()) == {"SUCCESS"}
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(
            subblock_scores(*means, **options), subblock_scores_op(*arguments[:10], 20**-0.5, *arguments[11:])
        )
    products = 2 * means[0].shape[0] * 4 * 50 * 20 * 20
    with FlopCounterMode(display=False) as counter:
        subblock_scores(*means, **options)
    assert counter.get_total_flops() == products


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"form": "mean"}, "form must be one of softmax, lse, got 'mean'"),
        ({"weights": torch.ones(3)}, r"weights must be float \[20\], got torch.float32 \[3\]"),
        ({"candidates": torch.ones(2, 2)}, r"candidates must be bool \[9, 5\]"),
        ({"kv_groups": Blocks.from_sizes([4, 4])}, "kv_groups"),
    ],
)
def test_refused(changes, message):
    means, options = problem("ragged")
    with pytest.raises(ValueError, match=message):
        subblock_scores(*means, **{**options, **changes})


def test_groups_too_large_for_triton(triton_device):
    means, options = problem("one", triton_device)
    groups = {"q_groups": Blocks.from_sizes([65], triton_device), "candidates": None}
    q = means[0][:, :1].repeat(1, 65, 1, 1)
    with pytest.raises(ValueError, match="backend triton takes at most 64 sub-blocks a block, got 65"):
        subblock_scores(q, means[1], **{**options, **groups}, backend="triton")

"""The first stage of SpargeAttn against loops over blocks and tokens in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vsa_kernels import block_mean_and_similarity
from vsa_kernels.block_index import Blocks

from tests.attention.sparge.oracle import mask
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.selection import Shares, sparge_top_p
from vsa.attention.sparge.mask import block_statistics, first_stage

SETTINGS = {
    "heads": st.sampled_from([(1, 1), (2, 2), (4, 2)]),
    "tokens": st.tuples(st.integers(1, 23), st.integers(1, 29)),
    "sizes": st.tuples(st.integers(1, 8), st.integers(1, 8)),
    "alike": st.floats(0, 3),
    "seed": st.integers(0, 1 << 30),
}
SHARES = st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 1.0])
THETAS = st.sampled_from([-0.5, -0.1, 0.1, 0.3, 0.5, 0.7, 0.9])


def blocks_of(length, size):
    return Blocks.from_sizes([min(size, length - start) for start in range(0, length, size)])


def fields(tokens, heads, alike, seed, batch=2, dim=5):
    """Queries and keys around a direction of each run of tokens; the larger `alike`, the more similar inside blocks."""
    generator = torch.Generator().manual_seed(seed)

    def one(length, count):
        runs = torch.randn(batch, (length + 3) // 4, count, dim, generator=generator, dtype=torch.float64)
        noise = torch.randn(batch, length, count, dim, generator=generator, dtype=torch.float64)
        return alike * runs.repeat_interleave(4, 1)[:, :length] + noise

    return one(tokens[0], heads[0]), one(tokens[1], heads[1])


def check(heads, tokens, sizes, alike, seed, tau, theta, topk=None):
    """Whether every head's mask is that of the definition; False where a decision is a tie."""
    q, k = fields(tokens, heads, alike, seed)
    q_blocks, kv_blocks = (blocks_of(n, size) for n, size in zip(tokens, sizes, strict=True))
    taus, thetas = (torch.tensor(values[: heads[0]], dtype=torch.float64) for values in (tau, theta))
    statistics = block_statistics(q, k, q_blocks, kv_blocks)
    rule = Shares(taus) if topk is None else KeptTiles.of(topk)
    actual = first_stage(statistics, rule, thetas).to_dense(kv_blocks.num).int()
    assert actual.shape == (2, heads[0], q_blocks.num, kv_blocks.num)
    clear = True
    for b in range(2):
        for h in range(heads[0]):
            expected, margin = mask(
                q[b, :, h].tolist(),
                k[b, :, h // (heads[0] // heads[1])].tolist(),
                q_tokens=sizes[0],
                kv_tokens=sizes[1],
                tau=tau[h],
                theta=theta[h],
                topk=topk,
            )
            # 2^-32 is the grain of the softmax, see `RowRule`
            clear &= margin > 1e-7
            assert margin <= 1e-7 or actual[b, h].tolist() == expected
    return clear


FOUR = {"tau": st.tuples(*[SHARES] * 4), "theta": st.tuples(*[THETAS] * 4), "topk": st.none() | st.integers(1, 5)}


@settings(deadline=None, max_examples=40)
@given(**SETTINGS, **FOUR)
def test_masks_are_those_of_the_definition(**setting):
    check(**setting)


@pytest.mark.slow
@settings(deadline=None, max_examples=4000)
@given(**SETTINGS, **FOUR)
def test_thousands_of_masks_are_those_of_the_definition(**setting):
    check(**setting)


def masks_at(tau, theta, tokens=(40, 58), seed=1):
    q, k = fields(tokens, (2, 2), 1.0, seed)
    statistics = block_statistics(q, k, blocks_of(tokens[0], 8), blocks_of(tokens[1], 4))
    rule = Shares(tau) if isinstance(tau, torch.Tensor) else sparge_top_p(tau)
    return statistics, first_stage(statistics, rule, theta).to_dense(15)


def test_all_of_the_share_is_everything():
    for theta in (-1.0, 0.4):
        assert masks_at(1.0, theta)[1].all()
        assert masks_at(torch.ones(2), torch.full((2,), theta))[1].all()
    assert not masks_at(0.99, -1.0)[1].all()


def test_a_threshold_below_zero_turns_the_judge_off():
    statistics, plain = masks_at(0.5, -0.1)
    assert statistics.q_similarity.min() >= 0
    assert torch.equal(plain, masks_at(0.5, -1.0)[1])
    strict = masks_at(0.5, 0.4)[1]
    assert not torch.equal(plain, strict)
    rows, columns = statistics.q_similarity < 0.4, statistics.kv_similarity < 0.4
    assert rows.any()
    assert columns.any()
    assert strict[rows].all()
    assert strict.transpose(2, 3)[columns].all()
    # a block that is unlike itself everywhere leaves nothing to choose
    assert masks_at(0.5, 1.0)[1].all()


def test_the_order_inside_a_block_does_not_matter():
    q, k = fields((40, 56), (2, 2), 1.0, 2)
    blocks = blocks_of(40, 8), blocks_of(56, 4)
    inside = torch.arange(40).view(5, 8).flip(1).flatten(), torch.arange(56).view(14, 4).roll(1, 1).flatten()
    across = torch.arange(40).roll(3), torch.arange(56).roll(3)
    masks = [
        first_stage(block_statistics(q[:, a], k[:, b], *blocks), sparge_top_p(0.6), 0.3).to_dense(14)
        for a, b in ((torch.arange(40), torch.arange(56)), inside, across)
    ]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_similarity_of_known_blocks():
    tokens = torch.tensor([[3.0, 0.0], [3.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])[None, :, None]
    blocks = Blocks.from_sizes([2, 1, 2])
    assert block_mean_and_similarity(tokens, blocks)[1].flatten().tolist() == [1.0, 1.0, 0.0]
    blocks = Blocks.from_sizes([3, 2])
    # unit tokens x, x, y and 3x, 3x, y
    assert block_mean_and_similarity(tokens, blocks)[1][0, 0].item() == pytest.approx((4 + 1) / 9)


def test_similarity_of_noise_is_that_of_the_paper():
    """Random tokens have 1/n by the code's formula: its "Random Sim-k" of .019 for 64 keys, Table 9."""
    noise = torch.randn(1, 64 * 200, 1, 128, generator=torch.Generator().manual_seed(0))
    actual = block_mean_and_similarity(noise, blocks_of(64 * 200, 64))[1].mean().item()
    assert actual == pytest.approx(1 / 64, rel=0.05)


def test_samples_have_a_mean_of_their_own():
    """Two samples in one row, each centred, choose as they do alone."""
    q, k = fields((48, 48), (2, 2), 1.0, 3)
    k[:, 24:] += 5
    blocks = blocks_of(48, 8), blocks_of(48, 4)
    same = torch.arange(6)[:, None] // 3 == torch.arange(12) // 6
    spans = ((0, 24), (24, 48))
    statistics = block_statistics(q, k, *blocks, samples=spans, candidates=same)
    packed = first_stage(statistics, sparge_top_p(0.6), 0.3).to_dense(12)
    assert not packed[:, :, ~same].any()
    for a, b in spans:
        alone = block_statistics(q[:, a:b], k[:, a:b], blocks_of(24, 8), blocks_of(24, 4))
        own = first_stage(alone, sparge_top_p(0.6), 0.3).to_dense(6)
        assert torch.equal(packed[:, :, a // 8 : b // 8, a // 4 : b // 4], own)

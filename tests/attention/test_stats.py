"""Measurements of a selection against their definitions, written out with dense masks and sets."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from vsa_kernels import BlockIndex, Blocks
from vsa_kernels.coarse_fine import reference

from vsa.attention import stats
from vsa.attention.context import AttnContext
from vsa.attention.full import dense_attn
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.attention.stats import neighbour_overlap, popularity
from vsa.attention.video_sparse import VideoSparseAttention

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

RAGGED, UNIFORM = Blocks.from_sizes([3, 5, 5, 2]), Blocks.from_sizes([4, 4, 4, 4])


def make_qk(blocks: Blocks, *, heads=4, kv_heads=4, batch=2, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    length = int(blocks.offsets[-1])
    shapes = [(batch, length, heads, 8), (batch, length, kv_heads, 8)]
    q, k = (2 * torch.randn(s, generator=generator) for s in shapes)
    return q, k


def dense_mass(q: torch.Tensor, k: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """fp64 `[B, H, L, N]` by the whole softmax."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    weights = (torch.einsum("blhd,bshd->bhls", q.double(), k.double()) / 8**0.5).softmax(-1)
    return torch.stack([part.sum(-1) for part in weights.split(blocks.sizes.tolist(), -1)], -1)


def make_selection(num_tiles: int, topk: int, *, batch=2, heads=4, seed=0) -> torch.Tensor:
    scores = torch.rand(batch, heads, num_tiles, num_tiles, generator=torch.Generator().manual_seed(seed))
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(topk).indices, True)


@pytest.mark.parametrize("blocks", [RAGGED, UNIFORM], ids=["ragged", "uniform"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_tile_mass_is_the_dense_softmax(blocks, kv_heads, monkeypatch):
    q, k = make_qk(blocks, kv_heads=kv_heads)
    expected = dense_mass(q, k, blocks)
    tokens = torch.tensor([0, 3, 4, 11, 14])
    # several chunks of one token each
    monkeypatch.setattr(stats, "CHUNK_LOGITS", 1)
    actual = stats.tile_mass(q, k, tokens, blocks)
    torch.testing.assert_close(actual.double(), expected[:, :, tokens], atol=2e-6, rtol=0)
    # controls: another scale, and heads in another order
    assert (stats.tile_mass(q, k, tokens, blocks, scale=0.3) - expected[:, :, tokens]).abs().max() > 1e-2
    assert (actual.flip(1) - expected[:, :, tokens]).abs().max() > 1e-2


@pytest.mark.parametrize("blocks", [RAGGED, UNIFORM], ids=["ragged", "uniform"])
def test_recall_is_the_mass_under_the_mask(blocks):
    q, k = make_qk(blocks)
    tokens = torch.arange(int(blocks.offsets[-1]))
    mass = stats.tile_mass(q, k, tokens, blocks)
    selection = make_selection(4, 2)
    rows = selection.repeat_interleave(blocks.sizes.long(), dim=2)
    expected = (dense_mass(q, k, blocks) * rows).sum(-1).mean(-1)
    actual = stats.selection_recall(mass, selection, tokens, blocks)
    torch.testing.assert_close(actual.selected.double(), expected, atol=1e-6, rtol=0)
    # control: the selection of other rows
    other = stats.selection_recall(mass, selection.roll(1, dims=2), tokens, blocks)
    assert (other.selected - expected).abs().max() > 1e-3
    # all tiles have all of the mass
    whole = stats.selection_recall(mass, torch.ones(1, 1, 4, 4, dtype=torch.bool), tokens, blocks)
    torch.testing.assert_close(whole.selected, torch.ones(2, 4), atol=1e-6, rtol=0)
    assert torch.equal(whole.random, torch.ones(2, 4))


def test_random_recall_is_the_mean_over_all_selections():
    q, k = make_qk(RAGGED)
    mass, tokens = dense_mass(q, k, RAGGED), torch.arange(15)
    recalls = [mass[..., list(tiles)].sum(-1).mean(-1) for tiles in itertools.combinations(range(4), 3)]
    actual = stats.selection_recall(mass.float(), make_selection(4, 3), tokens, RAGGED).random
    torch.testing.assert_close(actual.double(), torch.stack(recalls).mean(0))


def test_sampled_tokens_estimate_the_mean_without_bias():
    q, k = make_qk(RAGGED)
    selection = make_selection(4, 2)

    def recall(tokens: torch.Tensor) -> float:
        mass = stats.tile_mass(q, k, tokens, RAGGED)
        return stats.selection_recall(mass, selection, tokens, RAGGED).selected.mean().item()

    recalls = torch.tensor([recall(stats.sample_tokens(15, 4, seed=seed)) for seed in range(300)])
    error = recalls.std() / 300**0.5
    whole = recall(torch.arange(15))
    assert abs(recalls.mean() - whole) < 4 * error
    # control: tokens of the first tiles only are off by far more
    assert abs(recall(torch.arange(4)) - whole) > 8 * error
    assert torch.equal(stats.sample_tokens(15, 4, seed=1), stats.sample_tokens(15, 4, seed=1))
    assert torch.equal(stats.sample_tokens(15, None), torch.arange(15))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        stats.sample_tokens(15, 0)


def test_overlaps_count_common_tiles():
    a, b = make_selection(8, 3, seed=1), make_selection(8, 3, seed=2)

    def common(x: torch.Tensor, y: torch.Tensor) -> int:
        return len(set(x.nonzero().flatten().tolist()) & set(y.nonzero().flatten().tolist()))

    rows = list(itertools.product(range(2), range(4), range(8)))
    expected = sum(common(a[row], b[row]) for row in rows) / (3 * len(rows))
    assert stats.selection_overlap(a, b).item() == pytest.approx(expected)
    assert 0 < expected < 1
    assert stats.selection_overlap(a, a) == 1
    # all tiles against three of eight
    assert stats.selection_overlap(torch.ones(1, 1, 8, 8, dtype=torch.bool), a).item() == pytest.approx(6 / 11)
    pairs = [(n, i, j, q) for n in range(2) for i, j in itertools.combinations(range(4), 2) for q in range(8)]
    expected = sum(common(a[n, i, q], a[n, j, q]) for n, i, j, q in pairs) / (3 * len(pairs))
    assert stats.head_overlap(a).item() == pytest.approx(expected)
    assert stats.head_overlap(a[:, :1].expand(-1, 4, -1, -1)) == 1
    assert stats.head_overlap(a[:, :1]).isnan()


def test_entropy_of_the_coarse_scores():
    scores = torch.randn(2, 3, 5, 7)
    expected = torch.distributions.Categorical(logits=scores).entropy().mean() / torch.tensor(7.0).log()
    torch.testing.assert_close(stats.coarse_entropy(scores), expected)
    assert stats.coarse_entropy(torch.zeros(1, 1, 4, 9)).item() == pytest.approx(1)
    certain = torch.full((1, 1, 4, 9), -torch.inf)
    certain[..., 0] = 0
    assert stats.coarse_entropy(certain) == 0
    assert stats.coarse_entropy(torch.zeros(1, 1, 1, 1)) == 1


def test_coarse_share():
    fine = torch.randn(2, 6, 3, 4)
    assert stats.coarse_share(0 * fine, fine) == 0
    assert stats.coarse_share(-3 * fine, fine).item() == pytest.approx(0.75)
    assert stats.coarse_share(0 * fine, 0 * fine) == 0
    assert stats.rms(torch.tensor([3.0, -4.0])).item() == pytest.approx(12.5**0.5)


# a layer


def make_layer(*, gates: bool, **options) -> VideoSparseAttention:
    torch.manual_seed(0)
    method = VideoSparseAttention(dim=16, num_heads=2, head_dim=8, tile_thw=(2, 2, 3), **options)
    if gates:
        for module in method.extra_modules().values():
            torch.nn.init.normal_(module.weight, std=0.3)
    return method


def make_row(method: VideoSparseAttention) -> tuple:
    """Ragged layout of 5 x 4 x 6 tokens, q, k, v and hidden states."""
    layout = method.layout((Segment(grid_thw=(5, 4, 6)),), "cpu")
    generator = torch.Generator().manual_seed(1)
    q, k, v = (2 * torch.randn(2, 120, 2, 8, generator=generator) for _ in range(3))
    return layout, q.requires_grad_(), k.requires_grad_(), v, torch.randn(2, 120, 16, generator=generator)


@pytest.mark.parametrize("fine_gate", [True, False])
@pytest.mark.parametrize("topk", [3, 12])
def test_a_recorder_gets_what_the_output_is_made_of(fine_gate, topk):
    method = make_layer(gates=True, fine_gate=fine_gate, layer_idx=5)
    layout, q, k, v, x = make_row(method)
    calls = []
    ctx = AttnContext(
        layout=layout, topk=KeptTiles.of(topk), recorder=lambda layer, tensors: calls.append((layer, tensors))
    )
    out = method.attend_combine(q, k, v, method.project(x), ctx)
    [(layer, records)] = calls
    assert layer == 5
    assert not any(tensor.requires_grad for tensor in records.values())
    assert torch.equal(records["q"], q)
    assert torch.equal(records["k"], k)
    assert ("gate_fine" in records) == fine_gate
    fine = records["fine"] * records["gate_fine"] if fine_gate else records["fine"]
    again = fine + records["gate_compress"] * layout.tile_to_tokens(records["coarse"])
    torch.testing.assert_close(again, out)
    # the recorded selection is the one the fine stage attended to
    index = BlockIndex(kv_indices=records["kv_indices"], kv_num_blocks=records["kv_num_blocks"])
    rows = index.to_dense(12).expand(2, 2, -1, -1).repeat_interleave(layout.blocks.sizes.long(), 2)
    mask = rows.repeat_interleave(layout.blocks.sizes.long(), 3)
    logits = torch.einsum("blhd,bshd->bhls", q, k) / 8**0.5
    weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
    torch.testing.assert_close(torch.einsum("bhls,bshd->blhd", weights, v), records["fine"], atol=1e-5, rtol=1e-5)


def test_all_tiles_run_dense_while_the_coarse_stage_and_its_gate_train(monkeypatch):
    def refuse(*args, **rest):
        raise AssertionError("the block-sparse kernel ran with all tiles kept")

    monkeypatch.setattr(reference, "block_sparse_attn", refuse)
    method = make_layer(gates=False, fine_gate=False)
    layout, q, k, v, x = make_row(method)
    ctx = AttnContext(layout=layout, topk=KeptTiles.of(layout.num_video_tiles))
    out = method.attend_combine(q, k, v, method.project(x), ctx)
    # a zero gate: the dense layer
    assert torch.equal(out, dense_attn(q, k, v))
    dense_grad = torch.autograd.grad(dense_attn(q, k, v).square().sum(), q)[0]
    (grad,) = torch.autograd.grad(out.square().sum(), q, retain_graph=True)
    torch.testing.assert_close(grad, dense_grad)
    gate = method.to_gate_compress
    out.square().sum().backward()
    assert gate.weight.grad is not None
    assert gate.weight.grad.abs().max() > 1e-2
    assert gate.bias.grad.abs().max() > 1e-2
    # once the gate is open, the coarse stage reaches q as well
    with torch.no_grad():
        gate.weight -= 0.1 * gate.weight.grad
    open_out = method.attend_combine(q, k, v, method.project(x), ctx)
    (grad,) = torch.autograd.grad(open_out.square().sum(), q)
    assert (grad - dense_grad).abs().max() > 1e-2
    # control: one tile less does run the kernel
    with pytest.raises(AssertionError, match="block-sparse kernel"):
        method.attend_combine(
            q, k, v, method.project(x), AttnContext(layout=layout, topk=KeptTiles.of(layout.num_video_tiles - 1))
        )


def lists_of(selected: torch.Tensor, head: int) -> list[set[int]]:
    return [{n for n, flag in enumerate(row) if flag} for row in selected[0, head].tolist()]


@pytest.mark.parametrize("offsets", [[0, 2, 4, 6, 7], [0, 4, 7], [0, 1, 3, 7]])
def test_neighbour_overlap_counts_what_a_group_would_load_once(offsets):
    selection = torch.rand(1, 2, 7, 9, generator=torch.Generator().manual_seed(3)) < 0.4
    overlap, random = neighbour_overlap(selection, torch.tensor(offsets))
    for head in range(2):
        lists, savings, by_chance, whole = lists_of(selection, head), 0.0, 0.0, 0.0
        for start, stop in itertools.pairwise(offsets):
            group = lists[start:stop]
            if len(group) > 1:
                total = sum(map(len, group))
                savings += total - len(set.union(*group))
                by_chance += total - sum(1 - math.prod(1 - len(some) / 9 for some in group) for _ in range(9))
                whole += total - max(map(len, group))
        assert float(overlap[0, head]) == pytest.approx(savings / whole)
        assert float(random[0, head]) == pytest.approx(by_chance / whole)
        # control: other groups
        other = neighbour_overlap(selection, torch.tensor([0, 3, 6, 7])).overlap
        assert abs(float(other[0, head]) - savings / whole) > 1e-3


def test_neighbour_overlap_of_equal_and_of_disjoint_lists():
    same = torch.zeros(1, 1, 4, 8, dtype=torch.bool)
    same[..., :3] = True
    assert neighbour_overlap(same, torch.tensor([0, 4])).overlap.item() == 1
    # pairs of equally long lists: the share in common, and its average over pairs
    pairs = torch.zeros(1, 1, 4, 8, dtype=torch.bool)
    for row, tiles in enumerate(([0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [2, 3, 4, 5])):
        pairs[0, 0, row, tiles] = True
    overlap, random = neighbour_overlap(pairs, torch.tensor([0, 2, 4]))
    assert overlap.item() == pytest.approx(0.25)
    # two lists of 4 of 8 share 2 by chance
    assert random.item() == pytest.approx(0.5)
    assert neighbour_overlap(pairs, torch.tensor([0, 1, 2, 3, 4])).overlap.isnan().all()


def test_random_neighbours_have_the_random_overlap():
    scores = torch.rand(1, 1, 4000, 16, generator=torch.Generator().manual_seed(0))
    selection = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(4, dim=-1).indices, True)
    for size in (2, 4):
        overlap, random = neighbour_overlap(selection, torch.arange(0, 4001, size))
        assert overlap.item() == pytest.approx(random.item(), abs=0.01)


def test_popularity_counts_the_lists_of_each_tile():
    selection = torch.rand(1, 2, 11, 20, generator=torch.Generator().manual_seed(1)) < 0.15
    actual = popularity(selection)
    for head in range(2):
        counts = [sum(tile in some for some in lists_of(selection, head)) for tile in range(20)]
        mean = sum(counts) / 20
        expected = {
            "mean": mean,
            "median": np.quantile(counts, 0.5),
            "p90": np.quantile(counts, 0.9),
            "p99": np.quantile(counts, 0.99),
            "largest": max(counts),
            "unlisted": sum(n == 0 for n in counts) / 20,
            "long": sum(n > 1.5 * mean for n in counts) / 20,
        }
        assert {name: float(values[0, head]) for name, values in actual._asdict().items()} == pytest.approx(expected)
    assert 0 < expected["unlisted"] < 1

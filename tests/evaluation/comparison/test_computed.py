"""Which pairs a method computes, against masks made pair by pair."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vsa_kernels import BlockIndex

from tests.attention.oracle import cube_ids
from vsa.attention.compressed_kv import CompressedKV
from vsa.attention.context import AttnContext
from vsa.attention.full import FullAttention
from vsa.attention.grouped import GroupedAttention
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment, TileLayout
from vsa.attention.pooled_tail import PooledTail
from vsa.attention.staged import StagedAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.evaluation.comparison.computed import computed_pairs, of_lists

SIZES = {"dim": 8, "num_heads": 2, "head_dim": 4}
GRID, TILE = (3, 5, 4), (2, 2, 4)

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([(1, 1), (1, 2), (2, 2)]))
def test_lists_are_the_mask_of_their_pairs(seed, fine, sizes):
    """Ragged tiles, rows without any, lists shared by samples and heads; masks say anything behind a short tile."""
    generator = torch.Generator().manual_seed(seed)
    layout = TileLayout.build([Segment(GRID)], tile_thw=TILE, kv_tile_thw=(1, 2, 2))
    num_q, num_kv = layout.num_blocks, layout.kv_blocks.num
    selection = torch.rand(*sizes, num_q, num_kv, generator=generator) < 0.4
    masked = selection & (torch.rand(selection.shape, generator=generator) < 0.5) & torch.tensor(fine)
    ids = torch.randint(0, 3, selection.shape, generator=generator)
    bits = torch.rand(3, 16, 4, generator=generator) < 0.5
    width = int(selection.sum(-1).max())
    # what stands behind the lists is never read
    lists = torch.full((*selection.shape[:-1], width), 7, dtype=torch.int32)
    mask_ids = torch.full_like(lists, 99)
    expected = torch.zeros(*sizes, 60, 60, dtype=torch.bool)
    visits = torch.zeros_like(expected)
    q_starts, kv_starts = layout.blocks.offsets.tolist(), layout.kv_blocks.offsets.tolist()
    for b, h, i in ((b, h, i) for b in range(sizes[0]) for h in range(sizes[1]) for i in range(num_q)):
        whole = [j for j in range(num_kv) if selection[b, h, i, j] and not masked[b, h, i, j]]
        parts = [j for j in range(num_kv) if masked[b, h, i, j]]
        for place, j in enumerate([*whole, *parts]):
            lists[b, h, i, place] = j
            mask_ids[b, h, i, place] = int(ids[b, h, i, j])
            rows, columns = slice(q_starts[i], q_starts[i + 1]), slice(kv_starts[j], kv_starts[j + 1])
            visits[b, h, rows, columns] = True
            mask = bits[ids[b, h, i, j]][: rows.stop - rows.start, : columns.stop - columns.start]
            expected[b, h, rows, columns] = mask if j in parts else True
    counts = selection.sum(-1, dtype=torch.int32)
    extra = {
        "kv_num_full_blocks": (selection & ~masked).sum(-1, dtype=torch.int32),
        "mask_ids": mask_ids,
        "mask_bits": bits,
    }
    index = BlockIndex(kv_indices=lists, kv_num_blocks=counts, **(extra if fine else {}))
    pairs = of_lists(index, layout)
    tokens = torch.randperm(60, generator=generator)[:17]
    assert pairs.rows is not None
    assert torch.equal(pairs.rows(tokens), expected[:, :, tokens])
    assert pairs.density == pytest.approx(float(expected.double().mean()))
    assert pairs.visited == pytest.approx(float(visits.double().mean()))
    assert (pairs.density == pairs.visited) == torch.equal(expected, visits)


METHODS = {
    "video_sparse": (VideoSparseAttention(**SIZES, tile_thw=TILE), TILE),
    "all tiles": (VideoSparseAttention(**SIZES, tile_thw=TILE), TILE),
    "smaller kv tiles": (StagedAttention(**SIZES, stages="f", tile_thw=TILE, kv_tile_thw=(1, 2, 2)), (1, 2, 2)),
    "pooled_tail": (PooledTail(**SIZES, tile_thw=TILE), TILE),
    "random": (StagedAttention(**SIZES, stages="f", tile_thw=TILE, score="random"), TILE),
}


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_computes_is_what_moves_its_output(name):
    """Each key in turn gets a value of its own: outputs of the computed pairs move, or of a pooled tail's more."""
    method, kv_tile = METHODS[name]
    method = method.double()
    layout = method.layout([Segment(GRID)])
    topk = layout.num_video_tiles if name == "all tiles" else 2
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 60, 2, 4, generator=generator, dtype=torch.float64)
    records = {}
    ctx = AttnContext(layout=layout, topk=KeptTiles.of(topk), recorder=lambda _, tensors: records.update(tensors))
    method.attend(q, k, k, ctx)
    pairs = computed_pairs(method, layout, records)
    assert pairs.rows is not None
    rows = pairs.rows(torch.arange(60)).expand(1, 2, 60, 60)
    # whole kv tiles, as many a row as are kept
    ids = torch.tensor(cube_ids(GRID, kv_tile))[layout.order]
    for column in ids.unique():
        same = rows[..., ids == column]
        assert torch.equal(same.all(-1), same.any(-1))
    heads = [rows[..., ids == column].any(-1) for column in ids.unique()]
    assert (torch.stack(heads, -1).sum(-1) == topk).all()
    assert pairs.density == pairs.visited == pytest.approx(float(rows.double().mean()))
    for key in (0, 31, 59):
        marks = torch.zeros(1, 60, 2, 4, dtype=torch.float64)
        marks[:, key] = 1
        part = method.attend(q, k, marks, AttnContext(layout=layout, topk=KeptTiles.of(topk)))
        out = part["fine"] if "fine" in part else part["out"]
        changes = (out[..., 0] > 0).transpose(1, 2)
        if name == "pooled_tail":
            assert (changes | ~rows[..., key]).all()
        else:
            assert torch.equal(changes, rows[..., key])


def test_methods_without_lists():
    layout = FullAttention(**SIZES).layout([Segment(GRID)])
    tokens = torch.tensor([3, 50])
    full = computed_pairs(FullAttention(**SIZES), layout, None)
    assert full.density == full.visited == 1
    assert full.rows is not None
    assert full.rows(tokens).all()
    groups = GroupedAttention(**SIZES, groups=[(2, 3, "all")])
    inside = computed_pairs(groups, layout, {})
    ids = torch.tensor(cube_ids(GRID, (2, 3, 4)))
    mask = ids[:, None] == ids
    assert inside.rows is not None
    assert torch.equal(inside.rows(tokens)[0, 0], mask[tokens])
    assert inside.density == pytest.approx(float(mask.double().mean()))
    pooling = CompressedKV(**SIZES, pool_thw=TILE)
    none = computed_pairs(pooling, pooling.layout([Segment(GRID)]), None)
    assert none.rows is None
    assert none.density == pytest.approx(6 / 60)


def test_lists_of_other_tiles_are_refused():
    layout = VideoSparseAttention(**SIZES, tile_thw=TILE).layout([Segment(GRID)])
    index = BlockIndex.from_dense(torch.ones(1, 1, 3, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="recorded lists must have the 6 query tiles of the layout, got 3"):
        of_lists(index, layout)

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.oracle import cube_ids
from vsa.attention.hilbert import hilbert_order
from vsa.attention.layout import Segment, TileLayout, propose_tile
from vsa.attention.tiling import proposals

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

SIZES = st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(1, 8))
TILES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
PARTITIONS = ["cube", "hilbert_run", "raster_run", "hilbert2d_run", "block3d_run"]


@st.composite
def rows(draw) -> list[Segment]:
    """One to three samples, each of one or two segments with at least one video in the row."""
    segments = []
    for sample in range(draw(st.integers(1, 3))):
        for kind in draw(st.lists(st.sampled_from(["video", "image", "text", "cond"]), min_size=1, max_size=2)):
            grid = draw(SIZES)
            if kind in ("text", "cond"):
                grid = (1, 1, math.prod(grid))
            segments.append(Segment((1, *grid[1:]) if kind == "image" else grid, kind, sample))
    return segments if any(s.is_video for s in segments) else [Segment((2, 3, 4), "video", 7), *segments]


def run_order(grid: tuple[int, int, int], partition: str) -> list[int]:
    """Raster indices in the order of the runs, by comparing coordinates."""
    cells = list(itertools.product(*map(range, grid)))
    index = {cell: i for i, cell in enumerate(cells)}
    if partition == "hilbert_run":
        return hilbert_order(grid).tolist()
    if partition == "hilbert2d_run":
        frame = hilbert_order((1, *grid[1:])).tolist()
        return [index[t, *cells[i][1:]] for t in range(grid[0]) for i in frame]
    if partition == "block3d_run":
        cells.sort(key=lambda cell: ([n // 4 for n in cell], [n % 4 for n in cell]))
    return [index[cell] for cell in cells]


def coordinates(index: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    return torch.stack([index // (grid[1] * grid[2]), index // grid[2] % grid[1], index % grid[2]], dim=1)


@settings(max_examples=60, deadline=None)
@given(rows(), TILES, st.sampled_from(PARTITIONS), st.sampled_from(["nested", "raster"]))
def test_permute_round_trip_and_blocks(segments, tile, partition, block_order):
    layout = TileLayout.build(segments, tile_thw=tile, partition=partition, block_order=block_order)
    x = torch.randn(2, layout.num_tokens, 3)
    assert torch.equal(layout.unpermute(layout.permute(x)), x)
    assert torch.equal(layout.permute(layout.unpermute(x)), x)
    assert torch.equal(layout.order.sort().values, torch.arange(layout.num_tokens))
    assert torch.equal(layout.order[layout.inverse], torch.arange(layout.num_tokens))

    sizes = layout.blocks.sizes
    assert sizes.sum() == layout.num_tokens == sum(s.num_tokens for s in segments)
    assert (sizes.min(), sizes.max()) == (layout.blocks.min_size, layout.blocks.max_size)
    assert layout.blocks.num == layout.num_blocks
    # a block never leaves its segment, and segments keep their places
    bounds = [0, *itertools.accumulate(s.num_tokens for s in segments)]
    for start, stop in itertools.pairwise(layout.blocks.offsets.tolist()):
        tokens = layout.order[start:stop]
        segment = bisect.bisect_right(bounds, start) - 1
        assert bounds[segment] <= tokens.min()
        assert tokens.max() < bounds[segment + 1]
        assert stop - start <= math.prod(tile)


@settings(max_examples=40, deadline=None)
@given(rows(), TILES)
def test_video_text_split_round_trip(segments, tile):
    layout = TileLayout.build(segments, tile_thw=tile)
    x = torch.randn(1, layout.num_tokens, 2)
    video = layout.take_video(x)
    texts = [x[:, start:stop] for start, stop, _ in layout.text_spans]
    assert video.shape[1] == layout.video_blocks.sizes.sum()
    assert torch.equal(layout.merge(video, texts), x)
    tile_number = torch.arange(layout.video_blocks.num).double()[None, :, None]
    expected = torch.arange(layout.video_blocks.num).repeat_interleave(layout.video_blocks.sizes)
    assert torch.equal(layout.tile_to_tokens(tile_number)[0, :, 0], expected.double())
    assert sum(layout.video_tiles) == layout.video_blocks.num
    assert max(layout.video_tiles) == layout.num_video_tiles


@pytest.mark.parametrize("block_order", ["nested", "raster"])
@pytest.mark.parametrize(("grid", "tile"), [((5, 9, 10), (2, 4, 4)), ((4, 4, 4), (4, 4, 4)), ((3, 7, 5), (2, 2, 3))])
def test_cubes_hold_the_tokens_of_one_cuboid(grid, tile, block_order):
    layout = TileLayout.build([Segment(grid)], tile_thw=tile, block_order=block_order)
    ids = torch.tensor(cube_ids(grid, tile))[layout.order]
    blocks = [ids[a:b] for a, b in itertools.pairwise(layout.blocks.offsets.tolist())]
    assert all(len(block.unique()) == 1 for block in blocks)
    numbers = [int(block[0]) for block in blocks]
    assert sorted(numbers) == list(range(math.prod(math.ceil(n / c) for n, c in zip(grid, tile, strict=True))))
    assert block_order == "nested" or numbers == sorted(numbers)
    # raster inside a tile
    for start, stop in itertools.pairwise(layout.blocks.offsets.tolist()):
        assert torch.equal(layout.order[start:stop], layout.order[start:stop].sort().values)


def test_tile_order_is_the_papers():
    (nt, nh, nw), (ct, ch, cw) = (2, 3, 2), (2, 2, 4)
    layout = TileLayout.build([Segment((nt * ct, nh * ch, nw * cw))], tile_thw=(ct, ch, cw), block_order="raster")
    t, h, w = coordinates(torch.arange(layout.num_tokens), (nt * ct, nh * ch, nw * cw)).unbind(1)
    tile = (t // ct) * nh * nw + (h // ch) * nw + w // cw
    assert torch.equal(layout.inverse, tile * ct * ch * cw + (t % ct) * ch * cw + (h % ch) * cw + w % cw)


@pytest.mark.parametrize("tiles", [(4, 4, 4), (3, 5, 7), (1, 2, 3), (2, 1, 5)])
def test_nested_groups_are_larger_tiles(tiles):
    """Aligned groups of 2, 4, 8 blocks are the tiles of a grid with tiles twice as high, wide, long."""
    grid = tuple(2 * n for n in tiles)
    layout = TileLayout.build([Segment(grid)], tile_thw=(2, 2, 2), block_order="nested")
    block = torch.arange(layout.num_blocks).repeat_interleave(layout.blocks.sizes)
    for group, larger in {2: (2, 4, 2), 4: (2, 4, 4), 8: (4, 4, 4)}.items():
        offsets = layout.super_offsets[group]
        assert offsets[0] == 0
        assert offsets[-1] == layout.num_blocks
        group_of_token = torch.bucketize(block, offsets.long(), right=True)
        ids = torch.tensor(cube_ids(grid, larger))[layout.order]
        pairs = {(int(a), int(b)) for a, b in zip(group_of_token, ids, strict=True)}
        assert len(pairs) == len(offsets) - 1 == len(set(ids.tolist()))
        assert (offsets.diff() <= group).all()
    # edge groups are short, so offsets are not multiples of the group size
    if tiles == (3, 5, 7):
        assert not torch.equal(layout.super_offsets[4][:-1], 4 * torch.arange(len(layout.super_offsets[4]) - 1))


CHAINS = [
    ((4, 4, 4), (2, 4, 2)),
    ((2, 4, 2), (4, 4, 4)),
    ((4, 8, 8), (4, 8, 8), (4, 4, 4)),
    ((2, 4, 4), (2, 2, 4), (1, 2, 2)),
    ((3, 2, 2), (3, 4, 6), (1, 2, 2)),
    ((1, 1, 16), (1, 1, 8), (1, 1, 2)),
]


@settings(max_examples=40, deadline=None)
@given(SIZES, st.sampled_from(CHAINS), st.sampled_from(["nested", "raster"]), st.sampled_from(PARTITIONS))
def test_tiles_of_several_sizes_share_an_order(grid, tiles, block_order, partition):
    tile, kv_tile, *more = tiles
    layout = TileLayout.build(
        [Segment(grid)],
        tile_thw=tile,
        kv_tile_thw=kv_tile,
        more_tiles=more,
        block_order=block_order,
        partition=partition,
    )
    assert torch.equal(layout.order.sort().values, torch.arange(math.prod(grid)))
    assert set(layout.tiles) == set(tiles)
    assert layout.blocks is layout.tiles[tile]
    assert layout.kv_blocks is layout.tiles[kv_tile]
    assert layout.num_video_tiles == layout.kv_blocks.num
    for size, blocks in layout.tiles.items():
        ids = torch.tensor(cube_ids(grid, size))[layout.order]
        if partition != "cube":
            ids = torch.arange(math.prod(grid)) // math.prod(size)
            assert layout.order.tolist() == run_order(grid, partition)
        cut = [ids[a:b] for a, b in itertools.pairwise(blocks.offsets.tolist())]
        assert all(len(block.unique()) == 1 for block in cut)
        assert sorted(int(block[0]) for block in cut) == sorted(set(ids.tolist()))
        assert (blocks.min_size, blocks.max_size) == (min(map(len, cut)), max(map(len, cut)))


@settings(max_examples=40, deadline=None)
@given(rows(), st.sampled_from(CHAINS), st.sampled_from(["nested", "raster"]), st.sampled_from(PARTITIONS))
def test_tiles_of_several_sizes_in_every_segment(segments, tiles, block_order, partition):
    """A row is its segments one after the other, each cut as if it were alone; a text like a video in raster runs."""
    tile, kv_tile, *more = tiles
    options = {"tile_thw": tile, "kv_tile_thw": kv_tile, "more_tiles": more, "block_order": block_order}
    layout = TileLayout.build(segments, partition=partition, **options)
    alone = [
        TileLayout.build([Segment(s.grid_thw)], partition=partition if s.is_video else "raster_run", **options)
        for s in segments
    ]
    starts = list(itertools.accumulate((s.num_tokens for s in segments), initial=0))
    orders = [one.order + start for one, start in zip(alone, starts, strict=False)]
    assert torch.equal(layout.order, torch.cat(orders))
    for size, blocks in layout.tiles.items():
        assert blocks.sizes.tolist() == [n for one in alone for n in one.tiles[size].sizes.tolist()]
    videos = [(s, one) for s, one in zip(segments, alone, strict=True) if s.is_video]
    assert layout.video_blocks.sizes.tolist() == [n for _, one in videos for n in one.blocks.sizes.tolist()]
    owners = {sample: 0 for sample in (s.sample for s in segments)}
    for segment, one in videos:
        owners[segment.sample] += one.kv_blocks.num
    assert layout.video_tiles == tuple(owners.values())
    queries = [s for s, one in videos for _ in range(one.blocks.num)]
    keys = [s for s, one in zip(segments, alone, strict=True) for _ in range(one.kv_blocks.num)]
    candidates = [[q.sample == k.sample and k.is_video for k in keys] for q in queries]
    always = [[q.sample == k.sample and not k.is_video for k in keys] for q in queries]
    every = torch.ones(len(queries), len(keys), dtype=torch.bool)
    assert (every if layout.candidates is None else layout.candidates).tolist() == candidates
    assert (~every if layout.always is None else layout.always).tolist() == always


def test_one_size_of_tiles_is_the_plain_layout():
    segments = [Segment((3, 5, 7))]
    plain = TileLayout.build(segments, tile_thw=(2, 4, 4))
    assert TileLayout.build(segments, tile_thw=(2, 4, 4), kv_tile_thw=(2, 4, 4), more_tiles=[(2, 4, 4)]) is plain
    # the largest tiles keep the order that they have alone
    for order in ("nested", "raster"):
        fine = TileLayout.build(segments, tile_thw=(2, 4, 4), kv_tile_thw=(2, 2, 2), block_order=order)
        alone = TileLayout.build(segments, tile_thw=(2, 4, 4), block_order=order)
        tiles = torch.tensor(cube_ids((3, 5, 7), (2, 4, 4)))
        assert torch.equal(tiles[fine.order], tiles[alone.order])


def test_nested_groups_stay_inside_segments():
    layout = TileLayout.build([Segment((2, 2, 3)), Segment((1, 1, 5), "text")], tile_thw=(1, 2, 1))
    for offsets in layout.super_offsets.values():
        assert 6 in offsets.tolist()
    raster = TileLayout.build([Segment((2, 2, 3))], tile_thw=(1, 2, 1), block_order="raster")
    assert raster.super_offsets == {}


@pytest.mark.parametrize(
    "grid", [(4, 4, 4), (8, 8, 8), (4, 6, 10), (2, 8, 4), (5, 6, 7), (3, 5, 7), (1, 9, 4), (1, 1, 6)]
)
def test_hilbert_steps_touch(grid):
    order = hilbert_order(grid)
    assert torch.equal(order.sort().values, torch.arange(math.prod(grid)))
    step = coordinates(order, grid).diff(dim=0).abs()
    assert step.max() <= 1
    if all(n % 2 == 0 for n in grid):
        assert (step.sum(1) == 1).all()
    # raster order does jump: the property is not true of any order
    jumps = coordinates(torch.arange(math.prod(grid)), grid).diff(dim=0).abs().max()
    assert jumps > 1 or grid == (1, 1, 6)


def test_hilbert_runs_are_full_and_compact():
    grid, tile = (5, 9, 10), (4, 4, 4)
    layout = TileLayout.build([Segment(grid)], tile_thw=tile, partition="hilbert_run")
    assert layout.blocks.sizes.tolist() == [64] * 7 + [2]
    cube = TileLayout.build([Segment(grid)], tile_thw=tile)
    assert cube.num_blocks == 18
    assert cube.fill < layout.fill == pytest.approx(450 / 512)
    # at a power of two, runs along the curve are the cubes themselves
    runs = TileLayout.build([Segment((8, 8, 8))], tile_thw=tile, partition="hilbert_run")
    ids = torch.tensor(cube_ids((8, 8, 8), tile))[runs.order].view(8, 64)
    assert (ids == ids[:, :1]).all()


def test_raster_runs_keep_the_order_and_every_run_full():
    segments = [Segment((1, 1, 11), "text"), Segment((3, 5, 7))]
    layout = TileLayout.build(segments, tile_thw=(1, 1, 16), partition="raster_run", block_order="raster")
    assert layout.is_identity
    # a text has runs of its own, so the first run of the video is whole
    assert layout.blocks.sizes.tolist() == [11] + [16] * 6 + [9]
    assert layout.video_blocks.sizes.tolist() == [16] * 6 + [9]
    assert layout.fill == pytest.approx(105 / 112)
    video = TileLayout.build([Segment((3, 5, 7))], tile_thw=(1, 1, 16), kv_tile_thw=(1, 1, 8), partition="raster_run")
    assert video.is_identity
    assert video.kv_blocks.sizes.tolist() == [8] * 13 + [1]
    # the cuboid of these sides is cut at the end of every row
    with pytest.warns(UserWarning, match="full"):
        cube = TileLayout.build([Segment((3, 5, 7))], tile_thw=(1, 1, 16))
    assert cube.num_blocks == 15


def test_wan_480p_block_counts():
    segment = [Segment((21, 30, 52))]
    assert TileLayout.build(segment, tile_thw=(4, 4, 4)).num_blocks == 6 * 8 * 13
    assert TileLayout.build(segment, tile_thw=(4, 4, 4), partition="hilbert_run").num_blocks == 512


def test_full_row_and_identity():
    segments = [Segment((2, 3, 4)), Segment((1, 1, 5), "text")]
    layout = TileLayout.build(segments, tile_thw=None)
    x = torch.randn(1, 29, 2)
    assert layout.is_identity
    assert layout.permute(x) is x
    assert layout.blocks.sizes.tolist() == [24, 5]
    assert not TileLayout.build(segments, tile_thw=(1, 2, 2)).is_identity
    assert TileLayout.build([Segment((3, 4, 5))], tile_thw=(1, 4, 5)).is_identity


def test_selection_rule():
    segments = [
        Segment((1, 1, 3), "text", 0),
        Segment((1, 2, 4), "video", 0),
        Segment((1, 2, 2), "image", 1),
        Segment((1, 1, 2), "cond", 1),
    ]
    layout = TileLayout.build(segments, tile_thw=(1, 2, 2))
    assert layout.candidates is not None
    assert layout.always is not None
    assert layout.candidates.int().tolist() == [[0, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0]]
    assert layout.always.int().tolist() == [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]]
    assert layout.sample_spans == ((0, 11), (11, 17))
    assert layout.text_spans == ((0, 3, 0), (15, 17, 1))
    assert layout.video_spans == ((3, 15),)
    assert layout.video_tiles == (2, 1)
    packed = TileLayout.build([Segment((1, 2, 2)), Segment((1, 2, 2), "video", 1)], tile_thw=(1, 2, 2))
    assert packed.candidates is not None
    assert packed.always is None
    plain = TileLayout.build([Segment((1, 2, 2))], tile_thw=(1, 2, 2))
    assert plain.candidates is None
    assert plain.always is None


def test_low_fill_warns_once_and_proposes():
    grid, tile = (5, 8, 12), (4, 4, 4)
    # 363 tiles of 63 tokens; (2, 4, 8) would be 352, (4, 4, 4) are 384
    assert propose_tile((21, 32, 32), 64) == (7, 3, 3)
    assert propose_tile((16, 32, 32), 64) == (4, 4, 4)
    with pytest.warns(UserWarning, match=r"tiles \(4, 4, 4\) are 62% full.*grid \(5, 8, 12\)"):
        TileLayout.build([Segment(grid)], tile_thw=tile, block_order="raster")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TileLayout.build([Segment(grid)], tile_thw=tile, block_order="raster")
        # short text tiles do not count: their length is the text's
        TileLayout.build([Segment((4, 8, 12)), Segment((1, 1, 5), "text")], tile_thw=tile)


@settings(max_examples=30, deadline=None)
@given(SIZES, st.sampled_from([4, 8, 16, 27, 64]))
def test_proposed_tiles_are_few(grid, volume):
    def count(tile: tuple[int, ...]) -> int:
        return math.prod(math.ceil(n / c) for n, c in zip(grid, tile, strict=True))

    def surface(tile: tuple[int, ...]) -> int:
        return sum(a * b for a, b in itertools.combinations(tile, 2))

    every = [c for c in itertools.product(range(1, volume + 1), repeat=3) if math.prod(c) <= volume]
    tile = propose_tile(grid, volume)
    assert math.prod(tile) <= volume
    good = math.prod(grid) / 0.9 / volume
    assert count(tile) <= max(good, min(count(c) for c in every)) + 1e-9
    # of those that are as good, none is nearer to a cube
    assert surface(tile) == min(surface(c) for c in every if count(c) <= max(good, count(tile)) + 1e-9)


def test_proposals_for_wan_480p():
    tiles = proposals((21, 30, 52), 64)
    counts = {tile: math.prod(math.ceil(n / c) for n, c in zip((21, 30, 52), tile, strict=True)) for tile in tiles}
    assert counts[4, 4, 4] == 624
    assert counts[7, 3, 3] == 540
    assert tiles.index((7, 3, 3)) < tiles.index((4, 4, 4))
    assert counts[tiles[0]] < 32760 / 64 / 0.9
    # then by number of tiles
    worse = [counts[tile] for tile in tiles if counts[tile] > 32760 / 64 / 0.9]
    assert worse == sorted(worse)


def test_build_is_cached_immutable_and_usable_in_training():
    segments = (Segment((2, 5, 3)),)
    with torch.inference_mode(), torch.device("meta"):
        layout = TileLayout.build(segments, tile_thw=(2, 2, 2))
    assert layout is TileLayout.build(list(segments), tile_thw=[2, 2, 2], device="cpu")
    assert layout is not TileLayout.build(segments, tile_thw=(2, 2, 2), partition="hilbert_run")
    assert TileLayout.build(segments, tile_thw=(2, 2, 2), device="meta").order.is_meta
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.num_tokens = 1
    x = torch.randn(1, 30, 2, requires_grad=True)
    layout.permute(x).square().sum().backward()
    assert torch.allclose(x.grad, 2 * x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Segment((0, 2, 2)), r"grid_thw must be three positive sizes, got \(0, 2, 2\)"),
        (lambda: Segment((1, 2, 2), "audio"), "kind must be video, image, text or cond, got 'audio'"),
        (lambda: Segment((1, 2, 2), "text"), r"grid_thw of a text segment must be \(1, 1, n\), got \(1, 2, 2\)"),
        (lambda: TileLayout.build([], tile_thw=None), "at least one segment"),
        (lambda: TileLayout.build([Segment((1, 1, 2), "text")], tile_thw=None), "at least one video or image"),
        (lambda: TileLayout.build([Segment((1, 2, 2))], tile_thw=(4, 0, 4)), r"got \(4, 0, 4\)"),
        (
            lambda: TileLayout.build([Segment((1, 2, 2))], tile_thw=None, partition="x"),
            "partition must be one of cube, hilbert_run, raster_run, hilbert2d_run, block3d_run, got 'x'",
        ),
        (lambda: TileLayout.build([Segment((1, 2, 2))], tile_thw=None, block_order="x"), "raster, got 'x'"),
        (
            lambda: TileLayout.build([Segment((1, 2, 2))], tile_thw=(2, 2, 2), kv_tile_thw=(1, 4, 2)),
            r"tiles must divide each other along every axis, got \(2, 2, 2\) and \(1, 4, 2\)",
        ),
        (
            lambda: TileLayout.build([Segment((1, 2, 2))], tile_thw=None, more_tiles=[(1, 2, 2)]),
            r"tiles of several sizes need a tile_thw, got None with \(\(1, 2, 2\),\)",
        ),
        (
            lambda: TileLayout.build([Segment((1, 2, 2), sample=n) for n in (0, 1, 0)], tile_thw=None),
            r"must be adjacent, got samples \[0, 1, 0\]",
        ),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()

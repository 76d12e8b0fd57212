"""The index of neighborhood attention against loops over tokens: every listed tile, full tile and fine mask."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch
from vsa_kernels.block_sparse.checks import check_mask, check_mask_values
from vsa_kernels.block_sparse.mask import BlockMask

from tests.attention.neighborhood.oracle import axis_mask, grid_mask
from vsa.attention.layout import Segment, TileLayout
from vsa.attention.neighborhood.axis import AXES, AxisWindow, axis_rules
from vsa.attention.neighborhood.mask import axis_tiles, executed_pairs, neighborhood_index
from vsa.attention.neighborhood.tile import best_tile

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")


@dataclass(frozen=True)
class Setting:
    grid: tuple[int, int, int]
    window: tuple[int, int, int]
    stride: tuple[int, int, int] = (1, 1, 1)
    dilation: tuple[int, int, int] = (1, 1, 1)
    causal: tuple[bool, bool, bool] = (False, False, False)
    tile: tuple[int, int, int] = (2, 2, 2)
    kv_tile: tuple[int, int, int] | None = None
    text: tuple[int, int] = (0, 0)
    block_order: str = "nested"

    @property
    def axes(self):
        parts = zip(self.grid, self.window, self.stride, self.dilation, self.causal, AXES, strict=True)
        return tuple(AxisWindow(size=n, window=w, stride=s, dilation=d, causal=c, name=a) for n, w, s, d, c, a in parts)

    @property
    def layout(self):
        before, after = (() if n == 0 else (Segment((1, 1, n), kind="text"),) for n in self.text)
        segments = (*before, Segment(self.grid), *after)
        tiles = {"tile_thw": self.tile, "kv_tile_thw": self.kv_tile, "block_order": self.block_order}
        return TileLayout.build(segments, **tiles)

    @property
    def mask(self):
        return grid_mask(self.grid, self.window, self.stride, self.dilation, self.causal)


def draw(seed: int) -> Setting:
    """A random setting of a small grid."""
    rng = random.Random(seed)
    grid = tuple(rng.choice((1, 2, 3, 4, 5, 6, 7, 9, 11)) for _ in range(3))
    while math.prod(grid) > 250:
        grid = tuple(max(1, n - 1) for n in grid)
    axes = []
    for n in grid:
        dilation = rng.randint(1, n) if rng.random() < 0.3 else 1
        window = rng.choice((n // dilation, rng.randint(1, n // dilation)))
        stride = rng.choice((1, window, rng.randint(1, window)))
        axes.append((window, stride, dilation, rng.random() < 0.25))
    window, stride, dilation, causal = zip(*axes, strict=True)
    tile, kv_tile, text = tuple(rng.randint(1, 4) for _ in range(3)), None, (0, 0)
    kind = rng.random()
    if kind < 0.25:
        kv_tile = tuple(rng.choice([c for c in range(1, n + 1) if n % c == 0]) for n in tile)
    elif kind < 0.5:
        kv_tile = tuple(n * rng.randint(1, 3) for n in tile)
    if rng.random() < 0.4:
        text = (rng.choice((0, 3, 9)), rng.choice((0, 1, 5)))
    order = rng.choice(("nested", "raster"))
    return Setting(grid, window, stride, dilation, causal, tile, kv_tile, text, order)


def check_index(setting: Setting) -> None:
    layout, axes = setting.layout, setting.axes
    index, expected = neighborhood_index(layout, axes), setting.mask
    q_blocks, kv_blocks = layout.video_blocks, layout.kv_blocks
    mask = BlockMask(index=index, q_blocks=q_blocks, kv_blocks=kv_blocks, kv_valid=None)
    first, num_video = setting.text[0], math.prod(setting.grid)
    check_mask(torch.zeros(1, num_video, 1, 1), mask)
    check_mask_values(mask, num_video, layout.num_tokens)
    # rows and columns as they are stored; text is visible to all
    visibility = torch.ones(layout.num_tokens, layout.num_tokens, dtype=torch.bool)
    visibility[first : first + num_video, first : first + num_video] = expected
    visibility = visibility[layout.order][:, layout.order][first : first + num_video]
    counts = index.kv_num_blocks[0, 0].tolist()
    full = counts if index.kv_num_full_blocks is None else index.kv_num_full_blocks[0, 0].tolist()
    assert (index.max_blocks, index.min_blocks) == (max(counts), min(counts))
    coverage = torch.zeros_like(visibility)
    q_offsets, kv_offsets = q_blocks.offsets.tolist(), kv_blocks.offsets.tolist()
    mask_numbers = set()
    for row, (a, b) in enumerate(itertools.pairwise(q_offsets)):
        for slot, tile in enumerate(index.kv_indices[0, 0, row, : counts[row]].tolist()):
            c, d = kv_offsets[tile : tile + 2]
            part = torch.ones(b - a, d - c, dtype=torch.bool)
            if slot >= full[row]:
                number = int(index.mask_ids[0, 0, row, slot])
                mask_numbers.add(number)
                bits = index.mask_bits[number]
                part = bits[: b - a, : d - c]
                # places behind short tiles
                assert not bits[b - a :].any()
                assert not bits[:, d - c :].any()
                # listed for a reason, and masked for one
                assert part.any()
                assert not part.all()
            coverage[a:b, c:d] = part
    assert torch.equal(coverage, visibility)
    # a mask for every number and no more
    assert mask_numbers == set(range(0 if index.mask_bits is None else len(index.mask_bits)))
    if setting.text == (0, 0):
        sizes = q_blocks.sizes.double(), kv_blocks.sizes.double()
        pairs = sizes[0] @ index.to_dense(kv_blocks.num)[0, 0].double() @ sizes[1]
        assert executed_pairs(axes, layout.tile_thw, layout.kv_tile_thw) == pairs >= expected.sum()


@pytest.mark.parametrize("part", range(2))
def test_index_equals_mask(part):
    for seed in range(part * 50, part * 50 + 50):
        check_index(draw(seed))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_index_equals_mask_fuzz(part):
    for seed in range(1000 + part * 500, 1500 + part * 500):
        check_index(draw(seed))


def test_fuzzing_reaches_what_it_should():
    settings = [draw(seed) for seed in range(200)]
    whole = [neighborhood_index(setting.layout, setting.axes).mask_bits is None for setting in settings[:50]]
    assert 5 < sum(whole) < 45
    for what in (
        lambda s: any(n % c for n, c in zip(s.grid, s.tile, strict=True)),
        lambda s: any(w % 2 == 0 for w in s.window),
        lambda s: any(1 < stride < w for stride, w in zip(s.stride, s.window, strict=True)),
        lambda s: max(s.dilation) > 1,
        lambda s: any(s.causal),
        lambda s: s.kv_tile not in (None, s.tile),
        lambda s: sum(s.text) > 0,
    ):
        assert sum(map(what, settings)) > 20


@pytest.mark.parametrize(
    "wrong",
    [{"window": (3, 4, 4)}, {"stride": (1, 1, 2)}, {"dilation": (1, 1, 1)}, {"causal": (False, False, False)}],
    ids=str,
)
def test_another_setting_is_noticed(wrong):
    setting = Setting((4, 6, 9), (3, 4, 3), (1, 2, 1), (1, 1, 2), (True, False, False))
    check_index(setting)
    other = Setting(**{**vars(setting), **wrong})
    assert not torch.equal(other.mask, setting.mask)
    with pytest.raises(AssertionError):
        check_index(type("Mixed", (Setting,), {"mask": setting.mask})(**vars(other)))


@pytest.mark.parametrize("causal", [False, True])
def test_the_rule_of_an_axis(causal):
    for n in range(1, 12):
        for d in range(1, n + 1):
            for w in range(1, n // d + 1):
                for s in range(1, w + 1):
                    axis = AxisWindow(size=n, window=w, stride=s, dilation=d, causal=causal)
                    assert torch.equal(axis.sees(), axis_mask(n, w, s, d, causal)), axis


def test_known_windows():
    # methods.md 2.1: an even window has one key more before the query, a short last run looks back
    rows = lambda **axis: [row.nonzero()[:, 0].tolist() for row in AxisWindow(**axis).sees()]  # noqa: E731
    assert rows(size=20, window=8)[10] == [6, 7, 8, 9, 10, 11, 12, 13]
    assert rows(size=10, window=4, stride=4)[8:] == [[6, 7, 8, 9]] * 2
    assert rows(size=6, window=3, stride=2, causal=True) == [[0], [0, 1], [1, 2], [1, 2, 3], [3, 4], [3, 4, 5]]


HUNYUAN = {"grid": (30, 48, 80), "window": (18, 24, 24)}


@pytest.mark.parametrize(
    ("stride", "tile", "worst", "masks"),
    [
        ((1, 1, 1), (4, 4, 4), 294, True),
        ((1, 8, 8), (1, 8, 8), 162, False),
        ((16, 8, 8), (2, 4, 8), 162, False),
        ((16, 8, 8), (4, 4, 4), 180, True),
    ],
)
def test_hunyuan(stride, tile, worst, masks):
    setting = Setting(**HUNYUAN, stride=stride, tile=tile)
    index = neighborhood_index(setting.layout, setting.axes)
    assert index.max_blocks == worst
    assert (index.mask_bits is not None) == masks
    if not masks:
        # perfectly block-sparse: 11.1 times fewer tiles, nothing to hide, nothing to ask the device for
        assert (index.kv_num_full_blocks, index.mask_ids, index.min_blocks) == (None, None, worst)
        assert executed_pairs(setting.axes, tile, tile) == math.prod(setting.grid) * math.prod(setting.window)
        assert best_tile(setting.axes, even=True) == (tile, tile)


def test_tiles_of_queries_and_keys_as_published():
    # methods.md 2.3: tiles visited by the worst query tile of 4x8x8 among kv tiles of 2x8x8
    for stride, worst in {(1, 1, 1): 275, (2, 1, 1): 250, (1, 8, 8): 99, (16, 8, 8): 81, (18, 24, 24): 135}.items():
        setting = Setting(**HUNYUAN, stride=stride, tile=(4, 8, 8), kv_tile=(2, 8, 8))
        counts = [
            int(axis_tiles(axis, q, k).seen.sum(1).max())
            for axis, q, k in zip(setting.axes, setting.tile, setting.kv_tile, strict=True)
        ]
        assert math.prod(counts) == worst, stride


@pytest.mark.parametrize("seed", range(12))
def test_the_chosen_tile_visits_the_fewest(seed):
    setting = draw(seed)

    def visits(tile):
        return math.prod(int(axis_tiles(axis, c, c).seen.sum()) for axis, c in zip(setting.axes, tile, strict=True))

    best = best_tile(setting.axes, q_tokens=8, kv_tokens=8, even=True)[1]
    tiles = [(t, h, 8 // t // h) for t in (1, 2, 4, 8) for h in (1, 2, 4, 8) if t * h <= 8]
    assert best in tiles
    assert visits(best) == min(map(visits, tiles))


def test_short_tiles_are_chosen_where_they_cost_least():
    # in a flat grid a tile of 2 frames is half empty
    assert best_tile(Setting((1, 64, 64), (1, 16, 16)).axes, even=True)[1] == (1, 8, 8)
    assert best_tile(Setting((16, 32, 32), (8, 8, 8)).axes, even=True)[1] == (4, 4, 4)
    # a grid smaller than a tile is one tile
    assert best_tile(Setting((2, 3, 4), (2, 3, 4)).axes, even=True)[1] == (4, 4, 4)


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ({"window": 5}, "window of height must be at most its 4 tokens, got 5"),
        ({"window": 2, "stride": 3}, "stride of height must be at most its window 2, got 3"),
        ({"window": 2, "dilation": 3}, r"dilation 3 of height does not fit: window 2 \* 3 is above its 4 tokens"),
        ({"window": 0}, "window of height must be at least 1, got 0"),
    ],
)
def test_refused_windows(axis, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        AxisWindow(size=4, name="height", **axis)


@pytest.mark.parametrize(
    ("size", "window", "stride", "expected"),
    [
        # tokens stay what they are
        (80, 24, 8, (24, 8)),
        (80, 23, 8, (23, 8)),
        # the paper's 18x24x24 on 30x48x80, windows of three strides
        (30, 0.6, 0.2, (18, 6)),
        (48, 0.5, 0.1667, (24, 8)),
        (80, 0.3, 0.1, (24, 8)),
        # 12.6 and 4.2 of 21 tokens: a multiple of the stride
        (21, 0.6, 0.2, (12, 4)),
        # half a token counts up, as the number is written
        (30, 0.15, 1, (5, 1)),
        # at least one token, at least one stride, at most the whole strides of the axis
        (4, 0.1, 0.1, (1, 1)),
        (10, 0.2, 4, (4, 4)),
        (10, 0.9, 4, (8, 4)),
        # the whole axis stays whole
        (10, 1.0, 4, (10, 4)),
        (10, 1, 1, (1, 1)),
    ],
)
def test_shares(size, window, stride, expected):
    rule = axis_rules((window,) * 3, (stride,) * 3, (1, 1, 1), (False,) * 3)[1]
    axis = rule.at(size)
    assert (axis.window, axis.stride, axis.name) == (*expected, "height")


def test_shares_of_a_dilated_axis_fit():
    for size in range(1, 40):
        for dilation in range(1, size + 1):
            for share in (0.05, 0.3, 1.0):
                axis = axis_rules((share,) * 3, (1, 1, 1), (dilation,) * 3, (False,) * 3)[0].at(size)
                assert axis.window * dilation <= size
    with pytest.raises(ValueError, match="dilation 9 of time does not fit"):
        axis_rules((0.5,) * 3, (1, 1, 1), (9,) * 3, (False,) * 3)[0].at(8)


def test_shares_of_a_stride_that_is_refused():
    with pytest.raises(ValueError, match=r"^stride of width must be at most its window 0\.3, got 0\.5"):
        axis_rules((0.3, 0.3, 0.3), (0.1, 0.3, 0.5), (1, 1, 1), (False,) * 3)
    with pytest.raises(ValueError, match=r"^stride of time must be at most its window 2, got 6$"):
        axis_rules((0.4, 4, 4), (6, 1, 1), (1, 1, 1), (False,) * 3)[0].at(5)


@pytest.mark.parametrize(
    ("segments", "layout", "message"),
    [
        (
            [Segment((2, 2, 2)), Segment((2, 2, 2), sample=1)],
            {},
            r"takes rows of one video and its text, got .*'video', 1",
        ),
        ([Segment((2, 2, 2)), Segment((1, 2, 2), kind="image")], {}, "takes rows of one video and its text"),
        ([Segment((2, 2, 2))], {"partition": "hilbert_run"}, "needs cuboid tiles, got hilbert_run"),
        ([Segment((2, 2, 3))], {}, r"axes must have the sizes \[2, 2, 3\] of the grid, got \[2, 2, 2\]"),
    ],
)
def test_refused_rows(segments, layout, message):
    tile_layout = TileLayout.build(segments, tile_thw=(2, 2, 2), **layout)
    with pytest.raises(ValueError, match=message):
        neighborhood_index(tile_layout, Setting((2, 2, 2), (1, 1, 1)).axes)

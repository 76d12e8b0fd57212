"""Ranks that share a sample compute what one process computes: every method, at ragged tiles, and gradients too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.attention.test_all_methods import ALL, GRID, SIZES, TOKENS, make
from tests.training.ranks import run_ranks
from vsa.attention.context import AttnContext
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment, TileLayout
from vsa.attention.sequence import Division, SequenceRanks, token_spans

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")
TILED = {"tile_thw": (2, 2, 2), "window_thw": [2, 3, 3]}
METHODS = [*(case.values for case in ALL), ("neighborhood", TILED)]
# one of each kind of division
QUICK = [
    *((name, {}) for name in ("full", "video_sparse", "pooled_tail", "compressed_kv")),
    *(("staged", {"stages": stages}) for stages in ("c_f", "c_f_l")),
    ("dynamic_hilbert", {"tokens": 8, "sub_tokens": 4, "padding": "zeros", "allow_training": True}),
    ("video_sparse", {"rule": "top_p", "top_p": 0.5, "over": "layer"}),
    ("video_sparse", {"over": "head"}),
    ("staged", {"stages": "c_fl", "over": "layer"}),
    ("neighborhood", TILED),
    ("sparge", {"q_tokens": 16, "kv_tokens": 8, "rule": "topk", "allow_training": True}),
    *(
        ("video_sparse", options)
        for options in ({"coarse_text": True}, {"score": "subblock_softmax", "score_thw": (1, 1, 2)})
    ),
    ("sla", {"linear": "marginal", "tile_thw": (2, 2, 2), "partition": "cube"}),
]
PASSES = ({}, {"dense": True, "topk": 100})
VIDEO, TEXT = (Segment(GRID),), (Segment((1, 1, 11), kind="text"),)
ROWS = (VIDEO, TEXT + VIDEO, VIDEO + TEXT)


# heads that are computed together, whatever the ranks, and methods that need all queries of a head
TOGETHER = ({"score": "random"},)
WHOLE_NAMES = (
    "fine_grained",
    "llsa",
    "nabla",
    "radial",
    "sla",
    "spatial",
    "spargeattention2",
    "staged",
    "strided_window",
)
WHOLE = ({"order": 2}, {"levels": 2})


def refuses(name: str, options: dict[str, object], world: int) -> bool:
    def has(*choices: dict[str, object]) -> bool:
        return any(choice.items() <= options.items() for choice in choices)

    one_tile = name in ("dynamic_hilbert", "radial", "sparge", "spargeattention2") and not options
    one_tile = one_tile or (name == "neighborhood" and options != TILED and world > 2)
    parts = world > 2 and (name.startswith(WHOLE_NAMES) or has(*WHOLE))
    return one_tile or has(*TOGETHER) or parts


def passed(method, ranks, row=VIDEO, topk=2, dense=False, summed=True) -> dict[str, torch.Tensor]:
    """Output and gradients of a batch of two samples, of which the ranks, if any, have some tokens each."""
    layout = method.layout(row)
    division = None if ranks is None else layout.derive(Division, ranks, SIZES["num_heads"])
    generator = torch.Generator().manual_seed(3)
    sizes = (2, layout.num_tokens, SIZES["num_heads"], SIZES["head_dim"])
    whole = [torch.randn(sizes, generator=generator).requires_grad_(method.allow_training) for _ in range(3)]
    hidden = torch.randn(*sizes[:2], SIZES["dim"], generator=generator)
    # pairs are counted where rows hold no text
    listed = torch.zeros((), dtype=torch.int64) if len(row) == 1 else None
    ctx = AttnContext(layout=layout, topk=KeptTiles.of(topk), dense=dense, listed=listed, division=division)
    extra = method.project(ctx.cut(hidden))
    method.zero_grad()
    out = ctx.gather(method(*(ctx.cut(x) for x in whole), extra, ctx))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    gradients: dict[str, torch.Tensor] = {}
    if method.allow_training:
        (out * weights).sum().backward()
        gradients = {name: p.grad for name, p in method.named_parameters() if p.grad is not None}
        gradients |= {name: x.grad for name, x in zip("qkv", whole, strict=True)}
    if ranks is not None:
        # as sharding does: the mean over all ranks
        for tensor in gradients.values() if summed else ():
            dist.all_reduce(tensor)
            tensor /= ranks.size
        if listed is not None:
            dist.all_reduce(listed)
    counts = {"listed": listed} if method.measured and listed is not None else {}
    return {"out": out.detach(), **counts, **gradients}


def difference(one: dict[str, torch.Tensor], several: dict[str, torch.Tensor]) -> float:
    """The largest over the outputs and gradients, relative to the largest value of each."""
    assert one.keys() == several.keys()
    pairs = [(one[name].double(), several[name].double()) for name in one]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-3)) for a, b in pairs)


@pytest.mark.parametrize(
    ("world", "methods", "rows"),
    [
        pytest.param(2, QUICK, ROWS[:2], marks=pytest.mark.slow),
        (3, QUICK, ROWS[::2]),
        *(pytest.param(world, METHODS, ROWS, marks=pytest.mark.slow) for world in (2, 3, 4)),
    ],
    ids=["2", "3", "2 all", "3 all", "4 all"],
)
def test_every_method_is_divided_or_refuses(world, methods, rows):
    def on_rank(rank: int) -> list[str | float]:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        ranks, found = SequenceRanks(group=dist.group.WORLD.group_name, size=world, rank=rank), []
        for name, options in methods:
            method = make(name, options)
            try:
                method.refuse_division(world)
                cases = [(row, how) for row in rows for how in PASSES if method.takes_text or row is VIDEO]
                several = [passed(method, ranks, row, **how) for row, how in cases]
            except ValueError as error:
                found.append(str(error))
                continue
            ones = [passed(method, None, row, **how) for row, how in cases]
            found.append(max(difference(*pair) for pair in zip(ones, several, strict=True)))
        # control: gradients of a rank's own tokens
        method = make("video_sparse", {})
        alone = [difference(passed(method, None, row), passed(method, ranks, row, summed=False)) for row in rows]
        return [*found, *alone]

    results = run_ranks(world, on_rank)[0]
    assert min(results[len(methods) :]) > 0.01
    for (name, options), found in zip(methods, results, strict=False):
        if refuses(name, options, world):
            assert isinstance(found, str), (name, options)
            assert found.startswith(f"task.parallel.sequence={world}")
        else:
            assert isinstance(found, float), (name, options, found)
            assert found < 1e-6, (name, options)


@pytest.mark.parametrize(("tile", "ranks"), [((2, 2, 4), 2), ((2, 2, 4), 3), ((1, 2, 2), 5), (None, 7)])
def test_tokens_are_cut_at_tiles_and_balanced(tile, ranks):
    layout = TileLayout.build([Segment(GRID)], tile_thw=tile)
    spans = token_spans(layout, ranks)
    ends = layout.blocks.offsets.tolist() if tile else range(TOKENS + 1)
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == TOKENS
    assert all(stop in ends and stop > start for start, stop in spans)
    largest = layout.blocks.max_size if tile else 1
    assert all(abs(stop - start - TOKENS / ranks) <= largest for start, stop in spans)


def test_more_ranks_than_tiles_are_refused():
    layout = TileLayout.build([Segment(GRID)], tile_thw=(4, 3, 3))
    message = r"task\.parallel\.sequence=3: a sample of \(4, 3, 6\) tokens has 2 query tiles to divide"
    with pytest.raises(ValueError, match=message):
        token_spans(layout, 3)

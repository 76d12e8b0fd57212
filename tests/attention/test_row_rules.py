"""Row rules of the methods that rank tiles, against dense masks in raster order and fp64, forward and gradients."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tests.attention.oracle import cube_ids, grads_of
from tests.attention.test_configs import CONFIGS
from tests.attention.test_pooled_tail import oracle, two_levels
from vsa.attention.context import AttnContext
from vsa.attention.denoising import DenoisingPass
from vsa.attention.full import dense_attn
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.attention.pooled_tail import PooledTail
from vsa.attention.staged import StagedAttention
from vsa.attention.video_sparse import VideoSparseAttention

SIZES = {"dim": 16, "num_heads": 4, "head_dim": 4}
GRID = (3, 5, 4)
TILE = (2, 2, 2)
RULES = [
    {"rule": "topk", "over": "head"},
    {"rule": "topk", "over": "layer"},
    {"rule": "top_p", "top_p": 0.4},
    {"rule": "top_p", "over": "head", "top_p": 0.4},
    {"rule": "larger_of_both", "top_p": 0.4},
    {"rule": "larger_of_both", "over": "layer", "top_p": 0.4},
    {"rule": "mean_plus_std", "deviations": 0.7},
    {"rule": "mean_plus_std", "over": "head", "deviations": 0.7},
]
pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")


def members(grid, tile):
    ids = torch.tensor(cube_ids(grid, tile))
    return torch.stack([ids == n for n in range(int(ids.max()) + 1)]).double()


def runs(grid, length):
    """Tiles of consecutive tokens in raster order."""
    ids = torch.arange(math.prod(grid)) // length
    return torch.stack([ids == n for n in range(int(ids.max()) + 1)]).double()


def scores_of(q, k, tiles, kv_tiles, subs=None):
    """Logits of mean q, k of `[B, H, L, D]`, `[B, H, N, M]`, or shares by a softmax over sub-blocks."""
    scale = q.shape[-1] ** -0.5
    if subs is None:
        return mean_of(tiles) @ q @ (mean_of(kv_tiles) @ k).mT * scale
    inside = ((tiles @ subs.T) > 0).double()
    shares = (mean_of(subs) @ q @ (mean_of(subs) @ k).mT * scale + subs.sum(1).log()).softmax(-1)
    return mean_of(inside) @ shares @ inside.T


def mean_of(members):
    return members / members.sum(1, keepdim=True)


def kept_tiles(values, *, rule, over="row", topk, top_p=None, deviations=None):
    """Bool mask of the tiles that a rule keeps of logits `[B, H, N, N]`, or of shares, one group of cells at a time."""
    shares = values.softmax(-1) if values.min() < 0 else values / values.sum(-1, keepdim=True)
    compared = values if over == "row" else shares
    mask = torch.zeros_like(values, dtype=torch.bool)
    heads, rows, columns = values.shape[1:]
    numbers, weights = compared.tolist(), shares.tolist()
    for b in range(len(values)):
        every = [(h, i) for h in range(heads) for i in range(rows)]
        by_head = [[place for place in every if place[0] == h] for h in range(heads)]
        for group in {"row": [[place] for place in every], "head": by_head, "layer": [every]}[over]:
            cells = [(numbers[b][h][i][j], h, i, j) for h, i in group for j in range(columns)]
            best = {max(cell for cell in cells if cell[1:3] == place) for place in group}
            # the best of every row counts first
            order = sorted(best, reverse=True) + sorted(set(cells) - best, reverse=True)
            chosen = set(best)
            if rule in ("topk", "larger_of_both"):
                chosen |= set(order[: topk * len(group)])
            if top_p is not None:
                held, wanted = 0.0, top_p * sum(sum(weights[b][h][i]) for h, i in group)
                for cell in order:
                    if held < wanted:
                        chosen.add(cell)
                    held += weights[b][cell[1]][cell[2]][cell[3]]
            if deviations is not None:
                mean = fmean(cell[0] for cell in cells)
                bar = mean + deviations * pstdev((cell[0] for cell in cells), mean)
                chosen |= {cell for cell in cells if cell[0] > bar}
            for _, h, i, j in chosen:
                mask[b, h, i, j] = True
    return mask


def definition(q, k, v, gates, *, tiles, tail, kv_tiles=None, subs=None, **rule):
    """Output `[B, L, H, D]` in raster order; tiles, kv_tiles, subs: 0 or 1 `[N, L]`, tokens of each."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    kv_tiles = tiles if kv_tiles is None else kv_tiles
    mask = kept_tiles(scores_of(q, k, tiles, kv_tiles, subs).detach(), **rule).double()
    logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(tiles.T @ mask @ kv_tiles == 0, -math.inf)
    means = mean_of(tiles)
    if tail == "pooled":
        others = q @ (means @ k).mT * q.shape[-1] ** -0.5 + tiles.sum(1).log()
        others = others.masked_fill(tiles.T @ mask > 0, -math.inf)
        out = torch.cat((logits, others), -1).softmax(-1) @ torch.cat((v, means @ v), 2)
    else:
        out = logits.softmax(-1) @ v
    if tail == "coarse":
        coarse = tiles.T @ (scores_of(q, k, tiles, tiles).softmax(-1) @ (means @ v))
        out = out * gates[1].transpose(1, 2) + coarse * gates[0].transpose(1, 2)
    return out.transpose(1, 2)


def assert_same(out, expected, leaves):
    """Outputs and gradients."""
    for ours, theirs in zip((out, *grads_of(out, leaves)), (expected, *grads_of(expected, leaves)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


def inputs(grid):
    generator = torch.Generator().manual_seed(sum(grid))
    shape = (5, 2, math.prod(grid), 4, 4)
    q, k, *others = torch.randn(shape, generator=generator, dtype=torch.float64)
    # heads that differ in how peaked they are, as budgets over a layer see
    q = q * torch.tensor([0.5, 1, 2, 4], dtype=torch.float64)[:, None]
    return [x.requires_grad_() for x in (q, k, *others)]


def run(method, grid, leaves, topk=3, **context):
    layout = method.layout([Segment(grid)], "cpu")
    q, k, v, *gates = (layout.permute(x) for x in leaves)
    extra = {}
    if isinstance(method, VideoSparseAttention):
        extra = dict(zip(("gate_compress", "gate_fine"), gates, strict=True))
        extra = extra if method.to_gate_fine is not None else {"gate_compress": gates[0]}
    return layout.unpermute(method(q, k, v, extra, AttnContext(layout=layout, topk=KeptTiles.of(topk), **context)))


METHODS = {
    "coarse": VideoSparseAttention,
    "none": lambda **options: StagedAttention(**options, stages="f", fine_gate=False),
    "pooled": PooledTail,
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.values())))
@pytest.mark.parametrize("tail", METHODS)
def test_a_method_computes_what_its_rule_keeps(tail, rule):
    # ragged and full tiles
    grid = GRID if rule.get("over") != "head" else (4, 4, 6)
    leaves = inputs(grid)
    out = run(METHODS[tail](**SIZES, tile_thw=TILE, **rule), grid, leaves)
    expected = definition(*leaves[:3], leaves[3:], tiles=members(grid, TILE), tail=tail, topk=3, **rule)
    assert_same(out, expected, leaves[: 5 if tail == "coarse" else 3])
    # the control: a plain top-k
    plain = run(METHODS[tail](**SIZES, tile_thw=TILE), grid, leaves)
    assert (plain - expected).abs().max() > 1e-3


@pytest.mark.parametrize("tail", METHODS)
def test_what_keeps_all_tiles_is_a_plain_topk_of_all(tail):
    grid = GRID
    leaves = [x.detach() for x in inputs(grid)]
    everything = run(METHODS[tail](**SIZES, tile_thw=TILE), grid, leaves, topk=1000)
    for rule in ({"rule": "top_p", "top_p": 1.0}, {"rule": "mean_plus_std", "deviations": -100.0}):
        out = run(METHODS[tail](**SIZES, tile_thw=TILE, **rule), grid, leaves, topk=1)
        torch.testing.assert_close(out, everything, atol=1e-12, rtol=0)
        # a dense layer of a denoising
        method = METHODS[tail](**SIZES, tile_thw=TILE, **{**rule, **({"top_p": 0.1} if "top_p" in rule else {})})
        dense = run(method, grid, leaves, topk=1, dense=True, denoising=DenoisingPass(progress=0.0, dense=True))
        torch.testing.assert_close(dense, everything, atol=1e-12, rtol=0)
    if tail == "pooled":
        torch.testing.assert_close(everything, dense_attn(*leaves[:3]), atol=1e-12, rtol=0)


def preset(name, **options):
    whole = {"tile_thw": list(TILE), "start": OmegaConf.load(CONFIGS / "start" / "scratch.yaml")}
    whole["attention"] = OmegaConf.load(CONFIGS / "attention" / f"{name}.yaml")
    return instantiate(OmegaConf.create(whole).attention)(**SIZES, **options)


SPARGE2 = {"rule": "larger_of_both", "top_p": 0.2}
PRESETS = {
    "vsa": ({"tile_thw": TILE}, {"tail": "coarse", "rule": "topk"}),
    "vsa2": ({"score_thw": (1, 2, 2)}, {"tail": "coarse", "rule": "topk", "over": "head", "subs": (1, 2, 2)}),
    "sol": ({}, {"tail": "pooled", "rule": "mean_plus_std", "deviations": 1.5}),
    "spargeattention2": (
        {"tile_thw": (1, 1, 8), "kv_tile_thw": (1, 1, 4)},
        {"tail": "none", **SPARGE2, "runs": (8, 4)},
    ),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_paper(name):
    grid, leaves, (options, by_definition) = GRID, inputs(GRID), PRESETS[name]
    method, rule = preset(name, **options), dict(by_definition)
    tiles = {"tiles": members(grid, TILE)}
    if subs := rule.pop("subs", None):
        tiles["subs"] = members(grid, subs)
    if lengths := rule.pop("runs", None):
        tiles = {"tiles": runs(grid, lengths[0]), "kv_tiles": runs(grid, lengths[1])}
    gates = leaves[3:]
    if rule["tail"] == "coarse" and method.to_gate_fine is None:
        gates[1] = torch.ones_like(gates[1])
    topk = 1 if name == "spargeattention2" else 3
    out = run(method, grid, [*leaves[:3], *gates], topk)
    used = leaves[: {"vsa": 5, "vsa2": 4}.get(name, 3)]
    assert_same(out, definition(*leaves[:3], gates, **tiles, topk=topk, **rule), used)
    # the control
    other = {**rule, "rule": "topk", "over": "row", "top_p": None, "deviations": None}
    other = definition(*leaves[:3], gates, **tiles, topk=topk + (name == "vsa"), **other)
    assert (out - other).abs().max() > 1e-3


@pytest.mark.parametrize("over", ["row", "head"])
def test_nabla_is_its_paper(over):
    """The tiles of a share and those of a window, in one softmax."""
    grid, leaves = (5, 5, 7), inputs((5, 5, 7))[:3]
    method = preset("nabla", tile_thw=(1, 2, 2), window_thw=(3, 1, 3), top_p=0.5, over=over)
    assert preset("nabla").window_thw == (11, 3, 3)
    places = torch.tensor([(t, h, w) for t in range(5) for h in range(3) for w in range(4)])
    window = ((places[:, None] - places).abs() <= torch.tensor([1, 0, 1])).all(-1)
    tiles = members(grid, (1, 2, 2))

    def by_masks(top_p, window):
        q, k, v = (x.transpose(1, 2) for x in leaves)
        logits = scores_of(q, k, tiles, tiles).detach()
        values = logits if over == "row" else logits.softmax(-1)
        mask = kept_tiles(values, rule="top_p", top_p=top_p, over=over, topk=0) | window
        tokens = tiles.T @ mask.double() @ tiles
        logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(tokens == 0, -math.inf)
        return (logits.softmax(-1) @ v).transpose(1, 2)

    out = run(method, grid, leaves)
    assert_same(out, by_masks(0.5, window), leaves)
    # the controls: no window, another share
    assert (out - by_masks(0.5, window & False)).abs().max() > 1e-3
    assert (out - by_masks(0.7, window)).abs().max() > 1e-3
    # the whole share is dense attention, here and in a dense layer
    whole = preset("nabla", tile_thw=(1, 2, 2), window_thw=(3, 1, 3), top_p=1.0, over=over)
    assert_same(run(whole, grid, leaves), dense_attn(*leaves), leaves)
    dense = DenoisingPass(progress=0.0, dense=True)
    assert_same(run(method, grid, leaves, dense=True, denoising=dense), dense_attn(*leaves), leaves)


def test_llsa_is_its_paper():
    """Two levels, and with one its simpler form."""
    grid, leaves = (4, 4, 6), inputs((4, 4, 6))[:3]
    assert preset("llsa").node_thw == (4, 4, 4)
    out = run(preset("llsa", node_thw=(2, 4, 4)), grid, leaves, 2)
    sizes = {"grid": grid, "tile": TILE, "topk": 2}
    assert_same(out, two_levels(*leaves, node=(2, 4, 4), tail="double_count", **sizes), leaves)
    once = run(preset("llsa", levels=1), grid, leaves, 2)
    assert_same(once, oracle(*leaves, order=1, score="mean", tail="double_count", **sizes), leaves)
    assert (
        min((out - once).abs().max(), (out - run(PooledTail(**SIZES, tile_thw=TILE), grid, leaves, 2)).abs().max())
        > 1e-3
    )


def test_vsa2_with_whole_tiles_and_a_budget_per_row_is_the_fine_stage_of_vsa():
    """Its gate starts at tanh(0) = 0, and stays below 1."""
    grid, leaves = (4, 4, 6), [x.detach() for x in inputs((4, 4, 6))]
    vsa2, vsa = preset("vsa2", over="row"), VideoSparseAttention(**SIZES, tile_thw=TILE)
    x = torch.randn(2, math.prod(grid), 16, generator=torch.Generator().manual_seed(0))
    gate = vsa2.project(x)["gate_compress"]
    assert gate.abs().max() == 0
    nothing = torch.zeros_like(leaves[0])
    ours, fine = (run(method, grid, [*leaves[:3], nothing, nothing + 1]) for method in (vsa2, vsa))
    assert torch.equal(ours, fine)
    assert not torch.equal(run(preset("vsa2"), grid, [*leaves[:3], nothing, nothing + 1]), fine)
    torch.nn.init.normal_(vsa2.to_gate_compress.weight, std=10)
    linear = x @ vsa2.to_gate_compress.weight.T
    torch.testing.assert_close(vsa2.project(x)["gate_compress"].flatten(2), linear.tanh())


def test_damaged_keys_reach_every_budget():
    """A NaN key takes the places of every row, whatever its share."""
    grid = GRID
    for rule in RULES:
        leaves = [x.detach().clone() for x in inputs(grid)]
        leaves[1][0, 7, 2, 1] = math.nan
        out = run(VideoSparseAttention(**SIZES, tile_thw=TILE, **rule), grid, leaves)
        assert out[0, :, 2].isnan().any(-1).all(), rule
        assert out[1].isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rule": "top_p"}, r"^top_p=None with rule=top_p: expected a number"),
        ({"rule": "topk", "top_p": 0.5}, r"^top_p=0.5 with rule=topk: expected null"),
        ({"rule": "mean_plus_std"}, r"^deviations=None with rule=mean_plus_std: expected a number"),
        ({"rule": "top_p", "top_p": 1.5}, r"^top_p=1.5: expected a number above 0 and of at most 1"),
        ({"rule": "cdf"}, r"^rule=cdf: expected one of topk, top_p, larger_of_both, mean_plus_std, got 'cdf'"),
        ({"over": "column"}, r"^over=column: expected one of row, head, layer, got 'column'"),
        ({"expected_density": 0.5}, r"^expected_density=0.5 with rule=topk: its number of tiles is known"),
    ],
)
def test_bad_settings(settings, message):
    for method in (VideoSparseAttention, StagedAttention, PooledTail):
        with pytest.raises(ValueError, match=message):
            method(**SIZES, **settings)


def test_rules_that_stages_or_rows_do_not_have():
    with pytest.raises(ValueError, match=r"^rule=topk over=head needs stages with f, got stages=c_l"):
        StagedAttention(**SIZES, stages="c_l", over="head")
    with pytest.raises(ValueError, match=r"^rule=top_p over=row needs stages f, c_f, fl or c_fl, got stages=c_f_l"):
        StagedAttention(**SIZES, stages="c_f_l", rule="top_p", top_p=0.5)
    method = VideoSparseAttention(**SIZES, tile_thw=TILE, over="head")
    layout = method.layout([Segment((2, 2, 4), sample=n) for n in range(2)], "cpu")
    q = torch.zeros(1, layout.num_tokens, 4, 4)
    with pytest.raises(ValueError, match=r"^over=head shares a budget inside a sample, got 2 in a row"):
        method.attend(q, q, q, AttnContext(layout=layout, topk=KeptTiles.of(1)))


def test_scores_without_an_attention_map_have_shares_of_their_sum():
    scores = torch.tensor([[[[5.0, 3.0, 2.0, 0.0], [0.0, 0.2, 0.1, 0.1], [0.0, 0.0, 0.0, 1.0]]]])
    for over, expected in (("row", [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]),
                           ("head", [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]])):  # fmt: skip
        method = PooledTail(**SIZES, tile_thw=TILE, rule="top_p", top_p=0.6, over=over)
        ctx = AttnContext(layout=method.layout([Segment((2, 4, 4))], "cpu"), topk=KeptTiles.of(1))
        index = method.choose(scores, ctx.topk, ctx, logits_of=lambda scores: None)
        # of the head: 1 + 1/2 + 1/2 of 3
        assert index.to_dense(4)[0, 0].int().tolist() == expected


def test_expected_pairs():
    rules = {
        (("rule", "topk"),): 3,
        (("rule", "topk"), ("over", "layer")): 3,
        (("rule", "top_p"), ("top_p", 0.5)): 12,
        (("rule", "top_p"), ("top_p", 0.5), ("expected_density", 0.25)): 3,
        (("rule", "larger_of_both"), ("top_p", 0.5)): 3,
        (("rule", "larger_of_both"), ("top_p", 0.5), ("expected_density", 0.5)): 6,
        # one of six is above the mean of a normal distribution by a deviation
        (("rule", "mean_plus_std"), ("deviations", 1.0)): 12 * 0.15865525393145707,
    }
    for rule, kept in rules.items():
        method = VideoSparseAttention(**SIZES, tile_thw=TILE, **dict(rule))
        layout = method.layout([Segment(GRID)], "cpu")
        assert method.expected_pairs(layout, 3) == pytest.approx(method.pairs(layout, kept), rel=1e-12), rule
        assert method.measured == (dict(rule)["rule"] != "topk")
        assert method.selects == (dict(rule)["rule"] in ("topk", "larger_of_both")) != method.predicts

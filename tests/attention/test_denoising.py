"""Denoising plans, and selections that are kept, reused, shared and differ by sample, against dense masks in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from vsa_kernels import BlockIndex

from tests.attention.oracle import cube_ids, video_sparse_oracle
from tests.sizes import SIZES
from vsa.attention.base import AttentionMethod
from vsa.attention.compressed_kv import CompressedKV
from vsa.attention.context import AttnContext
from vsa.attention.denoising import Denoising, DenoisingPlan, progress_of
from vsa.attention.full import FullAttention
from vsa.attention.grouped import GroupedAttention
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment, TileLayout
from vsa.attention.neighborhood.method import NeighborhoodAttention
from vsa.attention.pooled_tail import PooledTail
from vsa.attention.selection import select_blocks
from vsa.attention.sparsity import ConstantSparsity, SparsitySchedule, TokenBudgetSparsity
from vsa.attention.sparsity_schedules import CosineSparsity, MissedMassSparsity, StaircaseSparsity
from vsa.attention.staged import StagedAttention
from vsa.attention.video_sparse import VideoSparseAttention

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

GRID, TILE = (3, 5, 4), (2, 2, 2)
LENGTH, TILES = math.prod(GRID), 12
HEADS, DIM = 2, 8

SELECTING: dict[str, Callable[..., AttentionMethod]] = {
    "video_sparse": partial(VideoSparseAttention, tile_thw=TILE),
    "c_f": partial(StagedAttention, tile_thw=TILE),
    "within": partial(StagedAttention, tile_thw=TILE, stages="c_fl", window_budget="within", window_thw=(1, 2, 1)),
    "lowered": partial(StagedAttention, tile_thw=TILE, stages="c_f_l", window_budget="within", window_thw=(1, 2, 1)),
    "excluded": partial(StagedAttention, tile_thw=TILE, stages="c_f_l_e", window_thw=(1, 2, 1)),
    "tail": partial(PooledTail, tile_thw=TILE, score="mass"),
}
STATIC: dict[str, Callable[..., AttentionMethod]] = {
    "full": FullAttention,
    "groups": partial(GroupedAttention, groups=[(1, "all", "all")]),
    "pooled keys": CompressedKV,
    "neighborhood": partial(NeighborhoodAttention, window_thw=(1, 3, 3), tile_thw=TILE),
    "window": partial(StagedAttention, tile_thw=TILE, stages="l", window_thw=(1, 2, 1)),
    "coarse and window": partial(StagedAttention, tile_thw=TILE, stages="c_l", window_thw=(1, 2, 1)),
}
DFS = DenoisingPlan(
    dense_steps=12,
    step_sparsity=[(12, 0.7), (24, 0.8), (36, 0.9)],
    refresh=[(12, 12), (36, 14)],
    shared_cache=True,
)


def tensors(batch: int, seed: int, dtype: torch.dtype = torch.float32, length: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, length, HEADS, DIM, generator=generator).to(dtype) for _ in range(3)]


def made(make: Callable[..., AttentionMethod]) -> tuple[AttentionMethod, TileLayout, dict[str, Tensor]]:
    """A method, its layout, and what it projects from some hidden states with gates that do something."""
    torch.manual_seed(0)
    method = make(dim=HEADS * DIM, num_heads=HEADS, head_dim=DIM, layer_idx=3)
    for module in method.extra_modules().values():
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    layout = method.layout((Segment(GRID),), "cpu")
    return method, layout, method.project(torch.randn(2, LENGTH, HEADS * DIM))


def context(layout: TileLayout, denoising: Denoising, topk: Any = 3, recorder: Any = None, **now: Any) -> AttnContext:
    now = {"step": 0, "progress": 0.0, **now}
    ctx = AttnContext(layout=layout, topk=KeptTiles.of(topk), denoising=denoising.at(**now), recorder=recorder)
    return ctx.layer(3)


def selected(method: AttentionMethod, qkv: list[Tensor], extra: dict[str, Tensor], ctx: AttnContext) -> BlockIndex:
    """What a call selects, as its recorder sees it."""
    records: dict[str, Tensor] = {}
    method(*qkv, extra, replace(ctx, recorder=lambda layer, values: records.update(values)))
    return BlockIndex(kv_indices=records["kv_indices"], kv_num_blocks=records["kv_num_blocks"])


# plans


def test_steps_that_select_anew():
    assert [step for step in range(12, 50) if DFS.selects_anew(step)] == [12, 24, 36]
    every = DenoisingPlan(dense_steps=2, refresh=3)
    assert [step for step in range(2, 12) if every.selects_anew(step)] == [2, 5, 8, 11]
    later = DenoisingPlan(refresh=[(4, 2)])
    assert [step for step in range(9) if later.selects_anew(step)] == [0, 1, 2, 3, 4, 6, 8]
    assert all(DenoisingPlan().selects_anew(step) for step in range(5))


def test_what_holds_at_a_moment():
    plan = DenoisingPlan(topk_ranges=[(0, 0.1, 7)], sparsity_ranges=[(0.1, 0.5, 0.5)], step_topk=[(4, 2)])
    # the borders belong to what begins there, also where 1 - 900 / 1000 is below 0.1
    timesteps = (1000, 900.1, 900, 501, 500, 0)
    budgets = plan.on_grid((None,), lambda budget: (budget,))
    expected = [(7, None), (7, None), (None, 0.5), (None, 0.5), None, None]
    assert [budgets.at(progress_of(t), 0).layers for t in timesteps] == [(budget,) for budget in expected]
    assert budgets.at(0.0, 4).layers == ((2, None),)
    assert budgets.at(0.2).layers == ((None, 0.5),)
    topk = ConstantSparsity(topk=3, denoising=plan).topk_per_layer(0, TILES, 2)
    assert [topk.at(progress_of(t), 0).count for t in timesteps] == [7, 7, 6, 6, 3, 3]
    assert (topk.at(0.2, 9).count, KeptTiles.of(5).at(0.2, 9).count) == (2, 5)
    assert not DenoisingPlan(dense_layers=[1]).follows_steps
    assert plan.changes() == {
        "topk_ranges": ((0, 0.1, 7),),
        "sparsity_ranges": ((0.1, 0.5, 0.5),),
        "step_topk": ((4, 2),),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dense_steps": -1}, "dense_steps=-1: expected an integer of at least 0"),
        ({"dense_layers": [-1]}, r"dense_layers=\[-1\]"),
        ({"topk_ranges": [(0.5, 0.5, 2)]}, "topk_ranges needs start < stop, got 0.5 and 0.5"),
        ({"topk_ranges": [(0, 1.5, 2)]}, r"topk_ranges=\[\[0,1.5,2\]\]"),
        ({"topk_ranges": [(0, 0.5, 0)]}, r"topk_ranges=\[\[0,0.5,0\]\]"),
        ({"sparsity_ranges": [(0, 0.5, 1.0)]}, r"sparsity_ranges=\[\[0,0.5,1.0\]\]"),
        (
            {"topk_ranges": [(0, 0.5, 2)], "sparsity_ranges": [(0.4, 1, 0.5)]},
            "must not overlap, two of them hold at 0.4",
        ),
        ({"step_topk": [(3, 2), (3, 4)]}, "step_topk must have ascending steps, got 3 before 3"),
        ({"step_topk": [(3, 2)], "step_sparsity": [(3, 0.5)]}, "step_topk and step_sparsity both have step 3"),
        ({"refresh": 0}, "refresh=0"),
        ({"refresh": [(4, 2), (1, 2)]}, "refresh must have ascending steps, got 4 before 1"),
        ({"shared_cache": "yes"}, "shared_cache=yes: expected true or false"),
    ],
)
def test_a_plan_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        DenoisingPlan(**options)


# kept selections


@pytest.mark.parametrize("name", SELECTING)
def test_a_reused_selection_is_that_of_the_pass_before(name):
    method, layout, extra = made(SELECTING[name])
    denoising = Denoising(DenoisingPlan(refresh=2))
    first, second = tensors(2, 1), tensors(2, 2)
    expected = method(*first, extra, replace(context(layout, denoising), denoising=None))
    assert torch.equal(method(*first, extra, context(layout, denoising)), expected)
    selection = selected(method, first, extra, AttnContext(layout=layout, topk=KeptTiles.of(3), layer_idx=3))
    later = context(layout, denoising, step=1)
    assert torch.equal(selected(method, second, extra, later).to_dense(TILES), selection.to_dense(TILES))
    actual = method(*second, extra, later)
    assert torch.equal(
        actual, method(*second, extra, AttnContext(layout=layout, topk=KeptTiles.of(3), selection=selection))
    )
    # controls: its own selection; another top-k, layer or refresh selects anew
    own = method(*second, extra, AttnContext(layout=layout, topk=KeptTiles.of(3)))
    assert (actual - own).abs().max() > 1e-3
    assert torch.equal(method(*second, extra, context(layout, denoising, step=2)), own)
    other = method(*second, extra, AttnContext(layout=layout, topk=KeptTiles.of(4)))
    assert torch.equal(method(*second, extra, context(layout, denoising, topk=4, step=1)), other)


@settings(max_examples=10, deadline=None)
@given(SIZES.texts)
def test_texts_of_another_length_select_anew(lengths):
    method = made(partial(VideoSparseAttention, tile_thw=TILE, fine_gate=False))[0]
    denoising = Denoising(DenoisingPlan(refresh=4))
    rows = []
    for step, text in enumerate(lengths * 2):
        layout = method.layout((Segment(GRID), Segment((1, 1, text), "text")), "cpu")
        qkv = tensors(2, step, length=LENGTH + text)
        actual, alone = (
            method.attend(*qkv, ctx)["fine"]
            for ctx in (
                context(layout, denoising, step=step),
                AttnContext(layout=layout, topk=KeptTiles.of(3), layer_idx=3),
            )
        )
        rows.append(torch.equal(actual, alone))
    # the first pass of each length selects, the second reuses
    assert rows == [True, True, False, False]


def test_a_reused_selection_is_attention_under_its_mask():
    method, layout, _ = made(partial(VideoSparseAttention, tile_thw=TILE, fine_gate=False))
    denoising = Denoising(DenoisingPlan(refresh=4))
    first, second = tensors(2, 1, torch.float64), tensors(2, 2, torch.float64)
    method.attend(*first, context(layout, denoising))
    actual = method.attend(*second, context(layout, denoising, step=3))["fine"]

    def reference(chosen_by: list[Tensor]) -> Tensor:
        owner = torch.arange(TILES).repeat_interleave(layout.blocks.sizes)
        mean = torch.nn.functional.one_hot(owner).double().T / layout.blocks.sizes[:, None]
        q, k, v = (x.transpose(1, 2) for x in second)
        best = ((mean @ chosen_by[0].transpose(1, 2)) @ (mean @ chosen_by[1].transpose(1, 2)).mT).topk(3).indices
        tiles = torch.zeros(2, HEADS, TILES, TILES, dtype=torch.bool).scatter_(-1, best, True)
        logits = (q @ k.mT * DIM**-0.5).masked_fill(~tiles[:, :, owner][..., owner], -math.inf)
        return (logits.softmax(-1) @ v).transpose(1, 2)

    assert (actual - reference(first)).abs().max() < 1e-12
    assert (actual - reference(second)).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["video_sparse", "within", "tail"])
def test_own_and_shared_caches_of_two_passes(name):
    method, layout, extra = made(SELECTING[name])
    cond, uncond = tensors(2, 1), tensors(2, 2)
    mine, theirs = (
        selected(method, x, extra, AttnContext(layout=layout, topk=KeptTiles.of(3))).to_dense(TILES)
        for x in (cond, uncond)
    )
    assert not torch.equal(mine, theirs)
    for shared, expected in ((False, theirs), (True, mine)):
        denoising = Denoising(DenoisingPlan(refresh=2, shared_cache=shared))
        for step, shift in ((0, 0.0), (1, 3.0)):
            for number, qkv in enumerate((cond, uncond)):
                # queries of the second step would choose otherwise
                qkv = [qkv[0].roll(int(shift), 1), *qkv[1:]]
                selection = selected(method, qkv, extra, context(layout, denoising, step=step, number=number))
                assert torch.equal(selection.to_dense(TILES), mine if number == 0 else expected), (shared, step, number)
    # without keeping anything the unconditional pass follows in every step
    denoising = Denoising(DenoisingPlan(shared_cache=True))
    for step, (q, k, v) in enumerate((tensors(2, 3), tensors(2, 4))):
        now = selected(method, [q, k, v], extra, context(layout, denoising, step=step))
        after = selected(method, uncond, extra, context(layout, denoising, step=step, number=1))
        assert torch.equal(now.to_dense(TILES), after.to_dense(TILES))


@pytest.mark.parametrize("half", ["first", "second"])
def test_a_shared_cache_of_guidance_in_one_batch(half):
    method, layout, _ = made(SELECTING["video_sparse"])
    extra = method.project(torch.randn(4, LENGTH, HEADS * DIM))
    qkv = tensors(4, 5)
    own = selected(method, qkv, extra, AttnContext(layout=layout, topk=KeptTiles.of(3))).to_dense(TILES)
    leaders = own[:2] if half == "first" else own[2:]
    for refresh in (1, 2):
        denoising = Denoising(DenoisingPlan(shared_cache=True, refresh=refresh))
        selection = selected(method, qkv, extra, context(layout, denoising, conditional=half))
        assert torch.equal(selection.to_dense(TILES), torch.cat([leaders, leaders]))
    assert not torch.equal(own, torch.cat([leaders, leaders]))
    apart = Denoising(DenoisingPlan(refresh=2))
    assert torch.equal(selected(method, qkv, extra, context(layout, apart, conditional=half)).to_dense(TILES), own)


# dense steps and layers


@pytest.mark.parametrize("name", {**SELECTING, **STATIC})
def test_a_dense_layer_is_dense_attention(name):
    make = {**SELECTING, **STATIC}[name]
    method = make(dim=HEADS * DIM, num_heads=HEADS, head_dim=DIM)
    layout = method.layout((Segment(GRID),), "cpu")
    # gates at the identity
    extra = method.project(torch.randn(2, LENGTH, HEADS * DIM))
    qkv = tensors(2, 1)
    dense = torch.nn.functional.scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in qkv)).transpose(1, 2)
    for plan in (DenoisingPlan(dense_steps=1), DenoisingPlan(dense_layers=[3])):
        actual = method(*qkv, extra, context(layout, Denoising(plan), topk=2))
        assert (actual - dense).abs().max() < 1e-5
        other = plan.dense_steps and context(layout, Denoising(plan), topk=2, step=1)
        ctx = other or replace(context(layout, Denoising(DenoisingPlan(dense_layers=[2])), topk=2))
        if name != "full":
            assert (method(*qkv, extra, ctx) - dense).abs().max() > 1e-3


def test_a_dense_layer_keeps_the_gates_there_are():
    method, layout, extra = made(STATIC["coarse and window"])
    plan = DenoisingPlan(dense_steps=1)
    everything = made(partial(StagedAttention, tile_thw=TILE, stages="c_l", window_thw=(9, 9, 9)))[0]
    everything.load_state_dict(method.state_dict())
    expected = everything(
        *tensors(2, 1), extra, AttnContext(layout=everything.layout((Segment(GRID),)), topk=KeptTiles.of(1))
    )
    assert (method(*tensors(2, 1), extra, context(layout, Denoising(plan))) - expected).abs().max() < 1e-5


# a top-k for every sample


@given(st.data())
def test_lists_of_samples_with_a_topk_of_their_own(data):
    batch, heads, rows = (data.draw(st.integers(1, n)) for n in (3, 2, 4))
    columns = data.draw(SIZES.columns)
    scores = torch.randn(
        batch, heads, rows, columns, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    )
    counts = data.draw(st.lists(st.integers(1, columns + 2), min_size=batch, max_size=batch))
    topk = KeptTiles((max(counts),), samples=torch.tensor(counts, dtype=torch.int32))
    index = select_blocks(scores, topk)
    assert index.max_blocks == min(max(counts), columns)
    for b, count in enumerate(counts):
        alone = select_blocks(scores[b : b + 1], KeptTiles.of(count)).to_dense(columns)
        assert torch.equal(index.to_dense(columns)[b : b + 1], alone)
        # by definition: as many entries, none of the others above them
        mask = index.to_dense(columns)[b]
        assert (mask.sum(-1) == min(count, columns)).all()
        least = scores[b].masked_fill(~mask, math.inf).amin(-1)
        assert (scores[b].masked_fill(mask, -math.inf).amax(-1) < least).all()


@given(st.integers(0, 1000), SIZES.columns, st.sampled_from(["masks", "first", "union", "none"]))
def test_lists_of_samples_with_masks(seed, columns, kind):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 2, 5, columns, generator=generator)
    candidates, other = (torch.rand(5, columns, generator=generator) < share for share in (0.7, 0.2))
    masks = {"masks": {"candidates": candidates, "always": other}, "none": {}}.get(kind, {kind: other})
    counts = torch.randint(1, columns + 1, (3,), generator=generator, dtype=torch.int32)
    actual = select_blocks(scores, KeptTiles((int(counts.max()),), samples=counts), **masks).to_dense(columns)
    each = [KeptTiles.of(count) for count in counts.tolist()]
    alone = [select_blocks(scores[b : b + 1], each[b], **masks).to_dense(columns) for b in range(3)]
    assert torch.equal(actual, torch.cat(alone))


def test_the_lists_of_samples_have_room_for_the_text():
    """The lists of a top-k of 31 end at 32 entries, those that also name 10 text tiles do not."""
    always = torch.zeros(80, 80, dtype=torch.bool)
    always[:, 70:] = True
    topk = KeptTiles((31,), samples=torch.tensor([31, 30]).int())
    index = select_blocks(torch.rand(2, 1, 80, 80), topk, always=always)
    assert index.kv_num_blocks[:, 0].unique(dim=1).tolist() == [[41], [40]]
    assert torch.equal(index.to_dense(80).sum(-1), index.kv_num_blocks.long())


@pytest.mark.parametrize("name", SELECTING)
def test_samples_of_a_batch_are_what_they_are_alone(name):
    method, layout, extra = made(SELECTING[name])
    qkv = [x.requires_grad_() for x in tensors(2, 6)]
    counts = (2, 5)
    topk = KeptTiles((5,), samples=torch.tensor([counts], dtype=torch.int32))
    ctx = AttnContext(layout=layout, topk=topk).layer(0)
    actual = method(*qkv, extra, ctx)
    apart = [
        method(
            *(x[i : i + 1] for x in qkv),
            {n: x[i : i + 1] for n, x in extra.items()},
            AttnContext(layout=layout, topk=KeptTiles.of(k)),
        )
        for i, k in enumerate(counts)
    ]
    expected = torch.cat(apart)
    assert (actual - expected).abs().max() < 1e-5
    weight = torch.randn_like(actual)
    for ours, theirs in zip(
        *(torch.autograd.grad((out * weight).sum(), qkv) for out in (actual, expected)), strict=True
    ):
        assert (ours - theirs).abs().max() < 1e-4
    # control: both with the top-k of one
    assert (actual - method(*qkv, extra, AttnContext(layout=layout, topk=KeptTiles.of(2)))).abs().max() > 1e-3


def test_samples_with_a_topk_of_their_own_against_a_dense_mask():
    method, layout, _ = made(SELECTING["video_sparse"])
    gates = {name: torch.randn(2, LENGTH, HEADS, DIM, dtype=torch.float64) for name in ("gate_compress", "gate_fine")}
    qkv = tensors(2, 7, torch.float64)
    counts = torch.tensor([[2, TILES]], dtype=torch.int32)
    ctx = AttnContext(layout=layout, topk=KeptTiles((TILES,), samples=counts)).layer(0)
    actual = layout.unpermute(
        method(*(layout.permute(x) for x in qkv), {n: layout.permute(g) for n, g in gates.items()}, ctx)
    )
    row = {
        "tile_ids": torch.tensor(cube_ids(GRID, TILE)),
        "sample": torch.zeros(LENGTH),
        "is_video": torch.ones(LENGTH) > 0,
    }
    for i, topk in enumerate((2, TILES)):
        one = [x[i : i + 1] for x in (*qkv, *gates.values())]
        assert (actual[i] - video_sparse_oracle(*one, **row, topk=topk)[0]).abs().max() < 1e-12
        assert (actual[i] - video_sparse_oracle(*one, **row, topk=5)[0]).abs().max() > 1e-3


def test_samples_follow_the_ranges_by_their_timestep():
    topk = KeptTiles((3, 4), ranges=((0.0, 0.1, (7,)), (0.5, 1.0, (1, 2))), steps=((0, (9,)),))
    timestep = torch.tensor([1000.0, 900.0, 500.0, 501.0, 0.0])
    expected = [[7, 3, 1, 3, 3], [7, 4, 2, 4, 4]]
    assert topk.at_timesteps(timestep, 2).samples.tolist() == expected
    assert [topk.at(progress_of(float(timestep[i]))) for i in (0, 2)] == [KeptTiles((7,)), KeptTiles((1, 2))]
    # given tokens have timestep 0
    assert topk.at_timesteps(torch.stack([timestep, torch.zeros(5)], 1), 2).samples.tolist() == expected
    assert topk.largest() == topk.at_timesteps(timestep, 2) == KeptTiles((7, 7))


# schedules


@pytest.mark.parametrize(
    "make",
    [
        partial(ConstantSparsity, topk=4),
        partial(TokenBudgetSparsity, tokens=32, tokens_per_tile=8),
        partial(StaircaseSparsity, dense_steps=2, interval=1, tiles=3, topk=4),
        partial(CosineSparsity, dense_steps=2, total_steps=9, topk=4),
        partial(MissedMassSparsity, max_missed=0.5, dense_steps=2, interval=1, tiles=3, topk=4),
    ],
)
def test_a_range_has_its_own_end_on_the_way_of_the_schedule(make):
    plan = DenoisingPlan(topk_ranges=[(0, 0.5, 9)], sparsity_ranges=[(0.5, 0.75, 0.75)])
    schedule: SparsitySchedule = make(denoising=plan, dense_layers=[1])
    ends = [make(topk=9) if "tokens" not in make.keywords else ConstantSparsity(topk=9)]
    base = make(dense_layers=[1])
    for step in range(14):
        for each in (schedule, base, *ends):
            if each.measured and step:
                each.observe(step, 0.3)
        topks = schedule.topk_per_layer(step, 20, 3)
        assert topks.layers == base.topk_per_layer(step, 20, 3).layers
        first, second = (row for _, _, row in topks.ranges)
        assert first == (k := ends[0].topk(step, 20), 20, k)
        assert second[0] >= 5
        assert second[1] == 20
    # a quarter of the tiles in the end
    assert second == (5, 20, 5)
    assert schedule.topk_per_layer(0, 20, 3, "dense") == KeptTiles((20,))
    half = schedule.topk_per_layer(13, 20, 3, "half")
    assert [half.layers, *(row for _, _, row in half.ranges)] == [(2, 20, 2), (5, 20, 5), (3, 20, 3)]
    if not schedule.measured:
        assert schedule.final_step(20) == max(each.final_step(20) for each in (*ends, base))


def test_ranges_that_a_grid_or_model_cannot_give_are_refused():
    plan = DenoisingPlan(topk_ranges=[(0, 0.5, 9)], dense_layers=[4])
    schedule = ConstantSparsity(topk=4, denoising=plan)
    with pytest.raises(ValueError, match="denoising: topk=9 is above the number of tiles, 8"):
        schedule.check(8)
    with pytest.raises(ValueError, match=r"denoising\.dense_layers has layer 4, but the model's layers are 0 to 3"):
        schedule.check(9, 4)
    schedule.check(9, 5)


def test_expected_tiles_over_samples():
    topk = KeptTiles((4,), ranges=((0.0, 0.25, (8, 12)),))
    assert topk.expected(lambda start, stop: stop - start) == KeptTiles((5, 6))
    assert KeptTiles.of(4).expected(lambda start, stop: 0.0) == KeptTiles((4,))


def test_a_method_follows_what_it_has_a_use_for():
    base = DenoisingPlan(dense_steps=2, dense_layers=(1,), refresh=3, shared_cache=True)
    plan = replace(base, rounding="down", step_topk=[(4, 1)])
    assert plan.for_method(selects=True, predicts=False) is plan
    assert plan.for_method(selects=False, predicts=True) == base
    base.refuse_without_topk("it", predicts=True)
    least = DenoisingPlan(dense_steps=2, dense_layers=(1,))
    assert plan.for_method(selects=False, predicts=False) == least
    least.refuse_without_topk("it")
    with pytest.raises(ValueError, match="denoising has refresh=3, but it selects no tiles"):
        base.refuse_without_topk("it")
    with pytest.raises(ValueError, match=r"denoising has step_topk=\(\(4, 1\),\), but it has no top-k"):
        DenoisingPlan(step_topk=[(4, 1)]).refuse_without_topk("it", predicts=True)

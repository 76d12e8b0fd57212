"""DFSAttn against loops over blocks and dense masks in fp64, its schedule in a denoising, what its orders hold."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.attention.oracle import grads_of
from tests.attention.test_layout import run_order
from vsa.attention import dynamic_hilbert
from vsa.attention.context import AttnContext, recorded_index
from vsa.attention.denoising import DenoisingPlan
from vsa.attention.dynamic_hilbert import DynamicHilbertAttention
from vsa.attention.kept_tiles import Budget, KeptTiles
from vsa.attention.layout import Segment
from vsa.attention.sparsity import ConstantSparsity
from vsa.attention.staged import StagedAttention
from vsa.attention.stats import density, visible_recall
from vsa.evaluation.comparison.synthetic import draw_captures
from vsa.models.video_dit import VideoDiT
from vsa.sampling.pipeline import sample_latents
from vsa.sampling.settings import SampleSettings

HEADS, DIM = 2, 8
LAYER = {"dim": HEADS * DIM, "num_heads": HEADS, "head_dim": DIM}
CONFIGS = Path(__file__).parents[2] / "configs"


@dataclass(frozen=True)
class Setting:
    grid: tuple[int, int, int] = (3, 5, 7)
    texts: tuple[int, int] = (0, 0)
    tokens: int = 16
    sub_tokens: int = 4
    order: str = "hilbert"
    padding: str = "masked"
    text_budget: str = "within"
    topk: int = 3
    seed: int = 0

    @property
    def segments(self):
        before, after = (() if n == 0 else (Segment((1, 1, n), "text"),) for n in self.texts)
        return [*before, Segment(self.grid), *after]

    def method(self, **options):
        own = {name: getattr(self, name) for name in ("tokens", "sub_tokens", "order", "padding", "text_budget")}
        return DynamicHilbertAttention(**LAYER, **own, **options)

    @property
    def length(self):
        return math.prod(self.grid) + sum(self.texts)

    def tensors(self):
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randn(1, self.length, HEADS, DIM, generator=generator).double() for _ in range(3)]

    def blocks(self):
        """Raster tokens of the row in each block of the video, and of the text."""
        first, size = self.texts[0], math.prod(self.grid)
        order = [first + i for i in run_order(self.grid, f"{self.order}_run")]
        texts = [range(first), range(first + size, self.length)]
        return _cut(order, self.tokens), [block for text in texts for block in _cut(list(text), self.tokens)]

    def scores(self, q, k):
        """Sums of the softmax over sub-blocks, sub-block by sub-block."""
        video, _ = self.blocks()
        subs = [_cut(block, self.sub_tokens) for block in video]
        places = self.tokens // self.sub_tokens
        zero = self.padding == "zeros"

        def means(x, block):
            rows = [x[sub].sum(0) / (self.sub_tokens if zero else len(sub)) for sub in block]
            return rows + [torch.zeros(DIM, dtype=x.dtype)] * (places - len(block) if zero else 0)

        keys = [torch.stack(means(k, block)) for block in subs]
        total = torch.zeros(len(video), len(video), dtype=q.dtype)
        for i, block in enumerate(subs):
            weights = (torch.stack(means(q, block)) @ torch.cat(keys).T / math.sqrt(DIM)).exp()
            shares = (weights / weights.sum(1, keepdim=True)).sum(0)
            total[i] = torch.stack([share.sum() for share in shares.split([len(some) for some in keys])])
        return total

    def mask(self, q, k):
        """bool `[H, L, L]` in raster order, and the smallest margin of a choice."""
        video, text = self.blocks()
        count = len(video)
        if self.topk < count:
            count = max(1, self.topk - len(text)) if self.text_budget == "within" else self.topk
        masks, margin = torch.zeros(HEADS, self.length, self.length, dtype=torch.bool), math.inf
        texts = [token for block in text for token in block]
        for head in range(HEADS):
            scores = self.scores(q[0, :, head], k[0, :, head]).tolist()
            for i, block in enumerate(video):
                order = sorted(range(len(video)), key=lambda j, row=scores[i]: (-row[j], j))
                if count < len(video):
                    margin = min(margin, scores[i][order[count - 1]] - scores[i][order[count]])
                visible = [token for j in order[:count] for token in video[j]] + texts
                masks[head, torch.tensor(block)[:, None], torch.tensor(visible)] = True
            masks[head, texts] = True
        return masks, margin


def _cut(tokens: list[int], size: int) -> list[list[int]]:
    return [tokens[i : i + size] for i in range(0, len(tokens), size)]


def attention(q, k, v, mask):
    """Softmax attention of `[1, L, H, D]` under a mask `[H, L, L]`."""
    logits = (q.transpose(1, 2) @ k.transpose(1, 2).transpose(-1, -2) * DIM**-0.5).masked_fill(~mask, -math.inf)
    return (logits.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


def run(method, setting, tensors, **context):
    """Output and mask `[H, L, L]`, both in raster order."""
    layout, records = method.layout(setting.segments), {}
    context = {"topk": KeptTiles.of(setting.topk), **context}
    ctx = AttnContext(layout=layout, recorder=lambda _, values: records.update(values), **context)
    out = layout.unpermute(method(*(layout.permute(x) for x in tensors), {}, ctx))
    lists = recorded_index(records).to_dense(layout.blocks.num)[0].expand(HEADS, -1, -1)
    rows = lists.repeat_interleave(layout.video_blocks.sizes, 1).repeat_interleave(layout.blocks.sizes, 2)
    sizes = [stop - start for start, stop in layout.video_spans]
    mask = torch.ones(HEADS, layout.num_tokens, layout.num_tokens, dtype=torch.bool)
    for (start, stop), some in zip(layout.video_spans, rows.split(sizes, 1), strict=True):
        mask[:, start:stop] = some
    return out, mask[:, layout.inverse][:, :, layout.inverse]


def check(setting: Setting) -> None:
    tensors = setting.tensors()
    expected, margin = setting.mask(*tensors[:2])
    out, mask = run(setting.method(), setting, tensors)
    # sums of the same numbers in another order: closer calls than this are none
    if margin > 1e-12:
        assert torch.equal(mask, expected)
    assert torch.allclose(out, attention(*tensors, mask), atol=1e-12)


@st.composite
def drawn(draw) -> Setting:
    sub_tokens = draw(st.sampled_from([1, 2, 3, 4, 8]))
    return Setting(
        grid=draw(st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))),
        texts=draw(st.sampled_from([(0, 0), (0, 0), (0, 9), (5, 0), (3, 20)])),
        tokens=sub_tokens * draw(st.sampled_from([1, 2, 4])),
        sub_tokens=sub_tokens,
        order=draw(st.sampled_from(["raster", "block3d", "hilbert2d", "hilbert"])),
        padding=draw(st.sampled_from(["masked", "zeros"])),
        text_budget=draw(st.sampled_from(["within", "exempt"])),
        topk=draw(st.integers(1, 9)),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=20, deadline=None)
@example(Setting())
@example(Setting(texts=(3, 20), padding="zeros"))
@given(drawn())
def test_masks_and_outputs_by_definition(setting):
    check(setting)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(drawn())
def test_masks_and_outputs_equal_definition_fuzz(setting):
    check(setting)


def test_every_option_changes_a_mask():
    """The definition tells the options apart, so agreeing with it says something."""
    base = Setting(texts=(0, 20), topk=4)
    changes = ({"order": "raster"}, {"order": "block3d"}, {"order": "hilbert2d"}, {"sub_tokens": 16})
    for change in (*changes, {"padding": "zeros"}, {"text_budget": "exempt"}, {"topk": 3}, {"tokens": 8}):
        other = replace(base, **change)
        tensors = base.tensors()
        assert not torch.equal(other.mask(*tensors[:2])[0], base.mask(*tensors[:2])[0]), change
        assert torch.equal(run(other.method(), other, tensors)[1], other.mask(*tensors[:2])[0])


@pytest.mark.parametrize("texts", [(0, 0), (3, 20)])
def test_the_whole_budget_is_dense_attention(texts):
    setting = Setting(texts=texts, topk=7)
    tensors = setting.tensors()
    out, mask = run(setting.method(), setting, tensors)
    assert mask.all()
    assert torch.allclose(out, attention(*tensors, mask), atol=1e-12)
    # a tile less is not
    fewer, _ = run(setting.method(), replace(setting, topk=6), tensors)
    assert not torch.allclose(fewer, out, atol=1e-3)
    # as many as there are, of a sample among others, are all of them beside the text as well
    counts = KeptTiles((7,), samples=torch.tensor([7], dtype=torch.int32))
    _, mask = run(setting.method(), setting, tensors, topk=counts)
    assert mask.all()


def test_blocks_without_sub_blocks_are_ranked_by_their_means():
    setting = Setting(sub_tokens=16, order="raster")
    tensors = setting.tensors()
    plain = StagedAttention(**LAYER, stages="f", fine_gate=False, tile_thw=(1, 1, 16), partition="raster_run")
    out, mask = run(setting.method(), setting, tensors)
    expected, expected_mask = run(plain, setting, tensors)
    assert torch.equal(mask, expected_mask)
    assert torch.equal(out, expected)
    assert not torch.equal(run(replace(setting, sub_tokens=4).method(), setting, tensors)[1], mask)


def test_tokens_of_a_sub_block_may_change_places():
    setting = Setting(order="raster")
    q, k, v = setting.tensors()
    _, mask = run(setting.method(), setting, (q, k, v))
    inside = torch.cat([torch.tensor(sub).roll(1) for sub in _cut(list(range(105)), 4)])
    assert torch.equal(run(setting.method(), setting, (q[:, inside], k[:, inside], v))[1], mask)
    # of a block they may not
    across = torch.cat([torch.tensor(block).roll(2) for block in _cut(list(range(105)), 16)])
    assert not torch.equal(run(setting.method(), setting, (q[:, across], k[:, across], v))[1], mask)


def test_samples_of_a_row_do_not_see_each_other():
    """Two clips with texts in one row attend as each would alone, its text counting within the budget of both."""
    alone = [Setting(grid=(2, 4, 5), texts=(0, 9), seed=1), Setting(grid=(3, 3, 6), texts=(0, 12), seed=2)]
    segments = [replace(segment, sample=n) for n, setting in enumerate(alone) for segment in setting.segments]
    parts = [setting.tensors() for setting in alone]
    together = [torch.cat(some, dim=1) for some in zip(*parts, strict=True)]
    method = Setting().method()
    layout = method.layout(segments)
    ctx = AttnContext(layout=layout, topk=KeptTiles.of(2))
    out = layout.unpermute(method(*(layout.permute(x) for x in together), {}, ctx))
    expected = [run(method, replace(s, topk=2), x)[0] for s, x in zip(alone, parts, strict=True)]
    assert torch.allclose(out, torch.cat(expected, dim=1), atol=1e-12)


@pytest.mark.parametrize("texts", [(0, 0), (3, 9)])
def test_training_is_asked_for_and_has_a_constant_mask(texts):
    setting = Setting(texts=texts)
    leaves = [x.requires_grad_() for x in setting.tensors()]
    with pytest.raises(ValueError, match=r"^attention=dynamic_hilbert is training-free: .* set attention"):
        run(setting.method(), setting, leaves)
    # of any of the three
    for i in range(3):
        with pytest.raises(ValueError, match="is training-free"):
            run(setting.method(), setting, [x if i == j else x.detach() for j, x in enumerate(leaves)])
    with torch.no_grad():
        expected, mask = run(setting.method(), setting, leaves)
    out, _ = run(setting.method(allow_training=True), setting, leaves)
    assert torch.equal(out, expected)
    ours = grads_of(out, leaves)
    for candidate, agrees in ((mask, True), (torch.ones_like(mask), False)):
        theirs = grads_of(attention(*leaves, candidate), leaves)
        assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(ours, theirs, strict=True)) is agrees


def test_pairs_are_those_of_the_mask():
    for texts, topk in itertools.product(((0, 0), (4, 16)), (3, 7)):
        setting = Setting(grid=(4, 4, 7), texts=texts, topk=topk)
        method = setting.method()
        layout = method.layout(setting.segments)
        _, mask = run(method, setting, setting.tensors())
        assert method.pairs(layout, topk) - layout.tiles[1, 1, 4].num ** 2 / 2 == mask[0].sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sub_tokens": 12}, "sub_tokens=12 must divide tokens=128"),
        ({"tokens": 0}, "tokens=0: expected an integer of at least 1"),
        ({"order": "peano"}, "order=peano: expected one of raster, block3d, hilbert2d, hilbert, got 'peano'"),
        ({"padding": "ones"}, "padding=ones: expected one of masked, zeros"),
        ({"text_budget": "half"}, "text_budget=half: expected one of within, exempt"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        DynamicHilbertAttention(**LAYER, **options)


# the schedule


def plan_of(name: str, **options) -> DenoisingPlan:
    config = OmegaConf.load(CONFIGS / "denoising" / f"{name}.yaml")
    return instantiate(OmegaConf.merge(config, options), _convert_="all")


def test_shares_become_blocks_rounded_down():
    """kk = max(1, floor(budget * n)) for every budget and number of blocks, in whole numbers."""
    for n, percent in itertools.product(range(1, 400), (10, 20, 30, 50, 99)):
        sparsity = f"{(100 - percent) / 100:.2f}"
        assert Budget(sparsity=sparsity).tiles(n, "down") == max(1, percent * n // 100)
        assert Budget(sparsity=sparsity).tiles(n, "up") == -(-percent * n // 100)
    # 0.3 - 0.2 of 930 is 92 in binary floats
    plan = plan_of("dfs")
    topk = plan.constant((930,), 930)
    assert [topk.at(0.5, step).count for step in (11, 12, 23, 24, 35, 36, 49)] == [930, 279, 279, 186, 186, 93, 93]
    # a budget of its own is rounded as those of the plan
    uneven = ConstantSparsity(sparsity=0.7, denoising=plan).topk_per_layer(0, 591, 2)
    assert [uneven.at(0.5, step).count for step in (0, 12, 24, 36)] == [177, 177, 118, 59]
    assert ConstantSparsity(sparsity=0.7).topk(0, 591) == 178


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"step_sparsity=\[\[48,1.0\]\]: .* below 1"):
        DenoisingPlan(step_sparsity=[(48, 1.0)])
    with pytest.raises(ValueError, match="topk=0: expected an integer of at least 1"):
        ConstantSparsity(topk=0)
    with pytest.raises(ValueError, match=r"denoising: sparsity=0\.9 leaves less than one of 9 tiles"):
        ConstantSparsity(sparsity=0.5, denoising=plan_of("dfs")).check(9)


class Computed:
    """What the layers of a model computed in a denoising: pairs of tokens and selections, call by call."""

    def __init__(self, monkeypatch):
        self.densities, self.scored = [], []
        attend, dense, scores = (
            getattr(dynamic_hilbert, name) for name in ("block_sparse_attn", "dense_attn_per_sample", "subblock_scores")
        )

        def record_attention(q, k, v, index, *, q_blocks, kv_blocks, **options):
            self.densities.append(density(index, q_blocks, kv_blocks).mean(1).flatten())
            return attend(q, k, v, index, q_blocks=q_blocks, kv_blocks=kv_blocks, **options)

        def record_dense(q, *rest):
            self.densities.append(torch.ones(len(q)))
            return dense(q, *rest)

        def record_scores(*arguments):
            # the call whose density comes next
            self.scored.append(len(self.densities))
            return scores(*arguments)

        for name, function in {
            "block_sparse_attn": record_attention,
            "dense_attn_per_sample": record_dense,
            "subblock_scores": record_scores,
        }.items():
            monkeypatch.setattr(dynamic_hilbert, name, function)


class Captions:
    max_tokens = 1

    def encode_batch(self, captions):
        return [torch.full((1, 8), 0.1 if caption else -0.1) for caption in captions]


def denoise(plan: DenoisingPlan, steps: int, layers: int, monkeypatch) -> tuple[torch.Tensor, list[int]]:
    """Share of the pairs of tokens by step and layer, and the steps that selected, of a sampler with guidance."""
    torch.manual_seed(0)
    attention = partial(DynamicHilbertAttention, tokens=8, sub_tokens=4)
    sizes = {"num_attention_heads": 1, "attention_head_dim": 8, "ffn_dim": 8, "text_dim": 8, "freq_dim": 8}
    model = VideoDiT(**sizes, num_layers=layers, in_channels=1, out_channels=1, attention=attention)
    # 10 whole blocks, of which 30%, 20% and 10% are whole numbers
    shape = (1, 2, 8, 20)
    tiles = model.layout_for(shape).num_video_tiles
    assert tiles == 10
    options = SampleSettings(
        steps=steps,
        guidance=3.0,
        topk=plan.constant((tiles,), tiles),
        denoising=plan,
        latent_shape=shape,
    )
    log = Computed(monkeypatch)
    with torch.no_grad():
        sample_latents(model, Captions(), ["a"], torch.tensor([0]), options)
    shares = torch.stack(log.densities)
    # both passes of guidance
    assert shares.shape == (steps * layers, 2)
    assert torch.equal(shares[:, 0], shares[:, 1])
    return shares[:, 0].view(steps, layers).double(), [call // layers for call in log.scored]


def test_the_schedule_computes_what_the_paper_says(monkeypatch):
    densities, selecting = denoise(plan_of("dfs"), 50, 1, monkeypatch)
    expected = [1.0] * 12 + [0.3] * 12 + [0.2] * 12 + [0.1] * 14
    assert densities[:, 0].tolist() == pytest.approx(expected, abs=1e-7)
    assert selecting == [12, 24, 36]
    assert round(100 * float(1 - densities[12:].mean()), 2) == 80.53


def test_a_dense_first_block_computes_all(monkeypatch):
    densities, selecting = denoise(plan_of("dfs", dense_layers=[0]), 50, 2, monkeypatch)
    assert (densities[:, 0] == 1).all()
    assert selecting == [12, 24, 36]
    # of 40 layers, as in Wan2.1 14B, one is dense
    sparse = 1 - densities[12:, 1].mean()
    assert round(100 * float(sparse * 39 / 40), 2) == 78.51


@pytest.mark.slow
def test_a_dense_first_block_of_forty(monkeypatch):
    densities, selecting = denoise(plan_of("dfs", dense_layers=[0]), 50, 40, monkeypatch)
    assert selecting == [step for step in (12, 24, 36) for _ in range(39)]
    assert round(100 * float(1 - densities[12:].mean()), 2) == 78.51


def test_the_schedule_of_four_steps(monkeypatch):
    densities, selecting = denoise(plan_of("dfs_distilled"), 4, 1, monkeypatch)
    assert densities[:, 0].tolist() == pytest.approx([1.0, 0.3, 0.2, 0.1], abs=1e-7)
    assert selecting == [1, 2, 3]


# what the orders hold


def held(order: str, capture, topk: int) -> tuple[float, float]:
    """Variance inside the blocks of an order, of queries and keys, and recall of the blocks that it selects."""
    _, _, heads, dim = capture.q.shape
    method = DynamicHilbertAttention(dim=heads * dim, num_heads=heads, head_dim=dim, order=order)
    layout, records = method.layout([Segment(capture.grid_thw)]), {}
    q, k, v = (layout.permute(x) for x in (capture.q, capture.k, capture.v))
    blocks = [block for x in (q, k) for block in x.split(method.tokens, dim=1)]
    variance = float(torch.stack([block.var(1, correction=0).mean() for block in blocks]).mean())
    ctx = AttnContext(layout=layout, topk=KeptTiles.of(topk), recorder=lambda _, values: records.update(values))
    method(q, k, v, {}, ctx)
    tokens = torch.arange(0, layout.num_tokens, 5)
    recall = visible_recall(q, k, recorded_index(records), tokens, layout.blocks, layout.blocks)
    return variance, float(recall.selected.mean())


def test_orders_of_smooth_fields():
    """DFSAttn's Tables 1 and 3: runs of cubes and along a curve hold tokens that are more alike than runs of a raster.

    Which of the two is ahead differs from field to field.
    """
    fields, noise = draw_captures((6, 15, 20), heads=3, head_dim=24).items
    variance, recall = zip(*(held(order, fields, 3) for order in ("raster", "block3d", "hilbert")), strict=True)
    assert max(variance[1:]) < 0.95 * variance[0]
    assert min(recall[1:]) > 1.1 * recall[0]
    # without structure an order has nothing to hold
    variance, _ = zip(*(held(order, noise, 3) for order in ("raster", "block3d", "hilbert")), strict=True)
    assert max(variance) < 1.02 * min(variance)

"""FG-Attn as a method against masks and attention in fp64 by definition, and its special cases."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vsa_kernels import block_sparse_attn

from tests.attention.fine_grained.oracle import attention, greedy_groups, kept_tiles, token_mask
from tests.attention.oracle import grads_of
from vsa.attention.context import AttnContext, recorded_index
from vsa.attention.denoising import DenoisingPass
from vsa.attention.dense import dense_attn
from vsa.attention.fine_grained.method import FineGrainedAttention, mean_logits
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.attention.selection import RowRule, select_blocks

SIZES = {"dim": 16, "num_heads": 2, "head_dim": 8}


def method_of(**options):
    return FineGrainedAttention(**SIZES, **options)


def tensors_of(length, *, seed=0, kv_heads=2, batch=1, dtype=torch.float64):
    """Tokens that drift along the sequence, so that tiles differ."""
    g = torch.Generator().manual_seed(seed)

    def walk(heads):
        steps = torch.randn(batch, length, heads, 8, generator=g, dtype=torch.float64)
        return (steps + 0.3 * steps.cumsum(1)).to(dtype)

    return walk(2), walk(kv_heads), walk(kv_heads)


def run(method, segments, tensors, **context):
    """Output in the order the tokens arrive in, and what the layer recorded."""
    layout = method.layout([Segment(s) if isinstance(s, tuple) else s for s in segments], "cpu")
    records = {}
    ctx = AttnContext(
        layout=layout, topk=KeptTiles.of(1), recorder=lambda _, tensors: records.update(tensors), **context
    )
    parts = [layout.permute(x) for x in tensors]
    return layout.unpermute(method(*parts, {}, ctx)), records


@st.composite
def settings_of(draw):
    return {
        "grid": draw(st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 9))),
        "q_tokens": draw(st.sampled_from([16, 32, 64, 128])),
        "kv_tokens": draw(st.sampled_from([1, 2, 8, 16, 64, 128])),
        "top_p": draw(st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.99, 1])),
        "merge": draw(st.sampled_from(["xor", "consecutive"])),
        "attended": draw(st.sampled_from(["union", "tile"])),
        "seed": draw(st.integers(0, 1000)),
    }


RAGGED = {"merge": "xor", "attended": "union", "top_p": 0.6, "seed": 1}


@settings(deadline=None, max_examples=25)
@example({"grid": (3, 7, 9), "q_tokens": 16, "kv_tokens": 8, **RAGGED})
@example({"grid": (3, 7, 9), "q_tokens": 32, "kv_tokens": 1, **RAGGED})
@given(settings_of())
def test_masks_and_outputs_are_those_of_the_definition(setting):
    check(setting)


@pytest.mark.slow
@settings(deadline=None, max_examples=2000)
@given(settings_of())
def test_thousands_of_masks_and_outputs_are_those_of_the_definition(setting):
    check(setting)


def check(setting):
    grid, seed = setting.pop("grid"), setting.pop("seed")
    length, method = math.prod(grid), method_of(**setting)
    q, k, v = tensors_of(length, seed=seed)
    out, records = run(method, [grid], (q, k, v))
    rows = kept_tiles(q[0], k[0], setting["q_tokens"], setting["kv_tokens"], setting["top_p"])
    masks, size = [], 128 // setting["q_tokens"] if setting["attended"] == "union" else 1
    for head in rows:
        order = range(len(head))
        groups = [list(order[i : i + size]) for i in range(0, len(head), size)]
        groups = greedy_groups(head, size) if setting["merge"] == "xor" else groups
        masks.append(token_mask(head, groups, length, setting["q_tokens"], setting["kv_tokens"]))
    mask = torch.stack(masks)
    torch.testing.assert_close(out, attention(q, k, v, mask), rtol=1e-9, atol=1e-9)
    selection = recorded_index(records).to_dense(-(-length // setting["kv_tokens"]))
    assert torch.equal(selection[0], mask[:, :: setting["q_tokens"], :: setting["kv_tokens"]])


def test_a_mask_of_other_means_fails_the_comparison():
    q, k, v = tensors_of(189, seed=1)
    method = method_of(q_tokens=16, kv_tokens=8, top_p=0.6)
    out, _ = run(method, [(3, 7, 9)], (q, k, v))
    rows = kept_tiles(q[0].flip(1), k[0], 16, 8, 0.6)
    mask = torch.stack([token_mask(head, greedy_groups(head, 8), 189, 16, 8) for head in rows])
    assert not torch.allclose(out, attention(q, k, v, mask), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("order", ["raster", "hilbert"])
def test_all_of_the_mass_is_full_attention(order):
    q, k, v = tensors_of(210, batch=2, kv_heads=1)
    out, records = run(method_of(q_tokens=16, kv_tokens=8, top_p=1, order=order), [(5, 6, 7)], (q, k, v))
    torch.testing.assert_close(out, dense_attn(q, k, v))
    assert (records["kept_density"] == 1).all()
    less, _ = run(method_of(q_tokens=16, kv_tokens=8, top_p=0.5, order=order), [(5, 6, 7)], (q, k, v))
    assert not torch.allclose(less, dense_attn(q, k, v))


def test_equal_tiles_select_by_the_row_rule_on_mean_scores():
    q, k, v = tensors_of(200)
    method = method_of(q_tokens=32, kv_tokens=32, top_p=0.7, attended="tile")
    _, records = run(method, [(1, 10, 20)], (q, k, v))
    means = [torch.stack([x[:, i : i + 32].mean(1) for i in range(0, 200, 32)], 2) for x in (q, k)]
    scores = means[0] @ means[1].transpose(-1, -2) / 8**0.5
    expected = select_blocks(scores, RowRule(top_p=0.7, crossing="keep")).to_dense(7)
    assert torch.equal(recorded_index(records).to_dense(7), expected)
    torch.testing.assert_close(records["scores"], scores)


def test_tokens_of_a_tile_may_change_places():
    q, k, v = tensors_of(200)
    method = method_of(q_tokens=32, kv_tokens=16, top_p=0.7)
    g = torch.Generator().manual_seed(0)
    within = torch.cat([tile[torch.randperm(len(tile), generator=g)] for tile in torch.arange(200).split(16)])
    plain, first = run(method, [(1, 10, 20)], (q, k, v))
    out, second = run(method, [(1, 10, 20)], (q[:, within], k[:, within], v[:, within]))
    assert torch.equal(*(recorded_index(r).to_dense(13) for r in (first, second)))
    torch.testing.assert_close(out, plain[:, within])
    _, third = run(method, [(1, 10, 20)], (q, k[:, torch.randperm(200, generator=g)], v))
    assert not torch.equal(*(recorded_index(r).to_dense(13) for r in (first, third)))


def test_hilbert_order_changes_the_tiles():
    q, k, v = tensors_of(4 * 8 * 8)
    grid, options = (4, 8, 8), {"q_tokens": 16, "kv_tokens": 16, "top_p": 0.5}
    raster, _ = run(method_of(**options), [grid], (q, k, v))
    hilbert = method_of(**options, order="hilbert")
    out, _ = run(hilbert, [grid], (q, k, v))
    assert not torch.allclose(out, raster)
    order = hilbert.layout([Segment(grid)]).order
    expected, _ = run(method_of(**options), [grid], [x[:, order] for x in (q, k, v)])
    torch.testing.assert_close(out[:, order], expected)


@pytest.mark.parametrize("attended", ["union", "tile"])
def test_texts_and_samples(attended):
    segments = [
        Segment((1, 1, 5), kind="text", sample=0),
        Segment((1, 7, 10), sample=0),
        Segment((1, 6, 9), sample=1),
    ]
    q, k, v = tensors_of(129)
    method = method_of(q_tokens=16, kv_tokens=16, top_p=0.6, attended=attended)
    out, records = run(method, segments, (q, k, v))
    samples = []
    for start, stop, text in ((0, 75, 5), (75, 129, 0)):
        parts = [x[:, start:stop] for x in (q, k, v)]
        rows = kept_tiles(parts[0][0, text:], parts[1][0, text:], 16, 16, 0.6)
        mask = torch.ones(2, stop - start, stop - start, dtype=torch.bool)
        for h, head in enumerate(rows):
            groups = greedy_groups(head, 8 if attended == "union" else 1)
            mask[h, text:, text:] = token_mask(head, groups, stop - start - text, 16, 16)
        samples.append(attention(*parts, mask))
    torch.testing.assert_close(out, torch.cat(samples, 1))
    assert (records["kept_density"] <= records["merged_density"]).all()
    layout = method.layout(segments)
    assert method.expected_pairs(layout) == method.pairs(layout, layout.num_video_tiles) == 75**2 + 54**2
    # a fifth of the tiles of the video of 70 and of 54 tokens, and all of the text
    fifth = method.pairs(layout, layout.num_video_tiles / 5)
    assert fifth == pytest.approx(70**2 / 5 + 2 * 70 * 5 + 5**2 + 54**2 / 5, rel=1e-12)


@pytest.mark.parametrize("sizes", [(32, 16), (16, 32), (64, 4), (16, 1)], ids=str)
def test_tiles_of_two_sizes_beside_text_and_samples(sizes):
    segments = [
        Segment((1, 1, 5), kind="text", sample=0),
        Segment((1, 7, 10), sample=0),
        Segment((1, 6, 9), sample=1),
    ]
    q, k, v = tensors_of(129)
    q_tokens, kv_tokens = sizes
    samples = []
    for start, stop in ((0, 75), (75, 129)):
        parts = [x[:, start:stop] for x in (q, k, v)]
        samples.append(attention(*parts, torch.ones(2, stop - start, stop - start, dtype=torch.bool)))
    expected = torch.cat(samples, 1)
    out, _ = run(method_of(q_tokens=q_tokens, kv_tokens=kv_tokens, top_p=1), segments, (q, k, v))
    torch.testing.assert_close(out, expected)
    # a sample's own groups: with fewer tiles each sample is as it is alone
    less, _ = run(method_of(q_tokens=q_tokens, kv_tokens=kv_tokens, top_p=0.3), segments, (q, k, v))
    alone, _ = run(
        method_of(q_tokens=q_tokens, kv_tokens=kv_tokens, top_p=0.3), [(1, 6, 9)], [x[:, 75:] for x in (q, k, v)]
    )
    torch.testing.assert_close(less[:, 75:], alone)
    assert not torch.allclose(less, expected, atol=1e-3)


def test_densities_are_those_before_and_after_merging():
    q, k, v = tensors_of(230)
    _, union = run(method_of(q_tokens=16, kv_tokens=8, top_p=0.6), [(1, 10, 23)], (q, k, v))
    _, tile = run(method_of(q_tokens=16, kv_tokens=8, top_p=0.6, attended="tile"), [(1, 10, 23)], (q, k, v))
    rows = kept_tiles(q[0], k[0], 16, 8, 0.6)
    row_densities = [token_mask(head, [[i] for i in range(15)], 230, 16, 8).double().mean() for head in rows]
    group_densities = [token_mask(head, greedy_groups(head, 8), 230, 16, 8).double().mean() for head in rows]
    for records in (union, tile):
        torch.testing.assert_close(records["kept_density"][0], torch.stack(row_densities))
        torch.testing.assert_close(records["merged_density"][0], torch.stack(group_densities))
    assert (union["kept_density"] < union["merged_density"]).all()


def test_gradients_are_those_of_the_constant_mask():
    inputs = [x.requires_grad_() for x in tensors_of(100)]
    method = method_of(q_tokens=16, kv_tokens=8, top_p=0.6, allow_training=True)
    out, records = run(method, [(1, 10, 10)], inputs)
    layout = method.layout([Segment((1, 10, 10))])
    index = recorded_index(records)
    with torch.no_grad():
        plain, _ = run(method, [(1, 10, 10)], inputs)
    torch.testing.assert_close(out, plain)
    expected, _ = block_sparse_attn(
        *inputs, index, q_blocks=layout.blocks, kv_blocks=layout.kv_blocks, backend="reference"
    )
    for ours, theirs in zip(grads_of(out, inputs), grads_of(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert theirs.abs().max() > 0


def test_training_is_refused_without_consent():
    inputs = tensors_of(40)
    inputs[0].requires_grad_()
    message = (
        "^attention=fine_grained is training-free: its mask is a constant to the gradient; "
        "set attention.allow_training=true to train with it$"
    )
    with pytest.raises(ValueError, match=message):
        run(method_of(), [(1, 5, 8)], inputs)
    with torch.no_grad():
        run(method_of(), [(1, 5, 8)], inputs)


def test_denoising_keeps_the_lists_and_dense_layers_are_dense():
    method, cache = method_of(q_tokens=16, kv_tokens=16, top_p=0.6), {}
    first, later = tensors_of(100), tensors_of(100, seed=1)
    layout = method.layout([Segment((1, 10, 10))])

    def lists(tensors, **how):
        records = {}
        denoising = DenoisingPass(owner="x", cache=cache, **how)
        ctx = AttnContext(
            layout=layout, topk=KeptTiles.of(1), denoising=denoising, recorder=lambda _, t: records.update(t)
        ).layer(0)
        return method(*tensors, {}, ctx), records

    _, initial = lists(first, refresh=True)
    _, reuse = lists(later, refresh=False)
    _, fresh = lists(later, refresh=True)
    assert torch.equal(initial["kv_indices"], reuse["kv_indices"])
    assert not torch.equal(reuse["kv_num_blocks"], fresh["kv_num_blocks"])
    out, records = lists(first, dense=True)
    torch.testing.assert_close(out, dense_attn(*first))
    assert not records


def test_heads_are_scored_some_at_a_time(monkeypatch):
    q, _, _ = tensors_of(100)
    q = torch.cat([q, q.flip(1)], 2)
    _, k, v = tensors_of(100, seed=3)
    method = FineGrainedAttention(dim=32, num_heads=4, head_dim=8, q_tokens=16, kv_tokens=8, top_p=0.6)
    together, _ = run(method, [(1, 10, 10)], (q, k, v))
    monkeypatch.setattr("vsa.attention.fine_grained.method._SCORES", 1)
    torch.testing.assert_close(run(method, [(1, 10, 10)], (q, k, v))[0], together)
    assert mean_logits(q, k, method.layout([Segment((1, 10, 10))])).shape == (1, 4, 7, 13)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q_tokens": 48}, "q_tokens=48: expected one of 16, 32, 64, 128, got 48"),
        ({"kv_tokens": 0}, "kv_tokens=0: expected one of 1, 2, 4, 8, 16, 32, 64, 128, got 0"),
        ({"kv_tokens": 24}, "kv_tokens=24: expected one of 1, 2, 4, 8, 16, 32, 64, 128, got 24"),
        ({"top_p": 0}, "top_p=0: expected a number above 0 and of at most 1, got 0"),
        ({"top_p": 1.2}, "top_p=1.2: expected a number above 0 and of at most 1, got 1.2"),
        ({"merge": "random"}, "merge=random: expected one of xor, consecutive, got 'random'"),
        ({"backend": "gather"}, "backend=gather: expected one of reference, triton, or null, got 'gather'"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        method_of(**options)


@pytest.mark.slow
def test_inference_compiles_and_exports_whole():
    method = method_of(q_tokens=16, kv_tokens=8, top_p=0.6)
    layout = method.layout([Segment((1, 9, 10))])

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return method(q, k, v, {}, AttnContext(layout=layout, topk=KeptTiles.of(1)))

    tensors = tensors_of(90, dtype=torch.float32)
    with torch.no_grad():
        expected = Layer()(*tensors)
        torch.testing.assert_close(torch.compile(Layer(), backend="aot_eager", fullgraph=True)(*tensors), expected)
        program = torch.export.export(Layer(), tensors)
        torch.testing.assert_close(program.module()(*tensors), expected)
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"vsa_kernels.gathered_fwd.default", "vsa_kernels.group_tiles.default"} <= targets

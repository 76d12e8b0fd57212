"""SpargeAttn as a layer, against dense masks in fp64, and its file of tuned heads."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tests.attention.oracle import grads_of
from tests.attention.sparge import oracle
from vsa.attention.context import AttnContext
from vsa.attention.denoising import DenoisingPass
from vsa.attention.full import dense_attn
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.attention.sparge.method import SpargeAttention
from vsa.attention.sparge.tuned import HeadSettings, Tuned, read_tuned
from vsa.models.video_dit import VideoDiT

SIZES = {"dim": 20, "num_heads": 4, "head_dim": 5}
SMALL = {"q_tokens": 8, "kv_tokens": 4, "tau": 0.6, "theta": 0.3}


def fields(grid, kv_heads=4, seed=0, dtype=torch.float64):
    """Smooth over raster order, so that blocks of neighbours are alike."""
    generator = torch.Generator().manual_seed(seed)
    length = math.prod(grid)

    def one(heads):
        runs = torch.randn(2, (length + 5) // 6, heads, 5, generator=generator, dtype=torch.float64)
        return runs.repeat_interleave(6, 1)[:, :length] + torch.randn(
            2, length, heads, 5, generator=generator, dtype=torch.float64
        )

    return [one(h).to(dtype) for h in (4, kv_heads, kv_heads)]


def run(method, grid, qkv, **ctx):
    """Output in raster order and what was recorded."""
    layout, records = method.layout([Segment(grid)], "cpu"), {}
    q, k, v = (layout.permute(x) for x in qkv)
    ctx["topk"] = KeptTiles.of(ctx.get("topk", layout.num_video_tiles))
    context = AttnContext(
        layout=layout,
        **ctx,
        recorder=lambda _, tensors: records.update(tensors),
    )
    return layout.unpermute(method(q, k, v, {}, context)), records


def dense_mask(qkv, layout, *, q_tokens, kv_tokens, tau, theta):
    """bool `[2, 4, L, L]` in raster order, by the definition."""
    q, k = (layout.permute(x) for x in qkv[:2])
    length = q.shape[1]
    masks = torch.zeros(2, 4, length, length, dtype=torch.bool)
    for b in range(2):
        for h in range(4):
            rows, margin = oracle.mask(
                q[b, :, h].tolist(), k[b, :, h * k.shape[2] // 4].tolist(),
                q_tokens=q_tokens, kv_tokens=kv_tokens, tau=tau, theta=theta,
            )  # fmt: skip
            assert margin > 1e-7
            place = torch.arange(length)
            masks[b, h] = torch.tensor(rows).bool()[place // q_tokens][:, place // kv_tokens]
    return masks[:, :, layout.inverse][..., layout.inverse]


def masked_attention(q, k, v, mask):
    k, v = (x.repeat_interleave(4 // x.shape[2], 2) for x in (k, v))
    logits = torch.einsum("blhd,bshd->bhls", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhls,bshd->blhd", logits.masked_fill(~mask, -math.inf).softmax(-1), v)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("order", ["raster", "hilbert"])
@pytest.mark.parametrize("blocks", [(8, 4), (4, 8), (6, 6)], ids=str)
@pytest.mark.parametrize("grid", [(3, 4, 5), (2, 5, 7)], ids=str)
def test_the_layer_is_a_dense_mask(grid, blocks, order, kv_heads):
    qkv = fields(grid, kv_heads)
    setting = {"q_tokens": blocks[0], "kv_tokens": blocks[1], "tau": 0.6, "theta": 0.3}
    method = SpargeAttention(**SIZES, **setting, order=order)
    mask = dense_mask(qkv, method.layout([Segment(grid)]), **setting)
    out, _ = run(method, grid, qkv)
    assert not mask.all()
    assert torch.allclose(out, masked_attention(*qkv, mask), atol=1e-12)
    assert not torch.allclose(out, dense_attn(*qkv), atol=1e-3)


def test_gradients_with_a_constant_mask():
    grid = (3, 4, 5)
    leaves = [x.requires_grad_() for x in fields(grid)]
    method = SpargeAttention(**SIZES, **SMALL, threshold=-1.0)
    with pytest.raises(ValueError, match=r"^attention=sparge is training-free: .* set attention.allow_training=true"):
        run(method, grid, leaves)
    with torch.no_grad():
        run(method, grid, leaves)
    out, _ = run(SpargeAttention(**SIZES, **SMALL, allow_training=True, threshold=-1.0), grid, leaves)
    mask = dense_mask([x.detach() for x in leaves], method.layout([Segment(grid)]), **SMALL)
    expected = masked_attention(*leaves, mask)
    # no second stage where there are gradients
    assert torch.allclose(out, expected, atol=1e-12)
    ours, theirs = (grads_of(x, leaves) for x in (out, expected))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, atol=1e-11)
    full = grads_of(masked_attention(*leaves, torch.ones_like(mask)), leaves)
    assert not torch.allclose(ours[0], full[0], atol=1e-3)


def test_the_whole_share_and_dense_layers_are_dense_attention():
    grid = (3, 4, 5)
    qkv = fields(grid)
    expected = dense_attn(*qkv)
    for method, ctx in (
        (SpargeAttention(**SIZES, q_tokens=8, kv_tokens=4, tau=1), {}),
        (SpargeAttention(**SIZES, **SMALL), {"dense": True}),
        (SpargeAttention(**SIZES, **SMALL, rule="topk"), {"dense": True}),
        (SpargeAttention(**SIZES, q_tokens=8, kv_tokens=4, tau=0.1, theta=1.01), {}),
    ):
        assert torch.allclose(run(method, grid, qkv, **ctx)[0], expected, atol=1e-12)
    assert not torch.allclose(run(SpargeAttention(**SIZES, **SMALL), grid, qkv)[0], expected, atol=1e-3)


def test_the_second_stage_skips_by_its_threshold():
    grid = (4, 6, 6)
    qkv = [x * 2 for x in fields(grid)]
    plain, records = run(SpargeAttention(**SIZES, **SMALL), grid, qkv)
    assert "skipped" not in records
    errors, counts = [], []
    for threshold in (-30.0, -3.0, -1.0):
        out, records = run(SpargeAttention(**SIZES, **SMALL, threshold=threshold), grid, qkv)
        # two rows a slice
        assert records["skipped"].shape == records["kv_num_blocks"].shape
        errors.append(float((out - plain).abs().max()))
        counts.append(int(records["skipped"].sum()))
    assert errors[0] < 1e-10 < errors[1] < errors[2]
    assert counts[0] <= counts[1] < counts[2] <= 4 * int(records["kv_num_blocks"].sum())
    other, _ = run(SpargeAttention(**SIZES, **SMALL, threshold=-1.0, keeps_sum=False), grid, qkv)
    assert not torch.allclose(other, out, atol=1e-4)


def test_a_budget_has_a_meaning_with_its_rule_only():
    grid = (3, 4, 5)
    qkv = fields(grid)
    method = SpargeAttention(**SIZES, q_tokens=8, kv_tokens=4, rule="topk")
    assert method.selects
    _, records = run(method, grid, qkv, topk=3)
    assert (records["kv_num_blocks"] == 3).all()
    # the judge adds what it forces
    _, records = run(SpargeAttention(**SIZES, q_tokens=8, kv_tokens=4, rule="topk", theta=0.4), grid, qkv, topk=3)
    assert records["kv_num_blocks"].min() >= 3
    assert records["kv_num_blocks"].max() > 3
    by_share = SpargeAttention(**SIZES, **SMALL)
    assert not by_share.selects
    first, second = (run(by_share, grid, qkv, topk=topk)[1] for topk in (1, 15))
    assert torch.equal(first["kv_indices"], second["kv_indices"])
    layout = method.layout([Segment(grid)])
    assert method.pairs(layout, 3) == 60 * 60 * 3 / 15 + 8 * 15
    # the number that a share keeps is not known: all of them, or as many as are expected
    assert by_share.expected_pairs(layout) == by_share.pairs(layout, 15) == 60 * 60 + 8 * 15
    assert by_share.pairs(layout, 3) == method.pairs(layout, 3)


def test_rows_with_text_see_it_and_samples_stay_apart():
    segments = [Segment((2, 3, 4)), Segment((1, 1, 5), "text"), Segment((1, 4, 5), sample=1)]
    method = SpargeAttention(**SIZES, q_tokens=4, kv_tokens=4, tau=0.5, theta=0.3)
    layout, records = method.layout(segments), {}
    qkv = fields((1, 1, 49))
    ctx = AttnContext(layout=layout, topk=KeptTiles.of(1), recorder=lambda _, tensors: records.update(tensors))
    out = method(*qkv, {}, ctx)
    whole = dense_attn(*(x[:, :29] for x in qkv))
    assert torch.allclose(out[:, 24:29], whole[:, 24:], atol=1e-12)
    lists, counts = records["kv_indices"], records["kv_num_blocks"]
    rows = [set(lists[0, 0, i, : counts[0, 0, i]].tolist()) for i in range(11)]
    # video tiles 0 to 5, text 6 and 7, the other sample's 8 to 12
    assert all({6, 7} < row <= set(range(8)) for row in rows[:6])
    assert all(row <= set(range(8, 13)) for row in rows[6:])
    # the first sample alone, but for its text
    alone = SpargeAttention(**SIZES, q_tokens=4, kv_tokens=4, tau=0.5, theta=0.3)
    _, second = run_segments(alone, [Segment((1, 4, 5))], [x[:, 29:] for x in qkv])
    assert torch.equal(second["kv_num_blocks"], counts[:, :, 6:])


def run_segments(method, segments, qkv):
    records = {}
    layout = method.layout(segments)
    ctx = AttnContext(layout=layout, topk=KeptTiles.of(1), recorder=lambda _, tensors: records.update(tensors))
    return method(*qkv, {}, ctx), records


def test_selections_are_kept_over_a_denoising():
    grid, cache = (3, 4, 5), {}
    method = SpargeAttention(**SIZES, **SMALL)
    outs = []
    for seed, refresh in ((0, True), (1, False), (1, True)):
        layout = method.layout([Segment(grid)])
        now = DenoisingPass(cache=cache, refresh=refresh)
        ctx = AttnContext(layout=layout, topk=KeptTiles.of(15), denoising=now).layer(0)
        q, k, v = (layout.permute(x) for x in fields(grid, seed=seed))
        outs.append((method(q, k, v, {}, ctx), ctx.selection))
    assert outs[0][1] is None
    assert outs[1][1] is not None
    assert not torch.allclose(outs[1][0], outs[2][0], atol=1e-3)


# a file of tuned heads


HEADS = ((0.3, -1.0), (0.6, None), (1.0, -2.0), (0.6, 0.0))


def tuned(tmp_path, **changes):
    heads = [
        HeadSettings(tau=t, theta=0.3, threshold=b) for t, b in ((0.3, -1.0), (0.6, None), (1.0, -2.0), (0.6, 0.0))
    ]
    values = {"layers": 2, "heads": 4, "head_dim": 5, "q_tokens": 8, "kv_tokens": 4, "order": "hilbert"}
    file = Tuned(**values | {"found": {0: heads, 1: heads}} | changes)
    file.write(tmp_path / "tuned.json")
    return str(tmp_path / "tuned.json")


def test_heads_have_settings_of_their_own(tmp_path):
    grid = (4, 6, 6)
    qkv = [x * 2 for x in fields(grid)]
    sizes = {"q_tokens": 8, "kv_tokens": 4}
    out, records = run(SpargeAttention(**SIZES, **sizes, tuned=tuned(tmp_path)), grid, qkv)
    for head, (tau, threshold) in enumerate(HEADS):
        alone = SpargeAttention(**SIZES, **sizes, tau=tau, theta=0.3, threshold=threshold)
        expected, own = run(alone, grid, qkv)
        assert torch.allclose(out[:, :, head], expected[:, :, head], atol=1e-12)
        assert torch.equal(records["kv_num_blocks"][:, head], own["kv_num_blocks"][:, head])
    assert not torch.allclose(out[:, :, 1], run(alone, grid, qkv)[0][:, :, 1], atol=1e-4)


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        ({"heads": 3}, {}, "layer 0: expected 3 heads, got 4"),
        ({"head_dim": 64}, {}, "was tuned for head_dim=64, got head_dim=5"),
        ({"layers": 3}, {}, "was tuned for layers=3, got layers=2"),
        ({"found": {0: [HeadSettings(tau=1, theta=0)] * 4}}, {}, "has no layer 1, but 1 of 2"),
        ({}, {"kv_tokens": 8}, "was tuned for kv_tokens=4, got kv_tokens=8"),
        ({}, {"order": "raster"}, "was tuned for order=hilbert, got order=raster"),
        (
            {"found": {0: [HeadSettings(tau=1.5, theta=0)] * 4}},
            {},
            "layer 0, head 0: tau=1.5: expected a number above 0",
        ),
        ({"found": {1: [HeadSettings(tau=0, theta=0)] * 4}}, {}, "layer 1, head 0: tau=0: expected a number above 0"),
        (
            {"found": {0: [HeadSettings(tau=1, theta=0, threshold=1.0)] * 4}},
            {},
            "threshold=1.0: expected a number of at",
        ),
        ({"found": {5: [HeadSettings(tau=1, theta=0)] * 4}}, {}, "found has layer 5: expected 0 to 1"),
        ({"found": {0: [HeadSettings(tau=1, theta=0, sparsity="no")] * 4}}, {}, "sparsity=no: expected a number"),
        (
            {"found": {i: [HeadSettings(tau=1, theta=0, threshold=-1.0)] * 4 for i in (0, 1)}},
            {"backend": "gather"},
            "need backend reference, triton or null, got gather",
        ),
    ],
)
def test_files_of_another_model_are_refused(tmp_path, file, settings, message):
    path = tuned(tmp_path, **file)

    def attention(**layer):
        return SpargeAttention(**{"q_tokens": 8, "kv_tokens": 4, "tuned": path} | settings, **layer)

    with pytest.raises(ValueError, match=message) as error:
        VideoDiT(
            attention=lambda **layer: attention(**layer | {"num_heads": 4, "head_dim": 5}),
            num_attention_heads=4, attention_head_dim=6, ffn_dim=8, num_layers=2, text_dim=4, freq_dim=4,
        )  # fmt: skip
    assert path in str(error.value)
    assert "\n" not in str(error.value)


def test_another_head_count_is_refused(tmp_path):
    method = SpargeAttention(dim=40, num_heads=8, head_dim=5, q_tokens=8, kv_tokens=4, tuned=tuned(tmp_path))
    with pytest.raises(ValueError, match="was tuned for heads=4, got heads=8"):
        method.check_model(2)


@pytest.mark.parametrize("rule", ["cdf", "topk"])
def test_dense_layers_skip_nothing(rule):
    qkv = fields((3, 4, 5))
    method = SpargeAttention(**SIZES, q_tokens=8, kv_tokens=4, rule=rule, threshold=-0.5)
    out, _ = run(method, (3, 4, 5), qkv, dense=True)
    assert torch.allclose(out, dense_attn(*qkv), atol=1e-12)
    # control
    assert not torch.allclose(run(method, (3, 4, 5), qkv)[0], dense_attn(*qkv), atol=1e-3)


def test_nan_is_not_hidden():
    q, k, v = fields((3, 4, 5))
    k[0, 30, 2] = math.nan
    method = SpargeAttention(**SIZES, q_tokens=8, kv_tokens=4, tau=0.3, theta=-1.0)
    out, _ = run(method, (3, 4, 5), (q, k, v))
    assert out[0, :, 2].isnan().all()
    assert out[0, :, [0, 1, 3]].isfinite().all()
    assert out[1].isfinite().all()


def test_bad_input(tmp_path):
    for settings, message in (
        ({"q_tokens": 48, "kv_tokens": 32}, "one of q_tokens=48 and kv_tokens=32 must divide the other"),
        ({"q_tokens": 6, "kv_tokens": 2, "threshold": -1.0}, "q_tokens=6 must be a multiple of 4"),
        ({"tau": 0}, "^tau=0: expected a number above 0"),
        ({"tau": 1.01}, "^tau=1.01: expected a number above 0 and of at most 1"),
        ({"threshold": 2.0}, "^threshold=2.0: expected a number of at most 0"),
        ({"order": "cube"}, "^order=cube: expected one of raster, hilbert"),
        ({"tuned": str(tmp_path / "none.json")}, "none.json: no such file"),
        ({"tuned": str(tmp_path)}, "no such file"),
        ({"tuned": {"format": "vsa-sparge-1"}, "rule": "topk"}, "rule=topk has no tau to take from tuned=..."),
        ({"threshold": -1.0, "backend": "gather"}, "threshold=-1.0 needs backend reference"),
    ):
        with pytest.raises(ValueError, match=message):
            SpargeAttention(**SIZES, **settings)
    for text in ("{}", "[]", "{", json.dumps({"format": "vsa-sparge-1"})):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=r"bad.json is not a (complete )?file of `vsa tune-sparge`"):
            SpargeAttention(**SIZES, tuned=str(tmp_path / "bad.json"))


def test_a_file_is_read_as_it_was_written(tmp_path):
    head = HeadSettings(tau=0.1 + 0.2, theta=-1.0, threshold=None, sparsity=1 / 3, error=0.05)
    file = Tuned(
        layers=1, heads=1, head_dim=5, q_tokens=8, kv_tokens=4, order="raster", found={0: [head]},
        made={"l1": 0.05},
    )  # fmt: skip
    file.write(tmp_path / "t.json")
    settings = {"q_tokens": 8, "kv_tokens": 4, "order": "raster"}
    method = SpargeAttention(dim=5, num_heads=1, head_dim=5, **settings, tuned=str(tmp_path / "t.json"))
    assert method.file == file


@pytest.mark.parametrize(("scaled", "left"), [(True, True), (False, False)])
def test_readings_of_older_files_have_the_values_that_are_left(tmp_path, scaled, left):
    head = HeadSettings(tau=0.5, theta=-1.0)
    file = Tuned(layers=1, heads=1, head_dim=5, q_tokens=8, kv_tokens=4, order="raster", found={0: [head]})
    values = file.values() | {"readings": {"similarity": "cosine", "scaled": scaled, "causal": False}}
    (tmp_path / "t.json").write_text(json.dumps(values))
    if left:
        assert read_tuned(str(tmp_path / "t.json")) == file
        return
    with pytest.raises(ValueError, match=r"t\.json: scaled=False of SpargeAttn is not supported, only True"):
        read_tuned(str(tmp_path / "t.json"))

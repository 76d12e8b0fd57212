"""What holds for every attention method: `torch.autocast` changes nothing, and a selection hides no NaN."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tests.attention.test_configs import CONFIGS
from vsa.attention.context import AttnContext, of_video, recorded_index
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.attention.staged import StagedAttention
from vsa.attention.stats import visible_keys
from vsa.evaluation.inspection.metrics import layer_metrics
from vsa.integrations.diffusers.ungated import UngatedVideoSparse

GRID = (4, 3, 6)
TOKENS = math.prod(GRID)
SIZES = {"dim": 16, "num_heads": 2, "head_dim": 8, "layer_idx": 0}
BLOCKS = {"q_tokens": 16, "kv_tokens": 8, "allow_training": True}
# options of each config, beside none
OPTIONS = {
    "video_sparse": [
        *({"fine_gate": False}, {"gate_init": "model"}, {"score": "subblock_lse"}, {"score": "mass"}),
        *({"rule": "top_p", "top_p": 0.5, "over": over} for over in ("row", "layer")),
        {"rule": "larger_of_both", "top_p": 0.5, "over": "head", "score": "subblock_softmax"},
    ],
    "spargeattention2": [{"tile_thw": (1, 1, 8), "kv_tile_thw": (1, 1, 4)}],
    "radial": [{"tokens": 8}],
    "sla": [{"tile_thw": (1, 1, 8)}, {"linear": "marginal", "tile_thw": (2, 2, 2), "partition": "cube"}],
    "staged": [
        *({"stages": stages, "window_thw": (1, 1, 3)} for stages in ("c_f", "f", "l", "c_f_l", "c_fl", "c_f_l_e")),
        *({"stages": "f", "score": score} for score in ("mass", "error", "oracle", "subblock_softmax", "random")),
        *({"stages": "c_f", "pooling": pooling} for pooling in ("max", "conv")),
        {"stages": "f", "pool_thw": (1, 2, 2)},
        {"stages": "f", "partition": "hilbert_run", "kv_tile_thw": (2, 2, 1), "score": "mass"},
    ],
    "pooled_tail": [
        *({"order": order, "score": score} for order in (1, 2) for score in ("mean", "mass", "subblock_softmax")),
        {"score": "subblock_lse"},
        {"score": "error", "tail": "none"},
        {"tail": "double_count", "levels": 2, "node_thw": (4, 2, 4)},
    ],
    "fine_grained": [{**BLOCKS, "order": order, "top_p": p} for order in ("raster", "hilbert") for p in (0.2, 0.9)]
    + [{**BLOCKS, "attended": "tile", "merge": "consecutive"}],
    "dynamic_hilbert": [
        {"tokens": 8, "sub_tokens": 4, "order": order, "padding": padding, "allow_training": True}
        for order, padding in (
            ("hilbert", "masked"),
            ("hilbert2d", "zeros"),
            ("raster", "masked"),
            ("block3d", "zeros"),
        )
    ],
    "sparge": [
        {**BLOCKS, "q_tokens": 16, **more}
        for more in (
            {"rule": "topk"},
            {"rule": "cdf", "tau": 0.5, "threshold": -3.0},
            {"rule": "cdf", "tau": 0.5, "theta": -1.0, "order": "hilbert"},
        )
    ],
    "nabla": [{"tile_thw": (1, 2, 2), "window_thw": (1, 1, 1), "top_p": 0.5}],
    "neighborhood": [{"window_thw": [1, 3, 3], "stride_thw": [1, 1, 1]}],
}
ALL = [
    pytest.param(name, options, id=f"{name}-{'-'.join(str(value) for value in options.values())}")
    for name in [*sorted(path.stem for path in (CONFIGS / "attention").glob("*.yaml")), "ungated"]
    for options in ({}, *OPTIONS.get(name, []))
]
CASTS = [("cpu", torch.bfloat16), ("cpu", torch.float16)]
CASTS += [("cuda", dtype) for _, dtype in CASTS] if torch.cuda.is_available() else []
pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")


@cache
def config(name):
    whole = {"tile_thw": [2, 2, 2], "start": OmegaConf.load(CONFIGS / "start" / "scratch.yaml")}
    whole["attention"] = OmegaConf.load(CONFIGS / "attention" / f"{name}.yaml")
    return instantiate(OmegaConf.create(whole).attention)


def make(name, options, device="cpu"):
    torch.manual_seed(5)
    if name == "ungated":
        return UngatedVideoSparse(**SIZES, tile_thw=(2, 2, 2))
    method = config(name)(**SIZES, **options).to(device)
    for parameter in method.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return method


def run(method, qkv, topk=2, cast=None, gradients=False):
    """Output, selection and, if asked for, gradients of q, k, v `[1, L, H, D]` in raster order."""
    device = qkv[0].device
    if not hasattr(method, "of_grid"):
        # laid out once a test
        method.of_grid = method.layout([Segment(GRID)], device)
    layout = method.of_grid
    qkv = [x.clone().requires_grad_(gradients) for x in qkv]
    parts = [layout.permute(x) for x in qkv]
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, TOKENS, SIZES["dim"], generator=generator).to(device)
    extra = {name: x.to(qkv[0].dtype) for name, x in method.project(hidden).items()}
    seen = {}
    ctx = AttnContext(layout=layout, topk=KeptTiles.of(topk), recorder=lambda _, tensors: seen.update(tensors))
    with torch.autocast(device.type, cast or torch.bfloat16, enabled=cast is not None):
        out = method(*parts, extra, ctx)
        # the way without a recorder, which may be one fused op
        plain = method(*parts, extra, AttnContext(layout=layout, topk=KeptTiles.of(topk)))
    assert out.isfinite().all() == plain.isfinite().all()
    found = [layout.unpermute(out), layout.unpermute(plain)]
    found += [seen[name] for name in ("kv_indices", "kv_num_blocks") if name in seen]
    if gradients:
        (plain.float().square().sum() + 0 * sum(x.float().sum() for x in qkv)).backward()
        found += [x.grad for x in qkv]
    return [x.detach() for x in found]


def inputs(seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, TOKENS, 2, 8, generator=generator).to(device, dtype) for _ in range(3)]


@pytest.mark.parametrize(("name", "options"), ALL)
def test_a_method_shows_its_settings(name, options):
    method = make(name, options)
    shown = repr(method)
    assert shown.startswith(type(method).__name__)
    for setting in options.keys() & vars(method).keys():
        assert f"{setting}={getattr(method, setting)}" in shown


@pytest.mark.parametrize(("name", "options"), ALL)
def test_autocast_changes_nothing(name, options):
    for device, cast in CASTS:
        method = make(name, options, device)
        for dtype in (torch.float32, cast) if options.get("pooling") != "conv" else (torch.float32,):
            qkv = inputs(0, dtype, device)
            expected, actual = (run(method, qkv, cast=how, gradients=method.allow_training) for how in (None, cast))
            for a, b in zip(actual, expected, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)


def test_what_autocast_does_to_a_method_that_it_reaches(monkeypatch):
    """The control: without the guard scores and output differ."""
    method, qkv = StagedAttention(**SIZES, tile_thw=(2, 2, 2), stages="f", score="oracle"), inputs()
    monkeypatch.setattr("vsa.attention.base.autocasts", lambda device: False)
    expected, actual = (run(method, qkv, cast=cast) for cast in (None, torch.bfloat16))
    assert not torch.equal(expected[0], actual[0])


def test_mixed_dtypes_are_those_of_autocast():
    """As after a norm in fp32; the gates, too."""
    method, (q, k, v) = make("video_sparse", {}), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        layout = method.layout([Segment(GRID)], "cpu")
        gates = {name: torch.ones(1, TOKENS, 2, 8) for name in ("gate_compress", "gate_fine")}
        ctx = AttnContext(layout=layout, topk=KeptTiles.of(2))
        out = method(q, k, v.bfloat16(), gates, ctx)
    low = method(q.bfloat16(), k.bfloat16(), v.bfloat16(), {n: x.bfloat16() for n, x in gates.items()}, ctx)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, low)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("name", "options"), ALL)
def test_what_is_not_finite_reaches_the_output(name, options, value):
    method, clean = make(name, options), inputs(1)
    assert run(method, clean)[0].isfinite().all()
    # a key of inf has weight 0 where q points away from it, and the few queries in reach may all do so
    for part in (0, 2) if name == "neighborhood" and math.isinf(value) else range(3):
        for token in (37, TOKENS - 1) if math.isnan(value) else (TOKENS - 1,):
            qkv = [x.clone() for x in clean]
            qkv[part][0, token, 1, 3] = value
            out, plain, *_ = run(method, qkv)
            for found in (out, plain):
                assert not found[0, :, 1].isfinite().all(), f"{'qkv'[part]} of token {token}"
                assert found[0, :, 0].isfinite().all(), "another head"
                if part == 0:
                    assert not found[0, token, 1].isfinite().all()


@pytest.mark.parametrize(("name", "options"), ALL)
def test_query_heads_may_share_a_kv_head(name, options):
    method, (q, k, v) = make(name, options), inputs()
    k, v = k[:, :, :1], v[:, :, :1]
    shared, repeated = run(method, (q, k, v))[0], run(method, (q, k.expand_as(q), v.expand_as(q)))[0]
    torch.testing.assert_close(shared, repeated)
    # control: heads of their own are others
    assert not torch.allclose(shared, run(method, inputs())[0])


@pytest.mark.parametrize("first", [True, False], ids=["text first", "video first"])
@pytest.mark.parametrize(("name", "options"), ALL)
def test_records_of_the_video_see_what_the_row_does(name, options, first):
    method = make(name, options)
    video, text = Segment(GRID), Segment((1, 1, 7), kind="text")
    try:
        layout = method.layout([text, video] if first else [video, text], "cpu")
        generator, seen = torch.Generator().manual_seed(4), {}
        q, k, v = (torch.randn(1, TOKENS + 7, 2, 8, generator=generator) for _ in range(3))
        hidden = torch.randn(1, TOKENS + 7, SIZES["dim"], generator=generator)
        ctx = AttnContext(layout=layout, topk=KeptTiles.of(2), recorder=lambda _, tensors: seen.update(tensors))
        method(q, k, v, method.project(hidden), ctx)
    except ValueError as refusal:
        if "takes rows of one video, got [" in str(refusal):
            return
        raise
    ((start, stop),), alone, found = layout.video_spans, method.layout([video], "cpu"), of_video(seen, layout)
    if "kv_indices" not in seen:
        return
    tokens = torch.arange(TOKENS)
    row = visible_keys(recorded_index(seen), tokens, layout.video_blocks, layout.kv_blocks)
    assert torch.equal(row[..., start:stop], visible_keys(recorded_index(found), tokens, alone.blocks, alone.kv_blocks))
    assert torch.equal(found["q"], q[:, start:stop])
    assert layer_metrics(found, alone, tokens, recorded_index(found))["recall"].isfinite()

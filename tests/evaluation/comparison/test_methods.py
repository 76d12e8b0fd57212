"""Methods by name, budget and settings, and what is refused."""

from __future__ import annotations

import pytest

from vsa.attention.layout import Segment
from vsa.attention.staged import StagedAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.evaluation.comparison.methods import parse_method, parse_methods

LAYER = {"dim": 24, "num_heads": 2, "head_dim": 12, "layer_idx": 3}

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")


def test_a_method_is_built_as_its_config_says():
    method = parse_method("video_sparse  topk=3", tile_thw=(2, 2, 2))
    assert (method.label, method.family, method.topk, method.sparsity) == (
        "video_sparse topk=3",
        "video_sparse",
        3,
        None,
    )
    layer = method.make(**LAYER)
    assert isinstance(layer, VideoSparseAttention)
    assert (layer.tile_thw, layer.layer_idx, layer.to_gate_fine) == ((2, 2, 2), 3, None)
    layout = layer.layout([Segment((4, 4, 4))])
    assert method.kept(layout) == 3
    words = "staged stages=f sparsity=0.75 attention.tile_thw=[2,4,4] score=subblock_softmax score_thw=[1,2,2]"
    method = parse_method(words)
    assert method.label == words
    assert method.family == "staged stages=f attention.tile_thw=[2,4,4] score=subblock_softmax score_thw=[1,2,2]"
    layer = method.make(**LAYER)
    assert isinstance(layer, StagedAttention)
    assert (layer.tile_thw, layer.score_thw, layer.score) == ((2, 4, 4), (1, 2, 2), "subblock_softmax")
    # gates at the dense start
    assert method.kept(layer.layout([Segment((4, 8, 8))])) == 2
    assert set(layer.extra_modules()) == set()
    # methods without a budget keep what there is
    assert parse_method("full").kept(parse_method("full").make(**LAYER).layout([Segment((4, 4, 4))])) == 1


def test_sliding_tile_attention_is_neighborhood_whose_stride_is_the_tile():
    method = parse_method("sliding_tile window_thw=[18,24,24] tile_thw=[6,8,8]")
    same = parse_method("neighborhood window_thw=[18,24,24] stride_thw=[6,8,8] tile_thw=[6,8,8]")
    assert method.label == "sliding_tile window_thw=[18,24,24] tile_thw=[6,8,8]"
    assert method.config == same.config
    # the published setting visits 27 of 300 tiles; a stride of its own does not move by whole tiles
    layers = [one.make(**LAYER) for one in (method, parse_method("neighborhood tile_thw=[6,8,8] stride_thw=[1,1,1]"))]
    shares = [layer.pairs(layer.layout([Segment((30, 48, 80))]), 1) / 115_200**2 for layer in layers]
    assert shares[0] == pytest.approx(27 / 300)
    assert shares[1] > 0.15
    # without a tile that of the comparison, and a window as shipped
    assert parse_method("sliding_tile", tile_thw=(2, 4, 4)).config["stride_thw"] == [2, 4, 4]


def test_dense_attention_is_always_first_and_nothing_twice():
    names = [m.label for m in parse_methods(["video_sparse topk=1", "full", "video_sparse   topk=1"])]
    assert names == ["full", "video_sparse topk=1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "method '': attention=: unknown method, expected one of compressed_kv, .*full"),
        ("vsaa topk=1", "unknown method, expected one of"),
        ("video_sparse", "method 'video_sparse': it selects tiles, expected either topk=K or sparsity=SHARE"),
        ("video_sparse topk=1 sparsity=0.5", "expected either topk=K or sparsity=SHARE"),
        ("video_sparse topk=0", "topk=0: expected an integer of at least 1"),
        ("video_sparse topk=1.5", "topk=1.5: expected an integer"),
        ("video_sparse sparsity=1", "sparsity=1: expected a share from 0 to below 1"),
        ("video_sparse sparsity=nan", "sparsity=nan: expected a share"),
        ("full topk=3", "full selects no tiles, so topk does not apply"),
        ("staged topk=2 stages=x", "attention.stages=x: expected"),
        ("video_sparse topk=2 tile=3", "attention.tile=3: unknown setting, did you mean"),
        ("video_sparse topk=2 tile_thw=[0,1,1]", r"tile_thw=\[0,1,1\]: expected"),
        ("video_sparse topk=2 word", "word: expected a setting of attention=video_sparse, key=value"),
        ("staged topk=2 score=subblock_softmax score_thw=[3,2,2]", "score_thw.* must divide"),
        ("sliding_tile stride_thw=[1,1,1]", r"stride_thw=\[1,1,1\]: the stride of sliding_tile is its tile_thw"),
        ("full _target_=os.system", "attention._target_=os.system is not allowed"),
    ],
)
def test_bad_input(text, message):
    with pytest.raises(ValueError, match=message):
        parse_method(text)

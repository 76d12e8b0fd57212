"""Query-key pairs that runs are charged for, against dense masks of the lists that layers record: every class that
trains, rows with and without text, every rule, forward, backward and recomputation."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations import tiny
from tests.integrations.test_trained_families import CASES
from vsa.attention.context import AttnContext, recorded_index
from vsa.attention.fine_grained.method import FineGrainedAttention
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.attention.pooled_tail import PooledTail
from vsa.attention.sparge.method import SpargeAttention
from vsa.attention.sparse_linear import SparseLinearAttention
from vsa.attention.staged import StagedAttention
from vsa.attention.stats import visible_keys
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.integrations.diffusers.network import DiffusersNetwork
from vsa.models.pair_tally import PairTally
from vsa.models.recompute import Level
from vsa.training.measured_flops import MeasuredFlops

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")

RULES: dict[str, dict[str, Any]] = {
    "top_p": {"rule": "top_p", "top_p": 0.4},
    "top_p by head": {"rule": "top_p", "top_p": 0.4, "over": "head"},
    "top_p by layer": {"rule": "top_p", "top_p": 0.4, "over": "layer"},
    "larger": {"rule": "larger_of_both", "top_p": 0.3},
    "larger by head": {"rule": "larger_of_both", "top_p": 0.3, "over": "head"},
    "deviation": {"rule": "mean_plus_std", "deviations": 0.5},
    "deviation by layer": {"rule": "mean_plus_std", "deviations": 0.5, "over": "layer"},
}
SPARGE = {"q_tokens": 8, "kv_tokens": 4, "tau": 0.5, "theta": -1.0, "allow_training": True}
FINE = {"q_tokens": 16, "kv_tokens": 4, "top_p": 0.4, "allow_training": True}
WINDOW = {"window_thw": (1, 1, 1), "fine_gate": False}
WITH_TEXT = {
    **{f"video_sparse {name}": partial(VideoSparseAttention, tile_thw=tiny.TILE, **own) for name, own in RULES.items()},
    **{f"pooled_tail {name}": partial(PooledTail, tile_thw=tiny.TILE, **own) for name, own in RULES.items()},
    "sub-blocks": partial(
        VideoSparseAttention, tile_thw=tiny.TILE, score="subblock_softmax", score_thw=(1, 2, 2), **RULES["top_p"]
    ),
    "sparge": partial(SpargeAttention, **SPARGE),
    "fine_grained union": partial(FineGrainedAttention, **FINE),
    "fine_grained tile": partial(FineGrainedAttention, **FINE, attended="tile"),
}
OF_VIDEO = {
    "sla": partial(SparseLinearAttention, tile_thw=tiny.TILE, partition="cube", **RULES["top_p"]),
    **{
        f"staged {stages} {name}": partial(StagedAttention, stages=stages, tile_thw=tiny.TILE, **WINDOW, **RULES[name])
        for stages, name in (("f", "larger"), ("c_f", "top_p"), ("c_fl", "deviation"), ("fl", "top_p"))
    },
    "staged other tiles": partial(
        StagedAttention, stages="f", tile_thw=(2, 2, 4), kv_tile_thw=(1, 2, 2), fine_gate=False, **RULES["top_p"]
    ),
    "staged within": partial(
        StagedAttention, stages="fl", tile_thw=tiny.TILE, window_budget="within", **WINDOW, **RULES["larger"]
    ),
}
TOPK = 3


@cache
def case_of(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    make, latents, _, constants = CASES[name]
    case = make()
    mask = case.inputs.get("encoder_attention_mask")
    return (
        case,
        (*latents(case), case.inputs["encoder_hidden_states"], None if mask is None else mask.bool()),
        constants,
    )


def network(name: str, attention: Any) -> tuple[DiffusersNetwork, tuple[Any, ...]]:
    case, inputs, constants = case_of(name)
    torch.manual_seed(0)
    config = {"class_name": type(case.model).__name__, "config": case.model.config, "constants": constants}
    model = DiffusersNetwork(attention=attention, **config)
    own = dict(model.named_parameters())
    for key, value in case.model.state_dict().items():
        own[key].data.copy_(value)
    return model, inputs


def visible_pairs(tensors: dict[str, Tensor], q_blocks: Any, kv_blocks: Any) -> int:
    """Pairs by a dense mask of tokens, of all samples and heads."""
    index, (batch, tokens, heads, _) = recorded_index(tensors), tensors["q"].shape
    mask = visible_keys(index, torch.arange(tokens), q_blocks, kv_blocks)
    return int(mask.expand(batch, heads, -1, -1).sum())


def recorded_pairs(model: DiffusersNetwork, inputs: tuple[Any, ...]) -> int:
    """Pairs between video tokens in the lists of all layers and rows."""
    layout, total = model.layout_for(inputs[0].shape[1:]), 0

    def add(layer: int, tensors: dict[str, Tensor]) -> None:
        nonlocal total
        total += visible_pairs(tensors, layout.video_blocks, layout.kv_blocks)

    with torch.no_grad():
        model(*inputs, topk=TOPK, recorder=add)
    return total


def check(name: str, attention: Any, levels: tuple[Level, ...] = ("none", "attention", "full")) -> float:
    """Compare the tally with the lists; returns their share of dense attention."""
    model, inputs = network(name, attention)
    expected = recorded_pairs(model, inputs)
    tally = model.tally = PairTally(torch.device("cpu"))
    with torch.no_grad():
        model(*inputs, topk=TOPK)
    pairs, dense = tally.take()
    assert pairs[:2].tolist() == [expected, 0], name
    assert not pairs[2:].any()
    if model.attention_layers[0].allow_training:
        for level in levels:
            model.activation_checkpointing = level
            model(*inputs, topk=TOPK).square().mean().backward()
            assert tally.take()[0][:2].tolist() == [0, expected], (name, level)
    # all tiles are dense attention in every row
    layout = model.layout_for(inputs[0].shape[1:])
    assert dense == len(model.blocks) * len(inputs[0]) * model.num_heads * layout.num_tokens**2
    return expected / dense


SAMPLED = [("cogvideox", "video_sparse top_p"), ("hunyuan", "pooled_tail deviation"), ("hunyuan", "fine_grained union")]


@pytest.mark.parametrize(("name", "method"), SAMPLED)
def test_pairs_beside_text_are_those_of_the_lists(name, method):
    # the control: much less than dense attention, as which these rows were charged
    assert 0.02 < check(name, WITH_TEXT[method], levels=("full",)) < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", [*WITH_TEXT, *OF_VIDEO])
def test_pairs_are_those_of_the_lists(name, method):
    if method in OF_VIDEO and name not in ("wan", "ltx"):
        pytest.skip(f"{name} has text in its rows")
    if name == "minimax_h3" and not method.startswith("pooled"):
        pytest.skip("its gates have no bias")
    assert 0.02 < check(name, {**WITH_TEXT, **OF_VIDEO}[method]) < 0.9


ROWS = {
    "video": (Segment((3, 5, 7)),),
    "image": (Segment((1, 5, 7), kind="image"),),
    "beside text": (Segment((3, 5, 7)), Segment((1, 1, 6), kind="text")),
    "texts around": (Segment((1, 1, 6), kind="text"), Segment((3, 5, 7)), Segment((1, 1, 9), kind="cond")),
    "several samples": (
        Segment((1, 1, 6), kind="text"),
        Segment((3, 5, 7)),
        Segment((2, 4, 4), sample=1),
        Segment((1, 3, 4), kind="image", sample=2),
        Segment((1, 1, 2), kind="text", sample=2),
    ),
}


QUICK = (("texts around", 2), ("several samples", 64))


@pytest.mark.parametrize(
    ("row", "topk"),
    [pytest.param(row, k, marks=() if (row, k) in QUICK else pytest.mark.slow) for row in ROWS for k in (2, 64)],
)
def test_a_layer_reports_the_pairs_of_its_video_in_every_kind_of_row(row, topk):
    segments, counted = ROWS[row], 0
    for name, factory in {**WITH_TEXT, **(OF_VIDEO if len(segments) == 1 else {})}.items():
        method = factory(dim=32, num_heads=2, head_dim=16)
        if "by" in name and len({segment.sample for segment in segments}) > 1:
            continue
        layout = method.layout(segments)
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, layout.num_tokens, 2, 16) for _ in range(3))
        extra, found = method.project(torch.randn(2, layout.num_tokens, 32)), {}
        for recorder in (None, lambda layer, tensors, found=found: found.update(tensors)):
            ctx = AttnContext(layout=layout, topk=KeptTiles.of(topk), slots=[], recorder=recorder)
            with torch.no_grad():
                method(q, k, v, extra, ctx.layer(0))
            (listed,) = ctx.slots or []
            if recorder is None:
                reported = int(listed)
        found["q"] = layout.take_video(found["q"])
        everything = visible_pairs(found, layout.video_blocks, layout.kv_blocks)
        video = [stop - start - n for (start, stop), n in zip(layout.sample_spans, layout.text_tokens, strict=True)]
        with_text = 2 * 2 * sum(n * m for n, m in zip(video, layout.text_tokens, strict=True))
        assert reported == int(listed) == everything - with_text, name
        counted += reported < 4 * sum(n * n for n in video)
    # the control: not all are dense
    assert counted > 3 or topk == 64


class Silent(VideoSparseAttention):
    """A method that forgets to report."""

    def attend(self, q, k, v, ctx):
        return super().attend(q, k, v, AttnContext(layout=ctx.layout, topk=ctx.topk))


def test_a_layer_that_does_not_report_is_an_error():
    model, inputs = network("cogvideox", partial(Silent, tile_thw=tiny.TILE, **RULES["top_p"]))
    measured = MeasuredFlops()
    measured.begin([model], torch.device("cpu"))
    model(*inputs, topk=TOPK)
    measured.collect(line=True)
    with pytest.raises(ValueError, match=r"^2 calls of attention layers whose pairs are measured reported none"):
        measured.read()
    # nor one that passes its context on as that of all layers
    with pytest.raises(ValueError, match=r"^2 layers must report their pairs, got 1"):
        PairTally(torch.device("cpu")).add([torch.zeros((), dtype=torch.int64)], 2, 10)

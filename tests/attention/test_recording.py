"""What methods hand a recorder: the selection that was attended to, and parts that make the output."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from vsa_kernels import BlockIndex

from vsa.attention.context import AttnContext
from vsa.attention.full import FullAttention
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.attention.pooled_tail import PooledTail
from vsa.attention.staged import StagedAttention, Stages

GRID = (3, 4, 5)
SIZES = {"dim": 16, "num_heads": 2, "head_dim": 8, "layer_idx": 3, "tile_thw": (2, 2, 2)}
pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")


def recorded(method, topk=3):
    """What the recorder gets, the output and its inputs."""
    generator = torch.Generator().manual_seed(0)
    layout = method.layout([Segment(GRID)], "cpu")
    q, k, v = (2 * torch.randn(1, math.prod(GRID), 2, 8, generator=generator) for _ in range(3))
    x = torch.randn(1, math.prod(GRID), 16, generator=generator)
    calls = []
    ctx = AttnContext(
        layout=layout, topk=KeptTiles.of(topk), recorder=lambda layer, tensors: calls.append((layer, tensors))
    )
    out = method.attend_combine(q, k, v, method.project(x), ctx)
    unseen = method.attend_combine(q, k, v, method.project(x), AttnContext(layout=layout, topk=KeptTiles.of(topk)))
    assert torch.equal(out, unseen)
    return calls, out, (q, k, v), layout


def fine_by_hand(found, qkv, layout):
    """Attention to the tokens of the recorded tiles, and its logsumexp."""
    q, k, v = qkv
    sizes = layout.blocks.sizes.long()
    index = BlockIndex(kv_indices=found["kv_indices"], kv_num_blocks=found["kv_num_blocks"])
    mask = index.to_dense(layout.num_blocks).expand(1, 2, -1, -1)
    mask = mask.repeat_interleave(sizes, 2).repeat_interleave(sizes, 3)
    logits = (torch.einsum("blhd,bshd->bhls", q, k) / 8**0.5).masked_fill(~mask, -torch.inf)
    return torch.einsum("bhls,bshd->blhd", logits.softmax(-1), v), logits.logsumexp(-1)


@pytest.mark.parametrize("stages", get_args(Stages))
def test_stages(stages):
    torch.manual_seed(1)
    method = StagedAttention(**SIZES, stages=stages, window_thw=(1, 1, 2), gate_init="model")
    [(layer, records)], out, qkv, layout = recorded(method)
    assert layer == 3
    assert not any(tensor.requires_grad for tensor in records.values())
    assert ("coarse" in records) == ("c" in stages)
    assert ("scores" in records) == (stages != "l")
    assert {name for name in records if name.startswith("gate")} == {f"gate_{name}" for name in method._gate_starts}
    fine, _ = fine_by_hand(records, qkv, layout)
    torch.testing.assert_close(fine, records["fine"], atol=1e-5, rtol=1e-5)
    again = fine * records["gate_fine"]
    if "c" in stages:
        again = again + records["coarse"] * records["gate_compress"]
        shares = records["scores"].softmax(-1)
        assert torch.allclose(shares.sum(-1), torch.ones(()))
    same = torch.allclose(again, out, atol=1e-5)
    # a window beside the selected tiles is a third output
    assert same == (stages not in ("c_f_l", "c_f_l_e"))


@pytest.mark.parametrize(
    "options",
    [
        {"pool_thw": (1, 1, 2)},
        {"pool_thw": (1, 1, 2), "pooled_map": "logits"},
        {"kv_tile_thw": (1, 2, 2)},
        {"score": "mass"},
        {"score": "subblock_softmax", "score_thw": (1, 2, 1)},
    ],
    ids=str,
)
def test_other_tiles_and_scores(options):
    torch.manual_seed(1)
    method = StagedAttention(**SIZES, stages="c_f", gate_init="model", **options)
    [(_, records)], out, _, layout = recorded(method)
    again = records["fine"] * records["gate_fine"] + records["coarse"] * records["gate_compress"]
    torch.testing.assert_close(again, out, atol=1e-5, rtol=1e-5)
    assert records["scores"].shape == (1, 2, layout.blocks.num, layout.kv_blocks.num)
    best = records["scores"].topk(3, dim=-1).indices.sort(-1).values
    assert torch.equal(best, records["kv_indices"][..., :3].long())
    # logits: shares are positive and would be nearly uniform
    assert records["scores"].min() < 0


@pytest.mark.parametrize("score", ["mean", "mass"])
def test_a_pooled_tail(score):
    [(layer, records)], out, qkv, layout = recorded(PooledTail(**SIZES, score=score))
    assert layer == 3
    torch.testing.assert_close(records["fine"] + records["tail"], out, atol=1e-5, rtol=1e-5)
    fine, lse = fine_by_hand(records, qkv, layout)
    # what the tail took is missing in every row of the selected tiles
    share = (records["fine"] / fine).transpose(1, 2).median(-1).values
    assert share.min() < 0.5 < share.max()
    sizes = layout.blocks.sizes.float()
    k_mean = torch.stack([part.mean(1) for part in qkv[1].split(layout.blocks.sizes.tolist(), 1)], 1)
    tail = torch.einsum("blhd,bnhd->bhln", qkv[0], k_mean) / 8**0.5 + sizes.log()
    index = BlockIndex(kv_indices=records["kv_indices"], kv_num_blocks=records["kv_num_blocks"])
    rows = index.to_dense(layout.num_blocks).repeat_interleave(layout.blocks.sizes.long(), 2)
    rest = tail.masked_fill(rows, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(share, (lse - torch.logaddexp(lse, rest)).exp(), atol=1e-4, rtol=1e-3)
    # the selected tiles are those of the largest scores, which are logits
    best = records["scores"].topk(3, dim=-1).indices.sort(-1).values
    assert torch.equal(best, records["kv_indices"][..., :3].long())
    q_mean = torch.stack([part.mean(1) for part in qkv[0].split(layout.blocks.sizes.tolist(), 1)], 1)
    mass = torch.stack([part.mean(2) for part in tail.softmax(-1).split(layout.blocks.sizes.tolist(), 2)], 2)
    logits = {"mean": torch.einsum("bnhd,bmhd->bhnm", q_mean, k_mean) / 8**0.5, "mass": mass.log()}
    torch.testing.assert_close(records["scores"], logits[score], atol=1e-5, rtol=1e-5)
    if score == "mass":
        torch.testing.assert_close(records["scores"].softmax(-1), records["scores"].exp(), atol=1e-5, rtol=1e-4)


def test_dense_attention_records_nothing():
    sizes = {name: value for name, value in SIZES.items() if name != "tile_thw"}
    assert recorded(FullAttention(**sizes))[0] == []

"""A batch of no samples passes every attention method, forward and backward."""

from __future__ import annotations

import pytest
import torch

from vsa.attention.context import AttnContext
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.config import attention_config, build
from vsa.config_files import choices

GRID = (4, 4, 4)
CASES = [
    *((name, ()) for name in choices()["attention"]),
    *(("staged", (f"score={score}",)) for score in ("mean", "subblock_softmax", "mass", "error", "oracle", "random")),
    ("staged", ("stages=c_fl", "window_thw=[1,1,3]", "pooling=conv")),
    ("pooled_tail", ("order=2", "score=mass")),
    ("dynamic_hilbert", ("padding=zeros",)),
    ("fine_grained", ("order=hilbert", "attended=tile")),
]
TRAINS = ("sparge", "fine_grained", "dynamic_hilbert")


@pytest.mark.filterwarnings("ignore:tiles .* are .* full")
@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_a_batch_of_no_samples_passes(name, settings):
    trains = ("allow_training=true",) if name in TRAINS else ()
    small = {"fine_grained": ("q_tokens=16", "kv_tokens=4"), "dynamic_hilbert": ("tokens=16", "sub_tokens=4")}
    config = attention_config(name, [*small.get(name, ()), *settings, *trains], tile_thw=(2, 2, 2))
    method = build(config)(dim=32, num_heads=2, head_dim=16, layer_idx=0)
    layout = method.layout([Segment(GRID)])
    outputs = {}
    for batch in (0, 1):
        q, k, v = (torch.ones(batch, 64, 2, 16).requires_grad_() for _ in range(3))
        x = torch.ones(batch, 64, 32)
        ctx = AttnContext(layout=layout, topk=KeptTiles.of(2))
        outputs[batch] = method.attend_combine(q, k, v, method.project(x), ctx)
        outputs[batch].sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape
    # as of a sample, but for the number of samples
    assert outputs[0].shape == (0, *outputs[1].shape[1:])
    assert outputs[0].dtype == outputs[1].dtype

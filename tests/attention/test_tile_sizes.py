"""Tiles of the paper's sizes, 256 to 16 tokens, in every method that selects tiles and on every backend."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.interpreted import INTERPRETED, further
from vsa.attention.context import AttnContext
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.attention.pooled_tail import PooledTail
from vsa.attention.staged import StagedAttention
from vsa.attention.video_sparse import VideoSparseAttention

GRID = (4, 9, 8)
SIZES = {256: (4, 8, 8), 128: (4, 8, 4), 64: (4, 4, 4), 16: (2, 4, 2)}
METHODS = {"staged": StagedAttention, "video_sparse": VideoSparseAttention, "pooled_tail": PooledTail}

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")


def run(method, device):
    """Output and gradients in raster order."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, math.prod(GRID), 1, 16)
    leaves = [torch.randn(shape, generator=generator).to(device).requires_grad_() for _ in range(5)]
    layout = method.layout([Segment(GRID)], device)
    q, k, v, *gates = (layout.permute(x) for x in leaves)
    names = ("gate_compress", "gate_fine") if isinstance(method, VideoSparseAttention) else ("compress", "fine")
    extra = dict(zip(names, gates, strict=True))
    out = layout.unpermute(method.attend_combine(q, k, v, extra, AttnContext(layout=layout, topk=KeptTiles.of(1))))
    grads = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
    return [out, *(g for g in grads if g is not None)]


CASES = [
    ("staged", {"tile_thw": SIZES[256]}),
    further("staged", {"tile_thw": SIZES[128]}),
    ("staged", {"tile_thw": SIZES[16]}),
    ("staged", {"tile_thw": SIZES[64], "kv_tile_thw": SIZES[16]}),
    ("staged", {"tile_thw": SIZES[16], "kv_tile_thw": SIZES[64]}),
    ("staged", {"tile_thw": SIZES[256], "pool_thw": SIZES[64]}),
    further("staged", {"tile_thw": SIZES[128], "kv_tile_thw": SIZES[64], "pool_thw": SIZES[64]}),
    ("video_sparse", {"tile_thw": SIZES[256]}),
    further("video_sparse", {"tile_thw": SIZES[128]}),
    ("video_sparse", {"tile_thw": SIZES[16]}),
    ("pooled_tail", {"tile_thw": SIZES[256]}),
    further("pooled_tail", {"tile_thw": SIZES[128]}),
    ("pooled_tail", {"tile_thw": SIZES[16]}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_every_backend_computes_every_size(name, options, device):
    make = lambda backend: METHODS[name](dim=16, num_heads=1, head_dim=16, backend=backend, **options)  # noqa: E731
    expected = run(make("reference"), device)
    for backend in ("gather", "triton") if device == "cuda" or INTERPRETED else ("gather",):
        for ours, theirs in zip(run(make(backend), device), expected, strict=True):
            assert torch.allclose(ours, theirs, atol=2e-5, rtol=1e-4), backend
    # another size is noticed
    other = METHODS[name](dim=16, num_heads=1, head_dim=16, backend="reference", tile_thw=(1, 4, 4))
    assert not torch.allclose(run(other, device)[0], expected[0], atol=1e-2)

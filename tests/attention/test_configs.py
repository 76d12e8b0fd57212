from __future__ import annotations

from pathlib import Path

import pytest
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from vsa.attention.dynamic_hilbert import DynamicHilbertAttention
from vsa.attention.full import FullAttention
from vsa.attention.layout import Segment
from vsa.attention.sparge.method import SpargeAttention
from vsa.attention.sparsity import ConstantSparsity
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.settings import arguments_of

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("video_sparse", VideoSparseAttention),
        ("full", FullAttention),
        ("sparge", SpargeAttention),
        ("dynamic_hilbert", DynamicHilbertAttention),
    ],
)
def test_attention_configs_are_factories(name, cls):
    whole = {"tile_thw": [4, 4, 4], "start": OmegaConf.load(CONFIGS / "start" / "scratch.yaml")}
    whole["attention"] = OmegaConf.load(CONFIGS / "attention" / f"{name}.yaml")
    factory = instantiate(OmegaConf.create(whole).attention)
    method = factory(dim=8, num_heads=2, head_dim=4, layer_idx=1)
    assert type(method) is cls
    assert method.layer_idx == 1
    assert set(factory.keywords) <= set(arguments_of(cls))
    assert not any(OmegaConf.is_config(value) for value in factory.keywords.values())


def test_constant_sparsity_config():
    config = OmegaConf.load(CONFIGS / "sparsity" / "constant.yaml")
    schedule = instantiate(config)
    assert isinstance(schedule, ConstantSparsity)
    assert schedule.topk(0, 256) == 32
    config.topk = 8
    with pytest.raises(InstantiationException, match=r"got topk=8 and sparsity=0\.875"):
        instantiate(config)


def test_the_shipped_neighborhood_fits_every_grid():
    factory = instantiate(OmegaConf.load(CONFIGS / "attention" / "neighborhood.yaml"))
    method = factory(dim=8, num_heads=2, head_dim=4)
    assert not method.selects
    assert list(method.parameters()) == []
    for rule in method.rules:
        for size in range(1, 300):
            axis = rule.at(size)
            assert 1 <= axis.stride <= axis.window <= size
            assert axis.window % axis.stride == 0
    # toy, world, the papers' and Wan's at 480p and 720p
    shapes = {
        (4, 8, 8): ((2, 4, 2), (1, 1, 1)),
        (16, 32, 32): ((9, 15, 9), (3, 5, 3)),
        (30, 48, 80): ((18, 24, 24), (6, 8, 8)),
        (21, 30, 52): ((12, 15, 15), (4, 5, 5)),
        (21, 45, 80): ((12, 24, 24), (4, 8, 8)),
        (1, 1, 1): ((1, 1, 1), (1, 1, 1)),
    }
    for grid, expected in shapes.items():
        axes = [rule.at(size) for rule, size in zip(method.rules, grid, strict=True)]
        assert (tuple(a.window for a in axes), tuple(a.stride for a in axes)) == expected
        layout = method.layout([Segment(grid)], "meta")
        density = method.pairs(layout, 1) / layout.num_tokens**2
        assert density < 0.3 or layout.num_tokens < 300, (grid, layout.tile_thw, density)

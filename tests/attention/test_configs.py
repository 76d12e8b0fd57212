from __future__ import annotations

from pathlib import Path

import pytest
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from vsa.attention.full import FullAttention
from vsa.attention.sparsity import ConstantSparsity
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.settings import arguments_of

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(("name", "cls"), [("video_sparse", VideoSparseAttention), ("full", FullAttention)])
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

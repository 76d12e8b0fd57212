"""The sweeps that come with the project: their points, and that each of them can be trained."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from tests.tiny_runs import write_run
from vsa.config import Sweep
from vsa.config_help import CONFIGS, choices
from vsa.sweeps.points import variants_of
from vsa.training.hydra_guard import composed
from vsa.training.train import check_run

SWEEPS = sorted(path.stem for path in (CONFIGS / "sweep").glob("*.yaml"))


def points_of(name: str):
    sweep = Sweep(**OmegaConf.to_container(OmegaConf.load(CONFIGS / "sweep" / f"{name}.yaml")))
    return variants_of(sweep, {})


def test_the_sweeps_that_are_promised_are_there_with_their_controls():
    assert set(SWEEPS) >= {"topk", "tile", "stages", "pooling", "seq_len_by_topk", "table1", "lr"}
    assert {name: sum(point.control for point in points_of(name)) for name in SWEEPS} == {
        name: {"seq_len_by_topk": 3, "score_tile_tail": 0, "score_tail_forms": 0}.get(name, 1) for name in SWEEPS
    }
    assert set(choices()["sweep"]) == set(SWEEPS)


def test_table_1_has_every_experiment_of_the_paper():
    names = {point.name for point in points_of("table1")}
    # 6 is 10, and 14 to 20 are named after what they change
    assert {name.split("_")[0] for name in names if name.startswith("e")} == {f"e{n}" for n in range(1, 14) if n != 6}
    assert names >= {"tile256", "tile128", "tile16", "tile64x16", "coarse64_fine256", "pool_max", "pool_conv"}


TINY = (
    "model.num_layers=2",
    "model.num_attention_heads=1",
    "model.attention_head_dim=12",
    "model.ffn_dim=24",
    "data=toy_online",
    "data.toy.count=40",
    "data.val_fraction=0.1",
    # 1024 tokens: 4 tiles of 256
    "data.toy.size=[16,256,256]",
    "sparsity.sparsity=0.75",
    "trainer.accelerator=cpu",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SWEEPS if name != "topk"])
def test_every_point_can_be_trained(name, tmp_path):
    datamodules, base = {}, TINY
    if name == "race_finetune":
        dense = f"init_from={write_run(tmp_path / 'dense', attention='full')}"
        base = (
            "task=finetune",
            "start=dense",
            "model=from_checkpoint",
            dense,
            *(o for o in TINY if not o.startswith("model.")),
        )
    for point in points_of(name):
        small = ["tile_thw=[2,2,2]"] if name == "seq_len_by_topk" else []
        if any(override.startswith("sparsity.sparsity=0.9") for override in point.overrides):
            # 2 of 32 tiles of 128 tokens
            small = ["data.toy.size=[64,256,256]"]
        settings = [o for o in (*base, *small) if o.split("=")[0] not in {p.split("=")[0] for p in point.overrides}]
        check_run(composed(*settings, *point.overrides), datamodules)

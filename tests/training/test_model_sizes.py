"""`model=from_checkpoint` takes the sizes of the weights, and what does not fit is told in one message."""

from __future__ import annotations

import shutil

import pytest
import torch
from omegaconf import OmegaConf

from tests.data.tiny_wan import make_transformer
from tests.tiny_runs import TINY_OVERRIDES, training, vsa_command  # noqa: F401
from vsa.data.video_files import write_video
from vsa.training.model_sizes import follow_rate

OWN = tuple(f"~{word.partition('=')[0]}" for word in TINY_OVERRIDES if word.startswith("model."))
FINETUNE = ("task=finetune", "start=dense", "data.text_encoder.dim=32")
SIZES = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "text_dim": 32, "ffn_dim": 32}


@pytest.fixture
def weights(tmp_path):
    make_transformer().save_pretrained(tmp_path / "weights")
    return tmp_path / "weights"


def test_sizes_are_those_of_the_weights(training, weights, tmp_path):  # noqa: F811
    words = (*OWN, "model=from_checkpoint", *FINETUNE, f"init_from={weights}", "trainer.max_steps=1")
    training(*words)
    model = training.last().state["config"]["model"]
    assert {key: model[key] for key in SIZES} == SIZES
    # a resume needs the weights no longer, and a run gives its sizes too
    shutil.rmtree(weights)
    training(*words[:-1], "ckpt_path=last", "trainer.max_steps=2")
    run = training.folder()
    training(*words[:-2], f"init_from={run}", "run=again", "trainer.max_steps=1", "task.gates=required")
    assert training.last("again").state["config"]["model"] == model
    with pytest.raises(ValueError, match="takes the sizes of a model from init_from, got init_from=null"):
        training(*OWN, "model=from_checkpoint", *FINETUNE, "run=none")


def test_all_that_does_not_fit_is_told_at_once(training, weights, tmp_path):  # noqa: F811
    vsa_command("toy", tmp_path / "v", "--count", "6", "--size", "8", "64", "64")
    vsa_command("encode", tmp_path / "v", tmp_path / "s", "--text-dim", "32")
    stored = ("data=folder", "data.num_workers=0", f"data.root={tmp_path / 's'}", "~data.toy.size", "~data.toy.count")
    wrong = ("model.in_channels=20", "model.text_dim=48", "model.out_channels=20", "sparsity.topk=99")
    with pytest.raises(ValueError, match="topk=99 is above the number of tiles") as refused:
        training(*FINETUNE, *stored, *wrong, "sparsity.sparsity=null", f"init_from={weights}")
    for words in (
        "model.in_channels=20, but data.codec makes latents of 16 channels",
        "model.out_channels=20, but data.codec",
        "model.text_dim=48, but data.text_encoder makes tokens of width 32",
        "has num_attention_heads=2, the model has 1",
        "freq_dim=32, the model has 16",
        "ffn_dim=32, the model has 24",
        "text_dim=32, the model has 48",
        "model=from_checkpoint takes the sizes of init_from",
    ):
        assert words in str(refused.value), refused.value
    assert not training.folder().exists()
    # data that were encoded otherwise
    vsa_command("encode", tmp_path / "v", tmp_path / "s", "--overwrite", "--text", "ngrams")
    with pytest.raises(ValueError, match=r"text_dim=48, but .*shards were encoded with text encoder hashed-ngrams-64"):
        training(*FINETUNE, *stored, *wrong, "sparsity.sparsity=null", f"init_from={weights}")


def test_positions_in_seconds_follow_the_rate_of_the_data(tmp_path):
    write_video(tmp_path / "v" / "a.mp4", torch.zeros(48, 16, 16, 3, dtype=torch.uint8), fps=24)
    (tmp_path / "v" / "a.txt").write_text("a black square")
    vsa_command("encode", tmp_path / "v", tmp_path / "s4", "--text-dim", "32", "--fps", "4", "--frames", "8")
    ltx, data = {"class_name": "LTXVideoTransformer3DModel"}, {"root": str(tmp_path / "s4")}
    cfg = OmegaConf.create({"model": ltx, "data": data, "ckpt_path": None})
    assert follow_rate(cfg) == f"most clips in {tmp_path / 's4'} have 4 frames a second: model.constants.fps=4"
    assert cfg.model.constants == {"fps": 4}
    # own values stay, and so do runs and classes that have none
    for changes in (
        {"model": {**ltx, "constants": {"fps": 30}}},
        {"ckpt_path": "last"},
        {"model": {"class_name": "WanTransformer3DModel"}},
        {"model": {"_target_": "vsa.models.video_dit.VideoDiT"}},
        {"data": {"root": str(tmp_path / "none")}},
    ):
        other = OmegaConf.create({"model": ltx, "data": data, "ckpt_path": None, **changes})
        before = OmegaConf.to_yaml(other)
        assert follow_rate(other) is None
        assert OmegaConf.to_yaml(other) == before

"""Transformers of diffusers that train as they are: Wan equals `VideoDiT`, and every family equals its class."""

from __future__ import annotations

import pytest

from tests.integrations import tiny
from tests.tiny_runs import training  # noqa: F401 (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")

SIZES = ("num_layers", "num_attention_heads", "attention_head_dim", "ffn_dim", "freq_dim")
FINETUNE = (
    "task=finetune",
    "start=dense",
    *(f"~model.{name}" for name in SIZES),
    # the large eps keeps Adam from turning rounding of near-zero gradients into whole steps
    "optim.eps=0.01",
)
FROM = "model=from_checkpoint"
AS_IT_IS = "model=diffusers"
FULL = ("attention=full", "~attention.tile_thw")


@pytest.fixture(scope="module")
def wan_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan")
    tiny.wan(in_channels=16, out_channels=16, text_dim=64).model.save_pretrained(folder)
    return folder


def losses(runs, run) -> list[float]:
    return [float(loss) for loss in runs.losses(run).values()]


def largest_difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("attention", [(), pytest.param(FULL, marks=pytest.mark.slow)], ids=["video_sparse", "dense"])
def test_wan_trains_as_its_own_network(training, wan_folder, attention):  # noqa: F811
    settings = (*FINETUNE, *attention, f"init_from={wan_folder}", "data.text_padding=zeros", "trainer.max_steps=12")
    training(*settings, FROM, "run=own")
    training(*settings, AS_IT_IS, "run=diffusers")
    training(*settings, AS_IT_IS, "optim.lr=0.0101", "run=control")
    own, other, control = (losses(training, run) for run in ("own", "diffusers", "control"))
    assert len(own) == 12
    assert largest_difference(own, other) < 1e-5
    # a learning rate 1% larger
    assert largest_difference(own, control) > 1e-3

"""What a network of diffusers refuses, by name and before anything is written."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.integrations import tiny
from tests.integrations.test_trained_families import Family
from tests.training.distillations import DISTILL, GAN
from vsa.attention.full import FullAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.integrations.diffusers.network import DiffusersNetwork
from vsa.models.init import without_memory

HUNYUAN = "HunyuanVideoTransformer3DModel"
SPARSE = partial(VideoSparseAttention, tile_thw=(1, 2, 2))


class OneVideo(FullAttention):
    takes_text = False


@pytest.mark.parametrize(
    ("name", "config", "more", "message"),
    [
        ("UNet3DConditionModel", {}, {}, r"class that can be trained \(Wan.*\), got UNet3DConditionModel"),
        (HUNYUAN, {"layers": 2}, {}, f"config.layers=2: not a setting of {HUNYUAN}"),
        (HUNYUAN, {"image_condition_type": "token_replace"}, {}, "image_condition_type=token_replace: its blocks"),
        (
            HUNYUAN,
            {"num_layers": 1},
            {"constants": {"fps": 3}},
            "constants.fps: .* no such input.* guidance, pooled_text",
        ),
        (HUNYUAN, {"num_layers": 1}, {"attention": OneVideo}, f"OneVideo takes rows of one video, but {HUNYUAN}"),
        ("CogVideoXTransformer3DModel", {"ofs_embed_dim": 8}, {}, "ofs_embed_dim=8: image-to-video"),
    ],
)
def test_a_class_that_cannot_be_trained_is_refused(name, config, more, message):
    with without_memory(), pytest.raises(ValueError, match=message):
        DiffusersNetwork(**{"attention": SPARSE, "class_name": name, "config": config, **more})


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("hunyuan", ("model.constants.pooled_text=null",), "takes pooled_text, which data do not hold"),
        ("hunyuan", ("task.objective.first_frame=0.5",), f"first_frame=0.5: {HUNYUAN} has one timestep per sample"),
        ("hunyuan", ("task.objective.attention=1.0",), f"attention=1.0: {HUNYUAN} has layers without"),
        (
            "wan",
            ("data.text_padding=mask",),
            "WanTransformer3DModel takes no text mask, it needs data.text_padding=zeros",
        ),
        (
            "cogvideox",
            ("task=distill", "task.objective.step_aware=true"),
            "step_aware=true: CogVideoX.* no time embedding",
        ),
        ("minimax_h3", (*DISTILL, GAN), "task.objective.gan: MiniMaxH3.* takes a batch in several passes"),
        (
            "ltx",
            ("model.config.num_layers=3",),
            r"config.json has num_layers=2, the model has 3; model=from_checkpoint",
        ),
        ("ltx", ("init_from=null", "model=diffusers"), "model.class_name=null: model=diffusers takes a class"),
    ],
)
def test_a_run_that_cannot_work_is_refused(family, settings, message, tmp_path):
    runs = Family(family, tmp_path)
    with pytest.raises(ValueError, match=message):
        runs.train("trainer.max_steps=1", *settings)
    assert not runs.runs.output.exists()


def test_a_text_mask_that_the_class_would_ignore_is_refused():
    case = tiny.wan()
    model = DiffusersNetwork(attention=FullAttention, class_name="WanTransformer3DModel", config=case.model.config)
    inputs = (case.inputs["hidden_states"], case.inputs["timestep"], case.inputs["encoder_hidden_states"])
    with pytest.raises(ValueError, match="takes no text_mask"):
        model(*inputs, torch.ones(2, 9, dtype=torch.bool))

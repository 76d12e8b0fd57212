"""HunyuanVideo 1.5: joint rows, video before the tokens of an image and two texts, each with its own padding."""

from __future__ import annotations

import pytest
import torch

from tests.integrations import checks, tiny
from vsa.integrations.diffusers import apply

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

CASES = {
    "text": dict(lengths=(6, 6), glyphs=(0, 0)),
    "each_its_own": dict(lengths=(2, 6, 3), glyphs=(3, 0, 1)),
    "image": dict(lengths=(5, 1), glyphs=(1, 2), image=True),
}


@pytest.mark.parametrize("kind", CASES)
def test_all_tiles_equal_the_model(kind):
    checks.check_all_tiles_equal_the_model(tiny.hunyuan15(**CASES[kind]))


@pytest.mark.parametrize("kind", CASES)
def test_sparse_equals_the_model_under_a_tile_mask(kind):
    checks.check_sparse_equals_masked_model(tiny.hunyuan15(**CASES[kind]))


@pytest.mark.parametrize("topk", [3, tiny.TILES])
def test_gradients_equal_those_of_the_model(topk):
    case = tiny.hunyuan15(**CASES["image"])
    checks.check_gradients_equal_the_masked_model(case, topk, checkpointing=topk == 3)


@torch.no_grad()
def test_padding_may_hold_anything():
    case = tiny.hunyuan15((4, 2), (1, 2))
    apply(case.model, topk=3, tile_thw=tiny.TILE)
    expected = case.run()
    for text, mask in (
        ("encoder_hidden_states", "encoder_attention_mask"),
        ("encoder_hidden_states_2", "encoder_attention_mask_2"),
    ):
        real = case.inputs[mask][..., None].bool()
        other = tiny.randn(*case.inputs[text].shape, seed=9) * 30
        filled = case.inputs[text].where(real, other)
        assert tiny.difference(case.run(**{text: filled}), expected) < 1e-5
        # control: a real token
        assert tiny.difference(case.run(**{text: other.where(real, case.inputs[text])}), expected) > 1e-3


def test_remove_is_exact():
    checks.check_remove_is_exact(tiny.hunyuan15())


def test_gates_train():
    checks.check_gates_train(tiny.hunyuan15((4, 6), (2, 0)))

"""HunyuanVideo: joint rows, video before text that is padded to one length; double and single blocks."""

from __future__ import annotations

import pytest
import torch

from tests.integrations import checks, tiny
from vsa.integrations.diffusers import apply

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

CASES = {
    "no_padding": dict(lengths=(6, 6)),
    "same_padding": dict(lengths=(4, 4)),
    "each_its_own": dict(lengths=(2, 6, 3)),
    "token_replace": dict(lengths=(5, 2), image_condition_type="token_replace"),
}


@pytest.mark.parametrize("kind", CASES)
def test_all_tiles_equal_the_model(kind):
    checks.check_all_tiles_equal_the_model(tiny.hunyuan(**CASES[kind]))


@pytest.mark.parametrize("kind", CASES)
def test_sparse_equals_the_model_under_a_tile_mask(kind):
    checks.check_sparse_equals_masked_model(tiny.hunyuan(**CASES[kind]))


@torch.no_grad()
def test_each_sample_of_a_batch_is_what_it_is_alone():
    case = tiny.hunyuan((2, 6, 3))
    apply(case.model, topk=3, tile_thw=tiny.TILE)
    together = case.run()
    for i in range(3):
        alone = case.run(**{name: tensor[i : i + 1] for name, tensor in case.inputs.items()})
        assert tiny.difference(together[i : i + 1], alone) < 1e-5
        # control: another length
        inputs = {name: tensor[i : i + 1] for name, tensor in case.inputs.items()}
        mask = (torch.arange(tiny.TEXT) < 4)[None].long()
        assert tiny.difference(together[i : i + 1], case.run(**inputs | {"encoder_attention_mask": mask})) > 1e-4


@torch.no_grad()
def test_padding_may_hold_anything():
    case = tiny.hunyuan((4, 2))
    apply(case.model, topk=3, tile_thw=tiny.TILE)
    expected = case.run()
    text, mask = case.inputs["encoder_hidden_states"], case.inputs["encoder_attention_mask"]
    other = torch.where(mask[..., None].bool(), text, tiny.randn(*text.shape, seed=9) * 30)
    assert tiny.difference(case.run(encoder_hidden_states=other), expected) < 1e-5


def test_a_window_is_the_model_under_a_mask():
    checks.check_a_window(tiny.hunyuan(lengths=(6, 6)))


def test_remove_is_exact():
    checks.check_remove_is_exact(tiny.hunyuan((4, 6)))


def test_gates_train():
    checks.check_gates_train(tiny.hunyuan((4, 6)))


def test_dense_layers_count_single_blocks_after_double_blocks():
    case = tiny.hunyuan((4, 6))
    with torch.no_grad():
        dense = case.run()
        apply(case.model, topk=2, tile_thw=tiny.TILE, dense_layers=(0, 1))
        assert tiny.difference(case.run(), dense) < 1e-5

"""LTX-2: self-attention of the video among that of the audio, both ways between them, and text."""

from __future__ import annotations

import pytest
import torch

from tests.integrations import checks, tiny
from tests.integrations.oracle import masked_attention
from vsa.integrations.diffusers import apply

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

KINDS = {
    "2.0": dict(),
    "2.3": dict(rope_type="split", gated_attn=True, audio_gated_attn=True, perturbed_attn=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_tiles_equal_the_model(kind):
    checks.check_all_tiles_equal_the_model(tiny.ltx2(**KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_equals_the_model_under_a_tile_mask(kind):
    checks.check_sparse_equals_masked_model(tiny.ltx2(**KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_the_model(kind):
    checks.check_gradients_equal_the_masked_model(tiny.ltx2(**KINDS[kind]), 4)


@torch.no_grad()
def test_a_perturbed_pass_takes_the_values_of_its_blocks():
    case = tiny.ltx2(**KINDS["2.3"])
    mask = torch.tensor([1.0, 0.0])[:, None, None]
    passes = [dict(spatio_temporal_guidance_blocks=[1], perturbation_mask=part) for part in (None, mask, mask * 0)]
    with masked_attention(tiny.GRID, tiny.TILE, 3):
        plain, expected = case.run(), [case.run(**options) for options in passes]
    apply(case.model, topk=3, tile_thw=tiny.TILE)
    for options, value in zip(passes, expected, strict=True):
        assert tiny.difference(case.run(**options), value) < 1e-5
        assert tiny.difference(value, plain) > 1e-3


@torch.no_grad()
def test_audio_passes_through():
    case = tiny.ltx2()
    audio = case.model.transformer_blocks[0].audio_attn1.processor
    with masked_attention(tiny.GRID, tiny.TILE, 3):
        expected = case.model(**case.inputs, return_dict=False)[1]
    dense = case.model(**case.inputs, return_dict=False)[1]
    apply(case.model, topk=3, tile_thw=tiny.TILE)
    assert case.model.transformer_blocks[0].audio_attn1.processor is audio
    assert tiny.difference(case.model(**case.inputs, return_dict=False)[1], expected) < 1e-5
    # control: it sees the video, in which tiles were skipped
    assert tiny.difference(dense, expected) > 1e-4


def test_remove_is_exact():
    checks.check_remove_is_exact(tiny.ltx2())


def test_a_mask_over_the_video_is_refused():
    case = tiny.ltx2()
    apply(case.model, topk=3, tile_thw=tiny.TILE)
    with pytest.raises(ValueError, match=r"of this model takes no mask, got one of shape \[2, 105, 105\]"):
        case.run(video_self_attention_mask=torch.ones(2, 105, 105))

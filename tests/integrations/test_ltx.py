"""LTX-Video: rows of video tokens that arrive flattened, RoPE over all heads."""

from __future__ import annotations

import pytest

from tests.integrations import checks, tiny
from vsa.integrations.diffusers import apply

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")


def test_all_tiles_equal_the_model():
    checks.check_all_tiles_equal_the_model(tiny.ltx())


def test_sparse_equals_the_model_under_a_tile_mask():
    checks.check_sparse_equals_masked_model(tiny.ltx())


def test_remove_is_exact():
    checks.check_remove_is_exact(tiny.ltx())


def test_gates_train():
    checks.check_gates_train(tiny.ltx())


def test_a_grid_that_is_not_given_or_not_the_rows_is_refused():
    case = tiny.ltx()
    apply(case.model, topk=2, tile_thw=tiny.TILE)
    with pytest.raises(ValueError, match=r"rows of 105 tokens do not fit a grid of \(3, 5, 8\)"):
        case.run(width=8, video_coords=tiny.randn(2, 3, 105))
    with pytest.raises(ValueError, match=r"num_frames, height and width .* got 3, None, 7"):
        case.run(height=None)

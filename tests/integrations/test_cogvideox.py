"""CogVideoX: joint rows, text before video."""

from __future__ import annotations

import pytest

from tests.integrations import checks, tiny

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

# CogVideoX 1.0 2B has no RoPE, 1.5 patches time
CASES = {
    "rope": dict(),
    "no_rope": dict(rope=False),
    "patches_in_time": dict(patch_size_t=2),
}


@pytest.mark.parametrize("kind", CASES)
def test_all_tiles_equal_the_model(kind):
    checks.check_all_tiles_equal_the_model(tiny.cogvideox(**CASES[kind]))


@pytest.mark.parametrize("kind", CASES)
def test_sparse_equals_the_model_under_a_tile_mask(kind):
    checks.check_sparse_equals_masked_model(tiny.cogvideox(**CASES[kind]), "first")


def test_remove_is_exact():
    checks.check_remove_is_exact(tiny.cogvideox())


def test_gates_train():
    checks.check_gates_train(tiny.cogvideox())

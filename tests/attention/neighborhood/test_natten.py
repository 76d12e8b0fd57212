"""Neighborhood attention against NATTEN, where it is installed: its masks for FlexAttention and its own outputs.

Without a GPU NATTEN runs eager FlexAttention; it takes windows of two tokens and more.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.attention.neighborhood.test_neighborhood import method_of, run, segments_of
from tests.attention.neighborhood.test_neighborhood_mask import Setting, draw
from vsa.attention.neighborhood.axis import AxisWindow

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:tiles .* are .* full", "ignore:flex_attention called without torch.compile"),
]
pytest.importorskip("natten", reason="needs NATTEN: pip install wheel, pip install --no-build-isolation natten==0.21.7")


def fits(setting: Setting) -> bool:
    return min(setting.window) > 1


def natten_mask(setting: Setting) -> torch.Tensor:
    """bool `[L, L]` in raster order."""
    from natten.backends.flex import get_na_flex_mask
    from torch.nn.attention.flex_attention import create_mask

    length = math.prod(setting.grid)
    options = (setting.window, setting.stride, setting.dilation, setting.causal)
    block_mask = get_na_flex_mask("cpu", 3, setting.grid, *options)
    return create_mask(block_mask.mask_mod, 1, 1, length, length, device="cpu")[0, 0]


def our_mask(setting: Setting) -> torch.Tensor:
    """The product of the axes that indices are made of."""
    t, h, w = (axis.sees() for axis in setting.axes)
    mask = t[:, None, None, :, None, None] & h[None, :, None, None, :, None] & w[None, None, :, None, None, :]
    return mask.reshape(math.prod(setting.grid), -1)


def test_masks_are_natten_s():
    comparisons = 0
    for seed in range(4000):
        setting = draw(seed)
        if not fits(setting):
            continue
        assert torch.equal(our_mask(setting), natten_mask(setting)), setting
        # tile by tile it is the same mask: test_neighborhood_mask.py
        assert torch.equal(our_mask(setting), setting.mask), setting
        comparisons += 1
    assert comparisons > 300
    # control: another stride
    setting = Setting((4, 6, 9), (3, 4, 4), (1, 2, 2))
    other = Setting((4, 6, 9), (3, 4, 4), (1, 2, 3))
    assert not torch.equal(our_mask(other), natten_mask(setting))


@pytest.mark.parametrize("n", range(2, 14))
def test_every_axis_is_natten_s(n):
    for d in range(1, n // 2 + 1):
        for w in range(2, n // d + 1):
            for s in range(1, w + 1):
                for causal in (False, True):
                    axis = AxisWindow(size=n, window=w, stride=s, dilation=d, causal=causal)
                    # two whole axes restrict nothing
                    setting = Setting((2, 2, n), (2, 2, w), (1, 1, s), (1, 1, d), (False, False, causal))
                    theirs = natten_mask(setting)[:n, :n]
                    assert torch.equal(axis.sees(), theirs), axis


def test_outputs_are_natten_s_with_text():
    from natten.functional import na3d

    comparisons = 0
    for seed in range(300):
        setting = draw(seed)
        if not fits(setting) or (setting.window == setting.grid and not any(setting.causal)):
            continue
        length, (before, after) = math.prod(setting.grid), setting.text
        generator = torch.Generator().manual_seed(seed)
        row = [torch.randn(1, length + before + after, 2, 32, generator=generator) for _ in range(3)]
        video = [x[:, before : before + length].unflatten(1, setting.grid) for x in row]
        text = [torch.cat([x[:, :before], x[:, before + length :]], 1) for x in row[1:]]
        theirs = na3d(
            *video,
            kernel_size=setting.window,
            stride=setting.stride,
            dilation=setting.dilation,
            is_causal=setting.causal,
            additional_keys=text[0] if before + after else None,
            additional_values=text[1] if before + after else None,
            backend="flex-fna",
        ).flatten(1, 3)
        ours = run(method_of(setting), segments_of(setting), row)[:, before : before + length]
        assert torch.allclose(ours, theirs, atol=1e-5), setting
        # control: queries and keys of other places
        assert length == 1 or not torch.allclose(ours.roll(1, 1), theirs, atol=1e-3)
        comparisons += 1
    assert comparisons > 20

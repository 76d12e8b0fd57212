"""Write `vsa/data/dct_bands.txt`: the bands of `DctCodec` by their variance in photographs, largest first.

The three colour photographs of `vsa.data.world` stand still, or move by 1 or 2 pixels a frame along one axis, equally
often. Needs the extra `world`; the file is the same on every machine, because the photographs are.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vsa.data.codecs import EmbeddedCodec, dct_bands
from vsa.data.world.tables import photograph

COLOUR_PHOTOGRAPHS = ("astronaut", "chelsea", "coffee")
SPEEDS = (0, 1, 2)
"""Pixels a frame."""


def order_bands() -> Tensor:
    """int64 `[768]`: rows of `dct_bands` by the sum of their variances over photographs and motions."""
    frames, bands = EmbeddedCodec.stride[0], dct_bands().T
    variance = torch.zeros(len(bands), dtype=torch.float64)
    for name in COLOUR_PHOTOGRAPHS:
        picture = torch.from_numpy(photograph(name).copy())
        for speed in SPEEDS:
            # the other way round, the variances are the same
            for axis in (0, 1):
                length = picture.shape[axis] - (frames - 1) * speed
                clip = [picture.narrow(axis, t * speed, length) for t in range(frames)]
                variance += (_cells(torch.stack(clip)).double() @ bands).var(0)
    return variance.argsort(descending=True, stable=True)


def _cells(video: Tensor) -> Tensor:
    """uint8 `[n, 768]` cells of a video `[4, H, W, 3]`, without the rest of its right and lower edge."""
    frames, sh, sw = EmbeddedCodec.stride
    h, w = video.shape[1] // sh, video.shape[2] // sw
    cells = video[:, : h * sh, : w * sw].reshape(frames, h, sh, w, sw, 3)
    return cells.permute(1, 3, 0, 2, 4, 5).flatten(2).flatten(0, 1)


if __name__ == "__main__":
    rows = order_bands().reshape(-1, 32).tolist()
    text = "".join(" ".join(map(str, row)) + "\n" for row in rows)
    (Path(__file__).parents[1] / "vsa/data/dct_bands.txt").write_text(text)

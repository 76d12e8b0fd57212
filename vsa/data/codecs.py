"""Video codecs: pixels to latents and back.

T H W frames and pixels, C t h w latent channels, frames and size.
"""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """Turns video into latents and back.

    Attributes:
        id: name, stored with every latent shard.
        hash: digest of everything that changes the latents; shards of different hashes never mix.
        channels: C.
        stride: (t, h, w) pixels per latent cell.
    """

    id: str
    hash: str
    channels: int
    stride: tuple[int, int, int]

    def encode(self, video: Tensor) -> Tensor:
        """uint8 video `[T, H, W, 3]` to float32 latents `[C, t, h, w]`, not normalised; T is 1 or fits the stride."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Latents `[C, t, h, w]` to uint8 video `[T, H, W, 3]`."""
        ...


class HaarCodec:
    """Separable 3-D Haar wavelets over cells of 4 x 8 x 8 pixels and an orthonormal luma/chroma split.

    A cell holds 4 * 8 * 8 * 3 = 768 values; the codec keeps the `channels` coarsest of their 768 Haar coefficients
    (pixels scaled to [-1, 1]). The 16 of the default are luma at half-cell resolution in time, height and width
    (8 bands) and both chroma planes at half-cell resolution in space, averaged over the cell's 4 frames (4 + 4).
    The bands are orthonormal: the reconstruction is the orthogonal projection of the clip onto what is kept, and 768
    channels reconstruct every clip exactly. It needs no weights. Source: A. Haar, "Zur Theorie der orthogonalen
    Funktionensysteme", Math. Annalen 69 (1910).

    Args:
        channels: number of bands to keep, 1 to 768.

    Raises:
        ValueError: `channels` out of range.
    """

    stride: tuple[int, int, int] = (4, 8, 8)

    def __init__(self, channels: int = 16) -> None:
        bands = math.prod(self.stride) * 3
        if not 1 <= channels <= bands:
            raise ValueError(f"channels of HaarCodec must be in 1..{bands}, got {channels}")
        self.channels = channels
        self.id = f"haar-4x8x8-c{channels}"
        self.basis = _haar_bands(self.stride)[:channels]  # [C, t*h*w*3], orthonormal rows
        # the float32 table is rounded from float64; 1e-6 steps keep the digest the same on every machine
        table = (self.basis.double() * 1e6).round().to(torch.int64)
        self.hash = hashlib.sha256(f"{self.id}/v1".encode() + table.numpy().astype("<i8").tobytes()).hexdigest()[:16]

    def encode(self, video: Tensor) -> Tensor:
        """Haar coefficients of a clip; an image is repeated over the 4 frames of its cell.

        Args:
            video: `[T, H, W, 3]` uint8 with T 1 or a multiple of 4, H and W multiples of 8.

        Returns:
            float32 latents `[C, T/4, H/8, W/8]`; one latent frame for an image.

        Raises:
            ValueError: wrong dtype or shape.
        """
        st, sh, sw = self.stride
        if video.dtype != torch.uint8 or video.dim() != 4 or video.shape[-1] != 3:
            raise ValueError(f"video must be uint8 [T, H, W, 3], got {video.dtype} {tuple(video.shape)}")
        if video.shape[0] == 1:
            video = video.expand(st, -1, -1, -1)
        T, H, W, _ = video.shape
        if T == 0 or H == 0 or W == 0 or T % st or H % sh or W % sw:
            raise ValueError(
                f"video of {T}x{H}x{W} (frames, height, width) does not fit the codec stride {self.stride}"
            )
        cells = video.reshape(T // st, st, H // sh, sh, W // sw, sw, 3).permute(0, 2, 4, 1, 3, 5, 6)
        basis = self.basis.to(video.device)
        # pixel / 127.5 - 1 goes into the product: the pixels are walked through once
        latents = torch.addmm(-basis.sum(1), cells.reshape(-1, st * sh * sw * 3).float(), basis.T / 127.5)  # [t*h*w, C]
        return latents.T.reshape(self.channels, T // st, H // sh, W // sw).contiguous()

    def decode(self, latents: Tensor) -> Tensor:
        """The clip whose kept bands are `latents` and whose other bands are zero.

        Args:
            latents: `[C, t, h, w]`, any float dtype.

        Returns:
            uint8 video `[4*t, 8*h, 8*w, 3]`; an image comes back as 4 equal frames (up to what the latents say).

        Raises:
            ValueError: wrong number of channels or dimensions.
        """
        if latents.dim() != 4 or latents.shape[0] != self.channels:
            raise ValueError(f"latents must be [{self.channels}, t, h, w], got {tuple(latents.shape)}")
        st, sh, sw = self.stride
        _, t, h, w = latents.shape
        basis = self.basis.to(latents.device)
        scale = torch.tensor(127.5, device=latents.device)
        cells = torch.addmm(scale, latents.float().flatten(1).T, basis * scale)
        # bytes are cheaper to reorder than floats
        pixels = cells.round_().clamp_(0, 255).to(torch.uint8).reshape(t, h, w, st, sh, sw, 3)
        return pixels.permute(0, 3, 1, 4, 2, 5, 6).reshape(t * st, h * sh, w * sw, 3)


def _haar_matrix(n: int) -> Tensor:
    """Orthonormal Haar basis of length n (a power of two), coarse rows first, float64 `[n, n]`."""
    rows = [torch.full((n,), n**-0.5, dtype=torch.float64)]
    width = n
    while width > 1:
        for start in range(0, n, width):
            row = torch.zeros(n, dtype=torch.float64)
            row[start : start + width // 2] = width**-0.5
            row[start + width // 2 : start + width] = -(width**-0.5)
            rows.append(row)
        width //= 2
    return torch.stack(rows)


def _haar_bands(stride: tuple[int, int, int]) -> Tensor:
    """All bands of one cell, most useful first, float32 `[t*h*w*3, t*h*w*3]` over pixels in (t, h, w, rgb) order."""
    # luma, then the red-blue and green-magenta axes: an orthonormal stand-in for Y, Cb, Cr
    colour = torch.tensor([[1, 1, 1], [1, 0, -1], [1, -2, 1]], dtype=torch.float64)
    colour = colour / colour.norm(dim=1, keepdim=True)
    bt, bh, bw = (_haar_matrix(n) for n in stride)
    table = torch.einsum("ta,hb,wc,kd->kthwabcd", bt, bh, bw, colour)

    def level(i: int) -> int:
        return i.bit_length()

    def rank(band: tuple[int, int, int, int]) -> tuple[int, ...]:
        k, t, h, w = band
        # chroma loses one level of time: the eye, and a moving flat shape, need it least
        finest = max(level(t) + (k > 0), level(h), level(w))
        return finest, k, level(t) + level(h) + level(w), t, h, w

    nt, nh, nw = stride
    bands = [(k, t, h, w) for k in range(3) for t in range(nt) for h in range(nh) for w in range(nw)]
    order = sorted(bands, key=rank)
    return torch.stack([table[band].flatten() for band in order]).float()

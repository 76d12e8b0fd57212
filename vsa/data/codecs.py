"""Video codecs, which map pixels to latents and back.

T H W frames and pixels, C t h w latent channels, frames and size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property, reduce
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from vsa.data.image_encoder import ImageEncoder
from vsa.data.pretrained import pipeline_index, read_config, read_tensor
from vsa.data.pretrained_vae import PretrainedVAE, check_latents, check_video, vae_folder
from vsa.settings import Bound, validated
from vsa.transfer import copy_async


class Codec(Protocol):
    """A codec encodes videos to latents and decodes latents to videos.

    Attributes:
        id: name, stored with every latent shard.
        hash: digest of everything that changes the latents; shards of different hashes never mix.
        channels: C.
        stride: (t, h, w) frames and pixels per latent cell.
        statistics: published mean and standard deviation of each channel, float32 `[C]` both; None without any.
    """

    id: str
    hash: str
    channels: int
    stride: tuple[int, int, int]
    statistics: tuple[Tensor, Tensor] | None

    def frames_that_fit(self, frames: int) -> int:
        """Largest number of frames, at most `frames`, that the codec can encode; 0 if the clip is too short."""
        ...

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, t, h, w) of a clip that fits."""
        ...

    def encode(self, video: Tensor) -> Tensor:
        """uint8 video `[T, H, W, 3]` to float32 latents `[C, t, h, w]`, not normalised; see `frames_that_fit`."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Latents `[C, t, h, w]` to uint8 video `[T, H, W, 3]`."""
        ...


def check_frames(codec: Codec, frames: int) -> None:
    """Raise ValueError for a number of frames that a codec cannot encode."""
    if frames > 0 and codec.frames_that_fit(frames) == frames:
        return
    below = next((n for n in range(frames - 1, 0, -1) if codec.frames_that_fit(n) == n), None)
    above = next(
        n for n in range(max(frames, 0) + 1, max(frames, 0) + codec.stride[0] + 1) if codec.frames_that_fit(n) == n
    )
    nearest = f"length is {above}" if below is None else f"lengths are {below} and {above}"
    raise ValueError(f"codec {codec.id} cannot encode {frames} frames; the nearest valid {nearest}")


Bands = Annotated[int, Bound(">=", 1), Bound("<=", 768)]


class EmbeddedCodec:
    """Base of the codecs without weights: `channels` of the 768 orthonormal bands of a cell of 4 x 8 x 8 pixels.

    Pixels are scaled to [-1, 1]. The reconstruction is the orthogonal projection of the clip onto the kept bands; fewer
    channels are a prefix of more, and 768 reconstruct every clip exactly.

    Args:
        basis: the kept bands over pixels in (t, h, w, rgb) order, `[channels, 768]`, orthonormal rows.
        content: integers that tell the bands from others, for the hash.
    """

    name: str
    stride: tuple[int, int, int] = (4, 8, 8)
    statistics: tuple[Tensor, Tensor] | None = None

    def __init__(self, basis: Tensor, content: Tensor) -> None:
        self.channels = len(basis)
        self.basis = basis.float()
        self.id = f"{self.name}-4x8x8-c{self.channels}"
        digest = hashlib.sha256(f"{self.id}/v1".encode() + content.numpy().astype("<i8").tobytes())
        self.hash = digest.hexdigest()[:16]

    def frames_that_fit(self, frames: int) -> int:
        """Whole cells of 4 frames; an image is one frame."""
        return 1 if frames == 1 else frames - frames % self.stride[0]

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, t, h, w) of a clip that fits."""
        st, sh, sw = self.stride
        return self.channels, max(frames // st, 1), height // sh, width // sw

    def encode(self, video: Tensor) -> Tensor:
        """Coefficients of a clip; an image is repeated over the 4 frames of its cell.

        Args:
            video: `[T, H, W, 3]` uint8 with T 1 or a multiple of 4, H and W multiples of 8.

        Returns:
            float32 latents `[C, T/4, H/8, W/8]`; one latent frame for an image.
        """
        st, sh, sw = self.stride
        check_video(video)
        if video.shape[0] == 1:
            video = video.expand(st, -1, -1, -1)
        T, H, W, _ = video.shape
        if T == 0 or H == 0 or W == 0 or T % st or H % sh or W % sw:
            raise ValueError(
                f"video of {T}x{H}x{W} (frames, height, width) does not fit the codec stride {self.stride}"
            )
        cells = video.reshape(T // st, st, H // sh, sh, W // sw, sw, 3).permute(0, 2, 4, 1, 3, 5, 6)
        basis = copy_async(self.basis, video.device)
        # pixel / 127.5 - 1 is part of the product, so that the pixels are read only once
        latents = torch.addmm(-basis.sum(1), cells.reshape(-1, st * sh * sw * 3).float(), basis.T / 127.5)  # [t*h*w, C]
        return latents.T.reshape(self.channels, T // st, H // sh, W // sw).contiguous()

    def decode(self, latents: Tensor) -> Tensor:
        """The clip whose kept bands are `latents` and whose other bands are zero.

        Args:
            latents: `[C, t, h, w]`, any float dtype.

        Returns:
            uint8 video `[4*t, 8*h, 8*w, 3]`; an image is decoded to 4 frames, equal up to changes of the latents.
        """
        check_latents(latents, self.channels)
        st, sh, sw = self.stride
        _, t, h, w = latents.shape
        basis = copy_async(self.basis, latents.device)
        scale = torch.tensor(127.5, device=latents.device)
        cells = torch.addmm(scale, latents.float().flatten(1).T, basis * scale)
        # bytes are cheaper to reorder than floats
        pixels = cells.round_().clamp_(0, 255).to(torch.uint8).reshape(t, h, w, st, sh, sw, 3)
        return pixels.permute(0, 3, 1, 4, 2, 5, 6).reshape(t * st, h * sh, w * sw, 3)


@validated
class DctCodec(EmbeddedCodec):
    """Discrete cosine transform over cells of 4 frames x 8 x 8 pixels x 3 colours, the embedded codec of new data sets.

    The bands are those of the type-II transform, orthonormal in each of the four axes: along the colours they are luma,
    red minus blue, and red plus blue minus twice green. They are kept in the order of their variance in photographs
    that stand still or move slowly (`dct_bands.txt`, made by `scripts/order_bands.py`); the default keeps 12 of luma
    and 4 of colour. Source: N. Ahmed, T. Natarajan and K. R. Rao, "Discrete Cosine Transform", IEEE Transactions on
    Computers C-23 (1974).

    Args:
        channels: number of bands to keep, 1 to 768.
    """

    name = "dct"

    def __init__(self, channels: Bands = 16) -> None:
        order = dct_order()[:channels]
        super().__init__(dct_bands()[order], order)


@validated
class HaarCodec(EmbeddedCodec):
    """Haar wavelet codec: separable 3-D wavelets over cells of 4 x 8 x 8 pixels and an orthonormal luma/chroma split.

    It keeps the `channels` coarsest bands. The 16 of the default are luma at half-cell resolution in time, height and
    width (8 bands) and both chroma planes at half-cell resolution in space, averaged over the cell's 4 frames (4 + 4).
    It was the codec of `vsa encode` before `DctCodec`, which rebuilds real videos better. Source: A. Haar, "Zur Theorie
    der orthogonalen Funktionensysteme", Math. Annalen 69 (1910).

    Args:
        channels: number of bands to keep, 1 to 768.
    """

    name = "haar"

    def __init__(self, channels: Bands = 16) -> None:
        basis = _haar_bands(self.stride)[:channels]
        # the float32 table is rounded from float64; 1e-6 steps keep the digest the same on every machine
        super().__init__(basis, (basis.double() * 1e6).round().to(torch.int64))


EMBEDDED = {kind.name: f"{kind.__module__}.{kind.__name__}" for kind in (DctCodec, HaarCodec)}
"""Embedded codecs as `_target_` of a configuration, by the first word of their ids."""


def settings_of(codec_id: str) -> str:
    """Settings of the configuration that choose an embedded codec by its id, empty for other codecs."""
    name, _, channels = codec_id.partition("-4x8x8-c")
    return f"data.codec._target_={EMBEDDED[name]} data.codec.channels={channels}" if name in EMBEDDED else ""


@validated
class WanVAE(PretrainedVAE):
    """The causal video VAE of Wan 2.1 (16 channels, 4 x 8 x 8) and Wan 2.2 (48 channels, 4 x 16 x 16).

    See `PretrainedVAE`; the latents are not normalised. Needs the extra `wan` (diffusers).
    """

    kind, name = "AutoencoderKLWan", "wan-vae"
    needed = ("z_dim", "latents_mean", "latents_std")

    def _describe(self, config: Mapping[str, Any]) -> tuple[int, tuple[int, int, int], Mapping[str, Any]]:
        # older configs omit the factors of Wan 2.1
        spatial = int(config.get("scale_factor_spatial") or 8)
        return int(config["z_dim"]), (int(config.get("scale_factor_temporal") or 4), spatial, spatial), config

    @cached_property
    def image_to_video(self) -> bool:
        """Whether its pipeline is one of Wan's that concatenate image conditions to the latents."""
        index = pipeline_index(self._source)
        return index.get("_class_name") == "WanImageToVideoPipeline" and not index.get("expand_timesteps")

    @cached_property
    def image_encoder(self) -> ImageEncoder | None:
        """CLIP's image encoder of its pipeline; None where there is none, as in Wan2.2."""
        kind, *_ = pipeline_index(self._source).get("image_encoder") or (None,)
        return None if kind is None else ImageEncoder(self._source)

    def image_inputs(self, video: Tensor) -> dict[str, Tensor]:
        """What image-to-video models get of a clip's first frame, by the names of `Network.forward`.

        Args:
            video: `[T, H, W, 3]` uint8; only the first frame is read.

        Returns:
            `cond_latents` `[4 + C, t, h, w]`, see `image_condition`, and `image_embeds` `[I, D]`, the tokens of
            `image_encoder` if there is one; float32.
        """
        inputs = {"cond_latents": self.image_condition(video)}
        return inputs if self.image_encoder is None else inputs | {"image_embeds": self.image_encoder.encode(video[0])}

    @torch.no_grad()
    def image_condition(self, video: Tensor) -> Tensor:
        """Image condition of Wan's image-to-video models: a mask of the known frames, and the first frame.

        4 mask channels, one for each frame of a cell, 1 where it is known (the first latent frame); then the
        normalised latents of the first frame followed by mid-grey ones, as `WanImageToVideoPipeline` builds them.

        Args:
            video: `[T, H, W, 3]` uint8; only the first frame is read.

        Returns:
            float32 `[4 + C, t, h, w]`, ready for the model.
        """
        check_video(video)
        pixels = torch.zeros(3, *video.shape[:3], device=video.device)
        pixels[:, :1] = video[:1].permute(3, 0, 1, 2).float() / 127.5 - 1
        latents = self._encode_pixels(pixels)
        mean, std = (s.to(latents.device).view(-1, 1, 1, 1) for s in (self._mean, self._std))
        mask = torch.zeros(self.stride[0], *latents.shape[1:], device=latents.device)
        mask[:, 0] = 1
        return torch.cat((mask, (latents - mean) / std))


@validated
class LtxVAE(PretrainedVAE):
    """The video VAE of LTX-Video (128 channels, 8 x 32 x 32), of all its versions that diffusers loads.

    See `PretrainedVAE`; the latents are not normalised. A VAE that is told a timestep decodes at timestep 0 without
    noise in its latents, the defaults of `LTXPipeline` (diffusers 0.42). Needs the extra `wan` (diffusers).
    """

    kind, name = "AutoencoderKLLTXVideo", "ltx-vae"
    needed = ("latent_channels", "patch_size", "patch_size_t", "spatio_temporal_scaling")

    def _describe(self, config: Mapping[str, Any]) -> tuple[int, tuple[int, int, int], Mapping[str, Any]]:
        halvings = 2 ** sum(config["spatio_temporal_scaling"])
        spatial = int(config.get("spatial_compression_ratio") or config["patch_size"] * halvings)
        temporal = int(config.get("temporal_compression_ratio") or config["patch_size_t"] * halvings)
        self._timed = bool(config.get("timestep_conditioning"))
        mean, std = (read_tensor(self._folder, f"latents_{moment}").float() for moment in ("mean", "std"))
        scaled = std / float(config.get("scaling_factor") or 1)
        statistics = {"latents_mean": mean.tolist(), "latents_std": scaled.tolist()}
        return int(config["latent_channels"]), (temporal, spatial, spatial), statistics

    def _decode_latents(self, vae: Any, latents: Tensor) -> Tensor:
        timestep = torch.zeros(1, device=latents.device, dtype=latents.dtype) if self._timed else None
        # some versions add noise inside the decoder
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(0)
            return vae.decode(latents, timestep, return_dict=False)[0]


def vae_kind(source: str) -> type[PretrainedVAE]:
    """The codec for the VAE of a pipeline folder or hub id, or a VAE folder; ValueError for VAEs of other kinds."""
    kinds: dict[str, type[PretrainedVAE]] = {each.kind: each for each in (WanVAE, LtxVAE)}
    config = read_config(vae_folder(source), *kinds)
    return kinds.get(config.get("_class_name", ""), WanVAE)


def dct_order() -> Tensor:
    """int64 `[768]`: rows of `dct_bands`, most important first."""
    return torch.tensor([int(row) for row in (Path(__file__).parent / "dct_bands.txt").read_text().split()])


def dct_bands() -> Tensor:
    """All bands of the cosine transform of a cell, float64 `[768, 768]` over (t, h, w, rgb) in rows and columns."""
    return reduce(torch.kron, (_dct_matrix(n) for n in (*EmbeddedCodec.stride, 3)))


def _dct_matrix(n: int) -> Tensor:
    """Orthonormal type-II cosine basis of length n, coarse rows first, float64 `[n, n]`."""
    k = torch.arange(n, dtype=torch.float64)
    table = torch.cos(torch.pi / n * k[:, None] * (k + 0.5)) * (2 / n) ** 0.5
    table[0] /= 2**0.5
    return table


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
    """All bands of a cell, most important first, float32 `[t*h*w*3, t*h*w*3]` over pixels in (t, h, w, rgb) order."""
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

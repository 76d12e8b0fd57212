"""The base of the codecs that are a VAE of diffusers, and the checks of what any codec is given.

T H W frames and pixels, C t h w latent channels, frames and size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vsa.data.index_values import channel_statistics
from vsa.data.pretrained import component_folder, config_digest, read_config, refuse_missing, weights_digest


class PretrainedVAE:
    """A causal video VAE of diffusers.

    The first frame becomes one latent frame, and every s frames after it another one, s the stride in time: T = 1 + s n
    frames give 1 + n latent frames, so images need no padding. Encoding returns the mean of the posterior. Weights are
    loaded with the first clip; the digest reads only parts of them.

    Args:
        source: a diffusers pipeline folder with `vae/`, the VAE folder itself, or a hub id.
        dtype: compute dtype of the network: float32, bfloat16 or float16.
        tiled_decoding: whether to decode in overlapping, blended tiles: less memory, faint seams.

    Attributes:
        kind: class of diffusers.
        name: beginning of the id.
        needed: keys of its config.
    """

    kind: str
    name: str
    needed: tuple[str, ...]

    def __init__(
        self, source: str, *, dtype: Literal["float32", "bfloat16", "float16"] = "float32", tiled_decoding: bool = False
    ) -> None:
        self._source, self._folder = source, vae_folder(source)
        self.places = (self._folder,)
        config = read_config(self._folder, self.kind)
        for key in self.needed:
            if key not in config:
                raise ValueError(f"{self._folder / 'config.json'} has no {key}")
        self.channels, self.stride, values = self._describe(config)
        place = f"{self._folder / 'config.json' if values is config else self._folder} has "
        pair = channel_statistics(values, place, kind="latents", channels=self.channels)
        self._mean, self._std = (torch.tensor(each, dtype=torch.float32) for each in pair)
        self.statistics: tuple[Tensor, Tensor] | None = (self._mean, self._std)
        self.id = f"{self.name}-{'x'.join(map(str, self.stride))}-c{self.channels}"
        content = [self.id, "v1", config_digest(config), weights_digest(self._folder)]
        self.hash = hashlib.sha256(" ".join(content).encode()).hexdigest()[:16]
        self._dtype = getattr(torch, dtype)
        self._tiled_decoding = tiled_decoding
        self._vae: Any = None

    def _describe(self, config: Mapping[str, Any]) -> tuple[int, tuple[int, int, int], Mapping[str, Any]]:
        """Channels, stride, and the lists `latents_mean` and `latents_std`."""
        raise NotImplementedError

    def frames_that_fit(self, frames: int) -> int:
        """One frame and whole groups of the stride after it."""
        return frames - (frames - 1) % self.stride[0] if frames > 0 else 0

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, t, h, w) of a clip that fits."""
        st, sh, sw = self.stride
        return self.channels, 1 + (frames - 1) // st, height // sh, width // sw

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        """Posterior mean of a clip, computed on the device of the clip.

        Args:
            video: `[T, H, W, 3]` uint8 with T = 1 + s n, H and W multiples of the stride.

        Returns:
            float32 latents `[C, 1 + n, h, w]`, not normalised.
        """
        check_video(video)
        return self._encode_pixels(video.permute(3, 0, 1, 2).float() / 127.5 - 1)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """The clip of the latents, computed on their device.

        Args:
            latents: `[C, t, h, w]`, any float dtype, not normalised.

        Returns:
            uint8 video `[1 + s (t - 1), H, W, 3]`.
        """
        check_latents(latents, self.channels)
        vae = self._module(latents.device)
        vae.use_tiling = self._tiled_decoding
        pixels = self._decode_latents(vae, latents[None].to(self._dtype))[0].float()
        return ((pixels + 1) * 127.5).round_().clamp_(0, 255).to(torch.uint8).permute(1, 2, 3, 0).contiguous()

    def _decode_latents(self, vae: Any, latents: Tensor) -> Tensor:
        """Pixels `[1, 3, T, H, W]` of latents `[1, C, t, h, w]`."""
        return vae.decode(latents, return_dict=False)[0]

    def _encode_pixels(self, pixels: Tensor) -> Tensor:
        """float32 latents `[C, t, h, w]` of pixels `[3, T, H, W]` in [-1, 1]."""
        _, T, H, W = pixels.shape
        _, sh, sw = self.stride
        if T == 0 or self.frames_that_fit(T) != T or H == 0 or W == 0 or H % sh or W % sw:
            raise ValueError(
                f"video of {T}x{H}x{W} (frames, height, width) does not fit the codec: frames 1 + a multiple of "
                f"{self.stride[0]}, height and width multiples of the stride {sh}x{sw}"
            )
        vae = self._module(pixels.device)
        # models would learn the seams of tiled encoding
        vae.use_tiling = False
        return vae.encode(pixels[None].to(self._dtype), return_dict=False)[0].mode()[0].float()

    def _module(self, device: torch.device) -> Any:
        if self._vae is None:
            import diffusers

            loaded: Any = getattr(diffusers, self.kind).from_pretrained(
                self._folder, torch_dtype=self._dtype, output_loading_info=True
            )
            vae, info = loaded
            refuse_missing(info, self._folder)
            self._vae = vae.eval().requires_grad_(False)
        return self._vae.to(device)


def vae_folder(source: str) -> Path:
    """The folder of the VAE of a pipeline folder or hub id; a VAE folder itself."""
    own = Path(source) / "config.json"
    return own.parent if own.is_file() else component_folder(source, "vae")


def check_video(video: Tensor) -> None:
    """Raise ValueError for a video that is not uint8 `[T, H, W, 3]`."""
    if video.dtype != torch.uint8 or video.dim() != 4 or video.shape[-1] != 3:
        raise ValueError(f"video must be uint8 [T, H, W, 3], got {video.dtype} {list(video.shape)}")


def check_latents(latents: Tensor, channels: int) -> None:
    """Raise ValueError for latents that are not `[C, t, h, w]`."""
    if latents.dim() != 4 or latents.shape[0] != channels:
        raise ValueError(f"latents must be [{channels}, t, h, w], got {list(latents.shape)}")

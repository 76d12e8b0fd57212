"""The choice of a codec and a text encoder for a data set: the embedded ones, or those of a Wan pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vsa.data.codecs import Codec, HaarCodec, WanVAE
from vsa.data.text import HashedNgramEncoder, TextEncoder, UMT5Encoder

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class EncoderChoice:
    """Choice of the codec and the text encoder of a data set.

    Args:
        model: Wan pipeline folder or hub id for both; None: the embedded ones.
        vae: Wan pipeline folder, VAE folder or hub id for the VAE only.
        text: Wan pipeline folder or hub id for the text encoder only.
        vae_dtype: compute dtype of the VAE.
        text_dtype: compute dtype of the text encoder.
        channels: channels of the Haar codec.
        text_dim: token width of the n-gram encoder.
        max_tokens: most tokens of a caption; None: 16, for Wan 512.
    """

    model: str | None = None
    vae: str | None = None
    text: str | None = None
    vae_dtype: Dtype = "float32"
    text_dtype: Dtype = "bfloat16"
    channels: int = 16
    text_dim: int = 64
    max_tokens: int | None = None

    def build(self, device: str) -> tuple[Codec, TextEncoder]:
        """The codec and the text encoder, the latter on its device."""
        vae, text = self.vae or self.model, self.text or self.model
        codec = WanVAE(vae, dtype=self.vae_dtype) if vae else HaarCodec(self.channels)
        if text:
            return codec, UMT5Encoder(text, max_tokens=self.max_tokens or 512, dtype=self.text_dtype, device=device)
        return codec, HashedNgramEncoder(self.text_dim, self.max_tokens or 16)

    def training_settings(self, root: str) -> list[str]:
        """Settings of a training on the shards in `root`: its data group, and values that differ from it."""
        if self.vae or self.text:
            # no data group describes parts of two pipelines
            return []
        if self.model:
            return ["data=wan", f"data.root={root}", f"data.codec.source={self.model}"]
        settings = ["data=folder", f"data.root={root}"]
        if self.channels != 16:
            keys = ("data.codec.channels", "model.in_channels", "model.out_channels")
            settings += [f"{key}={self.channels}" for key in keys]
        if self.text_dim != 64:
            settings += [f"{key}={self.text_dim}" for key in ("data.text_encoder.dim", "model.text_dim")]
        if self.max_tokens not in (None, 16):
            settings.append(f"data.text_encoder.max_tokens={self.max_tokens}")
        return settings

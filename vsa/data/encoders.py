"""The choice of a codec and a text encoder for a data set: the embedded ones, or those of a Wan pipeline."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from vsa.attention.tiling import count_tiles
from vsa.data.clip_rules import patch_of
from vsa.data.codecs import Codec, DctCodec, HaarCodec, vae_kind
from vsa.data.pretrained import refuse_unknown
from vsa.data.text import HashedNgramEncoder, SentenceEncoder, TextEncoder, UMT5Encoder, sentence_folder
from vsa.settings import key_value

Dtype = Literal["float32", "bfloat16", "float16"]

SENTENCE_SETTINGS = ["data.text_encoder._target_=vsa.data.text.SentenceEncoder", "model.text_dim=384"]
"""Settings of a training on captions of the sentence encoder."""
# tokens of a caption at most, by text encoder
_TOKENS = {"ngrams": 16, "sentence": 128, "wan": 512}


@dataclass(frozen=True, kw_only=True)
class EncoderChoice:
    """Choice of the codec and the text encoder of a data set.

    Args:
        model: Wan pipeline folder or hub id for both; None: the embedded ones.
        vae: pipeline folder, VAE folder or hub id of Wan or LTX for the VAE only.
        text: "sentence" or "ngrams", or a Wan pipeline folder or hub id for the text encoder only; None: that of
            `model`, else with the embedded codec "sentence" if it is installed and `text_dim` is None, else "ngrams".
        vae_dtype: compute dtype of the VAE.
        text_dtype: compute dtype of the text encoder.
        codec: embedded codec: cosine transform, or the wavelets of earlier data sets.
        channels: channels of the embedded codec.
        text_dim: token width of the n-gram encoder; None: 64.
        max_tokens: maximum number of tokens of a caption; None: 16 for n-grams, 128 for sentences, 512 for Wan.
    """

    model: str | None = None
    vae: str | None = None
    text: str | None = None
    vae_dtype: Dtype = "float32"
    text_dtype: Dtype = "bfloat16"
    codec: Literal["dct", "haar"] = "dct"
    channels: int = 16
    text_dim: int | None = None
    max_tokens: int | None = None

    def build(self, device: str) -> tuple[Codec, TextEncoder]:
        """The codec and the text encoder, the latter on its device."""
        vae = self.vae or self.model
        embedded = {"dct": DctCodec, "haar": HaarCodec}[self.codec]
        codec = vae_kind(vae)(vae, dtype=self.vae_dtype) if vae else embedded(self.channels)
        return codec, self._text_encoder(device)

    def _text_encoder(self, device: str) -> TextEncoder:
        text = self._text
        if text == "sentence" and self.text_dim is not None:
            raise ValueError(f"--text-dim={self.text_dim} is the width of --text ngrams, got --text sentence")
        if text == "ngrams":
            return HashedNgramEncoder(self.text_dim or 64, self.max_tokens or _TOKENS[text])
        if text == "sentence":
            return SentenceEncoder(max_tokens=self.max_tokens or _TOKENS[text], device=device)
        refuse_unknown(text, f"--text {text}: expected sentence, ngrams, or a Wan pipeline: " if self.text else "")
        return UMT5Encoder(text, max_tokens=self.max_tokens or _TOKENS["wan"], dtype=self.text_dtype, device=device)

    @property
    def _text(self) -> str:
        """The text encoder by name: sentence, ngrams, or the source of Wan's."""
        usual = "ngrams" if self.vae or self.text_dim or sentence_folder() is None else "sentence"
        return self.text or self.model or usual

    def describe_text(self, encoder: TextEncoder) -> str:
        """One line about the text encoder that was chosen."""
        line = f"text encoder: {encoder.id}, {encoder.dim} numbers a token, at most {encoder.max_tokens} tokens"
        if isinstance(encoder, SentenceEncoder):
            return f"{line}; trained on sentences (hashed n-grams: --text ngrams)"
        if isinstance(encoder, UMT5Encoder):
            return line
        trained = "pip install 'vsa-train[text]'" if sentence_folder() is None else "--text sentence"
        return f"{line}; equal words are equal, meanings are not known (a trained one: {trained})"

    def training_settings(self, root: str, videos: str, shapes: Collection[Sequence[int]]) -> list[str]:
        """Settings of a training on a data set, with the values that differ from those of its experiment.

        Args:
            root: folder of the shards.
            videos: folder of the clips.
            shapes: latent shapes `(C, T, H, W)` of the samples.
        """
        text = self._text
        if (text not in _TOKENS and self.text) or (self.model and (self.vae or self.text)):
            # no data group describes parts of two pipelines
            return []
        places = [key_value("data.root", root), key_value("data.videos", videos)]
        t, h, w = max((shape[1:] for shape in shapes), key=math.prod)
        patch = patch_of(vae_kind(self.vae).name if self.vae else "")
        tile, sparsity = _selection((t, h // patch, w // patch))
        if self.model:
            settings = ["experiment=finetune_wan_1_3b", "model=from_checkpoint", *places]
            settings += [key_value(key, self.model) for key in ("data.codec.source", "init_from")]
            # for one GPU: a clip at a time
            settings += ["trainer=default", "trainer.accumulate_grad_batches=64", "trainer.val_check_interval=12800"]
            # the staircase of the experiment ends at 32 tiles
            settings += [tile] if tile == _LARGE else [tile, "sparsity=constant", *sparsity]
        else:
            settings = ["experiment=own_videos", *places, tile, *sparsity]
            channels, own = self.channels, ["data.codec.channels"]
            if self.vae:
                kind, (channels, *_), own = vae_kind(self.vae), next(iter(shapes)), []
                settings += [f"data.codec._target_={kind.__module__}.{kind.__name__}"]
                settings += ["model.patch_size=[1,1,1]"] if patch == 1 else []
                settings += [key_value("data.codec.source", self.vae), "task.latent_scale=channel"]
            elif self.codec == "haar":
                settings += [f"data.codec._target_={HaarCodec.__module__}.HaarCodec"]
            keys = (*own, "model.in_channels", "model.out_channels") if channels != 16 else ()
            settings += [f"{key}={channels}" for key in keys]
            keys = ("data.text_encoder.dim", "model.text_dim") if self.text_dim not in (None, 64) else ()
            settings += [f"{key}={self.text_dim}" for key in keys]
            settings += SENTENCE_SETTINGS if text == "sentence" else []
        if self.max_tokens not in (None, _TOKENS.get(text, _TOKENS["wan"])):
            settings.append(f"data.text_encoder.max_tokens={self.max_tokens}")
        return settings


# what GPU kernels are tuned for
_LARGE = "tile_thw=[4,4,4]"


def _selection(grid: Sequence[int]) -> tuple[str, list[str]]:
    """Settings of tiles and sparsity for a grid of tokens: tiles are halved until there are enough to select among."""
    tile = [4, 4, 4]
    if count_tiles(grid, tile) >= 64:
        return _LARGE, ["sparsity.sparsity=0.875"]
    tile = [min(*sides) for sides in zip(tile, grid, strict=True)]
    while count_tiles(grid, tile) < 8 and max(tile) > 1:
        tile = [-(-side // 2) for side in tile]
    tiles = count_tiles(grid, tile)
    if tiles == 1:
        return "attention=full", []
    return f"tile_thw=[{','.join(map(str, tile))}]", [f"sparsity.sparsity={0.875 if tiles >= 16 else 0.5}"]

"""Options of the encoding of a folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vsa.data.captioner import refuse_captioner
from vsa.data.clip_rules import ClipRules
from vsa.data.codecs import Codec, WanVAE
from vsa.data.image_encoder import ImageEncoder
from vsa.data.prompts import tidy
from vsa.data.resumable_writer import OutputOptions


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """Options of `encode_folder`.

    Args:
        clips: rules that cut a clip out of a video.
        output: settings of the shards.
        captions: caption file; see `vsa.data.captions.read_captions`.
        trigger: words put before every caption.
        captioner: image-to-text model for clips without a caption; see `vsa.data.captioner.Captioner`.
        image_condition: whether what an image-to-video model gets of the first frame is stored with every clip; see
            `WanVAE.image_inputs`.
        skip_bad: whether files that do not decode, are too short or have no caption are skipped and reported, instead
            of stopping.
        decode_seconds: time limit of the decoder per file, in seconds.
        decode_memory: memory limit of the decoder per file, in GiB, without the decoded frames.
        device: device of the codec.
        workers: processes that decode at the same time, each for a shard of its own.
    """

    clips: ClipRules = field(default_factory=ClipRules)
    output: OutputOptions = field(default_factory=OutputOptions)
    captions: str | Path | None = None
    trigger: str = ""
    captioner: str | None = None
    image_condition: bool = False
    skip_bad: bool = False
    decode_seconds: float = 120
    decode_memory: float = 16
    device: str = "cpu"
    workers: int = 1

    def image_encoder(self, codec: Codec) -> ImageEncoder | None:
        """The encoder of the image tokens stored with every clip; None if none are."""
        return codec.image_encoder if self.image_condition and isinstance(codec, WanVAE) else None

    def check(self, codec: Codec) -> None:
        """Raise ValueError for options that the codec does not support."""
        self.clips.check(codec)
        if self.captioner:
            refuse_captioner(self.captioner)
        if self.trigger and not tidy(self.trigger):
            raise ValueError(f"--trigger {self.trigger!r} has no visible character")
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        if self.image_condition and not isinstance(codec, WanVAE):
            raise ValueError(f"image conditions need Wan's VAE, got codec {codec.id}")

"""A Lightning data module of toy clips made on the fly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from vsa.data.batch import TextPadding
from vsa.data.codecs import Codec
from vsa.data.datamodule import PlanDataModule
from vsa.data.sample_store import SampleStore, ToyStore
from vsa.data.text import TextEncoder
from vsa.data.toy_videos import ToyClips
from vsa.settings import AtLeastOne, Count, Share, ShareBelowOne, checked


@checked
class ToyOnlineDataModule(PlanDataModule):
    """Toy clips rendered and encoded in the loader: no files, a pure function of (seed, sample).

    Args:
        toy: which clips.
        codec: encodes the pixels.
        text_encoder: encodes the captions.
        batch_size: samples of an optimizer step, over all ranks and micro-batches.
        seed: seed of order, caption choice and noise.
        num_workers: worker processes of a loader; changes nothing but speed.
        val_fraction: share of the clips held out, by hash of their id.
        val_batches: most global validation batches (None: every held-out clip).
        caption_dropout: probability of training a sample on the null embedding.
        stats: normalise with the statistics of the stored latents (data), or with those that the codec publishes and a
            pretrained model expects (codec).
        text_padding: mask the padding of captions, or attend to its zeros as Wan does (zeros).
    """

    def __init__(
        self,
        *,
        toy: ToyClips,
        codec: Codec,
        text_encoder: TextEncoder,
        batch_size: AtLeastOne,
        seed: Count = 0,
        num_workers: Count = 0,
        val_fraction: ShareBelowOne = 0.05,
        val_batches: Count | None = None,
        caption_dropout: Share = 0.1,
        stats: Literal["data", "codec"] = "data",
        text_padding: TextPadding = "mask",
    ) -> None:
        super().__init__(
            codec=codec,
            text_encoder=text_encoder,
            batch_size=batch_size,
            seed=seed,
            num_workers=num_workers,
            val_fraction=val_fraction,
            val_batches=val_batches,
            caption_dropout=caption_dropout,
            stats=stats,
            text_padding=text_padding,
        )
        self._toy = toy

    def open_store(self) -> SampleStore:
        """Clips on demand."""
        return ToyStore(self._toy, self.codec, self.text_encoder)

    def source_weights(self) -> Mapping[str, float]:
        """One source."""
        return {"toy": 1.0}

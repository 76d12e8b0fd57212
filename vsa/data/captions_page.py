"""Page of a data set on which captions are read beside their clips."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vsa.data.codecs import Codec
from vsa.data.pretrained_vae import PretrainedVAE
from vsa.data.shards import LatentReader
from vsa.data.video_files import write_gif
from vsa.pages.page import Clips, Page, Table

PAGE = "captions.html"
_SHOWN, _LISTED = 40, 2000
# of a picture on the page
_FRAMES, _SIDE = 8, 128


def write_captions_page(folder: Path, codec: Codec, *, device: str = "cpu") -> Path:
    """Write `captions.html` into a folder of shards: clips with their captions, and a list of captions.

    The clips are decoded from their latents, as a model learns them; of those of a trained codec the first moment.

    Args:
        folder: the folder.
        codec: codec of its latents.
        device: device of the codec.
    """
    reader = LatentReader(folder)
    listed = _spread(list(reader.index.samples.values()), _LISTED)
    texts = {sample.id: [(text, len(states)) for text, states in reader.texts(sample.id)] for sample in listed}
    encoder, samples = reader.index.text_encoder, reader.index.samples.values()
    facts = {
        "Clips": f"{len(samples):,}",
        "Captions": f"{sum(sample.captions for sample in samples):,}",
        "Text encoder": f"{encoder.id}, at most {encoder.max_tokens} tokens",
    }
    for fact, name in (("Trigger", "trigger"), ("Captioner", "captioner")):
        if used := [sample.about.fields[name] for sample in samples if name in sample.about.fields]:
            facts[fact] = f"{' and '.join(sorted(set(used)))} ({len(used):,} clips)"
    page = Page(folder / PAGE, title=f"Captions of {folder.name}", facts=facts)
    with TemporaryDirectory() as temporary:
        rows = {}
        for sample in _spread(listed, _SHOWN):
            picture = Path(temporary, f"{sample.id}.gif")
            latents = reader.latent(sample.id).to(device)
            with torch.no_grad():
                # decoding whole clips would take a trained codec longer than encoding
                clip = codec.decode(latents[:, :1] if isinstance(codec, PretrainedVAE) else latents)
            write_gif(picture, _small(clip.cpu()), fps=4)
            words = " / ".join(caption for caption, _ in texts[sample.id])
            rows[f"{sample.id}: {words}"] = [picture]
        note = "As a model learns them: decoded from the latents. Several captions of a clip are separated by strokes."
        headings = [("clip", f"{len(rows)} of {len(samples):,}")]
        page.clips("Clips", note, Clips(first="caption", headings=headings, rows=rows, left_out=0))
    files = {sample.id: sample.about.source or "" for sample in listed}
    entries = [(name, files[name], caption, f"{tokens}") for name, found in texts.items() for caption, tokens in found]
    note = (
        f"{len(listed):,} of {len(samples):,} clips. Tokens are those that the encoder keeps; {encoder.max_tokens} "
        "of them may be the start of a longer caption."
    )
    page.table(Table(["clip", "file", "caption", "tokens"], entries, title="Captions", note=note, long=(2,)))
    return page.write("vsa encode with the captions corrected and --overwrite writes both anew")


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, spread over all."""
    return [items[k * len(items) // most] for k in range(most)] if len(items) > most else list(items)


def _small(clip: Tensor) -> Tensor:
    """Some frames of a clip uint8 `[T, H, W, 3]`, scaled down to a picture of the page."""
    frames = torch.stack(_spread(list(clip), _FRAMES)).permute(0, 3, 1, 2).float()
    scale = min(1.0, _SIDE / max(frames.shape[2:]))
    frames = F.interpolate(frames, scale_factor=scale, mode="area") if scale < 1 else frames
    return frames.round().to(torch.uint8).permute(0, 2, 3, 1)

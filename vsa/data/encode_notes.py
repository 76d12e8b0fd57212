"""What is noted about clips while they are encoded, for the summary and the page of the data set."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vsa.data.clip_rules import ClipRules
from vsa.data.codecs import Codec
from vsa.data.reconstruction import mean_error
from vsa.errors import is_out_of_memory

_LISTED_SHAPES = 5
# pictures of a clip beside its reconstruction, and their largest side
_PICTURES, _SIDE = 3, 192


def notes_of(rules: ClipRules, codec: Codec, info: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(kind, value) notes about an encoded clip."""
    yield "clip", [*info["clip_size"], info["fps"], *info["source_size"]]
    (H, W), (_, height, width), (_, sh, sw) = info["source_size"], info["clip_size"], codec.stride
    enlarged = max(height / H, width / W)
    if enlarged > 1:
        yield "enlarged", enlarged
    if not rules.sizes and (H // sh, W // sw) != (height // sh, width // sw):
        yield "cropped", f"{H // sh}x{W // sw} to {height // sh}x{width // sw}"


def describe_notes(notes: Sequence[tuple[str, Any]]) -> list[str]:
    lines = []
    enlarged = [value for kind, value in notes if kind == "enlarged"]
    if enlarged:
        lines.append(
            f"enlarged, because the file has fewer pixels: {len(enlarged)}, up to {round(max(enlarged), 1):,g} times"
        )
    cropped = Counter(value for kind, value in notes if kind == "cropped")
    if cropped:
        shapes = [f"{count} from {shape}" for shape, count in cropped.most_common(_LISTED_SHAPES)]
        more = ["..."] if len(cropped) > _LISTED_SHAPES else []
        lines.append(
            f"latents cropped to divide into the 2x2 patches of models: {', '.join(shapes + more)}; "
            "--size and --buckets choose other sizes"
        )
    return lines


def rebuilt_note(name: str, clip: Tensor, latents: Tensor, codec: Codec) -> Iterator[tuple[str, Any]]:
    """A note that compares a clip with its reconstruction: `mean_error`, and frames of both as a PNG.

    Args:
        name: id of the clip.
        clip: uint8 `[T, H, W, 3]`.
        latents: `[C, t, h, w]`, on the same device.
        codec: codec of the latents.
    """
    try:
        with torch.no_grad():
            # an image is decoded to several equal frames
            rebuilt = codec.decode(latents)[: len(clip)].to(clip.device)
    except (MemoryError, RuntimeError) as error:
        # decoding may need more memory than encoding
        if is_out_of_memory(error):
            return
        raise
    error = mean_error(rebuilt, clip, codec)
    shown = sorted({k * (len(clip) - 1) // (_PICTURES - 1) for k in range(_PICTURES)})
    rows = [np.concatenate([video[k].cpu().numpy() for k in shown], 1) for video in (clip, rebuilt)]
    picture, file = Image.fromarray(np.concatenate(rows)), io.BytesIO()
    picture.thumbnail((_SIDE * len(shown), 2 * _SIDE))
    # small clips would be hard to see
    picture = picture.resize([side * max(1, _SIDE // clip.shape[1]) for side in picture.size], Image.Resampling.NEAREST)
    picture.save(file, format="PNG")
    png = base64.b64encode(file.getvalue()).decode()
    yield "rebuilt", {"name": name, "size": list(clip.shape[:3]), "error": error, "png": png}

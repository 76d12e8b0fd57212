"""From a folder of captioned videos to a folder of latent and text shards.

T H W frames and pixels.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from vsa.data.captions import read_captions
from vsa.data.codecs import Codec
from vsa.data.shards import ShardWriter
from vsa.data.text import TextEncoder
from vsa.data.video_files import IMAGE_SUFFIXES, VIDEO_SUFFIXES, read_video


@dataclass(frozen=True)
class EncodeReport:
    """What `encode_folder` did: samples written, and the files left out with the reason."""

    samples: int
    skipped: tuple[tuple[str, str], ...]


def encode_folder(
    videos: str | Path,
    out: str | Path,
    *,
    codec: Codec,
    text_encoder: TextEncoder,
    captions: str | Path | None = None,
    size: tuple[int, int] | None = None,
    frames: int | None = None,
    fps: float | None = None,
    dtype: str = "float16",
    samples_per_shard: int = 1024,
    overwrite: bool = False,
    skip_bad: bool = False,
    device: str = "cpu",
    progress: bool = True,
) -> EncodeReport:
    """Encodes every video and image below a folder; images become one-frame latents.

    Args:
        videos: folder of videos and images, searched with its subfolders.
        out: folder of shards to write.
        codec: encodes the pixels.
        text_encoder: encodes the captions.
        captions: caption file; see `vsa.data.captions.read_captions`.
        size: (height, width) in pixels: scale to cover, then crop the middle (None: crop to the codec's stride).
        frames: frames of a clip, from the start (None: all); trimmed to the codec's stride in time.
        fps: resample to that frame rate first (None: every stored frame).
        dtype: how latents are stored.
        samples_per_shard: samples in a full shard.
        overwrite: replace a data set that is in `out`.
        skip_bad: leave out files that do not decode or are too short, and report them, in place of stopping.
        device: where the codec runs.
        progress: show a progress bar.

    Returns:
        How many samples were written and what was left out.

    Raises:
        ValueError: no videos, a video that does not decode or is too short, or captions that do not match; one line
            that names the file.
    """
    folder = Path(videos)
    if not folder.is_dir():
        raise ValueError(f"no such folder of videos: {folder}")
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in VIDEO_SUFFIXES + IMAGE_SUFFIXES and p.is_file())
    if not files:
        raise ValueError(f"no videos in {folder} (looked for {' '.join(VIDEO_SUFFIXES + IMAGE_SUFFIXES)})")
    _check_size(codec, size, frames)
    texts = read_captions(folder, Path(captions) if captions else None, files)
    ids = sample_ids([p.relative_to(folder).as_posix() for p in files])

    skipped: list[tuple[str, str]] = []
    writer = ShardWriter(
        out,
        codec=codec,
        text_encoder=text_encoder,
        samples_per_shard=samples_per_shard,
        dtype=dtype,
        overwrite=overwrite,
    )
    with writer:
        for path, sample_id in track(
            list(zip(files, ids, strict=True)), description="encoding videos", disable=not progress
        ):
            try:
                video, rate = read_video(path, frames=frames, fps=fps)
                clip = fit_clip(video, codec=codec, size=size, frames=frames, name=str(path))
            except ValueError as error:
                if not skip_bad:
                    raise
                skipped.append((path.relative_to(folder).as_posix(), str(error)))
                continue
            info = {
                "source": path.relative_to(folder).as_posix(),
                "fps": rate,
                "source_size": [video.shape[1], video.shape[2]],
                "clip_size": list(clip.shape[:3]),
            }
            latents = codec.encode(clip.to(device))
            writer.add(sample_id, latents, texts[path], info)
        if skipped and len(skipped) == len(files):
            raise ValueError(f"none of the {len(files)} videos in {folder} could be encoded; first: {skipped[0][1]}")
    return EncodeReport(samples=len(files) - len(skipped), skipped=tuple(skipped))


def fit_clip(video: Tensor, *, codec: Codec, size: tuple[int, int] | None, frames: int | None, name: str) -> Tensor:
    """Scales, crops and trims a clip to what a codec takes.

    Args:
        video: uint8 `[T, H, W, 3]`.
        codec: gives the stride.
        size: (height, width) to scale to cover and crop to; None keeps the scale and crops to the stride.
        frames: frames to keep; None keeps as many as fit the stride. One-frame clips (images) pass.
        name: what to call the clip in errors.

    Returns:
        uint8 `[T', H', W', 3]`.

    Raises:
        ValueError: the clip is too short or too small.
    """
    st, sh, sw = codec.stride
    T, H, W, _ = video.shape
    if T > 1:
        wanted = frames or T - T % st
        if wanted < 1 or wanted > T:
            raise ValueError(f"video {name} has {T} frames, {wanted or st} are needed")
        video = video[:wanted]
    height, width = size or (H - H % sh, W - W % sw)
    if height < 1 or width < 1:
        raise ValueError(f"video {name} has {H}x{W} pixels, less than the codec's cell of {sh}x{sw}")
    if size is not None and (height, width) != (H, W):
        scale = max(height / H, width / W)
        covered = (max(height, round(H * scale)), max(width, round(W * scale)))
        pixels = video.permute(0, 3, 1, 2).float()
        pixels = F.interpolate(pixels, size=covered, mode="bilinear", align_corners=False, antialias=True)
        video = pixels.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    top, left = (video.shape[1] - height) // 2, (video.shape[2] - width) // 2
    return video[:, top : top + height, left : left + width].contiguous()


def sample_ids(names: Sequence[str]) -> list[str]:
    """A sample id for every relative file name: its stem where that is unique and plain, else with a digest.

    Args:
        names: relative POSIX paths, each different.

    Returns:
        ids in the same order; a pure function of the list.
    """
    stems = [name.rpartition(".")[0] or name for name in names]
    plain = [re.sub(r"[^A-Za-z0-9_-]+", "_", stem) for stem in stems]
    # compared without case: ids may become file names on systems that ignore it
    uses = Counter(p.lower() for p in plain)
    ids = []
    for name, stem, key in zip(names, stems, plain, strict=True):
        if key != stem or uses[key.lower()] > 1 or len(key) > 64 or key.startswith("__"):
            digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
            key = f"{key.lstrip('_')[:60]}-{digest}"
        ids.append(key)
    return ids


def _check_size(codec: Codec, size: tuple[int, int] | None, frames: int | None) -> None:
    st, sh, sw = codec.stride
    if size is not None and (size[0] < 1 or size[1] < 1 or size[0] % sh or size[1] % sw):
        raise ValueError(f"size {size[0]}x{size[1]} (height x width) must be multiples of the codec stride {sh}x{sw}")
    if frames is not None and (frames < 1 or (frames % st and frames != 1)):
        raise ValueError(f"frames must be 1 or a multiple of the codec's {st}, got {frames}")

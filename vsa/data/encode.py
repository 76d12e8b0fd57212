"""From a folder of captioned videos to a folder of latent and text shards.

T H W frames and pixels.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vsa.data.buckets import Bucket, choose_bucket
from vsa.data.captions import read_captions
from vsa.data.codecs import Codec, WanVAE
from vsa.data.parts import PartsReport, check_target, join_parts, write_parts
from vsa.data.shards import ShardWriter
from vsa.data.text import TextEncoder
from vsa.data.video_files import IMAGE_SUFFIXES, VIDEO_SUFFIXES, read_video


@dataclass(frozen=True, kw_only=True)
class ClipRules:
    """What is cut out of a video.

    Args:
        size: (height, width) in pixels: scale to cover, then crop the middle (None: crop to the codec's stride).
        frames: frames of a clip, from the start (None: all); trimmed to what the codec takes.
        fps: resample to that frame rate first (None: every stored frame).
        buckets: clip sizes to choose from for every video, in place of `size` and `frames`; see `choose_bucket`.

    Raises:
        ValueError: `buckets` beside `size` or `frames`.
    """

    size: tuple[int, int] | None = None
    frames: int | None = None
    fps: float | None = None
    buckets: tuple[Bucket, ...] = ()

    def __post_init__(self) -> None:
        if self.buckets and (self.size is not None or self.frames is not None):
            raise ValueError(f"buckets exclude size and frames, got size={self.size} and frames={self.frames}")

    def check(self, codec: Codec) -> None:
        """Refuse sizes that the codec does not take.

        Raises:
            ValueError: names the size or the number of frames.
        """
        _, sh, sw = codec.stride
        sizes = [(b.height, b.width) for b in self.buckets] or ([self.size] if self.size else [])
        for height, width in sizes:
            if height < 1 or width < 1 or height % sh or width % sw:
                raise ValueError(
                    f"size {height}x{width} (height x width) must be multiples of the codec stride {sh}x{sw}"
                )
        for frames in [b.frames for b in self.buckets] or ([self.frames] if self.frames is not None else []):
            if frames < 1 or codec.frames_that_fit(frames) != frames:
                nearest = max(codec.frames_that_fit(frames), 1) if frames > 0 else 1
                raise ValueError(f"codec {codec.id} takes clips of {nearest} frames, not of as many: got {frames}")

    def cut(self, path: Path, codec: Codec) -> tuple[Tensor, dict[str, Any]]:
        """The clip of a video file, uint8 `[T, H, W, 3]`, and what is to be known of it.

        Raises:
            ValueError: the file does not decode, or is too short or too small; names it.
        """
        longest = max((b.frames for b in self.buckets), default=self.frames)
        video, rate = read_video(path, frames=longest, fps=self.fps)
        size, frames = self.size, self.frames
        if self.buckets:
            T, H, W, _ = video.shape
            bucket = choose_bucket(self.buckets, frames=T, height=H, width=W)
            if bucket is None:
                known = ", ".join(map(str, self.buckets))
                raise ValueError(f"video {path} of {T} frames of {H}x{W} fills none of the buckets {known}")
            size, frames = (bucket.height, bucket.width), bucket.frames
        clip = fit_clip(video, codec=codec, size=size, frames=frames, name=str(path))
        info = {"fps": rate, "source_size": [video.shape[1], video.shape[2]], "clip_size": list(clip.shape[:3])}
        return clip, info


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
    buckets: Sequence[Bucket] = (),
    image_condition: bool = False,
    dtype: str = "float16",
    samples_per_shard: int = 256,
    overwrite: bool = False,
    skip_bad: bool = False,
    device: str = "cpu",
    rank: int = 0,
    world_size: int = 1,
    progress: bool = True,
) -> PartsReport:
    """Encodes every video and image below a folder; images become one-frame latents.

    Work is kept part by part (see `vsa.data.parts`): an interrupted call is repeated and goes on. With several
    processes each writes its parts, and a last call with `world_size` 1 makes the data set of them.

    Args:
        videos: folder of videos and images, searched with its subfolders.
        out: folder of shards to write.
        codec: encodes the pixels.
        text_encoder: encodes the captions.
        captions: caption file; see `vsa.data.captions.read_captions`.
        size: see `ClipRules`.
        frames: see `ClipRules`.
        fps: see `ClipRules`.
        buckets: see `ClipRules`.
        image_condition: store with every clip what an image-to-video model is given; see `WanVAE.image_condition`.
        dtype: how latents are stored.
        samples_per_shard: samples in a full shard, and what an interruption costs at most.
        overwrite: replace a data set that is in `out`.
        skip_bad: leave out files that do not decode or are too short, and report them, in place of stopping.
        device: where the codec runs.
        rank: of this process.
        world_size: processes that share the work.
        progress: show a progress bar.

    Returns:
        How many samples are written by now, what was left out, and whether every part is there.

    Raises:
        ValueError: no videos, a video that does not decode or is too short, captions that do not match, or parts of
            other settings in `out`; one line that names the file or the setting.
    """
    folder, out = Path(videos), Path(out)
    rules = ClipRules(size=size, frames=frames, fps=fps, buckets=tuple(buckets))
    rules.check(codec)
    if image_condition and not isinstance(codec, WanVAE):
        raise ValueError(f"image conditions need Wan's VAE, the codec is {codec.id}")
    check_target(out, overwrite=overwrite)
    files = _media_files(folder)
    texts = read_captions(folder, Path(captions) if captions else None, files)
    names = [path.relative_to(folder).as_posix() for path in files]
    ids = sample_ids(names)

    def write(part: Path, span: range, advance: Callable[[], None]) -> list[tuple[str, str]]:
        skipped: list[tuple[str, str]] = []

        def clips() -> Iterator[tuple[int, Tensor, dict[str, Any]]]:
            for i in span:
                try:
                    clip, info = rules.cut(files[i], codec)
                except ValueError as error:
                    if not skip_bad:
                        raise
                    skipped.append((names[i], str(error)))
                else:
                    yield i, clip.to(device), {"source": names[i], **info}
                advance()

        found = clips()
        first = next(found, None)
        if first is None:
            return skipped
        # one more than the samples: the null embedding is in the text shard too
        with ShardWriter(
            part, codec=codec, text_encoder=text_encoder, samples_per_shard=len(span) + 1, dtype=dtype
        ) as writer:
            for i, clip, info in chain([first], found):
                condition = codec.image_condition(clip) if isinstance(codec, WanVAE) and image_condition else None
                writer.add(ids[i], codec.encode(clip), texts[files[i]], info, condition)
        return skipped

    listing = "\n".join(f"{name}\t{texts[path]}" for name, path in zip(names, files, strict=True))
    report = write_parts(
        out,
        write,
        count=len(files),
        part_size=samples_per_shard,
        settings={
            "videos": f"{len(files)} files ({hashlib.sha256(listing.encode('utf-8', 'replace')).hexdigest()[:12]})",
            "codec": f"{codec.id} ({codec.hash})",
            "text_encoder": f"{text_encoder.id} ({text_encoder.hash})",
            "size": size,
            "frames": frames,
            "fps": fps,
            "buckets": [str(bucket) for bucket in buckets],
            "image_condition": image_condition,
            "dtype": dtype,
        },
        overwrite=overwrite,
        rank=rank,
        world_size=world_size,
        title="encoding videos",
        progress=progress,
    )
    if report.complete and report.samples == 0:
        raise ValueError(f"none of the {len(files)} videos in {folder} could be encoded; first: {report.skipped[0][1]}")
    if world_size == 1:
        join_parts(out)
    return report


def _media_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"no such folder of videos: {folder}")
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in VIDEO_SUFFIXES + IMAGE_SUFFIXES and p.is_file())
    if not files:
        raise ValueError(f"no videos in {folder} (looked for {' '.join(VIDEO_SUFFIXES + IMAGE_SUFFIXES)})")
    return files


def fit_clip(video: Tensor, *, codec: Codec, size: tuple[int, int] | None, frames: int | None, name: str) -> Tensor:
    """Scales, crops and trims a clip to what a codec takes.

    Args:
        video: uint8 `[T, H, W, 3]`.
        codec: gives the stride.
        size: (height, width) to scale to cover and crop to; None keeps the scale and crops to the stride.
        frames: frames to keep; None keeps as many as the codec takes. One-frame clips (images) pass.
        name: what to call the clip in errors.

    Returns:
        uint8 `[T', H', W', 3]`.

    Raises:
        ValueError: the clip is too short or too small.
    """
    st, sh, sw = codec.stride
    T, H, W, _ = video.shape
    if T > 1:
        wanted = frames or codec.frames_that_fit(T)
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

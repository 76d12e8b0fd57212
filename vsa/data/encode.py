"""Encoding of a folder of captioned videos to a folder of latent and text shards.

T H W frames and pixels.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from vsa.data.buckets import Bucket
from vsa.data.captions import read_captions
from vsa.data.clip_rules import PATCH, ClipRules, Decoder
from vsa.data.codecs import Codec, HaarCodec, WanVAE
from vsa.data.decoder_process import DecoderProcess
from vsa.data.media_folder import media_files
from vsa.data.reconstruction import describe_reconstruction
from vsa.data.resumable_writer import PartContent, PartsReport, check_target, join_parts, pending_parts, write_parts
from vsa.data.shard_writer import ShardWriter
from vsa.data.text import TextEncoder, describe_cut

# number of clips, spread over the data set, on which the codec's quality is measured
_MEASURED_CLIPS = 8
_LISTED_SHAPES = 5


class UnusableFiles(ValueError):
    """Files that cannot be encoded.

    Attributes:
        problems: (file or place in the caption file, reason) of each.
    """

    def __init__(self, problems: Sequence[tuple[str, str]], message: str) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class OutOfMemory(ValueError):
    """Too little memory for a clip. The file is not at fault, so it is never skipped for this reason."""


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
    decode_seconds: float = 120,
    decode_memory: float = 16,
    device: str = "cpu",
    rank: int = 0,
    world_size: int = 1,
    progress: bool = True,
    tell: Callable[[str], None] = print,
) -> PartsReport:
    """Encode every video and image below a folder; images become one-frame latents.

    All captions and the headers of all files are checked before anything is written, and all problems are reported
    together. Finished parts are kept (see `vsa.data.resumable_writer`), so an interrupted call can be repeated and
    continues. With several processes, each writes its parts, and a last call with `world_size` 1 joins them.

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
        image_condition: store the image condition of an image-to-video model with every clip; see
            `WanVAE.image_condition`.
        dtype: dtype of the stored latents.
        samples_per_shard: samples in a full shard, the most that an interruption can cost.
        overwrite: replace an existing data set in `out`.
        skip_bad: skip and report files that do not decode, are too short or have no caption, instead of stopping.
        decode_seconds: time limit of the decoder per file, in seconds.
        decode_memory: memory limit of the decoder per file, in GiB, without the decoded frames.
        device: device of the codec.
        rank: rank of this process.
        world_size: number of processes that share the work.
        progress: show a progress bar.
        tell: called with messages for the user, such as the codec's quality and sizes that do not fit models.

    Returns:
        Number of samples written so far, skipped files, and whether every part is complete.

    Raises:
        UnusableFiles: videos that do not decode or are too short, captions that are missing or malformed.
        ValueError: no videos, `out` inside of `videos` or the reverse, files or parts of other settings in `out`; one
            line that names the file or the setting.
    """
    folder, out = Path(videos), Path(out)
    rules = ClipRules(size=size, frames=frames, fps=fps, buckets=tuple(buckets))
    rules.check(codec)
    if image_condition and not isinstance(codec, WanVAE):
        raise ValueError(f"image conditions need Wan's VAE, got codec {codec.id}")
    _refuse_overlap(folder, out)
    check_target(out, overwrite=overwrite)
    media = media_files(folder, Path(captions) if captions else None)
    files = media.files
    names = [path.relative_to(folder).as_posix() for path in files]
    ids = sample_ids(names)
    all_captions = read_captions(folder, Path(captions) if captions else None, files)
    entries = [(all_captions.of.get(path), all_captions.fields.get(path)) for path in files]
    # without fields, the listing equals that of earlier versions
    listing = "\n".join(
        f"{name}\t{captions}" + (f"\t{fields}" if fields else "")
        for name, (captions, fields) in zip(names, entries, strict=True)
    )
    settings = {
        "videos": f"{len(files)} files ({hashlib.sha256(listing.encode('utf-8', 'replace')).hexdigest()[:12]})",
        "codec": f"{codec.id} ({codec.hash})",
        "text_encoder": f"{text_encoder.id} ({text_encoder.hash})",
        "size": size,
        "frames": frames,
        "fps": fps,
        "buckets": [str(bucket) for bucket in buckets],
        "image_condition": image_condition,
        "dtype": dtype,
    }
    share: dict[str, Any] = {
        "count": len(files),
        "part_size": samples_per_shard,
        "settings": settings,
        "rank": rank,
        "world_size": world_size,
    }
    with DecoderProcess(seconds=decode_seconds, memory_gib=decode_memory) as decoder:
        pending = [i for _, span in pending_parts(out, **share) for i in span]
        bad = {i: all_captions.missing[path] for i, path in enumerate(files) if path in all_captions.missing}
        for i in track(pending, description="looking at files", transient=True, disable=not progress):
            try:
                # records and pages are in UTF-8
                if names[i] != names[i].encode(errors="replace").decode():
                    raise ValueError(f"the name of video {files[i]} is not UTF-8: rename it")
                rules.probe(files[i], codec, decoder)
            except ValueError as error:
                bad.setdefault(i, str(error))
        problems = [*all_captions.unusable, *((names[i], bad[i]) for i in sorted(bad))]
        if len(bad) == len(files):
            reason = problems[0][1]
            raise UnusableFiles(
                problems, f"none of the {len(files)} videos in {folder} can be encoded; first: {reason}"
            )
        if problems and not skip_bad:
            raise _unusable(problems, folder)
        if rank == 0 and pending:
            good = [i for i in range(len(files)) if i not in bad]
            sample = sorted({good[k * len(good) // _MEASURED_CLIPS] for k in range(_MEASURED_CLIPS)})
            if unread := media.describe_unread():
                tell(f"neither videos nor images, not read: {unread}")
            if joined := all_captions.joined:
                tell(
                    f"lines joined to one caption: {len(joined)} text files, first {joined[0].name}; "
                    "a blank line begins another caption"
                )
            if cut := describe_cut(text_encoder, chain(*(all_captions.of[files[i]] for i in good))):
                tell(cut)
            for line in _describe_ahead({names[i]: files[i] for i in sample}, rules, codec, decoder):
                tell(line)

        def about(i: int, info: dict[str, Any]) -> dict[str, Any]:
            fields = all_captions.fields.get(files[i])
            return {"source": names[i], **info, **({"fields": fields} if fields else {})}

        def encode(i: int) -> tuple[Tensor, dict[str, Any], Tensor | None]:
            if i in bad:
                raise ValueError(bad[i])
            with _memory_errors(str(files[i])):
                clip, info = rules.cut(files[i], codec, decoder)
                clip = clip.to(device)
                condition = codec.image_condition(clip) if isinstance(codec, WanVAE) and image_condition else None
                return codec.encode(clip), about(i, info), condition

        def write(part: Path, span: range, advance: Callable[[], None]) -> PartContent:
            skipped: list[tuple[str, str]] = []
            notes: list[tuple[str, Any]] = []

            decoder.announce([files[i] for i in span if i not in bad])

            def samples() -> Iterator[tuple[int, Tensor, dict[str, Any], Tensor | None]]:
                for i in span:
                    try:
                        latents, info, condition = encode(i)
                    except OutOfMemory:
                        raise
                    except ValueError as error:
                        if not skip_bad:
                            raise _unusable([(names[i], str(error))], folder) from error
                        skipped.append((names[i], str(error)))
                    else:
                        notes.extend(_notes(rules, codec, info))
                        yield i, latents, info, condition
                    advance()

            encoded = samples()
            first = next(encoded, None)
            if first is None:
                return PartContent(skipped=skipped)
            # one more than the samples: the null embedding is in the text shard too
            with ShardWriter(
                part, codec=codec, text_encoder=text_encoder, samples_per_shard=len(span) + 1, dtype=dtype
            ) as writer:
                for i, latents, info, condition in chain([first], encoded):
                    writer.add(ids[i], latents, all_captions.of[files[i]], info, condition)
            return PartContent(skipped=skipped, notes=notes)

        report = write_parts(
            out,
            write,
            **share,
            overwrite=overwrite,
            title="encoding videos",
            progress=progress,
        )
    if report.complete and report.samples == 0:
        raise UnusableFiles(
            report.skipped, f"none of the {len(files)} videos in {folder} decodes; first: {report.skipped[0][1]}"
        )
    if world_size == 1:
        join_parts(out)
        for line in _describe_notes(report.notes):
            tell(line)
    return replace(report, skipped=(*media.ignored, *all_captions.unusable, *report.skipped))


def _refuse_overlap(videos: Path, out: Path) -> None:
    inner, outer = out.resolve(), videos.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise ValueError(f"the folder of shards {out} and the folder of videos {videos} must not contain each other")


def _unusable(problems: Sequence[tuple[str, str]], folder: Path) -> UnusableFiles:
    _, reason = problems[0]
    if len(problems) == 1:
        return UnusableFiles(problems, f"{reason}; --skip-bad leaves it out")
    message = f"{len(problems)} problems with the files in {folder}, first: {reason}; --skip-bad leaves them out"
    return UnusableFiles(problems, message)


@contextmanager
def _memory_errors(what: str) -> Iterator[None]:
    """Convert a failed allocation to a one-line error."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch has no exception type for failed allocations on the CPU
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise OutOfMemory(f"not enough memory to encode {what}: choose a smaller size or fewer frames") from error


def _describe_ahead(clips: Mapping[str, Path], rules: ClipRules, codec: Codec, decoder: Decoder) -> list[str]:
    """Messages before hours of encoding: sizes that do not fit models, and the quality of the codec."""
    _, sh, sw = codec.stride
    lines = [
        f"clips of {h}x{w} give latents of {h // sh}x{w // sw}, which do not divide into the {PATCH}x{PATCH} patches "
        f"of models: choose multiples of {PATCH * sh}x{PATCH * sw} with --size or --buckets"
        for h, w in rules.untrainable(codec)
    ]

    def measured() -> Iterator[tuple[str, Tensor]]:
        for name, path in clips.items():
            # a file that does not decode is reported when it is encoded
            with suppress(ValueError):
                yield name, rules.cut(path, codec, decoder)[0]

    # a trained codec reconstructs well, and may need more memory for decoding than for encoding
    if isinstance(codec, HaarCodec):
        with _memory_errors("the clips"):
            lines += describe_reconstruction(measured(), codec.channels)
    return lines


def _notes(rules: ClipRules, codec: Codec, info: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(kind, value) notes about an encoded clip, for the summary."""
    (H, W), (_, height, width), (_, sh, sw) = info["source_size"], info["clip_size"], codec.stride
    enlarged = max(height / H, width / W)
    if enlarged > 1:
        yield "enlarged", enlarged
    if not rules.sizes and (H // sh, W // sw) != (height // sh, width // sw):
        yield "cropped", f"{H // sh}x{W // sw} to {height // sh}x{width // sw}"


def _describe_notes(notes: Sequence[tuple[str, Any]]) -> list[str]:
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
            f"latents cropped to divide into the {PATCH}x{PATCH} patches of models: {', '.join(shapes + more)}; "
            "--size and --buckets choose other sizes"
        )
    return lines


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

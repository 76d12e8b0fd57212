"""Encoding of a folder of captioned videos to a folder of latent and text shards.

T H W frames and pixels.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vsa.data.captioner import MADE, caption_clips
from vsa.data.captions import led_by, read_captions
from vsa.data.clip_rules import PATCH, ClipRules
from vsa.data.codecs import Codec, HaarCodec, WanVAE
from vsa.data.decoder_process import DecoderProcess
from vsa.data.media_folder import media_files
from vsa.data.prompts import tidy
from vsa.data.reconstruction import describe_reconstruction
from vsa.data.resumable_writer import (
    OutputOptions,
    PartContent,
    PartsReport,
    check_target,
    join_parts,
    pending_parts,
    write_parts,
)
from vsa.data.shard_writer import ShardWriter
from vsa.data.text import TextEncoder, describe_cut
from vsa.progress import progress_bar

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


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """Options of `encode_folder`.

    Args:
        clips: rules that cut a clip out of a video.
        output: settings of the shards.
        captions: caption file; see `vsa.data.captions.read_captions`.
        trigger: words put before every caption.
        captioner: image-to-text model for clips without a caption; see `vsa.data.captioner.Captioner`.
        image_condition: whether the image condition of an image-to-video model is stored with every clip; see
            `WanVAE.image_condition`.
        skip_bad: whether files that do not decode, are too short or have no caption are skipped and reported, instead
            of stopping.
        decode_seconds: time limit of the decoder per file, in seconds.
        decode_memory: memory limit of the decoder per file, in GiB, without the decoded frames.
        device: device of the codec.
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

    def check(self, codec: Codec) -> None:
        """Raise ValueError for options that the codec does not support."""
        self.clips.check(codec)
        if self.image_condition and not isinstance(codec, WanVAE):
            raise ValueError(f"image conditions need Wan's VAE, got codec {codec.id}")


def encode_folder(
    videos: str | Path,
    out: str | Path,
    options: EncodeOptions,
    *,
    codec: Codec,
    text_encoder: TextEncoder,
    tell: Callable[[str], None] = print,
) -> PartsReport:
    """Encode every video and image below a folder; images become one-frame latents.

    All captions and the headers of all files are checked before anything is written, and all problems are reported
    together. Finished parts are kept (see `vsa.data.resumable_writer`), so an interrupted call can be repeated and
    continues. With several processes, each writes its parts, and a last call with a single process joins them.

    Args:
        videos: folder of videos and images, searched with its subfolders.
        out: folder of shards to write.
        options: rules of the clips, limits of the decoder, and settings of the shards.
        codec: codec of the pixels.
        text_encoder: encoder of the captions.
        tell: function called with messages for the user, such as the codec's quality and sizes that do not fit models.

    Returns:
        Number of samples written so far, skipped files, and whether every part is complete.

    Raises:
        UnusableFiles: videos that do not decode or are too short, captions that are missing or malformed.
        ValueError: no videos, `out` inside of `videos` or the reverse, files or parts of other settings in `out`; one
            line that names the file or the setting.
    """
    folder, out, output = Path(videos), Path(out), options.output
    options.check(codec)
    _refuse_overlap(folder, out)
    check_target(out, overwrite=output.overwrite)
    with DecoderProcess(seconds=options.decode_seconds, memory_gib=options.decode_memory) as decoder:
        encoding = _Encoding(folder, options, codec, text_encoder, decoder)
        if options.captioner:
            encoding.write_captions(out, options.captioner)
        share: dict[str, Any] = {"count": len(encoding.files), "settings": encoding.settings(), "output": output}
        pending = [i for _, span in pending_parts(out, **share) for i in span]
        with progress_bar("looking at files", len(pending), transient=True) as advance:
            encoding.check(pending, advance)
        if output.rank == 0 and pending:
            for line in encoding.describe_ahead():
                tell(line)
        report = write_parts(out, encoding.write, **share, title="encoding videos")
    if report.complete and report.samples == 0:
        whole = f"none of the {len(encoding.files)} videos in {folder} decodes"
        raise UnusableFiles(report.skipped, f"{whole}; first: {report.skipped[0][1]}")
    if output.world_size == 1:
        join_parts(out)
        for line in _describe_notes(report.notes):
            tell(line)
    return replace(report, skipped=(*encoding.media.ignored, *encoding.captions.unusable, *report.skipped))


class _Encoding:
    """The files of a folder by number, in the order of the data set, and their encoding.

    Args:
        folder: folder of videos and images.
        options: options of the call.
        codec: codec of the pixels.
        text_encoder: encoder of the captions.
        decoder: reader of the files.
    """

    def __init__(
        self, folder: Path, options: EncodeOptions, codec: Codec, text_encoder: TextEncoder, decoder: DecoderProcess
    ):
        self._folder, self._options, self._decoder = folder, options, decoder
        self._codec, self._text_encoder = codec, text_encoder
        caption_file = Path(options.captions) if options.captions else None
        self.media = media_files(folder, caption_file)
        self.files = self.media.files
        self._names = [path.relative_to(folder).as_posix() for path in self.files]
        self._ids = sample_ids(self._names)
        self.captions = read_captions(folder, caption_file, self.files, trigger=tidy(options.trigger))
        # captions of a captioner by sample id
        self._made: dict[str, str] = {}
        # reasons by number
        missing = self.captions.missing
        later = self.captions.uncaptioned if options.captioner else ()
        self._bad = {i: missing[path] for i, path in enumerate(self.files) if path in missing and path not in later}

    def settings(self) -> dict[str, Any]:
        """Everything that determines the samples, as JSON values."""
        entries = [self._captions(i) for i in range(len(self.files))]
        # without fields, the listing equals that of earlier versions
        listing = "\n".join(
            f"{name}\t{captions or None}" + (f"\t{fields}" if fields else "")
            for name, (captions, fields) in zip(self._names, entries, strict=True)
        )
        digest = hashlib.sha256(listing.encode("utf-8", "replace")).hexdigest()[:12]
        rules = self._options.clips
        return {
            "videos": f"{len(self.files)} files ({digest})",
            "codec": f"{self._codec.id} ({self._codec.hash})",
            "text_encoder": f"{self._text_encoder.id} ({self._text_encoder.hash})",
            **vars(rules),
            "buckets": [str(bucket) for bucket in rules.buckets],
            "image_condition": self._options.image_condition,
            "dtype": self._options.output.dtype,
        }

    def write_captions(self, out: Path, captioner: str) -> None:
        """Make captions of the clips that have none, and keep them in the folder of shards; raises as `check`."""
        self.check(range(len(self.files)), lambda _: None)
        without = set(self.captions.uncaptioned)
        numbers = {self._ids[i]: i for i, path in enumerate(self.files) if path in without and i not in self._bad}

        def frames(name: str) -> Tensor:
            return self._options.clips.cut(self.files[numbers[name]], self._codec, self._decoder)[0]

        alone = self._options.output.world_size == 1
        how: dict[str, Any] = {"device": self._options.device, "alone": alone}
        self._made = caption_clips(out / MADE, list(numbers), frames, captioner, **how)
        silent = [i for name, i in numbers.items() if name not in self._made]
        self._bad |= {i: self.captions.missing[self.files[i]] for i in silent}

    def _captions(self, i: int) -> tuple[list[str], dict[str, str]]:
        """Captions and further fields of a clip by number."""
        path, made = self.files[i], self._made.get(self._ids[i])
        if made is None:
            return self.captions.of.get(path, []), dict(self.captions.fields.get(path, {}))
        trigger = tidy(self._options.trigger)
        fields = {"captioner": str(self._options.captioner), "trigger": trigger}
        return [led_by(trigger, made)], {name: text for name, text in fields.items() if text}

    def check(self, numbers: Iterable[int], advance: Callable[[int], None]) -> None:
        """Look at the headers of files by number; UnusableFiles if none is usable, or one is not and is not skipped."""
        for i in numbers:
            try:
                # records and pages are in UTF-8
                if self._names[i] != self._names[i].encode(errors="replace").decode():
                    raise ValueError(f"the name of video {self.files[i]} is not UTF-8: rename it")
                self._options.clips.probe(self.files[i], self._codec, self._decoder)
            except ValueError as error:
                self._bad.setdefault(i, str(error))
            advance(1)
        problems = [*self.captions.unusable, *((self._names[i], self._bad[i]) for i in sorted(self._bad))]
        if len(self._bad) == len(self.files):
            whole = f"none of the {len(self.files)} videos in {self._folder} can be encoded"
            raise UnusableFiles(problems, f"{whole}; first: {problems[0][1]}")
        if problems and not self._options.skip_bad:
            raise _unusable(problems, self._folder)

    def describe_ahead(self) -> Iterator[str]:
        """Messages before hours of encoding: what is not read, cut or joined, and the quality of the codec."""
        good = [i for i in range(len(self.files)) if i not in self._bad]
        if unread := self.media.describe_unread():
            yield f"neither videos nor images, not read: {unread}"
        if joined := self.captions.joined:
            first = f"{len(joined)} text files, first {joined[0].name}"
            yield f"lines joined to one caption: {first}; a blank line begins another caption"
        if moved := self.captions.moved:
            name, path = next(iter(moved.items()))
            yield f"found by the end of their path: {len(moved)} names of the caption file, first {name} as {path}"
        if cut := describe_cut(self._text_encoder, chain(*(self._captions(i)[0] for i in good))):
            yield cut
        codec, (_, sh, sw) = self._codec, self._codec.stride
        for h, w in self._options.clips.untrainable(codec):
            yield (
                f"clips of {h}x{w} give latents of {h // sh}x{w // sw}, which do not divide into the {PATCH}x{PATCH} "
                f"patches of models: choose multiples of {PATCH * sh}x{PATCH * sw} with --size or --buckets"
            )

        def measured() -> Iterator[tuple[str, Tensor]]:
            for i in sorted({good[k * len(good) // _MEASURED_CLIPS] for k in range(_MEASURED_CLIPS)}):
                # a file that does not decode is reported when it is encoded
                with suppress(ValueError):
                    yield self._names[i], self._options.clips.cut(self.files[i], codec, self._decoder)[0]

        # a trained codec reconstructs well, and may need more memory for decoding than for encoding
        if isinstance(codec, HaarCodec):
            with _memory_errors("the clips"):
                yield from describe_reconstruction(measured(), codec.channels)

    def write(self, part: Path, span: range, advance: Callable[[], None]) -> PartContent:
        """Encode the files of a range to a part of the data set."""
        skipped: list[tuple[str, str]] = []
        notes: list[tuple[str, Any]] = []

        def samples() -> Iterator[tuple[int, Tensor, dict[str, Any], Tensor | None]]:
            for i in span:
                try:
                    latents, info, condition = self._encode(i)
                except OutOfMemory:
                    raise
                except ValueError as error:
                    if not self._options.skip_bad:
                        raise _unusable([(self._names[i], str(error))], self._folder) from error
                    skipped.append((self._names[i], str(error)))
                else:
                    notes.extend(_notes(self._options.clips, self._codec, info))
                    yield i, latents, info, condition
                advance()

        self._decoder.announce([self.files[i] for i in span if i not in self._bad])
        encoded = samples()
        first = next(encoded, None)
        if first is None:
            return PartContent(skipped=skipped)
        encoders = {"codec": self._codec, "text_encoder": self._text_encoder}
        # one more than the samples: the null embedding is in the text shard too
        with ShardWriter(part, **encoders, samples_per_shard=len(span) + 1, dtype=self._options.output.dtype) as writer:
            for i, latents, info, condition in chain([first], encoded):
                writer.add(self._ids[i], latents, self._captions(i)[0], info, condition)
        return PartContent(skipped=skipped, notes=notes)

    def _encode(self, i: int) -> tuple[Tensor, dict[str, Any], Tensor | None]:
        """Latents, facts and image condition of a file."""
        if i in self._bad:
            raise ValueError(self._bad[i])
        path, codec = self.files[i], self._codec
        with _memory_errors(str(path)):
            clip, info = self._options.clips.cut(path, codec, self._decoder)
            clip = clip.to(self._options.device)
            condition = None
            if isinstance(codec, WanVAE) and self._options.image_condition:
                condition = codec.image_condition(clip)
            latents = codec.encode(clip)
        _, fields = self._captions(i)
        return latents, {"source": self._names[i], **info, **({"fields": fields} if fields else {})}, condition


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

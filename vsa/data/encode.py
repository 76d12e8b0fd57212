"""Encoding of a folder of captioned videos to a folder of latent and text shards.

T H W frames and pixels.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from vsa.data.captioner import MADE, caption_clips, captioner_files
from vsa.data.captions import led_by, read_captions
from vsa.data.clip_plan import ClipPlan, PlannedClip, find_shots, plan_films
from vsa.data.clip_rules import patch_of
from vsa.data.codecs import Codec, EmbeddedCodec, WanVAE
from vsa.data.decoder_process import DecoderPool, DecoderProcess
from vsa.data.encode_errors import OutOfMemory, UnusableFiles, memory_errors, refuse_overlap, unusable
from vsa.data.encode_notes import describe_notes, notes_of, rebuilt_note
from vsa.data.encode_options import EncodeOptions
from vsa.data.growth import new_files, set_to_grow
from vsa.data.index import DatasetIndex
from vsa.data.media_folder import file_version, media_files, sample_ids, version_now
from vsa.data.pretrained_vae import PretrainedVAE
from vsa.data.prompts import tidy
from vsa.data.reconstruction import describe_reconstruction
from vsa.data.resumable_writer import PartContent, PartsReport, check_target, join_parts, pending_parts, write_parts
from vsa.data.shard_writer import ShardWriter
from vsa.data.shots import Film, ShotFinder
from vsa.data.text import TextEncoder, describe_cut
from vsa.progress import progress_bar


def encode_folder(
    videos: str | Path,
    out: str | Path,
    options: EncodeOptions,
    *,
    codec: Codec,
    text_encoder: TextEncoder,
    tell: Callable[[str], None] = print,
    show_plan: Callable[[ClipPlan], None] = lambda plan: None,
) -> PartsReport:
    """Encode every video and image below a folder; images become one-frame latents.

    All captions and the headers of all files are checked before anything is written, and all problems are reported
    together. The shots of films are found first and kept in `out`. Finished parts are kept too (see
    `vsa.data.resumable_writer`), so an interrupted call can be repeated and continues. With several processes, each
    writes its parts, and a last call with a single process joins them.

    Args:
        videos: folder of videos and images, searched with its subfolders.
        out: folder of shards to write.
        options: rules of the clips, limits of the decoder, and settings of the shards.
        codec: codec of the pixels.
        text_encoder: encoder of the captions.
        tell: function called with messages for the user, such as the codec's quality and sizes that do not fit models.
        show_plan: function called with the clips before the first one is encoded.

    Returns:
        Number of samples written so far, skipped files, and whether every part is complete.

    Raises:
        UnusableFiles: videos that do not decode or are too short, captions that are missing or malformed.
        ValueError: no videos, `out` inside of `videos` or the reverse, files or parts of other settings in `out`; one
            line that names the file or the setting.
    """
    folder, out, output = Path(videos), Path(out), options.output
    options.check(codec)
    refuse_overlap(folder, out)
    check_target(out, overwrite=output.overwrite, add=output.add)
    own: dict[str, Any] = {"image_condition": options.image_condition, "fps": options.clips.fps}
    own["image_encoder"] = options.image_encoder(codec)
    grown = set_to_grow(out, codec, text_encoder, **own) if output.add else None
    limits = {"seconds": options.decode_seconds, "memory_gib": options.decode_memory}
    with DecoderPool(options.workers, **limits) as decoders:
        encoding = _Encoding(folder, options, codec, text_encoder, decoders, grown)
        for place in encoding.media.links.values():
            refuse_overlap(place, out)
        if options.captioner and encoding.captions.uncaptioned and not (out / MADE).exists():
            captioner_files(options.captioner, "config.json")
        if options.clips.films:
            encoding.find_films(out)
        elif options.captioner:
            encoding.check(range(len(encoding.files)))
        if options.captioner:
            encoding.write_captions(out, options.captioner)
        share: dict[str, Any] = {"count": len(encoding.plan.clips), "settings": encoding.settings(), "output": output}
        share["versions"] = cache(partial(version_now, folder))
        pending = [i for _, span in pending_parts(out, **share) for i in span]
        if not options.clips.films:
            encoding.check(pending)
        if output.rank == 0:
            show_plan(encoding.plan)
        if output.rank == 0 and pending:
            for line in encoding.describe_ahead():
                tell(line)
        how: dict[str, Any] = {"frames": [clip.frames for clip in encoding.plan.clips], "threads": options.workers}
        report = write_parts(out, encoding.write, **share, **how, title="encoding videos")
    if report.complete and report.samples == 0:
        whole = f"none of the {len(encoding.files)} videos in {folder} decodes"
        raise UnusableFiles(report.skipped, f"{whole}; first: {report.skipped[0][1]}")
    if output.world_size == 1:
        join_parts(out, add=output.add)
        for line in describe_notes(report.notes):
            tell(line)
    left_out = (*encoding.media.ignored, *encoding.captions.unusable, *encoding.left_out, *report.skipped)
    return replace(report, skipped=left_out)


class _Encoding:
    """The files of a folder by number, in the order of the data set, and their encoding.

    Args:
        folder: folder of videos and images.
        options: options of the call.
        codec: codec of the pixels.
        text_encoder: encoder of the captions.
        decoders: readers of the files.
        grown: data set to which they are added.
    """

    def __init__(
        self,
        folder: Path,
        options: EncodeOptions,
        codec: Codec,
        text_encoder: TextEncoder,
        decoders: DecoderPool,
        grown: DatasetIndex | None,
    ):
        self._folder, self._options, self._decoders = folder, options, decoders
        # networks hold state while they encode
        self._encoders = threading.Lock()
        self._codec, self._text_encoder, self._image_encoder = codec, text_encoder, options.image_encoder(codec)
        caption_file = Path(options.captions) if options.captions else None
        self.media = media_files(folder, caption_file)
        self._grown = grown
        self.files = new_files(self.media.files, folder, grown)
        self._names = [path.relative_to(folder).as_posix() for path in self.files]
        self._ids = sample_ids(self._names, plain=grown is None)
        self.plan = ClipPlan(clips=[PlannedClip(i) for i in range(len(self.files))])
        self._finder = ShotFinder(options.clips.shots or "auto", device=options.device)
        # films without a clip, which have no number among the clips
        self.left_out: Sequence[tuple[str, str]] = ()
        self.captions = read_captions(folder, caption_file, self.media.files, trigger=tidy(options.trigger))
        # captions of a captioner by sample id, and reasons by number of the clips for which it found none
        self._made: dict[str, str] = {}
        self._silent: dict[int, str] = {}
        self._versions: dict[Path, str] = {}
        # reasons by number
        missing = self.captions.missing
        later = self.captions.uncaptioned if options.captioner else ()
        self._bad = {i: missing[path] for i, path in enumerate(self.files) if path in missing and path not in later}

    def settings(self) -> dict[str, Any]:
        """Everything that determines the samples, as JSON values."""
        entries = [self._captions(i) for i in range(len(self.plan.clips))]
        names = [self._names[clip.file] for clip in self.plan.clips]
        # without fields, the listing equals that of earlier versions
        listing = "\n".join(
            f"{name}\t{captions or None}" + (f"\t{fields}" if fields else "")
            for name, (captions, fields) in zip(names, entries, strict=True)
        )
        digest = hashlib.sha256(listing.encode("utf-8", "replace")).hexdigest()[:12]
        rules = self._options.clips
        windows = [(self._names[clip.file], *clip.window) for clip in self.plan.clips if clip.window]
        found = hashlib.sha256(json.dumps(windows).encode("utf-8", "replace")).hexdigest()[:12]
        return {
            "videos": f"{len(self.files)} files ({digest})",
            "codec": f"{self._codec.id} ({self._codec.hash})",
            "text_encoder": f"{self._text_encoder.id} ({self._text_encoder.hash})",
            **vars(rules),
            **({"shots": self._finder.by, "windows": f"{len(windows)} clips ({found})"} if rules.films else {}),
            "buckets": [str(bucket) for bucket in rules.buckets],
            "image_condition": self._options.image_condition,
            **({} if (image := self._image_encoder) is None else {"image_encoder": f"{image.id} ({image.hash})"}),
            "dtype": self._options.output.dtype,
            **({} if self._grown is None else {"revision": self._grown.revision + 1}),
        }

    def write_captions(self, out: Path, captioner: str) -> None:
        """Make captions of the clips that have none, and keep them in the folder of shards; raises as `check`."""
        without, clips = set(self.captions.uncaptioned), self.plan.clips
        asked = [i for i, clip in enumerate(clips) if self.files[clip.file] in without and clip.file not in self._bad]
        numbers = {self._ids[i]: i for i in asked}

        def frames(name: str) -> Tensor:
            clip = clips[numbers[name]]
            with self._decoders.one() as decoder:
                return self._options.clips.cut(self.files[clip.file], self._codec, decoder, clip.window)[0]

        alone = self._options.output.world_size == 1
        how: dict[str, Any] = {"device": self._options.device, "alone": alone}
        self._made = caption_clips(out / MADE, list(numbers), frames, captioner, **how)
        silent = [i for name, i in numbers.items() if name not in self._made]
        self._silent = {i: self.captions.missing[self.files[clips[i].file]] for i in silent}
        self._refuse_problems()

    def _captions(self, i: int) -> tuple[list[str], dict[str, str]]:
        """Captions and further fields of a clip by number."""
        path, made = self.files[self.plan.clips[i].file], self._made.get(self._ids[i])
        if made is None:
            return self.captions.of.get(path, []), dict(self.captions.fields.get(path, {}))
        trigger = tidy(self._options.trigger)
        fields = {"captioner": str(self._options.captioner), "trigger": trigger}
        return [led_by(trigger, made)], {name: text for name, text in fields.items() if text}

    def check(self, numbers: Sequence[int]) -> None:
        """Look at the headers of files by number; UnusableFiles if none is usable, or one is not and is not skipped."""
        sizes, lengths = dict[int, tuple[int, int, int]](), dict[int, int]()

        def look(i: int, decoder: DecoderProcess) -> None:
            try:
                # records and pages are in UTF-8
                if self._names[i] != self._names[i].encode(errors="replace").decode():
                    raise ValueError(f"the name of video {self.files[i]} is not UTF-8: rename it")
                if probed := self._options.clips.probe(self.files[i], self._codec, decoder):
                    sizes[i], lengths[i] = probed
            except ValueError as error:
                self._bad.setdefault(i, str(error))
            advance(1)

        with progress_bar("looking at files", len(numbers), transient=True) as advance:
            self._decoders.each(look, numbers)
        clips = [PlannedClip(i, size=None if i in self._bad else sizes.get(i)) for i in range(len(self.files))]
        taken = sum(size[0] for size in sizes.values())
        self.plan = ClipPlan(clips=clips, dropped=self._left_out(), taken=(taken, sum(lengths.values())))
        self._refuse_problems()

    def find_films(self, out: Path) -> None:
        """Find the shots of all films and choose their clips; raises as `check`."""
        self.check(range(len(self.files)))
        good = [i for i in range(len(self.files)) if i not in self._bad]
        found = find_shots(self.files, self._names, out, self._finder, self._decoders, good)
        self._bad |= {i: film for i, film in found.items() if isinstance(film, str)}
        films = {i: film for i, film in sorted(found.items()) if isinstance(film, Film)}
        plan, problems = plan_films(self.files, films, self._options.clips, self._codec, self._finder)
        self._bad |= problems
        self._refuse_problems()
        self.left_out = self._left_out()
        self.plan = replace(plan, dropped=[*self.left_out, *plan.dropped])
        # names that another choice of clips does not change
        named = ((Path(self._names[clip.file]), clip.window) for clip in plan.clips)
        names = [str(p.with_stem(f"{p.stem}-{w.start:06d}")) for p, w in named if w]
        self._ids = sample_ids(names, plain=self._grown is None)

    def _left_out(self) -> list[tuple[str, str]]:
        return [(self._names[i], reason) for i, reason in sorted(self._bad.items())]

    def _refuse_problems(self) -> None:
        silent = [(self._names[self.plan.clips[i].file], reason) for i, reason in self._silent.items()]
        problems = [*self.captions.unusable, *self._left_out(), *silent]
        if len(self._bad) == len(self.files):
            whole = f"none of the {len(self.files)} videos in {self._folder} can be encoded"
            whole += "" if self._options.skip_bad else ", --skip-bad would leave out all"
            raise UnusableFiles(problems, f"{whole}; first: {problems[0][1]}")
        if problems and not self._options.skip_bad:
            raise unusable(problems, self._folder)

    @cached_property
    def _measured(self) -> set[int]:
        """Numbers of the clips that are compared with their reconstruction, ahead and on the page."""
        # that takes a trained codec on a CPU minutes
        slow = isinstance(self._codec, PretrainedVAE) and not self._options.device.startswith("cuda")
        return set() if slow else self.plan.measured(self._bad)

    def describe_ahead(self) -> Iterator[str]:
        """Messages before hours of encoding: what is not read, cut or joined, and the quality of the codec."""
        if known := len(self.media.files) - len(self.files):
            yield f"in the data set already, by their names: {known} files"
        yield from self.media.lines()
        yield from self.captions.lines()
        # clips of a film may share its captions
        said = {
            (clip.file, *self._captions(i)[0]) for i, clip in enumerate(self.plan.clips) if clip.file not in self._bad
        }
        if cut := describe_cut(self._text_encoder, chain(*(captions for _, *captions in sorted(said)))):
            yield cut
        codec, (_, sh, sw), patch = self._codec, self._codec.stride, patch_of(self._codec.id)
        for h, w in self._options.clips.untrainable(codec):
            yield (
                f"clips of {h}x{w} give latents of {h // sh}x{w // sw}, which do not divide into the {patch}x{patch} "
                f"patches of models: choose multiples of {patch * sh}x{patch * sw} with --size or --buckets"
            )

        def measured() -> Iterator[tuple[str, Tensor]]:
            for i in sorted(self._measured):
                clip = self.plan.clips[i]
                path, window, cut = self.files[clip.file], clip.window, self._options.clips.cut
                # a file that does not decode is reported when it is encoded
                with suppress(ValueError), self._decoders.one() as decoder:
                    yield self._names[clip.file], cut(path, codec, decoder, window)[0]

        # a trained codec reconstructs well, and may need more memory for decoding than for encoding
        if isinstance(codec, EmbeddedCodec):
            with memory_errors("the clips"):
                yield from describe_reconstruction(measured(), codec)

    def write(self, part: Path, span: range, advance: Callable[[int], None]) -> PartContent:
        """Encode the clips of a range to a part of the data set."""
        skipped: list[tuple[str, str]] = []
        notes: list[tuple[str, Any]] = []

        def samples(decoder: DecoderProcess) -> Iterator[tuple[int, Tensor, dict[str, Any], dict[str, Tensor]]]:
            for i in span:
                clip = self.plan.clips[i]
                try:
                    pixels, latents, info, images = self._encode(i, decoder)
                except OutOfMemory:
                    raise
                except ValueError as error:
                    if not self._options.skip_bad:
                        raise unusable([(self._names[clip.file], str(error))], self._folder) from error
                    skipped.append((self._names[clip.file], str(error)))
                else:
                    notes.extend(notes_of(self._options.clips, self._codec, info))
                    notes.extend([("times", [self._names[clip.file], decoder.times])] * bool(decoder.times))
                    if i in self._measured:
                        with self._encoders:
                            notes.extend(rebuilt_note(self._ids[i], pixels, latents, self._codec))
                    yield i, latents, info, images
                advance(clip.frames)

        with self._decoders.one() as decoder:
            decoder.announce(self._requests(span))
            encoded = samples(decoder)
            first = next(encoded, None)
            if first is None:
                return PartContent(skipped=skipped)
            encoders: dict[str, Any] = {"codec": self._codec, "text_encoder": self._text_encoder}
            encoders["image_encoder"] = self._image_encoder
            # one more than the samples: the null embedding is in the text shard too
            shards = {"samples_per_shard": len(span) + 1, "dtype": self._options.output.dtype}
            with ShardWriter(part, **encoders, **shards) as writer:
                for i, latents, info, images in chain([first], encoded):
                    with self._encoders:
                        path = self.files[self.plan.clips[i].file]
                        if self._versions.setdefault(path, version := file_version(path)) != version:
                            raise ValueError(f"video {path} was replaced meanwhile: start over with --overwrite")
                        writer.add(self._ids[i], latents, self._captions(i)[0], info, version=version, **images)
        return PartContent(skipped=skipped, notes=notes)

    def _requests(self, span: range) -> list[tuple[Path, int | None, int | None]]:
        """What will be read for the clips of a range."""
        used = (i for i in span if i not in self._silent)
        clips = [clip for clip in map(self.plan.clips.__getitem__, used) if clip.file not in self._bad]
        return [(self.files[clip.file], *self._options.clips.part(clip.window)) for clip in clips]

    def _encode(self, i: int, decoder: DecoderProcess) -> tuple[Tensor, Tensor, dict[str, Any], dict[str, Tensor]]:
        """Pixels, latents, facts and image inputs of a clip."""
        clip = self.plan.clips[i]
        if reason := self._bad.get(clip.file) or self._silent.get(i):
            raise ValueError(reason)
        path, codec, rules = self.files[clip.file], self._codec, self._options.clips
        with memory_errors(str(path)):
            pixels, info = rules.cut(path, codec, decoder, clip.window)
            if clip.window:
                info |= {"start": clip.window.start, "resampled": rules.fps is not None, "shots": self._finder.by}
            with self._encoders:
                pixels = pixels.to(self._options.device)
                images = {}
                if isinstance(codec, WanVAE) and self._options.image_condition:
                    images = codec.image_inputs(pixels)
                latents = codec.encode(pixels)
        _, fields = self._captions(i)
        info = {"source": self._names[clip.file], **info, **({"fields": fields} if fields else {})}
        return pixels, latents, info, images

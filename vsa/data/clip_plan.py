"""The clips that will be taken from a folder, before any is encoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from vsa.data.buckets import Bucket
from vsa.data.clip_rules import ClipRules, Window
from vsa.data.codecs import Codec
from vsa.data.decoder_process import DecoderPool, DecoderProcess
from vsa.data.shots import SHOTS_NAME, Film, ShotFinder, ShotRecord
from vsa.errors import first_of
from vsa.progress import progress_bar

_LISTED = 20
# clips that are compared with their reconstruction, and number of a film's clip, after titles that rebuild too well
_MEASURED, _EARLY = 8, 4


class PlannedClip(NamedTuple):
    """A clip of a file by number: a window of a film, or None for the clip from the start of a video.

    Args:
        file: number of the file.
        window: its frames.
        size: (frames, height, width), None where the header does not tell it.
    """

    file: int
    window: Window | None = None
    size: tuple[int, int, int] | None = None

    @property
    def frames(self) -> int:
        """Number of its frames, 0 where it is not known."""
        return self.size[0] if self.size else 0


@dataclass(frozen=True, kw_only=True)
class ClipPlan:
    """Clips of a folder.

    Args:
        clips: all clips, in the order of the data set.
        shots: how shots were found, None where clips are taken from the start of videos.
        seconds: length of every shot.
        dropped: (what, why) of what is left out.
        taken: frames of the clips and of all videos, where clips are taken from the start.
    """

    clips: Sequence[PlannedClip]
    shots: str | None = None
    seconds: Sequence[float] = ()
    dropped: Sequence[tuple[str, str]] = ()
    taken: tuple[int, int] = (0, 0)

    def lines(self) -> Iterator[str]:
        """The plan for the terminal."""
        if self.shots is not None:
            files = len({clip.file for clip in self.clips})
            yield f"shots: {self.shots}; {len(self.seconds):,} shots, {len(self.clips):,} clips of {files:,} files"
        sizes = Counter(clip.size for clip in self.clips if clip.size)
        for (frames, height, width), count in sizes.most_common(_LISTED):
            yield f"{count:8,d} clip{'s' * (count != 1)} of {Bucket(height, width, frames)} (height x width x frames)"
        if len(sizes) > _LISTED:
            yield f"         and {len(sizes) - _LISTED} more sizes: --size or --buckets makes them fewer"
        taken, frames = self.taken
        if self.shots is None and 2 * taken < frames:
            yield f"only the start of each video is taken, {taken:,} of {frames:,} frames: --clips-per-film takes more"
        yield from first_of([f"dropped: {what}: {why}" for what, why in self.dropped])

    def measured(self, without: Collection[int]) -> set[int]:
        """Numbers of some clips, spread over the files but those `without`, to compare with their reconstruction."""
        numbers = [i for i, clip in enumerate(self.clips) if clip.file not in without]
        files = [[*clips] for _, clips in groupby(numbers, lambda i: self.clips[i].file)]
        # of a film an early clip, before which there is little to decode
        clips = [clips[min(_EARLY, len(clips) - 1)] for clips in files]
        return {clips[k * len(clips) // _MEASURED] for k in range(_MEASURED) if clips}


def plan_films(
    files: Sequence[Path], films: Mapping[int, Film], rules: ClipRules, codec: Codec, finder: ShotFinder
) -> tuple[ClipPlan, dict[int, str]]:
    """Clips of the shots of films, and why a film has none, by number.

    Args:
        files: all files.
        films: films by number.
        rules: rules of the clips.
        codec: codec whose stride applies.
        finder: finder of the shots.
    """
    clips, problems, seconds = list[PlannedClip](), dict[int, str](), list[float]()
    without = over = 0
    for i, film in films.items():
        seconds += [shot.end - shot.begin for shot in film.shots]
        try:
            windows, short = rules.windows(film, files[i], codec)
        except ValueError as error:
            problems[i] = str(error)
            continue
        chosen = rules.chosen(windows)
        clips += [PlannedClip(i, window, window.size) for window in chosen]
        without, over = without + short, over + len(windows) - len(chosen)
    dropped = list[tuple[str, str]]()
    if without:
        dropped.append((f"{without:,} shot{'s' * (without != 1)}", "shorter than a clip"))
    if over:
        dropped.append((f"{over:,} clip{'s' * (over != 1)}", f"more than --clips-per-film {rules.clips_per_film}"))
    plan = ClipPlan(clips=clips, shots=finder.description, seconds=seconds, dropped=dropped)
    return plan, problems


def find_shots(
    files: Sequence[Path],
    names: Sequence[str],
    out: Path,
    finder: ShotFinder,
    decoders: DecoderPool,
    numbers: Sequence[int],
) -> dict[int, Film | str]:
    """The shots of films, or why one does not decode, by number.

    They are kept in `out`, so films that were searched once are not searched again.

    Args:
        files: all files.
        names: their names in the data set.
        out: folder of the data set.
        finder: finder of the shots.
        decoders: readers of the files.
        numbers: numbers of the films.
    """
    record, lengths = ShotRecord(out / SHOTS_NAME, finder.by), dict[int, int]()
    found: dict[int, Film | str] = {}

    def look_up(i: int, decoder: DecoderProcess) -> None:
        film = record.get(names[i], files[i])
        if film is None:
            lengths[i] = decoder.probe_video(files[i])[0] or 0
        else:
            found[i] = film

    def search(i: int, decoder: DecoderProcess) -> None:
        try:
            film = found[i] = finder.find(files[i], decoder, advance)
        except ValueError as error:
            found[i] = str(error)
        else:
            record.add(names[i], files[i], film)

    decoders.each(look_up, numbers)
    with progress_bar("looking for shots", sum(lengths.values()), transient=True, unit="frames") as advance:
        decoders.each(search, sorted(lengths))
    return found

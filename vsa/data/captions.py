"""Captions of a folder of videos, from a caption file of ours or another trainer, or from a file beside each video."""

from __future__ import annotations

import csv
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from vsa.data.prompts import lines_of, tidy
from vsa.data.video_files import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from vsa.files import CSV_LIMIT, LIMIT, parse_json, read_text

# captions a line, beside a list of names
_LINES = ("prompts.txt", "prompt.txt", "caption.txt")
CAPTION_FILES = (
    *(f"captions.{kind}" for kind in ("jsonl", "json", "csv", "txt")),
    *(f"metadata.{kind}" for kind in ("jsonl", "json", "csv")),
    "videos2caption.json",
    *_LINES,
)
LISTINGS = ("videos.txt", "video.txt")
"""Files with a name a line, whose captions are the lines of a text file beside them."""
SIDECARS = (".txt", ".caption", ".json")
"""Suffixes of the files beside a video that hold its captions."""
# keys of entries and columns of tables, those of other trainers included
_NAMES = ("video", "video_path", "file_name", "filename", "media_path", "image", "image_path", "path")
_CAPTIONS = ("captions", "caption", "prompt", "text", "cap", "long_prompt")
# what stands in tables where there is no caption, in any case: pandas writes nan
_VOID = ("", "nan", "none", "null", "n/a", "na", "<na>", "#n/a")
# characters, a hundred times what text encoders keep, which would read all of a longer one
_LONGEST = 100_000
# folders in one another that are looked for
_DEEPEST = 64
# tables, of which only some are read
_READ, _UNREAD = (".jsonl", ".json", ".csv"), (".parquet", ".tsv", ".arrow", ".xlsx", ".yaml", ".yml", ".toml")


@dataclass(frozen=True, kw_only=True)
class Captions:
    """Captions of the media files of a folder, and problems with them.

    Args:
        of: captions by media file, in the order of the files.
        missing: reason why a media file has no caption, by file.
        uncaptioned: those of them for which nothing was given, damaged or not.
        unusable: (place, reason) of entries of the caption file that are malformed or name a missing file.
        fields: further texts and integers of an entry, by name.
        joined: text files beside a video whose lines became one caption.
        moved: file by name in the caption file, where only the end of the name is that of a file.
        void: what was given instead of captions, such as nan.
        repeated: files with several entries.
    """

    of: dict[Path, list[str]] = field(default_factory=dict)
    missing: dict[Path, str] = field(default_factory=dict)
    unusable: list[tuple[str, str]] = field(default_factory=list)
    fields: dict[Path, dict[str, str]] = field(default_factory=dict)
    joined: list[Path] = field(default_factory=list)
    uncaptioned: list[Path] = field(default_factory=list)
    moved: dict[str, Path] = field(default_factory=dict)
    void: list[str] = field(default_factory=list)
    repeated: list[Path] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """What is worth telling about them."""
        words = ", ".join(f"{count} {word or 'empty'}" for word, count in Counter(self.void).most_common())
        uses = Counter(chain(*map(set, self.of.values())))
        joined, moved, shared = self.joined, [*self.moved.items()], [text for text, count in uses.items() if count > 1]
        told: dict[str, list[Any]] = {
            "without a caption: {} files, first {.name}": self.uncaptioned,
            f"cells and texts that are no caption: {words}": self.void,
            "lines joined to one caption: {} text files, first {.name}; a blank line begins another caption": joined,
            "found by the end of their path: {0} names of the caption file, first {1[0]} as {1[1]}": moved,
            "with several entries, each of which gives captions: {} files, first {.name}": self.repeated,
            "the same text for several files: {}, first {!r:.60}": shared,
        }
        for text, found in told.items():
            if found:
                yield text.format(len(found), found[0])


def read_captions(videos: Path, caption_file: Path | None, files: Iterable[Path], *, trigger: str = "") -> Captions:
    """Read the captions of every media file and collect all problems.

    A caption file is one of: `.jsonl`, lines of {"video": "a.mp4", "captions": ["...", ...]} (or "caption": "...");
    `.json`, a list of such objects or an object {"a.mp4": "..." or ["...", ...]}; `.csv`, a table with the columns
    video and caption, separated by commas, semicolons or tabs; `.txt`, lines of name, tab, caption, or lines of
    captions beside a `videos.txt` with the names. The names of keys and columns are those of `_NAMES` and `_CAPTIONS`.
    Further texts and integers of an object and further columns ("film": "...") are kept; a split can use them.

    Names are relative to the folder of videos or to that of the caption file, also with backslashes and in another
    Unicode form; of a longer path, as one of another machine, the longest end that is a file counts. A video `a.mp4`
    without an entry takes the captions of `a.txt`, `a.caption` (lines are joined, and a blank line begins another
    caption) or `a.json` (an entry without a name) beside it.

    Args:
        videos: folder of videos.
        caption_file: caption file (None: `usual_file` of the folder, if any).
        files: the media files that need captions.
        trigger: words put before every caption, and kept as a field.
    """
    files, found = list(files), Captions()
    tables = [caption_file] if caption_file else usual_files(videos, files)
    given = _read_tables(videos, tables, found, typed=caption_file is not None)
    paths = {path.resolve() for table in tables for path in (table, listing(table)) if path}
    for path in files:
        entries = given.get(path.resolve(), [])
        words, others = [*chain(*(captions for captions, _ in entries))], dict(chain(*(f.items() for _, f in entries)))
        found.repeated.extend([path] if len(entries) > 1 else [])
        try:
            if all(map(_is_void, words)) and (beside := sidecar(path)) and beside.resolve() not in paths:
                more, fields, lines = _read_beside(beside, videos, path)
                words, others = [*words, *more], {**fields, **others}
                found.joined.extend([beside] if lines > 1 and sum(not _is_void(text) for text in more) == 1 else [])
            captions = [text for text in words if not _is_void(text)]
            found.void.extend(text for text in words if _is_void(text))
            if not captions:
                # once: a folder may have many without
                clue = "" if found.uncaptioned else _clue(videos, files, paths)
                found.uncaptioned.append(path)
                near = [str(table) for table in tables if caption_file or table.parent in path.parents]
                but = next((f" but {text!r}" for text in words if text), "")
                where = " and ".join([*near, str(path.with_suffix(".txt"))])
                raise ValueError(f"video {path} has no caption{but}: expected one in {where}{clue}")
            if (longest := max(map(len, captions))) > _LONGEST:
                raise ValueError(f"a caption of video {path} has {longest:,} characters, expected at most {_LONGEST:,}")
        except ValueError as error:
            found.missing[path] = str(error)
        else:
            found.of[path] = [led_by(trigger, text) for text in captions]
            if others := {**others, **({"trigger": trigger} if trigger else {})}:
                found.fields[path] = others
    return found


def led_by(trigger: str, caption: str) -> str:
    """A caption that begins with a trigger, if that is not empty."""
    led = caption.startswith(trigger) and not caption[len(trigger) : len(trigger) + 1].isalnum()
    return caption if led or not trigger else f"{trigger} {caption}"


def usual_files(videos: Path, files: Iterable[Path]) -> list[Path]:
    """The first of `CAPTION_FILES` in a folder of videos, and in each folder on the way to its media files.

    Those with lines of captions alone count beside a list of names, and metadata if its beginning names captions.
    """
    usual = (
        [path for name in CAPTION_FILES if _is_of_captions(path := at / name, videos)] for at in _folders(videos, files)
    )
    return [path for paths in usual for path in paths[:1]]


def _folders(videos: Path, files: Iterable[Path]) -> list[Path]:
    parents = {path.parent for path in files}
    return sorted({videos, *(videos / above for path in parents for above in (path / "a").relative_to(videos).parents)})


def _is_of_captions(path: Path, videos: Path) -> bool:
    if path.stem != "metadata" or not path.is_file():
        return path.is_file() and (path.name not in _LINES or listing(path) is not None)
    start = _read(path, videos)[:4096]
    start = start if path.suffix == ".json" else lines_of(start)[0]
    return any(re.search(rf"\b{key}\b", start, re.IGNORECASE) for key in _CAPTIONS)


def listing(caption_file: Path) -> Path | None:
    """The list of names beside a text file of captions; None for other caption files."""
    if caption_file.suffix.lower() != ".txt":
        return None
    return next((path for name in LISTINGS if (path := caption_file.with_name(name)).is_file()), None)


def sidecar(path: Path) -> Path | None:
    """The file of captions beside a media file, `a.txt` of `a.mp4`; None if there is none."""
    names = (path.with_suffix(form).name for suffix in SIDECARS for form in (suffix, suffix.upper()))
    return next((beside for name in names if (beside := spelt(path.parent, name))), None)


def spelt(folder: Path, name: str) -> Path | None:
    """The file of a name in a folder, as it stands or as another system spells it; None if there is none."""
    names = (name, name.replace("\\", "/"))
    forms = (*names, *(unicodedata.normalize(form, names[1]) for form in ("NFC", "NFD")))
    # unlike `Path.is_file` no error of a name that is too long
    return next((folder / form for form in forms if os.path.isfile(folder / form)), None)


def _clue(videos: Path, files: Iterable[Path], read: Collection[Path]) -> str:
    """Files that look as if they had captions, and why they are not read; empty without any."""
    reasons = dict.fromkeys(_UNREAD, "tables end in .jsonl, .json, .csv or .txt")
    reasons |= dict.fromkeys(_READ, "--captions names it")
    reasons |= dict.fromkeys((*_LINES, *LISTINGS), f"{_LINES[0]} and {LISTINGS[0]} belong together")
    reasons |= {f"metadata{suffix}": f"it begins with none of {', '.join(_CAPTIONS)}" for suffix in _READ}
    stems = {path.with_suffix("") for path in files}
    there = (path for folder in _folders(videos, files) for path in sorted(folder.iterdir()))
    there = (path for path in there if path.with_suffix("") not in stems and path.resolve() not in read)
    pairs = ((path, reasons.get(path.name, reasons.get(path.suffix.lower()))) for path in there)
    found = [f"{path} ({reason})" for path, reason in pairs if reason]
    return f"; not read: {', '.join(found[:3])}{', ...' if found[3:] else ''}" if found else ""


def _read_tables(
    videos: Path, tables: Iterable[Path], found: Captions, *, typed: bool
) -> dict[Path, list[tuple[list[str], dict[str, str]]]]:
    """(captions, further fields) of the entries of caption files, by real file; problems are added to `found`."""
    given: dict[Path, list[tuple[list[str], dict[str, str]]]] = {}
    names: dict[Path, str] = {}
    for path, (place, entry) in ((table, entry) for table in tables for entry in _entries(table, videos, typed)):
        # FastVideo has the videos in a folder of their own
        own = (path.parent, path.parent / "videos")
        try:
            name, captions, others = _parse(entry, path, f"caption file {path}, {place}")
            file, moved = _file_of(name, *((videos, *own) if typed else (*own, videos)))
            if file is None:
                raise ValueError(f"caption file {path} names a missing video: {videos / name}")
            key = file.resolve()
            first = names.setdefault(key, name)
            if first != name and (moved or first in found.moved):
                raise ValueError(f"caption file {path} has {first} and {name}, either of which may be {file}")
        except ValueError as error:
            found.unusable.append((f"{path.name if typed else path.relative_to(videos)}, {place}", str(error)))
        else:
            found.moved.update({name: file} if moved else {})
            given.setdefault(key, []).append((captions, others))
    return given


def _file_of(name: str, *folders: Path) -> tuple[Path | None, bool]:
    """The file of a name in one of the folders, and whether only the end of the name is that of the file."""
    if file := next((file for folder in folders if (file := spelt(folder, name))), None):
        return file, False
    parts = re.split(r"[\\/]+", name)
    ends = ("/".join(parts[k:]) for k in range(max(1, len(parts) - _DEEPEST), len(parts)))
    return next((file for end in ends if end for at in folders if (file := spelt(at, end))), None), True


def _read_beside(path: Path, videos: Path, video: Path) -> tuple[list[str], dict[str, str], int]:
    """(captions, further fields, lines of the first caption) of the file beside a video."""
    content = _read(path, videos, video)
    if path.suffix.lower() == ".json":
        entry = parse_json(content, path, object)
        return *_values(entry if isinstance(entry, dict) else {"captions": entry}, f"captions in {path}"), 1
    text = "\n".join(lines_of(content)).strip()
    return [tidy(part) for part in re.split(r"\n\s*\n", text)], {}, text.count("\n") + 1


def _entries(caption_file: Path, videos: Path, typed: bool) -> Iterator[tuple[str, Any]]:
    """(place, entry) for every entry of a caption file: a line of text, or an element of a `.json` file."""
    suffix = caption_file.suffix.lower()
    if suffix not in (*_READ, ".txt"):
        raise ValueError(f"caption file {caption_file} must end in .jsonl, .json, .csv or .txt")
    lines = lines_of(_read(caption_file, None if typed else videos))
    if suffix == ".json":
        content = parse_json("\n".join(lines), f"caption file {caption_file}", object)
        if isinstance(content, dict):
            values = content.items()
            content = [{"video": k, **(v if isinstance(v, dict) else {"captions": v})} for k, v in values]
        if not isinstance(content, list):
            raise ValueError(f"caption file {caption_file} must hold a list or an object")
        yield from ((f"entry {i + 1}", entry) for i, entry in enumerate(content))
    elif suffix == ".csv":
        # Excel separates by semicolons where numbers have a decimal comma
        separator = max(",;\t", key=lines[0].count)
        try:
            for i, entry in enumerate(csv.DictReader([f"{line}\n" for line in lines], delimiter=separator)):
                yield f"row {i + 1}", {name and name.strip().lower(): value for name, value in entry.items()}
        except csv.Error as error:
            raise ValueError(f"caption file {caption_file} is not a table: {error}") from None
    elif names := listing(caption_file):
        listed = [_whole_lines(_read(names, videos)), _whole_lines("\n".join(lines))]
        if len(listed[0]) != len(listed[1]):
            counts = f"{len(listed[0])} names, {caption_file.name} {len(listed[1])} captions"
            raise ValueError(f"{names} has {counts}: expected one caption a line for every name")
        for i, (name, caption) in enumerate(zip(*listed, strict=True)):
            yield f"line {i + 1}", {"video": name.strip(), "caption": caption}
    else:
        yield from ((f"line {i + 1}", line) for i, line in enumerate(lines) if line.strip())


def _whole_lines(text: str) -> list[str]:
    """Lines without empty ones at the end."""
    return lines_of(text.rstrip()) if text.strip() else []


def _parse(entry: Any, caption_file: Path, place: str) -> tuple[str, list[str], dict[str, str]]:
    """(video, captions, other fields) of one entry."""
    suffix = caption_file.suffix.lower()
    if suffix == ".txt" and isinstance(entry, str):
        name, tab, caption = entry.partition("\t")
        if not tab or not caption.strip():
            raise ValueError(f"{place}: expected name, tab, caption")
        return name.strip(), [tidy(caption)], {}
    if suffix == ".jsonl":
        entry = parse_json(entry, place, object)
    named = entry if isinstance(entry, dict) else {}
    name_key = next((key for key in _NAMES if isinstance(named.get(key), str) and named[key]), None)
    if suffix == ".csv" and (None in entry or name_key is None):
        raise ValueError(
            f"{place}: expected columns video and caption, with quotes around a caption that has separators"
        )
    if name_key is None:
        raise ValueError(f'{place}: expected {{"video": "name", "captions": ["...", ...]}}')
    name = entry.pop(name_key)
    return name, *_values(entry, f"{place}: captions of {name}")


def _values(entry: Mapping[str, Any], what: str) -> tuple[list[str], dict[str, str]]:
    """(captions, other fields) of an entry; a caption of `_VOID` is none."""
    given = [key for key in _CAPTIONS if key in entry]
    key = next((key for key in given if not _is_void(entry[key])), (*given, "captions")[0])
    captions = entry.get(key, 0)
    captions = ["" if c is None or c != c else c for c in (captions if isinstance(captions, list) else [captions])]
    if not captions or not all(isinstance(c, str) for c in captions):
        raise ValueError(f"{what} must be one string or a list of strings")
    fields = {tidy(k): tidy(str(v)) for k, v in entry.items() if k != key and type(v) in (str, int)}
    return [*map(tidy, captions)], {k: text for k, text in fields.items() if k and text}


def _is_void(value: Any) -> bool:
    """Whether a value says that there is no caption; the number NaN is what pandas has in an empty cell."""
    return value is None or value != value or (isinstance(value, str) and tidy(value).casefold() in _VOID)


def _read(path: Path, videos: Path | None, video: Path | None = None) -> str:
    """The text of a file with captions.

    Nobody has named it, so a link may not lead to other files of the system: only into the folder of videos, its own
    folder, the store of the hub's cache for that folder, or to the file beside what the link of its video leads to.
    Those two have to be a video and its text by their own names, since a link may call any file so.

    Args:
        path: the file.
        videos: folder of videos; None: the user has named the file.
        video: video beside which it lies; None: it is a table.
    """
    real, inside = path.resolve(), None
    if videos:
        blobs = [at.parents[1] / "blobs" for at in (videos.resolve() / "a").parents if at.parent.name == "snapshots"]
        places = [videos, path.parent, *blobs]
        if video and (film := video.resolve()).stem == real.stem and real.suffix.lower() in SIDECARS:
            places += [film.parent] * (film.suffix.lower() in VIDEO_SUFFIXES + IMAGE_SUFFIXES)
        if (inside := next((place for place in places if real.is_relative_to(place.resolve())), None)) is None:
            advice = "copy it" if video or path.name in LISTINGS else "name it with --captions"
            raise ValueError(f"{path} leads out of {videos} to {real}: {advice}")
    try:
        return read_text(path, limit=LIMIT if video else CSV_LIMIT, inside=inside)
    except OSError as error:
        raise ValueError(f"cannot read caption file {path}: {error}") from error

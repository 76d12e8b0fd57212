"""Captions of a folder of videos, from a caption file of ours or another trainer, or from a file beside each video."""

from __future__ import annotations

import csv
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vsa.data.prompts import lines_of, tidy
from vsa.files import CSV_LIMIT, parse_json, read_text

# captions a line, beside a list of names
_LINES = ("prompts.txt", "prompt.txt", "caption.txt")
CAPTION_FILES = (
    *(f"captions.{kind}" for kind in ("jsonl", "json", "csv", "txt")),
    *(f"metadata.{kind}" for kind in ("jsonl", "json", "csv")),
    *_LINES,
)
LISTINGS = ("videos.txt", "video.txt")
"""Files with a name a line, whose captions are the lines of a text file beside them."""
SIDECARS = (".txt", ".caption", ".json")
"""Suffixes of the files beside a video that hold its captions."""
# keys of entries and columns of tables, those of other trainers included
_NAMES = ("video", "video_path", "file_name", "media_path", "image", "image_path", "path")
_CAPTIONS = ("captions", "caption", "prompt", "text")


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
    """

    of: Mapping[Path, list[str]]
    missing: Mapping[Path, str]
    unusable: Sequence[tuple[str, str]]
    fields: Mapping[Path, Mapping[str, str]]
    joined: Sequence[Path] = ()
    uncaptioned: Sequence[Path] = ()
    moved: Mapping[str, Path] = field(default_factory=dict)


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
    caption_file = caption_file or usual_file(videos)
    given = _CaptionFile(videos, caption_file)
    captions_by_path: dict[Path, list[str]] = {}
    fields: dict[Path, dict[str, str]] = {}
    missing: dict[Path, str] = {}
    joined: list[Path] = []
    uncaptioned: list[Path] = []
    for path in files:
        key = path.resolve()
        captions, others = given.captions.get(key, []), given.fields.get(key, {})
        try:
            if not captions and (beside := sidecar(path)) and beside.resolve() not in given.paths:
                captions, beside_fields, lines = _read_beside(beside)
                others = {**beside_fields, **others}
                joined += [beside] if lines > 1 and len(captions) == 1 else []
            if not captions:
                uncaptioned.append(path)
                where = f"{caption_file} and " if caption_file else ""
                raise ValueError(f"video {path} has no caption: expected one in {where}{path.with_suffix('.txt')}")
        except ValueError as error:
            missing[path] = str(error)
        else:
            captions_by_path[path] = [led_by(trigger, words) for words in captions]
            if others := {**others, **({"trigger": trigger} if trigger else {})}:
                fields[path] = others
    return Captions(
        of=captions_by_path,
        missing=missing,
        unusable=given.unusable,
        fields=fields,
        joined=joined,
        moved=given.moved,
        uncaptioned=uncaptioned,
    )


def led_by(trigger: str, caption: str) -> str:
    """A caption that begins with a trigger, if that is not empty."""
    led = caption.startswith(trigger) and not caption[len(trigger) : len(trigger) + 1].isalnum()
    return caption if led or not trigger else f"{trigger} {caption}"


def usual_file(videos: Path) -> Path | None:
    """The first of `CAPTION_FILES` in a folder; None without one.

    Those with lines of captions alone count beside a list of names, and metadata if its beginning names captions.
    """
    return next((path for name in CAPTION_FILES if (path := videos / name).is_file() and _is_of_captions(path)), None)


def _is_of_captions(path: Path) -> bool:
    if path.stem != "metadata":
        return path.name not in _LINES or listing(path) is not None
    start = _read(path)[:4096]
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


class _CaptionFile:
    """The content of a caption file.

    Args:
        videos: folder of videos.
        path: the file; None: nothing.

    Attributes:
        paths: the file, and the list of names beside it.
        captions, fields: captions and further values by file.
        unusable, moved: see `Captions`.
    """

    def __init__(self, videos: Path, path: Path | None) -> None:
        self.captions: dict[Path, list[str]] = {}
        self.fields: dict[Path, dict[str, str]] = {}
        self.unusable: list[tuple[str, str]] = []
        self.moved: dict[str, Path] = {}
        self.paths = {other.resolve() for other in (path, path and listing(path)) if other is not None}
        names: dict[Path, str] = {}
        if path is None:
            return
        for place, entry in _entries(path):
            try:
                name, captions, others = _parse(entry, path, f"caption file {path}, {place}")
                file, moved = _file_of(name, videos, path.parent)
                if file is None:
                    raise ValueError(f"caption file {path} names a missing video: {videos / name}")
                key = file.resolve()
                first = names.setdefault(key, name)
                if first != name and (moved or first in self.moved):
                    raise ValueError(f"caption file {path} has {first} and {name}, either of which may be {file}")
            except ValueError as error:
                self.unusable.append((f"{path.name}, {place}", str(error)))
            else:
                self.moved.update({name: file} if moved else {})
                self.captions.setdefault(key, []).extend(captions)
                self.fields.setdefault(key, {}).update(others)


def _file_of(name: str, *folders: Path) -> tuple[Path | None, bool]:
    """The file of a name in one of the folders, and whether only the end of the name is that of the file."""
    if file := next((file for folder in folders if (file := spelt(folder, name))), None):
        return file, False
    parts = re.split(r"[\\/]+", name)
    ends = ("/".join(parts[k:]) for k in range(1, len(parts)))
    return next((file for end in ends if end and (file := spelt(folders[0], end))), None), True


def _read_beside(path: Path) -> tuple[list[str], dict[str, str], int]:
    """(captions, further fields, lines of the first caption) of the file beside a video."""
    if path.suffix.lower() == ".json":
        entry = parse_json(_read(path), path, object)
        return *_values(entry if isinstance(entry, dict) else {"captions": entry}, f"captions in {path}"), 1
    text = "\n".join(lines_of(_read(path))).strip()
    captions = [tidy(part) for part in re.split(r"\n\s*\n", text) if tidy(part)]
    return captions, {}, text.count("\n") + 1


def _entries(caption_file: Path) -> Iterator[tuple[str, Any]]:
    """(place, entry) for every entry of a caption file: a line of text, or an element of a `.json` file."""
    lines, suffix = lines_of(_read(caption_file)), caption_file.suffix.lower()
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
        listed = [_whole_lines(_read(path)) for path in (names, caption_file)]
        if len(listed[0]) != len(listed[1]):
            counts = f"{len(listed[0])} names, {caption_file.name} {len(listed[1])} captions"
            raise ValueError(f"{names} has {counts}: expected one caption a line for every name")
        for i, (name, caption) in enumerate(zip(*listed, strict=True)):
            yield f"line {i + 1}", {"video": name.strip(), "caption": caption}
    elif suffix in (".jsonl", ".txt"):
        yield from ((f"line {i + 1}", line) for i, line in enumerate(lines) if line.strip())
    else:
        raise ValueError(f"caption file {caption_file} must end in .jsonl, .json, .csv or .txt")


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
    """(captions, other fields) of an entry."""
    key = next((key for key in _CAPTIONS if entry.get(key) is not None), "captions")
    captions = entry.get(key)
    captions = [captions] if isinstance(captions, str) else captions
    if not isinstance(captions, list) or not captions or not all(isinstance(c, str) for c in captions):
        raise ValueError(f"{what} must be one string or a list of strings")
    fields = {tidy(k): tidy(str(v)) for k, v in entry.items() if k != key and type(v) in (str, int)}
    return [words for words in map(tidy, captions) if words], {k: text for k, text in fields.items() if k and text}


def _read(path: Path) -> str:
    try:
        return read_text(path, limit=CSV_LIMIT)
    except OSError as error:
        raise ValueError(f"cannot read caption file {path}: {error}") from error

"""Captions of a folder of videos, from one caption file or from a text file beside each video."""

from __future__ import annotations

import csv
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vsa.data.prompts import lines_of, tidy
from vsa.files import CSV_LIMIT, parse_json, read_text

CAPTION_FILES = ("captions.jsonl", "captions.json", "captions.csv", "captions.txt")


@dataclass(frozen=True, kw_only=True)
class Captions:
    """Captions of the media files of a folder, and problems with them.

    Args:
        of: captions by media file, in the order of the files.
        missing: reason why a media file has no caption, by file.
        unusable: (place, reason) of entries of the caption file that are malformed or name a missing file.
        fields: further texts and integers of an entry, by name.
        joined: text files beside a video whose lines became one caption.
    """

    of: Mapping[Path, list[str]]
    missing: Mapping[Path, str]
    unusable: Sequence[tuple[str, str]]
    fields: Mapping[Path, Mapping[str, str]]
    joined: Sequence[Path] = ()


def read_captions(videos: Path, caption_file: Path | None, files: Iterable[Path]) -> Captions:
    """Read the captions of every media file and collect all problems.

    A caption file is one of: `.jsonl`, lines of {"video": "a.mp4", "captions": ["...", ...]} (or "caption": "...");
    `.json`, a list of such objects or an object {"a.mp4": "..." or ["...", ...]}; `.csv`, a table with the columns
    video and caption, separated by commas, semicolons or tabs; `.txt`, lines of name, tab, caption. Further texts and
    integers of an object and further columns ("film": "...") are kept; a split can use them. Names are relative to the
    folder of videos, also with backslashes and in another Unicode form. A video `a.mp4` without an entry takes the
    caption of `a.txt` beside it: its lines are joined, and a blank line begins another caption.

    Args:
        videos: folder of videos.
        caption_file: caption file (None: the first of `CAPTION_FILES` in the folder when there is one).
        files: the media files that need captions.
    """
    if caption_file is None:
        caption_file = next((videos / name for name in CAPTION_FILES if (videos / name).is_file()), None)
    file_captions: dict[Path, list[str]] = {}
    fields: dict[Path, dict[str, str]] = {}
    unusable: list[tuple[str, str]] = []
    if caption_file is not None:
        for place, entry in _entries(caption_file):
            try:
                name, captions, others = _parse(entry, caption_file, f"caption file {caption_file}, {place}")
                path = spelt(videos, name)
                if path is None:
                    raise ValueError(f"caption file {caption_file} names a missing video: {videos / name}")
            except ValueError as error:
                unusable.append((f"{caption_file.name}, {place}", str(error)))
            else:
                file_captions.setdefault(path.resolve(), []).extend(captions)
                fields.setdefault(path.resolve(), {}).update(others)

    captions_by_path: dict[Path, list[str]] = {}
    missing: dict[Path, str] = {}
    joined: list[Path] = []
    for path in files:
        beside = sidecar(path)
        captions = file_captions.get(path.resolve(), [])
        try:
            if not captions and beside and (caption_file is None or beside.resolve() != caption_file.resolve()):
                text = "\n".join(lines_of(_read(beside))).strip()
                captions = [tidy(part) for part in re.split(r"\n\s*\n", text) if tidy(part)]
                joined += [beside] if len(captions) == 1 and "\n" in text else []
            if not captions:
                where = f"{caption_file} and " if caption_file else ""
                raise ValueError(f"video {path} has no caption: expected one in {where}{path.with_suffix('.txt')}")
        except ValueError as error:
            missing[path] = str(error)
        else:
            captions_by_path[path] = captions
    fields_by_path = {path: fields[path.resolve()] for path in captions_by_path if fields.get(path.resolve())}
    return Captions(of=captions_by_path, missing=missing, unusable=unusable, fields=fields_by_path, joined=joined)


def sidecar(path: Path) -> Path | None:
    """The text file beside a media file, `a.txt` of `a.mp4`; None if there is none."""
    return spelt(path.parent, path.with_suffix(".txt").name) or spelt(path.parent, path.with_suffix(".TXT").name)


def spelt(folder: Path, name: str) -> Path | None:
    """The file of a name in a folder, as it stands or as another system spells it; None if there is none."""
    names = (name, name.replace("\\", "/"))
    forms = (*names, *(unicodedata.normalize(form, names[1]) for form in ("NFC", "NFD")))
    # unlike `Path.is_file` no error of a name that is too long
    return next((folder / form for form in forms if os.path.isfile(folder / form)), None)


def _entries(caption_file: Path) -> Iterator[tuple[str, Any]]:
    """(place, entry) for every entry of a caption file: a line of text, or an element of a `.json` file."""
    lines, suffix = lines_of(_read(caption_file)), caption_file.suffix.lower()
    if suffix == ".json":
        content = parse_json("\n".join(lines), f"caption file {caption_file}", object)
        if isinstance(content, dict):
            content = [{"video": name, "captions": captions} for name, captions in content.items()]
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
    elif suffix in (".jsonl", ".txt"):
        yield from ((f"line {i + 1}", line) for i, line in enumerate(lines) if line.strip())
    else:
        raise ValueError(f"caption file {caption_file} must end in .jsonl, .json, .csv or .txt")


def _parse(entry: Any, caption_file: Path, place: str) -> tuple[str, list[str], dict[str, str]]:
    """(video, captions, other fields) of one entry."""
    if caption_file.suffix.lower() == ".txt":
        name, tab, caption = entry.partition("\t")
        if not tab or not caption.strip():
            raise ValueError(f"{place}: expected name, tab, caption")
        return name.strip(), [tidy(caption)], {}
    if caption_file.suffix.lower() == ".jsonl":
        entry = parse_json(entry, place, object)
    if caption_file.suffix.lower() == ".csv" and (None in entry or "video" not in entry):
        raise ValueError(
            f"{place}: expected columns video and caption, with quotes around a caption that has separators"
        )
    if not isinstance(entry, dict) or not isinstance(entry.get("video"), str):
        raise ValueError(f'{place}: expected {{"video": "name", "captions": ["...", ...]}}')
    captions = entry.get("captions", entry.get("caption"))
    captions = [captions] if isinstance(captions, str) else captions
    if not isinstance(captions, list) or not captions or not all(isinstance(c, str) for c in captions):
        raise ValueError(f"{place}: captions of {entry['video']} must be one string or a list of strings")
    own = ("video", "caption", "captions")
    fields = {tidy(k): tidy(str(v)) for k, v in entry.items() if k not in own and type(v) in (str, int)}
    fields = {k: text for k, text in fields.items() if k and text}
    return entry["video"], [words for words in map(tidy, captions) if words], fields


def _read(path: Path) -> str:
    try:
        return read_text(path, limit=CSV_LIMIT)
    except OSError as error:
        raise ValueError(f"cannot read caption file {path}: {error}") from error

"""Captions of a folder of videos: one caption file, or a text file beside each video."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

CAPTION_FILES = ("captions.jsonl", "captions.json", "captions.txt")


def read_captions(videos: Path, caption_file: Path | None, files: Iterable[Path]) -> dict[Path, list[str]]:
    """The captions of every media file.

    A caption file is one of: `.jsonl`, lines of {"video": "a.mp4", "captions": ["...", ...]} (or "caption": "...");
    `.json`, a list of such objects or an object {"a.mp4": "..." or ["...", ...]}; `.txt`, lines of name, tab, caption.
    Names are relative to the folder of videos. A file that it leaves out takes the lines of `a.txt` beside `a.mp4`.

    Args:
        videos: folder of videos.
        caption_file: caption file (None: `captions.jsonl`, `.json` or `.txt` in the folder when there is one).
        files: the media files that need captions.

    Returns:
        captions by media file, in the order of `files`.

    Raises:
        ValueError: a malformed caption file, one that names a missing video, or a video without caption.
    """
    if caption_file is None:
        caption_file = next((videos / name for name in CAPTION_FILES if (videos / name).is_file()), None)
    listed: dict[Path, list[str]] = {}
    if caption_file is not None:
        for name, captions in _entries(caption_file):
            path = videos / name
            if not path.is_file():
                raise ValueError(f"caption file {caption_file} names a missing video: {path}")
            listed.setdefault(path.resolve(), []).extend(captions)

    found: dict[Path, list[str]] = {}
    for path in files:
        beside = path.with_suffix(".txt")
        captions = listed.get(path.resolve(), [])
        if not captions and beside.is_file() and (caption_file is None or beside.resolve() != caption_file.resolve()):
            captions = [line.strip() for line in _read(beside).splitlines() if line.strip()]
        if not captions:
            where = f"{caption_file} and " if caption_file else ""
            raise ValueError(f"no caption for video {path}: looked in {where}{beside}")
        found[path] = captions
    return found


def _entries(caption_file: Path) -> Iterator[tuple[str, list[str]]]:
    text = _read(caption_file)
    if caption_file.suffix == ".json":
        content = _json(text, str(caption_file))
        if isinstance(content, dict):
            content = [{"video": name, "captions": captions} for name, captions in content.items()]
        if not isinstance(content, list):
            raise ValueError(f"caption file {caption_file} must hold a list or an object")
        for i, entry in enumerate(content):
            yield _entry(entry, f"caption file {caption_file}, entry {i + 1}")
        return
    for i, line in enumerate(text.splitlines()):
        place = f"caption file {caption_file}, line {i + 1}"
        if not line.strip():
            continue
        if caption_file.suffix == ".jsonl":
            yield _entry(_json(line, place), place)
        elif caption_file.suffix == ".txt":
            name, tab, caption = line.partition("\t")
            if not tab or not caption.strip():
                raise ValueError(f"{place}: expected name, tab, caption")
            yield name.strip(), [caption.strip()]
        else:
            raise ValueError(f"caption file {caption_file} must end in .jsonl, .json or .txt")


def _entry(entry: Any, place: str) -> tuple[str, list[str]]:
    if not isinstance(entry, dict) or not isinstance(entry.get("video"), str):
        raise ValueError(f'{place}: expected {{"video": "name", "captions": ["...", ...]}}')
    captions = entry.get("captions", entry.get("caption"))
    captions = [captions] if isinstance(captions, str) else captions
    if not isinstance(captions, list) or not captions or not all(isinstance(c, str) for c in captions):
        raise ValueError(f"{place}: captions of {entry['video']} must be one string or a list of strings")
    return entry["video"], captions


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read caption file {path}: {error}") from error


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place}: not JSON ({error})") from error

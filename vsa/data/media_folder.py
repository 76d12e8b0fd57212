"""The media files of a folder, and what else lies in it."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vsa.data.captions import SIDECARS, listing, usual_file
from vsa.data.video_files import IMAGE_SUFFIXES, VIDEO_SUFFIXES

# what systems leave in folders, and their files for the resources of another file
_SYSTEM_FILES = ("thumbs.db", "desktop.ini", "ehthumbs.db", ".ds_store", ".nomedia")
_RESOURCES = "._"
_LISTED = 3


class MediaFolder(NamedTuple):
    """Files of a folder and its subfolders.

    Args:
        files: every video and image.
        ignored: (name, reason) of entries that only have such a name.
        unread: other files by suffix, without captions and what systems leave in folders.
    """

    files: Sequence[Path]
    ignored: Sequence[tuple[str, str]]
    unread: Mapping[str, Sequence[str]]

    def describe_unread(self) -> str:
        """Number and names of the other files; empty without any."""
        return ", ".join(
            f"{len(names)} {suffix or 'without a suffix'} ({', '.join(names[:_LISTED])}"
            f"{', ...' if len(names) > _LISTED else ''})"
            for suffix, names in self.unread.items()
        )


def media_files(folder: Path, caption_file: Path | None = None) -> MediaFolder:
    """Look through a folder; ValueError without a video or image.

    Args:
        folder: folder of videos and images, searched with its subfolders.
        caption_file: file of captions; None: the one with a usual name, if any.
    """
    if not folder.is_dir():
        raise ValueError(f"no such folder of videos: {folder}")
    paths = sorted(path for path in folder.rglob("*") if not path.name.startswith(_RESOURCES))
    named = {path for path in paths if path.suffix.lower() in VIDEO_SUFFIXES + IMAGE_SUFFIXES}
    files = [path for path in paths if path in named and path.is_file()]
    caption_file = caption_file or usual_file(folder)
    captions = {caption_file, caption_file and listing(caption_file)}
    stems = {_stem(path) for path in files}
    unread: dict[str, list[str]] = {}
    for path in paths:
        is_caption = path in captions or (path.suffix.lower() in SIDECARS and _stem(path) in stems)
        if path not in named and not is_caption and path.name.lower() not in _SYSTEM_FILES and path.is_file():
            unread.setdefault(path.suffix.lower(), []).append(path.relative_to(folder).as_posix())
    ignored = [
        (path.relative_to(folder).as_posix(), _kind(path)) for path in paths if path in named and not path.is_file()
    ]
    found = MediaFolder(files, ignored, dict(sorted(unread.items(), key=lambda item: -len(item[1]))))
    if not files:
        others = f", it has {found.describe_unread()}" if unread else ""
        raise ValueError(
            f"no videos in {folder}{others} (looked for {' '.join(VIDEO_SUFFIXES + IMAGE_SUFFIXES)}; "
            "HEIC pictures must be converted)"
        )
    return found


def sample_ids(names: Sequence[str], *, plain: bool = True) -> list[str]:
    """A sample id for every relative file name: its stem where that is unique and plain, else with a digest.

    Args:
        names: relative POSIX paths, each different.
        plain: whether there are ids without a digest, which a set that these are added to might have.

    Returns:
        ids in the same order; a pure function of the list.
    """
    stems = [name.rpartition(".")[0] or name for name in names]
    keys = [re.sub(r"[^A-Za-z0-9_-]+", "_", stem) for stem in stems]
    # compared without case: ids may become file names on systems that ignore it
    uses = Counter(key.lower() for key in keys)
    ids = []
    for name, stem, key in zip(names, stems, keys, strict=True):
        if not plain or key != stem or uses[key.lower()] > 1 or len(key) > 64 or key.startswith("__"):
            digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
            key = f"{key.lstrip('_')[:60]}-{digest}"
        ids.append(key)
    return ids


def _kind(path: Path) -> str:
    if path.is_dir():
        return "it is a folder"
    return "it is no regular file" if path.exists() else "it is a link to a missing file or to itself"


def _stem(path: Path) -> str:
    return unicodedata.normalize("NFC", str(path.with_suffix("")))

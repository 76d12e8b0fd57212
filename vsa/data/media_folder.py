"""The media files of a folder, and what else lies in it."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vsa.data.captions import SIDECARS, listing, usual_files
from vsa.data.video_files import IMAGE_SUFFIXES, VIDEO_SUFFIXES

# hidden, unfinished or a copy of an editor, or left by a system: Windows, macOS, Linux, and stores in the network
_LEFT_OUT = re.compile(
    r"(?i)\..*|.*~|.*\.(part|partial|crdownload|download|aria2|!qb)|thumbs\.db|ehthumbs\.db|desktop\.ini|\$recycle\.bin|"
    r"recycler|system volume information|found\.\d{3}|__macosx|network trash folder|temporary items|lost\+found|"
    r"@eadir|@tmp|@recycle|@recently-snapshot|#recycle|#snapshot"
)
_LISTED = 3
# ends of a file whose bytes tell whether it is the same one
_COMPARED = 1 << 20


@dataclass(kw_only=True)
class MediaFolder:
    """Files of a folder and its subfolders.

    Args:
        files: every video and image.
        ignored: (name, reason) of entries that only have such a name, and of folders that are not searched.
        unread: other files by suffix, without captions and what is left out.
        left_out: names of what is hidden, unfinished or of a system.
        links: what linked folders, which are searched, and linked files outside of the folder lead to, by name.
        folders: the real folders that were searched.
    """

    files: list[Path] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)
    unread: dict[str, list[str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    links: dict[str, Path] = field(default_factory=dict)
    folders: set[Path] = field(default_factory=set)

    def lines(self) -> Iterator[str]:
        """What is worth telling about them."""
        if len(self.folders) > 1:
            yield f"searched: {len(self.folders)} folders with {len(self.files)} videos and images"
        for told, names in (
            ("links to other places, followed", [f"{name} to {real}" for name, real in self.links.items()]),
            ("hidden, unfinished or of a system, left out", self.left_out),
            ("passed over", [f"{name}: {reason}" for name, reason in self.ignored]),
            ("equal files", [f"{path.name} and {earlier.name}" for path, earlier in self._equal()]),
        ):
            if names:
                yield f"{told}: {len(names)} ({_few(names)})"
        if unread := self.describe_unread():
            yield f"neither videos nor images, not read: {unread}"

    def _equal(self) -> Iterator[tuple[Path, Path]]:
        """Files that equal an earlier one, which comes second."""
        sizes = {path: path.stat().st_size for path in self.files}
        uses, first = Counter(sizes.values()), dict[str, Path]()
        for path, size in sizes.items():
            # files that are alone with their size need no reading
            if size and uses[size] > 1 and (earlier := first.setdefault(file_version(path), path)) != path:
                yield path, earlier

    def describe_unread(self) -> str:
        """Number and names of the other files; empty without any."""
        kinds = sorted(self.unread.items(), key=lambda item: -len(item[1]))
        return ", ".join(f"{len(names)} {suffix or 'without a suffix'} ({_few(names)})" for suffix, names in kinds)


def media_files(folder: Path, caption_file: Path | None = None) -> MediaFolder:
    """Look through a folder; ValueError without a video or image.

    Linked folders are searched too, once, unless they lead back; so are all others, but those that are hidden or of a
    system.

    Args:
        folder: folder of videos and images, searched with its subfolders.
        caption_file: file of captions; None: those with a usual name, if any.
    """
    if not folder.is_dir():
        raise ValueError(f"no such folder of videos: {folder}")
    found = MediaFolder()
    paths = _search(folder, found)
    named = {path for path in paths if path.suffix.lower() in VIDEO_SUFFIXES + IMAGE_SUFFIXES}
    found.files += [path for path in paths if path in named and path.is_file()]
    tables = [caption_file] if caption_file else usual_files(folder, found.files)
    captions = {*tables, *map(listing, tables)}
    stems = {_stem(path) for path in found.files}
    for path in paths:
        name = path.relative_to(folder).as_posix()
        is_caption = path in captions or (path.suffix.lower() in SIDECARS and _stem(path) in stems)
        if path.is_file():
            if path not in named and not is_caption:
                found.unread.setdefault(path.suffix.lower(), []).append(name)
            elif path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
                found.links[name] = path.resolve()
        elif path in named or not path.exists():
            found.ignored.append((name, _kind(path)))
    if not found.files:
        others = f", it has {found.describe_unread()}" if found.unread else ""
        others += f", left out are {_few(found.left_out)}" if found.left_out else ""
        raise ValueError(
            f"no videos in {folder}{others} (looked for {' '.join(VIDEO_SUFFIXES + IMAGE_SUFFIXES)}; "
            "HEIC pictures must be converted)"
        )
    return found


def _search(folder: Path, found: MediaFolder) -> list[Path]:
    """Everything in a folder but what is left out, which is noted, as are linked folders."""
    paths, root, tops = list[Path](), folder.resolve(), [folder]
    # a linked folder is appended, so that it never takes the place of a real one
    for top in tops:
        name, real = top.relative_to(folder).as_posix(), top.resolve()
        if real in found.folders or real in root.parents:
            found.ignored.append((name, f"it leads to {real}, which is searched already or holds what is"))
            continue
        found.links |= {} if top == folder else {name: real}
        for at, folders, files in os.walk(top, onerror=lambda e: found.ignored.append((e.filename, str(e)))):
            here, place = Path(at), real / Path(at).relative_to(top)
            found.folders.add(place)
            out = {entry for entry in (*folders, *files) if _LEFT_OUT.fullmatch(entry)}
            found.left_out += [(here / entry).relative_to(folder).as_posix() for entry in sorted(out)]
            paths += map(here.joinpath, {*folders, *files} - out)
            # os.walk enters those that stay in the list
            kept = sorted({*folders} - out)
            tops += [here / entry for entry in kept if os.path.islink(here / entry) or place / entry in found.folders]
            folders[:] = [entry for entry in kept if place / entry not in found.folders]
    return sorted(paths)


def file_version(path: Path) -> str:
    """Digest of the size and of the first and the last million bytes of a file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        digest = hashlib.sha256(f"{size} ".encode() + file.read(_COMPARED))
        file.seek(max(0, size - _COMPARED))
        digest.update(file.read(_COMPARED))
    return digest.hexdigest()


def version_now(folder: Path, name: str) -> str | None:
    """`file_version` of a file of a folder by name; None if it is not there."""
    return file_version(folder / name) if (folder / name).is_file() else None


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


def _few(names: Sequence[str]) -> str:
    return ", ".join([*names[:_LISTED], *(["..."] if len(names) > _LISTED else [])])


def _stem(path: Path) -> str:
    return unicodedata.normalize("NFC", str(path.with_suffix("")))

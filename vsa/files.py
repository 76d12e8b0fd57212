"""Atomic writes: a file or folder gets its final name only when it is complete; errors of a full disk. Bounded reads of
text, JSON, YAML and CSV, whose errors name the file."""

from __future__ import annotations

import codecs
import csv
import functools
import hashlib
import io
import json
import os
import re
import secrets
import shlex
import shutil
import stat
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from vsa.errors import NO_ROOM
from vsa.settings import describe, fits

LIMIT, CSV_LIMIT, YAML_LIMIT = 1 << 26, 1 << 30, 1 << 23
"""Most bytes of a text or JSON file, a table and a YAML file, far above those of real ones."""

MAX_DEPTH, MAX_DIGITS = 64, 40
"""Most levels of a JSON file and most digits of its integers."""

MAX_VALUES, MAX_LEVELS = 100_000, 30
"""Most values and levels of a YAML file, with every alias expanded."""


class DiskFullError(OSError):
    """The disk is full; `strerror` is the complete message."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def writing(path: Path, temporary: Path | None = None, *, needed: int | None = None) -> Iterator[None]:
    """Add the path to an OSError of a write in the block, which Python's message does not contain.

    Args:
        path: final path of the file or folder.
        temporary: path that is written to until then.
        needed: total bytes, None if unknown.

    Raises:
        DiskFullError: the disk is full; the message gives the needed, written and free bytes.
    """
    try:
        yield
    except DiskFullError as error:
        # of a part of what is written
        error.strerror = str(error).replace(str(temporary or path), str(path))
        raise
    except Exception as error:
        number = _errno(error)
        if number in NO_ROOM:
            raise DiskFullError(number, _message(number, path, temporary or path, needed), str(path)) from error
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def _errno(error: Exception) -> int | None:
    """The number of the system call that failed, which safetensors and `shutil.copytree` have in their text alone."""
    match = re.search(r"(?:\[Errno |\(os error )(\d+)[])]", str(error))
    return getattr(error, "errno", None) or (int(match[1]) if match else None)


def _message(number: int, path: Path, temporary: Path, needed: int | None) -> str:
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    parts = [] if needed is None else [f"{_size(needed)} needed"]
    parts += [f"{_size(_bytes(temporary))} written", f"{_size(shutil.disk_usage(nearest).free)} free"]
    # the text of the error itself may contain the temporary name
    return f"cannot write {path}: {os.strerror(number)} ({', '.join(parts)})"


def _bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; it is renamed to `path` when the block ends without an error.

    The temporary file is in the same folder, hence on the same file system, so that one rename completes the write; the
    file is flushed to the disk before it and the folder after it. On an error the temporary file is removed and `path`
    does not change.

    Args:
        path: the final path; its folder is created if missing.

    Raises:
        DiskFullError: the disk is full; the message gives `path`, the written and the free bytes.
    """
    path = Path(path)
    # keeps the suffix, because some writers choose the format by it
    temporary = path.parent / f".tmp-{_here()}{os.getpid():06x}{secrets.token_hex(3)}{path.suffix}"
    try:
        with writing(path, temporary):
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(path.parent)
            yield temporary
            flush_to_disk(temporary)
            os.replace(temporary, path)
            flush_to_disk(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@functools.cache
def _here() -> str:
    """Four digits of the machine and of the namespace in which a process id holds."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{os.uname().nodename} {namespace}".encode()).hexdigest()[:4]


def _remove_abandoned(folder: Path) -> None:
    """Remove temporary files of `atomic_file` whose process was killed here."""
    for path in folder.glob(f".tmp-{_here()}*"):
        with suppress(OSError, ValueError):
            try:
                os.kill(int(path.name[9:15], 16), 0)
            except ProcessLookupError:
                path.unlink()


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write text or bytes to a file, atomically as in `atomic_file`."""
    with atomic_file(path) as temporary:
        # a surrogate, which JSON can hold, is no letter
        temporary.write_bytes(content.encode(errors="replace") if isinstance(content, str) else content)


@contextmanager
def atomic_folder(path: Path, *, needed: int | None = None, replace: bool = False) -> Iterator[Path]:
    """A temporary folder beside `path` to write into; it is renamed to `path` when the block ends without an error.

    All files and folders in it are flushed to the disk before the rename, and the parent folder after it. On an error
    the temporary folder is removed and `path` does not change.

    Args:
        path: the final path; its parent folders are created if missing.
        needed: total bytes, None if unknown.
        replace: whether an existing folder `path` is removed right before the rename.

    Raises:
        DiskFullError: the disk is full; the message gives `path`, the written and the free bytes.
    """
    temporary = temporary_folder(path)
    try:
        with writing(path, temporary, needed=needed):
            # may be left over from a killed write
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            for inside in (*sorted(temporary.rglob("*")), temporary):
                flush_to_disk(inside)
            if replace and path.exists():
                remove_folder(path)
            os.replace(temporary, path)
            flush_to_disk(path.parent)
    except BaseException:
        # frees the space that a full disk needs
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def temporary_folder(path: Path) -> Path:
    """The temporary folder of `atomic_folder` for `path`."""
    return path.with_name(f".writing-{path.name}")


def remove_folder(path: Path) -> None:
    """Delete a folder; it is renamed first, so that an interruption leaves no partial folder under its name."""
    doomed = path.with_name(f".removing-{path.name}")
    os.replace(path, doomed)
    shutil.rmtree(doomed)


def file_digest(path: Path) -> str:
    """SHA-256 of the bytes of a file, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_to_disk(path: Path) -> None:
    """Flush a file or a folder to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: str | Path, *, inside: Path | None = None) -> io.BufferedReader:
    """Open a regular file for reading, without ever waiting for its other end.

    Args:
        path: the file; links are followed.
        inside: folder in which the file must lie after all links are followed.

    Raises:
        ValueError: a folder, pipe, socket or device, or a file outside of `inside`.
        OSError: the file is missing or not readable.
    """
    real = os.path.realpath(path)
    if inside is not None and not Path(real).is_relative_to(os.path.realpath(inside)):
        raise ValueError(f"{path} leads out of {inside} to {real}")
    # opening a pipe would wait for its writer; what links led to may not be replaced by a link in the meantime
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (os.O_NOFOLLOW if inside else 0)
    descriptor = os.open(real if inside else path, flags)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise ValueError(f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'a pipe or device'}, expected a file")


def own_folder(path: Path) -> Path:
    """A folder that a command writes to by itself; ValueError if it is a link, to a place that nobody named."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link to {os.readlink(path)}: remove it, or name another folder with --out")
    return path


def is_regular(path: Path, *, inside: Path) -> bool:
    """Whether `open_regular` opens a path that lies in a folder."""
    return path.is_file() and path.resolve().is_relative_to(inside.resolve())


def read_bytes(path: str | Path, *, limit: int = LIMIT, inside: Path | None = None) -> bytes:
    """The content of a regular file of at most `limit` bytes; errors as in `open_regular`."""
    with open_regular(path, inside=inside) as file:
        if os.fstat(file.fileno()).st_size <= limit and len(content := file.read(limit + 1)) <= limit:
            return content
    raise ValueError(f"{path} has more than {_size(limit)}")


def read_text(path: str | Path, *, limit: int = LIMIT, inside: Path | None = None, growing: bool = False) -> str:
    """The text of a file as in `read_bytes`, without a byte order mark and with `\\n` as end of lines.

    UTF-8, or UTF-16 with a byte order mark, as Windows writes it. Of a `growing` file, to which lines are added, the
    end that a kill or a power cut left is no part: a cut line, and NUL bytes.
    """
    return _text(read_bytes(path, limit=limit, inside=inside), path, growing=growing)


def _text(content: bytes, name: object, *, growing: bool = False) -> str:
    # Windows writes UTF-16 with a byte order mark
    marked = content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) and len(content) > 2
    if growing and not marked:
        content = content[: content.rstrip(b"\0").rfind(b"\n") + 1]
    encoding = "utf-16" if marked else "utf-8-sig"
    try:
        text = content.decode(encoding).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text in UTF-8: {error.reason} at byte {error.start}") from None
    if "\0" in text:
        raise ValueError(f"{name} is damaged: it contains NUL bytes")
    return text


def parse_json(text: str | bytes, name: object, kind: Any = dict) -> Any:
    """The value of a JSON text.

    Args:
        text: the text.
        name: name in errors, such as the path of its file.
        kind: its expected type; see `check_kind`.

    Raises:
        ValueError: the text is no JSON, too deep, or its values are of another type.
    """
    text = _text(text, name) if isinstance(text, bytes) else text
    try:
        value = json.loads(text, parse_int=_integer, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"{name} is nested more than {MAX_DEPTH} levels deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} does not parse: {error}") from None
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    # a text that the parser takes may still be too deep for those who write it again
    level, depth = [value] if type(value) in (dict, list) else [], 0
    while level:
        level = [x for y in level for x in (y.values() if type(y) is dict else y) if type(x) in (dict, list)]
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"{name} is nested more than {MAX_DEPTH} levels deep")
    check_kind(value, kind, name)
    return value


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"has an integer of {len(digits)} digits")
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"has the key {shown(name)} twice")
    return value


def read_json(path: str | Path, *, kind: Any = dict, limit: int = LIMIT, inside: Path | None = None) -> Any:
    """The value in a JSON file; arguments and errors as in `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, limit=limit, inside=inside), path, kind)


def check_kind(value: Any, kind: Any, name: object, key: str = "") -> None:
    """Refuse a value of another type than expected.

    Args:
        value: a parsed value.
        kind: an annotation as in `vsa.settings`, `[kind]` for a list of such items, or a dict with the kind of each
            key, in which `str` as key stands for all keys and a `?` at the end marks a key that may be missing.
        name: name of the value's file in errors.
        key: the value's place in it.

    Raises:
        ValueError: names file, key and value.
    """
    outer: Any = type(kind) if isinstance(kind, (dict, list)) else kind
    if not fits(value, outer):
        expected = {dict: "an object", list: "a list"}.get(outer) or describe(outer)
        raise ValueError(f"{name} {f'has {key}=' if key else 'holds '}{shown(value)}, expected {expected}")
    items: Any = value
    if isinstance(kind, list):
        for place, item in enumerate(items):
            check_kind(item, kind[0], name, f"{key}[{place}]")
    elif isinstance(kind, dict):
        for part, inner in kind.items():
            for part_name in items if part is str else [part.removesuffix("?")]:
                if part_name in items:
                    check_kind(items[part_name], inner, name, f"{key}.{part_name}" if key else str(part_name))
                elif not str(part).endswith("?"):
                    raise ValueError(f"{name} lacks {f'{key}.' if key else ''}{part_name}")


def read_yaml(path: str | Path, *, kind: Any = dict) -> Any:
    """The value in a YAML file of plain data; arguments and errors as in `read_bytes` and `parse_json`."""
    import yaml

    text = read_text(path, limit=YAML_LIMIT)
    check_yaml(text, path)
    try:
        # the C parser needs a tenth of the time
        value = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    # a constructor raises errors of its own, of a date without such a day for example
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} does not parse: {' '.join(str(error).split())}") from None
    check_kind(value, kind, path)
    return value


def check_yaml(text: str, name: object) -> None:
    """Refuse a text with more values or levels than any config has, before a parser expands its aliases.

    Raises:
        ValueError: the text is no YAML, or too large; names `name`.
    """
    import yaml

    # number of values of each open collection, with its anchor; the first entry is for the file
    levels: list[tuple[str | None, int]] = [(None, 0)]
    sizes: dict[str | None, int] = {}
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(event, yaml.CollectionStartEvent):
                levels.append((event.anchor, 1))
                if len(levels) > MAX_LEVELS:
                    raise ValueError(f"{name} is nested more than {MAX_LEVELS} levels deep")
                continue
            added = 1 if isinstance(event, yaml.ScalarEvent) else 0
            if isinstance(event, yaml.AliasEvent):
                if event.anchor in (anchor for anchor, _ in levels):
                    raise ValueError(f"{name}: *{event.anchor} contains itself")
                added = sizes.get(event.anchor, 1)
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, added = levels.pop()
                sizes[anchor] = added
            levels[-1] = levels[-1][0], levels[-1][1] + added
            if levels[-1][1] > MAX_VALUES:
                raise ValueError(f"{name} has more than {MAX_VALUES} values, its aliases written out")
    except yaml.YAMLError as error:
        raise ValueError(f"{name} does not parse: {' '.join(str(error).split())}") from None


def read_csv(
    path: str | Path, columns: Collection[str] = (), *, growing: bool = False
) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a table with a header.

    Args:
        path: CSV file.
        columns: names that the header must have.
        growing: a process may be writing the file, as in `read_text`: rows that a kill has cut are left out.

    Raises:
        ValueError: the file is damaged, lacks a column, or has a row of another length than its header.
        OSError: the file is missing or not readable.
    """
    rows = []
    reader = csv.reader(io.StringIO(read_text(path, limit=CSV_LIMIT, growing=growing)), strict=True)
    try:
        header = next(reader, [])
        for row in reader:
            if len(row) == len(header):
                rows.append(dict(zip(header, row, strict=True)))
            elif row and not growing:
                raise ValueError(f"{path}: line {reader.line_num} has {len(row)} cells, expected {len(header)}")
    except csv.Error as error:
        raise ValueError(f"{path} is damaged in line {reader.line_num}: {error}") from None
    if missing := [name for name in columns if name not in header]:
        raise ValueError(f"{path} has no column {missing[0]}, it has {', '.join(header) or 'none'}")
    return header, rows


def shown(value: Any) -> str:
    """A value for a message: its beginning, in one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def set_damaged_aside(path: Path) -> Path:
    """Rename a damaged file or folder to a free name beside it, which is returned."""
    names = (path.with_name(f"{path.stem}-damaged-{number}{path.suffix}") for number in count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    return path.rename(aside)


def open_tensors(path: str | Path) -> Any:
    """Open a safetensors file (`safetensors.safe_open`), of which only the header is read.

    Raises:
        ValueError: it is no regular file, or damaged; names the path.
        OSError: the file is missing or not readable.
    """
    from safetensors import SafetensorError, safe_open

    open_regular(path).close()
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def inner_name(name: Any, where: object) -> str:
    """A name of a file that stands in another file, which may lead nowhere but below that file's folder.

    Raises:
        ValueError: it is no text, absolute, has `..` or a control character; names `where` and the value.
    """
    parts = name.split("/") if isinstance(name, str) else [".."]
    if {"", ".", ".."} & set(parts) or any(ord(letter) < 32 for letter in name):
        raise ValueError(f"{where} names {shown(name)}, expected a relative path without .. in the same folder")
    return name


def typed(path: Path) -> str:
    """A path as it is typed behind a command."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def refuse_others(folder: Path, names: tuple[str, ...], maker: str) -> None:
    """Raise ValueError for files that a command would replace and has not written; the first name is its record."""
    there = [name for name in names if (folder / name).exists()]
    try:
        ours = read_json(folder / names[0]).get("made_by") == maker
    except (OSError, ValueError):
        ours = False
    if there and not ours:
        raise ValueError(f"{folder / there[0]} is not from `{maker}`: choose another folder with --out")

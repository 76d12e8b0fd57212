"""Sequential reads of files from local folders, web servers, S3 and the Hugging Face hub, by library clients only.

No shell command ever runs: webdataset's `gopen`, its `pipe:` URLs and its variable GOPEN_REWRITE are not used.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.client import HTTPException
from typing import Any, BinaryIO
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from braceexpand import braceexpand

from vsa.data.index import Span

PAUSES = (1.0, 4.0, 16.0)
"""Seconds before each retry of a failed read."""

# module and class of the client by scheme; the module has the name of its package
_CLIENTS = {"s3": ("s3fs", "S3FileSystem"), "hf": ("huggingface_hub", "HfFileSystem")}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_OWN_MACHINE = ("localhost", "127.0.0.1", "::1")
_TIMEOUT = 60
# HTTP statuses that may be temporary
_PASSING = (408, 425, 429)
# a larger gap before the next member is skipped by a new request instead of being read
_LONGEST_GAP = 1 << 20
_CHUNK = 1 << 20


class RemoteError(OSError):
    """A file that cannot be read, or not to its end; the message is one line that names the file."""

    def __init__(self, url: str, error: BaseException) -> None:
        super().__init__(f"{url} cannot be read: {_reason(error)}")
        self.missing = isinstance(error, FileNotFoundError) or getattr(error, "code", None) == 404


class _CheckedRedirects(HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        _refuse_plain_http(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def expand_urls(key: str, urls: str | Sequence[str]) -> tuple[str, ...]:
    """URLs with expanded braces (`shard-{00000..00099}.tar`), as a sorted list.

    Args:
        key: name of the setting in messages.
        urls: one or more URLs or paths.
    """
    found: list[str] = []
    for pattern in [urls] if isinstance(urls, str) else urls:
        # checked before the braces are expanded, since a command may contain braces
        refuse_url(key, pattern)
        try:
            found += braceexpand(pattern)
        except ValueError:
            raise ValueError(f"{key}={pattern}: unbalanced braces") from None
    for url in found:
        refuse_url(key, url)
    if not found:
        raise ValueError(f"{key} lists no shards")
    if len(set(found)) < len(found):
        raise ValueError(f"{key} lists {next(url for url in found if found.count(url) > 1)} twice")
    return tuple(sorted(found))


def refuse_url(key: str, url: str) -> None:
    """Raise ValueError for a URL with an unknown scheme, a missing client package or a secret."""
    match = _SCHEME.match(url)
    if match is None:
        return
    scheme = match[1].lower()
    if scheme not in ("http", "https", *_CLIENTS) or not url[match.end() :].startswith("//"):
        raise ValueError(f"{key}: expected a path or a URL of https://, s3:// or hf://, got scheme {scheme}:")
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            f"{key}: unexpected user, query or fragment in a URL of {parts.hostname}, which configs and checkpoints "
            "would store: put credentials into the client's own files or variables"
        )
    if scheme in _CLIENTS:
        _client(scheme)
    else:
        try:
            _refuse_plain_http(url)
        except URLError as error:
            raise ValueError(f"{key}: {error.reason}") from None


def read_file(url: str) -> bytes:
    """The content of a file, with retries.

    Raises:
        RemoteError: the file cannot be read.
    """
    for pause in (*PAUSES, None):
        try:
            with _open_at(url, 0) as file:
                return file.read()
        except _faults(url) as error:
            if pause is None or not _may_pass(error):
                raise RemoteError(url, error) from error
            time.sleep(pause)
    raise AssertionError("unreachable")


def read_spans(url: str, spans: Sequence[Span]) -> Iterator[bytes]:
    """The bytes of members of a file, in one pass where their offsets ascend.

    A read that fails or ends early is retried from the current member, after each of `PAUSES`; every member that
    arrives resets the count of retries.

    Raises:
        RemoteError: all retries failed, or the error is permanent.
    """
    file, place, tries = None, 0, 0
    try:
        for span in spans:
            while True:
                try:
                    if file is None or not 0 <= span.offset - place <= _LONGEST_GAP:
                        if file is not None:
                            file.close()
                        file, place = _open_at(url, span.offset), span.offset
                    _read_exactly(file, span.offset - place)
                    payload = _read_exactly(file, span.size)
                    break
                except _faults(url) as error:
                    if file is not None:
                        with suppress(*_faults(url)):
                            file.close()
                    # wherever it stood
                    file, place = None, 0
                    if tries == len(PAUSES) or not _may_pass(error):
                        raise RemoteError(url, error) from error
                    time.sleep(PAUSES[tries])
                    tries += 1
            place, tries = span.offset + span.size, 0
            yield payload
    finally:
        if file is not None:
            file.close()


def _open_at(url: str, offset: int) -> BinaryIO:
    match = _SCHEME.match(url)
    scheme = match[1].lower() if match else None
    if scheme in ("http", "https"):
        return _open_web(url, offset)
    file = open(url, "rb") if scheme is None else _client(scheme)().open(url, "rb")  # noqa: SIM115
    file.seek(offset)
    return file


def _open_web(url: str, offset: int) -> BinaryIO:
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    answer = build_opener(_CheckedRedirects).open(Request(url, headers=headers), timeout=_TIMEOUT)
    if offset and answer.status != 206:
        # a server without support for ranges sends the whole file
        _read_exactly(answer, offset)
    return answer


def _read_exactly(file: BinaryIO, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = file.read(min(left, _CHUNK))
        if not part:
            raise EOFError(f"it ends {left:,} bytes early")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _client(scheme: str) -> Any:
    """The file system class of a scheme."""
    package, name = _CLIENTS[scheme]
    try:
        return getattr(importlib.import_module(package), name)
    except ImportError:
        raise ValueError(f"URLs of {scheme}:// need the package {package}: pip install {package}") from None


def _refuse_plain_http(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme == "http" and parts.hostname not in _OWN_MACHINE:
        raise URLError(f"http://{parts.hostname} is not encrypted, use https:// (http is for this machine alone)")


def _faults(url: str) -> tuple[type[Exception], ...]:
    """Exceptions that reading a URL may raise; the clients of S3 and the hub have their own."""
    return (Exception,) if url.split(":")[0].lower() in _CLIENTS else (OSError, EOFError, HTTPException)


def _may_pass(error: Exception) -> bool:
    if isinstance(error, HTTPError):
        return error.code >= 500 or error.code in _PASSING
    return not isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError)


def _reason(error: BaseException) -> str:
    if isinstance(error, HTTPError):
        return f"HTTP status {error.code}"
    if isinstance(error, URLError) and isinstance(error.reason, BaseException):
        return _reason(error.reason)
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return f"{type(error).__name__} {text[:120]}".strip()

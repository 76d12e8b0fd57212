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

from vsa.data.index import MOST_INDEX_BYTES, Span
from vsa.files import open_regular
from vsa.secrets import without_secrets

PATIENCE, SLOWEST = 60.0, 50_000
"""A read that takes longer than these seconds is given up below these bytes per second."""

PAUSES = (1.0, 4.0, 16.0)
"""Seconds before each retry of a failed read."""

# module and class of the client by scheme; the module has the name of its package
_CLIENTS = {"s3": ("s3fs", "S3FileSystem"), "hf": ("huggingface_hub", "HfFileSystem")}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_OWN_MACHINE = ("localhost", "127.0.0.1", "::1")
_TIMEOUT = 60
# HTTP statuses below 500 that may be temporary
_PASSING = (408, 425, 429)
# errors of the clients' settings, by name because their packages are optional; another try does not help
_SETTINGS = (
    *("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError"),
    *("SSOTokenLoadError", "UnauthorizedSSOTokenError", "TokenRetrievalError"),
    *("HfUriError", "HFValidationError", "OfflineModeIsEnabled"),
)
_QUERY = re.compile(r"""(\w://[^\s?'"]+)\?[^\s'"]*""")
_LONGEST_REASON = 200
# a larger gap before the next member is skipped by a new request instead of being read
_LONGEST_GAP = 1 << 20
_CHUNK = 1 << 20


class RemoteError(OSError):
    """A file that cannot be read, or not to its end; the message is one line that names the file."""

    def __init__(self, url: str, error: BaseException) -> None:
        super().__init__(f"{url} cannot be read: {reason_of(error)}")
        self.missing = isinstance(error, FileNotFoundError) or status_of(error) == 404


class _DrippingError(OSError):
    """Bytes arrive, so that no time-out ends the read, but too slowly."""


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
    all_urls: list[str] = []
    for pattern in [urls] if isinstance(urls, str) else urls:
        # checked before the braces are expanded, since a command may contain braces
        refuse_url(key, pattern)
        try:
            all_urls += (expanded := [*braceexpand(pattern)])
        except ValueError:
            raise ValueError(f"{key}={pattern}: unbalanced braces") from None
        # what looks for servers in settings looks for ://
        if "://" not in pattern and "://" in "\n".join(expanded):
            raise ValueError(f"{key}={pattern}: braces stand for numbers of shards, not for a part of https://")
    for url in all_urls:
        refuse_url(key, url)
    if not all_urls:
        raise ValueError(f"{key} lists no shards")
    if len(set(all_urls)) < len(all_urls):
        raise ValueError(f"{key} lists {next(url for url in all_urls if all_urls.count(url) > 1)} twice")
    return tuple(sorted(all_urls))


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


def read_file(url: str, *, limit: int = MOST_INDEX_BYTES) -> bytes:
    """The content of a file of at most `limit` bytes, with retries.

    Raises:
        RemoteError: the file cannot be read, is larger, or arrives more slowly than `SLOWEST`.
    """
    for pause in (*PAUSES, None):
        try:
            with _open_at(url, 0) as file:
                length = getattr(file, "length", None)
                content = _read(file, limit + 1) if length is None else _read_exactly(file, min(length, limit + 1))
                if len(content) > limit:
                    raise ValueError(f"it has more than {limit:,} bytes")
                return content
        except _faults(url) as error:
            if pause is None or not _may_pass(error) or isinstance(error, _DrippingError | ValueError):
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
    # the clients know their schemes in small letters only
    file = _file_system(scheme).open(f"{scheme}{url[len(scheme) :]}", "rb") if scheme else open_regular(url)
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
    content = _read(file, size)
    if len(content) < size:
        raise EOFError(f"it ends {size - len(content):,} bytes early")
    return content


def _read(file: BinaryIO, size: int) -> bytes:
    """At most `size` bytes, fewer at the end of the file."""
    start, content = time.monotonic(), bytearray()
    # what has arrived, since a server that drips would take for ever to fill a buffer
    read = getattr(file, "read1", file.read)
    while part := read(min(size - len(content), _CHUNK)):
        content += part
        seconds = time.monotonic() - start
        if seconds > PATIENCE and len(content) < SLOWEST * seconds:
            raise _DrippingError(f"only {len(content):,} bytes arrived in {seconds:.0f} s")
    return bytes(content)


def _client(scheme: str) -> Any:
    """The file system class of a scheme."""
    package, name = _CLIENTS[scheme]
    try:
        module = importlib.import_module(package)
        system = getattr(module, name)
    except ImportError:
        raise ValueError(f"URLs of {scheme}:// need the package {package}: pip install {package}") from None
    if scheme == "hf" and not hasattr(module.get_session(), "event_hooks"):
        raise ValueError(f"URLs of hf:// need huggingface_hub 1 or newer, got {module.__version__}")
    return system


def _file_system(scheme: str) -> Any:
    """The file system of a scheme, which waits for no server for ever."""
    system = _client(scheme)()
    if scheme == "s3":
        # s3fs repeats what botocore repeats: with the retries of this module, a silent server took half an hour
        system.retries = 1
        system.config_kwargs = {"retries": {"max_attempts": 0}, **system.config_kwargs}
    else:
        hooks = importlib.import_module("huggingface_hub").get_session().event_hooks["request"]
        if _limit_wait not in hooks:
            hooks.append(_limit_wait)
    return system


def _limit_wait(request: Any) -> None:
    """Give a request of the hub's client its timeout of downloads where it has none, as listings of folders do."""
    seconds = importlib.import_module("huggingface_hub.constants").HF_HUB_DOWNLOAD_TIMEOUT
    limits = {what: seconds if limit is None else limit for what, limit in request.extensions["timeout"].items()}
    request.extensions = {**request.extensions, "timeout": limits}


def _refuse_plain_http(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme == "http" and parts.hostname not in _OWN_MACHINE:
        raise URLError(f"http://{parts.hostname} is not encrypted, use https:// (http is for this machine alone)")


def _faults(url: str) -> tuple[type[Exception], ...]:
    """Exceptions that reading a URL may raise; the clients of S3 and the hub have their own."""
    return (Exception,) if url.split(":")[0].lower() in _CLIENTS else (OSError, EOFError, HTTPException, ValueError)


def _may_pass(error: Exception) -> bool:
    status = status_of(error)
    if status is not None:
        return status >= 500 or status in _PASSING
    return type(error).__name__ not in _SETTINGS and not isinstance(
        error, FileNotFoundError | PermissionError | IsADirectoryError
    )


def status_of(error: BaseException) -> int | None:
    """HTTP status of an error of urllib, of the hub's client or of botocore, the cause of those of s3fs."""
    if isinstance(error, HTTPError):
        return error.code
    response = getattr(error, "response", None)
    if response is None:
        response = getattr(error.__cause__, "response", None)
    if isinstance(response, dict):
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return getattr(response, "status_code", None)


def reason_of(error: BaseException) -> str:
    """What a server or a client said, in one line without secrets, with its HTTP status if there is one."""
    if isinstance(error, URLError) and isinstance(error.reason, BaseException):
        return reason_of(error.reason)
    status = status_of(error)
    if isinstance(error, HTTPError):
        return f"HTTP status {status}"
    message = getattr(error, "server_message", None) or getattr(error, "strerror", None) or error
    # the hub's client names a page about the status, and puts signatures into queries, as its storage does
    message = str(message).partition("For more information check:")[0]
    text = without_secrets(_QUERY.sub(r"\1", " ".join(message.split()))).rstrip(".")
    if len(text) > _LONGEST_REASON:
        text = text[:_LONGEST_REASON] + "..."
    return f"{type(error).__name__} {text}".strip() if status is None else f"HTTP status {status}: {text}"

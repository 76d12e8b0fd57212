"""A disk that is too small, without rights to mount one."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """Every write past byte `most` of a file fails inside, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Callable[[int], None]]:
    """A file system of `size` bytes at a folder, for this process alone, which must have one thread and end after it.

    Yields a function that gives it another size.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments):
            error = ctypes.get_errno()
            raise OSError(error, f"{name}: {os.strerror(error)}")

    def mount(size: int, flags: int = 0) -> None:
        call("mount", b"tmpfs", str(folder).encode(), b"tmpfs", flags, f"size={size}".encode())

    folder.mkdir(parents=True, exist_ok=True)
    user, group = os.getuid(), os.getgid()
    # mounts and users of its own, in which it is root
    call("unshare", 0x00020000 | 0x10000000)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    mount(size)
    yield lambda size: mount(size, 0x20)

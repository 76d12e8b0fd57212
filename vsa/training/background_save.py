"""A checkpoint that is written in a thread while training goes on, from a copy of what it holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from vsa.models.sharding import local, whole


def copied(tensors: Mapping[str, Mapping[str, Tensor]], *, keep: bool) -> dict[str, dict[str, Tensor]]:
    """A copy on the CPU of groups of tensors, gathered where they are sharded.

    Args:
        tensors: by group and name; with sharded ones this is a collective.
        keep: whether this process keeps the copy; the others have empty groups.
    """
    kept: dict[str, dict[str, Tensor]] = {}
    for group, members in tensors.items():
        kept[group] = {}
        for name, tensor in members.items():
            value = whole(tensor)
            if keep:
                # on the CPU it may be the tensor itself
                kept[group][name] = value.clone() if local(tensor).device.type == "cpu" else value
    return kept


class BackgroundSave:
    """One save in a thread.

    Args:
        write: writes the checkpoint and returns its folder.

    Attributes:
        seconds: that it took, when it is done.
    """

    def __init__(self, write: Callable[[], Path]):
        self._write = write
        self._path: Path | None = None
        self._failure: BaseException | None = None
        self.seconds = 0.0
        # not a daemon: when the interpreter ends, a save is finished first
        self._thread = threading.Thread(target=self._run, name="checkpoint")
        self._thread.start()

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            self._path = self._write()
        except BaseException as failure:
            self._failure = failure
        self.seconds = time.perf_counter() - start

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Path:
        """Wait until it is done; the folder of the checkpoint, or what went wrong is raised."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._path is not None
        return self._path

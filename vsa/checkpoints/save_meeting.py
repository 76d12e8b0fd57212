"""Communication between the ranks of a run while they write a checkpoint together."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vsa.errors import NO_ROOM
from vsa.files import DiskFullError

_NO_LIMIT = timedelta(days=30)
"""Effectively unlimited, since the watch of a run detects lost ranks."""

_FOLDER = "folder"


class SaveMeeting:
    """Messages about one save, over a separate connection to the store of the process group.

    There are no collective operations, so a thread can save while the main thread trains. Every rank creates one
    instance per save, in the same order.
    """

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        group: Any = dist.group.WORLD
        store = group.get_group_store().clone()
        store.set_timeout(_NO_LIMIT)
        number = store.add(f"vsa/saves/{self.rank}", 1)
        self._store = dist.PrefixStore(f"vsa/save/{number}", store)

    def open(self, failure: BaseException | None = None) -> None:
        """Rank 0: announce that the folder exists, or why it does not."""
        self._tell(_FOLDER, _described(failure))

    def wait_for_folder(self) -> None:
        """Other ranks: wait for the folder; raises the error of rank 0."""
        raise_described(json.loads(self._store.get(_FOLDER)), "rank 0")

    def report(self, files: dict[str, tuple[str, int]], failure: BaseException | None = None) -> None:
        """Other ranks: send digest and size of each written file by name, or the error."""
        self._tell(str(self.rank), {"files": files, **_described(failure)})

    def reports(self) -> list[dict[str, Any]]:
        """Rank 0: wait for the reports of all other ranks; returns them in order."""
        others = [str(rank) for rank in range(1, self.world)]
        reports = [json.loads(self._store.get(rank)) for rank in others]
        for key in (_FOLDER, *others):
            self._store.delete_key(key)
        return reports

    def _tell(self, key: str, what: dict[str, Any]) -> None:
        self._store.set(key, json.dumps(what))


def _described(failure: BaseException | None) -> dict[str, Any]:
    if failure is None:
        return {}
    text = " ".join(str(failure).split()) or type(failure).__name__
    if isinstance(failure, OSError):
        return {"failure": text, "errno": failure.errno}
    return {"failure": f"{type(failure).__name__}: {text}", "errno": None}


def raise_described(said: dict[str, Any], who: str) -> None:
    """Raise the error that a rank reported, if any, as a `DiskFullError` if it was one."""
    if "failure" not in said:
        return
    if said["errno"] in NO_ROOM:
        raise DiskFullError(said["errno"], f"{who}: {said['failure']}")
    raise OSError(f"{who} could not write its part of the checkpoint: {said['failure']}")

"""What the ranks of a run tell each other while they write a checkpoint together."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vsa.errors import NO_ROOM
from vsa.files import DiskFullError

_NO_LIMIT = timedelta(days=30)
"""A rank that is lost is the watch's business, not a clock's."""

_FOLDER = "folder"


class SaveMeeting:
    """Words about one checkpoint, over a connection of their own to the store by which the ranks met.

    No collective is made, so a thread can save while the main one trains. Every rank makes one for each save, in the
    same order.
    """

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        group: Any = dist.group.WORLD
        store = group.get_group_store().clone()
        store.set_timeout(_NO_LIMIT)
        number = store.add(f"vsa/saves/{self.rank}", 1)
        self._store = dist.PrefixStore(f"vsa/save/{number}", store)

    def open(self, failure: BaseException | None = None) -> None:
        """Rank 0: the folder is there, or why it is not."""
        self._tell(_FOLDER, _described(failure))

    def wait_for_folder(self) -> None:
        """Other ranks: raises the failure of rank 0."""
        raise_described(json.loads(self._store.get(_FOLDER)), "rank 0")

    def report(self, files: dict[str, tuple[str, int]], failure: BaseException | None = None) -> None:
        """Other ranks: digest and size of each file that was written by name, or what went wrong."""
        self._tell(str(self.rank), {"files": files, **_described(failure)})

    def reports(self) -> list[dict[str, Any]]:
        """Rank 0: what each other rank reported, in order, when all have."""
        others = [str(rank) for rank in range(1, self.world)]
        found = [json.loads(self._store.get(rank)) for rank in others]
        for key in (_FOLDER, *others):
            self._store.delete_key(key)
        return found

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
    """Raise the failure that a rank told of, if it did; a full disk stays one."""
    if "failure" not in said:
        return
    if said["errno"] in NO_ROOM:
        raise DiskFullError(said["errno"], f"{who}: {said['failure']}")
    raise OSError(f"{who} could not write its part of the checkpoint: {said['failure']}")

"""Retention of checkpoints: the number of verified ones, and those of an abandoned branch in a separate folder."""

from __future__ import annotations

import itertools
import os
import re
from contextlib import suppress
from pathlib import Path

from vsa.checkpoints.run_checkpoint import checkpoint_name, list_checkpoints, read_checkpoint, step_of
from vsa.files import read_bytes, remove_folder

_ABANDONED = "abandoned-after-"
"""Prefix of a folder with checkpoints that a run abandoned; the name of the checkpoint it went back to follows."""

FEWEST = 2
"""Smallest number of good checkpoints to keep."""


def prune_checkpoints(folder: Path, written: Path | None, keep: int, every: int | None = None) -> None:
    """Remove the oldest checkpoints, but keep `keep` good ones and those at which a run left an abandoned branch.

    The checkpoint before `written` is read completely (if it is damaged, the next one); of earlier ones only the file
    sizes are checked.

    Args:
        folder: folder of all checkpoints.
        written: checkpoint that was just written and is good; None: there is none.
        keep: number of good checkpoints to keep, at least 2.
        every: interval in steps; as many good checkpoints at its multiples are kept too, since a signal may have
            written others.
    """
    good = regular = 0
    branches = branch_points(folder)
    for path in reversed(list_checkpoints(folder)):
        is_regular = every is not None and step_of(path) % every == 0
        if good >= keep and not (is_regular and regular < keep):
            if path.name not in branches:
                remove_folder(path)
        elif path == written or is_good(path, whole=good < FEWEST):
            good += 1
            regular += is_regular


def is_good(path: Path, *, whole: bool) -> bool:
    """Whether a checkpoint can be read, checked by every byte or by the sizes of its files."""
    try:
        read_checkpoint(path, verify=whole)
    except ValueError:
        return False
    return True


def branch_points(folder: Path) -> set[str]:
    """Names of the checkpoints that a run went back to, as long as the abandoned checkpoints exist."""
    lines = [line for line in folder.glob(f"{_ABANDONED}*") if list_checkpoints(line)]
    return {branch for line in lines if (branch := _branch_of(line))}


def _branch_of(line: Path) -> str | None:
    match = re.match(rf"{_ABANDONED}(step-\d+)", line.name)
    return match[1] if match else None


def shared_step(folder: Path, resumed: Path) -> int:
    """The newest step in `folder` on the same branch as the checkpoint to resume; 0 if there is none."""
    resumed, own = resumed.resolve(), list_checkpoints(folder.resolve())
    if resumed in own:
        return step_of(resumed)
    if resumed.parent.parent == folder.resolve() and (branch := _branch_of(resumed.parent)):
        return int(branch.removeprefix("step-"))
    with suppress(OSError, ValueError):
        # a copy of a checkpoint of this folder
        content = read_bytes(resumed / "state.json")
        for path in own:
            if read_bytes(path / "state.json") == content:
                return step_of(path)
    return 0


def set_aside(folder: Path, step: int) -> Path | None:
    """Move the checkpoints after `step`, from which a run continues, to a separate folder; None if there are none.

    The oldest is moved first: if the process is killed in between, the newest checkpoint is still in place.
    """
    later = [path for path in list_checkpoints(folder) if step_of(path) > step]
    if not later:
        return None
    name = f"{_ABANDONED}{checkpoint_name(step)}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    aside = next(path for path in map(folder.joinpath, names) if not path.exists())
    aside.mkdir()
    for path in later:
        os.rename(path, aside / path.name)
    return aside


def put_back(aside: Path) -> None:
    """Undo `set_aside`."""
    for path in reversed(list_checkpoints(aside)):
        os.rename(path, aside.parent / path.name)
    aside.rmdir()

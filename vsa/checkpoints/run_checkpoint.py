"""Checkpoint folders: safetensors keyed by parameter name plus `state.json`, no pickle.

A single process writes one file per group of tensors. With several ranks, each writes a file with its own rows, all at
the same time; reading does not depend on the number of writers. A checkpoint is complete when its folder has its final
name (`vsa.files.atomic_folder`); `state.json`, which contains the SHA-256 of the other files and its own
(`vsa.checkpoints.state_file`), is written last.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from vsa.checkpoints.places import placed
from vsa.checkpoints.save_meeting import SaveMeeting, raise_described
from vsa.checkpoints.state_file import file_names, files_by_group, one_line, read_state, write_state
from vsa.checkpoints.tensor_parts import Parts, own_parts, save_file, size_of
from vsa.checkpoints.weight_files import TensorFiles
from vsa.files import atomic_folder, file_digest, flush_to_disk, open_tensors, temporary_folder, writing

SEEN_WITHIN = 10.0
"""Seconds within which a rank must see the folder created by rank 0; shared file systems may have a delay."""

_NAME = re.compile(r"step-(\d{8,})$")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint folder.

    Args:
        path: the folder.
        state: content of `state.json`: step, plan hash, latent statistics, encoder ids, digests.
        verified: whether every byte was read.
    """

    path: Path
    state: Mapping[str, Any]
    verified: bool = True

    @property
    def step(self) -> int:
        return self.state["step"]

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The config of its run, to be used in any working directory, with the revisions of its data."""
        config = placed(self.state.get("config") or {}, self.path.parents[1])
        data = config.get("data") or {}
        if str(data.get("_target_")).endswith((".LatentDataModule", ".StreamDataModule")):
            config = {**config, "data": {**data, "revision": self.state.get("revision", 1)}}
        return config

    @cached_property
    def groups(self) -> Mapping[str, list[str]]:
        """Groups of tensors with the names of their files, one per rank that wrote them."""
        return files_by_group(self.state["files"])

    def open(self, name: str) -> TensorFiles:
        """The files of a group ("model", "ema", "optimizer"), which read single tensors, completely or by rows."""
        return TensorFiles(self.path, self.groups[name])

    def tensors(self, name: str) -> dict[str, Tensor]:
        """All tensors of a group, on the CPU."""
        files = self.open(name)
        return {key: files.read(key) for key in files.keys}

    def digest(self, name: str) -> str:
        """SHA-256 of a group's file; with several files, of their digests."""
        digests = [self.state["files"][file] for file in self.groups[name]]
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()

    def has(self, name: str) -> bool:
        return name in self.groups

    def choose_weights(self, weights: Literal["ema", "model"] | None = None) -> Literal["ema", "model"]:
        """The requested weights, by default the averaged ones if there are any; ValueError if they are missing."""
        if weights not in (None, "ema", "model"):
            raise ValueError(f"weights must be ema or model, got {weights!r}")
        if weights is None:
            return "ema" if self.has("ema") else "model"
        if not self.has(weights):
            raise ValueError(f"checkpoint {self.path} has no {weights} weights")
        return weights


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def write_checkpoint(
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], *, together: bool = False
) -> Path:
    """Write `folder/step-N` from groups of tensors ("model", "ema", "optimizer") and the state.

    Args:
        folder: folder of all checkpoints.
        tensors: tensors by group and name.
        state: content of `state.json`.
        together: whether all ranks call it, each of which then writes its own rows.

    Raises:
        DiskFullError: names the checkpoint and the missing bytes; earlier checkpoints are kept.
    """
    ranks = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    return write_parts(folder, own_parts(tensors, *ranks), state, together=together)


def write_parts(folder: Path, parts: Parts, state: Mapping[str, Any], *, together: bool = False) -> Path:
    """Write `folder/step-N` from the tensors of this process, in any thread and without collective operations.

    Args:
        folder: folder of all checkpoints; with several ranks it must be visible to all of them.
        parts: see `own_parts`.
        state: content of `state.json`, written by rank 0.
        together: see `write_checkpoint`. Rank 0 creates the folder and renames it once all ranks have written; the
            others return before that, so the ranks have to agree on the outcome afterwards.

    Raises:
        OSError: this process could not write, or, on rank 0, any of them; a full disk is a `DiskFullError`.
    """
    final, needed = folder / checkpoint_name(state["step"]), size_of(parts)
    if not together:
        with _new_folder(final, needed) as temporary:
            write_state(temporary, {**state, "files": _digests(_write_files(temporary, parts, 0, 1))})
        return final
    meeting = SaveMeeting()
    if meeting.rank == 0:
        _lead(meeting, final, parts, state, needed)
    else:
        _follow(meeting, final, parts, needed)
    return final


@contextmanager
def _new_folder(final: Path, needed: int) -> Iterator[Path]:
    # remnants of a save that was killed
    for remnant in final.parent.glob(".*-step-*"):
        shutil.rmtree(remnant)
    with atomic_folder(final, needed=needed, replace=True) as temporary:
        yield temporary


def _write_files(folder: Path, parts: Parts, rank: int, world: int) -> dict[str, tuple[str, int]]:
    """Write one file per group; returns digest and size of each by name."""
    files: dict[str, tuple[str, int]] = {}
    for group, own in parts.items():
        path = folder / file_names(group, world)[rank]
        files[path.name] = save_file(path, own), path.stat().st_size
    return files


def _digests(files: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    return {name: digest for name, (digest, _) in files.items()}


def _lead(meeting: SaveMeeting, final: Path, parts: Parts, state: Mapping[str, Any], needed: int) -> None:
    """Rank 0: create the folder, write, collect the reports of the others, and give the folder its final name."""
    opened = False
    try:
        with _new_folder(final, needed) as temporary:
            meeting.open()
            opened, files, failure = True, {}, None
            try:
                files = _write_files(temporary, parts, 0, meeting.world)
            except Exception as error:
                failure = error
            # the others write to the folder until they have reported
            reports = meeting.reports()
            if failure is not None:
                raise failure
            for rank, report in enumerate(reports, 1):
                raise_described(report, f"rank {rank}")
                for name, (_, size) in report["files"].items():
                    path = temporary / name
                    if not path.is_file() or path.stat().st_size != size:
                        raise OSError(
                            f"rank {rank} has written {name} of {final}, and rank 0 does not see it: the ranks of a "
                            "run need one folder for checkpoints that all of them see"
                        )
                files |= report["files"]
            write_state(temporary, {**state, "files": _digests(files)})
    except BaseException as error:
        if not opened:
            meeting.open(error)
        raise


def _follow(meeting: SaveMeeting, final: Path, parts: Parts, needed: int) -> None:
    """Other ranks: write to the folder of rank 0 and report to it."""
    meeting.wait_for_folder()
    temporary = temporary_folder(final)
    try:
        end = time.monotonic() + SEEN_WITHIN
        while not temporary.is_dir():
            if time.monotonic() > end:
                raise OSError(
                    f"rank {meeting.rank} does not see {temporary}, which rank 0 has made: the ranks of a run need one "
                    "folder for checkpoints that all of them see"
                )
            time.sleep(0.1)
        with writing(final, temporary, needed=needed):
            files = _write_files(temporary, parts, meeting.rank, meeting.world)
            # on a shared file system only the writing process can flush its files
            for name in files:
                flush_to_disk(temporary / name)
    except BaseException as error:
        meeting.report({}, error)
        raise
    meeting.report(files)


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders in `folder`, oldest first; they may be damaged."""
    return sorted((p for p in folder.glob("step-*") if _NAME.match(p.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint folder."""
    return int(_NAME.match(path.name)[1])  # type: ignore[index]


def read_checkpoint(path: str | Path, *, verify: bool = True, share: tuple[int, int] = (0, 1)) -> Checkpoint:
    """Open a checkpoint folder after checking its files.

    Args:
        path: the folder.
        verify: whether every digest is compared, which reads every byte; otherwise only the lengths of the files are
            checked.
        share: rank and number of ranks that compare digests, each of some files; with as many ranks as wrote the
            checkpoint, of the files that the rank will read.

    Raises:
        ValueError: the folder is not a checkpoint, is damaged, or has another schema.
    """
    path = Path(path)
    try:
        state = read_state(path)
        groups = files_by_group(state["files"])
        numbered = [(number, name) for names in groups.values() for number, name in enumerate(names)]
        if len(numbered) == len(groups):
            # with one file per group, the groups are distributed
            numbered = list(enumerate(groups[group][0] for group in groups))
        digests = {name: state["files"][name] for number, name in numbered if verify and number % share[1] == share[0]}
        # hashing releases the interpreter lock
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            list(threads.map(lambda name: _check_tensors(path, name, digests.get(name)), state["files"]))
        for names in groups.values():
            if len(names) > 1:
                TensorFiles(path, names)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"checkpoint {path} is damaged: {one_line(error)}") from None
    return Checkpoint(path=path, state=state, verified=verify)


def _check_tensors(path: Path, name: str, digest: str | None) -> None:
    try:
        # the header contains the length of the file: what a sparse file of terabytes holds is not read
        open_tensors(path / name)
        differs = digest is not None and file_digest(path / name) != digest
    except FileNotFoundError:
        raise ValueError(f"checkpoint {path} is damaged: {name} is missing") from None
    except ValueError as error:
        raise ValueError(f"checkpoint {path} is damaged: {name} cannot be read ({one_line(error)})") from None
    if differs:
        raise ValueError(f"checkpoint {path} is damaged: {name} does not match its digest")


def read_together(path: str | Path) -> Checkpoint:
    """Read a checkpoint like `read_checkpoint`, with every rank reading a share of the bytes; a collective operation.

    Raises:
        ValueError: a rank found damage; all ranks raise the same error.
    """
    if not dist.is_initialized():
        return read_checkpoint(path)
    checkpoint, failure = None, None
    try:
        checkpoint = read_checkpoint(path, share=(dist.get_rank(), dist.get_world_size()))
    except (ValueError, OSError) as error:
        failure = str(error)
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for failure in failures:
        if failure is not None:
            raise ValueError(failure)
    assert checkpoint is not None
    return checkpoint


def latest_checkpoint(folder: Path, on_damaged=print, *, verify: bool = True) -> Checkpoint:
    """The newest valid checkpoint in `folder` (see `read_checkpoint`); `on_damaged` receives a message per damaged one.

    Raises:
        ValueError: there is no valid checkpoint.
    """
    if folder.is_file():
        raise ValueError(f"{folder} is a file, expected a folder of checkpoints")
    for path in reversed(list_checkpoints(folder)):
        try:
            return read_checkpoint(path, verify=verify)
        except (ValueError, OSError) as error:
            on_damaged(f"skipped a damaged checkpoint: {error}")
    raise ValueError(f"no valid checkpoint in {folder}")


def resolve_checkpoint(spec: str | Path, run_dir: Path | None = None, *, verify: bool = True) -> Checkpoint:
    """The checkpoint that the user names: `last` (of `run_dir`), a checkpoint folder, or a run folder (its newest).

    See `read_checkpoint` for `verify`.
    """
    if str(spec) == "last":
        if run_dir is None:
            raise ValueError("ckpt_path=last needs a run folder")
        return latest_checkpoint(run_dir / "checkpoints", verify=verify)
    path = Path(spec)
    if not path.exists():
        raise ValueError(f"no such checkpoint or run folder: {path}")
    if (path / "checkpoints").exists():
        return latest_checkpoint(path / "checkpoints", verify=verify)
    return read_checkpoint(path, verify=verify)

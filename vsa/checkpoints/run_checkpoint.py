"""Checkpoint folders: safetensors keyed by parameter name plus `state.json`, no pickle.

A checkpoint is complete when its folder stands under its final name (`vsa.files.atomic_folder`); `state.json`, which
has the SHA-256 of the others and its own (`vsa.checkpoints.state_file`), is written last.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vsa.checkpoints.state_file import one_line, read_state, write_state
from vsa.checkpoints.weight_files import exhaust, refuse_key_difference, refuse_other_tensors
from vsa.files import atomic_folder, file_digest
from vsa.models.sharding import local, place, whole

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# of AdamW
_OPTIMIZER_FIELDS = ("step", "exp_avg", "exp_avg_sq")
_NAME = re.compile(r"step-(\d{8,})$")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint folder.

    Args:
        path: the folder.
        state: content of `state.json`: step, plan hash, latent statistics, encoder ids, digests.
    """

    path: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.state["step"]

    @property
    def schema(self) -> int:
        return self.state["schema"]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """CPU tensors of `name` ("model", "ema" or "optimizer"), read from the file where they are used."""
        path = self.path / f"{name}.safetensors"
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read ({one_line(error)})") from None

    def has(self, name: str) -> bool:
        return f"{name}.safetensors" in self.state["files"]

    def choose_weights(self, weights: Literal["ema", "model"] | None = None) -> Literal["ema", "model"]:
        """The weights that are asked for, or the averaged ones where there are any.

        Raises:
            ValueError: no weights of the name asked for.
        """
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
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], *, writes: bool = True
) -> Path:
    """Write `folder/step-N` from groups of tensors ("model", "ema", "optimizer") and the state.

    Sharded tensors are gathered one by one on their way to the file, so the whole model is in no process's memory.

    Args:
        folder: of all checkpoints.
        tensors: by group and name; with sharded ones this is a collective: every rank calls it with its shards.
        state: becomes `state.json`.
        writes: whether this process writes; one does.

    Raises:
        DiskFullError: names the checkpoint and the bytes; the checkpoints before it stay.
    """
    final = folder / checkpoint_name(state["step"])
    # the order of the files
    wholes = (whole(group[name]) for group in tensors.values() for name in _file_order(group))
    try:
        if writes:
            # litter of a save that was killed
            for left in folder.glob(".*-step-*"):
                shutil.rmtree(left)
            needed = sum(t.numel() * t.element_size() for group in tensors.values() for t in group.values())
            with atomic_folder(final, needed=needed, replace=True) as temporary:
                digests = {
                    f"{name}.safetensors": save_file(temporary / f"{name}.safetensors", group, wholes)
                    for name, group in tensors.items()
                }
                write_state(temporary, {**state, "files": digests})
    except OSError:
        exhaust(wholes)
        raise
    exhaust(wholes)
    return final


def _file_order(group: Mapping[str, Tensor]) -> list[str]:
    # large elements first: every tensor then starts at a multiple of its element size
    return sorted(group, key=lambda name: (-group[name].element_size(), name))


def save_file(path: Path, group: Mapping[str, Tensor], wholes: Iterator[Tensor]) -> str:
    """Write a safetensors file as its tensors come, and return its SHA-256 (the library wants all of them at once).

    Args:
        path: the file.
        group: tensors by name, for their dtypes and shapes.
        wholes: their values on the CPU in file order; no more are taken than the group has.
    """
    header: dict[str, Any] = {}
    end = 0
    for name in _file_order(group):
        tensor = group[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def write(data: Any) -> None:
            file.write(data)
            digest.update(data)

        write(len(text).to_bytes(8, "little"))
        write(text)
        for value in islice(wholes, len(group)):
            write(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders in `folder`, oldest first; they may be damaged."""
    return sorted((p for p in folder.glob("step-*") if _NAME.match(p.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint folder."""
    return int(_NAME.match(path.name)[1])  # type: ignore[index]


def read_checkpoint(path: str | Path, *, verify: bool = True) -> Checkpoint:
    """Open a checkpoint folder after checking its files.

    Args:
        path: the folder.
        verify: compare every digest, which reads every byte; False: only that the files are there in full length.

    Raises:
        ValueError: the folder is no checkpoint, is damaged, or has another schema.
    """
    path = Path(path)
    try:
        state = read_state(path)
        for name, digest in state["files"].items():
            _check_tensors(path, name, digest if verify else None)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"checkpoint {path} is damaged: {one_line(error)}") from None
    return Checkpoint(path=path, state=state)


def _check_tensors(path: Path, name: str, digest: str | None) -> None:
    try:
        if digest is not None and file_digest(path / name) != digest:
            raise ValueError(f"checkpoint {path} is damaged: {name} does not match its digest")
        # the header says how long the file is
        with safe_open(path / name, framework="pt"):
            pass
    except FileNotFoundError:
        raise ValueError(f"checkpoint {path} is damaged: {name} is missing") from None
    except SafetensorError as error:
        raise ValueError(f"checkpoint {path} is damaged: {name} cannot be read ({one_line(error)})") from None


def latest_checkpoint(folder: Path, on_damaged=print, *, verify: bool = True) -> Checkpoint:
    """The newest valid checkpoint in `folder` (see `read_checkpoint`); `on_damaged` is told of damaged newer ones.

    Raises:
        ValueError: no valid checkpoint is left.
    """
    for path in reversed(list_checkpoints(folder)):
        try:
            return read_checkpoint(path, verify=verify)
        except (ValueError, OSError) as error:
            on_damaged(f"skipped a damaged checkpoint: {error}")
    raise ValueError(f"no valid checkpoint in {folder}")


def resolve_checkpoint(spec: str | Path, run_dir: Path | None = None, *, verify: bool = True) -> Checkpoint:
    """The checkpoint a user names: `last` (of `run_dir`), a checkpoint folder, or a run folder (its newest).

    See `read_checkpoint` for `verify`.
    """
    if str(spec) == "last":
        if run_dir is None:
            raise ValueError("ckpt_path=last needs a run folder")
        return latest_checkpoint(run_dir / "checkpoints", verify=verify)
    path = Path(spec)
    if not path.exists():
        raise ValueError(f"no such checkpoint or run folder: {path}")
    if (path / "checkpoints").is_dir():
        return latest_checkpoint(path / "checkpoints", verify=verify)
    return read_checkpoint(path, verify=verify)


@torch.no_grad()
def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Copy `tensors` into the parameters of `model`; every key must fit.

    Raises:
        ValueError: a key is missing or left over, or a shape differs; the text names it and `what`.
    """
    parameters = dict(model.named_parameters())
    expected, actual = ({name: tuple(t.shape) for name, t in group.items()} for group in (parameters, tensors))
    refuse_other_tensors(expected, actual, what)
    for name, parameter in parameters.items():
        local(parameter).copy_(local(place(tensors[name], parameter)))


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """State of an optimizer built by `vsa.training.optimizer`, as `NAME/exp_avg` and so on (the tensors themselves)."""
    found = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = value
    return found


def without_state(optimizer: torch.optim.Optimizer) -> list[str]:
    """Parameters that have no state, because none of them ever had a gradient."""
    groups = [zip(group["names"], group["params"], strict=True) for group in optimizer.param_groups]
    return [name for group in groups for name, parameter in group if not optimizer.state.get(parameter)]


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    what: str,
    *,
    without: Collection[str] | None = None,
    most_updates: float = math.inf,
) -> None:
    """Put the state that `optimizer_state` gave back.

    Args:
        optimizer: built by `vsa.training.optimizer`.
        tensors: see `optimizer_state`.
        what: where they were found, for a message.
        without: see `without_state`; None: a checkpoint of the first schema does not say, what is missing has none.
        most_updates: of a parameter.

    Raises:
        ValueError: names state that is missing, is of other parameters or shapes, or is of more updates.
    """
    parameters = {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
    }
    if without is None:
        without = set(parameters) - {key.rpartition("/")[0] for key in tensors}
    expected = {f"{name}/{field}" for name in set(parameters) - set(without) for field in _OPTIMIZER_FIELDS}
    refuse_key_difference(expected, set(tensors), what)
    for key, value in tensors.items():
        name, _, field = key.rpartition("/")
        shape = () if field == "step" else tuple(parameters[name].shape)
        if tuple(value.shape) != shape:
            raise ValueError(f"{what}: {key} has shape {tuple(value.shape)}, the optimizer needs {shape}")
        if field == "step" and not 0 < float(value) <= most_updates:
            raise ValueError(f"{what}: {key} counts {float(value):g} updates in {most_updates:g} steps")
    for name, parameter in parameters.items():
        if name not in without:
            saved = {field: tensors[f"{name}/{field}"] for field in _OPTIMIZER_FIELDS}
            fields = {field: place(value, parameter) if value.ndim else value.clone() for field, value in saved.items()}
            optimizer.state[parameter] = fields

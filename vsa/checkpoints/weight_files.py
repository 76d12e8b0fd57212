"""Weights folders as diffusers writes them: `config.json` beside one safetensors file, or several with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vsa.checkpoints.sparse_config import SPARSE_CONFIG

WEIGHTS = "diffusion_pytorch_model"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*$")


def pretrained_folder(source: str | Path, subfolder: str = "transformer") -> Path:
    """The folder with a transformer's `config.json`, downloaded first when `source` is a hub id.

    Args:
        source: a pipeline's folder, a transformer's own folder, or the hub id of either.
        subfolder: of the transformer in a pipeline (`transformer_2` is the second expert of Wan2.2 A14B).

    Raises:
        ValueError: nothing of that name, or no transformer in it.
    """
    folder = Path(source)
    if not folder.exists():
        if not _HUB_ID.match(str(source)):
            raise ValueError(f"no such folder: {source}")
        folder = _download(str(source), subfolder)
    for candidate in (folder / subfolder, folder):
        if (candidate / "config.json").is_file():
            return candidate
    raise ValueError(f"{source} has no config.json, neither in itself nor in {subfolder}/")


def _download(hub_id: str, subfolder: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(f"{hub_id} is no folder, and a hub id needs the package huggingface_hub") from None
    # a transformer in a pipeline or at the top, and what says which latents it is for; `*` runs over slashes too
    patterns = [f"{subfolder}/*", "model_index.json", "vae/config.json"]
    patterns += ["config.json", f"{WEIGHTS}*", SPARSE_CONFIG, "golden.safetensors", "sampling.json"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        # the hub's own messages run over many lines
        raise ValueError(f"{hub_id} is no folder, and the hub does not give it: {type(error).__name__}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: the file is missing or holds no JSON object; names it.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} does not parse: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


class WeightFiles:
    """The tensors of a weights folder, read one at a time; opening reads the headers only.

    Args:
        folder: holds `NAME.safetensors`, or shards with an index.
        name: of the file.

    Raises:
        ValueError: no weights, a tensor in two files, or a file that is missing, damaged or does not agree with the
            index.
    """

    def __init__(self, folder: Path, name: str = WEIGHTS):
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        index = folder / f"{name}.safetensors.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{index} has no weight_map")
            for file in sorted(set(weight_map.values())):
                self._open(folder / file)
            if set(weight_map) != set(self._files):
                odd = sorted(set(weight_map) ^ set(self._files))
                raise ValueError(f"{index} and its files do not hold the same tensors: {', '.join(odd[:3])}")
            for key, file in weight_map.items():
                if self._names[key] != file:
                    raise ValueError(f"{index} has {key} in {file}, but it is in {self._names[key]}")
        elif (folder / f"{name}.safetensors").is_file():
            self._open(folder / f"{name}.safetensors")
        else:
            raise ValueError(f"{folder} has no {name}.safetensors and no index of shards")

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError:
            raise ValueError(f"{path} is missing") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        for key in file.keys():  # noqa: SIM118 (not a mapping)
            dtype = file.get_slice(key).get_dtype()
            if dtype not in DTYPES:
                raise ValueError(f"{path}: {key} has dtype {dtype}, only {', '.join(DTYPES)} can be read")
            if key in self._files:
                raise ValueError(f"{self.folder}: {key} is in two files, {self._names[key]} and {path.name}")
            self._files[key], self._names[key] = file, path.name

    @property
    def keys(self) -> list[str]:
        return list(self._files)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._files[key].get_slice(key).get_shape())

    def dtype(self, key: str) -> torch.dtype:
        return DTYPES[self._files[key].get_slice(key).get_dtype()]

    def read(self, key: str) -> Tensor:
        """The whole tensor on the CPU."""
        return self._files[key].get_tensor(key)

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Part of the first dimension, on the CPU."""
        return self._files[key].get_slice(key)[start:stop]


def refuse_key_difference(expected: Collection[str], actual: Collection[str], what: str) -> None:
    """Raise ValueError that names tensors which `what` lacks or has beside those of a model."""
    if missing := set(expected) - set(actual):
        raise ValueError(f"{what} lacks {len(missing)} tensors of the model: {some(missing)}")
    if unexpected := set(actual) - set(expected):
        raise ValueError(f"{what} has {len(unexpected)} tensors the model has no place for: {some(unexpected)}")


def refuse_other_tensors(
    expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]], what: str
) -> None:
    """Raise ValueError when names or shapes of tensors are not those of a model; `what` names where they were found."""
    refuse_key_difference(expected, actual, what)
    for key, shape in expected.items():
        if actual[key] != shape:
            raise ValueError(f"{what}: {key} has shape {actual[key]}, the model needs {shape}")


def some(keys: Collection[str]) -> str:
    """The first keys of many, for a message."""
    return ", ".join(sorted(keys)[:3]) + (", ..." if len(keys) > 3 else "")


def exhaust(values: Iterator[Any]) -> None:
    """Take part in gathering what this process does not write."""
    for _ in values:
        pass


def refuse_existing(folder: Path) -> None:
    """Raise ValueError when `folder` exists and is not empty; rank 0's view decides for all ranks."""
    taken = [folder.exists() and (not folder.is_dir() or any(folder.iterdir()))]
    if dist.is_initialized():
        # one rank that raised alone would leave the others waiting for it in a gather
        dist.broadcast_object_list(taken, src=0)
    if taken[0]:
        raise ValueError(f"{folder} already exists")


def write_weights(folder: Path, sizes: Mapping[str, int], values: Iterator[Tensor], max_shard_bytes: int) -> None:
    """Write tensors as safetensors shards with an index, or as one file when they fit; holds one shard in memory.

    Args:
        folder: exists.
        sizes: bytes of each tensor by name, in the order they are written.
        values: the tensors in the same order; no more are taken than are written next.
        max_shard_bytes: of one file; a larger tensor gets a file of its own.

    Raises:
        ValueError: max_shard_bytes below 1.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    shards: list[list[str]] = []
    used = max_shard_bytes
    for name, size in sizes.items():
        if used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    weight_map = {}
    for i, names in enumerate(shards):
        file = (
            f"{WEIGHTS}.safetensors" if len(shards) == 1 else f"{WEIGHTS}-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        )
        save_tensors({name: next(values).contiguous() for name in names}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / f"{WEIGHTS}.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """The library's `save_file`, but readable by everyone whom the umask lets."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=dict(metadata))
    path.chmod(mode)

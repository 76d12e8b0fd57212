"""Weights folders in diffusers' layout: `config.json` with one safetensors file, or several with an index."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from vsa import files
from vsa.checkpoints.experts import EXPERTS
from vsa.checkpoints.held_files import FORMATS, WEIGHTS, refuse_quantized, weights_file
from vsa.checkpoints.sparse_config import SPARSE_CONFIG
from vsa.data.pretrained import HUB_ID, model_files
from vsa.errors import refuse_unwritable
from vsa.files import inner_name, typed
from vsa.models.sharding import fill
from vsa.settings import Count

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
ROWS = "vsa.rows"
"""Key in a file's metadata: `{NAME: [first row, rows of the whole tensor]}` for tensors stored in parts."""

_FLOATS = ("F64", "F32", "F16", "BF16")


def is_hub_id(name: str) -> bool:
    """Whether a name is that of a repository on the hub and of nothing here."""
    return bool(HUB_ID.fullmatch(name)) and not Path(name).exists()


def local_folder(source: str | Path, subfolder: str = "transformer") -> Path:
    """The folder or file itself, or the folder of the downloaded weights of a Hugging Face id; ValueError if there is
    neither."""
    folder = Path(source)
    if folder.exists():
        return folder
    repository, expert = hub_parts(source)
    if (is_file := folder.suffix in FORMATS) or not HUB_ID.fullmatch(repository):
        raise ValueError(f"no such {'file' if is_file else 'folder'}: {source}")
    # a transformer in a pipeline or at the top, the config of its VAE, or a run; `*` also matches slashes
    patterns = [f"{expert or subfolder}/*", "model_index.json", "vae/config.json", "checkpoints/*", "run.json"]
    patterns += ["config.json", f"{WEIGHTS}*", SPARSE_CONFIG, "golden.safetensors", "sampling.json"]
    return model_files(repository, *patterns) / expert


def hub_parts(source: str | Path) -> tuple[str, str]:
    """The repository of a Hugging Face id, and the folder of one expert in it (`OWNER/NAME/transformer_2`), or ""."""
    repository, _, expert = str(source).rpartition("/")
    return (repository, expert) if expert in EXPERTS and HUB_ID.fullmatch(repository) else (str(source), "")


def pretrained_folder(source: str | Path, subfolder: str = "transformer") -> Path:
    """The folder with a transformer's `config.json`, which is downloaded first if `source` is a Hugging Face id.

    Args:
        source: folder of a pipeline or of a transformer, or the Hugging Face id of either.
        subfolder: folder of the transformer in a pipeline (`transformer_2` is the second expert of Wan2.2 A14B).

    Raises:
        ValueError: the source does not exist, or contains no transformer.
    """
    folder = local_folder(source, subfolder)
    for candidate in (folder / subfolder, folder):
        if (candidate / "config.json").is_file():
            return candidate
    if (folder / "checkpoints").is_dir() or (folder / "state.json").is_file():
        command = f"vsa convert {typed(Path(source))} EXPORT --to diffusers"
        raise ValueError(f"{source} is a run of this project: {command} makes weights of it")
    raise ValueError(f"{source} has no config.json, neither in itself nor in {subfolder}/")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError names a file that is missing or contains none."""
    try:
        return files.read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} is missing") from None


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor in one file, from `first` to `stop` (exclusive)."""

    first: int
    stop: int
    name: str
    file: Any


class TensorFiles:
    """Tensors in several files, each in one file or divided by rows over several, read one at a time.

    Opening reads the headers only, and reading rows reads no others.

    Args:
        folder: folder of the files.
        names: names of the files.

    Raises:
        ValueError: a file is missing or damaged, a tensor is in two files, or rows are missing.
    """

    def __init__(self, folder: Path, names: Iterable[str]):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        self.names = list(names)
        for name in self.names:
            self._open(name)
        for key, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece.first)
            end = 0
            for piece in pieces:
                if piece.first != end:
                    what = "in two files" if piece.first < end else "missing"
                    raise ValueError(f"{folder}: rows {min(piece.first, end)} and on of {key} are {what}")
                end = piece.stop
            if end != (self.shapes[key] or (1,))[0]:
                raise ValueError(f"{folder}: rows {end} and on of {key} are missing")

    def _open(self, name: str) -> None:
        path = self.folder / name
        try:
            file = files.open_tensors(path)
        except FileNotFoundError:
            raise ValueError(f"{path} is missing") from None
        rows = (file.metadata() or {}).get(ROWS, "{}")
        parts = files.parse_json(rows, f"{path}, {ROWS}", dict[str, tuple[Count, Count]])
        for key in file.keys():  # noqa: SIM118 (not a mapping)
            shape = tuple(file.get_slice(key).get_shape())
            count = shape[0] if shape else 1
            first, whole = parts.get(key, (0, count))
            if key in self._pieces and key not in parts:
                raise ValueError(f"{self.folder}: {key} is in two files, {self.file_of(key)} and {name}")
            shape = (whole, *shape[1:]) if shape else shape
            if self.shapes.setdefault(key, shape) != shape:
                raise ValueError(f"{self.folder}: {key} has shape {shape} in {name}, {self.shapes[key]} elsewhere")
            self._pieces.setdefault(key, []).append(_Piece(first, first + count, name, file))

    @property
    def keys(self) -> list[str]:
        return list(self._pieces)

    def refuse_other_values(self, integers: Collection[str] = ()) -> None:
        """Raise ValueError for files without tensors, and for values that are no floating-point numbers of 16 bits or
        more.

        Args:
            integers: keys that may have integers.
        """
        if empty := sorted(set(self.names) - set(map(self.file_of, self._pieces))):
            raise ValueError(f"{self.folder / empty[0]} holds no tensors")
        for key in self._pieces:
            path, dtype = self.folder / self.file_of(key), self._stored_dtype(key)
            refuse_quantized(path, key, dtype)
            if dtype not in _FLOATS and not (key in integers and dtype[0] in "IU"):
                raise ValueError(f"{path}: {key} has dtype {dtype}, only {', '.join(_FLOATS)} can be read")

    def file_of(self, key: str) -> str:
        """Name of the file of a tensor, the first one if several hold it."""
        return self._pieces[key][0].name

    def dtype(self, key: str) -> torch.dtype:
        return DTYPES[self._stored_dtype(key)]

    def _stored_dtype(self, key: str) -> str:
        return self._pieces[key][0].file.get_slice(key).get_dtype()

    def read(self, key: str) -> Tensor:
        """The whole tensor on the CPU."""
        return self._joined(key, [piece.file.get_tensor(key) for piece in self._pieces[key]])

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor (first dimension), on the CPU."""
        pieces = [
            piece.file.get_slice(key)[max(start, piece.first) - piece.first : min(stop, piece.stop) - piece.first]
            for piece in self._pieces[key]
            if (piece.first < stop and start < piece.stop) or len(self._pieces[key]) == 1
        ]
        return self._joined(key, pieces)

    def _joined(self, key: str, pieces: list[Tensor]) -> Tensor:
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def fill(self, tensor: Tensor, key: str) -> None:
        """Copy the values into a tensor, which may be sharded; each rank reads its own rows."""
        if tensor.ndim:
            fill(tensor, partial(self.rows, key))
        else:
            tensor.copy_(self.read(key))


class WeightFiles(TensorFiles):
    """The tensors of a weights folder.

    Args:
        place: folder, or file, see `weights_file`.

    Raises:
        ValueError: the weights are missing, a tensor is in two files, or a file is missing, damaged or contradicts the
            index.
    """

    def __init__(self, place: Path):
        index = weights_file(place)
        folder, weight_map = index.parent, None
        if index.suffix == ".json":
            stored_map = read_json(index).get("weight_map")
            if not isinstance(stored_map, dict):
                raise ValueError(f"{index} has no weight_map")
            weight_map = stored_map
            super().__init__(folder, sorted({inner_name(file, index) for file in stored_map.values()}))
        else:
            super().__init__(folder, [index.name])
        self.refuse_other_values()
        if weight_map is None:
            return
        if set(weight_map) != set(self._pieces):
            odd = sorted(set(weight_map) ^ set(self._pieces))
            raise ValueError(f"{index} and its files do not hold the same tensors: {', '.join(odd[:3])}")
        for key, file in weight_map.items():
            if self.file_of(key) != file:
                raise ValueError(f"{index} has {key} in {file}, but it is in {self.file_of(key)}")


def refuse_key_difference(expected: Collection[str], actual: Collection[str], what: str) -> None:
    """Raise ValueError that names tensors which are missing or unexpected in `what`, compared with a model."""
    if missing := set(expected) - set(actual):
        raise ValueError(f"{what} lacks {len(missing)} tensors of the model: {some(missing)}")
    if unexpected := set(actual) - set(expected):
        raise ValueError(f"{what} has {len(unexpected)} tensors the model has no place for: {some(unexpected)}")


def refuse_other_tensors(
    expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]], what: str
) -> None:
    """Raise ValueError if names or shapes of tensors differ from those of a model; `what` names their origin."""
    refuse_key_difference(expected, actual, what)
    other = [f"{key} has shape {actual[key]}, the model needs {s}" for key, s in expected.items() if actual[key] != s]
    if other:
        more = f"; and {len(other) - 3} more" if len(other) > 3 else ""
        raise ValueError(f"{what}: {'; '.join(other[:3])}{more}")


def finite(tensor: Tensor, name: str, what: str) -> Tensor:
    """The tensor; ValueError that names it and `what`, its origin, if one of its values is NaN or infinite."""
    # both ends are NaN if one value is; they are read at 5 GB a second with one core, where `isfinite` needs a copy
    if tensor.is_floating_point() and tensor.numel() and not all(map(math.isfinite, tensor.aminmax())):
        raise ValueError(f"{what}: {int((~tensor.isfinite()).sum())} values of {name} are NaN or infinite")
    return tensor


def some(keys: Collection[str]) -> str:
    """The first few keys, for a message."""
    return ", ".join(sorted(keys)[:3]) + (", ..." if len(keys) > 3 else "")


def exhaust(values: Iterator[Any]) -> None:
    """Consume the iterator on ranks that do not write, to take part in its gathers."""
    for _ in values:
        pass


def refuse_existing(folder: Path) -> None:
    """Raise ValueError if `folder` exists and is not empty; rank 0 decides for all ranks."""
    exists = [folder.exists() and (not folder.is_dir() or any(folder.iterdir()))]
    if dist.is_initialized():
        # all ranks must raise, since the others would wait for this one in a gather
        dist.broadcast_object_list(exists, src=0)
    if exists[0]:
        raise ValueError(f"{folder} already exists")
    if not dist.is_initialized():
        refuse_unwritable(folder)


def write_weights(folder: Path, sizes: Mapping[str, int], values: Iterator[Tensor], max_shard_bytes: int) -> None:
    """Write tensors as safetensors shards with an index, or as one file if they fit; keeps one shard in memory.

    Args:
        folder: existing folder.
        sizes: bytes of each tensor by name, in the order of writing.
        values: the tensors in the same order, consumed shard by shard.
        max_shard_bytes: largest size of a file; a larger tensor gets its own file.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    shards: list[list[str]] = []
    shard_bytes = max_shard_bytes
    for name, size in sizes.items():
        if shard_bytes + size > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += size
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
    """`save_file` of safetensors, with file permissions according to the umask."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=dict(metadata))
    path.chmod(mode)

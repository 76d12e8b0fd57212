"""Component folders of pretrained pipelines, and a digest of their weights that does not read them in full."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vsa.files import check_kind, inner_name, open_regular, open_tensors, parse_json, read_json
from vsa.settings import Count

if TYPE_CHECKING:
    from torch import Tensor

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
"""Name of a repository on the Hugging Face hub, OWNER/NAME; a local folder of this name takes precedence."""

# an entry of the header of a safetensors file
_ENTRY = {"dtype": str, "shape": list[Count], "data_offsets": tuple[Count, Count]}
# number of bytes at the start and the end of every tensor that the digest covers
_SAMPLED_BYTES = 4096


def refuse_unknown(source: str | Path, where: str = "") -> None:
    """Raise ValueError, which begins with `where`, for what is neither a folder nor has the form of a hub id."""
    if not Path(source).is_dir() and not HUB_ID.fullmatch(str(source)):
        raise ValueError(f"{where}no such model folder: {source}; a hub id is OWNER/NAME")


def component_folder(source: str | Path, name: str) -> Path:
    """The folder of one component of a diffusers pipeline.

    Args:
        source: a local pipeline folder or a hub id, of which only this component is downloaded.
        name: component: "vae", "text_encoder", "tokenizer", "transformer".
    """
    folder = model_files(source, f"{name}/*")
    if not (folder / name).is_dir():
        raise ValueError(f"model folder {source} has no {name}/")
    # the libraries that load it follow the names in an index anywhere
    for index in (folder / name).glob("*.index.json"):
        for file in read_json(index, kind={"weight_map": dict})["weight_map"].values():
            inner_name(file, index)
    return folder / name


def pipeline_index(source: str | Path) -> dict[str, Any]:
    """The `model_index.json` of a diffusers pipeline, a local folder or a hub id; empty for a folder without it."""
    file = model_files(source, "model_index.json") / "model_index.json"
    return read_json(file, kind={"_class_name": str}) if file.is_file() else {}


def model_files(source: str | Path, *patterns: str) -> Path:
    """A local folder itself, or that of the files of a hub id with patterns, which are downloaded."""
    if Path(source).is_dir():
        return Path(source)
    refuse_unknown(source)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(source), allow_patterns=[*patterns]))
    # the hub client has many kinds of errors, which all mean that the files cannot be loaded
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{source} is neither a local folder nor a hub id that can be loaded: {reason}") from error


def read_config(folder: Path, *class_names: str) -> dict[str, Any]:
    """The `config.json` of a component.

    Args:
        folder: component folder.
        class_names: the config must name one of these classes, as diffusers (`_class_name`) or transformers
            (`architectures`) do.
    """
    path = folder / "config.json"
    kind = {"_class_name?": str | None, "architectures?": list[str] | None}
    try:
        config = read_json(path, kind=kind)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    actual = config.get("_class_name") or ", ".join(config.get("architectures") or ["nothing"])
    if actual not in class_names:
        raise ValueError(f"{path} describes {actual}, expected {' or '.join(class_names)}")
    return config


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest of a config without the keys that only describe the library that wrote it."""
    names = {"transformers_version", "torch_dtype", "dtype"}
    content = {key: value for key, value in config.items() if not key.startswith("_") and key not in names}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def weights_digest(folder: Path, names: Iterable[str] | None = None) -> str:
    """Digest of the tensors in safetensors files of a folder (None: all), independent of their division into files.

    It covers names, types, shapes and both ends of every tensor's bytes. Training changes all tensors, so different
    models differ there, and 20 GB of weights are distinguished in milliseconds.
    """
    files = sorted(folder.glob("*.safetensors") if names is None else map(folder.joinpath, names))
    if not files:
        raise ValueError(f"{folder} has no safetensors weights")
    entries: dict[str, str] = {}
    for path in files:
        try:
            with open_regular(path) as file:
                length = int.from_bytes(file.read(8), "little")
                # the largest header that safetensors writes
                if not 0 < length < min(path.stat().st_size, 10**8):
                    raise ValueError(f"a header of {length} bytes in a file of {path.stat().st_size}")
                header = parse_json(file.read(length), "its header")
                header.pop("__metadata__", None)
                check_kind(header, {str: _ENTRY}, "its header")
                for name, entry in header.items():
                    start, end = (8 + length + offset for offset in entry["data_offsets"])
                    if end < start:
                        raise ValueError(f"tensor {name} ends before it begins")
                    digest = hashlib.sha256(f"{entry['dtype']} {entry['shape']}".encode())
                    size = min(_SAMPLED_BYTES, end - start)
                    for place in (start, end - size):
                        file.seek(place)
                        piece = file.read(size)
                        if len(piece) != size:
                            raise ValueError(f"tensor {name} is cut short")
                        digest.update(piece)
                    entries[name] = digest.hexdigest()
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read weights {path}: {error}") from error
    return hashlib.sha256(json.dumps(sorted(entries.items())).encode()).hexdigest()


def read_tensor(folder: Path, name: str) -> Tensor:
    """One tensor of the safetensors files of a folder."""
    for path in sorted(folder.glob("*.safetensors")):
        tensors = open_tensors(path)
        if name in tensors.keys():  # noqa: SIM118
            return tensors.get_tensor(name)
    raise ValueError(f"the weights in {folder} have no tensor {name}")


def refuse_missing(info: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError for a model with tensors that its weight files lack, which would stay random.

    Args:
        info: loading info of diffusers or transformers.
        folder: folder of the weights.
    """
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"the weights in {folder} lack {len(missing)} tensors, first {missing[0]}")

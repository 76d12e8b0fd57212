"""What adapter files change, in the key forms of diffusers, peft, ComfyUI, musubi-tuner and FastVideo.

Files have low-rank factors, differences of whole tensors, and tensors that replace those of the model, such as gates.
They mean `W + (alpha / rank) * B A`, alpha = rank unless it says another, then `W + diff`, then `W = set`.

Sources: FastVideo `fastvideo-lora-v2` ("W = W_base + lora_B @ lora_A; then .diff/.diff_b added and .set_weight
assigned"); diffusers 0.42 `loaders/lora_conversion_utils.py` for the other forms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from vsa.checkpoints.held_files import PREFIXES, nearest
from vsa.checkpoints.original_names import Rows, Shapes, original_rows, own_name
from vsa.checkpoints.wan_names import is_gate
from vsa.checkpoints.weight_files import TensorFiles, refuse_other_tensors, some
from vsa.files import open_tensors

_ENDINGS = {
    ".lora_A.weight": (".weight", "down"),
    ".lora_B.weight": (".weight", "up"),
    ".lora_down.weight": (".weight", "down"),
    ".lora_up.weight": (".weight", "up"),
    ".alpha": (".weight", "alpha"),
    ".diff": (".weight", "diff"),
    ".diff_b": (".bias", "diff"),
    ".diff_param": ("", "diff"),
    ".set_weight": (".weight", "set"),
    ".set_param": ("", "set"),
    # after the factors, which end so too
    ".weight": (".weight", "set"),
    ".bias": (".bias", "set"),
}
"""Endings of keys: the ending of the parameter instead, and what the tensor is to it."""

_PREFIXES = ("base_model.model.", *PREFIXES, "lora_unet_")


class AdapterChanges(Mapping[str, Mapping[str, str]]):
    """Keys in adapter files by the parameter that they change and by their part in the change.

    Gates may be new, all other parameters have to be those of the model.

    Args:
        files: opened files.
        shapes: shapes of the model's parameters by name; files may have original names, or join them by underscores.
        place: name of the files for messages.
        model: name of the model for messages.

    Raises:
        ValueError: names keys that are unknown, without a parameter or their other factor, or of another shape, and
            files whose scales are in their metadata.
    """

    def __init__(self, files: TensorFiles, shapes: Shapes, place: str, model: str):
        self._files, self._rows = files, dict[tuple[str, str], Rows]()
        for name in files.names:
            if "lora_adapter_metadata" in (open_tensors(files.folder / name).metadata() or {}):
                hint = "load it by load_lora_weights of the pipeline and fuse it"
                raise ValueError(f"{files.folder / name} has its scales in its metadata: {hint}")
        self._parts = self._found(shapes, place)
        # a new gate is as large as the whole tensor of the file
        whole = {name: key for name, parts in self._parts.items() if (key := parts.get("set", parts.get("diff")))}
        self.new = {name: files.shape(key) for name, key in whole.items() if name not in shapes and is_gate(name)}
        known = {**shapes, **self.new}
        if missing := [name for name in self._parts if name not in known]:
            raise ValueError(
                f"{place} changes parameters that {model} lacks {some(missing)}{nearest(missing[0], known)}"
            )
        factors = {name: {"down", "up", "alpha"} & parts.keys() for name, parts in self.items()}
        if single := [name for name, own in factors.items() if own and not {"down", "up"} <= own]:
            raise ValueError(f"{place} has one of two factors of {some(single)}")
        expected = {key: shape for name in self for key, shape in self._expected(name, known[name]).items()}
        refuse_other_tensors(expected, files.shapes, place)

    def _found(self, shapes: Shapes, place: str) -> dict[str, dict[str, str]]:
        spellings, found = _spellings(shapes), dict[str, dict[str, str]]()
        unknown = []
        for key in self._files.keys:
            plain = key.replace(".default.weight", ".weight")
            for prefix in _PREFIXES:
                plain = plain.removeprefix(prefix)
            if (ending := next((ending for ending in _ENDINGS if plain.endswith(ending)), None)) is None:
                unknown.append(key)
                continue
            parameter_ending, part = _ENDINGS[ending]
            parameter = plain.removesuffix(ending) + parameter_ending
            named = spellings.get(parameter)
            if named is None:
                found.setdefault(own_name(parameter, shapes) if is_gate(parameter) else parameter, {})[part] = key
            for name, rows in (named or {}).items():
                found.setdefault(name, {})[part] = key
                if rows is not None and part not in ("down", "alpha"):
                    self._rows[name, part] = rows
            if len(named or ()) > 1 and plain not in key:
                hint = "load it by load_lora_weights of the pipeline and fuse it"
                raise ValueError(f"{place} is of DiffSynth-Studio, with the rows of {key} head by head: {hint}")
        if unknown:
            raise ValueError(f"{place} has keys of no known form {some(unknown)}, known are {', '.join(_ENDINGS)}")
        return found

    def _expected(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        parts = self[name]
        rank = (*self._files.shapes.get(parts.get("down", ""), ()), 0)[0]
        # one tensor of the file may hold several parameters
        totals = {part: self._rows[name, part].total for part in parts if (name, part) in self._rows and shape}
        shapes: dict[str, tuple[int, ...]] = {part: (total, *shape[1:]) for part, total in totals.items()}
        shapes |= {"down": (rank, math.prod(shape[1:])), "up": (*shapes.get("up", shape)[:1], rank)}
        if "alpha" in parts:
            # one number, with or without a dimension
            own = self._files.shape(parts["alpha"])
            shapes["alpha"] = own if math.prod(own) == 1 else ()
        return {key: shapes.get(part, shape) for part, key in parts.items()}

    def changed(self, name: str, value: Tensor, scale: float = 1.0) -> Tensor:
        """A parameter after its change, which is computed in float32 at least.

        Args:
            name: its name.
            value: the parameter before; a new gate is zero.
            scale: factor of the differences; tensors that replace are not scaled.
        """
        dtype = torch.promote_types(value.dtype, torch.float32)
        parts = {part: self._files.read(key).to(value.device, dtype) for part, key in self[name].items()}
        parts |= {part: self._rows[name, part].of(parts[part]) for part in parts if (name, part) in self._rows}
        new = value.to(dtype)
        if "down" in parts:
            rank = len(parts["down"])
            alpha = parts["alpha"].item() if "alpha" in parts else rank
            new = new + scale * alpha / max(rank, 1) * (parts["up"] @ parts["down"]).view_as(new)
        if "diff" in parts:
            new = new + scale * parts["diff"]
        return parts.get("set", new).to(value.dtype)

    def __getitem__(self, name: str) -> Mapping[str, str]:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _spellings(shapes: Shapes) -> dict[str, dict[str, Rows | None]]:
    """The parameters that every name of a file stands for, with their rows in its tensor; None: they are all of it."""
    spellings: dict[str, dict[str, Rows | None]] = {name: {name: None} for name in shapes}
    originals: dict[str, dict[str, Rows | None]] = {}
    for name, rows in original_rows(shapes).items():
        originals.setdefault(rows.key, {})[name] = rows
    for names in (spellings, originals):
        for spelling, parameters in list(names.items()):
            module, _, kind = spelling.rpartition(".")
            spellings.setdefault(spelling, parameters)
            spellings.setdefault(f"{module.replace('.', '_')}.{kind}", parameters)
    return spellings

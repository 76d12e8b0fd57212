"""What adapter files change, in the key forms of diffusers, peft, ComfyUI, musubi-tuner and FastVideo.

Files have low-rank factors, differences of whole tensors, and tensors that replace those of the model, such as gates.
They mean `W + (alpha / rank) * B A`, alpha = rank unless `.alpha` or a config says another, then `W + diff`, then
`W = set`.

Sources: FastVideo `fastvideo-lora-v2` ("W = W_base + lora_B @ lora_A; then .diff/.diff_b added and .set_weight
assigned"); diffusers 0.42 `loaders/lora_conversion_utils.py` for the other forms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from vsa.checkpoints.adapter_config import CONFIG, configs_of, scale_of
from vsa.checkpoints.held_files import PREFIXES, nearest, other_format
from vsa.checkpoints.original_names import Rows, Shapes, original_rows, own_name
from vsa.checkpoints.wan_names import is_gate
from vsa.checkpoints.weight_files import TensorFiles, finite, refuse_other_tensors, some
from vsa.files import check_kind
from vsa.settings import Positive

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
    # of a layer that has adapters too, trained beside them
    ".base_layer.bias": (".bias", "set"),
    # after the factors, which end so too
    ".weight": (".weight", "set"),
    ".bias": (".bias", "set"),
}
"""Endings of keys: the ending of the parameter instead, and what the tensor is to it."""

_PREFIXES = ("base_model.model.", *PREFIXES, "lora_unet_")


def open_adapters(place: Path) -> TensorFiles:
    """A file of adapters, or all of a folder, such as those of `write_adapters` and of peft.

    Raises:
        ValueError: there is none, it is damaged or of another format, or several lie beside the config of one.
    """
    if place.is_file() and place.suffix != ".safetensors":
        raise ValueError(other_format(place))
    names = sorted(file.name for file in place.glob("*.safetensors")) if place.is_dir() else [place.name]
    if not names:
        raise ValueError(f"{place} holds no .safetensors file of adapters")
    if len(names) > 1 and (place / CONFIG).is_file():
        raise ValueError(f"{place} has {CONFIG} for one file, and files of adapters {some(names)}: name one of them")
    return TensorFiles(place if place.is_dir() else place.parent, names)


class AdapterChanges(Mapping[str, Mapping[str, str]]):
    """Keys in adapter files by the parameter that they change and by their part in the change.

    Gates may be new, all other parameters have to be those of the model.

    Args:
        files: opened files.
        shapes: shapes of the model's parameters by name; files may have original names, or join them by underscores.
        place: name of the files for messages.
        model: name of the model for messages.
        class_name: class whose original names the files may have, see `original_rows`.

    Raises:
        ValueError: names keys that are unknown, without a parameter or their other factor, of another type or shape,
            and scales that are not understood or contradict each other.
    """

    def __init__(self, files: TensorFiles, shapes: Shapes, place: str, model: str, class_name: str):
        self._files, self._place = files, place
        self._rows, self._modules = dict[tuple[str, str], Rows](), dict[str, str]()
        files.refuse_other_values(integers=[key for key in files.keys if key.endswith(".alpha")])
        self.configs = {name: configs_of(files.folder, name) for name in files.names}
        self._parts = self._found(shapes, place, class_name)
        # a new gate is as large as the whole tensor of the file
        gates = {name: parts for name, parts in self._parts.items() if name not in shapes and is_gate(name)}
        self.new = {name: files.shapes[key] for name, own in gates.items() if (key := own.get("set", own.get("diff")))}
        known = {**shapes, **self.new}
        if missing := [name for name in self._parts if name not in known]:
            raise ValueError(
                f"{place} changes parameters that {model} lacks {some(missing)}{nearest(missing[0], known)}"
            )
        factors = {name: {"down", "up", "alpha"} & parts.keys() for name, parts in self.items()}
        if single := [name for name, own in factors.items() if own and not {"down", "up"} <= own]:
            raise ValueError(f"{place} has one of two factors of {some(single)}")
        if replaced := [name for name, parts in self.items() if "set" in parts and len(parts) > 1]:
            raise ValueError(f"{place} has both a change and the whole of {some(replaced)}")
        expected = {key: shape for name in self for key, shape in self._expected(name, known[name]).items()}
        refuse_other_tensors(expected, files.shapes, place)
        self.scales = {name: self._scale(parts) for name, parts in self.items() if "down" in parts}

    def _scale(self, parts: Mapping[str, str]) -> float:
        """The factor of `B A`, on which all that names it has to agree but for rounding."""
        down = parts["down"]
        rank, configs = self._files.shapes[down][0], self.configs[self._files.file_of(down)].items()
        scales = {name: scale_of(self._modules[down], rank, name, fields) for name, fields in configs}
        if "alpha" in parts:
            alpha = self._files.read(parts["alpha"]).item()
            check_kind(alpha, Positive, self._place, parts["alpha"])
            scales[parts["alpha"]] = alpha / rank
        if max(scales.values(), default=1) > min(scales.values(), default=1) * (1 + torch.finfo(torch.bfloat16).eps):
            said = " and ".join(f"{scale:g} by {name}" for name, scale in scales.items())
            raise ValueError(f"{self._place}: {down} is scaled by {said}")
        return next(iter(scales.values()), 1.0)

    def _found(self, shapes: Shapes, place: str, class_name: str) -> dict[str, dict[str, str]]:
        spellings, found = _spellings(shapes, class_name), dict[str, dict[str, str]]()
        unknown = []
        for key in self._files.keys:
            plain = key.replace(".default.weight", ".weight")
            for prefix in _PREFIXES:
                plain = plain.removeprefix(prefix)
            if (ending := next((ending for ending in _ENDINGS if plain.endswith(ending)), None)) is None:
                unknown.append(key)
                continue
            parameter_ending, part = _ENDINGS[ending]
            self._modules[key] = plain.removesuffix(ending)
            parameter = self._modules[key] + parameter_ending
            named = spellings.get(parameter)
            if named is None:
                found.setdefault(own_name(parameter, class_name) if is_gate(parameter) else parameter, {})[part] = key
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
        rank = max((*self._files.shapes.get(parts.get("down", ""), ()), 0)[0], 1)
        # one tensor of the file may hold several parameters
        totals = {part: self._rows[name, part].total for part in parts if (name, part) in self._rows and shape}
        shapes: dict[str, tuple[int, ...]] = {part: (total, *shape[1:]) for part, total in totals.items()}
        shapes |= {"down": (rank, math.prod(shape[1:])), "up": (*shapes.get("up", shape)[:1], rank)}
        if "alpha" in parts:
            # one number, with or without a dimension
            own = self._files.shapes[parts["alpha"]]
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
        read = {part: finite(self._files.read(key), key, self._place) for part, key in self[name].items()}
        parts = {part: tensor.to(value.device, dtype) for part, tensor in read.items()}
        parts |= {part: self._rows[name, part].of(parts[part]) for part in parts if (name, part) in self._rows}
        new = value.to(dtype)
        if "down" in parts:
            new = new + scale * self.scales[name] * (parts["up"] @ parts["down"]).view_as(new)
        if "diff" in parts:
            new = new + scale * parts["diff"]
        return parts.get("set", new).to(value.dtype)

    def __getitem__(self, name: str) -> Mapping[str, str]:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _spellings(shapes: Shapes, class_name: str) -> dict[str, dict[str, Rows | None]]:
    """The parameters that every name of a file stands for, with their rows in its tensor; None: they are all of it."""
    spellings: dict[str, dict[str, Rows | None]] = {name: {name: None} for name in shapes}
    originals: dict[str, dict[str, Rows | None]] = {}
    for name, rows in original_rows(shapes, class_name).items():
        originals.setdefault(rows.key, {})[name] = rows
    for names in (spellings, originals):
        for spelling, parameters in list(names.items()):
            module, _, kind = spelling.rpartition(".")
            spellings.setdefault(spelling, parameters)
            spellings.setdefault(f"{module.replace('.', '_')}.{kind}", parameters)
    return spellings

"""The strength of adapters by the config beside or in their file: that of peft, diffusers and finetrainers.

A field that changes what adapters mean, and that is not read here, is an error unless it is empty or false. The
`ss_network_...` of kohya's trainers are notes: no reader of theirs scales by them, and their converters keep them
beside factors that have the scale in themselves.

Sources: peft 0.21 `LoraLayer.update_layer` (scales), `utils/other.py` (`get_pattern_key`); diffusers 0.42
`loaders/lora_base.py` (`lora_adapter_metadata`); finetrainers (`lora_config`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from vsa.files import check_kind, open_tensors, parse_json, read_json, shown
from vsa.settings import AtLeastOne, Positive

# what peft writes
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# where diffusers and finetrainers write the same into the metadata of a file
_METADATA = ("lora_adapter_metadata", "lora_config")

_KINDS: dict[str, Any] = {"peft_type?": Literal["LORA"], "r?": AtLeastOne, "lora_alpha?": Positive, "use_rslora?": bool}
_KINDS |= {"rank_pattern?": {str: AtLeastOne}, "alpha_pattern?": {str: Positive}}
# fields that are read, and notes of where adapters come from, which layers have them, and how they were trained: biases
# and whole modules are tensors of the file, and linear layers have no other order of dimensions
_KNOWN = re.compile(
    "peft_type|r|lora_alpha|use_rslora|rank_pattern|alpha_pattern|init_lora_weights|task_type|auto_mapping|peft_version|"
    "base_model_name_or_path|revision|inference_mode|target_modules|exclude_modules|layers_to_transform|layers_pattern|"
    "modules_to_save|lora_dropout|bias|fan_in_fan_out|megatron_core|runtime_config|loftq_config|eva_config|corda_config|"
    "lora_ga_config|qalora_group_size|ensure_weight_tying"
)
# values of `init_lora_weights` that leave the base as it is; the others subtract the first adapters from it
_INITIAL = ("true", "false", "gaussian", "eva", "orthogonal", "mica")
# patterns whose time may double with every letter of a module's name: above 200 characters, with a repeated
# group, one that is neither plain nor looks ahead, or more than five groups and repetitions
_SLOW = re.compile(r"[\s\S]{201}|\)[*+{]|\(\?[^:=!]|(?:[^(*+?{]*[(*+?{]){6}")


def configs_of(folder: Path, name: str) -> dict[str, Mapping[str, Any]]:
    """The configs of a file of adapters by their names: the one that peft writes beside it, and those in its metadata.

    Raises:
        ValueError: adapters of another kind, a field that is not understood, or a value of another type.
    """
    file, path = folder / name, folder / CONFIG
    metadata = open_tensors(file).metadata() or {}
    # notes that have no common meaning
    if notes := [f"{k}={shown(metadata[k])}" for k in ("network_alphas", "alpha", "lora_alpha") if k in metadata]:
        raise ValueError(f"{file} has {notes[0]} in its metadata, a strength that is not read: write .alpha tensors")
    configs = {f"{file}, {key}": parse_json(metadata[key], f"{file}, {key}") for key in _METADATA if key in metadata}
    # in a folder with several files it belongs to the one that peft names
    if path.is_file() and (name == WEIGHTS or not (folder / WEIGHTS).exists()):
        configs[str(path)] = read_json(path)
    return {place: _checked(place, fields) for place, fields in configs.items()}


def _checked(name: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    # diffusers writes the part of the pipeline before the fields; peft reads no config without a type
    fields = {
        k.removeprefix("transformer."): value for k, value in fields.items() if value is not None or k == "peft_type"
    }
    check_kind(fields, _KINDS, name)
    if slow := [*filter(_SLOW.search, (*fields.get("rank_pattern", ()), *fields.get("alpha_pattern", ())))]:
        raise ValueError(f"{name} has {shown(slow[0])}, a pattern too long or repeated to end: let peft merge it")
    initial = fields.get("init_lora_weights", True)
    if str(initial).lower() not in _INITIAL:
        hint = "save them for the original one, with path_initial_model_for_weight_conversion"
        raise ValueError(f"{name} has init_lora_weights={initial}, whose adapters belong to a changed base: {hint}")
    if others := [f"{key}={shown(value)}" for key, value in fields.items() if value and not _KNOWN.fullmatch(key)]:
        raise ValueError(f"{name} has {', '.join(others[:3])}, which cannot be merged here: let peft merge it")
    return fields


def scale_of(module: str, rank: int, name: str, fields: Mapping[str, Any]) -> float:
    """The factor of `B A` for a module by a config of `configs_of`; ValueError if it has another rank for it."""

    def stated(key: str, pattern: str) -> Any:
        fitting = (x for ending, x in fields.get(pattern, {}).items() if re.match(rf"(.*\.)?({ending})$", module))
        return next(fitting, fields.get(key, 8))

    try:
        r, alpha = stated("r", "rank_pattern"), stated("lora_alpha", "alpha_pattern")
    except re.error as error:
        raise ValueError(f"{name} has a pattern that does not parse: {error}") from None
    if r != rank:
        raise ValueError(f"{name} has rank {r} for {module}, its factors have {rank}")
    return alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)

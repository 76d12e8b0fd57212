"""`sampling.json`: settings that turn prompts into clips with converted weights.

It is a part of a run's `state.json`, under the same keys: codec and text encoder, statistics and shapes of the latents,
flow shift, settings of the run's own clips, and the step list of a distilled generator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vsa.checkpoints.sparse_config import SparseAttentionConfig
from vsa.checkpoints.weight_files import read_json
from vsa.data.index_values import channel_statistics
from vsa.files import check_kind

SAMPLING = "sampling.json"
_COMPONENT = {"id": str, "hash": str}
_KIND = {
    "latent_mean": list,
    "latent_std": list,
    "latent_shapes": list[tuple[int, int, int, int]],
    "codec": _COMPONENT,
    "text_encoder": _COMPONENT,
    "image_encoder?": _COMPONENT,
    "step_list": list[float] | None,
    "config": {"data": dict[str, Any], "task": {"objective": {"shift": dict}}, "callbacks": {"samples": dict}},
}
_STATE = ("latent_mean", "latent_std", "latent_shapes", "codec", "text_encoder")


def sampling_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Steps, guidance and flow shift of the clips that a run samples itself, as far as its config has them."""
    samples = (config.get("callbacks") or {}).get("samples") or {}
    names = ("steps", "guidance", "flow_shift")
    return {name: samples[name] for name in names if samples.get(name) is not None}


def sampling_part(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The part of a run's state that sampling needs; None if the state lacks any of it."""
    config = state.get("config") or {}
    data, objective = config.get("data") or {}, (config.get("task") or {}).get("objective") or {}
    needed = [*(state.get(key) for key in _STATE), data.get("codec"), data.get("text_encoder"), objective.get("shift")]
    if any(value is None for value in needed):
        return None
    return {
        **{key: state[key] for key in (*_STATE, "image_encoder", "fps") if key in state},
        "step_list": state.get("step_list"),
        "config": {
            "data": {key: data[key] for key in ("codec", "text_encoder", "text_padding") if key in data},
            "task": {"objective": {"shift": objective["shift"]}},
            "callbacks": {"samples": sampling_of(config)},
        },
    }


def sampling_of_export(sparse: SparseAttentionConfig) -> dict[str, float]:
    """Flow shift and guidance of an export, if known, as in `callbacks.samples` of a run."""
    settings = {}
    if sparse.flow_shift is not None:
        settings["flow_shift"] = sparse.flow_shift
    if sparse.guidance_scale is not None:
        settings["guidance"] = sparse.guidance_scale + (1 if sparse.guidance_form == "additive" else 0)
    return settings


def write_sampling_part(folder: Path, part: Mapping[str, Any]) -> None:
    """Write `sampling.json` into a weights folder before it gets its final name."""
    (folder / SAMPLING).write_text(json.dumps(part, indent=1) + "\n", encoding="utf-8")


def read_sampling_part(folder: Path) -> dict[str, Any] | None:
    """The `sampling.json` of a weights folder; None without one.

    Raises:
        ValueError: names a file that does not parse or is incomplete.
    """
    if not (folder / SAMPLING).is_file():
        return None
    values = read_json(folder / SAMPLING)
    check_kind(values, _KIND, folder / SAMPLING)
    part = sampling_part(values)
    if part is None or part != values:
        raise ValueError(f"{folder / SAMPLING} is not what a conversion of this project writes")
    channel_statistics(part, f"{folder / SAMPLING} has ")
    return part

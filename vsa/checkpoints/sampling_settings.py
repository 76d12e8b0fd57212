"""`sampling.json`: what prompts need beside a network to become clips, carried along when weights are converted.

It is a part of a run's `state.json`, under the same keys: the codec and the text encoder, statistics and shapes of the
latents, the shift of the noise levels, how the run samples its own clips, and the step list of a distilled generator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vsa.checkpoints.sparse_config import SparseAttentionConfig
from vsa.checkpoints.weight_files import read_json

SAMPLING = "sampling.json"
_STATE = ("latent_mean", "latent_std", "latent_shapes", "codec", "text_encoder")


def sampling_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Steps, guidance and flow shift of the clips that a run samples itself, as far as its config says."""
    samples = (config.get("callbacks") or {}).get("samples") or {}
    names = ("steps", "guidance", "flow_shift")
    return {name: samples[name] for name in names if samples.get(name) is not None}


def sampling_part(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The part of a run's state that sampling needs; None where the run lacks some of it."""
    config = state.get("config") or {}
    data, objective = config.get("data") or {}, (config.get("task") or {}).get("objective") or {}
    needed = [*(state.get(key) for key in _STATE), data.get("codec"), data.get("text_encoder"), objective.get("shift")]
    if any(value is None for value in needed):
        return None
    return {
        **{key: state[key] for key in _STATE},
        "step_list": state.get("step_list"),
        "config": {
            "data": {key: data[key] for key in ("codec", "text_encoder", "text_padding") if key in data},
            "task": {"objective": {"shift": objective["shift"]}},
            "callbacks": {"samples": sampling_of(config)},
        },
    }


def sampling_of_export(sparse: SparseAttentionConfig) -> dict[str, float]:
    """Flow shift and guidance of an export as `callbacks.samples` of a run says them, where they are known."""
    found = {}
    if sparse.flow_shift is not None:
        found["flow_shift"] = sparse.flow_shift
    if sparse.guidance_scale is not None:
        found["guidance"] = sparse.guidance_scale + (1 if sparse.guidance_form == "additive" else 0)
    return found


def write_sampling_part(folder: Path, part: Mapping[str, Any]) -> None:
    """Write `sampling.json` into a weights folder that has not got its name yet."""
    (folder / SAMPLING).write_text(json.dumps(part, indent=1) + "\n", encoding="utf-8")


def read_sampling_part(folder: Path) -> dict[str, Any] | None:
    """The `sampling.json` of a weights folder; None where it has none.

    Raises:
        ValueError: a file that does not parse or lacks something; names it.
    """
    if not (folder / SAMPLING).is_file():
        return None
    found = read_json(folder / SAMPLING)
    part = sampling_part(found)
    if part is None or part != found:
        raise ValueError(f"{folder / SAMPLING} is not what a conversion of this project writes")
    return part

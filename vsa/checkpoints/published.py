"""Weights of a run as they are published: an export where its model has one, else a run with weights only.

Settings that lead to files of this machine are refused or replaced, so that others can use what is published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vsa.checkpoints.convert import Conversion, convert
from vsa.checkpoints.places import MANIFEST, PATHS, STARTED_IN
from vsa.checkpoints.run_checkpoint import Checkpoint
from vsa.checkpoints.run_weights import Group, RunWeights
from vsa.checkpoints.sparse_config import SPARSE_CONFIG
from vsa.checkpoints.wan_config import CLASS_NAME
from vsa.checkpoints.weight_files import is_hub_id
from vsa.checkpoints.weights_run import write_weights_run
from vsa.files import read_json, write_whole
from vsa.places import leaves

RECORD = "vsa-push.json"
"""File of a pushed model that lists what the push wrote."""

_FACTS = ("step", "sparsity_state", "sparse_attention", "step_list")
_NETWORK = ("model", "attention", "sparsity")


def weights_to_publish(checkpoint: Checkpoint, group: Group | None = None, pretrained: str | None = None) -> RunWeights:
    """The weights of a checkpoint, with a codec and a text encoder that others have.

    Args:
        checkpoint: checkpoint of the run.
        group: averaged or trained weights; None: averaged ones if there are any.
        pretrained: hub id that replaces a local folder of codec and text encoder.

    Raises:
        ValueError: codec or text encoder come from a folder of this machine, and there is no hub id to replace it.
    """
    if pretrained is not None and not is_hub_id(pretrained):
        raise ValueError(f"--pretrained {pretrained}: expected OWNER/NAME of a repository on the hub")
    config = checkpoint.config
    data = dict(config.get("data") or {})
    for name in ("codec", "text_encoder"):
        source = (data.get(name) or {}).get("source")
        if source is None or is_hub_id(str(source)):
            continue
        if pretrained is None:
            raise ValueError(
                f"data.{name}.source={source} is a folder of this machine: name the hub id of the same weights with "
                "--pretrained OWNER/NAME"
            )
        data[name] = {**data[name], "source": pretrained}
    state = {**checkpoint.state, "config": {**config, "data": data} if data else config}
    return RunWeights(replace(checkpoint, state=state), group)


def write_published(source: RunWeights, folder: Path) -> str:
    """Write weights and sampling settings to an empty folder, which `init_from=` and `vsa sample` take.

    Returns:
        The layout, as the end of a sentence.

    Raises:
        ValueError: a setting of a model without an export leads to a file of this machine.
    """
    try:
        _ = source.config
    except ValueError as reason:
        state = _state(source)
        write_weights_run(folder, dict(source), state)
        # where the command was started
        manifest = {name: value for name, value in read_json(folder / MANIFEST).items() if name != STARTED_IN}
        write_whole(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        return f"that of a run of VSA-Train, since {reason}"
    convert(source, folder, Conversion())
    return f"that of diffusers' {CLASS_NAME}" + ("" if source.sparse is None else f", with {SPARSE_CONFIG}")


def _state(source: RunWeights) -> dict[str, Any]:
    part: Mapping[str, Any] = source.sampling or {}
    network = {key: source.run_config[key] for key in _NETWORK if key in source.run_config}
    for path, value in leaves(network):
        if path[-1] in PATHS and isinstance(value, str):
            raise ValueError(f"{'.'.join(path)}={value} is a file of this machine, which a published model cannot name")
    facts = {name: source.state[name] for name in _FACTS if source.state.get(name) is not None}
    return {**part, **facts, "config": {**network, **part.get("config", {})}}

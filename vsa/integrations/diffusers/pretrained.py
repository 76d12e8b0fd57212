"""Sparse checkpoints of this project in diffusers: base weights, gates, and the settings of their training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vsa.attention.video_sparse import Backend
from vsa.checkpoints.network_settings import network_settings
from vsa.checkpoints.sparse_config import SPARSE_CONFIG, read_sparse_config
from vsa.checkpoints.wan import attention_of
from vsa.checkpoints.wan_config import CLASS_NAME
from vsa.checkpoints.wan_names import is_gate
from vsa.checkpoints.weight_files import (
    WeightFiles,
    finite,
    pretrained_folder,
    read_json,
    refuse_key_difference,
    refuse_other_tensors,
)
from vsa.integrations.diffusers.families import FAMILIES, family_of
from vsa.integrations.diffusers.install import Applied, constant_topk, install, remove


def load_sparse(
    source: str | Path,
    *,
    transformer: Any = None,
    subfolder: str = "transformer",
    dtype: torch.dtype | None = None,
    sparsity: float | str | None = None,
    topk: int | None = None,
    denoising: Mapping[str, Any] | None = None,
    backend: Backend | None = None,
) -> Any:
    """Load a transformer with the gates and settings of an exported sparse checkpoint, for use in a pipeline.

    diffusers loads the base weights and ignores the gates, which are loaded here afterwards.

    Args:
        source: folder of `export_pretrained`, a pipeline folder with such a transformer, or a hub id.
        transformer: base model of the same checkpoint, loaded by the caller; None loads it.
        subfolder: subfolder of the transformer in a pipeline.
        dtype: dtype of the weights; None: diffusers' choice.
        sparsity: share of tiles skipped, instead of the trained budget.
        topk: tiles kept per query tile, instead of the trained budget.
        denoising: options that replace those of the checkpoint's `DenoisingPlan`; budgets need a sparsity or a top-k.
        backend: backend of the fine stage; None chooses by device.

    Returns:
        The transformer; `remove` makes it dense.
    """
    folder = pretrained_folder(source, subfolder)
    config = read_sparse_config(folder)
    if not config.selects and (sparsity is not None or topk is not None):
        raise ValueError(f"{config.method} of {folder} selects no tiles, got sparsity={sparsity} and topk={topk}")
    # checked before gigabytes are loaded
    weights = WeightFiles(folder)
    refuse_key_difference(config.gate_keys, [key for key in weights.keys if is_gate(key)], str(folder))
    if transformer is None:
        transformer = load_plain(folder, dtype)
    family = family_of(transformer)
    num_layers = len(family.blocks(transformer))
    if config.num_layers != num_layers:
        raise ValueError(f"{folder / SPARSE_CONFIG} has {config.num_layers} layers, the transformer has {num_layers}")
    options = dict(denoising or {})
    if sparsity is not None or topk is not None:
        plan = replace(config.denoising, **options)
        kept_on = constant_topk(sparsity, topk, plan, num_layers)
    else:
        for name in ("topk_ranges", "sparsity_ranges", "step_topk", "step_sparsity"):
            if options.get(name):
                raise ValueError(f"{name}={options[name]} needs a sparsity or a topk for the rest of the denoising")
        config = replace(config, **options)
        kept_on, plan = config.kept_on, config.denoising
    applied = install(transformer, family, attention_of(config, backend), kept_on, plan, backend, config)
    try:
        _load_gates(transformer, applied, weights)
    except ValueError:
        # restores the caller's model
        remove(transformer)
        raise
    return transformer


def load_plain(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """The transformer of a folder by diffusers' own class, without the gates of a sparse checkpoint.

    Args:
        folder: folder with `config.json` and weights.
        dtype: dtype of the weights; None: diffusers' choice.

    Raises:
        ValueError: another class than those of `families.FAMILIES`, or a weight that is not finite.
    """
    import diffusers
    from diffusers.utils import logging

    # raises for Wan's original layout, which diffusers would read as another size
    name = network_settings(read_json(folder / "config.json")).get("class_name", CLASS_NAME)
    if name not in FAMILIES:
        raise ValueError(f"{folder / 'config.json'}: _class_name must be one of {', '.join(FAMILIES)}, got {name}")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        transformer = getattr(diffusers, name).from_pretrained(folder, dtype=dtype)
    finally:
        logging.set_verbosity(verbosity)
    for name, parameter in transformer.named_parameters():
        finite(parameter.detach(), name, str(folder))
    return transformer


@torch.no_grad()
def _load_gates(transformer: Any, applied: Applied, weights: WeightFiles) -> None:
    """Copy the gates of a checkpoint into the modules that were registered in the transformer."""
    owners = {module: name for name, module in transformer.named_modules()}
    targets = {
        f"{owners[layer.owner]}.{name}.{part}": parameter
        for layer in applied.layers
        for name in layer.added
        for part, parameter in getattr(layer.owner, name).named_parameters()
    }
    expected = {key: tuple(target.shape) for key, target in targets.items()}
    gates = {key: weights.shapes[key] for key in weights.keys if is_gate(key)}
    refuse_other_tensors(expected, gates, str(weights.folder))
    for key, target in targets.items():
        target.copy_(finite(weights.read(key), key, str(weights.folder)))

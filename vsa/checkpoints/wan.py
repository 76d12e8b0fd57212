"""Export of a network as a transformer folder in diffusers' or Wan's layout, and checks of gates and attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from vsa.attention.base import AttentionMethod
from vsa.attention.full import FullAttention
from vsa.attention.named import NAMED, layers_of, name_of, unusual
from vsa.attention.video_sparse import Backend, VideoSparseAttention
from vsa.checkpoints.sparse_config import SPARSE_CONFIG, SparseAttentionConfig, write_sparse_config
from vsa.checkpoints.wan_config import SPARSE_FLAG, transformer_config
from vsa.checkpoints.wan_names import diffusers_to_wan, wan_config
from vsa.checkpoints.weight_files import exhaust, finite, refuse_existing, some, write_weights
from vsa.files import atomic_folder
from vsa.models.network import Network
from vsa.models.sharding import whole

Gates = Literal["required", "initial", "absent"]
Layout = Literal["diffusers", "fastvideo", "wan"]
FIELDS = ("tile_thw", "partition", "block_order", "fine_gate")
"""Settings of video_sparse with fields of their own in a `SparseAttentionConfig`."""


def gate_names(model: Network) -> tuple[str, ...]:
    """Names of the parameters that belong to the attention methods, such as gates."""
    return tuple(name for name, role in model.parameter_roles().items() if role == "gate")


def refuse_random_gates(model: Network) -> None:
    """Raise ValueError if new gates would be random: with a dense checkpoint they must start at the identity."""
    for method in model.attention_layers:
        start = getattr(method, "gate_init", "identity")
        if start != "identity":
            raise ValueError(
                f"gate_init={start} of its attention, but a dense checkpoint needs gate_init=identity (start=dense)"
            )


def sparse_settings(model: Network) -> dict[str, Any]:
    """The fields of a `SparseAttentionConfig` that the model's attention determines.

    Raises:
        ValueError: the attention is not one that `sparse_attention.json` can describe.
    """
    first, *others = (_described(method, model) for method in model.attention_layers)
    if any(other != first for other in others):
        raise ValueError(f"a {SPARSE_CONFIG} describes one attention for all layers, those of the model differ")
    return first | {"gate_keys": gate_names(model)}


def _described(method: AttentionMethod, model: Network) -> dict[str, Any]:
    if (name := name_of(method)) is None:
        method_names = ", ".join(NAMED)
        raise ValueError(f"a {SPARSE_CONFIG} describes {method_names} attention, the model has {model.attention_names}")
    settings = method.settings()
    if name == "video_sparse" and not unusual(type(method), settings).keys() - set(FIELDS):
        return {"method": name, "settings": None, **{field: getattr(method, field) for field in FIELDS}}
    return {"method": name, "settings": settings, **dict.fromkeys(FIELDS), "fine_gate": False}


def attention_of(sparse: SparseAttentionConfig | None, backend: Backend | None = None) -> Callable[..., Any]:
    """Factory of the attention that a checkpoint was trained with; None is dense attention."""
    if sparse is None:
        return FullAttention
    return layers_of(*method_options(sparse), backend)


def method_options(sparse: SparseAttentionConfig) -> tuple[type[AttentionMethod], dict[str, Any]]:
    """The class that a sparse config names, and its options."""
    if sparse.settings is not None:
        return NAMED[sparse.method], dict(sparse.settings)
    return VideoSparseAttention, {name: getattr(sparse, name) for name in FIELDS}


def export_pretrained(
    model: Network,
    folder: str | Path,
    *,
    sparse: SparseAttentionConfig | None,
    layout: Layout = "diffusers",
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 2**30,
    tensors: Callable[[str], Tensor] | None = None,
    finish: Callable[[Path], None] | None = None,
) -> Path:
    """Write the model as a transformer folder for diffusers, atomically.

    Args:
        model: model that determines names, shapes and dtypes; sharded parameters are gathered one at a time, so every
            rank has to call, and rank 0 writes. With `tensors` it may be on the meta device.
        folder: target folder, which must not exist.
        sparse: description of the attention, required for a model with gates. It must match the model.
        layout: diffusers, fastvideo (the same without our key in `config.json`) or wan (Wan's original names).
        dtype: dtype of the written tensors; None keeps theirs.
        max_shard_bytes: largest size of a file.
        tensors: full CPU tensors by parameter name, used instead of the model's own (averaged weights).
        finish: function called on rank 0 with the written folder before it gets its final name, to add files to it.

    Raises:
        ValueError: the folder exists, the layout cannot represent architecture or attention, or `sparse` does not match
            the model.
    """
    config = transformer_config(model)
    if sparse is None and (gates := gate_names(model)):
        raise ValueError(f"the model has gates ({some(set(gates))}), an export needs their {SPARSE_CONFIG}")
    if sparse is not None:
        refuse_other_attention(model, sparse, SPARSE_CONFIG)
        if sparse.golden is not None:
            raise ValueError(f"golden={sparse.golden} is set when the golden file is written, after the export")
        if layout == "diffusers":
            config[SPARSE_FLAG] = SPARSE_CONFIG
    if layout == "wan":
        config = wan_config(config)
    parameters = dict(model.named_parameters())

    def read(name: str) -> Tensor:
        value = whole(parameters[name]) if tensors is None else tensors(name)
        if value.shape != parameters[name].shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, the model {tuple(parameters[name].shape)}")
        return finite(value if dtype is None else value.to(dtype), name, f"the weights in {dtype or value.dtype}")

    sizes = {
        diffusers_to_wan(name) if layout == "wan" else name: p.numel() * (dtype or p.dtype).itemsize
        for name, p in parameters.items()
    }
    final = Path(folder)
    refuse_existing(final)
    values = map(read, parameters)
    try:
        if not dist.is_initialized() or dist.get_rank() == 0:
            with atomic_folder(final) as temporary:
                (temporary / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
                if sparse is not None:
                    write_sparse_config(temporary, sparse)
                write_weights(temporary, sizes, values, max_shard_bytes)
                if finish is not None:
                    finish(temporary)
    except Exception:
        # if the disk of rank 0 is full, the other ranks must not wait for it in a gather
        exhaust(values)
        raise
    exhaust(values)
    return final


def refuse_other_attention(model: Network, sparse: SparseAttentionConfig, what: str) -> None:
    """Raise ValueError if a sparse config does not match the model's attention; `what` names the config."""
    for key, value in sparse_settings(model).items():
        theirs = getattr(sparse, key)
        if key == "gate_keys":
            if set(theirs) != set(value):
                raise ValueError(
                    f"{what}: gate_keys are not the model's, they differ in {some(set(theirs) ^ set(value))}"
                )
        # compared as text, since a window of 1 token differs from the fraction 1.0
        elif str(theirs) != str(value):
            raise ValueError(f"{what} has {key}={theirs}, the model has {value}")
    if sparse.num_layers != len(model.blocks):
        raise ValueError(f"{what} has grid_topk of {sparse.num_layers} layers, the model has {len(model.blocks)}")


def refuse_other_gates(ours: set[str], theirs: set[str], gates: Gates, what: str) -> None:
    """Raise ValueError if a checkpoint's gates contradict `gates`; `what` names the checkpoint."""
    if gates == "required":
        if not ours:
            raise ValueError(f"gates=required, but the model has none (attention full?); {what} has {len(theirs)}")
        if missing := ours - theirs:
            remedy = "; attention.fine_gate=false leaves them out" if _fine(missing) else ""
            remedy = remedy if theirs else "; to finetune a dense checkpoint use task.gates=initial"
            raise ValueError(f"{what} lacks {len(missing)} gate tensors of the model: {some(missing)}{remedy}")
        if unexpected := theirs - ours:
            remedy = "; attention.fine_gate=true gives them a place" if _fine(unexpected) else ""
            raise ValueError(
                f"{what} has {len(unexpected)} gate tensors the model has no place for: {some(unexpected)}{remedy}"
            )
    elif theirs:
        remedy = "; continue with them by task.gates=required" if gates == "initial" else ""
        raise ValueError(f"gates={gates} takes a dense checkpoint, but {what} has gates: {some(theirs)}{remedy}")
    elif gates == "absent" and ours:
        raise ValueError(f"gates=absent, but the model has gates: {some(ours)}")


def _fine(keys: set[str]) -> bool:
    return all(".to_gate_fine." in key for key in keys)

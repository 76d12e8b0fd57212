"""Pretrained weights in diffusers' Wan layout: into a `VideoDiT`, and out of one.

Every check runs on the headers of the files, before a byte of the model's memory is touched, so a model may still
be on the meta device when it is checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vsa.attention.full import FullAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.sparse_config import (
    SPARSE_CONFIG,
    SparseAttentionConfig,
    has_sparse_config,
    read_sparse_config,
    write_sparse_config,
)
from vsa.checkpoints.wan_config import (
    SPARSE_FLAG,
    read_transformer_config,
    transformer_config,
    video_dit_arguments,
)
from vsa.checkpoints.wan_names import diffusers_to_wan, is_gate, is_unused, wan_config
from vsa.checkpoints.weight_files import (
    WeightFiles,
    new_folder,
    pretrained_folder,
    read_json,
    refuse_existing,
    write_weights,
)
from vsa.models.sharding import fill, whole
from vsa.models.video_dit import VideoDiT

Gates = Literal["required", "initial", "absent"]
Layout = Literal["diffusers", "fastvideo", "wan"]


@dataclass(frozen=True, kw_only=True)
class PretrainedInfo:
    """What a checked checkpoint holds.

    Args:
        folder: with the weights.
        sparse: its `sparse_attention.json`; None for a dense checkpoint.
        initial_gates: gate parameters of the model that the checkpoint has no values for.
        ignored: tensors of the checkpoint that nothing computes with.
    """

    folder: Path
    sparse: SparseAttentionConfig | None
    initial_gates: tuple[str, ...]
    ignored: tuple[str, ...]


def gate_names(model: VideoDiT) -> tuple[str, ...]:
    """Names of the parameters that belong to the attention methods themselves."""
    return tuple(name for name, role in model.parameter_roles().items() if role == "gate")


def refuse_random_gates(model: VideoDiT) -> None:
    """Raise ValueError when gates would start as random weights: a dense checkpoint needs them at their identity."""
    for block in model.blocks:
        start = getattr(block.method, "gate_init", "identity")
        if start != "identity":
            raise ValueError(
                f"gate_init={start} of its attention, but a dense checkpoint needs gate_init=identity (start=dense)"
            )


def sparse_settings(model: VideoDiT) -> dict[str, Any]:
    """The fields of a `SparseAttentionConfig` that the model's attention decides.

    Raises:
        ValueError: its attention is none whose checkpoints have a `sparse_attention.json`.
    """
    block: Any = model.blocks[0]
    method = block.method
    if not isinstance(method, VideoSparseAttention):
        raise ValueError(f"a {SPARSE_CONFIG} describes video_sparse attention, the model has {type(method).__name__}")
    return {
        "method": "video_sparse",
        "tile_thw": method.tile_thw,
        "partition": method.partition,
        "block_order": method.block_order,
        "fine_gate": method.to_gate_fine is not None,
        "gate_keys": gate_names(model),
    }


def check_pretrained(
    model: VideoDiT, source: str | Path, *, gates: Gates, parameters: Mapping[str, nn.Parameter] | None = None
) -> PretrainedInfo:
    """Refuse a checkpoint that does not fit the model; nothing is copied, the model may be on the meta device.

    Args:
        model: the model it is meant for.
        source: see `pretrained_folder`.
        gates: see `load_pretrained`.
        parameters: see `load_pretrained`.

    Raises:
        ValueError: names the config key, the tensor or the file, with both values where two differ.
    """
    if gates not in ("required", "initial", "absent"):
        raise ValueError(f"gates must be required, initial or absent, got {gates!r}")
    folder = pretrained_folder(source)
    _refuse_other_architecture(model, folder)
    weights = WeightFiles(folder)
    theirs = {key for key in weights.keys if is_gate(key)}
    ignored = {key for key in weights.keys if is_unused(key)}
    sparse = read_sparse_config(folder) if theirs or has_sparse_config(folder) else None
    if sparse is not None and set(sparse.gate_keys) != theirs:
        raise ValueError(
            f"{folder}: the weights do not hold the gates that {SPARSE_CONFIG} names, "
            f"they differ in {_some(set(sparse.gate_keys) ^ theirs)}"
        )
    ours = set(gate_names(model))
    refuse_other_gates(ours, theirs, gates, str(folder))
    if gates == "initial":
        refuse_random_gates(model)
    if gates == "required":
        assert sparse is not None
        refuse_other_attention(model, sparse, str(folder / SPARSE_CONFIG))

    parameters = dict(model.named_parameters()) if parameters is None else parameters
    wanted = {name: tuple(p.shape) for name, p in parameters.items() if gates == "required" or name not in ours}
    refuse_other_tensors(wanted, {key: weights.shape(key) for key in weights.keys if key not in ignored}, str(folder))
    return PretrainedInfo(
        folder=folder,
        sparse=sparse,
        initial_gates=tuple(sorted(ours)) if gates == "initial" else (),
        ignored=tuple(sorted(ignored)),
    )


@torch.no_grad()
def load_pretrained(
    model: VideoDiT, source: str | Path, *, gates: Gates, parameters: Mapping[str, nn.Parameter] | None = None
) -> PretrainedInfo:
    """Copy a checkpoint's tensors into the model's parameters, one at a time; each rank reads its own rows.

    Args:
        model: on real devices, sharded or not; a model made on the meta device goes through `to_empty` first.
        source: see `pretrained_folder`.
        gates: required (a sparse checkpoint into a model with the same gates), initial (a dense checkpoint into a
            sparse model: the gates get their documented start, `AttentionMethod.reset_extra_parameters`), or absent
            (a dense checkpoint into a dense model). Initial needs a start that is the identity, see
            `refuse_random_gates`.
        parameters: by the names they have in the checkpoint; None: all of the model's (without adapters).

    Raises:
        ValueError: the checkpoint does not fit (`check_pretrained`), or a parameter is still on the meta device.
    """
    parameters = dict(model.named_parameters()) if parameters is None else parameters
    info = check_pretrained(model, source, gates=gates, parameters=parameters)
    weights = WeightFiles(info.folder)
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device: move the model with to_empty first")
    for name, parameter in parameters.items():
        if name not in info.initial_gates:
            fill(parameter, partial(weights.rows, name))
    if info.initial_gates:
        for block in model.blocks:
            block.method.reset_extra_parameters()  # type: ignore[union-attr, operator]
    return info


def open_pretrained(
    source: str | Path, *, device: torch.device | str = "cpu", backend: str | None = None
) -> tuple[VideoDiT, PretrainedInfo]:
    """The model of a weights folder in float32, sparse when it has a `sparse_attention.json`.

    Args:
        source: see `pretrained_folder`.
        device: where the parameters go.
        backend: of the sparse attention; None picks by device.

    Raises:
        ValueError: what `video_dit_arguments` and `check_pretrained` refuse.
    """
    folder = pretrained_folder(source)
    arguments = video_dit_arguments(read_transformer_config(folder))
    sparse = read_sparse_config(folder) if has_sparse_config(folder) else None
    with torch.device("meta"):
        model = VideoDiT(attention=attention_of(sparse, backend), **arguments)
    gates: Gates = "absent" if sparse is None else "required"
    check_pretrained(model, folder, gates=gates)
    model.to_empty(device=device)
    return model, load_pretrained(model, folder, gates=gates)


def attention_of(sparse: SparseAttentionConfig | None, backend: str | None = None) -> Callable[..., Any]:
    """Factory of the attention a checkpoint was trained with; None is dense attention.

    Raises:
        ValueError: an unknown method.
    """
    if sparse is None:
        return FullAttention
    if sparse.method != "video_sparse":
        raise ValueError(f"{SPARSE_CONFIG} has method {sparse.method}, only video_sparse can be built")
    return partial(
        VideoSparseAttention,
        tile_thw=sparse.tile_thw,
        partition=sparse.partition,
        block_order=sparse.block_order,
        fine_gate=sparse.fine_gate,
        backend=backend,
    )


def export_pretrained(
    model: VideoDiT,
    folder: str | Path,
    *,
    sparse: SparseAttentionConfig | None,
    layout: Layout = "diffusers",
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 2**30,
    tensors: Callable[[str], Tensor] | None = None,
    finish: Callable[[Path], None] | None = None,
) -> Path:
    """Write the model as a transformer folder that diffusers opens; complete under its name or not there at all.

    Args:
        model: decides names, shapes and dtypes; sharded parameters are gathered one at a time, so every rank has to
            call, and rank 0 writes. With `tensors` it may be on the meta device.
        folder: must not exist.
        sparse: how the gates are used; None exactly for a model without gates. Its settings must be the model's.
        layout: diffusers, fastvideo (the same without our key in `config.json`) or wan (Wan's original names).
        dtype: of the written tensors; None keeps theirs.
        max_shard_bytes: of one file.
        tensors: full CPU tensors by parameter name in place of the model's own (averaged weights).
        finish: called on rank 0 with the written folder before it gets its name, to add files to it.

    Raises:
        ValueError: the folder exists, the architecture or the attention cannot be written down, or `sparse` does not
            describe the model.
    """
    config = transformer_config(model)
    if sparse is None and (gates := gate_names(model)):
        raise ValueError(f"the model has gates ({_some(set(gates))}), an export needs their {SPARSE_CONFIG}")
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
        return value.to(dtype) if dtype is not None else value

    sizes = {
        diffusers_to_wan(name) if layout == "wan" else name: p.numel() * (dtype or p.dtype).itemsize
        for name, p in parameters.items()
    }
    final = Path(folder)
    refuse_existing(final)
    values = map(read, parameters)
    try:
        if not dist.is_initialized() or dist.get_rank() == 0:
            with new_folder(final) as temporary:
                (temporary / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
                if sparse is not None:
                    write_sparse_config(temporary, sparse)
                write_weights(temporary, sizes, values, max_shard_bytes)
                if finish is not None:
                    finish(temporary)
    except Exception:
        # a full disk on rank 0 must not leave the others waiting for it in a gather
        _exhaust(values)
        raise
    _exhaust(values)
    return final


def _exhaust(values: Iterator[Tensor]) -> None:
    """Take part in gathering what this process does not write."""
    for _ in values:
        pass


def refuse_other_tensors(
    wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], what: str
) -> None:
    """Raise ValueError when names or shapes of tensors are not those of a model; `what` names where they were found."""
    if missing := set(wanted) - set(found):
        raise ValueError(f"{what} lacks {len(missing)} tensors of the model: {_some(missing)}")
    if unexpected := set(found) - set(wanted):
        raise ValueError(f"{what} has {len(unexpected)} tensors the model has no place for: {_some(unexpected)}")
    for key, shape in wanted.items():
        if found[key] != shape:
            raise ValueError(f"{what}: {key} has shape {found[key]}, the model needs {shape}")


def refuse_other_attention(model: VideoDiT, sparse: SparseAttentionConfig, what: str) -> None:
    """Raise ValueError when a sparse config describes another attention than the model's; `what` names it."""
    for key, value in sparse_settings(model).items():
        theirs = getattr(sparse, key)
        if key == "gate_keys":
            if set(theirs) != set(value):
                raise ValueError(
                    f"{what}: gate_keys are not the model's, they differ in {_some(set(theirs) ^ set(value))}"
                )
        elif theirs != value:
            raise ValueError(f"{what} has {key}={theirs}, the model has {value}")
    if sparse.num_layers != len(model.blocks):
        raise ValueError(f"{what} has grid_topk of {sparse.num_layers} layers, the model has {len(model.blocks)}")


def refuse_other_gates(ours: set[str], theirs: set[str], gates: Gates, what: str) -> None:
    """Raise ValueError when a checkpoint's gates are not what `gates` promises; `what` names the checkpoint."""
    if gates == "required":
        if not ours:
            raise ValueError(f"gates=required, but the model has none (attention full?); {what} has {len(theirs)}")
        if missing := ours - theirs:
            remedy = "; attention.fine_gate=false leaves them out" if _fine(missing) else ""
            remedy = remedy if theirs else "; to finetune a dense checkpoint use task.gates=initial"
            raise ValueError(f"{what} lacks {len(missing)} gate tensors of the model: {_some(missing)}{remedy}")
        if left := theirs - ours:
            remedy = "; attention.fine_gate=true gives them a place" if _fine(left) else ""
            raise ValueError(f"{what} has {len(left)} gate tensors the model has no place for: {_some(left)}{remedy}")
    elif theirs:
        remedy = "; go on with them by task.gates=required" if gates == "initial" else ""
        raise ValueError(f"gates={gates} takes a dense checkpoint, but {what} has gates: {_some(theirs)}{remedy}")
    elif gates == "absent" and ours:
        raise ValueError(f"gates=absent, but the model has gates: {_some(ours)}")


def _fine(keys: set[str]) -> bool:
    return all(".to_gate_fine." in key for key in keys)


def _refuse_other_architecture(model: VideoDiT, folder: Path) -> None:
    path = folder / "config.json"
    try:
        theirs = video_dit_arguments(read_json(path))
        ours = video_dit_arguments(transformer_config(model))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for key, value in theirs.items():
        if value != ours[key]:
            raise ValueError(f"{path} has {key}={value}, the model has {ours[key]}")


def _some(keys: set[str]) -> str:
    first = sorted(keys)[:3]
    return ", ".join(first) + (", ..." if len(keys) > len(first) else "")

"""Conversion of weights between layouts: training runs, diffusers, Wan's original names, FastVideo's VSA checkpoints.

Tensors are copied bit for bit unless a dtype is given. A sparse result gets `sparse_attention.json` and golden
tensors; the timesteps of a distilled generator are written to that file, or to the state of a run. Further facts that
sampling a run needs (codec, text encoder, statistics of the latents) are kept in `sampling.json`, so that a run which
was converted there and back can be sampled again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from vsa.attention.base import AttentionMethod
from vsa.attention.kept_tiles import Budget
from vsa.attention.named import NAMED, unusual
from vsa.attention.sparse_linear import SparseLinearAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.adapter_files import AdapterForm, write_adapters
from vsa.checkpoints.golden import write_golden
from vsa.checkpoints.lora import adapters_of
from vsa.checkpoints.network_settings import network_of, network_settings
from vsa.checkpoints.original_names import original_rows
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.checkpoints.run_weights import RunWeights
from vsa.checkpoints.sampling_settings import sampling_of_export, sampling_part, write_sampling_part
from vsa.checkpoints.sparse_config import SPARSE_CONFIG, Grid, SparseAttentionConfig
from vsa.checkpoints.wan import (
    Layout,
    attention_of,
    export_pretrained,
    method_options,
    refuse_other_attention,
    sparse_settings,
)
from vsa.checkpoints.wan_names import is_gate
from vsa.checkpoints.weight_files import finite, refuse_existing, refuse_other_tensors, some
from vsa.checkpoints.weight_source import open_network
from vsa.checkpoints.weights import WeightSource
from vsa.checkpoints.weights_run import write_weights_run
from vsa.diffusion.sampler import step_list
from vsa.models.init import without_memory
from vsa.models.network import Network
from vsa.settings import shown

Target = Literal[Layout, "run", "lora-diffusers", "lora-comfyui", "lora-musubi"]
FASTVIDEO_TILE = (4, 4, 4)
H3_GATES = {"gate_bias": False, "coarse_text": True}
"""Settings of gates without bias, as in the published students of MiniMax-H3."""
TURBO_WAN = {"linear": "all", "tile_thw": (1, 1, 64), "partition": "raster_run"}
"""Settings with which TurboDiffusion trains SLA; its inference has other blocks by device."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Options of a conversion.

    Args:
        to: target layout.
        dtype: dtype of the written tensors; None: that of the source.
        max_shard_gb: largest size of a file in GB.
        golden: whether golden tensors are written for a sparse result.
        golden_layers: layers with golden tensors; None: all.
        topk: kv tiles per query tile, for a source whose gates are not described (FastVideo).
        sparsity: fraction of skipped tiles, instead of `topk`.
        grid: token grid of the training, for the same case.
        flow_shift: flow shift of the sampler to record; None: that of the source.
        dense_steps: number of first denoising steps that keep all tiles; None: that of the source.
        guidance: recommended guidance scale; None: that of the source.
        guidance_form: see `SparseAttentionConfig`; None: that of the source.
        step_list: timesteps of a distilled generator; None: those of the source.
    """

    to: Target = "diffusers"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    max_shard_gb: float = 5.0
    golden: bool = True
    golden_layers: Sequence[int] | None = None
    topk: int | None = None
    sparsity: float | None = None
    grid: Grid | None = None
    flow_shift: float | None = None
    dense_steps: int | None = None
    guidance: float | None = None
    guidance_form: Literal["standard", "additive"] | None = None
    step_list: Sequence[float] | None = None


def sampling_like(source: WeightSource, like: str | None) -> dict[str, Any] | None:
    """Codec, text encoder and latents of the source, or those of the run `like` if the source has none.

    Raises:
        ValueError: both have them, or the run lacks them or has a model of other latents or captions.
    """
    if like is None:
        return source.sampling
    if source.sampling is not None:
        raise ValueError(f"{source.name} has its own codec and text encoder: leave --like {like} out")
    state = resolve_checkpoint(like).state
    part = sampling_part(state)
    if part is None:
        raise ValueError(f"--like {like} has no codec, text encoder or statistics of latents to take over")
    for key in ("in_channels", "out_channels", "text_dim"):
        theirs, ours = state["config"].get("model", {}).get(key), source.config.get(key)
        if None not in (theirs, ours) and theirs != ours:
            raise ValueError(f"--like {like} has model.{key}={theirs}, {source.name} has {ours}")
    # the step list belongs to the weights of that run
    return {**part, "step_list": None}


def sparse_config(source: WeightSource, options: Conversion) -> SparseAttentionConfig | None:
    """The description of the result's sparse attention: that of the source, or from the options if the source has none.

    Raises:
        ValueError: gates without a description, options without gates, or a flow shift for a step list.
    """
    gates = [key for key in source if is_gate(key)]
    has_sparsity_options = options.topk is not None or options.sparsity is not None or options.grid is not None
    sampling = {
        "flow_shift": options.flow_shift,
        "dense_steps": options.dense_steps,
        "guidance_scale": options.guidance,
        "guidance_form": options.guidance_form,
    }
    sampling = {key: value for key, value in sampling.items() if value is not None}
    if source.sparse is None and not gates:
        if has_sparsity_options:
            raise ValueError(f"{source.name} has no gates, so --topk, --sparsity and --grid do not apply")
        if options.step_list is not None and options.to != "run":
            sampling["step_list"] = options.step_list
        if sampling:
            raise ValueError(f"{source.name} has no gates, so no {SPARSE_CONFIG} to write {', '.join(sampling)} to")
        return None
    if source.sparse is not None:
        if has_sparsity_options:
            raise ValueError(f"{source.name} has its own top-k and grid: leave --topk, --sparsity and --grid out")
        sparse = replace(source.sparse, golden=None, golden_tolerance=None)
    else:
        sparse = _sparse_of_options(source, gates, options)
    if options.step_list is not None:
        sparse = sparse.sampled_at(step_list(options.step_list))
    if sparse.step_list is not None and options.flow_shift is not None:
        raise ValueError(f"--flow-shift {options.flow_shift} does not apply beside the steps {list(sparse.step_list)}")
    return replace(sparse, **sampling)


def _sparse_of_options(source: WeightSource, gates: list[str], options: Conversion) -> SparseAttentionConfig:
    if (options.topk is None) == (options.sparsity is None) or options.grid is None:
        raise ValueError(
            f"{source.name} has gates but no {SPARSE_CONFIG}: say how they were trained with --grid T H W and one of "
            f"--topk and --sparsity, got grid={options.grid}, topk={options.topk} and sparsity={options.sparsity}"
        )
    settings: dict[str, Any] = {"tile_thw": FASTVIDEO_TILE, "fine_gate": any("to_gate_fine" in key for key in gates)}
    if not any(key.endswith(".bias") for key in gates):
        settings |= H3_GATES
    method: type[AttentionMethod] = VideoSparseAttention
    if any(".proj_l." in key for key in gates):
        method, settings = SparseLinearAttention, TURBO_WAN
    with without_memory():
        model = network_of(source.config, partial(method, **settings))
    latents = [n * p for n, p in zip(options.grid, model.patch_size, strict=True)]
    num_tiles = model.layout_for((model.in_channels, *latents), "cpu").num_video_tiles
    topk = Budget(options.topk, options.sparsity).wanted(num_tiles)
    return SparseAttentionConfig(
        **sparse_settings(model),
        grid_topk=((topk,) * len(model.blocks),),
        num_tiles=(num_tiles,),
        grids=(options.grid,),
        budget="count" if options.sparsity is None else "fraction",
    )


def refuse_for_fastvideo(sparse: SparseAttentionConfig | None) -> None:
    """Refuse settings that FastVideo cannot run: it has gated cubes of 4 x 4 x 4 tokens without a fine gate, and for
    MiniMax-H3 gates without bias.

    FastVideo ignores unknown keys.

    Raises:
        ValueError: names the setting.
    """
    if sparse is None or (sparse.method == "video_sparse" and _unusual_of(sparse) == {"fine_gate": False, **H3_GATES}):
        return
    own = ("method", "video_sparse")
    for key, expected in (
        own,
        ("settings", None),
        ("tile_thw", FASTVIDEO_TILE),
        ("partition", "cube"),
        ("fine_gate", False),
    ):
        if getattr(sparse, key) != expected:
            raise ValueError(f"FastVideo runs {key}={expected} only, the source has {key}={getattr(sparse, key)}")


def convert(source: WeightSource, out: Path, options: Conversion, *, like: str | None = None) -> list[str]:
    """Write a folder with the weights of `source`.

    Args:
        source: weights to convert.
        out: target folder, which must not exist.
        options: options of the conversion.
        like: run with the same latents and captions, whose codec and text encoder to use.

    Returns:
        lines that report the result.

    Raises:
        ValueError: the source is incomplete, or the target layout cannot represent it.
    """
    if options.to.startswith("lora-"):
        return convert_adapters(source, out, options)
    sampling = sampling_like(source, like)
    sparse = sparse_config(source, options)
    if sparse is not None:
        steps = sparse.step_list
    else:
        steps = source.step_list if options.step_list is None else step_list(options.step_list)
    with without_memory():
        model = network_of(source.config, attention_of(sparse))
    refuse_other_tensors({n: tuple(p.shape) for n, p in model.named_parameters()}, source.shapes, source.name)
    if sparse is not None:
        refuse_other_attention(model, sparse, source.name)
    if options.to == "fastvideo":
        refuse_for_fastvideo(sparse)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    if options.to == "run":
        tensors = {n: finite(v.to(dtype or v.dtype), n, f"--dtype {options.dtype}") for n, v in source.items()}
        write_run(out, tensors, network_settings(source.config), sparse, steps, sampling)
    else:

        def finish(folder: Path) -> None:
            if sampling is not None:
                write_sampling_part(folder, {**sampling, "step_list": None if steps is None else list(steps)})
            if sparse is not None and options.to != "wan" and options.golden:
                # computed from the written weights, in their dtype
                write_golden(open_network(folder)[0], folder, layers=options.golden_layers)

        export_pretrained(
            with_dtypes(model, source),
            out,
            sparse=sparse,
            layout=cast(Layout, options.to),
            dtype=dtype,
            max_shard_bytes=round(options.max_shard_gb * 2**30),
            tensors=source.__getitem__,
            finish=finish,
        )
    count = sum(torch.Size(shape).numel() for shape in source.shapes.values())
    kind = "dense"
    if sparse is not None:
        topk = f"top-k {min(sparse.grid_topk[0])}..{max(sparse.grid_topk[0])} of {sparse.num_tiles[0]}"
        names = ["sparse"] if sparse.settings is None else [sparse.method, *_unusual(sparse)]
        kind = ", ".join([*names, topk] if sparse.selects else names)
    lines = [f"{len(source)} tensors, {count / 1e6:.1f}M parameters ({kind}) from {source} in {out}"]
    if sparse is None and source.step_list is not None and sampling is None and options.to != "run":
        steps = list(source.step_list)
        lines.append(f"no file of {out} has the steps {steps} of this dense generator, --to run keeps them")
    return lines


def convert_adapters(source: WeightSource, out: Path, options: Conversion) -> list[str]:
    """Write the adapters of a run, and its gates, in the key form that `options.to` ends with.

    Raises:
        ValueError: the source is no run with adapters, or other weights were trained with them.
    """
    lora = source.lora if isinstance(source, RunWeights) else None
    patterns = source.run_config.get("task", {}).get("trainable") or ()
    if lora is None and not patterns:
        raise ValueError(f"--to {options.to} takes a run with lora=adapters, {source.name} has no adapters")
    gates = {name: source[name] for name in source if is_gate(name)}
    others = [name for name in source if name not in gates and any(fnmatchcase(name, p) for p in patterns)]
    if others:
        raise ValueError(f"--to {options.to}: task.trainable trained {some(others)} too, which no adapter holds")
    adapters = {} if lora is None else adapters_of(source.files.read, source.files.keys, lora)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    form = cast(AdapterForm, options.to.removeprefix("lora-"))
    rows = original_rows(source.shapes, source.class_name)
    write_adapters(adapters, gates, out, form, rows=rows, sparse=sparse_config(source, options), dtype=dtype)
    rank = "" if lora is None else f" of rank {lora.rank}"
    return [f"{len(adapters)} adapters{rank} and {len(gates)} gate tensors from {source} in {out}"]


def _unusual_of(sparse: SparseAttentionConfig) -> dict[str, Any]:
    """Settings of a method that differ from its defaults."""
    return unusual(NAMED[sparse.method], sparse.settings or {})


def _unusual(sparse: SparseAttentionConfig) -> Iterator[str]:
    for name, value in _unusual_of(sparse).items():
        yield f"{name}=..." if isinstance(value, Mapping) else f"{name}={shown(value)}"


def with_dtypes(model: Network, source: WeightSource) -> Network:
    """The model, on the meta device, with the parameter dtypes of the source."""
    dtypes = source.dtypes
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    return model


def write_run(
    out: Path,
    tensors: Mapping[str, Tensor],
    model: Mapping[str, Any],
    sparse: SparseAttentionConfig | None,
    steps: tuple[float, ...] | None,
    sampling: Mapping[str, Any] | None,
) -> None:
    """Write a run folder with weights only, at step 0, for `init_from=`, and for sampling if possible."""
    attention: dict[str, Any] = {"_target_": "vsa.attention.full.FullAttention", "_partial_": True}
    state: dict[str, Any] = {key: value for key, value in (sampling or {}).items() if key != "step_list"}
    state |= {"step": 0} if steps is None else {"step": 0, "step_list": list(steps)}
    config: dict[str, Any] = dict(state.get("config", {}))
    if sparse is not None:
        method, settings = method_options(sparse)
        attention["_target_"] = f"{method.__module__}.{method.__qualname__}"
        attention |= settings
        state["sparse_attention"] = sparse.to_values()
        if "callbacks" in config:
            config["callbacks"] = {"samples": {**config["callbacks"]["samples"], **sampling_of_export(sparse)}}
    else:
        config["sparsity"] = {"_target_": "vsa.attention.sparsity.ConstantSparsity", "sparsity": 0.0}
    config |= {"model": model, "attention": attention}
    state["config"] = config
    refuse_existing(out)
    write_weights_run(out, tensors, state)

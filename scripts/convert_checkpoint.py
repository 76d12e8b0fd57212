"""Convert transformer weights between our runs, diffusers, Wan's original layout and FastVideo's VSA checkpoints.

The source may be a run or checkpoint folder of ours, a diffusers folder (a pipeline or its transformer) or hub id, a
FastVideo VSA checkpoint (diffusers' names with gates) or an original Wan folder; its kind is found out. Tensors are
copied bit for bit unless --dtype is given. A sparse result gets sparse_attention.json and golden tensors; the timesteps
of a distilled generator go into that file, or into the state of a run. What a run needs to be sampled (its codec, its
text encoder, statistics of the latents) travels along as sampling.json, so that --to run gives a run to sample again.

python scripts/convert_checkpoint.py outputs/finetune_wan_1_3b/default exported --to diffusers
python scripts/convert_checkpoint.py Wan2.1-T2V-1.3B wan-diffusers --to diffusers
python scripts/convert_checkpoint.py FastWan/transformer exported --to diffusers --topk 32 --grid 16 28 52
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vsa.attention.sparsity import SparsitySchedule, resolve_topk
from vsa.checkpoints.golden import write_golden
from vsa.checkpoints.lora import plain_tensors
from vsa.checkpoints.run_checkpoint import resolve_checkpoint, write_checkpoint
from vsa.checkpoints.sampling_settings import (
    read_sampling_part,
    sampling_of,
    sampling_of_export,
    sampling_part,
    write_sampling_part,
)
from vsa.checkpoints.sparse_config import SPARSE_CONFIG, SparseAttentionConfig, has_sparse_config, read_sparse_config
from vsa.checkpoints.wan import (
    attention_of,
    export_pretrained,
    open_pretrained,
    refuse_other_attention,
    refuse_other_tensors,
    sparse_settings,
)
from vsa.checkpoints.wan_config import transformer_config, video_dit_arguments
from vsa.checkpoints.wan_names import config_of_wan, is_gate, is_unused, wan_to_diffusers
from vsa.checkpoints.weight_files import WeightFiles, pretrained_folder, read_json, refuse_existing
from vsa.config import build, check_targets, model_factory
from vsa.diffusion.sampler import step_list
from vsa.errors import one_line_errors
from vsa.models.video_dit import VideoDiT
from vsa.sampling.pipeline import choose_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FASTVIDEO_TILE = (4, 4, 4)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Weights to convert, under diffusers' names.

    Args:
        name: for messages.
        config: `config.json` of the `WanTransformer3DModel`.
        shapes: of every tensor.
        dtypes: of every tensor.
        read: gives a tensor by name.
        sparse: how its gates are used; None when it has none, or does not say.
        step_list: timesteps of a distilled generator; None for a model that is sampled with many steps.
        sampling: see `vsa.checkpoints.sampling_settings`; None where nothing says it.
    """

    name: str
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[str], Tensor]
    sparse: SparseAttentionConfig | None
    step_list: tuple[float, ...] | None
    sampling: Mapping[str, Any] | None


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder or hub id")
    parser.add_argument("out", type=Path, help="folder to write, must not exist")
    parser.add_argument("--to", choices=("diffusers", "wan", "fastvideo", "run"), default="diffusers")
    parser.add_argument(
        "--weights", choices=("ema", "model"), help="of a run: averaged (default where there are any) or trained"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the written tensors (that of the source)")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="size of one file")
    parser.add_argument(
        "--like", metavar="RUN", help="run of such latents and captions, whose codec and text encoder to take"
    )
    parser.add_argument("--no-golden", action="store_true", help="leave the golden tensors out")
    parser.add_argument("--golden-layers", type=int, nargs="+", metavar="N", help="layers with golden tensors (all)")
    trained = parser.add_argument_group("gates whose use the source does not say (FastVideo)")
    trained.add_argument("--topk", type=int, help="kv tiles per query tile")
    trained.add_argument("--sparsity", type=float, help="share of tiles skipped, instead of --topk")
    trained.add_argument("--grid", type=int, nargs=3, metavar=("T", "H", "W"), help="token grid trained on")
    sampling = parser.add_argument_group("sampling settings to write down")
    sampling.add_argument("--flow-shift", type=float, help="of the sampler (that of the pipeline)")
    sampling.add_argument("--dense-steps", type=int, metavar="N", help="first denoising steps that keep all tiles")
    sampling.add_argument("--guidance", type=float, help="recommended scale")
    sampling.add_argument("--guidance-form", choices=("standard", "additive"))
    sampling.add_argument("--step-list", type=float, nargs="+", metavar="T", help="timesteps of a distilled generator")
    return parser.parse_args(argv)


def open_source(name: str, weights: Literal["ema", "model"] | None) -> Source:
    """Find out what `name` is and open it.

    Raises:
        ValueError: nothing that can be converted, or a choice of weights where there is none.
    """
    path = Path(name)
    if (path / "checkpoints").is_dir() or (path / "state.json").is_file():
        return open_run(path, weights)
    if weights is not None:
        raise ValueError(f"--weights {weights} is for runs, and {name} is none")
    folder = pretrained_folder(name)
    config, files = read_json(folder / "config.json"), WeightFiles(folder)
    if config.get("_class_name") == "WanModel":
        keys = {wan_to_diffusers(key): key for key in files.keys}
        config = config_of_wan(config, {ours: files.shape(theirs) for ours, theirs in keys.items()})
    else:
        keys = {key: key for key in files.keys if not is_unused(key)}
    sparse = read_sparse_config(folder) if has_sparse_config(folder) else None
    sampling = read_sampling_part(folder)
    steps = None if sampling is None or sampling["step_list"] is None else step_list(sampling["step_list"])
    return Source(
        name=str(folder),
        config=config,
        shapes={ours: files.shape(theirs) for ours, theirs in keys.items()},
        dtypes={ours: files.dtype(theirs) for ours, theirs in keys.items()},
        read=lambda key: files.read(keys[key]),
        sparse=sparse,
        step_list=steps if sparse is None else sparse.step_list,
        sampling=sampling,
    )


def open_run(path: Path, weights: Literal["ema", "model"] | None) -> Source:
    """The weights of a run's newest checkpoint, or of a checkpoint folder; which: see `choose_weights`.

    Raises:
        ValueError: no valid checkpoint, no such weights, or no config in it.
    """
    checkpoint = resolve_checkpoint(path)
    weights = choose_weights(checkpoint, weights)
    state = checkpoint.state
    config = state.get("config") or {}
    for key in ("model", "attention"):
        if key not in config:
            raise ValueError(f"checkpoint {checkpoint.path} has no config for {key}")
    check_targets(config)
    with torch.device("meta"):
        model = model_factory(config)()
    tensors = plain_tensors(checkpoint, weights)
    if "sparse_attention" in state:
        sparse = SparseAttentionConfig.from_json(json.dumps(state["sparse_attention"]))
    else:
        sparse = _sparse_of_run(model, state, config) if any(is_gate(key) for key in tensors) else None
    steps = None if state.get("step_list") is None else step_list(state["step_list"])
    if sparse is not None and steps is not None:
        sparse = sparse.sampled_at(steps)
    return Source(
        name=f"{checkpoint.path} ({weights} weights)",
        config=transformer_config(model),
        shapes={key: tuple(value.shape) for key, value in tensors.items()},
        dtypes={key: value.dtype for key, value in tensors.items()},
        read=tensors.__getitem__,
        sparse=sparse,
        step_list=steps if sparse is None else sparse.step_list,
        sampling=sampling_part(state),
    )


def with_sampling_of(source: Source, like: str) -> Source:
    """The source with the codec, the text encoder and the latents of a run.

    Raises:
        ValueError: the source has its own, or the run has none or is of a model of other latents or captions.
    """
    if source.sampling is not None:
        raise ValueError(f"{source.name} says its own codec and text encoder: leave --like {like} out")
    state = resolve_checkpoint(like).state
    part = sampling_part(state)
    if part is None:
        raise ValueError(f"--like {like} has no codec, text encoder or statistics of latents to take over")
    for key in ("in_channels", "out_channels", "text_dim"):
        theirs, ours = state["config"].get("model", {}).get(key), source.config.get(key)
        if None not in (theirs, ours) and theirs != ours:
            raise ValueError(f"--like {like} has model.{key}={theirs}, {source.name} has {ours}")
    # the steps are those of other weights
    return replace(source, sampling={**part, "step_list": None})


def _sparse_of_run(model: VideoDiT, state: Mapping[str, Any], config: Mapping[str, Any]) -> SparseAttentionConfig:
    """What a run's schedule and state say about its sparsity; the largest grid it saw is the reference."""
    schedule: SparsitySchedule = build(config["sparsity"])
    schedule.load_state_dict(state.get("sparsity_state", {}))
    shapes = sorted({tuple(shape) for shape in state["latent_shapes"]}, key=lambda s: (-s[1] * s[2] * s[3], s))
    num_tiles = [model.layout_for(shape, "cpu").num_video_tiles for shape in shapes]
    layers = len(model.blocks)
    rows = (schedule.topk_after(state["step"], n, layers) for n in num_tiles)
    # a run that names its sampling shift samples as the model is meant to; the training shift is another thing
    sampling = sampling_of(config)
    sampling = sampling if "flow_shift" in sampling else {}
    return SparseAttentionConfig(
        **sparse_settings(model),
        grid_topk=tuple((row,) * layers if isinstance(row, int) else row for row in rows),
        num_tiles=tuple(num_tiles),
        grids=tuple(model.grid(shape) for shape in shapes),
        budget=schedule.budget,
        dense_layers=schedule.dense_layers,
        flow_shift=sampling.get("flow_shift"),
        guidance_scale=sampling.get("guidance"),
    )


def sparse_config(source: Source, args: argparse.Namespace) -> SparseAttentionConfig | None:
    """How the result's gates are used: what the source says, or the command line where it says nothing.

    Raises:
        ValueError: gates without any word on their use, words without gates, or a flow shift beside a list of steps.
    """
    gates = [key for key in source.shapes if is_gate(key)]
    said = args.topk is not None or args.sparsity is not None or args.grid is not None
    sampling = {
        "flow_shift": args.flow_shift,
        "dense_steps": args.dense_steps,
        "guidance_scale": args.guidance,
        "guidance_form": args.guidance_form,
    }
    sampling = {key: value for key, value in sampling.items() if value is not None}
    if source.sparse is None and not gates:
        if said:
            raise ValueError(f"{source.name} has no gates, so --topk, --sparsity and --grid have no meaning")
        if args.step_list is not None and args.to != "run":
            sampling["step_list"] = args.step_list
        if sampling:
            raise ValueError(f"{source.name} has no gates, so no {SPARSE_CONFIG} to write {', '.join(sampling)} to")
        return None
    if source.sparse is not None:
        if said:
            raise ValueError(f"{source.name} says its own top-k and grid: leave --topk, --sparsity and --grid out")
        sparse = replace(source.sparse, golden=None, golden_tolerance=None)
    else:
        sparse = _sparse_of_options(source, gates, args)
    if args.step_list is not None:
        sparse = sparse.sampled_at(step_list(args.step_list))
    if sparse.step_list is not None and args.flow_shift is not None:
        raise ValueError(f"--flow-shift {args.flow_shift} has no meaning beside the steps {list(sparse.step_list)}")
    return replace(sparse, **sampling)


def _sparse_of_options(source: Source, gates: list[str], args: argparse.Namespace) -> SparseAttentionConfig:
    if (args.topk is None) == (args.sparsity is None) or args.grid is None:
        raise ValueError(
            f"{source.name} has gates but no {SPARSE_CONFIG}: say how they were trained with --grid T H W and one of "
            f"--topk and --sparsity, got grid={args.grid}, topk={args.topk} and sparsity={args.sparsity}"
        )
    arguments = video_dit_arguments(source.config)
    layers = arguments["num_layers"]
    sparse = SparseAttentionConfig(
        method="video_sparse",
        tile_thw=FASTVIDEO_TILE,
        partition="cube",
        block_order="nested",
        fine_gate=any("to_gate_fine" in key for key in gates),
        gate_keys=tuple(gates),
        grid_topk=((1,) * layers,),
        num_tiles=(1,),
        grids=(tuple(args.grid),),
    )
    with torch.device("meta"):
        model = VideoDiT(attention=attention_of(sparse), **arguments)
    latents = [n * p for n, p in zip(args.grid, arguments["patch_size"], strict=True)]
    num_tiles = model.layout_for((arguments["in_channels"], *latents), "cpu").num_video_tiles
    topk = args.topk if args.sparsity is None else resolve_topk(args.sparsity, num_tiles)
    budget = "count" if args.sparsity is None else "fraction"
    return replace(sparse, grid_topk=((topk,) * layers,), num_tiles=(num_tiles,), budget=budget)


def refuse_for_fastvideo(sparse: SparseAttentionConfig | None) -> None:
    """FastVideo has cubes of 4 x 4 x 4 tokens and no fine gate, and drops keys it does not know.

    Raises:
        ValueError: names what it cannot run.
    """
    if sparse is None:
        return
    for key, wanted in (("tile_thw", FASTVIDEO_TILE), ("partition", "cube"), ("fine_gate", False)):
        if getattr(sparse, key) != wanted:
            raise ValueError(f"FastVideo runs {key}={wanted} only, the source has {key}={getattr(sparse, key)}")


def convert(source: Source, sparse: SparseAttentionConfig | None, args: argparse.Namespace) -> None:
    """Write `args.out`.

    Raises:
        ValueError: the source is not whole, or the target cannot hold it.
    """
    arguments = video_dit_arguments(source.config)
    with torch.device("meta"):
        model = VideoDiT(attention=attention_of(sparse), **arguments)
    refuse_other_tensors({n: tuple(p.shape) for n, p in model.named_parameters()}, source.shapes, source.name)
    if sparse is not None:
        refuse_other_attention(model, sparse, source.name)
    if args.to == "fastvideo":
        refuse_for_fastvideo(sparse)
    dtype = None if args.dtype is None else DTYPES[args.dtype]
    if args.to == "run":
        refuse_existing(args.out)
        tensors = {name: source.read(name).to(dtype or source.dtypes[name]) for name, _ in model.named_parameters()}
        write_run(args.out, tensors, arguments, sparse, result_steps(source, sparse, args), source.sampling)
        return
    for name, parameter in model.named_parameters():
        # the files get the dtypes of the source
        parameter.data = parameter.data.to(source.dtypes[name])

    def finish(folder: Path) -> None:
        if source.sampling is not None:
            steps = result_steps(source, sparse, args)
            write_sampling_part(folder, {**source.sampling, "step_list": None if steps is None else list(steps)})
        if sparse is not None and args.to != "wan" and not args.no_golden:
            # of the weights as they were written, whatever their dtype
            write_golden(open_pretrained(folder)[0], folder, layers=args.golden_layers)

    export_pretrained(
        model,
        args.out,
        sparse=sparse,
        layout=args.to,
        dtype=dtype,
        max_shard_bytes=round(args.max_shard_gb * 2**30),
        tensors=source.read,
        finish=finish,
    )


def result_steps(
    source: Source, sparse: SparseAttentionConfig | None, args: argparse.Namespace
) -> tuple[float, ...] | None:
    """Timesteps of the result if it is a distilled generator, sparse or dense."""
    if sparse is not None:
        return sparse.step_list
    return source.step_list if args.step_list is None else step_list(args.step_list)


def write_run(
    out: Path,
    tensors: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    sparse: SparseAttentionConfig | None,
    steps: tuple[float, ...] | None,
    sampling: Mapping[str, Any] | None,
) -> None:
    """A run folder with weights alone, for `init_from=`, and for sampling where the source says how; its step is 0."""
    model = {**arguments, "patch_size": list(arguments["patch_size"])}
    attention: dict[str, Any] = {"_target_": "vsa.attention.full.FullAttention", "_partial_": True}
    state: dict[str, Any] = {key: value for key, value in (sampling or {}).items() if key != "step_list"}
    state |= {"step": 0} if steps is None else {"step": 0, "step_list": list(steps)}
    config: dict[str, Any] = dict(state.get("config", {}))
    if sparse is not None:
        attention["_target_"] = "vsa.attention.video_sparse.VideoSparseAttention"
        attention |= {
            "tile_thw": list(sparse.tile_thw),
            "partition": sparse.partition,
            "block_order": sparse.block_order,
            "fine_gate": sparse.fine_gate,
        }
        state["sparse_attention"] = asdict(sparse)
        if "callbacks" in config:
            config["callbacks"] = {"samples": {**config["callbacks"]["samples"], **sampling_of_export(sparse)}}
    else:
        config["sparsity"] = {"_target_": "vsa.attention.sparsity.ConstantSparsity", "sparsity": 0.0}
    config |= {"model": {"_target_": "vsa.models.video_dit.VideoDiT", **model}, "attention": attention}
    state["config"] = config
    write_checkpoint(out / "checkpoints", {"model": tensors}, state)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    source = open_source(args.source, args.weights)
    if args.like is not None:
        source = with_sampling_of(source, args.like)
    sparse = sparse_config(source, args)
    convert(source, sparse, args)
    count = sum(torch.Size(shape).numel() for shape in source.shapes.values())
    kind = "dense"
    if sparse is not None:
        kind = f"sparse, top-k {min(sparse.grid_topk[0])}..{max(sparse.grid_topk[0])} of {sparse.num_tiles[0]}"
    print(f"{len(source.shapes)} tensors, {count / 1e6:.1f}M parameters ({kind}) from {source.name} in {args.out}")
    if sparse is None and source.step_list is not None and source.sampling is None and args.to != "run":
        print(
            f"no file of {args.out} has the steps {list(source.step_list)} of this dense generator, --to run keeps them"
        )


if __name__ == "__main__":
    with one_line_errors():
        main()

"""Arguments of `vsa convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from vsa.cli.lists import numbers

GATES, SAMPLING = "Gates whose use the source does not say (FastVideo)", "Sampling settings to write down"


def convert(
    source: Annotated[str, Argument(help="run, checkpoint folder, weights folder or hub id")],
    out: Annotated[Path, Argument(help="folder to write, must not exist")],
    to: Annotated[Literal["diffusers", "wan", "fastvideo", "run"], Option(help="layout of OUT")] = "diffusers",
    weights: Annotated[Literal["ema", "model"] | None, Option(help="of a run: averaged (if any) or trained")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, Option(help="of the written tensors (that of the source)")
    ] = None,
    max_shard_gb: Annotated[float, Option(help="size of one file")] = 5.0,
    like: Annotated[str | None, Option(metavar="RUN", help="run whose codec and text encoder to take")] = None,
    golden: Annotated[bool, Option("--golden/--no-golden", help="golden tensors beside sparse weights")] = True,
    golden_layers: Annotated[str | None, Option(metavar="N,N,...", help="layers with golden tensors (all)")] = None,
    topk: Annotated[int | None, Option(help="kv tiles per query tile", rich_help_panel=GATES)] = None,
    sparsity: Annotated[float | None, Option(help="share of tiles skipped", rich_help_panel=GATES)] = None,
    grid: Annotated[
        tuple[int, int, int] | None, Option(metavar="T H W", help="token grid trained on", rich_help_panel=GATES)
    ] = None,
    flow_shift: Annotated[float | None, Option(help="of the sampler", rich_help_panel=SAMPLING)] = None,
    dense_steps: Annotated[
        int | None, Option(help="first denoising steps that keep all tiles", rich_help_panel=SAMPLING)
    ] = None,
    guidance: Annotated[float | None, Option(help="recommended scale", rich_help_panel=SAMPLING)] = None,
    guidance_form: Annotated[
        Literal["standard", "additive"] | None, Option(help="of the scale", rich_help_panel=SAMPLING)
    ] = None,
    step_list: Annotated[
        str | None,
        Option(metavar="T,T,...", help="timesteps of a distilled generator", rich_help_panel=SAMPLING),
    ] = None,
) -> None:
    """Convert weights between runs, diffusers, Wan's original layout and FastVideo's VSA checkpoints.

    The layout of the source is found out. Tensors are copied bit for bit unless --dtype is given. What a run needs to
    be sampled travels along as sampling.json, so that --to run gives a run to sample again.

    \b
    vsa convert outputs/finetune_wan_1_3b/default exported --dtype bfloat16
    vsa convert Wan2.1-T2V-1.3B wan-diffusers
    vsa convert FastWan/transformer exported --topk 32 --grid 16 28 52
    """
    from vsa.checkpoints.convert import Conversion
    from vsa.checkpoints.convert import convert as convert_weights
    from vsa.checkpoints.weight_source import open_weights

    options = Conversion(
        to=to, dtype=dtype, max_shard_gb=max_shard_gb, golden=golden,
        golden_layers=numbers("--golden-layers", golden_layers, int), topk=topk, sparsity=sparsity, grid=grid,
        flow_shift=flow_shift, dense_steps=dense_steps, guidance=guidance, guidance_form=guidance_form,
        step_list=numbers("--step-list", step_list, float),
    )  # fmt: skip
    print(*convert_weights(open_weights(source, weights), out, options, like=like), sep="\n")

"""Arguments of `vsa latents`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

Dtype = Literal["float32", "bfloat16", "float16"]
SAMPLING, WORK = "Sampling", "Work"


def latents(
    teacher: Annotated[str, Argument(help="run or checkpoint folder, otherwise a Wan pipeline: folder or hub id")],
    prompts: Annotated[Path, Argument(help='text file, one prompt a line, or .jsonl with {"prompt": "..."}')],
    out: Annotated[str, Argument(help="folder of shards to write")],
    clips_per_prompt: Annotated[int, Option(help="samples of each prompt")] = 1,
    size: Annotated[tuple[int, int] | None, Option(metavar="H W", help="pixels (largest of the run)")] = None,
    frames: Annotated[int | None, Option(help="frames of a clip (largest of the run)")] = None,
    seed: Annotated[int, Option(help="of the noise")] = 0,
    steps: Annotated[int | None, Option(help="Euler steps (as the run; 50)", rich_help_panel=SAMPLING)] = None,
    guidance: Annotated[float | None, Option(help="uncond + G * (cond - uncond)", rich_help_panel=SAMPLING)] = None,
    shift: Annotated[float | None, Option(help="flow shift (as the run, scheduler)", rich_help_panel=SAMPLING)] = None,
    negative_prompt: Annotated[str, Option(help="of a pipeline's guidance", rich_help_panel=SAMPLING)] = "",
    topk: Annotated[int | None, Option(help="tiles per query tile of a run", rich_help_panel=SAMPLING)] = None,
    sparsity: Annotated[float | None, Option(help="share of tiles skipped", rich_help_panel=SAMPLING)] = None,
    weights: Annotated[
        Literal["ema", "model"] | None, Option(help="averaged (if any) or trained", rich_help_panel=SAMPLING)
    ] = None,
    compute_dtype: Annotated[
        Literal["float32", "bfloat16"], Option(help="of a pipeline's networks", rich_help_panel=SAMPLING)
    ] = "bfloat16",
    batch_size: Annotated[int, Option(help="clips sampled together", rich_help_panel=WORK)] = 4,
    device: Annotated[str | None, Option(help="cpu, cuda, ... (by rank)", rich_help_panel=WORK)] = None,
    dtype: Annotated[Dtype, Option(help="of the latents", rich_help_panel=WORK)] = "float16",
    samples_per_shard: Annotated[int, Option(help="also what an interruption costs", rich_help_panel=WORK)] = 256,
    overwrite: Annotated[bool, Option("--overwrite", help="replace the data set", rich_help_panel=WORK)] = False,
    rank: Annotated[int, Option(help="number of this process", rich_help_panel=WORK)] = 0,
    world_size: Annotated[int, Option(help="processes that share the work", rich_help_panel=WORK)] = 1,
) -> None:
    """Sample a teacher for a list of prompts into shards of latents and captions, in the format of `vsa encode`.

    \b
    vsa latents outputs/quickstart/default prompts.txt shards
    vsa latents Wan-AI/Wan2.1-T2V-1.3B-Diffusers prompts.txt shards --size 448 832 --frames 61

    An interrupted command is repeated to go on. To share the work, run it with --rank R --world-size N on every GPU,
    then once without them.
    """
    from vsa.data.prompts import read_prompts
    from vsa.data.resumable_writer import check_target
    from vsa.errors import usable_device
    from vsa.sampling.latents import TeacherOptions, open_teacher, write_latents

    options = TeacherOptions(
        device=usable_device(device, rank=rank), weights=weights, size=size, frames=frames, steps=steps,
        guidance=guidance, flow_shift=shift, negative_prompt=negative_prompt, topk=topk, sparsity=sparsity,
        compute_dtype=compute_dtype,
    )  # fmt: skip
    check_target(out, overwrite=overwrite)
    texts = read_prompts(prompts)
    told = write_latents(
        open_teacher(teacher, options), texts, out, clips_per_prompt=clips_per_prompt, seed=seed,
        batch_size=batch_size, dtype=dtype, samples_per_shard=samples_per_shard, overwrite=overwrite, rank=rank,
        world_size=world_size,
    )  # fmt: skip
    print(*told, sep="\n")

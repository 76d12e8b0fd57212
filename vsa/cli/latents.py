"""Arguments of `vsa latents`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument

from vsa.cli.options import MANY, Group, Precision, Shift, option
from vsa.cli.values import made_of

SAMPLING, WORK = "Sampling", "Work"


def latents(
    teacher: Annotated[str, Argument(help="run or checkpoint folder, or a Wan pipeline (folder, hub id)")],
    prompts: Annotated[Path, Argument(help='text file with one prompt per line, or .jsonl with {"prompt": "..."}')],
    out: Annotated[Path, Argument(help="output folder of shards")],
    clips_per_prompt: Annotated[int, option("samples per prompt", whole=(1, MANY))] = 1,
    size: Annotated[tuple[int, int] | None, option("pixels (run's largest)", whole=(1, 8192), metavar="H W")] = None,
    frames: Annotated[int | None, option("frames of a clip (run's largest)", whole=(1, 100_000))] = None,
    seed: Annotated[int, option("seed of the noise", whole=(0, MANY))] = 0,
    steps: Annotated[int | None, option("sampler steps (the run's, 50)", panel=SAMPLING, whole=(1, 10_000))] = None,
    guidance: Annotated[float | None, option("uncond + G * (cond - uncond)", panel=SAMPLING, real=(-100, 100))] = None,
    flow_shift: Shift = None,
    negative_prompt: Annotated[str, option("unconditional caption of a pipeline", panel=SAMPLING)] = "",
    topk: Annotated[int | None, option("kv tiles per query tile of a run", panel=SAMPLING, whole=(1, MANY))] = None,
    sparsity: Annotated[float | None, option("share of tiles skipped", panel=SAMPLING, real=(0, 1))] = None,
    weights: Annotated[Group | None, option("averaged (if any) or trained weights", panel=SAMPLING)] = None,
    compute_dtype: Annotated[
        Literal["float32", "bfloat16"], option("dtype of a pipeline's networks", panel=SAMPLING)
    ] = "bfloat16",
    batch_size: Annotated[int, option("clips sampled together", panel=WORK, whole=(1, 65_536))] = 4,
    device: Annotated[str | None, option("cpu, cuda, ... (by rank)", panel=WORK)] = None,
    dtype: Annotated[Precision, option("dtype of the stored latents", panel=WORK)] = "float16",
    samples_per_shard: Annotated[int, option("samples per shard", panel=WORK, whole=(1, MANY))] = 256,
    overwrite: Annotated[bool, option("replace the data set", "--overwrite", panel=WORK)] = False,
    rank: Annotated[int, option("rank of this process", panel=WORK, whole=(0, MANY))] = 0,
    world_size: Annotated[int, option("number of processes that share the work", panel=WORK, whole=(1, MANY))] = 1,
) -> None:
    """Sample a teacher for a list of prompts into shards of latents and captions, in the format of `vsa encode`.

    \b
    vsa latents outputs/quickstart/default prompts.txt shards
    vsa latents Wan-AI/Wan2.1-T2V-1.3B-Diffusers prompts.txt shards --size 448 832 --frames 61

    Repeat an interrupted command to continue. To share the work, run it with --rank R --world-size N on every GPU,
    then once without them.
    """
    arguments = locals()
    from vsa.data.prompts import read_prompts
    from vsa.data.resumable_writer import OutputOptions, check_target
    from vsa.errors import usable_device
    from vsa.sampling.latents import TeacherOptions, open_teacher, write_latents

    arguments["device"] = usable_device(device, rank=rank)
    options, output = made_of(TeacherOptions, arguments), made_of(OutputOptions, arguments)
    check_target(out, overwrite=overwrite)
    texts = read_prompts(prompts)
    numbers = {"clips_per_prompt": clips_per_prompt, "seed": seed, "batch_size": batch_size}
    print(*write_latents(open_teacher(teacher, options), texts, out, output, **numbers), sep="\n")

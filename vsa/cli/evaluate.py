"""Arguments of `vsa evaluate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from vsa.cli.options import MANY, Device, Guidance, LowExpert, PromptFile, Prompts, Shift, Steps, Weights, option
from vsa.cli.values import made_of

BARS = "Fail when"
Bound = float | None
SHARE, CHANGE = (0.0, 1.0), (-1.0, 1.0)


def bar(text: str, real: tuple[float, float] = (-1e9, 1e9)) -> Any:
    """The option of a bar, within the range of its metric: a bar outside of it would check nothing."""
    return option(text, panel=BARS, real=real)


def evaluate(
    run: Annotated[Path, typer.Argument(help="run folder")],
    follow: Annotated[bool, option("wait for new checkpoints until the run's last step", "--follow")] = False,
    timeout: Annotated[float, option("seconds without a new checkpoint that end --follow", real=(1e-3, 1e7))] = 3600,
    poll: Annotated[float, option("seconds between two checks for new checkpoints", real=(1e-3, 1e5))] = 5,
    prompt: Prompts = None,
    prompts: PromptFile = None,
    held_out: Annotated[int, option("held-out captions to draw; 16 for distances", whole=(0, 4096))] = 0,
    reference: Annotated[str, option("reference of the clips", metavar="dense|none|RUN")] = "dense",
    no_val_loss: Annotated[bool, option("skip the validation loss", "--no-val-loss")] = False,
    lpips: Annotated[Path | None, option("folder with torchvision's alexnet-*.pth")] = None,
    weights: Weights = None,
    transformer_2: LowExpert = None,
    seed: Annotated[int | None, option("seed of the noise (as the run's samples)", whole=(0, MANY))] = None,
    steps: Steps = None,
    guidance: Guidance = None,
    flow_shift: Shift = None,
    batch_size: Annotated[int, option("clips sampled together", whole=(1, 65_536))] = 16,
    device: Device = None,
    out: Annotated[Path | None, option("output folder (RUN/evaluation)")] = None,
    min_psnr: Annotated[Bound, bar("below: PSNR of all pixels against the reference, dB")] = None,
    min_ssim: Annotated[Bound, bar("below: SSIM against the reference, mean of clips", CHANGE)] = None,
    max_lpips: Annotated[Bound, bar("above: LPIPS against the reference, mean of clips")] = None,
    max_kernel_distance: Annotated[Bound, bar("above: kernel distance to held-out clips")] = None,
    max_val_loss: Annotated[Bound, bar("above: validation loss")] = None,
    max_black: Annotated[Bound, bar("above: share of nearly black frames", SHARE)] = None,
    max_uniform: Annotated[Bound, bar("above: share of frames of one colour", SHARE)] = None,
    max_flicker: Annotated[Bound, bar("above: luma change that is reversed at once", SHARE)] = None,
    max_flicker_excess: Annotated[Bound, bar("above: flicker minus the reference's", CHANGE)] = None,
    min_motion: Annotated[Bound, bar("below: luma change between frames", SHARE)] = None,
) -> None:
    """Evaluate the checkpoints of a run in a separate process, with --follow as they are written.

    Measures the validation loss, the distance to held-out clips, the agreement with the model's own dense attention on
    fixed prompts and noise (PSNR, SSIM: not how good the clips are), and signs of broken clips (black, one colour,
    still, flickering). Exits with status 1 if the newest checkpoint misses a bar or draws noise. Use another device
    than the training.

    \b
    vsa evaluate outputs/quickstart/default
    vsa evaluate outputs/quickstart/default --held-out 32
    vsa evaluate outputs/quickstart/default --follow --min-psnr 20 --max-black 0
    """
    arguments = locals()
    from vsa.data.prompts import read_prompts
    from vsa.errors import usable_device
    from vsa.evaluation.bars import BARS as metrics
    from vsa.evaluation.bars import choose_bars
    from vsa.evaluation.follow import EvaluationRequest, evaluate_run

    measurements = {"val_loss": not no_val_loss, "lpips": lpips is not None, "reference": reference != "none"}
    bars = choose_bars({name: arguments[name] for name in metrics if arguments[name] is not None}, **measurements)
    captions = [*(prompt or []), *(read_prompts(prompts) if prompts else [])]
    arguments |= {"device": usable_device(device), "prompts": captions, "val_loss": not no_val_loss}
    request = made_of(EvaluationRequest, arguments)
    missed = evaluate_run(run, request, bars, out=out, follow=follow, poll=poll, timeout=timeout)
    for line in missed:
        print(f"error: {line}", file=sys.stderr)
    if missed:
        raise typer.Exit(1)

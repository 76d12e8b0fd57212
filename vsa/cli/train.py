"""Arguments of `vsa train`."""

from __future__ import annotations

from typing import Annotated

import typer

# flags of Hydra pass through
CONTEXT_SETTINGS = {"ignore_unknown_options": True}


def train(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings and flags of Hydra")
    ] = None,
) -> None:
    """Pretrain, finetune or distill a video diffusion transformer; `python train.py` is the same.

    \b
    vsa train experiment=quickstart
    vsa train experiment=quickstart run=mine trainer.max_steps=100
    vsa train experiment=quickstart run=mine ckpt_path=last       resumes from the newest checkpoint
    vsa train experiment=own_videos data.root=SHARDS tile_thw=[2,2,2]
    vsa train -m experiment=quickstart sparsity.sparsity=0.5,0.75 'run=s${sparsity.sparsity}'

    --cfg job prints every setting, --info how Hydra composed them, -m runs all combinations of listed values one
    after the other; `vsa sweep` runs them in parallel, compares them and can be resumed.
    """
    words = settings or []
    if {"-m", "--multirun"} & set(words) and any(word.startswith(("sweep=", "hydra/launcher=queue")) for word in words):
        from vsa.sweeps.command import launch_sweep as launch
    else:
        from vsa.training.launch import launch

    launch(words)

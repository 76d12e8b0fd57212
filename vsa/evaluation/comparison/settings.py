"""Settings of `vsa compare-attention`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vsa.attention.tiling import Grid
from vsa.checkpoints.run_weights import Group
from vsa.evaluation.comparison.usual import SPARSITIES


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """What is compared, on which queries, keys and values, and how it is measured.

    Args:
        methods: see `parse_method`; empty: `usual_on` the grid. Dense attention always comes first.
        out: output folder; None: `comparison`, inside a run's folder.
        run: a run, checkpoint or export, for captures of q, k, v (with `clips`) and denoising (with `prompts`).
        clips: folder of videos, a video, or the id of a sample; see `open_clip`.
        captures: file of `save_captures`.
        synthetic: token grid of random fields.
        heads: number of heads of random fields.
        head_dim: head dim of random fields.
        tile: default tokens per tile of the methods; None: the model's, or (4, 4, 4).
        sparsities: sparsities of the usual methods.
        layers: layers to capture; None: the first, the middle and the last one.
        timesteps: timesteps to capture, in [0, 1000].
        most_clips: maximum number of videos of a folder to use.
        prompts: captions of clips to denoise with each method.
        held_out: number of captions of held-out clips of a run to denoise besides `prompts`.
        steps: sampler steps; None: as the run samples.
        guidance: guidance scale; None: as the run samples.
        flow_shift: flow shift; None: as the run samples. Required for a dense export.
        denoising: options of a `DenoisingPlan` for every method except dense attention; others are taken from the run,
            without its budgets.
        latents: latent frames, rows, columns of a clip for a dense export or a pipeline; 81 frames of 480 x 832 pixels
            for Wan2.1.
        queries: number of query tokens for recall and error.
        repeats: number of timed calls of each method.
        dtype: dtype of q, k, v; None: bfloat16 on a GPU, float32 on a CPU.
        device: compute device; None: a GPU if there is one.
        seed: seed of all random numbers.
        weights: averaged or trained weights of a run.
        pipeline: a dense diffusers Wan pipeline to compare instead of a run; or, with a run that is an export, the
            pipeline with its VAE and text encoder.
        save: safetensors file to write the captures to.

    Raises:
        ValueError: options that contradict each other, by their names on the command line.
    """

    methods: Sequence[str] = ()
    out: Path | None = None
    run: str | None = None
    clips: str | None = None
    captures: Path | None = None
    synthetic: Grid | None = None
    heads: int = 4
    head_dim: int = 64
    tile: Grid | None = None
    sparsities: Sequence[float] = SPARSITIES
    layers: Sequence[int] | None = None
    timesteps: Sequence[float] = (900.0, 500.0, 100.0)
    most_clips: int = 2
    prompts: Sequence[str] = ()
    held_out: int = 0
    steps: int | None = None
    guidance: float | None = None
    flow_shift: float | None = None
    denoising: Mapping[str, Any] = field(default_factory=dict)
    latents: Grid = (21, 60, 104)
    queries: int = 256
    repeats: int = 5
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device: str | None = None
    seed: int = 0
    weights: Group | None = None
    pipeline: str | None = None
    save: Path | None = None

    def __post_init__(self) -> None:
        # with a run, the pipeline only provides VAE and text encoder
        alone = self.pipeline if self.run is None else None
        sources = {
            "--run": self.run, "--pipeline": alone, "--captures": self.captures, "--synthetic": self.synthetic
        }  # fmt: skip
        given = [name for name, value in sources.items() if value is not None]
        if len(given) != 1:
            raise ValueError(f"expected one of {', '.join(sources)}, got {', '.join(given) or 'none'}")
        model, denoises = self.run or alone, bool(self.prompts or self.held_out)
        if model is not None and self.clips is None and not denoises:
            raise ValueError(f"{given[0]} {model} needs --clips to capture q, k, v of, or --prompt to denoise, or both")
        if model is None and (self.clips is not None or denoises):
            raise ValueError("--clips and --prompt need a model: set --run or --pipeline")
        if alone is not None and self.weights is not None:
            raise ValueError(f"--weights {self.weights} applies to runs only, got --pipeline {alone}")
        if self.denoising and not denoises:
            option = next(iter(self.denoising)).replace("_", "-")
            raise ValueError(f"--{option} applies to denoising only: set --prompt")
        if self.save is not None and self.save.exists():
            raise ValueError(f"--save {self.save} already exists: choose another file")

"""Clips and pictures of a run while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor

from vsa.attention.full import FullAttention
from vsa.attention.schedule import SparsityPoint, check_points, mean_topk
from vsa.training.attention_view import draw_attention
from vsa.training.callbacks.checkpoint import interrupted
from vsa.training.callbacks.ema import find_ema
from vsa.training.callbacks.throughput import find_throughput
from vsa.training.clips import write_clips
from vsa.training.inference import LoadedRun, SampleSettings, generate, settings_dict


class Samples(L.Callback):
    """Samples clips with the averaged weights every `every_n_steps` and at the end, and draws the run's pictures.

    Clips go to `run_dir/samples/step-N` (mp4, GIF, contact sheet, JSON), to TensorBoard as video and to wandb as
    GIF; at the end `run_dir/loss.png` and `run_dir/attention.png` (which tiles queries attend to) are drawn.

    Args:
        run_dir: the run folder.
        prompts: captions to sample; none: no clips.
        every_n_steps: optimizer steps between samples; 0 samples at the end only.
        steps: Euler steps.
        guidance: classifier-free guidance scale, 1 is one pass.
        flow_shift: shift of the sampler's noise levels; None: that of the training.
        seed: of the sampling noise, the same at every step so that clips can be compared.
        fps: of the files.
        sparsity: where the clips are sampled: at the top-k of the step (current), with all tiles (dense), at the end
            value of the schedule (target); with more than one each set has a folder of its own, named after it.

    Raises:
        ValueError: an unknown name in `sparsity`, or one twice; a flow shift that is not positive.
    """

    def __init__(
        self,
        run_dir: str,
        prompts: Sequence[str] = (),
        every_n_steps: int = 0,
        steps: int = 32,
        guidance: float = 1.0,
        flow_shift: float | None = None,
        seed: int = 0,
        fps: float = 8,
        sparsity: Sequence[SparsityPoint] = ("current",),
    ):
        if flow_shift is not None and not flow_shift > 0:
            raise ValueError(f"flow_shift must be positive, got {flow_shift}")
        self.run_dir = Path(run_dir)
        self.prompts = list(prompts)
        self.every_n_steps, self.seed, self.fps = every_n_steps, seed, fps
        self.steps, self.guidance, self.flow_shift = steps, guidance, flow_shift
        self.sparsity = check_points("callbacks.samples.sparsity", sparsity)
        self._sampled_step = -1

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        due = self.every_n_steps > 0 and trainer.global_step % self.every_n_steps == 0
        if due and (batch_idx + 1) % pl_module.accumulate == 0:
            self._sample(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not interrupted(trainer):
            self._sample(trainer, pl_module)
        metrics = self.run_dir / "metrics.csv"
        if trainer.is_global_zero and metrics.exists():
            for logger in trainer.loggers:
                logger.save()
            pl_module.draw_curves(metrics, self.run_dir / "loss.png", str(self.run_dir))

    def _sample(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not self.prompts or trainer.global_step in (0, self._sampled_step):
            return
        self._sampled_step = trainer.global_step
        throughput = find_throughput(trainer)
        ema = find_ema(trainer)
        averaged = ema.applied(pl_module.model) if ema is not None else nullcontext()
        with averaged, throughput.paused() if throughput is not None else nullcontext():
            run = self._live_run(trainer, pl_module, "ema" if ema is not None else "model")
            how = {"steps": self.steps, "guidance": self.guidance, "flow_shift": self.flow_shift}
            options: dict[SparsityPoint, SampleSettings] = {
                at: run.settings(seed=self.seed, at=at, **how) for at in self.sparsity
            }
            pl_module.model.eval()
            made: dict[int | tuple[int, ...], Tensor] = {}
            for settings in options.values():
                if settings.topk not in made:
                    # every rank takes part: the forward of a sharded model is a collective
                    made[settings.topk] = generate(run, self.prompts, settings)
            if trainer.global_step >= trainer.max_steps:
                self._draw_attention(trainer, run, list(options.values()))
            pl_module.model.train()
        if trainer.is_global_zero:
            for at, settings in options.items():
                self._show(trainer, made[settings.topk], settings_dict(settings, run), at)

    def _draw_attention(self, trainer: L.Trainer, run: LoadedRun, options: Sequence[SampleSettings]) -> None:
        # dense attention and a top-k of all tiles select nothing
        blocks: Any = run.model.blocks
        tiles = run.model.layout_for(options[0].latent_shape).num_video_tiles
        sparse = [settings for settings in options if mean_topk(settings.topk, tiles) < tiles]
        if sparse and not isinstance(blocks[0].method, FullAttention):
            picture = self.run_dir / "attention.png" if trainer.is_global_zero else None
            draw_attention(run, self.prompts[0], sparse[0], picture)

    def _show(self, trainer: L.Trainer, videos: Tensor, record: Mapping[str, Any], at: SparsityPoint) -> None:
        folder, name = self.run_dir / "samples" / f"step-{trainer.global_step:08d}", "samples"
        if len(self.sparsity) > 1:
            folder, name = folder / at, f"samples/{at}"
        write_clips(folder, self.prompts, videos, record, fps=self.fps)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                # [N, T, C, H, W]
                clips = videos.permute(0, 1, 4, 2, 3)
                logger.experiment.add_video(name, clips, trainer.global_step, fps=self.fps)
            elif isinstance(logger, WandbLogger):
                gifs = [str(path) for path in sorted(folder.glob("*.gif"))]
                logger.log_video(name, gifs, step=trainer.global_step, caption=self.prompts)

    def _live_run(self, trainer: L.Trainer, pl_module: Any, weights: str) -> LoadedRun:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        return LoadedRun(
            model=pl_module.model,
            codec=data.codec,
            text_encoder=data.text_encoder,
            latent_mean=pl_module.latent_mean,
            latent_std=pl_module.latent_std,
            sparsity=pl_module.sparsity,
            flow_shift=pl_module.objective.shift,
            latent_shapes=tuple(data.buckets),
            step=trainer.global_step,
            source=str(self.run_dir),
            weights=weights,
            text_padding=data.text_padding,
        )

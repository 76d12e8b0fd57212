"""Sample clips and pictures of a run, during training and at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from vsa.attention.denoising import DenoisingPlan
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.sparsity import SparsityPoint, check_points
from vsa.data.examples import examples
from vsa.data.prompts import HELD_OUT_PROMPTS
from vsa.evaluation.attention_map import draw_attention
from vsa.evaluation.figures import logged_metrics
from vsa.models.compute_dtype import rounds_to
from vsa.sampling.contact_sheet import side_by_side
from vsa.sampling.pipeline import SampleSettings, SamplingPipeline, generate
from vsa.sampling.record import settings_dict
from vsa.sampling.sample_writer import DATA_CLIPS, file_stem, write_clips, write_examples
from vsa.secrets import without_secrets
from vsa.settings import AtLeastOne, Count, NonNegative, Positive, Seed, validated
from vsa.training.callbacks.ema import EMA
from vsa.training.display import log_picture, never_fatal
from vsa.training.modules.teacher import Teacher
from vsa.training.run_state import parts_of

# number of data samples shown next to the first clips
_DATA_CLIPS = 6


@dataclass(frozen=True, kw_only=True)
class ClipSet:
    """Clips of one network at one top-k.

    Args:
        name: name within the clips of a step, such as `student/target`; "" for the only set.
        videos: uint8 `[N, T, H, W, 3]`.
        record: the settings of the sampling, see `settings_dict`.
    """

    name: str
    videos: Tensor
    record: Mapping[str, Any]

    @property
    def title(self) -> str:
        """Name and number of steps, with guidance and kept tiles if they apply."""
        steps, guidance, tiles = (self.record[key] for key in ("steps", "guidance", "num_tiles"))
        topk = KeptTiles.of(self.record["topk"]).mean(tiles)
        parts = [*self.name.split("/"), f"{steps} step{'s' if steps > 1 else ''}"]
        parts += [f"guidance {guidance:g}"] if guidance != 1 else []
        parts += [f"top {topk:g} of {tiles}"] if topk < tiles else []
        return ", ".join(parts)


@validated
class Samples(L.Callback):
    """Samples clips with the averaged weights every `every_n_steps` and at the end, and draws the pictures of the run.

    Clips are written to `run_dir/samples/step-N` (mp4, GIF, contact sheet, JSON), and as GIF to TensorBoard and wandb.
    At the end, `run_dir/loss.png` and `run_dir/attention.png` (the tiles that queries attend to) are drawn.

    A distillation also samples its teacher at the same prompts and seeds: `samples/teacher`, sampled once, and
    `samples/step-N` with the trained weights (`student`), the averaged ones (`ema`) and a picture of all
    (`side_by_side.png`). `steps`, `guidance` and `flow_shift` apply to the teacher, which keeps all tiles; trained and
    averaged weights are sampled with the step list, at every point of `sparsity`. The unconditional pass of guidance
    uses the caption "".

    Args:
        run_dir: the run folder.
        prompts: captions to sample; empty: no clips; None: the first 4 captions of the held-out clips.
        every_n_steps: optimizer steps between samples; 0 samples at the end only.
        steps: number of Euler steps.
        guidance: classifier-free guidance scale; 1 uses a single pass.
        flow_shift: shift of the sampler's noise levels; None: that of the training. A distillation must set the shift
            of its teacher.
        seed: seed of the sampling noise, the same at every step so that clips can be compared.
        fps: frames per second of the files; None: those of most clips of the data.
        sparsity: points of the sparsity schedule to sample at: the top-k of the step (current), all tiles (dense), the
            end value of the schedule (target). With more than one, each set has a folder of that name.
    """

    # after the checkpoint of the weights shown here
    order = 2

    def __init__(
        self,
        run_dir: str,
        prompts: Sequence[str] | None = None,
        every_n_steps: Count = 0,
        steps: AtLeastOne = 32,
        guidance: NonNegative = 1.0,
        flow_shift: Positive | None = None,
        seed: Seed = 0,
        fps: Positive | None = None,
        sparsity: Sequence[SparsityPoint] = ("current",),
    ):
        self.run_dir = Path(run_dir)
        # captions of the data are known once the data are opened
        self._from_data = prompts is None
        # prompts become file names
        self.prompts = [without_secrets(prompt, named=False) for prompt in prompts or ()]
        self.every_n_steps, self.seed = every_n_steps, seed
        self.fps: Any = fps
        self.steps, self.guidance, self.flow_shift = steps, guidance, flow_shift
        self.sparsity = check_points("callbacks.samples.sparsity", sparsity)
        self._sampled_step = -1
        self._teacher: ClipSet | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.fps = self.fps or pl_module.data.fps
        if self._from_data:
            self.prompts = self._own_prompts(pl_module)
        data: Any = pl_module.data
        sampled = max(data.buckets, key=lambda shape: math.prod(shape[1:]))
        if self.prompts and data.cond_channels and sampled not in data.held_out:
            rank_zero_info("no clips will be sampled: none of their size is held out, whose first frame they continue")
            self.prompts = []
        pl_module.status.prompt = self.prompts[0] if self.prompts else None
        if pl_module.reference is not None and self.prompts and self.flow_shift is None:
            raise ValueError(
                "callbacks.samples.flow_shift=null, but the teacher's clips need a number: its sampling shift"
            )

    def _own_prompts(self, pl_module: Any) -> list[str]:
        """Captions of the data, for a run without prompts that can sample clips."""
        captions = pl_module.data.held_out_captions(HELD_OUT_PROMPTS)
        if captions and (pl_module.reference is None or self.flow_shift is not None):
            return list(captions)
        why = "callbacks.samples.flow_shift=null" if captions else "no clip is held out"
        rank_zero_info(f"no clips will be sampled ({why}): name captions with callbacks.samples.prompts=[...]")
        return []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        due = self.every_n_steps > 0 and trainer.global_step % self.every_n_steps == 0
        if due and (batch_idx + 1) % pl_module.accumulate == 0:
            self._sample(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if pl_module.status.received is None:
            self._sample(trainer, pl_module)
        pl_module.log_lines.save()
        if trainer.is_global_zero:
            metrics, picture = self.run_dir / "metrics.csv", self.run_dir / "loss.png"
            with never_fatal(str(picture)):
                # a run that stops early may not have logged these metrics
                if logged_metrics(metrics, pl_module.headline):
                    pl_module.draw_curves(metrics, picture, str(self.run_dir))

    def _sample(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Sample the due clips; every rank takes part, since the forward of a sharded model is collective."""
        if not self.prompts or trainer.global_step in (0, self._sampled_step):
            return
        self._sampled_step = trainer.global_step
        ema: EMA | None = parts_of(trainer).get("ema")
        teacher: Teacher | None = pl_module.reference
        best = "model" if ema is None else "ema"
        # names of the weights, by the name of their clips
        weight_names = {"": best} if teacher is None else {"student": "model"} | ({} if ema is None else {"ema": "ema"})
        # clip sets, with the parent of their folders
        clip_sets: list[tuple[ClipSet, Path]] = []
        folder = self.run_dir / "samples" / f"step-{trainer.global_step:08d}"
        pl_module.phase = "clips"
        with pl_module.status.paused():
            pl_module.model.eval()
            for name, weights in weight_names.items():
                with ema.applied(pl_module.model) if ema is not None and weights == "ema" else nullcontext():
                    run = self._live_run(trainer, pl_module, weights)
                    options = self._options(run, self.sparsity)
                    clip_sets += [(clips, folder) for clips in self._clips(run, options, name)]
                    if trainer.global_step >= trainer.max_steps and weights == best:
                        self._draw_attention(trainer, run, list(options.values()))
            pl_module.model.train()
            if teacher is not None and self._teacher is None:
                # the teacher's clips never change, so they are sampled once
                self._teacher = self._teacher_clips(self._live_run(trainer, pl_module, "teacher"), teacher)
                clip_sets.insert(0, (self._teacher, folder.parent))
        pl_module.phase = ""
        if trainer.is_global_zero:
            self._show_data(trainer, pl_module)
            for clips, parent in clip_sets:
                with never_fatal(str(parent / clips.name)):
                    self._show(trainer, clips, parent)
            if self._teacher is not None:
                columns = [self._teacher, *(clips for clips, parent in clip_sets if parent == folder)]
                # more rows are not legible in one picture
                rows = {clips.title: clips.videos[:16] for clips in columns}
                picture, title = folder / "side_by_side.png", f"{self.run_dir}, step {trainer.global_step}"
                with never_fatal(str(picture)):
                    side_by_side(rows, self.prompts[:16], picture, title=title)
                    log_picture(trainer.loggers, "samples/side_by_side", picture, trainer.global_step)

    def _show_data(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write clips of the data and their reconstructions by the codec, once per run."""
        folder = self.run_dir / DATA_CLIPS
        if not (folder / "samples.json").is_file():
            with never_fatal(str(folder)), pl_module.status.paused():
                clips = examples(pl_module.data, self.prompts, _DATA_CLIPS, device=pl_module.device)
                write_examples(folder, clips, fps=self.fps)

    def _options(self, run: SamplingPipeline, points: Sequence[SparsityPoint]) -> dict[SparsityPoint, SampleSettings]:
        # a step list fixes steps and shift, and its guidance is in the weights
        own = run.step_list is not None
        how = {} if own else {"steps": self.steps, "guidance": self.guidance, "flow_shift": self.flow_shift}
        return {at: run.settings(seed=self.seed, at=at, **how) for at in points}

    def _clips(
        self, run: SamplingPipeline, options: Mapping[SparsityPoint, SampleSettings], name: str
    ) -> list[ClipSet]:
        """One set per point; points with equal settings are sampled once."""
        videos: dict[tuple[KeptTiles, DenoisingPlan], Tensor] = {}
        for settings in options.values():
            if (settings.topk, settings.denoising) not in videos:
                videos[settings.topk, settings.denoising] = generate(run, self.prompts, settings)
        return [
            ClipSet(
                name="/".join(part for part in (name, at if len(options) > 1 else "") if part),
                videos=videos[settings.topk, settings.denoising],
                record=settings_dict(settings, run),
            )
            for at, settings in options.items()
        ]

    def _teacher_clips(self, run: SamplingPipeline, teacher: Teacher) -> ClipSet:
        run = replace(run, model=teacher.network, source=teacher.start.source, step_list=None)
        # the teacher has the weights of a dense checkpoint
        (clips,) = self._clips(run, self._options(run, ("dense",)), "teacher")
        # the step of the record is that of this run, not of the teacher
        return replace(clips, record={key: value for key, value in clips.record.items() if key != "step"})

    def _draw_attention(self, trainer: L.Trainer, run: SamplingPipeline, options: Sequence[SampleSettings]) -> None:
        # dense attention, and a top-k of all tiles, select nothing to draw
        tiles = run.model.layout_for(options[0].latent_shape).num_video_tiles
        sparse = [settings for settings in options if settings.topk.at(0.5).mean(tiles) < tiles]
        if sparse and not run.model.is_dense:
            picture = self.run_dir / "attention.png"
            with never_fatal(str(picture)):
                draw_attention(run, self.prompts[0], sparse[0], picture if trainer.is_global_zero else None)

    def _show(self, trainer: L.Trainer, clips: ClipSet, parent: Path) -> None:
        folder, name = parent / clips.name, "/".join(part for part in ("samples", clips.name) if part)
        write_clips(folder, self.prompts, clips.videos, clips.record, fps=self.fps)
        gifs = [folder / f"{file_stem(i, prompt)}.gif" for i, prompt in enumerate(self.prompts)]
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                for gif in gifs:
                    _add_gif(logger, f"{name}/{gif.stem}", gif, clips.videos.shape[2:4], trainer.global_step)
            elif isinstance(logger, WandbLogger):
                logger.log_video(name, [str(gif) for gif in gifs], step=trainer.global_step, caption=self.prompts)

    def _live_run(self, trainer: L.Trainer, pl_module: Any, weights: str) -> SamplingPipeline:
        data: Any = pl_module.data
        return SamplingPipeline(
            model=pl_module.model,
            codec=data.codec,
            text_encoder=data.text_encoder,
            latent_mean=pl_module.statistics.mean,
            latent_std=pl_module.statistics.std,
            sparsity=pl_module.sparsity,
            flow_shift=pl_module.objective.shift,
            latent_shapes=tuple(data.buckets),
            step=trainer.global_step,
            source=str(self.run_dir),
            weights=weights,
            text_padding=data.text_padding,
            step_list=pl_module.step_list,
            first_frames=data.first_frames if data.cond_channels else None,
            compute_dtype=rounds_to(pl_module.parallel.compute_dtype, pl_module.device.type) or torch.float32,
        )


def _add_gif(logger: TensorBoardLogger, tag: str, path: Path, size: Sequence[int], step: int) -> None:
    """Log an existing GIF of size [height, width]; `add_video` would need moviepy to encode one."""
    # tensorboard is in an optional extra
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

    # RGB
    image = Summary.Image(height=size[0], width=size[1], colorspace=3, encoded_image_string=path.read_bytes())
    logger.experiment.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

"""Estimate of a run from its settings: memory per GPU, settings that would fit, and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vsa.attention.full import FullAttention
from vsa.attention.kept_tiles import KeptTiles
from vsa.checkpoints.moments import EIGHT_BIT
from vsa.data.parallel_dims import ParallelDims
from vsa.models.init import without_memory
from vsa.models.recompute import LEVELS, Level
from vsa.training.estimate.gpus import GIB, MEASURED_BY, Gpu
from vsa.training.estimate.job import Job
from vsa.training.estimate.predict import fitting, host_bytes, step_seconds, total_memory, whole_memory

MARGIN = 0.02
"""Fraction of a GPU's memory that `auto` leaves free: the largest error of a measured run's estimate."""

POINTS = 16
"""Number of steps of a run at which the time of a step is estimated if its sparsity changes."""

ROUNDED = "task.parallel.frozen=rounded"
"""The setting of rounded frozen weights, for messages."""

Shape = tuple[int, ...]


def _jobs_of(
    cfg: Any, module: Any, shapes: Mapping[Shape, int], text: int, *, dims: ParallelDims, chip: tuple[int, int] | None
) -> Callable[[int], list[Any]]:
    """Function of an optimizer step that gives fraction and `Job` of each latent shape."""
    micro_batches, batch_size = cfg.trainer.accumulate_grad_batches, cfg.data.batch_size
    strategy = cfg.trainer.strategy
    targets = [str(node.get("_target_")) for node in cfg.callbacks.values() if node is not None]
    networks = module.planned_networks()
    first = networks[0].model
    # as in `choose_strategy`
    sharded = dims.ranks > 1 or strategy != "auto"
    module.parallel.refuse_misfit(sharded=sharded)
    common: dict[str, Any] = {
        "networks": networks,
        "text": text,
        "batch": dims.micro_batch(batch_size, micro_batches),
        "micro_batches": micro_batches,
        "dims": dims,
        "sharded": sharded,
        "reduce_each": not isinstance(strategy, str) and bool(strategy.get("reduce_each")),
        "averaged": any(target.endswith(".EMA") for target in targets),
        "level": "none" if _is_automatic(cfg) else cfg.task.parallel.activation_checkpointing,
        "chip": chip,
        "compiled": bool(cfg.task.parallel.get("compile", False)),
        "frozen_rounded": cfg.task.parallel.get("frozen") == "rounded",
        "offloaded": bool(cfg.task.parallel.get("offload", False)),
    }
    total = sum(shapes.values())

    def at(step: int) -> list[tuple[float, Job]]:
        jobs = []
        for shape, count in shapes.items():
            tiles, layers = first.layout_for(shape).num_video_tiles, len(first.blocks)
            topk = module.sparsity.topk_per_layer(step, tiles, layers) if first.selects else KeptTiles((tiles,))
            jobs.append((count / total, Job(latent_shape=shape, topk=topk.largest(), **common)))
        return jobs

    return at


def _is_automatic(cfg: Any) -> bool:
    """Whether the level of activation checkpointing is chosen by memory."""
    return cfg.task.parallel.get("activation_checkpointing", "auto") == "auto"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory and time of a run on a kind of GPU.

    Args:
        gpu: the kind of GPU.
        jobs: fraction and job of every latent shape, by optimizer step.
        steps: number of steps of the run; negative: it has no end.
        counted: whether `steps` is the number of the run, not one that a budget of seconds will replace.
        automatic: whether the level of activation checkpointing is chosen by memory.
    """

    gpu: Gpu
    jobs: Callable[[int], list[tuple[float, Job]]]
    steps: int
    counted: bool = True
    automatic: bool = False

    def changed(self, change: Callable[[Job], Job]) -> Estimate:
        """The same run with every job changed."""
        return replace(self, jobs=lambda step: [(share, change(job)) for share, job in self.jobs(step)])

    def at(self, level: Level) -> Estimate:
        """The same run at another level of activation checkpointing."""
        return self.changed(lambda job: replace(job, level=level))

    def least_level(self, memory: float) -> Level | None:
        """The least recomputation with which the run fits into `memory` bytes; None if no level does."""
        return next((level for level in LEVELS if self.at(level).needed <= memory), None)

    @property
    def last(self) -> list[tuple[float, Job]]:
        """The jobs at the end of the run, where it is sparsest."""
        return self.jobs(max(0, self.steps - 1))

    @property
    def largest(self) -> Job:
        """The micro-batch with the most tokens, at the start or the end of the run."""
        jobs = [job for _, job in (*self.last, *self.jobs(0))]
        return max(jobs, key=total_memory)

    @property
    def needed(self) -> float:
        """Bytes needed on a GPU."""
        return total_memory(self.largest)

    @property
    def timed(self) -> bool:
        """Whether the time of a step is known."""
        return not self.gpu.lacks and not self.largest.offloaded

    @property
    def ends(self) -> bool:
        """Whether the number of steps is known."""
        return self.counted and self.steps > 0

    @property
    def fits(self) -> bool:
        """Whether the run fits on the GPU."""
        return self.needed <= self.gpu.memory

    def seconds(self, step: int | None = None) -> dict[str, float]:
        """Seconds of an optimizer step (None: the last) by part, as a mean over latent shapes."""
        result: dict[str, float] = {}
        for share, job in self.last if step is None else self.jobs(step):
            for name, value in step_seconds(job, self.gpu).items():
                result[name] = result.get(name, 0.0) + share * value
        return result

    def run_seconds(self) -> float:
        """Seconds of all steps of the run."""
        points = [round((i + 0.5) * self.steps / POINTS) for i in range(POINTS)]
        return self.steps * sum(sum(self.seconds(point).values()) for point in points) / POINTS

    def refusal(self) -> str | None:
        """One line if the run does not fit: the memory by part, and settings that would fit; otherwise None."""
        if self.fits:
            return None
        job = self.largest
        parts = ", ".join(f"{name} {gib(value)}" for name, value in _visible(whole_memory(job), GIB).items())
        line = f"it needs {gib(self.needed)} GiB of the {gib(self.gpu.memory)} of one {self.gpu.name}"
        return f"{line}, {gib(self.needed - self.gpu.memory)} too many ({parts}): {self._advice()}"

    def _advice(self) -> str:
        """Settings with which the run fits: more recomputation, smaller micro-batches, 8-bit moments, or more GPUs."""
        if advice := self._same_numbers():
            return advice
        job = self.largest
        freezes = any(network.frozen for network in job.networks) and not (job.sharded or job.frozen_rounded)
        half = [(ROUNDED, lambda job: replace(job, frozen_rounded=True))] if freezes else []
        eight_bit = (EIGHT_BIT, lambda job: replace(job, networks=[replace(n, moments="int8") for n in job.networks]))
        for changes in (half, [eight_bit], [*half, eight_bit]):
            other, names = self, ""
            for name, change in changes:
                other, names = other.changed(change), f"{names}{name} and "
            if changes and other.fits:
                return f"{names.removesuffix(' and ')} fits"
            if changes and (advice := other._same_numbers()):
                return f"{names}{advice}"
        for ranks in (2**i for i in range(1, 11)):
            count = job.dims.ranks * ranks
            spread = replace(
                job, dims=ParallelDims(shard=count, sequence=job.dims.sequence), batch=1, micro_batches=1, level="full"
            )
            if total_memory(spread) <= self.gpu.memory:
                return f"trainer=fsdp trainer.devices={count} with task.parallel.activation_checkpointing=full fits"
        return "no setting of this model fits"

    def _same_numbers(self) -> str | None:
        """Settings with which the run fits on these GPUs and computes the same, or None."""
        if level := self.least_level(self.gpu.memory):
            return f"task.parallel.activation_checkpointing={level} fits"
        job = self.largest
        rank_batch = job.batch * job.micro_batches
        # gradient accumulation adds the memory of summed gradients
        most = fitting(replace(job, micro_batches=max(2, job.micro_batches)), self.gpu.memory)
        for level in reversed(LEVELS):
            batch = next((n for n in range(min(most[level], job.batch - 1), 0, -1) if rank_batch % n == 0), 0)
            if batch:
                return (
                    f"trainer.accumulate_grad_batches={rank_batch // batch} with "
                    f"task.parallel.activation_checkpointing={level} fits"
                )
        return None


def gib(value: float) -> str:
    """Bytes as GiB."""
    return f"{value / GIB:.1f}"


def short_lines(estimate: Estimate) -> list[str]:
    """The lines printed before the first step of a run."""
    job = estimate.largest
    line = (
        f"estimate: {gib(estimate.needed)} of {gib(estimate.gpu.memory)} GiB of each {estimate.gpu.name} "
        f"(activation_checkpointing={_told_level(estimate)}, {_count(job.batch, 'sample')} a micro-batch)"
    )
    if estimate.timed:
        line += f", {sum(estimate.seconds().values()):.3g} s a step"
        if estimate.ends:
            line += (
                f", {estimate.run_seconds() / 3600 * job.dims.ranks:.3g} GPU-hours for {_count(estimate.steps, 'step')}"
            )
    refusal = estimate.refusal()
    return [line] if refusal is None else [line, f"warning: by the estimate {refusal}"]


def _told_level(estimate: Estimate) -> str:
    return f"{estimate.largest.level}{' by auto' if estimate.automatic else ''}"


def full_lines(name: str, estimate: Estimate, dense: Callable[[Job], Job] | None) -> list[str]:
    """The complete estimate.

    Args:
        name: name of the run.
        estimate: its estimate.
        dense: function that replaces the attention of a job by dense attention; None if it is dense already.
    """
    job, gpu = estimate.largest, estimate.gpu
    network = job.networks[0]
    layout = network.model.layout_for(job.latent_shape)
    selecting, layers = sum(method.selects for method in network.model.attention_layers), len(network.model.blocks)
    tiles = f", top {max(job.topk.layers)} of {layout.num_video_tiles} tiles" if selecting else ""
    tiles += f" in {selecting} of {layers} layers" if 0 < selecting < layers else ""
    batch, micro_batches = _count(job.batch, "sample"), _count(job.micro_batches, "micro-batch", "es")
    lines = [
        f"{name} on {job.dims.ranks} x {gpu.name}, parameters in {job.dims.shard} shard{'s' * (job.dims.shard > 1)}",
        f"  each GPU: {batch} a micro-batch, {micro_batches} a step",
        f"  each sample: {layout.num_tokens} tokens{tiles}, {job.text} of text"
        + (f", shared by {job.dims.sequence} GPUs" if job.dims.sequence > 1 else ""),
        f"  blocks {'compiled' if job.compiled else 'eager'}, activation_checkpointing={_told_level(estimate)}",
        "",
        f"{'memory of a GPU':34} GiB",
        *_rows(whole_memory(job), GIB),
        f"  {'sum':30} {gib(estimate.needed):>7}  of {gib(gpu.memory)}",
        *([f"  {'beside it, of the host':30} {gib(host_bytes(job)):>7}"] if job.offloaded else []),
        "",
    ]
    if network.model.diffusers_config() is not None:
        lines[-1:] = [f"activations and times are those of Wan's blocks in the sizes of {network.model.title}", ""]
    if job.offloaded:
        lines.append("time: not estimated with task.parallel.offload=true, of which no step was measured")
    elif estimate.gpu.lacks:
        lines.append(f"time: {gpu.name} lacks measured rates; a row of vsa/training/estimate/gpus.py holds them")
        lacks = [*gpu.lacks, *(["link_bytes"] if job.dims.ranks > 1 and gpu.link_bytes is None else [])]
        lines += [f"  {name:22} {MEASURED_BY[name]}" for name in lacks]
    else:
        parts = estimate.seconds()
        total = sum(parts.values())
        lines += [f"{'time of a step':34}  ms", *_rows(parts, 1e-3), f"  {'sum':30} {total * 1e3:7.1f}"]
        if dense is not None:
            other = sum(estimate.changed(dense).seconds().values())
            lines.append(f"  {'the same with dense attention':30} {other * 1e3:7.1f}  {other / total:.2f}x")
        if job.dims.ranks > 1 and gpu.link_bytes is None:
            lines.append(f"communication is not counted: {gpu.name} lacks link_bytes ({MEASURED_BY['link_bytes']})")
    lines += ["", *_levels(estimate)]
    if estimate.timed and estimate.ends:
        hours = estimate.run_seconds() / 3600
        lines += [
            "",
            f"the run: {_count(estimate.steps, 'step')}, {hours:.3g} hours, {hours * job.dims.ranks:.3g} GPU-hours",
        ]
    return lines


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number > 1 else ''}"


def _visible(parts: Mapping[str, float], unit: float) -> dict[str, float]:
    """The parts that one decimal shows, and the sum of the others if it does."""
    large = {name: value for name, value in parts.items() if value >= 0.05 * unit}
    rest = sum(value for name, value in parts.items() if name not in large)
    return large | ({"the rest": rest} if rest >= 0.05 * unit else {})


def _rows(parts: Mapping[str, float], unit: float) -> list[str]:
    return [f"  {name:30} {value / unit:7.1f}" for name, value in _visible(parts, unit).items()]


def _levels(estimate: Estimate) -> list[str]:
    job, gpu = estimate.largest, estimate.gpu
    most = fitting(job, gpu.memory)
    timed = estimate.timed
    lines = [f"{'activation_checkpointing':26} largest micro-batch  GiB here" + ("  step here, ms" if timed else "")]
    for level in LEVELS:
        line = f"  {level:24} {most[level]:19d}  {gib(total_memory(replace(job, level=level))):>8}"
        if timed:
            line += f"  {sum(estimate.at(level).seconds().values()) * 1e3:13.1f}"
        lines.append(line)
    if estimate.automatic and estimate.fits:
        chosen = f"activation_checkpointing=auto takes {job.level}"
        lines.append(f"{chosen}: the least recomputation that fits and leaves {MARGIN:.0%} of the memory")
    elif best := estimate.least_level(gpu.memory):
        lines.append(f"take activation_checkpointing={best}: the least recomputation that fits")
    return lines


def with_dense_attention(module: Any) -> Callable[[Job], Job] | None:
    """Function that replaces the attention of a job's first network by dense attention; None if it is dense."""
    (first, *others) = module.planned_networks()
    if first.model.is_dense:
        return None
    with without_memory():
        model = first.model.with_attention(FullAttention)
    dense = replace(first, model=model)
    return lambda job: replace(job, networks=(dense, *others))


def estimate_of(
    cfg: Any, module: Any, shapes: Mapping[Shape, int], text: int, gpu: Gpu, *, dims: ParallelDims, counted: bool = True
) -> Estimate:
    """The estimate of a run, under `auto` at the least recomputation that leaves the margin, or else at full.

    Args:
        cfg: config of the run, with the steps of its budget.
        module: its training module.
        shapes: number of samples by latent shape `[C, T, H, W]`.
        text: tokens of a caption.
        gpu: kind of GPU.
        dims: parallel dimensions of the GPUs.
        counted: whether `trainer.max_steps` is the number of steps of the run; a budget of seconds is converted to
            steps when a run begins.
    """
    jobs = _jobs_of(cfg, module, shapes, text, dims=dims, chip=gpu.chip)
    estimate = Estimate(gpu=gpu, jobs=jobs, steps=cfg.trainer.max_steps, counted=counted, automatic=_is_automatic(cfg))
    return estimate.at(estimate.least_level(gpu.memory * (1 - MARGIN)) or "full") if estimate.automatic else estimate

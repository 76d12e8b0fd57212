"""An iteration of distillation with three networks that are prepared as in training."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from functools import partial
from itertools import count, product
from typing import Any

import torch

from vsa.data.batch import VideoBatch
from vsa.diffusion.flow_matching import FlowShift, weighted_loss
from vsa.diffusion.rollout import Update
from vsa.models.network import Network
from vsa.models.recompute import Level
from vsa.models.sharding import local
from vsa.objectives.distribution_matching import DistributionMatching, NegativeText, Networks, ScoredRollout
from vsa.training.gradients import GradientClipper
from vsa.training.optimizer import AdamW, Constant
from vsa.training.parallel import ParallelPlan, parallelize
from vsa.training.step_times import ATTENTION, OPERATOR

from .problems import Shape
from .step import TEXT_TOKENS, fill_zeros, latent_size, random_source, video_dit
from .timing import Measured, Op, Setup, Skipped, added, against, breakdown, measure

STEP_LIST = (1000.0, 757.0, 522.0)
"""Timesteps of the published generator (FastVideo's script of the VSA paper)."""

# from the same script: shift of the scores' noise levels, iterations per update of the generator
_SCORE_SHIFT, _EVERY = 8.0, 5


class Distillation:
    """Three networks with their optimizers and a fixed random batch, prepared as in a distillation run.

    Args:
        shape: token grid, heads, head dim, top-k, batch.
        attention: attention of the generator, `dense` or the backend of sparse attention; the score networks are dense.
        compile: whether the blocks are compiled.
        device: compute device; on CUDA, bf16 compute over fp32 weights as in training.
        trained_level: activation checkpointing of the generator and of the critic.
    """

    def __init__(
        self, shape: Shape, attention: str, compile: bool, device: torch.device, trained_level: Level = "full"
    ):
        torch.manual_seed(0)

        def network(attention: str, trained: bool) -> Network:
            dit = video_dit(shape, attention, device).requires_grad_(trained)
            fill_zeros(dit)
            level: Level = trained_level if trained else "none"
            parallelize(dit, None, ParallelPlan(activation_checkpointing=level, compile=compile), device.type)
            return dit

        self.networks = Networks(
            generator=network(attention, True), fake_score=network("dense", True), real_score=network("dense", False)
        )
        self.objective = DistributionMatching(shift=FlowShift(value=_SCORE_SHIFT), timesteps=STEP_LIST)
        self.topk = shape.topk
        generator, critic = self.networks.generator, self.networks.fake_score
        size, text_dim = latent_size(shape, generator), generator.text_dim
        self.latents, text, negative = (
            torch.randn(n, generator=random_source(device, seed), device=device)
            for seed, n in enumerate((size, (shape.batch, TEXT_TOKENS, text_dim), (1, TEXT_TOKENS, text_dim)))
        )
        self.negative = NegativeText(text=negative, mask=None)
        self.batch = VideoBatch(
            latents=self.latents,
            text=text,
            text_mask=None,
            sample_ids=tuple(map(str, range(shape.batch))),
            captions=("",) * shape.batch,
            seeds=torch.arange(shape.batch),
            slots=torch.arange(shape.batch),
            num_slots=shape.batch,
            step=0,
        )
        recipe = AdamW(lr=2e-6, schedule=Constant())
        trained: dict[Update, Network] = {"generator": generator, "fake_score": critic}
        self.optimizers: dict[Update, torch.optim.Optimizer] = {
            role: recipe.build(net, net.parameter_roles()) for role, net in trained.items()
        }
        self.clipper = GradientClipper(clip=1.0, max_skipped=1)
        self.average = [local(p).detach().clone() for p in generator.parameters()]

    def gradients(self, trained: Update, index: int) -> ScoredRollout:
        """Compute gradients of the generator or the critic for the output at step `index` of the list."""
        self.optimizers[trained].zero_grad(set_to_none=True)
        # the first iteration that draws this step
        iteration = next(i for i in count() if self.objective.index(seed=0, iteration=i, update=trained) == index)
        options: dict[str, Any] = {"seed": 0, "iteration": iteration, "topk": self.topk}
        if trained == "generator":
            scored = self.objective.generator_update(self.networks, self.batch, self.latents, self.negative, **options)
        else:
            scored = self.objective.fake_score_update(self.networks, self.batch, self.latents, **options)
        weighted_loss(scored.loss, torch.ones_like(scored.loss), self.batch.num_slots).backward()
        return scored

    @torch.no_grad()
    def step(self, trained: Update) -> None:
        """Check that gradients are finite, clip them, step AdamW, and update the average of the generator."""
        self.clipper(self.optimizers[trained], 0)
        self.optimizers[trained].step()
        if trained == "generator":
            weights = [local(p) for p in self.networks.generator.parameters()]
            torch._foreach_lerp_(self.average, weights, 0.02)

    def forget_gradients(self) -> None:
        """Free all gradients."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def iteration(self, index: int) -> None:
        """Run an iteration that updates both networks, with rollouts to the same step."""
        for trained, optimizer in self.optimizers.items():
            self.gradients(trained, index)
            self.step(trained)
            optimizer.zero_grad(set_to_none=True)

    def check(self) -> None:
        """Raise ValueError for losses or gradients that are not finite, or gradients of untrained networks."""
        last = len(self.objective.timesteps) - 1
        for trained in self.optimizers:
            self.forget_gradients()
            scored = self.gradients(trained, last)
            if not (scored.loss.isfinite().all() and scored.x0.isfinite().all()):
                raise ValueError(f"the {trained}'s update has no finite loss, no speed is printed")
            for role in ("generator", "fake_score", "real_score"):
                grads = [p.grad for p in getattr(self.networks, role).parameters()]
                norms = [local(g).norm() for g in grads if g is not None]
                if role != trained and norms:
                    raise ValueError(f"the {trained}'s update reaches the {role}, no speed is printed")
                norm = float(torch.stack(norms).norm()) if norms else 0.0
                if role == trained and (len(norms) < len(grads) or not 0 < norm < math.inf):
                    raise ValueError(
                        f"the {trained}'s update has {len(norms)} of {len(grads)} gradients, their norm is {norm}, "
                        "no speed is printed"
                    )
        self.forget_gradients()


def distill(shape: Shape, setup: Setup) -> Measured:
    """An iteration of distillation with three networks of the shape's model: generator dense and sparse."""
    rows, notes, skipped = list[dict[str, Any]](), list[str](), Skipped()
    for mode, level in product(setup.modes, setup.levels):
        dense: dict[str, dict[str, Any]] = {}
        for name in ("dense", *setup.backends):
            torch.compiler.reset()
            # frees the previous three networks, which are part of reference cycles
            gc.collect()
            if setup.device.type == "cuda":
                torch.cuda.empty_cache()
            try:
                own = _iteration_rows(shape, name, mode, level, setup)
            except torch.OutOfMemoryError as error:
                skipped[f"{name} generator, {mode}, recomputing {level}"] = str(error).partition(". ")[0]
                continue
            dense = dense or own
            for part, row in own.items():
                against(row, dense[part])
            rows += [row | {"activation_checkpointing": level} for row in own.values()]
            notes.append(_iteration_note(f"{mode}, {name} generator, recomputing {level}", own))
    return Measured(rows, skipped, tuple(notes))


def _iteration_rows(shape: Shape, name: str, mode: str, level: Level, setup: Setup) -> dict[str, dict[str, Any]]:
    """Rows by part: the timed parts of an iteration, sums of them, and a whole iteration."""
    at_work = Distillation(shape, name, mode == "compiled", setup.device, level)
    kind = "compiled distillation" if mode == "compiled" else "distillation"
    kind += f", recomputing {level}" if setup.levels != ("full",) else ""
    steps = range(len(STEP_LIST))

    def timed(calls: dict[str, Callable[[], Any]]) -> dict[str, dict[str, Any]]:
        runs = {part: torch.enable_grad()(call) for part, call in calls.items()}
        ops = [Op(name=f"{name}: {part}", call=run, passes=(kind,), warm_up=run) for part, run in runs.items()]
        op_rows = measure(ops, setup)
        at_work.forget_gradients()
        return dict(zip(calls, op_rows, strict=True))

    at_work.check()
    updates = ("generator update", "critic update")
    steppers = ("generator optimizer and average", "critic optimizer")
    rows: dict[str, dict[str, Any]] = {}
    for trained, update, optimizer in zip(at_work.optimizers, updates, steppers, strict=True):
        parts = {f"{update}, step {i + 1}": partial(at_work.gradients, trained, i) for i in steps}
        # the optimizer is timed on the gradients of the preceding calls
        rows |= timed(parts | {optimizer: partial(at_work.step, trained)})
    whole = partial(at_work.iteration, len(STEP_LIST) // 2)
    rows |= timed({f"whole iteration, step {len(STEP_LIST) // 2 + 1}": whole})
    if setup.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        (row,) = (row for part, row in rows.items() if part.startswith("whole"))
        row["gpu_ms"] = breakdown(torch.enable_grad()(whole))
        row["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)

    def total(part: str, weights: dict[str, float]) -> None:
        rows[part] = added(f"{name}: {part}", [(weight, rows[key]) for key, weight in weights.items()])

    # training draws the step uniformly
    for update in updates:
        total(f"{update}, mean", {f"{update}, step {i + 1}": 1 / len(steps) for i in steps})
    without, both = (f"iteration {word} generator update" for word in ("without", "with"))
    total(without, {"critic update, mean": 1, "critic optimizer": 1})
    total(both, {"generator update, mean": 1, "generator optimizer and average": 1, without: 1})
    total(f"mean iteration, 1 in {_EVERY} with generator update", {both: 1 / _EVERY, without: 1 - 1 / _EVERY})
    return rows


def _iteration_note(what: str, rows: dict[str, dict[str, Any]]) -> str:
    def seconds(start: str) -> str:
        (row,) = (row for part, row in rows.items() if part.startswith(start))
        gain = f" ({row['speedup']:.2f}x)" if row["baseline"] != row["op"] else ""
        return f"{row['median_ms'] / 1e3:.3f} s{gain}"

    (whole,) = (row for part, row in rows.items() if part.startswith("whole"))
    line = (
        f"{what}: iteration with generator update {seconds('iteration with generator')}, without "
        f"{seconds('iteration without')}, mean {seconds('mean iteration')}"
    )
    if "gpu_ms" in whole:
        attention = sum(whole["gpu_ms"].get(kind, 0) for kind in (OPERATOR, ATTENTION))
        share = attention / sum(whole["gpu_ms"].values())
        line += f"; peak {whole['peak_mib'] / 1024:.1f} GiB; attention is {share:.0%} of a whole iteration's GPU time"
    return line

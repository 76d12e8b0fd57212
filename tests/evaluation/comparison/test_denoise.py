"""Whole denoising runs against the dense one: the same weights, prompts and noise."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from vsa.attention.denoising import DenoisingPlan
from vsa.attention.full import FullAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.evaluation.comparison.methods import AS_TRAINED, parse_methods
from vsa.evaluation.comparison.runs import RunModel
from vsa.evaluation.video_metrics import psnr, ssim
from vsa.sampling.pipeline import generate, load_run

PROMPTS = ("a red circle", "a blue square moving up")


def test_methods_are_put_into_the_same_weights(tiny_run_dir: Path):
    run = load_run(tiny_run_dir, device="cpu")
    settings = run.settings(steps=2, seed=5, batch_size=1)
    names = ["video_sparse topk=8", "video_sparse topk=2", "staged stages=f score=random topk=1", "spatial_full"]
    compared = RunModel(run)
    compared.settings = settings
    steps: list[int] = []
    methods = [*parse_methods(names, tile_thw=(2, 2, 2)), *compared.own]
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    rows = compared.denoise(PROMPTS, methods, DenoisingPlan(), steps.append)
    assert sum(steps) == len(methods) * len(PROMPTS) * settings.steps
    assert [row.method for row in rows] == ["full", *names, AS_TRAINED]
    full, every, few, random, spatial, own_row = rows
    assert (full.psnr, full.ssim, full.density) == (None, None, 1)
    # all tiles are dense attention, up to rounding of pixels
    assert every.psnr is not None
    assert every.psnr > 60
    assert (every.ssim, every.density) == (pytest.approx(1, abs=1e-3), 1)
    assert few.psnr is not None
    assert random.psnr is not None
    assert every.psnr - 10 > few.psnr > 5
    assert [row.density for row in (few, random, spatial, own_row)] == pytest.approx([1 / 4, 1 / 8, 1 / 4, 1 / 4])
    assert all(row.seconds > 0 for row in rows)
    # by the pipeline itself: dense, training-free with gates at their start, and the run as it is
    model = run.model
    factories = {
        "full": FullAttention,
        "few": partial(VideoSparseAttention, tile_thw=(2, 2, 2), fine_gate=False),
    }
    clips = {}
    for name, factory in factories.items():
        other = load_run(tiny_run_dir, device="cpu").model.with_attention(factory)
        object.__setattr__(run, "model", other)
        clips[name] = generate(run, PROMPTS, settings)
    object.__setattr__(run, "model", model)
    clips["own"] = generate(run, PROMPTS, settings)
    for row, name in ((few, "few"), (own_row, "own")):
        assert row.psnr == pytest.approx(psnr(clips[name], clips["full"]))
        values = [ssim(a, b) for a, b in zip(clips[name], clips["full"], strict=True)]
        assert row.ssim == pytest.approx(sum(values) / 2)
    assert few.psnr != own_row.psnr
    # the run's own weights are what they were
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())


def planned(run_dir: Path, steps: int) -> RunModel:
    run = load_run(run_dir, device="cpu")
    model = RunModel(run)
    model.settings = run.settings(steps=steps, seed=5)
    return model


PLANNED = ("video_sparse topk=2", "staged stages=f score=random topk=1", "pooled_tail topk=1", "spatial_full")


def test_dense_steps_are_dense_attention_in_every_method(tiny_run_dir: Path):
    model = planned(tiny_run_dir, 2)
    methods = parse_methods(PLANNED, tile_thw=(2, 2, 2))
    clips = {}
    for name, plan in {
        "none": DenoisingPlan(),
        "first": DenoisingPlan(dense_steps=1),
        "steps": DenoisingPlan(dense_steps=2, refresh=2),
        "layers": DenoisingPlan(dense_layers=(0, 1)),
    }.items():
        clips[name] = model.denoise(PROMPTS[:1], methods, plan)
    shares = [1 / 4, 1 / 8, 1 / 8, 1 / 4]
    for rows, expected in zip(
        clips.values(), (shares, [(1 + share) / 2 for share in shares], [1] * 4, [1] * 4), strict=True
    ):
        assert (rows[0].psnr, rows[0].density) == (None, 1)
        assert [row.density for row in rows[1:]] == pytest.approx(expected)
    for place, name in enumerate(PLANNED, 1):
        none, first, steps, layers = (rows[place].psnr or 0 for rows in clips.values())
        # equal but for single pixels: tokens are summed in another order
        assert min(steps, layers) > 80, name
        # controls: without a plan, and with a part of it
        assert none < first < 75, name


def test_a_plan_s_budgets_are_those_of_its_steps(tiny_run_dir: Path):
    plan = DenoisingPlan(dense_steps=1, step_topk=[(2, 1)], step_sparsity=[(3, 0.5)])
    rows = planned(tiny_run_dir, 4).denoise(PROMPTS[:1], parse_methods(PLANNED[::3], tile_thw=(2, 2, 2)), plan)
    # all tiles, its own 2 of 8, 1, and half of them; a method that selects none is dense in the first step
    assert [row.density for row in rows] == pytest.approx([1, (8 + 2 + 1 + 4) / 32, (1 + 3 / 4) / 4])

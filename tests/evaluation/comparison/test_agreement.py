"""Agreement of clips with those of dense attention: exact for the same attention and noise, by definition elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.evaluation.comparison.conftest import row_of
from vsa.attention.denoising import DenoisingPlan
from vsa.evaluation.comparison.agreement import Denoised, Sampled, is_closer, numbers_of
from vsa.evaluation.comparison.figures import denoising_table, order_note
from vsa.evaluation.comparison.methods import parse_methods
from vsa.evaluation.comparison.runs import RunModel
from vsa.sampling.pipeline import load_run

PROMPTS = ("a red circle", "a blue square moving up", "a red circle")


def test_dense_against_dense_is_exact_and_a_damaged_method_is_not(tiny_run_dir: Path):
    """Infinite PSNR needs the same noise, clip by clip; other noise and other tiles are far from it."""
    run = load_run(tiny_run_dir, device="cpu")
    model = RunModel(run)
    model.settings = run.settings(steps=2, seed=5, batch_size=2)
    full, few, damaged = parse_methods(
        ["video_sparse topk=4", "staged stages=f score=random topk=1"], tile_thw=(2, 2, 2)
    )
    rows = model.denoise(PROMPTS, [full, replace(full, label="again"), few, damaged], DenoisingPlan())
    dense, again, some, random = rows
    assert (dense.psnr, dense.cosine, dense.clip_psnr, dense.clip_cosine) == (None, None, (), ())
    assert (again.psnr, again.psnr_low, again.psnr_high, again.clip_psnr) == (math.inf,) * 3 + ([math.inf] * 3,)
    assert (again.cosine, again.cosine_low, again.cosine_high, again.clip_cosine) == (1.0,) * 3 + ([1.0] * 3,)
    assert torch.equal(again.frames, dense.frames)
    for near, far in ((again, some), (some, random)):
        assert near.psnr > far.psnr
        assert near.cosine > far.cosine
        assert is_closer(near, far)
        assert not is_closer(far, near)
    assert not is_closer(again, again)
    assert all(row.psnr_low <= row.psnr <= row.psnr_high for row in rows[1:])
    assert all(row.cosine_low <= row.cosine <= row.cosine_high for row in rows[1:])
    # equal prompts have noise of their own
    assert random.clip_psnr[0] != random.clip_psnr[2]
    # control: the same attention from other noise
    clips = model.sample(full, PROMPTS, None, lambda _: None)
    model.settings = replace(model.settings, seed=6)
    other = numbers_of(model.sample(full, PROMPTS, None, lambda _: None), clips)
    assert other["psnr"] < random.psnr
    assert max(other["clip_cosine"]) < random.cosine


def test_numbers_are_those_of_their_definitions():
    generator = torch.Generator().manual_seed(0)
    videos = torch.randint(256, (2, 4, 5, 8, 8, 3), generator=generator, dtype=torch.uint8)
    latents = torch.randn(2, 4, 6, 2, 4, 4, generator=generator)
    # one clip is equal
    videos[0, 1], latents[0, 1] = videos[1, 1], latents[1, 1]
    ours, dense = (Sampled(v, z, 1.0, 1.0) for v, z in zip(videos, latents, strict=True))
    numbers = numbers_of(ours, dense)
    a, b = videos.double().numpy()
    errors = ((a - b) ** 2).mean((1, 2, 3, 4)) / 255**2
    with np.errstate(divide="ignore"):
        assert numbers["clip_psnr"] == pytest.approx((-10 * np.log10(errors)).tolist())
    assert numbers["clip_psnr"][1] == math.inf
    assert numbers["psnr"] == pytest.approx(-10 * math.log10(((a - b) ** 2).mean() / 255**2))
    x, y = latents.double().flatten(2).numpy()
    cosines = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    assert numbers["clip_cosine"] == pytest.approx(cosines.tolist())
    assert numbers["clip_cosine"][1] == 1
    assert numbers["cosine"] == pytest.approx(cosines.mean())
    # by other draws of as many clips
    picked = np.random.default_rng(0).integers(4, size=(20_000, 4))
    low, high = np.quantile(errors[picked].mean(1), [0.025, 0.975])
    assert (numbers["psnr_high"], numbers["psnr_low"]) == pytest.approx((-10 * np.log10([low, high])).tolist(), abs=0.2)
    assert (numbers["cosine_low"], numbers["cosine_high"]) == pytest.approx(
        np.quantile(cosines[picked].mean(1), [0.025, 0.975]).tolist(), abs=0.03
    )
    # one clip has no interval
    single = numbers_of(*(Sampled(v[:1], z[:1], 1.0, 1.0) for v, z in zip(videos, latents, strict=True)))
    assert single.keys() == numbers.keys() - {f"{name}_{end}" for name in ("psnr", "cosine") for end in ("low", "high")}
    # three clips, four frames from the first to the last
    assert torch.equal(numbers["frames"], videos[0, :3, [0, 1, 3, 4]])
    assert numbers_of(ours, None).keys() == {"density", "seconds", "frames"}


def run_of(method: str, clip_psnr: list[float], **values: Any) -> Denoised:
    sizes = {"density": 1.0, "seconds": 1.0, "frames": torch.zeros(0)}
    return Denoised(method=method, family=method, clip_psnr=clip_psnr, **{**sizes, **values})


def test_orders_that_recall_and_error_turn_around_are_counted():
    runs = [
        run_of("full", []),
        # better on every clip by less than the clips differ among themselves
        run_of("a", [20.5, 25.5, 30.5]),
        run_of("b", [20.0, 25.0, 30.0]),
        # of an order that the choice of clips decides
        run_of("c", [20.2, 24.0, 32.0]),
        # without rows, and without a recall
        run_of("d", [10.0, 10.0, 10.0]),
        run_of("e", [11.0, 11.0, 11.0]),
    ]
    rows = [
        row_of("full"),
        row_of("a", recall=0.5, head_recall=[0.4, 0.6], error_l1=0.1),
        row_of("b", recall=0.6, head_recall=[0.2, 1.0], error_l1=0.2),
        row_of("c", recall=0.1, head_recall=[0.1, 0.1], error_l1=0.5),
        row_of("e", recall=None, head_recall=None),
    ]
    (note,) = order_note(rows, runs)
    assert note.startswith("Pairs of methods whose clips differ in error beyond the choice of prompts: 1;")
    assert note.endswith("in the other order by mean recall: 1, by recall p5: 0, by L1 error: 0.")
    # control: the other order of rows
    turned = [*rows[:1], replace(rows[1], method="b"), replace(rows[2], method="a"), *rows[3:]]
    assert order_note(turned, runs)[0].endswith("by mean recall: 0, by recall p5: 1, by L1 error: 1.")
    # nothing is known of one clip, or without rows
    assert order_note(rows, [replace(run, clip_psnr=run.clip_psnr[:1]) for run in runs]) == order_note([], runs) == []


def test_the_table_shows_intervals_where_there_are_any():
    known = run_of("a", [1.0], psnr=20.0, psnr_low=19.0, psnr_high=22.5, cosine=0.9, cosine_low=0.85, cosine_high=0.95)
    table = denoising_table([run_of("full", []), known, replace(known, psnr_low=None, cosine_low=None)])
    places = [[heading for heading, _ in table.headings].index(name) for name in ("PSNR", "cosine")]
    cells = [[(row[place].text, row[place].sub) for place in places] for row in table.rows]
    assert cells == [
        [("-", ""), ("-", "")],
        [("20", "19 to 22.5"), ("0.9", "0.85 to 0.95")],
        [("20", ""), ("0.9", "")],
    ]

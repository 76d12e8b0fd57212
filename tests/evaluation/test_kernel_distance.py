"""The kernel distance against its definition, a closed form, and models that draw noise, still clips or data."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.pictures import pictures_left_out  # noqa: F401
from tests.tiny_runs import composed
from vsa.checkpoints.run_checkpoint import read_checkpoint
from vsa.config import build
from vsa.evaluation import evaluator as evaluation
from vsa.evaluation.bars import Bar
from vsa.evaluation.latent_distance import against_real, clip_features, kernel_distance
from vsa.sampling.pipeline import load_run
from vsa.training import train as run_module


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_loops(x: list[list[float]], y: list[list[float]], *, biased: bool = False) -> float:
    """The U-statistic, or with the pairs of an item with itself the V-statistic, one pair at a time."""

    def mean(rows: list[list[float]], columns: list[list[float]], same: bool) -> float:
        pairs = [
            (sum(p * q for p, q in zip(a, b, strict=True)) / len(a) + 1) ** 3
            for (i, a), (j, b) in itertools.product(enumerate(rows), enumerate(columns))
            if biased or not same or i != j
        ]
        return sum(pairs) / len(pairs)

    return mean(x, x, True) + mean(y, y, True) - 2 * mean(x, y, False)


@pytest.mark.parametrize(("n", "m", "width"), [(2, 2, 1), (5, 3, 4), (16, 20, 7)])
def test_the_definition(n, m, width):
    x, y = normal(n, width, seed=1), 0.5 + normal(m, width, seed=2)
    expected = by_loops(x.tolist(), y.tolist())
    assert kernel_distance(x, y)[0] == pytest.approx(expected, rel=1e-11)
    assert kernel_distance(y, x)[0] == pytest.approx(expected, rel=1e-11)
    assert by_loops(x.tolist(), y.tolist(), biased=True) != pytest.approx(expected, rel=1e-2)


def moments(mean: float, std: float, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """First to third moments of features that are N(mean, std^2) each."""
    m, unit = torch.full((width,), mean, dtype=torch.float64), torch.eye(width, dtype=torch.float64)
    second = torch.einsum("i,j->ij", m, m) + std**2 * unit
    third = torch.einsum("i,j,k->ijk", m, m, m)
    for places in ("i,jk->ijk", "j,ik->ijk", "k,ij->ijk"):
        third = third + std**2 * torch.einsum(places, m, unit)
    return m, second, third


def discrepancy(mean: float, std: float, width: int = 1) -> float:
    """From N(0, 1): (x y / F + 1)^3 expands to squared differences of the moments."""
    ours, theirs = moments(mean, std, width), moments(0, 1, width)
    terms = [(a - b).square().sum() / width**order for order, (a, b) in enumerate(zip(ours, theirs, strict=True), 1)]
    return float(3 * terms[0] + 3 * terms[1] + terms[2])


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.5, 1.0), (0.0, 1.5)])
def test_the_mean_over_many_sets_is_the_distance_of_the_distributions(mean, std):
    values, biased = [], []
    for seed in range(600):
        x, y = mean + std * normal(16, 1, seed=2 * seed), normal(16, 1, seed=2 * seed + 1)
        values.append(kernel_distance(x, y, draws=1)[0])
        if seed < 60:
            biased.append(by_loops(x.tolist(), y.tolist(), biased=True))
    error = statistics.stdev(values) / len(values) ** 0.5
    assert abs(statistics.mean(values) - discrepancy(mean, std)) < 3 * error
    # pairs of a clip with itself add E k(x, x) / n
    assert statistics.mean(biased) - discrepancy(mean, std) > 3 * statistics.stdev(biased) / len(biased) ** 0.5
    if (mean, std) == (0, 1):
        assert min(values) < 0 < max(values)


def test_the_interval_holds_the_distance_of_the_distributions():
    exact, held, quarter = discrepancy(0.6, 1.2, 8), 0, 0
    for seed in range(200):
        value, low, high = kernel_distance(
            0.6 + 1.2 * normal(40, 8, seed=2 * seed), normal(40, 8, seed=2 * seed + 1), draws=200
        )
        assert low < value < high
        held += low <= exact <= high
        quarter += value + (low - value) / 4 <= exact <= value + (high - value) / 4
    assert 0.85 < held / 200 < 1
    # a quarter of its width would not do
    assert quarter / 200 < 0.7


def test_two_sets_of_one_kind_have_zero_in_their_interval():
    held = 0
    for seed in range(100):
        _, low, high = kernel_distance(normal(24, 6, seed=2 * seed), normal(24, 6, seed=2 * seed + 1), draws=100)
        held += low <= 0 <= high
    assert held >= 90


def clips(count: int, *, seed: int, still: bool = False) -> Tensor:
    """Latents `[N, 4, 6, 8, 8]` of a smooth field that moves to the right; `still` ones keep the first frame."""
    field = torch.nn.functional.interpolate(normal(count, 4, 3, 3, seed=seed), size=(8, 14), mode="bilinear")
    return torch.stack([field[..., (0 if still else t) :][..., :8] for t in range(6)], 2)


def test_noise_and_still_clips_are_far_and_other_clips_near():
    real = clips(48, seed=1)
    good = against_real(clips(32, seed=2), real)
    assert good["kernel_distance_low"] < 0 < good["kernel_distance_high"]
    assert good["kernel_distance_real_low"] <= good["kernel_distance_real"] <= good["kernel_distance_real_high"]
    assert good["kernel_distance"] < 0.1 * good["kernel_distance_noise"]
    noise = normal(32, 4, 6, 8, 8, seed=3) * real.std((0, 2, 3, 4), keepdim=True)
    bad = against_real(noise, real)
    assert bad["kernel_distance"] == pytest.approx(bad["kernel_distance_noise"], rel=0.2)
    assert bad["kernel_distance_low"] > good["kernel_distance_real_high"]
    still = against_real(clips(32, seed=4, still=True), real)
    assert still["kernel_distance_low"] > 0
    # the same numbers again, and nothing of the caller's random state
    state = torch.get_rng_state()
    assert against_real(noise, real) == bad
    assert torch.equal(torch.get_rng_state(), state)


def test_motion_counts_where_the_mean_of_a_cell_does_not_change():
    """Cells of two frames that swap: their means are those of still clips."""
    base, swing = normal(40, 2, 1, 4, 4, seed=1), torch.tensor([1.0, -1.0] * 4).view(1, 1, 8, 1, 1)
    still, moving = (base.expand(-1, -1, 8, -1, -1), base + swing)
    torch.testing.assert_close(clip_features(still)[:, :128], clip_features(moving)[:, :128])
    assert kernel_distance(clip_features(moving)[:20], clip_features(still)[20:])[1] > 0.1
    assert kernel_distance(clip_features(moving)[:20, :128], clip_features(still)[20:, :128])[1] < 0.1


class Colours:
    """Stands in for the image network: mean colours of 8 x 8 parts of four frames, and their changes."""

    def __init__(self, device: object) -> None:
        pass

    def __call__(self, video: Tensor) -> dict[str, Tensor]:
        frames = video[::2].permute(0, 3, 1, 2).double() / 64
        frames = torch.nn.functional.adaptive_avg_pool2d(frames, 8).flatten(1)
        return {"frame": frames[:4], "change": frames.diff(dim=0).abs()}


@pytest.fixture(autouse=True)
def _quick_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "ImageFeatures", Colours)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_overrides: tuple[str, ...]) -> Path:
    """A run of 2 steps with 24 held-out clips."""
    output = tmp_path_factory.mktemp("trained")
    own = ["data.val_fraction=0.5", "trainer.max_steps=2", f"output_dir={output}"]
    run_module.train(composed((*(o for o in tiny_overrides if "val_fraction" not in o), *own)))
    return output / "pretrain" / "default"


def drawing(monkeypatch: pytest.MonkeyPatch, source: Callable[[Tensor], Tensor]) -> None:
    """Models draw what `source` makes of standard normal noise of a clip."""

    def sample(model, encoder, prompts, seeds, settings, progress=None, given=None):
        return torch.stack([source(normal(*settings.latent_shape, seed=int(s) % 2**31)).float() for s in seeds])

    monkeypatch.setattr(evaluation, "sample_latents", sample)


def evaluate(run: Path, out: Path, *options: str) -> list[str]:
    return ["evaluate", str(run), "--device", "cpu", "--out", str(out), "--steps", "1", *options]


@pytest.mark.usefixtures("no_pictures")
def test_methods_are_compared_on_held_out_captions(trained, tmp_path, command_line):
    words = ["compare-attention", "--run", str(trained), "--device", "cpu", "--steps", "1", "--out", str(tmp_path)]
    words += ["--method", "video_sparse topk=2"]
    status, _, err = command_line(*words, "--held-out", "3")
    assert status == 0, err
    record = json.loads((tmp_path / "comparison.json").read_text())
    assert [len(row["clip_psnr"]) for row in record["denoising"]] == [0, 3, 3]
    # no more than there are
    status, _, err = command_line(*words, "--held-out", "4000")
    assert (status, err.count("\n")) == (1, 1)
    assert re.search(r"--held-out 4000: .* has \d+ held-out captions, use --prompts FILE", err)


def test_a_model_that_draws_noise_fails_and_one_that_draws_clips_passes(trained, tmp_path, monkeypatch, command_line):
    """PSNR and SSIM compared it with its own dense attention, so it passed every bar."""
    drawing(monkeypatch, lambda noise: noise)
    bars = ("--min-psnr", "20", "--min-ssim", "0.5", "--max-black", "0", "--max-uniform", "0")
    status, out, err = command_line(*evaluate(trained, tmp_path / "noise", "--held-out", "16", *bars))
    assert (status, err.count("\n")) == (1, 1)
    assert re.fullmatch(r"error: kernel_distance \S+ is above the allowed \S+\n", err)
    assert "measure the agreement with the model's own dense attention, not how good its clips are" in out
    (row,) = csv.DictReader((tmp_path / "noise" / "evaluation.csv").open())
    assert float(row["psnr"]) == math.inf
    names = [f"kernel_distance{kind}" for kind in ("", "_real", "_noise")]
    distance, floor, ceiling = (float(row[name]) for name in names)
    assert distance == pytest.approx(ceiling, rel=0.2)
    assert float(row["kernel_distance_low"]) > float(row["kernel_distance_real_high"])
    assert f"kernel_distance {distance:.5g} (95% " in out
    assert f"; real {floor:.3g}, noise {ceiling:.3g})" in out
    # by image features too, noise is at the ceiling
    changes, most = (float(row[f"change_kernel_distance{kind}"]) for kind in ("", "_noise"))
    assert changes > 0.5 * most
    assert float(row["frame_frechet_distance_low"]) < float(row["frame_frechet_distance"])
    assert f", frame_kernel_distance {float(row['frame_kernel_distance']):.5g} (95% " in out
    # the same seeds, the same numbers
    command_line(*evaluate(trained, tmp_path / "again", "--held-out", "16", "--no-val-loss", "--reference", "none"))
    (again,) = csv.DictReader((tmp_path / "again" / "evaluation.csv").open())
    assert [again[name] for name in names] == [row[name] for name in names]

    # the latent distance does not need the package of the features
    def absent(device: object) -> None:
        raise ValueError("the features need the extra metrics")

    monkeypatch.setattr(evaluation, "ImageFeatures", absent)
    command_line(*evaluate(trained, tmp_path / "bare", "--held-out", "16", "--no-val-loss", "--reference", "none"))
    (bare,) = csv.DictReader((tmp_path / "bare" / "evaluation.csv").open())
    assert bare["frame_kernel_distance"] == "missing (the features need the extra metrics)"
    assert bare["kernel_distance"] == row["kernel_distance"]

    # clips of the training data are near held-out ones
    monkeypatch.setattr(evaluation, "ImageFeatures", Colours)
    data = build(read_checkpoint(next((trained / "checkpoints").glob("step-*"))).state["config"]["data"])
    data.setup()
    run = load_run(trained, device="cpu")
    own = torch.cat([run.statistics.normalise(batch.latents) for batch in itertools.islice(data.train_dataloader(), 6)])
    drawing(monkeypatch, lambda noise: own[int(abs(noise[0, 0, 0, 0]) * 1e6) % len(own)])
    bar = ("--max-kernel-distance", f"{ceiling / 2}", "--no-val-loss", "--reference", "none")
    status, out, err = command_line(*evaluate(trained, tmp_path / "good", "--held-out", "20", *bar))
    assert (status, err) == (0, "")
    (row,) = csv.DictReader((tmp_path / "good" / "evaluation.csv").open())
    assert float(row["kernel_distance"]) < 0.3 * ceiling
    assert float(row["change_kernel_distance"]) < 0.5 * most
    assert Bar(metric="kernel_distance", bound=-1, least=False).missed(row) is not None


def test_too_few_clips_are_said_to_be_missing(trained, tmp_path, write_tiny_run, command_line):
    bar = ("--max-kernel-distance", "9")
    reason = "4 of the needed 16 clips are drawn: --held-out 16 draws them"
    status, out, err = command_line(*evaluate(trained, tmp_path / "few", "--held-out", "4", "--no-val-loss", *bar))
    assert (status, err) == (1, f"error: kernel_distance is missing ({reason})\n")
    assert f", kernel_distance missing ({reason})" in out
    # and before anything is drawn
    assert out.startswith("--held-out 4: a distance to held-out clips needs 16, 4 are drawn\n")
    (row,) = csv.DictReader((tmp_path / "few" / "evaluation.csv").open())
    assert row["kernel_distance"] == f"missing ({reason})"
    # without that bar it is no error; what was measured once is taken from the record
    assert command_line(*evaluate(trained, tmp_path / "few", "--held-out", "4", "--no-val-loss"))[0] == 0
    run = write_tiny_run(tmp_path / "run")
    few = ("--reference", "none", "--no-val-loss")
    many = [word for n in range(16) for word in ("--prompt", f"a red circle {n}")]
    status, out, err = command_line(*evaluate(run, tmp_path / "none", *many, *few))
    assert (status, err) == (0, "")
    assert "kernel_distance missing (" in out


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(4, 3), torch.zeros(4, 2), r"\[N, F\] and \[M, F\], got \[4, 3\] and \[4, 2\]"),
        (torch.zeros(1, 3), torch.zeros(4, 3), "at least 2 rows, got 1"),
        (torch.zeros(4, 3), torch.full((4, 3), torch.nan), "features of 4 of 4 clips are not finite"),
    ],
)
def test_what_has_no_distance(x, y, message):
    with pytest.raises(ValueError, match=message):
        kernel_distance(x, y)

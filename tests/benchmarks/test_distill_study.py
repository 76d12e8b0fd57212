"""The script that compares distilled students: what it trains, what it measures and what it draws."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks.toy import distill, study
from benchmarks.toy.frechet import latent_distance
from tests import states
from vsa.attention.kept_tiles import KeptTiles
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.config import build
from vsa.data.toy_videos import evaluation_prompts, render_clip, score_clip
from vsa.sampling.pipeline import generate, load_run
from vsa.sweeps.job_queue import Job, Slot
from vsa.training.hydra_guard import composed

# the fewest that 16 channels take
CLIPS = 132
STEP_LIST = (1000.0, 757.0, 522.0)
ROWS = ["codec reconstructions", "teacher", "teacher, few steps", "dense student", "sparse student", "merged student"]
COMMON = ["--guidance", "3", "--clips", str(CLIPS), "--steps", "4", "--batch-size", "66", "--device", "cpu"]


@pytest.fixture(scope="module")
def write_seed(write_tiny_run: Callable[..., Path]) -> Callable[..., Path]:
    """`write_seed(folder, without=())` writes the finished runs of a seed."""

    def write(folder: Path, *, without: tuple[str, ...] = ()) -> Path:
        runs: dict[str, dict[str, Any]] = {
            "teacher": {"attention": "full"},
            "dense": {"attention": "full", "step_list": STEP_LIST},
            "sparse": {"step_list": STEP_LIST},
            "merged": {"step_list": STEP_LIST, "with_ema": False},
        }
        for name, arguments in runs.items():
            if name not in without:
                write_tiny_run(folder / name, **arguments)
        return folder

    return write


@pytest.fixture(scope="module")
def evaluated(write_seed: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of one seed after `--evaluate-only`."""
    out = tmp_path_factory.mktemp("compare")
    write_seed(out / "seed-3")
    distill.main([str(out), "--evaluate-only", "--seeds", "3", *COMMON])
    return out


def rewrite_state(run: Path, **changes: Any) -> None:
    """Change the state of a run's newest checkpoint."""
    states.rewrite_state(resolve_checkpoint(run).path, **changes)


def test_arms_end_at_one_sparsity():
    steps = {"dense": 1000, "sparse": 1000, "adapted": 800}
    topk, methods = {}, {}
    for arm, overrides in distill.ARMS.items():
        config = composed(*overrides, "init_from=TEACHER")
        schedule = build(config.sparsity)
        # 32 tiles and 4 layers in the last step of the script's defaults
        topk[arm] = schedule.topk_per_layer(steps[arm] - 1, 32, 4, "current")
        methods[arm] = config.attention._target_.rpartition(".")[2]
    # 80% of 32 tiles skipped
    assert topk["sparse"] == topk["adapted"] == KeptTiles((7,))
    assert methods == {"dense": "FullAttention", "sparse": "VideoSparseAttention", "adapted": "VideoSparseAttention"}


@pytest.mark.slow
def test_rows_measure_what_they_name(evaluated: Path):
    comparison = json.loads((evaluated / "compare.json").read_text())
    assert (comparison["seeds"], comparison["clips"], list(comparison["rows"])) == ([3], CLIPS, ROWS)
    rows = comparison["rows"]
    assert [rows[name].get("forwards") for name in ROWS] == [None, 8, 6, 3, 3, 3]
    for name, steps, guidance, sparsity in [
        ("teacher", 4, 3, 0),
        ("teacher, few steps", 3, 3, 0),
        ("dense student", 3, 1, 0),
        ("sparse student", 3, 1, 0.75),
    ]:
        settings = rows[name]["settings"][0]
        assert [settings[key] for key in ("steps", "guidance", "sparsity", "seed")] == [steps, guidance, sparsity, 1]
        # where the comparison lies is no part of it
        assert Path(settings["checkpoint"]).parts[0] == "seed-3"
        assert settings["step_list"] == (list(STEP_LIST) if "student" in name else None)
    for row in rows.values():
        for measure in ("colour", "direction", "distance"):
            (value,) = row[measure]["seeds"]
            assert row[measure] == {"seeds": [value], "mean": value, "spread": None}
    # rendered clips score all, random weights about nothing
    assert rows["codec reconstructions"]["colour"]["seeds"] == rows["codec reconstructions"]["direction"]["seeds"]
    assert rows["codec reconstructions"]["colour"]["mean"] > 0.97
    floor = rows["codec reconstructions"]["distance"]
    assert 0 < floor["mean"] < 0.1 * min(rows[name]["distance"]["mean"] for name in ROWS[1:])

    # by hand: clips of the sparse student, and their latents against rendered ones
    prompts = evaluation_prompts(CLIPS)
    run = load_run(evaluated / "seed-3" / "sparse", device="cpu")
    videos = generate(run, prompts, run.settings(seed=1, batch_size=66))
    hits = [score_clip(video, prompt) for video, prompt in zip(videos, prompts, strict=True)]
    for measure in ("colour", "direction"):
        assert rows["sparse student"][measure]["seeds"] == [sum(hit[measure] for hit in hits) / CLIPS]


@pytest.mark.slow
def test_distance_is_to_rendered_clips_of_the_prompts(write_seed, tmp_path: Path):
    run = load_run(write_seed(tmp_path / "seed") / "teacher", device="cpu")
    prompts = evaluation_prompts(CLIPS)
    numbers = distill.matching_clips(prompts, 5)
    assert len(set(numbers)) == CLIPS
    assert [render_clip(5, i, size=(4, 16, 16))[1] for i in numbers] == prompts
    # repeated prompts take their clips in order
    assert distill.matching_clips([prompts[1], prompts[0], prompts[1]], 5)[1] == numbers[0]

    latents = distill.real_latents(run, prompts, 5, (16, 4, 8, 8))
    assert latents.shape == (CLIPS, 16, 4, 8, 8)
    clip = run.codec.encode(render_clip(5, numbers[9], size=(16, 64, 64))[0])
    for channel in range(16):
        expected = (clip[channel] - run.latent_mean[channel]) / run.latent_std[channel]
        assert torch.equal(latents[9, channel], expected)
    # another seed is another set of the same distribution
    other = distill.real_latents(run, prompts, 6, (16, 4, 8, 8))
    far = latent_distance(latents * 0.5, latents)
    assert 0 < latent_distance(other, latents) < far


@pytest.mark.slow
def test_picture_and_table(evaluated: Path, capsys: pytest.CaptureFixture[str]):
    with Image.open(evaluated / "compare.png") as picture:
        assert min(picture.size) > 800
        # bars above, frames below: neither half is empty
        for half in ((0, 0, picture.width, picture.height // 3), (0, picture.height // 2, *picture.size)):
            assert len(picture.convert("RGB").crop(half).getcolors(maxcolors=1 << 20)) > 50
    comparison = json.loads((evaluated / "compare.json").read_text())
    distill.show(comparison)
    output = capsys.readouterr().out
    for text in (
        *ROWS,
        "chance",
        "16.7",
        "forwards",
        f"{100 * comparison['rows']['dense student']['colour']['mean']:.1f}",
    ):
        assert text in output, text
    assert "±" not in output


def test_seeds_become_mean_and_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def record(colour: float, distance: float) -> dict[str, Any]:
        measures = {"colour": colour, "direction": colour, "distance": distance}
        settings = {"steps": 50, "guidance": 3.0}
        return {ROWS[0]: {**measures, "settings": {}}, ROWS[1]: {**measures, "settings": settings}}

    comparison = distill.summary([4, 5, 6], [record(0.5, 1.0), record(0.7, 3.0), record(0.9, 8.0)])
    row = comparison["rows"]["teacher"]
    assert (comparison["seeds"], row["forwards"]) == ([4, 5, 6], 100)
    assert row["colour"]["mean"] == pytest.approx(0.7)
    assert row["distance"]["seeds"] == [1.0, 3.0, 8.0]
    assert row["distance"]["spread"] == pytest.approx(statistics.stdev([1.0, 3.0, 8.0]))
    distill.show({**comparison, "clips": 132})
    output = capsys.readouterr().out
    for text in (*ROWS[:2], "70.0 ± 20.0", "4 ± 3.6"):
        assert text in output, text
    pictures = {name: torch.zeros(1, 8, 8, 3, dtype=torch.uint8) for name in ROWS[:2]}
    distill.draw(comparison, ["a red circle"], pictures, tmp_path / "compare.png")
    assert (tmp_path / "compare.png").is_file()


@pytest.mark.slow
def test_runs_are_trained_once_in_order_and_merged(write_tiny_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "out"
    folder = out / "seed-4"
    commands: list[list[str]] = []

    def fake(jobs: list[Job], slots: list[Slot], *, changed: Callable[[Job], None], **_: Any) -> None:
        """In place of training: tiny runs after 7 steps; merging is real."""
        assert len(slots) == 3
        for job in jobs:
            commands.append(list(job.command[1:]))
            distillation = "experiment=distill_toy" in job.command
            attention = "full" if "attention=full" in job.command else "video_sparse"
            write_tiny_run(Path(job.name), attention=attention, step_list=STEP_LIST if distillation else None)
            job.status = "finished"
            changed(job)

    def fake_evaluate(
        rows: dict[str, Any], prompts: list[str], *_: Any
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """In place of sampling, which other tests look at."""
        names = [ROWS[0], *rows]
        assert names == ROWS
        record = {name: {"colour": 1.0, "direction": 0.5, "distance": 1.0, "settings": {}} for name in names}
        return record, {name: torch.zeros(len(prompts), 8, 8, 3, dtype=torch.uint8) for name in names}

    monkeypatch.setattr(study, "run_jobs", fake)
    monkeypatch.setattr(distill, "evaluate", fake_evaluate)
    arguments = [str(out), "--seeds", "4", *COMMON, "--jobs", "3", "data.root=ELSEWHERE"]
    steps = ["--teacher-steps", "7", "--distill-steps", "7", "--adapt-steps", "7"]
    distill.main([*arguments, *steps])
    assert [Path(command[0]).name for command in commands] == ["train.py"] * 4
    assert {"experiment=quickstart", "attention=full", "seed=4", "data.root=ELSEWHERE"} <= set(commands[0])
    trainings = {
        Path(word[8:]).name: command for command in commands for word in command if word.startswith("run_dir=")
    }
    assert next(iter(trainings)) == "teacher"
    assert set(trainings) == {"teacher", "dense", "sparse", "adapted"}
    for name, command in trainings.items():
        assert "trainer.max_steps=7" in command
        assert (f"init_from={folder}/teacher" in command) == (name != "teacher")
    assert load_run(folder / "merged", device="cpu").step_list == STEP_LIST
    merged_from = resolve_checkpoint(folder / "merged").state["merged_from"]
    for key, run in (("base", "teacher"), ("sparse", "adapted"), ("few_step", "dense")):
        assert merged_from[key]["source"].startswith(f"{folder}/{run}/")
    assert list(json.loads((out / "compare.json").read_text())["rows"]) == ROWS

    # again: finished runs are kept, merging is done anew
    merged_folders: list[Path] = []
    monkeypatch.setattr(distill, "merge", merged_folders.append)
    commands.clear()
    distill.main([*arguments, *steps])
    assert (commands, merged_folders) == ([], [folder])
    # nothing at all is started for scores alone, and other steps are another training
    distill.main([*arguments, "--evaluate-only"])
    assert (commands, merged_folders) == ([], [folder])
    distill.main([*arguments, *steps[:3], "8", *steps[4:]])
    run_names = [Path(word[8:]).name for command in commands for word in command if word.startswith("run_dir=")]
    assert sorted(run_names) == ["dense", "sparse"]


def test_runs_that_cannot_be_compared_are_refused(write_seed, tmp_path: Path):
    def expect_refusal(folder: Path, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            distill.load_runs(folder, "cpu")

    distill.load_runs(write_seed(tmp_path / "whole"), "cpu")
    expect_refusal(write_seed(tmp_path / "missing", without=("merged",)), "merged")
    # finished runs are kept whatever they were trained with
    mixed = write_seed(tmp_path / "mixed")
    config = resolve_checkpoint(mixed / "sparse").state["config"]
    config["task"]["objective"]["step_aware"] = True
    rewrite_state(mixed / "sparse", config=config)
    expect_refusal(
        mixed, r"mixed/sparse.* was trained with objective.step_aware=True, .*mixed/dense.* with None: use another"
    )
    undistilled = write_seed(tmp_path / "undistilled")
    rewrite_state(undistilled / "sparse", step_list=None)
    expect_refusal(undistilled, r"step lists differ: .*sparse.* has None, .*dense.* \(1000.0, 757.0, 522.0\)")
    longer = write_seed(tmp_path / "longer")
    rewrite_state(longer / "merged", step_list=[1000, 500])
    expect_refusal(longer, r"step lists differ: .*merged.* has \(1000.0, 500.0\)")
    moved = write_seed(tmp_path / "moved")
    rewrite_state(moved / "dense", latent_mean=[0.0] * 16)
    expect_refusal(moved, r"latent statistics of .*dense.* are not those of its teacher")
    denser = write_seed(tmp_path / "denser")
    config = resolve_checkpoint(denser / "merged").state["config"]
    config["sparsity"]["sparsity"] = 0.5
    rewrite_state(denser / "merged", config=config)
    expect_refusal(denser, r"sparse.* has topk 2, .*merged.* topk 4")


def test_bad_input_is_one_line(write_seed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for option in ("--teacher-steps", "--distill-steps", "--adapt-steps", "--jobs", "--clips", "--steps"):
        with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
            distill.main([str(tmp_path), option, "0"])
    write_seed(tmp_path / "seed-0")
    few = [str(tmp_path), "--evaluate-only", "--seeds", "0", *COMMON]
    with pytest.raises(ValueError, match="16 channels needs at least 132 clips, got 131"):
        distill.main([*few, "--clips", "131"])
    tensors = load_run(tmp_path / "seed-0" / "dense", device="cpu")
    tensors.model.requires_grad_(False)
    next(tensors.model.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match=r"2 of 2 clips of .*dense.* in 3 steps are not finite"):
        distill.sample(tensors, evaluation_prompts(2), tensors.settings(), lambda clips: None)

    def forbid_start(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing may be started")

    with monkeypatch.context() as patch:
        patch.setattr(study, "run_jobs", forbid_start)
        with pytest.raises(ValueError, match="needs at least 132 clips, got 3"):
            distill.main([str(tmp_path / "new"), "--clips", "3"])
    assert not (tmp_path / "new").exists()

    def fail_job(jobs: list[Job], slots: list[Slot], **_: Any) -> None:
        jobs[0].status, jobs[0].reason = "failed", "no data"

    monkeypatch.setattr(study, "run_jobs", fail_job)
    with pytest.raises(ValueError, match=r"seed-7/teacher failed \(no data\), see .*teacher\.log"):
        distill.main([str(tmp_path), "--seeds", "7"])
    with pytest.raises(ValueError, match=r"no such folder: .*seed-0/adapted"):
        distill.merge(tmp_path / "seed-0")


@pytest.mark.slow
def test_the_script_trains_and_compares(tmp_path: Path, tiny_overrides: tuple[str, ...]):
    # those of single arms: tiles of the sparse ones, schedules, the script's own
    left_out = ("attention.tile_thw", "sparsity.sparsity", "trainer.max_steps", "trainer.val_check_interval")
    tiny = [o for o in tiny_overrides if o.partition("=")[0] not in (*left_out, "optim.lr", "data.toy.size")]
    # 8 tiles; annealing takes its last stair, to 2 of them, in step 110
    tiny += ["data.toy.size=[16,64,64]", "trainer.val_check_interval=2"]
    steps = ["--teacher-steps", "6", "--distill-steps", "10", "--adapt-steps", "112", "--jobs", "2"]
    out = tmp_path / "compare"
    distill.main([str(out), "--seeds", "3", *COMMON, *steps, *tiny])
    comparison = json.loads((out / "compare.json").read_text())
    assert list(comparison["rows"]) == ROWS
    assert [comparison["rows"][name].get("forwards") for name in ROWS] == [None, 8, 6, 3, 3, 3]
    # four networks: no two rows of clips are as far from real ones
    assert len({comparison["rows"][name]["distance"]["mean"] for name in ROWS}) == len(ROWS)
    settings = comparison["rows"]["merged student"]["settings"][0]
    assert (settings["step_list"], settings["topk"], settings["num_tiles"]) == (list(STEP_LIST), 2, 8)
    assert (out / "compare.png").is_file()

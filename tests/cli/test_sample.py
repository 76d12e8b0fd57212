"""`vsa sample` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.tiny_runs import vsa_command
from vsa.data.video_files import read_video
from vsa.sampling.clip_folder import samples_folder


def test_sample_writes_clips_and_a_record_that_reproduces_them(tiny_run_dir: Path, tmp_path: Path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a blue square moving up\n\n  a Grün/../x  \n", encoding="utf-8")
    common = ["--steps", "2", "--guidance", "2", "--device", "cpu", "--prompts", str(prompts), "--prompt", "first"]
    vsa_command("sample", str(tiny_run_dir), *common, "--seed", "4", "--shift", "5", "--sparsity", "0.5", "--attention")
    out = tiny_run_dir / "samples"
    record = json.loads((out / "samples.json").read_text())
    assert [c["prompt"] for c in record["clips"]] == ["first", "a blue square moving up", "a Grün/../x"]
    assert {name: record[name] for name in ("compute_dtype", "seed", "steps", "guidance", "flow_shift", "topk")} == {
        "compute_dtype": "float32",
        "seed": 4,
        "steps": 2,
        "guidance": 2,
        "flow_shift": 5,
        "topk": 4,
    }
    for clip in record["clips"]:
        video, fps = read_video(out / clip["mp4"])
        assert (tuple(video.shape), fps) == ((16, 64, 64, 3), 8)
        # a GIF shows equal frames as one long frame
        assert read_video(out / clip["gif"])[0].shape[1:] == video.shape[1:]
    files = {c[kind] for c in record["clips"] for kind in ("mp4", "gif")}
    assert {p.name for p in out.iterdir()} == {*files, "samples.json", "contact_sheet.png", "attention.png"}

    again = [str(record["checkpoint"]), *common, "--out", str(tmp_path / "again"), "--seed", str(record["seed"])]
    again += ["--shift", str(record["flow_shift"]), "--topk", str(record["topk"])]
    vsa_command("sample", *again)
    for name in files:
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()


def test_sample_runs_a_distilled_run_at_its_step_list(write_tiny_run, tmp_path: Path):
    run = write_tiny_run(tmp_path / "distilled", step_list=(1000.0, 757.0, 522.0))
    common = [str(run), "--device", "cpu", "--seed", "4"]
    both = ["--prompt", "a red circle", "--prompt", "a blue square"]
    vsa_command("sample", *common, *both, "--attention")
    record = json.loads((run / "samples" / "samples.json").read_text())
    keys = ("steps", "step_list", "guidance", "flow_shift", "topk")
    assert [record[name] for name in keys] == [3, [1000, 757, 522], 1, 1, 2]
    # the first clip alone is the same clip, but for rounding; with another seed or step list it is another
    other = write_tiny_run(tmp_path / "other", step_list=(1000.0, 600.0, 200.0))

    def first(*arguments: str) -> torch.Tensor:
        out = tmp_path / "-".join([Path(arguments[0]).name, *arguments[1:]])
        words = ["sample", *arguments, "--device", "cpu", "--prompt", "a red circle", "--out", str(out)]
        vsa_command(*words)
        again = json.loads((out / "samples.json").read_text())
        with pytest.raises(ValueError, match=r"already holds clips \(samples\.json\): choose another folder"):
            vsa_command(*words)
        return read_video(out / again["clips"][0]["mp4"])[0].int()

    clip = read_video(run / "samples" / record["clips"][0]["mp4"])[0].int()
    assert (first(str(run), "--seed", "4") - clip).abs().float().mean() < 0.5
    assert (first(str(run), "--seed", "5") - clip).abs().float().mean() > 5
    assert (first(str(other), "--seed", "4") - clip).abs().float().mean() > 5


def test_sample_of_a_checkpoint_writes_beside_its_run(tiny_run_dir: Path):
    assert samples_folder(tiny_run_dir / "checkpoints" / "step-00000007") == tiny_run_dir / "samples"
    assert samples_folder(tiny_run_dir) == tiny_run_dir / "samples"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompts"),
        (["--prompt", "x", "--topk", "2", "--sparsity", "0.5"], "at most one of topk and sparsity"),
        (["--prompt", "x", "--topk", "99"], "above the number of tiles 8"),
    ],
)
def test_sample_refuses_and_writes_nothing(tiny_run_dir: Path, tmp_path: Path, arguments, message):
    with pytest.raises(ValueError, match=message):
        vsa_command("sample", str(tiny_run_dir), "--out", str(tmp_path / "out"), "--device", "cpu", *arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [["--fps", "1e9"], ["--guidance", "nan"], ["--shift", "0"], ["--steps", "0"], ["--size", "100000", "16"]],
)
def test_numbers_out_of_range_are_a_usage_error_that_names_the_option(command_line, tiny_run_dir: Path, words):
    status, _, err = command_line("sample", str(tiny_run_dir), "--prompt", "x", *words)
    assert status == 2
    assert f"'{words[0]}'" in err
    assert words[1] in err


def test_a_wrong_run_is_one_line_and_status_1(command_line, tmp_path: Path):
    status, _, err = command_line("sample", str(tmp_path / "nowhere"), "--prompt", "x")
    assert (status, err) == (1, f"error: no such folder: {tmp_path / 'nowhere'}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "8"], r"steps 8 does not apply to .*: it is distilled to the timesteps \[1000\.0, 500\.0\]"),
        (["--shift", "3"], r"flow_shift 3\.0 does not apply to .*\[1000\.0, 500\.0\]"),
    ],
)
def test_steps_of_a_distilled_run_cannot_be_changed(write_tiny_run, tmp_path: Path, arguments, message):
    run = write_tiny_run(tmp_path / "run", step_list=(1000.0, 500.0))
    with pytest.raises(ValueError, match=message):
        vsa_command("sample", run, "--prompt", "x", "--out", tmp_path / "out", "--device", "cpu", *arguments)
    assert not (tmp_path / "out").exists()


def test_sample_follows_a_plan_of_the_command_line(tiny_run_dir: Path, tmp_path: Path):
    common = [str(tiny_run_dir), "--device", "cpu", "--prompt", "a red circle", "--steps", "4", "--shift", "1"]
    plans = {
        "kept": ["--refresh", "0:2,2:1", "--shared-cache", "--guidance", "2"],
        "ranges": ["--topk-ranges", "0:0.5:8,0.75:1:1", "--dense-layers", "1"],
        "steps": ["--step-sparsity", "1:0.5", "--step-topk", "3:1", "--sparsity", "0.25"],
    }
    records = {}
    for name, options in plans.items():
        vsa_command("sample", *common, *options, "--out", str(tmp_path / name))
        records[name] = json.loads((tmp_path / name / "samples.json").read_text())
    assert records["kept"]["denoising"] == {"refresh": [[0, 2], [2, 1]], "shared_cache": True}
    # 2 of 8 tiles; the mean of two layers, one of them dense
    assert records["ranges"]["topk_by_step"] == [8, 8, 5, 4.5]
    assert records["steps"]["topk_by_step"] == [6, 4, 4, 1]
    assert records["steps"]["sparsity"] == 1 - 15 / 32
    for name, message in (
        (("--refresh", "a"), "--refresh: expected int values with commas between them, got a"),
        (("--topk-ranges", "0:8"), "--topk-ranges: expected float:float:int values with commas between them, got 0:8"),
        (("--topk-ranges", "0.5:0.5:8"), "topk_ranges needs start < stop, got 0.5 and 0.5"),
        (("--dense-layers", "7"), r"denoising\.dense_layers has layer 7, but the model's layers are 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            vsa_command("sample", *common, *name, "--out", str(tmp_path / "refused"))
    assert not (tmp_path / "refused").exists()

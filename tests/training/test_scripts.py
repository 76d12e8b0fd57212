"""sample.py, score_toy.py and report.py as a user runs them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from vsa.data.codecs import HaarCodec
from vsa.data.video_files import read_video

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sample_writes_clips_and_a_record_that_reproduces_them(tiny_run_dir: Path, tmp_path: Path):
    sample = script("sample")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a blue square moving up\n\n  a Grün/../x  \n", encoding="utf-8")
    common = ["--steps", "2", "--guidance", "2", "--device", "cpu", "--prompts", str(prompts), "--prompt", "first"]
    sample.main([str(tiny_run_dir), *common, "--seed", "4", "--shift", "5", "--sparsity", "0.5", "--attention"])
    out = tiny_run_dir / "samples"
    record = json.loads((out / "samples.json").read_text())
    assert [c["prompt"] for c in record["clips"]] == ["first", "a blue square moving up", "a Grün/../x"]
    assert {name: record[name] for name in ("seed", "steps", "guidance", "flow_shift", "topk")} == {
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
    wanted = {c[kind] for c in record["clips"] for kind in ("mp4", "gif")}
    assert {p.name for p in out.iterdir()} == {*wanted, "samples.json", "contact_sheet.png", "attention.png"}

    again = [str(record["checkpoint"]), *common, "--out", str(tmp_path / "again"), "--seed", str(record["seed"])]
    again += ["--shift", str(record["flow_shift"]), "--topk", str(record["topk"])]
    sample.main(again)
    for name in wanted:
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()


def test_sample_runs_a_distilled_run_at_its_step_list(write_tiny_run, tmp_path: Path):
    run = write_tiny_run(tmp_path / "distilled", step_list=(1000.0, 757.0, 522.0))
    sample = script("sample")
    common = [str(run), "--device", "cpu", "--seed", "4"]
    both = ["--prompt", "a red circle", "--prompt", "a blue square"]
    sample.main([*common, *both, "--attention"])
    record = json.loads((run / "samples" / "samples.json").read_text())
    named = ("steps", "step_list", "guidance", "flow_shift", "topk")
    assert [record[name] for name in named] == [3, [1000, 757, 522], 1, 1, 2]
    # the first clip alone is the same clip, but for rounding; with another seed or step list it is another
    other = write_tiny_run(tmp_path / "other", step_list=(1000.0, 600.0, 200.0))

    def first(*arguments: str) -> torch.Tensor:
        sample.main([*arguments, "--device", "cpu", "--prompt", "a red circle", "--out", str(tmp_path / "one")])
        again = json.loads((tmp_path / "one" / "samples.json").read_text())
        return read_video(tmp_path / "one" / again["clips"][0]["mp4"])[0].int()

    clip = read_video(run / "samples" / record["clips"][0]["mp4"])[0].int()
    assert (first(str(run), "--seed", "4") - clip).abs().float().mean() < 0.5
    assert (first(str(run), "--seed", "5") - clip).abs().float().mean() > 5
    assert (first(str(other), "--seed", "4") - clip).abs().float().mean() > 5


@pytest.mark.parametrize("name", ["sample", "score_toy"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "8"], r"steps 8 has no meaning for .*: it is distilled to the timesteps \[1000\.0, 500\.0\]"),
        (["--shift", "3"], r"flow_shift 3\.0 has no meaning for .*\[1000\.0, 500\.0\]"),
    ],
)
def test_steps_of_a_distilled_run_cannot_be_changed(write_tiny_run, tmp_path: Path, name: str, arguments, message):
    run = write_tiny_run(tmp_path / "run", step_list=(1000.0, 500.0))
    prompt = ["--prompt", "x"] if name == "sample" else []
    with pytest.raises(ValueError, match=message):
        script(name).main([str(run), "--out", str(tmp_path / "out"), "--device", "cpu", *prompt, *arguments])
    assert not (tmp_path / "out").exists()


def test_sample_of_a_checkpoint_writes_beside_its_run(tiny_run_dir: Path):
    default_out = script("sample").default_out
    assert default_out(str(tiny_run_dir / "checkpoints" / "step-00000007")) == tiny_run_dir / "samples"
    assert default_out(str(tiny_run_dir)) == tiny_run_dir / "samples"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompts"),
        (["--prompt", "x", "--topk", "2", "--sparsity", "0.5"], "not both"),
        (["--prompt", "x", "--topk", "99"], "above the number of tiles 8"),
        (["--prompt", "x", "--fps", "0"], "fps must be positive"),
    ],
)
def test_sample_refuses_and_writes_nothing(tiny_run_dir: Path, tmp_path: Path, arguments, message):
    with pytest.raises(ValueError, match=message):
        script("sample").main([str(tiny_run_dir), "--out", str(tmp_path / "out"), "--device", "cpu", *arguments])
    assert not (tmp_path / "out").exists()


def test_a_wrong_run_is_one_line_and_status_1(tmp_path: Path):
    command = [sys.executable, str(SCRIPTS / "sample.py"), str(tmp_path / "nowhere"), "--prompt", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"error: no such checkpoint or run folder: {tmp_path / 'nowhere'}\n"


def test_score_toy_writes_scores_beside_chance_and_codec(tiny_run_dir: Path, tmp_path: Path, capsys):
    score_toy = script("score_toy")
    common = [
        str(tiny_run_dir),
        "--clips",
        "6",
        "--steps",
        "1",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "score.json"),
    ]
    score_toy.main(common)
    scores = json.loads((tmp_path / "score.json").read_text())
    assert scores["chance"] == {"colour": 1 / 6, "direction": 1 / 4}
    assert scores["codec_reconstructions"] == {"colour": 1.0, "direction": 1.0}
    assert 0 <= scores["model"]["colour"] <= 1
    assert scores["settings"]["steps"] == 1
    printed = capsys.readouterr().out
    assert "16.7%" in printed
    assert "25.0%" in printed
    with pytest.raises(ValueError, match=r"direction is right in .* below the required 101\.0%"):
        score_toy.main([*common, "--min-direction", "1.01"])


def test_score_toy_samples_each_run_in_its_way(write_tiny_run, tiny_config, tmp_path: Path, monkeypatch):
    score_toy = script("score_toy")
    seen = []
    generate = score_toy.generate

    def watched(run, prompts, settings, progress):
        seen.append((settings.steps, settings.step_list, settings.guidance, settings.flow_shift))
        return generate(run, prompts, settings, progress)

    monkeypatch.setattr(score_toy, "generate", watched)
    samples = {"steps": 7, "guidance": 2.5, "flow_shift": 4.0}
    config = {**tiny_config(), "callbacks": {"samples": samples}}
    for name, step_list in (("many", None), ("few", (1000.0, 500.0))):
        run = write_tiny_run(tmp_path / name, config=config, step_list=step_list, with_ema=step_list is None)
        score_toy.main([str(run), "--clips", "1", "--device", "cpu"])
    assert seen == [(32, None, 1.0, 4.0), (2, (1000.0, 500.0), 1.0, 1.0)]
    settings = json.loads((tmp_path / "few" / "score.json").read_text())["settings"]
    # a run without averages, as a merged one is
    assert (settings["weights"], settings["step_list"]) == ("model", [1000, 500])
    score_toy.main([str(tmp_path / "few"), "--clips", "1", "--device", "cpu", "--guidance", "3"])
    assert seen[-1] == (2, (1000.0, 500.0), 3.0, 1.0)


def test_score_toy_refuses_a_run_of_other_videos(write_tiny_run, tiny_config, tmp_path: Path):
    config = tiny_config()
    config["data"] |= {"toy": None, "root": "shards"}
    command = [str(write_tiny_run(tmp_path / "run", config=config)), "--clips", "1", "--steps", "1", "--device", "cpu"]
    with pytest.raises(ValueError, match=r"run/checkpoints/step-00000007 was trained on other videos .*--any-data"):
        script("score_toy").main(command)
    assert not (tmp_path / "run" / "score.json").exists()
    script("score_toy").main([*command, "--any-data"])
    assert (tmp_path / "run" / "score.json").is_file()


def test_score_tells_right_clips_from_wrong_ones():
    score_toy = script("score_toy")
    videos, captions = score_toy.reconstructions(HaarCodec(), 12, 0, (16, 64, 64))
    assert score_toy.score(videos, captions) == {"colour": 1.0, "direction": 1.0}
    reverse = [video.flip(0) for video in videos]
    assert score_toy.score(reverse, captions) == {"colour": 1.0, "direction": 0.0}
    grey = [torch.full_like(video, 30) for video in videos]
    assert score_toy.score(grey, captions) == {"colour": 0.0, "direction": 0.0}


def test_report_draws_the_loss_of_each_run(tmp_path: Path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,train/loss\n10,1.5\n20,0.25\n")
    # stopped before its first logged row, after a validation or before it
    for name, metrics in (("e", "step\n"), ("f", ""), ("g", "step,val/loss\n1,0.125\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(metrics)
    script("report").main([str(tmp_path / name) for name in "aefgb"])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {name: [row[1:] for row in shown if row[:1] == [name]] for name in "aefg"} == {
        "a": [["20", "0.25", "-", "-"]],
        "e": [["-", "-", "-", "-"]],
        "f": [["-", "-", "-", "-"]],
        "g": [["-", "-", "0.125", "-"]],
    }
    script("report").main([str(tmp_path / "a"), str(tmp_path / "b")])
    assert (tmp_path / "a" / "loss.png").is_file()
    assert (tmp_path / "b" / "loss.png").is_file()
    assert "0.25" in capsys.readouterr().out
    # a distillation has other columns
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "metrics.csv").write_text("step,fake_score/loss,val/gap\n10,1.5,\n20,0.75,0.125\n")
    script("report").main([str(tmp_path / "d")])
    shown = capsys.readouterr().out
    assert "0.75" in shown
    assert "0.125" in shown
    assert (tmp_path / "d" / "loss.png").is_file()
    with pytest.raises(ValueError, match=r"c is no run folder: it has no metrics\.csv"):
        script("report").main([str(tmp_path / "c")])


def test_report_tells_runs_apart_at_80_columns(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    common = tmp_path / "a-folder-of-many-letters-that-all-runs-have-in-common" / "pretrain"
    names = [f"s0.875_tile_2x2x2_lr_0.002_batch_size_64_seed_{seed}" for seed in (1, 2)] + ["other/short"]
    for i, name in enumerate(names):
        (common / name).mkdir(parents=True)
        (common / name / "metrics.csv").write_text(f"step,train/loss\n10,1.5\n20,0.{i + 1}25\n")
    script("report").main([str(common / name) for name in names])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    first = next(i for i, line in enumerate(lines) if "───" in line) + 1
    table = lines[first : next(i for i, line in enumerate(lines) if i > first and not line.strip())]
    # a name in pieces, one below the other, beside the values of its run
    shown, pieces = {}, []
    for line in table:
        name, *values = line.split()
        if values:
            pieces = []
            shown[values[1]] = pieces
        pieces.append(name)
    found = {loss: "".join(parts) for loss, parts in shown.items()}
    assert found == {f"0.{i + 1}25": name for i, name in enumerate(names)}
    assert (common / "report.png").is_file()

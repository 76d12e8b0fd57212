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
    script("report").main([str(tmp_path / "a"), str(tmp_path / "b")])
    assert (tmp_path / "a" / "loss.png").is_file()
    assert (tmp_path / "b" / "loss.png").is_file()
    assert "0.25" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"c is no run folder: it has no metrics\.csv"):
        script("report").main([str(tmp_path / "c")])

"""`vsa tune-sparge` from a command line: what it writes, that it goes on, what is refused."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.attention.sparge.test_method import fields
from tests.data.tiny_wan import make_pipeline
from tests.reports.test_report import Page
from tests.tiny_runs import command_line  # noqa: F401
from vsa.attention.sparge.method import SpargeAttention
from vsa.data.toy_videos import render_clip
from vsa.data.video_files import write_video
from vsa.evaluation import sparge_tuning
from vsa.evaluation.comparison.captures import Capture, Captures, load_captures, save_captures
from vsa.pages import page

GRIDS = ((2, 4, 6), (3, 4, 4))
SMALL = ["--q-tokens", "8", "--kv-tokens", "4", "--taus", "0.5,0.9", "--thetas", "-1,0.3", "--thresholds", "-1,-4"]
BOUNDS = ["--l1", "0.4", "--l2", "0.5", "--device", "cpu"]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(panel, path: Path, *, title: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return path

    for module in (sparge_tuning, page):
        monkeypatch.setattr(module, "draw_panel", touch)


@pytest.fixture
def captures(tmp_path: Path) -> Path:
    return written(tmp_path / "q.safetensors", range(3))


def written(path: Path, layers) -> Path:
    items = []
    for layer in layers:
        for seed, grid in enumerate(GRIDS):
            q, k, v = fields(grid, seed=10 * layer + seed, dtype=torch.float32)
            items.append(Capture(name="clip", grid_thw=grid, q=q * (1 + layer), k=k, v=v, layer=layer, timestep=500.0))
    return save_captures(Captures(items=items, source="drawn"), path)


def tune(command_line, *words):  # noqa: F811
    status, out, err = command_line("tune-sparge", *map(str, words), *SMALL, *BOUNDS)
    return status, out, err


def test_a_file_for_every_head_and_its_page(captures, tmp_path, command_line):  # noqa: F811
    out = tmp_path / "tuned"
    status, output, err = tune(command_line, "--captures", captures, "--out", out)
    assert (status, err) == (0, "")
    assert str(out / "tuned.json") in output.replace("\n", "")
    settings = {"q_tokens": 8, "kv_tokens": 4, "tuned": str(out / "tuned.json")}
    sparsities = []
    for layer in range(3):
        method = SpargeAttention(dim=20, num_heads=4, head_dim=5, layer_idx=layer, **settings)
        method.check_model(3)
        assert method.file is not None
        heads = method.file.found[layer]
        assert all(h.error < 0.5 for h in heads)
        sparsities += [h.sparsity for h in heads]
        assert method.expected_share == pytest.approx(sum(1 - h.sparsity for h in heads) / len(heads), rel=1e-12)
        with (out / "tuning" / f"layer-{layer:03}.csv").open() as file:
            assert len(file.readlines()) == 1 + 4 * 6
    assert max(sparsities) > 0.1
    page = Page((out / "tuning.html").read_text(encoding="utf-8"))
    assert {"By layer", "Error against sparsity"} <= set(page.texts)
    # it loads nothing
    assert not [v for _, attrs in page.elements for n, v in attrs.items() if n == "src" and not v.startswith("data:")]
    charts = json.loads(next(text for text in page.scripts if text.startswith("[")))
    assert [panel["key"] for panel in charts[0]["panels"]] == [["all layers"], *([f"layer {i}"] for i in range(3))]
    # again: nothing is computed, nothing changes
    before = (out / "tuned.json").read_bytes()
    assert tune(command_line, "--captures", captures, "--out", out)[0] == 0
    assert (out / "tuned.json").read_bytes() == before
    # a comparison takes the file, whatever sizes it first tries a method with
    words = f"sparge tuned={out / 'tuned.json'} q_tokens=8 kv_tokens=4"
    one = written(tmp_path / "one.safetensors", [1])
    there = f"--captures {one} --out {tmp_path / 'compared'} --repeats 1 --device cpu".split()
    status, _, err = command_line("compare-attention", *there, "--method", words)
    assert (status, err) == (0, "")
    rows = json.loads((tmp_path / "compared" / "comparison.json").read_text())["rows"]
    assert {row["method"] for row in rows} == {"full", words}
    assert min(row["density"] for row in rows) < 1


def test_an_interrupted_tuning_goes_on(captures, tmp_path, command_line, monkeypatch):  # noqa: F811
    assert tune(command_line, "--captures", captures, "--out", tmp_path / "whole")[0] == 0
    own, calls = sparge_tuning.tune_layer, []

    def stops(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return own(*args)

    monkeypatch.setattr(sparge_tuning, "tune_layer", stops)
    assert tune(command_line, "--captures", captures, "--out", tmp_path / "parts")[0] == 130
    partly = json.loads((tmp_path / "parts" / "tuned.json").read_text())
    assert sorted(partly["found"]) == ["0", "1"]
    with pytest.raises(ValueError, match=r"has no layer 2, but 2 of 3"):
        SpargeAttention(
            dim=20, num_heads=4, head_dim=5, layer_idx=2, q_tokens=8, kv_tokens=4,
            tuned=str(tmp_path / "parts" / "tuned.json"),
        ).check_model(3)  # fmt: skip
    assert tune(command_line, "--captures", captures, "--out", tmp_path / "parts")[0] == 0
    # the third layer alone
    assert len(calls) == 4
    assert (tmp_path / "parts" / "tuned.json").read_bytes() == (tmp_path / "whole" / "tuned.json").read_bytes()
    # what was tuned in another way is no part of it
    status, _, err = command_line(
        "tune-sparge", "--captures", str(captures), "--out", str(tmp_path / "parts"), *SMALL, "--device", "cpu"
    )
    assert status == 1
    assert "was tuned with l1=0.4, got l1=0.05: choose another folder with --out" in err


def test_a_model_is_tuned_on_what_it_sees(tiny_run_dir, tmp_path, command_line):  # noqa: F811
    video = tmp_path / "clip.mp4"
    write_video(video, render_clip(0, 1, size=(16, 64, 64))[0])
    video.with_suffix(".txt").write_text("a red circle\n")
    where = ("--run", tiny_run_dir, "--clips", video, "--timesteps", "900,200", "--out", tmp_path / "tuned")
    status, _, err = tune(command_line, *where)
    assert (status, err) == (0, "")
    file = json.loads((tmp_path / "tuned" / "tuned.json").read_text())
    assert sorted(file["found"]) == [str(i) for i in range(file["layers"])]
    assert re.search(
        r", ema weights: clip.mp4 \([0-9a-f]{16}\) at 900, 200, seed 0, latents .*, pipeline None",
        file["made"]["source"],
    )


def test_a_pipeline_is_tuned_and_samples_with_its_settings(tmp_path, command_line):  # noqa: F811
    pipe = make_pipeline()
    pipe.save_pretrained(tmp_path / "pipeline")
    video = tmp_path / "videos" / "clip.mp4"
    video.parent.mkdir()
    write_video(video, render_clip(0, 1, size=(5, 48, 80))[0])
    video.with_suffix(".txt").write_text("a red circle\n")
    where = ("--run", tmp_path / "pipeline", "--clips", video.parent, "--latents", "2", "6", "10")
    status, _, err = tune(command_line, *where, "--timesteps", "500", "--out", tmp_path / "tuned")
    # stderr has the progress of transformers
    assert status == 0, err
    file = tmp_path / "tuned" / "tuned.json"
    assert sorted(json.loads(file.read_text())["found"]) == ["0", "1"]
    clip = ("--size", "48", "80", "--frames", "5", "--steps", "2", "--device", "cpu", "--out", tmp_path / "clips")
    method = f"sparge tuned={file} q_tokens=8 kv_tokens=4"
    words = ("sample", "--pipeline", tmp_path / "pipeline", "--method", method, "--prompt", "a cat", *clip)
    status, _, err = command_line(*map(str, words))
    assert status == 0, err
    # control: blocks of other sizes than those that were tuned
    words = (*words[:-1], tmp_path / "others")
    status, _, err = command_line(*(str(word).replace("q_tokens=8", "q_tokens=16") for word in words))
    assert status == 1
    assert "q_tokens" in err.splitlines()[-1]


@pytest.mark.soak("tune-sparge on damaged files")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda x: replace(x, q=x.q * math.nan), "layer 1: head 0: q, k, v or the attention output contain NaN"),
        (lambda x: replace(x, q=x.q[:, :, :2], k=x.k[:, :, :2], v=x.v[:, :, :2]), "layer 1 have heads and head dims"),
        (lambda x: replace(x, k=x.k[..., :3]), "layer 1 have heads and head dims [(4, 5), (4, 3), (4, 5)]"),
    ],
)
def test_tensors_that_cannot_be_tuned_on_are_one_line(damage, message, tmp_path, command_line, monkeypatch):  # noqa: F811
    items = load_captures(written(tmp_path / "q.safetensors", range(2))).items
    items = [damage(item) if item.layer == 1 else item for item in items]
    monkeypatch.setattr(sparge_tuning, "load_captures", lambda path: Captures(items=items, source=""))
    status, _, err = tune(command_line, "--captures", tmp_path / "q.safetensors", "--out", tmp_path / "out")
    assert status == 1
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.soak("tune-sparge on damaged files")
def test_a_damaged_table_of_points_is_named(captures, tmp_path, command_line):  # noqa: F811
    out = tmp_path / "tuned"
    assert tune(command_line, "--captures", captures, "--out", out)[0] == 0
    (out / "tuning" / "layer-001.csv").write_text("head,tau\n\n0,1\n")
    status, _, err = tune(command_line, "--captures", captures, "--out", out)
    assert status == 1
    assert "layer-001.csv is damaged: delete it" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected one of --run and --captures, got none"),
        (["--run", "a", "--captures", "b"], "expected one of --run and --captures, got both"),
        (["--run", "a"], "--run a needs --clips"),
        (["--captures", "none.safetensors"], "no such file of captures: none.safetensors"),
        (["--captures", "none.safetensors", "--clips", "x"], "--clips needs a model: set --run"),
        (["--captures", "HOLES"], "has layers 0, 2: layer 1 is missing"),
        (["--captures", "HOLES", "--l1", "0.9"], "0 < l1 <= l2, got l1=0.9 and l2=0.5"),
        (["--captures", "HOLES", "--taus", "0.5,2"], "taus must be numbers above 0 and below 1, got 2"),
        (["--captures", "HOLES", "--thetas", "a"], "--thetas: expected float values with commas between them, got a"),
        (["--captures", "HOLES", "--timesteps", "900"], "--timesteps applies to --run only"),
        (["--captures", "HOLES", "--weights", "ema"], "--weights applies to --run only"),
        (["--captures", "HOLES", "--kv-tokens", "3"], "one of q_tokens=8 and kv_tokens=3 must divide the other"),
    ],
)
def test_bad_input_is_one_line(words, message, tmp_path, command_line):  # noqa: F811
    holes = written(tmp_path / "holes.safetensors", (0, 2)) if "HOLES" in words else None
    words = [str(holes) if word == "HOLES" else word for word in words]
    options = [*SMALL, "--l1", "0.4", "--l2", "0.5", "--out", str(tmp_path / "out")]
    # the last of two values counts
    status, _, err = command_line("tune-sparge", *options, *words)
    assert status == 1
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out" / "tuned.json").exists()

"""`vsa compare-attention` from a command line: what it writes, that the page loads nothing, what is refused."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from plotly.offline import get_plotlyjs

from tests.commands import run_command
from tests.data.tiny_wan import save_pipeline
from tests.evaluation.inspection.test_export import make
from tests.reports.test_report import Page
from tests.tiny_runs import command_line  # noqa: F401
from vsa.attention.full import FullAttention
from vsa.attention.pooled_tail import PooledTail
from vsa.checkpoints.wan import export_pretrained
from vsa.cli.compare_attention import compare_attention
from vsa.config import config_folder
from vsa.data.toy_videos import render_clip
from vsa.data.video_files import write_video
from vsa.evaluation.comparison.measure import Row
from vsa.evaluation.comparison.usual import usual_methods, usual_on
from vsa.pages import page as page_module
from vsa.pages.charts import draw_panel

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")

METHODS = ("video_sparse topk=2", "video_sparse topk=4", "staged stages=f score=oracle topk=2", "strided_window")
FIELDS = ["--synthetic", "2", "4", "4", "--heads", "1", "--head-dim", "16", "--tile", "1", "2", "2"]
FIELDS += ["--repeats", "1", "--device", "cpu"]
EVIL = "<script>alert(1)</script><img src=http://evil.example/x>"


def options(*methods: str) -> list[str]:
    return [word for method in methods for word in ("--method", method)]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    clips = tmp_path / "videos"
    clips.mkdir()
    for i in range(3):
        write_video(clips / f"clip-{i}.mp4", render_clip(0, i, size=(16, 64, 64))[0])
        (clips / f"clip-{i}.txt").write_text(f"a circle {EVIL}\n")
    return clips


@pytest.mark.usefixtures("no_pictures")
def test_a_run_with_clips_and_prompts(tiny_run_dir: Path, videos: Path, tmp_path: Path, capsys):
    where = ["--run", tiny_run_dir, "--clips", videos, "--layers", "0,1", "--timesteps", "900,200", "--device", "cpu"]
    # the name of a file is text of strangers too
    (videos / "clip-0.mp4").rename(videos / "a<i>&.mp4")
    (videos / "clip-0.txt").rename(videos / "a<i>&.txt")
    few = ["--most-clips", "2", "--repeats", "1", "--queries", "16", "--save", tmp_path / "q.safetensors"]
    plan = ["--dense-steps", "1", "--refresh", "2"]
    run_command(
        compare_attention,
        *where,
        *few,
        *options(*METHODS),
        "--prompt",
        EVIL,
        "--prompt",
        "a cat",
        "--steps",
        "2",
        *plan,
    )
    output = capsys.readouterr().out
    out = tiny_run_dir / "comparison"
    record = json.loads((out / "comparison.json").read_text())
    names = ["full", *METHODS, "as trained"]
    assert record["made_by"] == "vsa compare-attention"
    assert record["tile_thw"] == [2, 2, 2]
    assert len(record["rows"]) == 2 * 2 * 2 * len(names)
    assert [row["method"] for row in record["rows"][: len(names)]] == names
    assert {(row["capture"], row["layer"], row["timestep"]) for row in record["rows"]} == {
        (name, layer, timestep) for name in ("a<i>&.mp4", "clip-1.mp4") for layer in (0, 1) for timestep in (900, 200)
    }
    assert [row["method"] for row in record["denoising"]] == names
    assert record["sampling"]["steps"] == 2
    assert record["denoising_plan"] == record["sampling"]["denoising"] == {"dense_steps": 1, "refresh": 2}
    # every number of the JSON is in the CSV, every mean in the page and in the terminal
    rows = read(out / "comparison" / "rows.csv")
    assert list(rows[0]) == [*Row.__dataclass_fields__, "recall_p5"]
    for row, entry in zip(rows, record["rows"], strict=True):
        assert {name: "" if value is None else str(value) for name, value in entry.items()} == row
    means = {(row["captures"], row["method"]): row for row in read(out / "comparison" / "means.csv")}
    assert {group for group, _ in means} == {"all", "layer 0", "layer 1", "timestep 900", "timestep 200"}
    page = Page((out / "comparison.html").read_text(encoding="utf-8"))
    words = " ".join(output.split())
    for name in names:
        own = [row for row in record["rows"] if row["method"] == name]
        for group, some in (("all", own), ("layer 1", [row for row in own if row["layer"] == 1])):
            mean = sum(row["error_l1"] for row in some) / len(some)
            assert float(means[group, name]["error_l1"]) == pytest.approx(mean)
        error = f"{float(means['all', name]['error_l1']):.3g}"
        assert error in page.texts
        assert error in words
    densities = {name: float(means["all", name]["density"]) for name in names}
    assert densities == pytest.approx(dict(zip(names, (1, 0.25, 0.5, 0.25, 0.75, 0.25), strict=True)))
    for title in ("Results: all", "Error against density and speed", "By layer and timestep", "Denoising runs"):
        assert title in page.texts
    assert record["denoising"][0]["clip_psnr"] == record["denoising"][0]["clip_cosine"] == []
    for row in record["denoising"][1:]:
        assert f"{float(row['psnr']):.3g}" in page.texts
        for name, digits in (("psnr", 3), ("cosine", 5)):
            low, high = float(row[f"{name}_low"]), float(row[f"{name}_high"])
            assert f"{low:.{digits}g} to {high:.{digits}g}" in page.texts
            assert low <= float(row[name]) <= high
            assert len(row[f"clip_{name}"]) == 2
    # five methods whose clips differ, in the page and in the terminal
    assert "Pairs of methods whose clips differ in error beyond the choice of prompts" in words
    assert np.asarray(Image.open(out / "comparison" / "clips.png").convert("L")).std() > 5
    assert "Clips" in page.texts
    # the worst heads of a method, over all of its captures
    for name in names:
        heads = [head for row in record["rows"] if row["method"] == name for head in row["head_recall"]]
        assert len(heads) == 2 * 2 * 2 * 2
        assert float(means["all", name]["recall_p5"]) == pytest.approx(np.quantile(heads, 0.05))
        assert float(means["all", name]["recall"]) == pytest.approx(np.mean(heads))
    # the plan stands in the page's head, over its table and over that of the terminal
    entry = "all but dense attention with dense_steps=1, refresh=2"
    assert len([text for text in page.texts if entry in text]) == 2
    assert entry in words
    # the file of captures gives the same numbers elsewhere
    again = ["--captures", tmp_path / "q.safetensors", "--out", tmp_path / "again", "--tile", "2", "2", "2"]
    run_command(compare_attention, *again, "--repeats", "1", "--queries", "16", *options(*METHODS), "--device", "cpu")
    other = json.loads((tmp_path / "again" / "comparison.json").read_text())
    keys = ("method", "capture", "layer", "timestep", "topk", "density", "recall", "error_l1", "error_l2")
    ours, theirs = ([[row[key] for key in keys] for row in one["rows"]] for one in (record, other))
    assert ours == theirs
    assert other["denoising"] == []
    shutil.rmtree(out)


@pytest.mark.usefixtures("no_pictures")
def test_prompts_without_clips(tiny_run_dir: Path, tmp_path: Path, capsys):
    words = ["--run", tiny_run_dir, "--prompt", "a cat", "--steps", "1", *options("spatial_full"), "--device", "cpu"]
    run_command(compare_attention, *words, "--out", tmp_path / "out")
    record = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert record["rows"] == []
    assert [row["method"] for row in record["denoising"]] == ["full", "spatial_full", "as trained"]
    assert "denoising runs against dense attention" in capsys.readouterr().out
    assert "Denoising runs" in Page((tmp_path / "out" / "comparison.html").read_text(encoding="utf-8")).texts


def test_drawn_fields_and_a_page_that_loads_nothing(tmp_path: Path, monkeypatch, capsys, no_pictures):
    # one picture stands for all
    touch = page_module.draw_panel
    draws = {"error-density-fields.png": draw_panel}
    monkeypatch.setattr(
        page_module, "draw_panel", lambda panel, path, *, title: draws.get(path.name, touch)(panel, path, title=title)
    )
    monkeypatch.setenv("COLUMNS", "80")
    draw = ["--synthetic", "2", "6", "6", "--heads", "2", "--head-dim", "8", "--tile", "1", "2", "2", "--device", "cpu"]
    run_command(compare_attention, *draw, *options(*METHODS[:3]), "--repeats", "1", "--out", tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    headers = [line.split() for line in lines if line.split()[:1] == ["method"]]
    assert [header[:3] for header in headers] == [["method", "kept", "density"]] * 2
    # a method's settings and budget, whatever the width
    assert len([line for line in lines if "score=oracle" in line or "2 of 18" in line]) >= 2
    data = tmp_path / "comparison"
    assert np.asarray(Image.open(data / "error-density-fields.png").convert("L")).std() > 5
    names = {path.name for path in data.iterdir()}
    assert names >= {
        "rows.csv",
        "means.csv",
        "error.csv",
        "recall.csv",
        "error-density-fields.png",
        "recall-p5-noise.png",
    }
    text = (tmp_path / "comparison.html").read_text(encoding="utf-8")
    page = Page(text)
    # means of fields and of noise together would mean nothing
    assert "Results: fields" in page.texts
    assert "Results: noise" in page.texts
    assert "Results: all" not in page.texts
    charts = {chart["key"]: chart for chart in json.loads(next(s for s in page.scripts if s.startswith("[")))}
    panel = next(panel for panel in charts["error"]["panels"] if panel["key"] == ["density", "fields"])
    curves = {trace["label"]: trace for trace in panel["traces"]}
    rows = {row["method"]: row for row in json.loads((tmp_path / "comparison.json").read_text())["rows"][:4]}
    assert set(curves) == {"full", "video_sparse", "staged stages=f score=oracle"}
    assert curves["video_sparse"]["text"] == ["video_sparse topk=2", "video_sparse topk=4"]
    for name, x, y in zip(*(curves["video_sparse"][key] for key in ("text", "x", "y")), strict=True):
        assert (x, y) == pytest.approx((rows[name]["density"], rows[name]["error_l1"]), rel=1e-4)
    for tag, attrs in page.elements:
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            assert not re.match(r"\s*(\w+:)?//", attrs.get(name) or ""), (tag, name)
        assert tag not in ("link", "iframe", "object", "embed", "base")
    ours = text.replace(get_plotlyjs().replace("\r", ""), "")
    assert len(ours) < len(text)
    assert not re.search(r"\bfetch\(|XMLHttpRequest|\bimport\b\s*[\"'({*]|@import|url\(|WebSocket|sendBeacon", ours)
    policy = next(attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv"))
    assert str(policy).startswith("default-src 'none';")


def test_without_methods_it_measures_the_usual_ones_of_the_grid(tmp_path: Path, capsys, no_pictures):
    words = ["--synthetic", "1", "2", "4", "--heads", "1", "--head-dim", "12", "--tile", "1", "1", "2"]
    words += ["--sparsity", "0.5", "--repeats", "1", "--device", "cpu", "--out", tmp_path]
    run_command(compare_attention, *words)
    record = json.loads((tmp_path / "comparison.json").read_text())
    methods, (note,) = usual_on((1, 2, 4), [0.5], (1, 1, 2))
    assert [row["method"] for row in record["rows"]] == [method.label for method in methods] * 2
    out, texts = capsys.readouterr().out, Page((tmp_path / "comparison.html").read_text(encoding="utf-8")).texts
    # whatever has a config is a row or is named
    measured = {row["method"].partition(" ")[0] for row in record["rows"]}
    files = {path.stem for path in (config_folder() / "attention").glob("*.yaml")}
    others = next(text for text in texts if text.startswith("measured only where --method names them: "))
    assert {*others.partition(": ")[2].split(", ")} == files - {
        label.partition(" ")[0] for label in usual_methods((1, 2, 4))
    }
    assert all(name in note or name in others for name in files - measured)
    assert note in out
    assert others in out
    assert note in texts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "expected one of --run, --pipeline, --captures, --synthetic, got none"),
        (("--synthetic", "2", "2", "2", "--captures", "x"), "got --captures, --synthetic"),
        (("--run", "RUN"), "RUN needs --clips to capture q, k, v of, or --prompt to denoise, or both"),
        (("--pipeline", "P"), "--pipeline P needs --clips to capture q, k, v of, or --prompt to denoise, or both"),
        (
            ("--pipeline", "P", "--prompt", "x", "--weights", "ema"),
            "--weights ema applies to runs only, got --pipeline P",
        ),
        (("--pipeline", "P", "--captures", "x"), "got --pipeline, --captures"),
        (
            ("--synthetic", "2", "2", "2", "--prompt", "x"),
            "--clips and --prompt need a model: set --run or --pipeline",
        ),
        (("--synthetic", "2", "2", "2", "--method", "vsaa"), "method 'vsaa': attention=vsaa: unknown method"),
        (("--synthetic", "2", "2", "2", "--sparsity", "0.5,x"), "--sparsity: expected float values"),
        (("--synthetic", "2", "2", "2", "--sparsity", "1.5"), "sparsity=1.5: expected a share"),
        (("--synthetic", "2", "2", "2", "--head-dim", "7"), "attention_head_dim must be even"),
        (
            ("--synthetic", "2", "2", "2", "--dense-steps", "1"),
            "--dense-steps applies to denoising only",
        ),
        (("--run", "RUN", "--prompt", "x", "--dense-layers", "0,2"), "has layer 2, but the model's layers are 0 to 1"),
        (("--run", "RUN", "--prompt", "x", "--refresh", "0"), "--refresh 0: expected"),
        (("--run", "RUN", "--held-out", "3"), "--held-out 3: RUN has 0 held-out captions, use --prompts FILE"),
        (("--pipeline", "P", "--held-out", "3"), "--held-out 3: P has 0 held-out captions, use --prompts FILE"),
        (("--captures", "gone.safetensors"), "no such file of captures: gone.safetensors"),
        (("--run", "RUN", "--clips", "gone.mp4"), "no such video: gone.mp4"),
        (("--run", "RUN", "--clips", "EMPTY"), "holds no videos"),
        (("--run", "RUN", "--clips", "EMPTY/a.mp4", "--layers", "0,2"), "has layers 0 to 1, got 2"),
        (("--run", "RUN", "--clips", "EMPTY/a.mp4", "--timesteps", "1001"), "must be in [0, 1000], got 1001"),
        (("--synthetic", "2", "2", "2", "--method", "video_sparse topk=9"), "topk 9 is above the 1 tiles of"),
    ],
)
def test_bad_input_is_one_line(words, message, tiny_run_dir, tmp_path, command_line):  # noqa: F811
    (tmp_path / "empty").mkdir()
    places = {"RUN": str(tiny_run_dir), "EMPTY": str(tmp_path / "empty")}
    words = [re.sub("RUN|EMPTY", lambda match: places[match[0]], word) for word in words]
    words += ["--out", str(tmp_path / "out"), "--device", "cpu"]
    status, _, err = command_line("compare-attention", *words)
    assert status == 1
    assert err.count("\n") == 1
    assert re.sub("RUN", str(tiny_run_dir), message) in err
    assert not (tmp_path / "out").exists()


def test_files_of_others_are_not_replaced(tmp_path: Path, command_line):  # noqa: F811
    (tmp_path / "comparison.json").write_text("{}")
    words = ["--synthetic", "2", "2", "2", "--out", str(tmp_path), "--device", "cpu"]
    status, _, err = command_line("compare-attention", *words)
    assert (status, err.count("\n")) == (1, 1)
    assert "comparison.json is not from `vsa compare-attention`: choose another folder with --out" in err


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_dense_export_through_a_pipeline(tmp_path: Path, videos: Path):
    """Methods without training on pretrained weights: nothing of the export says which grid, or how to sample."""
    pipeline = save_pipeline(tmp_path / "pipeline")
    dense = export_pretrained(make(FullAttention), tmp_path / "dense", sparse=None)
    words = ["--run", dense, "--pipeline", pipeline, "--latents", "2", "6", "10", "--tile", "1", "2", "2"]
    words += ["--clips", videos / "clip-1.mp4", "--timesteps", "500", "--method", "video_sparse topk=12"]
    words += ["--method", "video_sparse topk=3", "--prompt", "a circle", "--steps", "2", "--repeats", "1"]
    words += ["--out", tmp_path / "out", "--device", "cpu"]
    with pytest.raises(ValueError, match="is a dense export, which has no sampling settings: set --shift"):
        run_command(compare_attention, *words)
    run_command(compare_attention, *words, "--shift", "3")
    record = json.loads((tmp_path / "out" / "comparison.json").read_text())
    full, every, few = (record["rows"][i] for i in range(3))
    assert [row["method"] for row in record["rows"]] == ["full", "video_sparse topk=12", "video_sparse topk=3"] * 2
    assert (every["tiles"], every["density"], few["density"]) == (12, 1, pytest.approx(0.25, abs=0.1))
    assert full["error_l1"] < every["error_l1"] + 1e-6 < few["error_l1"]
    assert record["sampling"]["flow_shift"] == 3
    psnr = [float(row["psnr"]) for row in record["denoising"][1:]]
    assert psnr[0] > psnr[1]


@pytest.mark.usefixtures("no_pictures")
def test_a_secret_reaches_no_file(tmp_path: Path, monkeypatch, no_pictures):
    words = [*FIELDS, *options("video_sparse topk=2"), "--out", tmp_path]
    for secret in (None, "synthetic, seed 0"):
        if secret:
            monkeypatch.setenv("HF_TOKEN", secret)
        run_command(compare_attention, *words)
        for name in ("comparison.json", "comparison.html"):
            text = (tmp_path / name).read_text(encoding="utf-8")
            assert ("synthetic, seed 0" in text) == (secret is None)
            assert ("secret" in text) == (secret is not None)


@pytest.mark.parametrize(
    "calls", [pytest.param(0, marks=pytest.mark.slow), 3], ids=["at once", "beside exact attention"]
)
def test_a_method_that_does_not_fit_into_memory_is_left_out_and_told(tmp_path: Path, monkeypatch, capsys, calls):
    attend, fitting = PooledTail.attend, iter(range(calls))

    def too_large(self, q, k, v, ctx):
        # of noise, which comes after the fields
        if float(q.std()) < 1.05 and next(fitting, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return attend(self, q, k, v, ctx)

    monkeypatch.setattr(PooledTail, "attend", too_large)
    words = [*FIELDS, "--out", tmp_path]
    run_command(compare_attention, *words, *options("pooled_tail topk=2", "video_sparse topk=2"))
    line = "pooled_tail topk=2 is left out on 1 of 2 captures: it did not fit into memory"
    assert line in capsys.readouterr().out
    assert line in Page((tmp_path / "comparison.html").read_text(encoding="utf-8")).texts
    rows = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    assert [(row["capture"], row["method"]) for row in rows] == [
        *(("fields", name) for name in ("full", "pooled_tail topk=2", "video_sparse topk=2")),
        *(("noise", name) for name in ("full", "video_sparse topk=2")),
    ]
    # any other error of a method is an error
    monkeypatch.setattr(PooledTail, "attend", lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        run_command(compare_attention, *words, *options("pooled_tail topk=2"))

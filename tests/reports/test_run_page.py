"""The page of one run: what it says of runs that went well, badly, on or nowhere, and what it leaves alone."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import vsa.reports.run_page as run_page
from tests.reports.fake_runs import write_run
from tests.reports.test_report import EVIL, Page
from vsa.checkpoints.run_folder import locked
from vsa.checkpoints.run_history import note_end, note_start
from vsa.reports.report import report
from vsa.reports.run_charts import run_charts
from vsa.reports.run_page import write_run_page
from vsa.reports.run_tables import faults
from vsa.reports.runs import read_run
from vsa.sampling.sample_writer import DATA_CLIPS

pytestmark = pytest.mark.usefixtures("no_pictures")

HERE = {"cpu": "a processor", "versions": {"torch": "9.8.7"}, "processes": 2}


def add_columns(run: Path, **columns: dict[int, Any]) -> None:
    """Add metrics to a fake run: value by step, of columns named with `__` for `/`."""
    header, *rows = (run / "metrics.csv").read_text().splitlines()
    names = [name.replace("__", "/") for name in columns]
    lines = [",".join([row, *(str(each.get(int(row.split(",")[0]), "")) for each in columns.values())]) for row in rows]
    (run / "metrics.csv").write_text("\n".join([",".join([header, *names]), *lines]) + "\n")


def panels(run: Path) -> dict[str, dict[tuple[str, ...], Any]]:
    return {chart.key: dict(chart.panels) for chart in run_charts(read_run(run))}


def table_of(text: str, title: str) -> list[list[str]]:
    """Cells of the table below a heading of the page, without their markup."""
    section = re.search(rf"<h2>{re.escape(title)}.*?<tbody>(.*?)</tbody>", text, re.DOTALL)
    assert section, title
    rows = re.findall(r"<tr.*?>(.*?)</tr>", section[1], re.DOTALL)
    return [[re.sub(r"<.*?>", " ", cell).strip() for cell in re.findall(r"<td.*?>(.*?)</td>", row)] for row in rows]


@pytest.mark.parametrize(("rows", "told"), [(1, "validation 0.58"), (2, "validation 0.58 to 0.5")])
def test_one_value_is_no_range(rows, told):
    curve = (np.arange(rows), np.array([0.58, 0.5])[:rows])
    run = SimpleNamespace(distilled=False, train=(np.array([]), np.array([])), val=curve)
    assert run_page._first_and_last(cast(Any, run)) == told


def test_a_run_has_a_page_of_its_own(tmp_path: Path):
    run = write_run(tmp_path / "run", prompts=("a red circle", EVIL), seconds=0.5, tokens=200.0)
    note_start(run, step=0, environment=HERE)
    note_end(run, how="stopped", reason="SIGTERM", step=20)
    note_start(run, step=20, environment={**HERE, "cpu": "another one"})
    note_end(run, how="finished", reason="", step=40)
    path = report([run])
    assert path == run / "report.html"
    # one file: no folder of data beside it
    assert not (run / "report").exists()
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    titles = ["Loss", "Clips", "Loss by timestep", "Learning rate and gradients", "Throughput", "Sparsity and recall"]
    titles += ["Cost", "Faults", "Starts and resumes", "Environment"]
    assert [title for title in re.findall(r"<h2>(.*?)</h2>", text) if title in titles] == titles
    assert "finished at step 40 of 40" in page.text
    assert "training 1.414 to 0.495, validation 1 to 0.5" in page.text
    starts = table_of(text, "Starts and resumes")
    assert [[row[2], row[3], row[5].split()[0]] for row in starts] == [["0", "20", "stopped"], ["20", "40", "finished"]]
    assert "SIGTERM" in starts[0][5]
    assert dict(table_of(text, "Environment"))["cpu"] == "a processor; then another one"
    assert dict(table_of(text, "Environment"))["versions"] == "torch 9.8.7"
    # 40 steps of half a second and 200 tokens
    cost = {row[0]: row[1] for row in table_of(text, "Cost")}
    assert (cost["training"], cost["tokens"], cost["executed FLOPs"]) == ("20 s", "8k", "4e+10")
    # text of strangers stays text, and nothing is loaded
    assert [tag for tag, _ in page.elements].count("script") == 3
    assert {str(attrs.get("src", ""))[:5] for tag, attrs in page.elements if tag == "img"} == {"data:"}
    assert not [attrs for _, attrs in page.elements if re.match(r"\s*(\w+:)?//", str(attrs.get("href") or ""))]


def test_settings_that_differ_from_their_defaults_come_first(tmp_path: Path):
    objective = {"_target_": "vsa.diffusion.flow_matching.FlowShift", "kind": "constant", "value": 5.0}
    run = write_run(tmp_path / "run", task__objective__shift=objective, seed=3)
    text = report([run]).read_text(encoding="utf-8")
    assert text.index("Settings of this run") < text.index("Settings left at their defaults")
    own, usual = (dict(table_of(text, f"Settings {part}")) for part in ("of this run", "left at their defaults"))
    assert (own["task.objective.shift.value"], own["seed"], own["attention"]) == ("5.0", "3", "VideoSparseAttention")
    assert usual["flop_budget"] == "null"
    assert not {"run_dir", "name", "logger.csv.root_dir"} & {*own, *usual}
    # a class of strangers is not looked for
    other = write_run(tmp_path / "other", data={"_target_": "antigravity.Flyer", "batch_size": 4})
    assert dict(table_of(report([other]).read_text(), "Settings of this run"))["data"] == "antigravity.Flyer"


def test_curves_are_those_of_the_metrics(tmp_path: Path):
    run = write_run(tmp_path / "run", steps=400)
    add_columns(run, grad_norm__total={4: 1.0, 8: 100.0}, train__loss_decile_3={4: 2.0, 8: 1.0})
    panel_groups = panels(run)
    loss = panel_groups["loss"][("steps",)]
    every, mean, val = loss.series
    assert (every.faint, mean.faint, loss.y_log) == (True, False, True)
    assert (every.x[0], every.x[-1], len(every.x)) == (4, 400, 100)
    # 100 rows: the mean of the last 3
    assert mean.y[-1] == pytest.approx(every.y[-3:].mean())
    assert (val.x[-1], val.y[-1]) == (400, 0.5)
    assert panel_groups["loss"][("flops",)].series[0].x[-1] == 4e11
    last = panel_groups["loss_by_timestep"][("validation",)].series[0]
    assert (last.name, last.x.tolist(), last.y.tolist()) == ("step 400", [0.25, 0.75], [0.25, 0.75])
    assert panel_groups["optimizer"][("gradient norm",)].series[0].y.tolist() == [1.0, 100.0]
    assert panel_groups["throughput"][("seconds a step",)].series[0].y[0] == 0.1
    titles = ["density (share of tiles kept)", "top-k (tiles kept)"]
    assert [key[0] for key in panel_groups["sparsity"]] == [*titles, "recall", "gate_rms"]


def test_a_loss_that_is_not_finite_is_told_and_spoils_no_mean(tmp_path: Path):
    run = write_run(tmp_path / "run", steps=400)
    path = run / "metrics.csv"
    lines = path.read_text().splitlines()
    column = lines[0].split(",").index("train/loss")
    row = lines[50].split(",")
    row[column] = "nan"
    path.write_text("\n".join([*lines[:50], ",".join(row), *lines[51:]]) + "\n")
    mean = panels(run)["loss"][("steps",)].series[1]
    assert len(mean.y) == 99
    assert (mean.y < 2).all()
    assert [fault[:2] for fault in faults(read_run(run))] == [("losses that are not finite", "1")]
    assert "Losses that are not finite: 1" in Page(report([run]).read_text()).text


def test_every_fault_that_was_recorded_is_told(tmp_path: Path):
    run = write_run(tmp_path / "run")
    assert [*faults(read_run(run))] == []
    assert table_of(report([run]).read_text(), "Faults") == [["none", "", "No faults were recorded."]]
    add_columns(
        run,
        skipped_steps={4: 0, 8: 2, 12: 2, 16: 3},
        bad_samples={40: 7},
        bad_samples__checksum={40: 7},
        loss_spikes__rollbacks={20: 1, 40: 1},
    )
    (run / "nan-dumps" / "step-00000007-model").mkdir(parents=True)
    note_start(run, step=0, environment=HERE)
    note_start(run, step=4, environment=HERE)
    note_end(run, how="failed", reason="OSError: no space", step=40)
    faults_by_name = {what: (many, then) for what, many, then in faults(read_run(run))}
    assert {what: many for what, (many, _) in faults_by_name.items()} == {
        "gradients were not finite": "3",
        "bad samples": "7",
        "loss spikes": "1",
        "dumped steps": "1",
        "killed": "1",
        "failed": "1",
    }
    assert "steps 8, 16" in faults_by_name["gradients were not finite"][1]
    assert "checksum 7" in faults_by_name["bad samples"][1]
    assert faults_by_name["failed"][1] == "OSError: no space"
    text = Page(report([run]).read_text()).text
    assert "The run failed: OSError: no space." in text
    assert "killed: no end was recorded" in text


def test_a_run_that_goes_on_and_one_without_metrics_have_pages(tmp_path: Path):
    run = tmp_path / "run"
    with locked(run):
        write_run(run)
        note_start(run, step=0, environment=HERE)
        text = Page(report([run]).read_text()).text
    assert "running at step 40 of 40" in text
    assert "still running" in text
    # the process that ends it holds the folder still
    with locked(run):
        note_end(run, how="finished", reason="", step=40)
        assert read_run(run).status == "finished"
    # the metrics were lost, or nothing was logged
    for metrics, reason in ((None, "metrics.csv is missing"), ("step\n", "no step was logged")):
        (run / "metrics.csv").unlink(missing_ok=True)
        if metrics is not None:
            (run / "metrics.csv").write_text(metrics)
        text = Page(report([run]).read_text()).text
        assert f"finished, {reason}" in text
        assert f"Loss: {reason}." in text
        assert "at step 0" not in text
    with locked(run):
        note_start(run, step=0, environment=HERE)
        assert "running, no step logged yet" in Page(report([run]).read_text()).text
    assert "Clips: none have been sampled" in text


def test_the_step_is_the_one_that_the_run_reached(tmp_path: Path):
    """Losses are logged every few steps; the terminal and the checkpoint say where it stopped."""
    run = write_run(tmp_path / "run", steps=40, trainer__max_steps=60)
    with locked(run):
        note_start(run, step=0, environment=HERE)
        note_end(run, how="stopped", reason="SIGTERM", step=43)
    page = Page(report([run]).read_text())
    assert "stopped at step 43 of 60" in page.text
    assert read_run(run).steps == 43
    # a killed start leaves no record of its end, but its checkpoints, or where it began
    with locked(run):
        note_start(run, step=43, environment=HERE)
    assert read_run(run).steps == 43
    (run / "checkpoints" / "step-00000047").mkdir(parents=True)
    assert "stopped at step 47 of 60" in Page(report([run]).read_text()).text


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ('{"clips": 48, "model": {"colour": 1.0, "shape": 0.625}}', "right in 48 samples: colour 100.0%, shape 62.5%"),
        ('{"clips": 48}', "score.json lacks model"),
        ('["model"]', "score.json holds ['model'], expected an object"),
        ('{"clips": 4', "score.json does not parse"),
        ('{"clips": 48, "model": {"colour": [1]}}', "score.json has model.colour=[1], expected a number"),
        ("[" * 100_000, "score.json is nested more than"),
    ],
)
def test_the_score_of_toy_clips_is_a_fact(tmp_path: Path, written: str, shown: str):
    run = write_run(tmp_path / "run")
    (run / "score.json").write_text(written)
    text = write_run_page(read_run(run)).read_text()
    assert "Toy clips" in text
    assert html.escape(shown) in text


def test_clips_stand_beside_real_ones_of_the_same_caption(tmp_path: Path):
    run = write_run(tmp_path / "run", prompts=("a red circle", "a blue square"))
    gif = run / "samples" / "step-00000040" / "0.gif"
    data = run / DATA_CLIPS
    data.mkdir()
    for name in ("a-codec.gif", "a-original.gif", "b-codec.gif"):
        (data / name).write_bytes(gif.read_bytes())
    clips = [
        {"prompt": "a red circle", "codec": "a-codec.gif", "original": "a-original.gif", "psnr": 30.0},
        {"prompt": "a green cross", "codec": "../elsewhere/b-codec.gif", "psnr": None},
    ]
    (data / "samples.json").write_text(json.dumps({"clips": clips}))
    text = report([run]).read_text(encoding="utf-8")
    pictures = {row[0]: ["img" in cell for cell in row[1:]] for row in _raw_rows(text)}
    assert pictures == {
        "a red circle": [True, True, True],
        "a blue square": [True, False, False],
        "a green cross": [False, False, True],
    }
    assert re.search(r"PSNR of these \d clips 30\.0 dB", text)
    none = write_run_page(read_run(run), out=tmp_path / "none", clips_mb=0).read_text(encoding="utf-8")
    assert "data:image/gif;base64" not in none


def _raw_rows(text: str) -> list[list[str]]:
    section = re.search(r"<h2>Clips.*?<tbody>(.*?)</tbody>", text, re.DOTALL)
    assert section
    return [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", section[1])]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no run in"),
        ({"metrics.csv": "epoch,loss\n1,2\n"}, "has no column step and there is no run.json"),
        ({"metrics.csv": "epoch,step,train_loss\n0,1,2\n"}, "has none of the columns train/loss, "),
        ({"metrics.csv": ""}, "is empty and there is no run.json"),
        ({"metrics.csv": "step,train/loss\n1,abc\n"}, "column train/loss: could not convert string to float: 'abc'"),
        ({"metrics.csv": "step,train/loss\n1,2\n", "config.yaml": "a: [1\n"}, "config.yaml does not parse"),
        ({"run.json": "{}"}, "no run in"),
    ],
)
def test_bad_folders_end_in_one_line(tmp_path: Path, command_line, files: dict[str, str], said: str):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    status, _, err = command_line("report", str(folder))
    assert (status, err.count("\n")) == (1, 1), err
    assert said in err
    assert str(folder) in err
    assert not {"report.html", "loss.png"} & {path.name for path in folder.iterdir()}


def test_a_half_written_run_has_a_page(tmp_path: Path):
    run = write_run(tmp_path / "run", config=False)
    # a kill in the middle of a line, of a checkpoint and of clips
    with open(run / "metrics.csv", "a") as file:
        file.write(",".join(["44", *["0."] * (run / "metrics.csv").read_text().split("\n")[0].count(",")]))
    (run / "checkpoints" / "step-00000040").mkdir(parents=True)
    (run / DATA_CLIPS).mkdir()
    (run / DATA_CLIPS / "samples.json").write_text('{"clips": [')
    (run / "run.json").write_text('{"written_by": "vsa-tr')
    text = report([run]).read_text(encoding="utf-8")
    assert "finished at step 40" in text
    assert "Settings: config.yaml is missing." in text
    assert table_of(text, "Checkpoints")[0][:2] == ["step-00000040", "40"]

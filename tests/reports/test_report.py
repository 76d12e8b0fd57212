"""`vsa report`: a table that tells runs apart, pictures and tables in files, a page that needs nothing else."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from tests.pages.browser import needs_browser, seen
from tests.reports.fake_runs import write_run, write_sweep
from tests.tiny_runs import vsa_command
from vsa.attention.sparge.method import SpargeAttention
from vsa.reports.report import report

FULL = {"attention___target_": "vsa.attention.full.FullAttention", "sparsity__sparsity": 0}


def test_report_draws_the_loss_of_each_run(tmp_path: Path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,train/loss\n10,1.5\n20,0.25\n")
    # stopped before its first logged row, after a validation or before it
    for name, metrics in (("e", "step\n"), ("f", ""), ("g", "step,val/loss\n1,0.125\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(metrics)
    # a distillation has other columns
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "metrics.csv").write_text("step,fake_score/loss,val/gap\n10,1.5,\n20,0.75,0.5\n")
    vsa_command("report", tmp_path)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {name: [row[1:] for row in rows if row[:1] == [name]] for name in "adefg"} == {
        "a": [["20", "0.25", "-", "-"]],
        "d": [["20", "0.75", "0.5", "-"]],
        "e": [["-", "-", "-", "-"]],
        "f": [["-", "-", "-", "-"]],
        "g": [["-", "-", "0.125", "-"]],
    }
    assert all((tmp_path / name / "loss.png").read_bytes().startswith(b"\x89PNG") for name in "abdefg")
    pictures = {path.name for path in (tmp_path / "report").glob("*.png")}
    assert pictures == {"loss-validation-steps.png", "loss-training-steps.png"}
    # not drawn again while its metrics are the same
    before = (tmp_path / "a" / "loss.png").stat().st_mtime_ns
    report([tmp_path / "a"])
    assert (tmp_path / "a" / "loss.png").stat().st_mtime_ns == before
    assert (tmp_path / "a" / "report.html").is_file()


def test_bad_folders_end_in_one_line(tmp_path: Path, command_line):
    (tmp_path / "c").mkdir()
    status, _, err = command_line("report", str(tmp_path / "c"))
    assert (status, err) == (
        1,
        f"error: no run in {tmp_path}/c: metrics.csv is missing there and in every folder below\n",
    )
    status, _, err = command_line("report", str(tmp_path / "gone"))
    assert (status, err.count("\n")) == (1, 1)
    assert "gone is not a folder" in err
    write_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    status, out, err = command_line("report", str(tmp_path / "run"), "--out", str(tmp_path / "file"))
    assert (status, out) == (1, "")
    assert err == f"error: cannot write to {tmp_path}/file/report: {tmp_path}/file is not a writable folder\n"


@pytest.mark.usefixtures("no_pictures")
def test_report_tells_runs_apart_at_80_columns(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    common = tmp_path / "a-folder-of-many-letters-that-all-runs-have-in-common" / "pretrain"
    names = [f"s0.875_tile_2x2x2_lr_0.002_batch_size_64_seed_{seed}" for seed in (1, 2)] + ["other/short"]
    for i, name in enumerate(names):
        (common / name).mkdir(parents=True)
        (common / name / "metrics.csv").write_text(f"step,train/loss\n10,1.5\n20,0.{i + 1}25\n")
    vsa_command("report", *(common / name for name in names))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    first = next(i for i, line in enumerate(lines) if "───" in line) + 1
    table = lines[first : next(i for i, line in enumerate(lines) if i > first and not line.strip())]
    # a name in pieces, one below the other, beside the values of its run
    pieces_by_loss, pieces = {}, []
    for line in table:
        name, *values = line.split()
        if values:
            pieces = []
            pieces_by_loss[values[1]] = pieces
        pieces.append(name)
    names_by_loss = {loss: "".join(parts) for loss, parts in pieces_by_loss.items()}
    assert names_by_loss == {f"0.{i + 1}25": name for i, name in enumerate(names)}
    assert (common / "report.html").is_file()


class Page(HTMLParser):
    """What a browser would make of a page: elements with their attributes, texts, scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        inside = self.elements[-1][0] if self.elements else ""
        (self.scripts if inside == "script" else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


EVIL = "<script>alert(1)</script><img src=http://evil.example/x>"


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three variants of two seeds, with clips, a refused point and names of strangers."""
    folder = tmp_path / "quickstart" / "stages"
    for seed in (0, 1):
        samples = {(f"clip-{i}", i / 10 + seed): 0.5 for i in range(1, 9)}
        worse = {key: loss + key[1] / 100 for key, loss in samples.items()}
        common = {"seed": seed, "prompts": ("a red circle", EVIL), "at": {"half": 0.55, "dense": 0.4}}
        dense = {"loss": 0.5, "topk": 8.0, "seconds": 0.2}
        write_run(folder / f"dense-seed{seed}", sample_losses=samples, **common, **FULL, **dense)
        write_run(folder / f"c_f-seed{seed}", loss=0.52, sample_losses=worse, **common)
        write_run(folder / f"a&b<i>-seed{seed}", loss=0.54, sample_losses=worse, sparsity__sparsity=0.5, **common)
    names = [path.name for path in sorted(folder.iterdir())]
    points = [{"name": name, "control": name.startswith("dense"), "device": "cuda:0"} for name in names]
    reason = f"topk=99 is above the number of tiles, 8 {EVIL}"
    write_sweep(folder, *points, {"name": "k99", "status": "refused", "reason": reason})
    return tmp_path


@pytest.mark.usefixtures("no_pictures")
def test_the_page_holds_what_was_found(sweep: Path, capsys):
    page = Page(report([sweep]).read_text(encoding="utf-8"))
    assert "6 in 3 variants, seeds 0, 1; 1 failed, refused or unreadable" in page.text
    assert "0.1.0 (0123abc): 6 runs" in page.text
    assert "8 samples at 8 noise levels: 6 runs" in page.text
    assert "refused: quickstart/stages/k99: topk=99 is above" in " ".join(capsys.readouterr().out.split())
    titles = [text for text in page.texts if text.strip()]
    order = ["Results", "Loss over what it costs", "Loss and step time", "Loss by timestep", "Recall and gates"]
    order += ["Sampled clips", "Tiles at inference", "Failed, refused and waiting", "All runs", "Not shown"]
    assert [title for title in titles if title in order] == order
    # by loss, with the difference to the control of (1 + ... + 8) / 8 / 1000, and 1 / 100 more in the second seed
    with open(sweep / "report" / "variants.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == ["dense", "c_f", "a&b<i>"]
    assert float(rows[1]["difference"]) == pytest.approx(0.0045 + 0.01 / 2)
    assert [float(row["difference_low"]) > 0 for row in rows[1:]] == [True, True]
    assert [row["control"] for row in rows] == ["True", "False", "False"]
    assert rows[2]["sparsity.sparsity"] == "0.5"
    files = {path.name for path in (sweep / "report").iterdir()}
    csvs = {"loss", "pareto", "loss_by_timestep", "diagnostics", "variants", "runs", "sparsity_points"}
    assert {name for name in files if name.endswith(".csv")} == {f"{name}.csv" for name in csvs}
    with open(sweep / "report" / "loss.csv", newline="") as file:
        curve = [row for row in csv.DictReader(file) if row["run"].endswith("c_f-seed1")]
    assert len(curve) == 10
    assert [row["val_loss"] for row in curve if row["val_loss"]] == ["1.04", "0.52"]
    assert float(curve[-1]["flops"]) == 4e10
    # both prompts of each variant, as data
    gifs = [attrs for tag, attrs in page.elements if tag == "img" and str(attrs["src"]).startswith("data:image/gif")]
    assert [attrs["alt"] for attrs in gifs] == ["a red circle"] * 3 + [EVIL] * 3


@pytest.mark.soak("report pages of hostile names")
@pytest.mark.usefixtures("no_pictures")
def test_text_of_strangers_stays_text(sweep: Path):
    text = report([sweep]).read_text(encoding="utf-8")
    page = Page(text)
    assert EVIL in page.text
    assert "a&b<i>" in page.text
    assert [tag for tag, _ in page.elements].count("script") == 3
    assert {str(attrs.get("src", ""))[:5] for tag, attrs in page.elements if tag == "img"} == {"data:"}
    assert "i" not in {tag for tag, _ in page.elements}
    data = next(script for script in page.scripts if script.startswith("["))
    assert "<" not in data
    names = {trace["label"] for chart in json.loads(data) for panel in chart["panels"] for trace in panel["traces"]}
    assert names == {"dense", "c_f", "a&b<i>", "Pareto front"}


@pytest.mark.usefixtures("no_pictures")
def test_the_page_loads_nothing(sweep: Path):
    text = report([sweep]).read_text(encoding="utf-8")
    page = Page(text)
    for tag, attrs in page.elements:
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            value = attrs.get(name) or ""
            assert not re.match(r"\s*(\w+:)?//", value), (tag, name, value)
        assert tag not in ("link", "iframe", "object", "embed", "base")
    # the library as its package has it; what is ours fetches nothing
    library = get_plotlyjs().replace("\r", "")
    assert library in text
    ours = text.replace(library, "")
    own = ours.replace(json.dumps(EVIL)[1:-1], "")
    assert not re.search(r"\bfetch\(|XMLHttpRequest|\bimport\b\s*[\"'({*]|@import|url\(|WebSocket|sendBeacon", own)
    # and a browser is told to let nothing through
    policy = next(attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv"))
    rules = dict(rule.strip().split(" ", 1) for rule in str(policy).split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data: blob:"
    assert not any("http" in rule or "*" in rule for rule in rules.values())


@pytest.mark.usefixtures("no_pictures")
def test_runs_of_different_data_code_and_validation_are_told(tmp_path: Path):
    samples = {(f"sample-{n}", 0.1): 0.5 for n in range(20)}
    write_run(tmp_path / "a", sample_losses=samples)
    write_run(tmp_path / "b", sample_losses=samples, sparsity__sparsity=0.5)
    same = Page(report([tmp_path]).read_text())
    assert not [attrs for tag, attrs in same.elements if tag == "ul" and attrs["class"] == "careful"]
    write_run(
        tmp_path / "c",
        sample_losses={("c", 0.1): 0.5, ("b", 0.2): 0.6},
        data__toy={"seed": 0, "count": 96},
        commits=("4567def+",),
        steps=20,
        trainer__max_steps=40,
    )
    text = Page(report([tmp_path]).read_text()).text
    assert "The runs were trained on different data: they differ in data.toy.count (48, 96)." in text
    assert "The runs were validated on 2 different sets of samples" in text
    assert "The runs were trained by 2 versions of the code: 0.1.0 (0123abc), 0.1.0 (4567def+)." in text
    assert "Files were changed after the commit in 0.1.0 (4567def+)" in text
    assert "Not all runs have finished (1 stopped)" in text
    assert "other samples" in text


@pytest.mark.usefixtures("no_pictures")
def test_clips_stay_within_their_limit(sweep: Path):
    for most, count in ((20, 6), (0.001, 3), (0, 0)):
        page = Page(report([sweep], out=sweep / "out", clips_mb=most).read_text())
        gifs = [attrs for tag, attrs in page.elements if str(attrs.get("src", "")).startswith("data:image/gif")]
        assert len(gifs) == count, most
    assert not (sweep / "report.html").exists()


@pytest.mark.usefixtures("no_pictures")
def test_a_sweep_without_a_run_has_a_page(tmp_path: Path):
    with pytest.raises(ValueError, match="is training-free") as error_info:
        SpargeAttention(dim=8, num_heads=1, head_dim=8).refuse_training()
    write_sweep(tmp_path / "s", {"name": "a", "status": "refused", "reason": str(error_info.value)})
    text = Page(report([tmp_path / "s"]).read_text()).text
    assert "attention=sparge is training-free" in text
    assert "No run has metrics yet." in text


@needs_browser
@pytest.mark.parametrize("width", [400, 1400])
def test_a_browser_without_a_network_draws_the_page(sweep: Path, width: int):
    facts = seen(
        report([sweep]),
        "const plots = [...inside.querySelectorAll('.plot')]; return {"
        "scroll: inside.documentElement.scrollWidth, plots: plots.map(plot => plot.querySelectorAll('.trace').length),"
        "widths: plots.map(plot => plot.querySelector('.main-svg').getBoundingClientRect().width),"
        "pictures: inside.querySelectorAll('figure img').length,"
        "legends: inside.querySelectorAll('.legend button').length,"
        "loaded: inside.defaultView.performance.getEntriesByType('resource').map(each => each.name)}",
        width=width,
    )
    assert facts["scroll"] <= width
    assert len(facts["plots"]) == 4
    assert all(facts["plots"])
    assert all(width * 0.6 < each <= width for each in facts["widths"])
    # the pictures gave way to the plots
    assert (facts["pictures"], facts["legends"] > 8) == (0, True)
    assert [name for name in facts["loaded"] if not name.startswith("data:")] == []

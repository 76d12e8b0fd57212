"""The race: tables from archives, and the rule by which variants are ranked."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.race import legs, points, tables, training
from benchmarks.race.archive import finished, pack, unpacked
from benchmarks.race.legs import LEGS, archive
from benchmarks.race.ranking import Row, ranked
from benchmarks.world import score
from tests.limits import HANGS
from vsa.reports.runs import Run, find_runs
from vsa.reports.statistics import t_p_value, t_quantile
from vsa.sweeps.job_queue import Slot

RUNS = legs.RAW / "ablation-score-tail-forms.tar.xz"
# docs/benchmarks/ablation.md, "Forms of score and tail"
MEANS = {"tail_twice": 0.2432, "no_tail": 0.2437, "tail_softmax": 0.2453}


@pytest.fixture
def folders(tmp_path, monkeypatch) -> Path:
    """Empty folders of runs and archives."""
    monkeypatch.setattr(legs, "RAW", tmp_path)
    monkeypatch.setattr(legs, "OUT", tmp_path / "race")
    return tmp_path


@pytest.fixture
def ablation(folders) -> Path:
    """18 runs of the ablation as those of a leg, packed."""
    with tarfile.open(RUNS) as old, tarfile.open(archive("scratch"), "w:xz") as new:
        for member in old.getmembers():
            content, parts = old.extractfile(member), member.name.split("/")
            if content is not None and len(parts) == 3:
                member.name = f"scratch/{parts[1]}-seed{parts[0][-1]}/{parts[2]}"
                new.addfile(member, io.BytesIO(content.read()))
    return folders


def test_tables_come_from_archives(ablation):
    variants = finished("scratch")
    assert {len(runs) for runs in variants.values()} == {3}
    rows = ranked(variants, "no_tail")
    assert [row.loss for row in rows] == sorted(row.loss for row in rows)
    for name, loss in MEANS.items():
        assert next(row for row in rows if row.name == name).loss == pytest.approx(loss, abs=5e-5)
    # as the page says: no form is told from another by every seed
    assert {row.verdict for row in rows} == {"level", ""}
    lines = [*tables.table("scratch")]
    assert len(lines) == 2 * (2 + len(variants)) + 1
    assert lines[2].startswith("| tail_twice | 955 |")
    with pytest.raises(ValueError, match="long has no finished run in"):
        list(tables.table("long"))


@pytest.mark.parametrize("name", [name for name in LEGS if archive(name).is_file()])
def test_tables_of_published_archives(name, monkeypatch, tmp_path):
    monkeypatch.setattr(legs, "OUT", tmp_path)
    lines = [*tables.table(name)]
    page = (Path(__file__).parents[2] / "docs" / "race.md").read_text(encoding="utf-8")
    # the page has every line of the first table
    first = lines[: lines.index("")] if "" in lines else lines
    assert [line for line in first if line not in page] == []
    assert len(first) > 2


def test_the_page_has_step_times_measured_alone(ablation, monkeypatch):
    monkeypatch.setattr(tables, "step_times", lambda name: {"no_tail": (50.0, 20.0)})
    reported: list[list[Path]] = []
    monkeypatch.setattr(tables, "report", reported.append)
    tables.page("scratch")
    assert reported == [[ablation / "race" / "pages" / "scratch"]]
    before = finished("scratch")
    after = {run.folder.name: run for run in find_runs([ablation / "race" / "pages" / "scratch"])[1]}
    for name, runs in before.items():
        one, own = runs[0], after[runs[0].folder.name]
        assert own.step_seconds == pytest.approx(0.05 if name == "no_tail" else one.step_seconds)
        tokens = one.metrics[tables.SPEED][1] * one.metrics[tables.SECONDS][1]
        assert own.metrics[tables.SPEED][1] * own.metrics[tables.SECONDS][1] == pytest.approx(tokens)
        assert own.val_loss == one.val_loss


def test_runs_are_packed_once_they_are_finished_and_scored(ablation):
    before = finished("scratch")
    there = unpacked("scratch")
    runs = ablation / "race" / "scratch"
    for name in ("tail_twice-seed0", "tail_lse-seed0", "no_tail-seed0"):
        shutil.copytree(there / name, runs / name)
    archive("scratch").unlink()
    (runs / "tail_twice-seed0" / "score.json").write_text('{"scores": {"clips": {"colour": 0.5}}}')
    # one without scores, and one that was stopped
    (runs / "no_tail-seed0" / "score.json").write_text("{}")
    starts = json.loads((runs / "no_tail-seed0" / "run.json").read_text())
    starts["starts"] = [{"how": "stopped"}]
    (runs / "no_tail-seed0" / "run.json").write_text(json.dumps(starts))
    assert [*pack()] == [f"{archive('scratch')}: 1 runs more, 1 in all"]
    assert archive("scratch").stat().st_size < 12_000
    assert [*pack()] == []
    # numbers are those of the run, to six digits
    again, first = finished("scratch")["tail_twice"][0], before["tail_twice"][0]
    assert again.val_loss == pytest.approx(first.val_loss, rel=1e-5)
    assert again.validation["half"] == pytest.approx(
        {(name, float(f"{level:.6g}")): loss for (name, level), loss in first.validation["half"].items()}, rel=1e-5
    )
    # what is not scored is added if it is asked for, and has no scores then
    assert [*pack(unscored=True)] == [f"{archive('scratch')}: 1 runs more, 2 in all"]
    variants = finished("scratch")
    assert {name: tables.scores_of(runs[0]) for name, runs in variants.items()} == {
        "tail_twice": {"colour": 0.5},
        "tail_lse": {},
    }


@pytest.mark.slow
def test_commands_beside_each_other_read_one_archive(ablation):
    here = unpacked("scratch")
    files = {path.relative_to(here): path.stat().st_ctime_ns for path in here.rglob("*")}
    code = "from benchmarks.race import archive, legs; from pathlib import Path; import sys\n"
    code += "legs.RAW = Path(sys.argv[1]); legs.OUT = legs.RAW / 'race'\n"
    code += "print(len(list(archive.unpacked('scratch').rglob('*'))))"
    done = subprocess.run([sys.executable, "-c", code, ablation], capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(files) > 18
    assert {path.relative_to(here): path.stat().st_ctime_ns for path in here.rglob("*")} == files


def test_a_seed_of_finetuning_is_packed_whole(folders):
    for name in points.points("finetune", [0]):
        run = folders / "race" / "finetune" / name
        run.mkdir(parents=True)
        for file in ("run.json", "score.json"):
            (run / file).write_text("{}")
    run.rename(run.with_name("later"))
    assert [*pack()] == []
    run.with_name("later").rename(run)
    count = len(points.variants("finetune"))
    assert [*pack()] == [f"{archive('finetune')}: {count} runs more, {count} in all"]


def test_later_legs_take_rates_and_variants_from_earlier_ones(folders, monkeypatch):
    with pytest.raises(ValueError, match="learning rates come from the leg rates"):
        points.points("scratch", [0])
    tried = points.points("rates", [9])
    assert len(tried) == 3 * len(points.variants("rates"))
    budget = list(LEGS["rates"].settings)
    assert tried["dense-lr0.002-seed9"] == [*budget, "attention=full", "seed=9", "optim.lr=0.002"]
    best = {name: legs.RATES[i % 3] for i, name in enumerate(points.variants("rates"))}
    monkeypatch.setattr(points, "best_rates", lambda: best)
    own = points.points("scratch", [0, 1])
    assert [*own][: len(best)] == [f"{name}-seed0" for name in best]
    rest = ["attention=vsa2", "tile_thw=[4,4,8]", "seed=1", f"optim.lr={best['vsa2']}"]
    assert own["vsa2-seed1"] == [*LEGS["scratch"].settings, *rest]
    # at the rate of the leg, from the dense run of its seed
    start = f"init_from={folders / 'race' / 'start' / 'dense-seed2'}"
    dense = points.points("finetune", [2])["dense-seed2"]
    assert dense == [*LEGS["finetune"].settings, "attention=full", "seed=2", start]
    with pytest.raises(ValueError, match="second trains the best of scratch, of which runs are missing"):
        points.points("second", [0])


FAKE = """
import json, pathlib, sys, time
run = pathlib.Path(sys.argv[2])
run.mkdir(parents=True, exist_ok=True)
(run / "argv").write_text(json.dumps(sys.argv[3:]))
if run.name.startswith("{slow}"):
    time.sleep(60)
(run / "run.json").write_text("{{}}")
(run / "score.json").write_text("{{}}")
sys.exit(run.name.startswith("{bad}"))
"""


@pytest.fixture
def fake(folders, monkeypatch):
    """Runs that only write their files; the learning rate of all is 2e-3."""
    rates = dict.fromkeys(LEGS["scratch"].variants, 2e-3)
    monkeypatch.setattr(points, "best_rates", lambda: rates)
    monkeypatch.setattr(training, "best_rates", lambda: rates)
    own = training._command

    def setup(*, bad: str = "none", slow: str = "none") -> None:
        script = folders / "fake.py"
        script.write_text(FAKE.format(bad=bad, slow=slow))
        monkeypatch.setattr(
            training,
            "_command",
            lambda *args, **kwargs: [sys.executable, str(script), *own(*args, **kwargs)[3:]],
        )

    return setup


def ran(folder: Path) -> dict[str, list[str]]:
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/argv")}


def test_what_the_archive_and_the_folder_have_is_not_trained_again(folders, fake, capsys):
    fake()
    training.train("scratch", [0], 1)
    first = ran(folders / "race" / "scratch")
    assert {*first} == {f"{name}-seed0" for name in LEGS["scratch"].variants}
    clips, *words = first["sla-seed0"]
    assert clips == str(legs.CLIPS)
    assert {"seed=0", "optim.lr=0.002", "run=sla-seed0", *legs.COMMON, *LEGS["scratch"].settings} <= {*words}
    for argv in folders.glob("race/scratch/*/argv"):
        argv.unlink()
    (folders / "race" / "scratch" / "sla-seed0" / "score.json").unlink()
    training.train("scratch", [0], 1)
    assert [*ran(folders / "race" / "scratch")] == ["sla-seed0"]
    assert len([*pack()]) == 1
    shutil.rmtree(folders / "race" / "scratch")
    assert "nothing" not in capsys.readouterr().out
    training.train("scratch", [0], 1)
    assert ran(folders / "race" / "scratch") == {}
    assert capsys.readouterr().out == "scratch: nothing to train with seeds 0\n"


def test_runs_without_scores_are_made_once_more_for_them(ablation, fake, monkeypatch):
    """The loss stays that of the first run; the table has the scores of the second."""
    fake()
    names = {"no_tail": ["attention=video_sparse"], "tail_lse": ["attention=full"]}
    monkeypatch.setattr(points, "variants", lambda name: names)
    monkeypatch.setattr(points, "best_rates", lambda: dict.fromkeys(names, 2e-3))
    first, there, before = finished("scratch"), unpacked("scratch"), [*tables.table("scratch")]
    for run in there.glob("no_tail-seed*"):
        (run / "score.json").write_text('{"scores": {"clips": {"colour": 0.25, "shape": 0, "motion": 0, "camera": 0}}}')
    with tarfile.open(archive("scratch"), "w:xz") as tar:
        for path in there.glob("*/*"):
            tar.add(path, f"scratch/{path.parent.name}/{path.name}")
    assert len(points.unscored("scratch")) == 18 - 3
    assert points.to_go("again") == 15
    own = points.points("scratch", [0, 1])
    assert points.points("again", [0, 1]) == {key: own[key] for key in ("tail_lse-seed0", "tail_lse-seed1")}
    training.train("again", [0, 1], 1)
    folder = ablation / "race" / "again"
    assert {*ran(folder)} == {"tail_lse-seed0", "tail_lse-seed1"}
    # real runs in their place, one with the loss of the first run
    shutil.rmtree(folder)
    for seed, source in ((0, "tail_lse-seed0"), (1, "tail_softmax-seed1")):
        shutil.copytree(there / source, folder / f"tail_lse-seed{seed}")
        scores = {"scores": {"clips": {"colour": 0.5 + seed / 10, "shape": 0.0, "motion": 0.0, "camera": 0.0}}}
        (folder / f"tail_lse-seed{seed}" / "score.json").write_text(json.dumps(scores))
    manifest = folder / "tail_lse-seed1" / "run.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "commits": ["later"]}))
    # a repeat without scores is of no use
    shutil.copytree(there / "tail_lse-seed2", folder / "tail_lse-seed2")
    assert [*pack(unscored=True)] == [f"{archive('again')}: 2 runs more, 2 in all"]
    assert points.to_go("again") == 13
    lines = [*tables.table("scratch")]
    end = lines.index("")
    assert lines[:end] == before[:end]
    details = {line.split()[1]: line for line in lines[end:] if line.startswith("| ")}
    assert "| 2 of 3, 2 of repeats | 55.0% |" in details["tail_lse"]
    assert "| 3 of 3 | 25.0% |" in details["no_tail"]
    old, new = first["tail_lse"][1].val_loss, first["tail_softmax"][1].val_loss
    assert old is not None
    assert new is not None
    heads, _, same, other, empty, noise, *versions = tables.table("again")
    assert empty == ""
    assert versions == ["tail_lse-seed1: runs of 2 versions of the code, de755b8b, later"]
    assert "tail_lse: runs of 2 versions of the code, de755b8b, later" in lines
    assert heads == "| run | loss | once more | apart |"
    assert same.endswith("0.0000 |")
    assert other == f"| tail_lse-seed1 | {old:.4f} | {new:.4f} | {new - old:+.4f} |"
    # two differences, one of them 0
    assert noise == f"standard deviation of a run: {abs(new - old) / 2:.4f}"


def test_finetuning_begins_with_the_dense_run_of_each_seed(folders, fake):
    fake()
    training.train("finetune", [1, 2], 1)
    starts = ran(folders / "race" / "start")
    assert {*starts} == {"dense-seed1", "dense-seed2"}
    clips, *words = starts["dense-seed2"]
    assert clips == "0"
    assert {"seed=2", "attention=full", "flop_budget=2e16", "optim.lr=0.002"} <= {*words}
    for name, (_, *own) in ran(folders / "race" / "finetune").items():
        assert f"init_from={folders}/race/start/dense-seed{name[-1]}" in own


def test_a_failed_run_stops_no_other_and_is_said(folders, fake, capsys):
    fake(bad="window")
    with pytest.raises(SystemExit) as stop:
        training.train("scratch", [0], 1)
    assert stop.value.code == 1
    assert len(ran(folders / "race" / "scratch")) == len(LEGS["scratch"].variants)
    assert "failed window-seed0: exit status 1" in capsys.readouterr().out


def test_a_signal_ends_the_runs(folders, fake, monkeypatch, capsys):
    fake(slow="vsa_64")
    monkeypatch.setattr(training, "slots_of", lambda *_: [Slot("the only one")])

    def once_it_runs() -> None:
        deadline = time.monotonic() + HANGS
        while not list(folders.glob("race/scratch/vsa_64-seed0/argv")) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=once_it_runs)
    thread.start()
    with pytest.raises(SystemExit) as stop:
        training.train("scratch", [0], 1)
    thread.join()
    assert stop.value.code == 128 + signal.SIGTERM
    assert "stopped vsa_64-seed0" in capsys.readouterr().out
    # the others did not start
    assert [*ran(folders / "race" / "scratch")] == ["vsa_64-seed0"]


def test_a_run_goes_on_and_its_clips_take_the_place_of_its_process(tmp_path, monkeypatch):
    launched, replaced = [], []
    monkeypatch.setattr("vsa.training.launch.launch", launched.append)
    monkeypatch.setattr(os, "execv", lambda program, words: replaced.append(words))
    training.train_one(tmp_path, 0, ["seed=1"])
    assert (launched, replaced) == ([["seed=1"]], [])
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    training.train_one(tmp_path, 256, ["seed=1"])
    assert launched[1:] == [["seed=1", "ckpt_path=last"]]
    args = score.parse_args(replaced[0][3:])
    assert (args.clips, args.steps, args.compile, args.clips_or_run) == (256, legs.STEPS, True, tmp_path)
    # finished: only its clips are missing
    (tmp_path / "run.json").write_text("{}")
    training.train_one(tmp_path, 256, ["seed=1"])
    assert (len(launched), len(replaced)) == (2, 2)


def test_step_times_tell_the_gpu_from_the_host(folders, monkeypatch):
    run = folders / "vsa_64-seed9"
    run.mkdir()
    kinds = {"linear layers": 3.0, "optimizer": 1.0, "host: launches and Python": 5.0, "waiting for data": 2.0}
    parts = {kind: {"milliseconds": ms, "floor": None} for kind, ms in kinds.items()}
    (run / "profile.json").write_text(json.dumps({"milliseconds": 8.5, "kinds": parts}))

    class Folder:
        folder = run

    own = {"times": {"vsa_64": [Folder]}, "times_long": {"dense": [Folder]}}
    monkeypatch.setattr(tables, "finished", lambda name: own.get(name, {}))
    assert tables.step_times("scratch") == tables.step_times("second") == {"vsa_64": (8.5, 4.0)}
    assert [*tables.table("times")][2:] == ["| vsa_64 | 8.5 | 4.0 |"]
    # other tokens, other losses
    assert tables.step_times("long") == {"dense": (8.5, 4.0)}
    assert tables.step_times("finetune") == {}


def test_a_variant_ranks_if_every_seed_says_so_and_noise_does_not_explain_it(ablation):
    variants = finished("scratch")

    def shifted_by(*by: float) -> Row:
        def worse(run: Run, by: float) -> Run:
            steps, losses = run.metrics["val/loss"]
            return replace(run, metrics={**run.metrics, "val/loss": (steps, losses + by)})

        shifted = [worse(run, x) for run, x in zip(variants["no_tail"], by, strict=True)]
        return next(row for row in ranked({**variants, "shifted": shifted}, "no_tail") if row.name == "shifted")

    assert shifted_by(0.02, 0.03, 0.02).verdict == "behind"
    assert shifted_by(-0.02, -0.03, -0.02).verdict == "before"
    # one seed says otherwise; all agree, within the noise of the other variants
    assert shifted_by(0.03, 0.04, -0.001).verdict == "level"
    assert shifted_by(0.003, 0.004, 0.002).verdict == "level"


def test_the_noise_is_what_variant_and_seed_do_not_explain(ablation):
    variants = finished("scratch")
    row = next(row for row in ranked(variants, "no_tail") if row.name == "tail_lse")
    table = [[run.val_loss for run in runs] for runs in variants.values()]
    # ordinary least squares on dummies of variants and seeds
    design = np.array([[*np.eye(6)[v], *np.eye(3)[s]] for v in range(6) for s in range(3)])
    flat = np.array(table).ravel()
    fit = np.linalg.lstsq(design, flat, rcond=None)[0]
    error = np.sqrt(2 / 3 * ((flat - design @ fit) ** 2).sum() / 10)
    assert row.reach == pytest.approx(t_quantile(10) * error)
    # six comparisons less the reference; the largest of the differences is corrected by all five
    p = t_p_value(float(np.mean(row.apart)) / error, 10)
    assert row.p is not None
    assert p < row.p <= min(1, 5 * p)


def test_missing_runs_are_counted(ablation):
    lines = [*points.missing()]
    runs = len(points.variants("scratch")) * 3
    assert any(line.startswith(f"scratch    {runs - 18:4} of {runs} runs") for line in lines)
    assert {line.split()[0] for line in lines} == {*LEGS, "all"}

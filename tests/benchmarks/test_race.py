"""The race: tables from archives, and the rule by which variants are ranked."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import race
from vsa.reports.runs import Run
from vsa.reports.statistics import t_p_value, t_quantile

RUNS = race.RAW / "ablation-score-tail-forms.tar.xz"
# docs/benchmarks/ablation.md, "Forms of score and tail"
MEANS = {"tail_twice": 0.2432, "no_tail": 0.2437, "tail_softmax": 0.2453}


@pytest.fixture
def folders(tmp_path, monkeypatch) -> Path:
    """18 runs of the ablation as those of a leg, packed."""
    monkeypatch.setattr(race, "RAW", tmp_path)
    monkeypatch.setattr(race, "OUT", tmp_path / "race")
    with tarfile.open(RUNS) as old, tarfile.open(race.archive("scratch"), "w:xz") as new:
        for member in old.getmembers():
            content, parts = old.extractfile(member), member.name.split("/")
            if content is not None and len(parts) == 3:
                member.name = f"scratch/{parts[1]}-seed{parts[0][-1]}/{parts[2]}"
                new.addfile(member, io.BytesIO(content.read()))
    return tmp_path


def test_tables_come_from_archives(folders):
    variants = race.finished("scratch")
    assert {len(runs) for runs in variants.values()} == {3}
    rows = race.ranked(variants, "no_tail")
    assert [row.loss for row in rows] == sorted(row.loss for row in rows)
    for name, loss in MEANS.items():
        assert next(row for row in rows if row.name == name).loss == pytest.approx(loss, abs=5e-5)
    # as the page says: no form is told from another by every seed
    assert {row.verdict for row in rows} == {"level", ""}
    lines = [*race.table("scratch")]
    assert len(lines) == 2 * (2 + len(variants)) + 1
    assert lines[2].startswith("| tail_twice | 955 |")


def test_runs_are_packed_once_they_are_finished_and_scored(folders):
    before = race.finished("scratch")
    runs = folders / "race" / "archives" / "scratch"
    (folders / "race" / "scratch").mkdir()
    for name in ("tail_twice-seed0", "tail_lse-seed0", "no_tail-seed0"):
        (runs / name).rename(folders / "race" / "scratch" / name)
    race.archive("scratch").unlink()
    runs = folders / "race" / "scratch"
    (runs / "tail_twice-seed0" / "score.json").write_text('{"scores": {}}')
    # one without scores, and one that was stopped
    (runs / "no_tail-seed0" / "score.json").write_text("{}")
    starts = json.loads((runs / "no_tail-seed0" / "run.json").read_text())
    starts["starts"] = [{"how": "stopped"}]
    (runs / "no_tail-seed0" / "run.json").write_text(json.dumps(starts))
    assert [*race.pack()] == [f"{race.archive('scratch')}: 1 runs more, 1 in all"]
    assert race.archive("scratch").stat().st_size < 12_000
    assert [*race.pack()] == []
    # numbers are those of the run, to six digits
    again, first = race.finished("scratch")["tail_twice"][0], before["tail_twice"][0]
    assert again.val_loss == pytest.approx(first.val_loss, rel=1e-5)
    assert again.validation["half"] == pytest.approx(
        {(name, float(f"{level:.6g}")): loss for (name, level), loss in first.validation["half"].items()}, rel=1e-5
    )
    # what comes later is added
    (runs / "tail_lse-seed0" / "score.json").write_text("{}")
    assert [*race.pack()] == [f"{race.archive('scratch')}: 1 runs more, 2 in all"]
    assert race.finished("scratch").keys() == {"tail_twice", "tail_lse"}


def test_a_seed_of_finetuning_is_packed_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(race, "RAW", tmp_path)
    monkeypatch.setattr(race, "OUT", tmp_path / "race")
    for name in race.points("finetune", [0]):
        run = tmp_path / "race" / "finetune" / name
        run.mkdir(parents=True)
        for file in ("run.json", "score.json"):
            (run / file).write_text("{}")
    run.rename(run.with_name("later"))
    assert [*race.pack()] == []
    run.with_name("later").rename(run)
    count = len(race.variants("finetune"))
    assert [*race.pack()] == [f"{race.archive('finetune')}: {count} runs more, {count} in all"]


def test_later_legs_take_rates_and_variants_from_earlier_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(race, "RAW", tmp_path)
    monkeypatch.setattr(race, "OUT", tmp_path / "race")
    with pytest.raises(ValueError, match="learning rates come from the leg rates"):
        race.points("scratch", [0])
    tried = race.points("rates", [9])
    assert len(tried) == 3 * len(race.variants("rates"))
    assert tried["dense-lr0.002-seed9"] == ["attention=full", "seed=9", "optim.lr=0.002"]
    best = {name: race.RATES[i % 3] for i, name in enumerate(race.variants("rates"))}
    monkeypatch.setattr(race, "best_rates", lambda: best)
    points = race.points("scratch", [0, 1])
    assert [*points][: len(best)] == [f"{name}-seed0" for name in best]
    assert points["vsa2-seed1"] == ["attention=vsa2", "tile_thw=[4,4,8]", "seed=1", f"optim.lr={best['vsa2']}"]
    # at the rate of the leg
    assert race.points("finetune", [2])["dense-seed2"] == ["attention=full", "seed=2"]
    with pytest.raises(ValueError, match="second trains the best of scratch, of which runs are missing"):
        race.points("second", [0])


def test_a_variant_ranks_if_every_seed_says_so_and_noise_does_not_explain_it(folders):
    variants = race.finished("scratch")

    def ranked(*by: float) -> race.Row:
        def worse(run: Run, by: float) -> Run:
            steps, losses = run.metrics["val/loss"]
            return replace(run, metrics={**run.metrics, "val/loss": (steps, losses + by)})

        shifted = [worse(run, x) for run, x in zip(variants["no_tail"], by, strict=True)]
        return next(row for row in race.ranked({**variants, "shifted": shifted}, "no_tail") if row.name == "shifted")

    assert ranked(0.02, 0.03, 0.02).verdict == "behind"
    assert ranked(-0.02, -0.03, -0.02).verdict == "before"
    # one seed says otherwise; all agree, within the noise of the other variants
    assert ranked(0.03, 0.04, -0.001).verdict == "level"
    assert ranked(0.003, 0.004, 0.002).verdict == "level"


def test_the_noise_is_what_variant_and_seed_do_not_explain(folders):
    variants = race.finished("scratch")
    row = next(row for row in race.ranked(variants, "no_tail") if row.name == "tail_lse")
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


def test_missing_runs_are_counted(folders):
    lines = [*race.missing()]
    runs = len(race.variants("scratch")) * 3
    assert any(line.startswith(f"scratch    {runs - 18:4} of {runs} runs") for line in lines)
    assert {line.split()[0] for line in lines} == {*race.LEGS, "all"}

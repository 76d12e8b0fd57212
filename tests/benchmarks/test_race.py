"""The race: tables from archives, and the rule by which variants are ranked."""

from __future__ import annotations

import io
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
            content = old.extractfile(member)
            if content is not None:
                member.name = member.name.replace("score_tail_forms_s", "scratch-")
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
    # what runs make is what archives hold
    packed = race.archive("scratch").read_bytes()
    assert [*race.pack()] == [f"21 folders in {race.archive('scratch')}"]
    assert race.archive("scratch").read_bytes() != packed
    assert race.finished("scratch").keys() == variants.keys()


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
    runs = len(race.LEGS["scratch"].variants) * 3
    assert any(line.startswith(f"scratch    {runs - 18:4} of {runs} runs") for line in lines)
    assert {line.split()[0] for line in lines} == {*race.LEGS, "all"}

"""`vsa report`: pictures in the folders, a table that tells runs apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_runs import vsa_command


def test_report_draws_the_loss_of_each_run(tmp_path: Path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,train/loss\n10,1.5\n20,0.25\n")
    # stopped before its first logged row, after a validation or before it
    for name, metrics in (("e", "step\n"), ("f", ""), ("g", "step,val/loss\n1,0.125\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(metrics)
    vsa_command("report", *(str(tmp_path / name) for name in "aefgb"))
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {name: [row[1:] for row in shown if row[:1] == [name]] for name in "aefg"} == {
        "a": [["20", "0.25", "-", "-"]],
        "e": [["-", "-", "-", "-"]],
        "f": [["-", "-", "-", "-"]],
        "g": [["-", "-", "0.125", "-"]],
    }
    vsa_command("report", str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "a" / "loss.png").is_file()
    assert (tmp_path / "b" / "loss.png").is_file()
    assert "0.25" in capsys.readouterr().out
    # a distillation has other columns
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "metrics.csv").write_text("step,fake_score/loss,val/gap\n10,1.5,\n20,0.75,0.125\n")
    vsa_command("report", str(tmp_path / "d"))
    shown = capsys.readouterr().out
    assert "0.75" in shown
    assert "0.125" in shown
    assert (tmp_path / "d" / "loss.png").is_file()
    with pytest.raises(ValueError, match=r"c is not a run folder: metrics\.csv is missing"):
        vsa_command("report", str(tmp_path / "c"))


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

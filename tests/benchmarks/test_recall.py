"""`python -m scripts.recall`: recall of ways to cut and to rank tiles."""

from __future__ import annotations

import json

import pytest
import torch

from scripts.recall import main, measure, of_run, smooth_fields, variants
from vsa.attention.full import dense_attn


@pytest.mark.filterwarnings("ignore:tiles .* are .* full")
def test_recall_is_the_mass_of_dense_attention_on_the_selected_tiles():
    grid, tile = (4, 4, 4), (2, 2, 2)
    (recorded,) = smooth_fields(grid, 2, 8)
    row = measure({"tile_thw": tile}, [recorded], 0.75, 64)
    # by definition: values that mark a tile, attention that sums them
    ids = torch.arange(64).view(grid)
    tiles = [ids[t : t + 2, h : h + 2, w : w + 2].flatten() for t in (0, 2) for h in (0, 2) for w in (0, 2)]
    marks = torch.zeros(1, 64, 2, 8)
    for n, tokens in enumerate(tiles):
        marks[:, tokens, :, n] = 1
    mass = dense_attn(recorded.q, recorded.k, marks)
    kept = 0.0
    for tokens in tiles:
        q_mean = recorded.q[:, tokens].mean(1)
        k_mean = torch.stack([recorded.k[:, members].mean(1) for members in tiles], dim=1)
        best = torch.einsum("bhd,bnhd->bhn", q_mean, k_mean).topk(2).indices
        kept += float(mass[:, tokens].transpose(1, 2).gather(3, best[:, :, None].expand(-1, -1, 8, -1)).sum() / 128)
    assert row["recall"] == pytest.approx(kept, abs=1e-5)
    assert (row["pairs"], row["topk"], row["fill"]) == (0.25, 2, 1.0)
    # fields are smooth: more than a selection at random would hold, less than all
    assert 0.3 < row["recall"] < 0.95
    everything = measure({"tile_thw": tile}, [recorded], 0, 64)
    assert everything["recall"] == pytest.approx(1, abs=1e-5)


@pytest.mark.filterwarnings("ignore:tiles .* are .* full")
def test_every_way_is_measured_on_a_run(tiny_run_dir, tmp_path, capsys):
    recorded = of_run(str(tiny_run_dir), clips=1, steps=3)
    # two layers at three steps
    assert [tuple(r.q.shape[1:]) for r in recorded] == [(64, 2, 16)] * 6
    main(["--grid", "3", "5", "6", "--tile", "2", "2", "2", "--tokens", "16", "--out", str(tmp_path / "r.json")])
    report = json.loads((tmp_path / "r.json").read_text())
    assert set(report["rows"]) == set(variants((2, 2, 2), (3, 5, 6)))
    assert all(0 < row["recall"] <= 1 for row in report["rows"].values())
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(report["rows"])

"""Lists of a trained model for `scripts/bench`, and lists with the same statistics for other grids."""

from __future__ import annotations

import importlib
import itertools
import json
from dataclasses import replace

import pytest
import torch

from scripts.bench.captured import (
    Rankings,
    captured_lists,
    listed_shares,
    overlaps,
    read_rankings,
    synthesised_lists,
)
from tests.kernels.benching import FAST
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment, TileLayout
from vsa.evaluation.attention_map import record_attention
from vsa.evaluation.comparison.runs import RunModel
from vsa.sampling.pipeline import encode_prompts, load_run

GRID = (4, 4, 4)
SIZES = ("data.toy.size=[16,64,64]", "attention.tile_thw=[2,2,2]", "sparsity.sparsity=0.75", "trainer.max_steps=2")
# of the trained run: the tiles of the model, larger ones, and ragged ones
TILES = ("2x2x2", "2x2x4", "3x2x3")


@pytest.fixture
def saved(training, bench, capsys, tmp_path):
    """A tiny trained run and the file of its lists."""
    training(*SIZES)
    path = tmp_path / "lists.safetensors"
    bench.main(["capture", str(training.folder()), "--out", str(path), "--tiles", *TILES])
    assert f"{path}: 2 layers of 1 heads, step 2 of run default, clip " in capsys.readouterr().out
    return training.folder(), path


def _structured(grid, tile, heads: int = 3) -> torch.Tensor:
    """Rankings of heads that prefer near tiles, some tiles more than others."""
    layout = TileLayout.build([Segment(grid)], tile_thw=tile)
    problems = importlib.import_module("scripts.bench.problems")
    shape = problems.Shape(name="x", grid_thw=grid, tile_thw=tile, heads=heads, head_dim=8, topk=1)
    centres, g = problems.tile_centres(shape, layout), torch.Generator().manual_seed(0)
    num = layout.num_blocks
    popular = torch.arange(1, heads + 1)[:, None, None] * torch.randn(heads, 1, num, generator=g)
    scores = popular - torch.cdist(centres, centres) + torch.randn(heads, num, num, generator=g) / 2
    return scores.argsort(-1, descending=True).short()


def _loops(lists: torch.Tensor) -> tuple[list[list[float]], list[list[float]]]:
    """Overlaps of neighbouring rows, and ascending shares of the rows that list each column."""
    shared, listed = [], []
    for head in lists.tolist():
        shared.append([len(set(a) & set(b)) / len(a) for a, b in itertools.pairwise(head)])
        listed.append(sorted(sum(tile in row for row in head) / len(head) for tile in range(len(head))))
    return shared, listed


def test_captured_lists_are_those_of_the_model(saved) -> None:
    folder, path = saved
    run, rankings = load_run(folder, device="cpu"), read_rankings(path)
    assert (rankings.grid, tuple(rankings.by_tile)) == ("4x4x4", TILES)
    assert {ranking.dtype for ranking in rankings.by_tile.values()} == {torch.int16}
    model = RunModel(run)
    clip = model.open_clip(rankings.source.split("clip ")[1].split(" at")[0])
    text, mask = encode_prompts(run.text_encoder, [clip.caption], run.device, run.text_padding)
    latents = run.statistics.normalise(clip.latents[None])
    records = record_attention(run.model, latents, text, mask, sigma=0.5, topk=KeptTiles.of(2))
    own = torch.cat([records[layer]["kv_indices"][0, ..., :2] for layer in range(2)])
    lists = captured_lists(rankings, GRID, (2, 2, 2), 2, 2)
    assert torch.equal(lists, own.long())
    # at another noise level they are others, so the comparison can fail
    records = record_attention(run.model, latents, text, mask, sigma=0.9, topk=KeptTiles.of(2))
    assert not torch.equal(lists, torch.cat([records[layer]["kv_indices"][0, ..., :2] for layer in range(2)]).long())
    # more heads than the model has repeat them
    assert torch.equal(captured_lists(rankings, GRID, (2, 2, 2), 3, 2)[2], lists[0])
    # a file of the best quarter has the same lists, and no longer ones
    part = replace(rankings, by_tile={"2x2x2": rankings.by_tile["2x2x2"][..., :2]})
    assert torch.equal(captured_lists(part, GRID, (2, 2, 2), 2, 2), lists)
    with pytest.raises(ValueError, match="--capture ranks 2 of 8 tiles, the shape keeps 3"):
        captured_lists(part, GRID, (2, 2, 2), 2, 3)


@pytest.mark.parametrize("tile", [(2, 2, 4), (3, 2, 3)])
def test_other_tiles_are_ranked_by_the_same_rule(saved, tile) -> None:
    folder, path = saved
    model, rankings = RunModel(load_run(folder, device="cpu")), read_rankings(path)
    clip = model.open_clip(rankings.source.split("clip ")[1].split(" at")[0])
    items = model.capture([clip], layers=(0, 1), timesteps=(500.0,)).items
    layout = TileLayout.build([Segment(GRID)], tile_thw=tile)
    tokens = layout.order.split(layout.blocks.sizes.tolist())
    lists = captured_lists(rankings, GRID, tile, 2, 2)
    for item, rows in zip(items, lists, strict=True):
        q, k = (x[0, :, 0].double() for x in (item.q, item.k))
        for query, row in zip(tokens, rows.tolist(), strict=True):
            scores = [float(q[query].mean(0) @ k[key].mean(0)) for key in tokens]
            best = sorted(range(len(tokens)), key=lambda tile, scores=scores: -scores[tile])
            assert row == sorted(best[:2])


def test_statistics_are_those_of_plain_loops() -> None:
    lists = torch.rand(2, 9, 9, generator=torch.Generator().manual_seed(1)).topk(4).indices
    shared, listed = _loops(lists)
    torch.testing.assert_close(overlaps(lists).double(), torch.tensor(shared, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(listed_shares(lists), torch.tensor(listed, dtype=torch.float64))


@pytest.mark.parametrize(
    ("grid", "topk"), [((16, 32, 32), 32), ((16, 24, 40), 33), ((9, 30, 22), 17), ((16, 16, 16), 8)]
)
def test_synthesised_lists_have_the_captured_statistics(grid, topk) -> None:
    rankings = Rankings(source="drawn", grid="8x32x32", by_tile={"4x4x4": _structured((8, 32, 32), (4, 4, 4))})
    tiles = TileLayout.build([Segment(grid)], tile_thw=(4, 4, 4)).num_blocks
    lists = synthesised_lists(rankings, grid, (4, 4, 4), 5, topk)
    assert lists.shape == (5, tiles, topk)
    assert bool((lists.diff(dim=-1) > 0).all())
    assert 0 <= int(lists.min()) <= int(lists.max()) < tiles
    kept = max(1, round(topk / tiles * 128))
    captured = rankings.by_tile["4x4x4"][[0, 1, 2, 0, 1], :, :kept]

    def errors(lists: torch.Tensor) -> list[tuple[float, float]]:
        """By head, the difference of the mean overlap, and the mean one of the columns' shares over their mean."""
        found = []
        for ours, theirs in zip(zip(*_loops(lists), strict=True), zip(*_loops(captured), strict=True), strict=True):
            overlap = abs(sum(ours[0]) / len(ours[0]) - sum(theirs[0]) / len(theirs[0]))
            places = [(len(theirs[1]) * (2 * j + 1) // (2 * tiles)) for j in range(tiles)]
            scale = topk / tiles / (kept / 128)
            shares = [abs(share - scale * theirs[1][place]) for share, place in zip(ours[1], places, strict=True)]
            found.append((overlap, sum(shares) / topk))
        return found

    # one entry, and what the random starts of the columns leave
    bound = 1 / (topk * (tiles - 1)) + 1e-6
    assert all(overlap <= bound and shares < 0.08 for overlap, shares in errors(lists)), errors(lists)
    random = torch.rand(5, tiles, tiles, generator=torch.Generator().manual_seed(0)).topk(topk).indices
    assert all(overlap > 0.1 and shares > 0.2 for overlap, shares in errors(random)), errors(random)


def test_dense_rows_stay_dense() -> None:
    rankings = Rankings(source="drawn", grid="4x4x4", by_tile={"2x2x2": _structured(GRID, (2, 2, 2))})
    lists = synthesised_lists(rankings, (4, 4, 6), (2, 2, 2), 2, 20)
    assert torch.equal(lists, torch.arange(12).expand(2, 12, 12))


def test_lists_of_a_model_are_timed_with_their_statistics(saved, bench, monkeypatch, tmp_path, capsys) -> None:
    path, out = str(saved[1]), tmp_path / "report.json"
    problems = importlib.import_module("scripts.bench.problems")
    p = problems.problem(bench.tiny, "captured", torch.float32, torch.device("cpu"), read_rankings(saved[1]))
    own = captured_lists(read_rankings(saved[1]), GRID, (2, 2, 2), 2, 2)
    assert torch.equal(p.case.index.kv_indices[0, ..., :2].long(), own)
    assert p.case.index.min_blocks == p.case.index.max_blocks == 2
    bench.main(["fine", *FAST, "--lists", "captured", "--capture", path, "--out", str(out)])
    report = json.loads(out.read_text())
    assert {row["lists"] for row in report["rows"]} == {"captured"}
    ours, theirs = report["notes"]
    shared, _ = _loops(own)
    mean = sum(map(sum, shared)) / 14
    assert ours.startswith(f"tiny, tiles of 8, captured: neighbouring query tiles share {mean:.1%} of their lists")
    assert theirs.startswith("tiny, tiles of 8, captured from step 2 of run default, clip ")
    # the same lists
    assert ours.partition("neighbouring")[2] == theirs.partition("neighbouring")[2]
    assert ours in capsys.readouterr().out
    longer = replace(bench.tiny, name="longer", grid_thw=(4, 8, 8), topk=8)
    monkeypatch.setattr(problems, "CPU_SHAPES", (longer,))
    bench.main(["fine", "--repeats", "1", "--lists", "synthesised", "--capture", path, "--out", str(out)])
    report = json.loads(out.read_text())
    assert {row["lists"] for row in report["rows"]} == {"synthesised"}
    assert report["notes"][0].startswith("longer, tiles of 8, synthesised: ")


def test_peers_are_timed_on_lists_of_both_tile_sizes(saved, bench, monkeypatch, tmp_path) -> None:
    cases, out = importlib.import_module("scripts.bench.cases"), tmp_path / "report.json"
    monkeypatch.setattr(cases, "check_peers", lambda *_: ({}, {}))
    bench.main(["peers", *FAST, "--lists", "captured", "--capture", str(saved[1]), "--out", str(out)])
    notes = [note.split(" from")[0].split(":")[0] for note in json.loads(out.read_text())["notes"]]
    assert notes == [f"tiny, tiles of {size}, captured" for size in (8, 8, 16, 16)]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lists", "captured"], "need --capture FILE, others none: got captured and None"),
        (["--capture", "PATH"], "need --capture FILE, others none: got random and "),
        (["--lists", "captured", "--capture", "PATH", "--shapes", "odd"], "has 4x4x4 tokens, the shape 2x4x4: use"),
        (
            ["--lists", "synthesised", "--capture", "PATH", "--shapes", "flat"],
            "tiles of 2x2x2, the shape has 1x2x2",
        ),
        (["--lists", "captured", "--capture", "OTHER"], "is not a file of `python -m scripts.bench capture`"),
    ],
)
def test_what_cannot_be_captured_lists_is_refused(bench, monkeypatch, tmp_path, argv, message) -> None:
    torch_file = importlib.import_module("safetensors.torch")
    rankings = {"2x2x2": _structured(GRID, (2, 2, 2))}
    facts = {"format": "vsa-tile-rankings-1", "source": "drawn", "grid": "4x4x4"}
    torch_file.save_file(rankings, tmp_path / "PATH", metadata=facts)
    torch_file.save_file(rankings, tmp_path / "OTHER")
    odd, flat = (
        replace(bench.tiny, name="odd", grid_thw=(2, 4, 4)),
        replace(bench.tiny, name="flat", tile_thw=(1, 2, 2)),
    )
    problems = importlib.import_module("scripts.bench.problems")
    monkeypatch.setattr(problems, "CPU_SHAPES", (bench.tiny, odd, flat))
    argv = [str(tmp_path / word) if word in ("PATH", "OTHER") else word for word in argv]
    with pytest.raises(ValueError, match=message):
        bench.main(["fine", "--repeats", "1", *argv])


def test_a_run_without_lists_is_refused(bench, write_tiny_run, training, tmp_path) -> None:
    dense = write_tiny_run(tmp_path / "dense", attention="full")
    out = ["--out", str(tmp_path / "x")]
    with pytest.raises(ValueError, match="lists are captured from attention=video_sparse alone"):
        bench.main(["capture", str(dense), *out])
    with pytest.raises(ValueError, match=r"--timesteps must be in \[0, 1000\], got 1001"):
        bench.main(["capture", str(dense), *out, "--timestep", "1001"])
    training(*SIZES, "data.val_fraction=0")
    with pytest.raises(ValueError, match=r"holds out no clips: its data\.val_fraction is 0"):
        bench.main(["capture", str(training.folder()), *out])
    assert not (tmp_path / "x").exists()

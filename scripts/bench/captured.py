"""Block lists of a trained model: captured from a run, and drawn for other rows with the same statistics.

    python -m scripts.bench capture RUN --out FILE

R heads of all layers, H heads, N tiles, K listed tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from vsa.attention.layout import Segment, TileLayout
from vsa.attention.scores import mean_scores
from vsa.attention.tiling import Grid
from vsa.files import atomic_file, open_tensors

FORMAT = "vsa-tile-rankings-1"
_PERCENTILES = (0, 5, 50, 95, 100)


@dataclass(frozen=True, kw_only=True)
class Rankings:
    """How the heads of a trained model rank the kv tiles: the first K entries of a row are its list at a top-k of K.

    Args:
        source: origin, for humans.
        grid: token grid, such as 16x32x32.
        by_tile: int16 `[R, N, M]` for tiles such as 4x4x4, the best M of N kv tiles of each query tile, the best first.
    """

    source: str
    grid: str
    by_tile: dict[str, Tensor]

    def lists(self, tile_thw: Grid, heads: int, topk: int, of: int | None = None) -> Tensor:
        """Lists int64 `[H, N, K]` of the model; heads past R repeat the first ones.

        Args:
            tile_thw: tokens of a tile.
            heads: H.
            topk: K, or with `of` the tiles kept of so many, of which K is the same share.
            of: number of tiles of another row.
        """
        ranking = self.by_tile.get(_name(tile_thw))
        if ranking is None:
            raise ValueError(f"--capture has tiles of {', '.join(self.by_tile)}, the shape has {_name(tile_thw)}")
        kept = topk if of is None else max(1, round(topk / of * ranking.shape[1]))
        if kept > ranking.shape[2]:
            raise ValueError(f"--capture ranks {ranking.shape[2]} of {ranking.shape[1]} tiles, the shape keeps {kept}")
        return ranking[torch.arange(heads) % len(ranking), :, :kept].long()


def capture(folder: Path, out: Path, *, timestep: float, tiles: Sequence[Grid], device: str, share: float = 1.0) -> str:
    """Save the rankings of all heads of a run on its first held-out clip; see `Rankings`.

    Every size of tiles is ranked by VSA's rule, the mean score, from the same queries and keys.

    Args:
        folder: run folder or checkpoint folder of a model with `VideoSparseAttention`.
        out: file to write.
        timestep: noise level of the clip, in [0, 1000].
        tiles: tokens of a tile, one or several sizes.
        device: compute device.
        share: share of the kv tiles that is saved, the best ones.

    Returns:
        A line that describes the file.

    Raises:
        ValueError: another method, no held-out clips, a share or a timestep out of range.
    """
    # what a benchmark does without
    from vsa.attention.video_sparse import VideoSparseAttention
    from vsa.checkpoints.run_checkpoint import resolve_checkpoint
    from vsa.config import build
    from vsa.evaluation.comparison.runs import RunModel
    from vsa.evaluation.inspection.clip import check_timesteps
    from vsa.sampling.pipeline import load_run

    check_timesteps([timestep])
    if not 0 < share <= 1:
        raise ValueError(f"--share must be in (0, 1], got {share:g}")
    run = load_run(folder, device=device)
    if not all(isinstance(block.method, VideoSparseAttention) for block in run.model.blocks):
        raise ValueError(f"{folder}: lists are captured from attention=video_sparse alone")
    data = build(resolve_checkpoint(run.source).config["data"])
    data.setup()
    ids = [ref.id for refs in data.held_out.values() for ref in refs]
    if not ids:
        raise ValueError(f"{folder} holds out no clips: its data.val_fraction is {data.val_fraction}")
    model = RunModel(run)
    items = model.capture([model.open_clip(ids[0])], layers=range(model.num_layers), timesteps=[timestep]).items
    grid, by_tile = items[0].grid_thw, dict[str, Tensor]()
    for tile in tiles:
        layout = TileLayout.build([Segment(grid)], tile_thw=tile)
        pairs = [[layout.permute(x) for x in (item.q, item.k)] for item in items]
        scores = torch.cat([mean_scores(q, k, layout.blocks, layout.kv_blocks)[0] for q, k in pairs])
        saved = max(1, math.ceil(share * layout.kv_blocks.num))
        by_tile[_name(tile)] = scores.argsort(dim=-1, descending=True, stable=True)[..., :saved].short().contiguous()
    source = f"step {run.step} of run {folder.name}, clip {ids[0]} at timestep {timestep:g}"
    facts = {"format": FORMAT, "source": source, "grid": _name(grid)}
    with atomic_file(out) as temporary:
        save_file(by_tile, temporary, metadata=facts)
    return f"{out}: {len(items)} layers of {run.model.num_heads} heads, {source}, tiles {', '.join(by_tile)}"


def read_rankings(path: Path) -> Rankings:
    """Read a file of `capture`; a ValueError names what is wrong with it."""
    with open_tensors(path) as file:
        facts = file.metadata() or {}
        if facts.get("format") != FORMAT:
            raise ValueError(f"--capture {path} is not a file of `python -m scripts.bench capture`")
        by_tile = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return Rankings(source=facts["source"], grid=facts["grid"], by_tile=by_tile)


def captured_lists(rankings: Rankings, grid_thw: Grid, tile_thw: Grid, heads: int, topk: int) -> Tensor:
    """The model's own lists, ascending int64 `[H, N, K]`; a ValueError for another grid than the captured one."""
    if _name(grid_thw) != rankings.grid:
        raise ValueError(f"--capture has {rankings.grid} tokens, the shape {_name(grid_thw)}: use --lists synthesised")
    return rankings.lists(tile_thw, heads, topk).sort(-1).values


def synthesised_lists(rankings: Rankings, grid_thw: Grid, tile_thw: Grid, heads: int, topk: int) -> Tensor:
    """Lists for any grid, ascending int64 `[H, N, K]`, alike captured ones of the same sparsity.

    Head by head they have the captured mean of `overlaps` and distribution of `listed_shares`; which tiles are listed
    often is random.
    """
    tiles = math.prod(-(-n // c) for n, c in zip(grid_thw, tile_thw, strict=True))
    topk = min(topk, tiles)
    captured, rng = rankings.lists(tile_thw, heads, topk, of=tiles), np.random.default_rng(0)
    place, drawn = (np.arange(tiles) + 0.5) / tiles, []
    for overlap, shares in zip(overlaps(captured).mean(-1).tolist(), listed_shares(captured).numpy(), strict=True):
        # the captured quantiles at another number of tiles, with a sum of K
        wanted = np.interp(place, (np.arange(len(shares)) + 0.5) / len(shares), shares)
        wanted = (wanted * topk / wanted.sum()).clip(max=1)
        drawn.append(_draw(rng.permutation(wanted), topk, min(topk * (1 - overlap), tiles - topk), rng))
    return torch.from_numpy(np.stack(drawn))


def _draw(shares: np.ndarray, topk: int, turnover: float, rng: np.random.Generator) -> np.ndarray:
    """Lists `[N, K]` in which each kv tile has its share of the rows and, on average, `turnover` entries are replaced
    from row to row: those furthest ahead of their share by those furthest behind."""
    # rows that each kv tile is behind its share, from a random start
    behind, listed, rows = rng.random(len(shares)), np.zeros(len(shares), dtype=bool), []
    replaced = np.diff(np.floor(turnover * np.arange(len(shares))), prepend=-topk).astype(int)
    for count in replaced:
        behind += shares
        if count:
            order = behind.argsort()
            inside = listed[order]
            listed[order[inside][:count]] = False
            listed[order[~inside][-count:]] = True
        behind -= listed
        rows.append(listed.nonzero()[0])
    return np.stack(rows)


def overlaps(lists: Tensor) -> Tensor:
    """Share of each list that the query tile before lists too: fp32 `[H, N - 1]` of lists `[H, N, K]`."""
    listed = _listed(lists)
    return (listed[:, 1:] & listed[:, :-1]).sum(-1) / lists.shape[-1]


def listed_shares(lists: Tensor) -> Tensor:
    """Share of the query tiles that list each kv tile, ascending: fp64 `[H, N]` of lists `[H, N, K]`."""
    return (_listed(lists).sum(1).double() / lists.shape[1]).sort(-1).values


def _listed(lists: Tensor) -> Tensor:
    heads, tiles, _ = lists.shape
    return torch.zeros(heads, tiles, tiles, dtype=torch.bool).scatter_(-1, lists.cpu().long(), True)


def describe(lists: Tensor) -> str:
    """Overlap and column counts of lists `[H, N, K]` in words."""
    shares, mean = listed_shares(lists), lists.shape[2] / lists.shape[1]
    marks = torch.tensor(_PERCENTILES, dtype=torch.float64) / 100
    spread = ", ".join(f"{x:.2f}" for x in (shares.quantile(marks, dim=-1).mean(-1) / mean).tolist())
    return (
        f"neighbouring query tiles share {overlaps(lists).mean():.1%} of their lists (random: {mean:.1%}), kv tiles "
        f"are listed {spread} times the mean (percentiles {', '.join(map(str, _PERCENTILES))}, mean of the heads)"
    )


def _name(grid: Grid) -> str:
    return "x".join(map(str, grid))

"""`vsa inspect`: a checkpoint and a clip in, a folder with page, pictures and tables out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vsa.attention.pooling import token_places
from vsa.checkpoints.weight_source import Group, is_run
from vsa.errors import refuse_unwritable, usable_device
from vsa.evaluation.attention_map import tile_map, token_times, varied_tiles
from vsa.evaluation.inspection.clip import Clip, open_clip, open_inspected
from vsa.evaluation.inspection.measure import Inspection, NothingSelected, choose_shown, inspect_clip
from vsa.evaluation.inspection.metrics import HEAD_METRICS
from vsa.evaluation.inspection.page import SHARES, rounded, write_page
from vsa.evaluation.inspection.pictures import draw_heatmaps, draw_maps, draw_popularity, draw_selected
from vsa.files import refuse_others, write_whole
from vsa.pages.charts import write_csv
from vsa.progress import progress_bar
from vsa.sampling.clip_folder import samples_folder
from vsa.sampling.pipeline import LoadedRun, encode_prompts, settings_dict
from vsa.secrets import without_secrets

RECORD = "inspection.json"
PICTURES = ("selected.png", "layers.png", "gates.png", "popularity.png")
TABLES = ("heads.csv", "layers.csv", "tiles.csv")
TIMESTEPS = (900.0, 700.0, 500.0, 300.0, 100.0)


def inspect_checkpoint(
    checkpoint: str,
    clip: str,
    *,
    output: Path | None = None,
    caption: str | None = None,
    timesteps: Sequence[float] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
    megabytes: float = 12,
    tokens: int = 256,
    topk: int | None = None,
    sparsity: float | None = None,
    seed: int = 0,
    weights: Group | None = None,
    pipeline: str | None = None,
    device: str | None = None,
) -> tuple[Path, Inspection, str]:
    """Look at what a model attends to in a clip, and write it down.

    Args:
        checkpoint: see `open_inspected`.
        clip: see `open_clip`.
        output: folder; None: `inspect` in the run's folder, of an export beside the clip.
        caption: see `open_clip`.
        timesteps: in [0, 1000]; None: 900 to 100, of a distilled generator its steps.
        layers: to measure and to draw; None: all, and as many in the page as fit.
        heads: to draw; None: as many as fit.
        queries: query tiles to draw; None: as many as fit.
        megabytes: of the page, about.
        tokens: query tokens that the recall is measured with.
        topk: tiles per query tile; None: as last trained.
        sparsity: share of tiles skipped, instead of `topk`.
        seed: of the noise.
        weights: of a run.
        pipeline: see `open_inspected`.
        device: None takes a GPU when there is one.

    Returns:
        The folder, what was measured, and a line about what the page leaves out (empty when nothing).

    Raises:
        ValueError: one line that names what cannot be inspected, or a file of others in the folder.
    """
    folder = output or _default_folder(checkpoint, clip)
    refuse_unwritable(folder)
    refuse_others(folder, (RECORD, "inspect.html", *PICTURES, *TABLES), "vsa inspect", "--output")
    run = open_inspected(checkpoint, pipeline=pipeline, weights=weights, device=usable_device(device))
    opened_clip = open_clip(run, clip, caption)
    settings = run.settings(topk=topk, sparsity=sparsity, latent_shape=tuple(opened_clip.latents.shape), seed=seed)
    timesteps = tuple(timesteps or run.step_list or TIMESTEPS)
    layout = run.model.layout_for(settings.latent_shape)
    num_layers, num_heads = len(run.model.blocks), run.model.num_heads
    layers = tuple(range(num_layers)) if layers is None else tuple(sorted(set(layers)))
    for name, numbers, count in (
        ("layers", layers, num_layers),
        ("heads", heads or (), num_heads),
        ("queries", queries or (), layout.num_blocks),
    ):
        if bad := [n for n in numbers if not 0 <= n < count]:
            raise ValueError(f"--{name}: {checkpoint} has {name} 0 to {count - 1}, got {', '.join(map(str, bad))}")
    if bad := [t for t in timesteps if not 0 <= t <= 1000]:
        raise ValueError(f"--timesteps lie between 0 and 1000, got {', '.join(f'{t:g}' for t in bad)}")
    times = token_times(run.codec, len(opened_clip.video), run.model.patch_size[0])
    varied = varied_tiles(opened_clip.video, tile_map(layout), times, count=3) if layout.num_blocks > 1 else [0]
    subset = choose_shown(
        layers=layers,
        num_heads=num_heads,
        num_queries=layout.num_blocks,
        num_tiles=layout.kv_blocks.num,
        num_timesteps=len(timesteps),
        most_bytes=round(megabytes * 1e6 * SHARES["rows"]),
        heads=heads,
        queries=queries,
        first=varied,
    )
    text, mask = encode_prompts(run.text_encoder, [opened_clip.caption], run.device, run.text_padding)
    latents = run.statistics.normalise(opened_clip.latents[None])
    with progress_bar("inspecting", len(timesteps), transient=True) as advance:
        try:
            inspection = inspect_clip(
                run.model,
                latents,
                text,
                mask,
                timesteps=timesteps,
                topk=settings.topk,
                shown=subset,
                layers=layers,
                tokens=tokens,
                seed=seed,
                progress=advance,
            )
        except NothingSelected:
            method = type(run.model.blocks[0].method).__name__
            raise ValueError(
                f"{checkpoint} attends with {method}, which selects no tiles: nothing to inspect"
            ) from None
    record = {**settings_dict(settings, run), "clip": opened_clip.name, "caption": opened_clip.caption, "seed": seed}
    note = left_out(inspection, num_layers=len(layers))
    facts = _facts(run, opened_clip, inspection, record)
    _write(folder, inspection, record)
    drawn_queries = [q for q in varied if q in inspection.shown.queries] or list(inspection.shown.queries[:3])
    title = " ".join(opened_clip.caption.split())
    draw_selected(inspection, opened_clip.video, times, folder / "selected.png", queries=drawn_queries, title=title)
    draw_heatmaps(inspection, folder / "layers.png", title=f"{title}\n{facts}")
    if inspection.maps:
        draw_maps(inspection, opened_clip.video, times, folder / "gates.png", title=title)
    draw_popularity(inspection, folder / "popularity.png", title=title)
    write_page(
        inspection,
        folder / "inspect.html",
        video=opened_clip.video,
        times=times,
        caption=title,
        facts=facts,
        notes=note,
        first_query=drawn_queries[0],
        most_bytes=round(megabytes * 1e6),
    )
    return folder, inspection, note


def _default_folder(checkpoint: str, clip: str) -> Path:
    if is_run(checkpoint):
        return samples_folder(checkpoint, "inspect")
    return (Path(clip).parent if Path(clip).is_file() else Path()) / "inspect"


def left_out(inspection: Inspection, *, num_layers: int) -> str:
    """One line about what the page does not show tile by tile, and which options show it; empty when it shows all."""
    subset, parts = inspection.shown, []
    tables = inspection.tables
    for name, some, count in (
        ("layers", subset.layers, len(inspection.layers)),
        ("heads", subset.heads, tables.shape[-1]),
        ("query tiles", subset.queries, inspection.layout.num_blocks),
    ):
        if len(some) < count:
            parts.append(f"{len(some)} of {count} {name}")
    line = ""
    if parts:
        line = f"The page draws {', '.join(parts)}; --layers, --heads, --queries and --megabytes choose others."
    if inspection.silent:
        line += f" {len(inspection.silent)} of {num_layers} layers choose no tiles: {_listed(inspection.silent)}."
    return line.strip()


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _facts(run: LoadedRun, clip: Clip, inspection: Inspection, record: dict[str, Any]) -> str:
    layout = inspection.layout
    tiles = f"{layout.num_blocks} tiles"
    if layout.kv_blocks.num != layout.num_blocks:
        tiles = f"{layout.num_blocks} query tiles and {layout.kv_blocks.num} kv tiles"
    frames, height, width = clip.video.shape[:3]
    recall, random = (float(inspection.table(name).nanmean()) for name in ("recall", "recall_random"))
    topk = record["topk"] if isinstance(record["topk"], int) else f"{min(record['topk'])} to {max(record['topk'])}"
    return (
        f"{run.source}, step {run.step}; {clip.name}: {frames} frames of {height}x{width}, "
        f"{'x'.join(map(str, inspection.tiles.shape))} tokens in {tiles}, top-k {topk}; "
        f"recall {recall:.1%}, random tiles {random:.1%}"
    )


def _write(folder: Path, inspection: Inspection, record: dict[str, Any]) -> None:
    """The record, by which a later inspection knows the folder, and the tables."""
    tables = {name: rounded(inspection.table(name)) for name in HEAD_METRICS}
    content = {
        "made_by": "vsa inspect",
        **record,
        "grid_thw": list(inspection.tiles.shape),
        "timesteps": list(inspection.timesteps),
        "layers": list(inspection.layers),
        "layers_without_selection": list(inspection.silent),
        "meanings": HEAD_METRICS,
        "tables": tables,
        "overlap_heads": rounded(inspection.overlap_heads),
    }
    write_whole(folder / RECORD, without_secrets(json.dumps(content, indent=1, allow_nan=False), named=False))
    names, heads = list(HEAD_METRICS), inspection.tables.shape[-1]
    means = inspection.tables.mean(-1)
    by_head, by_layer = [], []
    for t, timestep in enumerate(inspection.timesteps):
        for y, layer in enumerate(inspection.layers):
            place = (f"{timestep:g}", layer)
            by_head += [(*place, head, *_cells(inspection.tables[:, t, y, head])) for head in range(heads)]
            by_layer.append((*place, *_cells(means[:, t, y]), *_cells(inspection.overlap_heads[t, y][None])))
    write_csv(folder / "heads.csv", ["timestep", "layer", "head", *names], by_head)
    write_csv(folder / "layers.csv", ["timestep", "layer", *names, "overlap_heads"], by_layer)
    # the first token of a tile says where it is
    kv_blocks = inspection.layout.kv_blocks
    firsts = token_places(inspection.layout)[kv_blocks.offsets[:-1].long().cpu()].tolist()
    lists = inspection.counts.float().mean((0, 2))
    rows = [
        (layer, tile, *firsts[tile], *_cells(lists[y, tile][None]))
        for y, layer in enumerate(inspection.layers)
        for tile in range(kv_blocks.num)
    ]
    write_csv(folder / "tiles.csv", ["layer", "tile", "first_t", "first_h", "first_w", "lists_mean"], rows)


def _cells(values: torch.Tensor) -> list[str]:
    return ["" if value is None else repr(value) for value in rounded(values)]

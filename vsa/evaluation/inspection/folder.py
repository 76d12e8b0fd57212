"""`vsa inspect`: page, pictures and tables of what a checkpoint attends to in a clip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vsa.attention.pooling import token_places
from vsa.checkpoints.run_weights import Group
from vsa.checkpoints.weight_source import is_run
from vsa.errors import refuse_unwritable, usable_device
from vsa.evaluation.attention_map import tile_map, token_times, varied_tiles
from vsa.evaluation.inspection.clip import Clip, check_numbers, check_timesteps, open_clip, open_inspected
from vsa.evaluation.inspection.measure import Inspection, NothingSelected, choose_shown, inspect_clip
from vsa.evaluation.inspection.metrics import HEAD_METRICS
from vsa.evaluation.inspection.page import SHARES, rounded, write_page
from vsa.evaluation.inspection.pictures import draw_heatmaps, draw_maps, draw_popularity, draw_selected
from vsa.evaluation.record import write_record
from vsa.files import refuse_others
from vsa.pages.charts import write_csv
from vsa.progress import progress_bar
from vsa.sampling.clip_folder import samples_folder
from vsa.sampling.pipeline import SamplingPipeline, encode_prompts
from vsa.sampling.record import settings_dict

RECORD = "inspection.json"
PICTURES = ("selected.png", "layers.png", "gates.png", "popularity.png")
TABLES = ("heads.csv", "layers.csv", "tiles.csv")
TIMESTEPS = (900.0, 700.0, 500.0, 300.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class InspectSettings:
    """Model and clip to inspect, and what is measured and drawn.

    Args:
        checkpoint: see `open_inspected`.
        clip: see `open_clip`.
        out: output folder; None: `inspect` in the folder of a run, or beside the clip for an export.
        caption: see `open_clip`.
        timesteps: timesteps in [0, 1000]; None: 900 to 100, or the steps of a distilled generator.
        layers: layers to measure and to draw; None: all, of which the page draws as many as fit.
        heads: heads to draw; None: as many as fit.
        queries: query tiles to draw; None: as many as fit.
        megabytes: approximate size limit of the page.
        tokens: number of query tokens that recall is measured with.
        topk: tiles per query tile; None: as last trained.
        sparsity: share of tiles skipped, instead of `topk`.
        seed: seed of the noise and of the sampled query tokens.
        weights: averaged or trained weights of a run.
        pipeline: see `open_inspected`.
        device: compute device; None: a GPU if there is one.
    """

    checkpoint: str
    clip: str
    out: Path | None = None
    caption: str | None = None
    timesteps: Sequence[float] | None = None
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    queries: Sequence[int] | None = None
    megabytes: float = 12
    tokens: int = 256
    topk: int | None = None
    sparsity: float | None = None
    seed: int = 0
    weights: Group | None = None
    pipeline: str | None = None
    device: str | None = None


def inspect_checkpoint(asked: InspectSettings) -> tuple[Path, Inspection, str]:
    """Measure what a model attends to in a clip, and write page, pictures, tables and record.

    Returns:
        The folder, what was measured, and a line about what the page leaves out (empty when nothing).

    Raises:
        ValueError: one line that names what cannot be inspected, or a file of others in the folder.
    """
    folder = asked.out or _default_folder(asked.checkpoint, asked.clip)
    refuse_unwritable(folder)
    refuse_others(folder, (RECORD, "inspect.html", *PICTURES, *TABLES), "vsa inspect")
    device = usable_device(asked.device)
    run = open_inspected(asked.checkpoint, pipeline=asked.pipeline, weights=asked.weights, device=device)
    clip = open_clip(run, asked.clip, asked.caption)
    settings = run.settings(
        topk=asked.topk, sparsity=asked.sparsity, latent_shape=tuple(clip.latents.shape), seed=asked.seed
    )
    timesteps = tuple(asked.timesteps or run.step_list or TIMESTEPS)
    layout = run.model.layout_for(settings.latent_shape)
    num_layers, num_heads = len(run.model.blocks), run.model.num_heads
    layers = tuple(range(num_layers)) if asked.layers is None else tuple(sorted(set(asked.layers)))
    check_numbers("layers", layers, num_layers, asked.checkpoint)
    check_numbers("heads", asked.heads or (), num_heads, asked.checkpoint)
    check_numbers("queries", asked.queries or (), layout.num_blocks, asked.checkpoint)
    check_timesteps(timesteps)
    times = token_times(run.codec, len(clip.video), run.model.patch_size[0])
    varied = varied_tiles(clip.video, tile_map(layout), times, count=3) if layout.num_blocks > 1 else [0]
    subset = choose_shown(
        layers=layers,
        num_heads=num_heads,
        num_queries=layout.num_blocks,
        num_tiles=layout.kv_blocks.num,
        num_timesteps=len(timesteps),
        most_bytes=round(asked.megabytes * 1e6 * SHARES["rows"]),
        heads=asked.heads,
        queries=asked.queries,
        first=varied,
    )
    text, mask = encode_prompts(run.text_encoder, [clip.caption], run.device, run.text_padding)
    with progress_bar("inspecting", len(timesteps), transient=True) as advance:
        try:
            inspection = inspect_clip(
                run.model,
                run.statistics.normalise(clip.latents[None]),
                text,
                mask,
                timesteps=timesteps,
                topk=settings.topk,
                shown=subset,
                layers=layers,
                tokens=asked.tokens,
                seed=asked.seed,
                progress=advance,
            )
        except NothingSelected:
            names = ", ".join(dict.fromkeys(type(run.model.attention_layers[layer]).__name__ for layer in layers))
            raise ValueError(
                f"{asked.checkpoint} attends with {names}, which selects no tiles: nothing to inspect"
            ) from None
    record = {**settings_dict(settings, run), "clip": clip.name, "caption": clip.caption, "seed": asked.seed}
    note = left_out(inspection, num_layers=len(layers))
    facts = _facts(run, clip, inspection, record["topk"])
    _write_numbers(folder, inspection, record)
    queries = [q for q in varied if q in inspection.shown.queries] or list(inspection.shown.queries[:3])
    title = " ".join(clip.caption.split())
    draw_selected(inspection, clip.video, times, folder / "selected.png", queries=queries, title=title)
    draw_heatmaps(inspection, folder / "layers.png", title=f"{title}\n{'; '.join(facts.values())}")
    if inspection.maps:
        draw_maps(inspection, clip.video, times, folder / "gates.png", title=title)
    draw_popularity(inspection, folder / "popularity.png", title=title)
    write_page(
        inspection,
        folder / "inspect.html",
        video=clip.video,
        times=times,
        caption=title,
        facts=facts,
        note=note,
        first_query=queries[0],
        most_bytes=round(asked.megabytes * 1e6),
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
    if silent := inspection.silent:
        listed = ", ".join([*map(str, silent[:8]), *["..."] * (len(silent) > 8)])
        line += f" {len(silent)} of {num_layers} layers choose no tiles: {listed}."
    return line.strip()


def _facts(run: SamplingPipeline, clip: Clip, inspection: Inspection, topk: int | Sequence[int]) -> dict[str, str]:
    """Facts for the header of the page."""
    layout = inspection.layout
    tiles = f"{layout.num_blocks} tiles"
    if layout.kv_blocks.num != layout.num_blocks:
        tiles = f"{layout.num_blocks} query tiles and {layout.kv_blocks.num} kv tiles"
    frames, height, width = clip.video.shape[:3]
    recall, random = (float(inspection.table(name).nanmean()) for name in ("recall", "recall_random"))
    kept = topk if isinstance(topk, int) else f"{min(topk)} to {max(topk)}"
    return {
        "model": f"{run.source}, step {run.step}",
        "clip": f"{clip.name}: {frames} frames of {height}x{width}, {'x'.join(map(str, inspection.tiles.shape))} "
        f"tokens in {tiles}, top-k {kept}",
        "attention": f"recall {recall:.1%}, random tiles {random:.1%}",
    }


def _write_numbers(folder: Path, inspection: Inspection, record: Mapping[str, Any]) -> None:
    """Write the record, by which a later inspection recognises the folder, and the tables."""
    content = {
        "made_by": "vsa inspect",
        **record,
        "grid_thw": list(inspection.tiles.shape),
        "timesteps": inspection.timesteps,
        "layers": inspection.layers,
        "layers_without_selection": inspection.silent,
        "meanings": HEAD_METRICS,
        "tables": {name: rounded(inspection.table(name)) for name in HEAD_METRICS},
        "overlap_heads": rounded(inspection.overlap_heads),
    }
    write_record(folder / RECORD, content)
    names, means = list(HEAD_METRICS), inspection.tables.mean(-1)
    by_head, by_layer = [], []
    for t, timestep in enumerate(inspection.timesteps):
        for y, layer in enumerate(inspection.layers):
            place = (f"{timestep:g}", layer)
            heads = inspection.tables[:, t, y].unbind(-1)
            by_head += [(*place, head, *_cells(values)) for head, values in enumerate(heads)]
            by_layer.append((*place, *_cells(means[:, t, y]), *_cells(inspection.overlap_heads[t, y][None])))
    write_csv(folder / "heads.csv", ["timestep", "layer", "head", *names], by_head)
    write_csv(folder / "layers.csv", ["timestep", "layer", *names, "overlap_heads"], by_layer)
    # the first token of a tile says where it is
    starts = inspection.layout.kv_blocks.offsets[:-1].long().cpu()
    firsts = token_places(inspection.layout)[starts].tolist()
    lists = inspection.counts.float().mean((0, 2))
    rows = [
        (layer, tile, *first, *_cells(lists[y, tile][None]))
        for y, layer in enumerate(inspection.layers)
        for tile, first in enumerate(firsts)
    ]
    write_csv(folder / "tiles.csv", ["layer", "tile", "first_t", "first_h", "first_w", "lists_mean"], rows)


def _cells(values: torch.Tensor) -> list[str]:
    return ["" if value is None else repr(value) for value in rounded(values)]

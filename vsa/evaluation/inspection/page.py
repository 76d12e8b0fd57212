"""`inspect.html`: one file that shows what a model attends to in a clip, without any other file or address."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vsa.evaluation.inspection.measure import MAPS, Inspection
from vsa.evaluation.inspection.metrics import HEAD_METRICS
from vsa.pages.page import Page

HERE = Path(__file__).parent
# shares of the page: rows of query tiles, frames, maps; the rest is for tables
SHARES = {"rows": 0.6, "frames": 0.2, "maps": 0.15}
LONGEST_SIDES = (512, 384, 256, 192, 128)
MOST_FRAMES = 32
# powers of ten that a stored probability can be below 1
_DECADES = 5


def write_page(
    inspection: Inspection,
    path: Path,
    *,
    video: Tensor,
    times: Sequence[int],
    caption: str,
    facts: Mapping[str, str],
    note: str = "",
    first_query: int | None = None,
    most_bytes: int = 12_000_000,
) -> Path:
    """Write the page.

    Args:
        inspection: measurements that the page shows.
        path: HTML file to write.
        video: uint8 `[T, H, W, 3]`.
        times: token time of every frame, see `vsa.evaluation.attention_map.token_times`.
        caption: caption of the clip.
        facts: facts about model and clip, by heading.
        note: line about what the page leaves out.
        first_query: query tile at the start.
        most_bytes: approximate size limit of the page; frames and maps are made smaller for it, rows are not.
    """
    page = Page(path, title=f"inspect: {caption}", facts=facts, warnings=[note] if note else [])
    data = page_data(inspection, video, times, most_bytes) | {"first_query": first_query}
    html, script, style = ((HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "js", "css"))
    page.interactive(html, data=data, script=script, style=style)
    return page.write("Pictures and tables of the same stand beside this file.")


def page_data(inspection: Inspection, video: Tensor, times: Sequence[int], most_bytes: int) -> dict[str, Any]:
    """Data for the script of the page: numbers as JSON, arrays and frames in base64."""
    picked = shown_frames(times)
    subset = inspection.shown
    place = [inspection.layers.index(layer) for layer in subset.layers]
    # base64 has four letters for three bytes
    map_bytes = round(most_bytes * SHARES["maps"] * 3 / 4 / max(len(inspection.maps), 1))
    counts = inspection.counts[:, place][:, :, list(subset.heads)]
    return {
        "frames": pictures(video[picked], round(most_bytes * SHARES["frames"])),
        "frame_numbers": picked,
        "times": [times[frame] for frame in picked],
        "size": list(video.shape[1:3]),
        "grid": list(inspection.tiles.shape),
        "query_tiles": _base64(inspection.query_tiles.numpy().astype("<u2")),
        "tiles": _base64(inspection.tiles.numpy().astype("<u2")),
        "num_queries": inspection.layout.num_blocks,
        "num_tiles": inspection.counts.shape[-1],
        "timesteps": list(inspection.timesteps),
        "layers": list(inspection.layers),
        "num_heads": inspection.tables.shape[-1],
        "shown": {"layers": list(subset.layers), "heads": list(subset.heads), "queries": list(subset.queries)},
        "metrics": {
            name: {"label": label, "values": rounded(inspection.table(name))} for name, label in HEAD_METRICS.items()
        },
        "ranked": not bool(inspection.coarse.isnan().any()),
        "coarse": _base64(coded(inspection.coarse, 127) + 128 * inspection.selected.numpy().astype(np.uint8)),
        "mass": _base64(coded(inspection.mass, 255)),
        "recall": _base64((65535 * query_recall(inspection)).round().numpy().astype("<u2")),
        "counts": _base64(counts.numpy().astype("<u2")),
        "maps": {name: _map(values, inspection, MAPS[name], map_bytes) for name, values in inspection.maps.items()},
    }


def query_recall(inspection: Inspection) -> Tensor:
    """Share of the true attention of each shown query tile that lies on its selected tiles, `[T, Ys, Hs, Q]`."""
    return (inspection.mass * inspection.selected).sum(-1).clamp(0, 1)


def shown_frames(times: Sequence[int]) -> list[int]:
    """Frames that are embedded: all, or as many as `MOST_FRAMES`, then one of every token time at least."""
    if len(times) <= MOST_FRAMES:
        return list(range(len(times)))
    firsts = {time: frame for frame, time in reversed(list(enumerate(times)))}
    even = [round(i * (len(times) - 1) / (MOST_FRAMES - 1)) for i in range(MOST_FRAMES)]
    return sorted(firsts.values()) if len(firsts) > MOST_FRAMES // 2 else sorted({*firsts.values(), *even})


def coded(probability: Tensor, top: int) -> np.ndarray:
    """uint8 codes of probabilities, even steps of their logarithm: 0 is below 1e-5 (or unknown), `top` is 1."""
    codes = top * (1 + probability.nan_to_num(0).clamp(1e-30, 1).log10() / _DECADES)
    return codes.round().clamp(0, top).to(torch.uint8).numpy()


def rounded(values: Tensor) -> Any:
    """Nested lists of four significant digits, None for NaN."""
    if values.dim():
        return [rounded(row) for row in values]
    value = float(values)
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _map(values: Tensor, inspection: Inspection, label: str, most_bytes: int) -> Mapping[str, Any]:
    """A map of tokens in 256 steps, or of tiles where the tokens are too many."""
    by = "token"
    if values.numel() > most_bytes:
        by, tiles = "tile", inspection.tiles.flatten()
        sums = torch.zeros(*values.shape[:2], inspection.counts.shape[-1])
        sums.index_add_(2, tiles, values.flatten(2))
        values = sums / torch.bincount(tiles)
    low, high = float(values.min()), float(values.max())
    steps = ((values - low) / max(high - low, 1e-12) * 255).round().to(torch.uint8)
    return {"label": label, "by": by, "low": low, "high": high, "values": _base64(steps.numpy())}


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


def pictures(frames: Tensor, most_bytes: int) -> list[str]:
    """JPEG addresses of uint8 frames `[n, H, W, 3]`, as large as the bytes allow."""
    encoded: list[str] = []
    for side in LONGEST_SIDES:
        encoded = [_picture(frame, side) for frame in frames]
        if sum(map(len, encoded)) <= most_bytes:
            break
    return encoded


def _picture(frame: Tensor, side: int) -> str:
    image = Image.fromarray(frame.numpy())
    image.thumbnail((side, side))
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=88, subsampling=0)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"

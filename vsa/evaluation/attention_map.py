"""Which tiles a trained model selects: recorded in one denoising step, drawn over a clip it made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor
from vsa_kernels import Blocks

from vsa.attention.context import Recorder
from vsa.attention.denoising import Topk, per_layer, progress_of, row_at
from vsa.attention.layout import TileLayout
from vsa.data.codecs import Codec
from vsa.diffusion.flow_matching import add_noise, noise_like, to_timestep
from vsa.models.video_dit import VideoDiT
from vsa.plotting import save_figure, set_title
from vsa.sampling.pipeline import (
    LoadedRun,
    SampleSettings,
    clip_seeds,
    decode_latents,
    encode_prompts,
    sample_latents,
)

QUERY_COLOUR = (0.1, 1.0, 0.3)
KEY_COLOUR = (1.0, 0.55, 0.0)


@torch.no_grad()
def record_attention(
    model: VideoDiT,
    latents: Tensor,
    text: Tensor,
    text_mask: Tensor | None,
    *,
    sigma: float,
    topk: Topk,
    seed: int = 0,
) -> dict[int, dict[str, Tensor]]:
    """What each sparse layer selects while denoising `latents` at one noise level.

    Args:
        model: velocity model.
        latents: normalised `[1, C, T, H, W]`.
        text: `[1, S, E]`.
        text_mask: bool `[1, S]`, or None.
        sigma: noise level in [0, 1].
        topk: tiles per query tile, of all layers or of each.
        seed: of the noise.

    Returns:
        By layer: the tensors the method hands its recorder, among them `kv_indices` `[1, H, Nq, K]` and
        `kv_num_blocks` `[1, H, Nq]`, on the CPU. Empty when no layer records (dense attention).
    """
    found: dict[int, dict[str, Tensor]] = {}

    def recorder(layer_idx: int, tensors: dict[str, Tensor]) -> None:
        # what else is recorded is as long as the sequence
        names = [name for name in ("scores", "kv_indices", "kv_num_blocks") if name in tensors]
        found[layer_idx] = {name: tensors[name].detach().cpu() for name in names}

    denoise_once(model, latents, text, text_mask, sigma=sigma, topk=topk, recorder=recorder, seed=seed)
    return found


@torch.no_grad()
def denoise_once(
    model: VideoDiT,
    latents: Tensor,
    text: Tensor,
    text_mask: Tensor | None,
    *,
    sigma: float,
    topk: Topk,
    recorder: Recorder | None = None,
    seed: int = 0,
) -> None:
    """One forward on `latents` with the noise of a seed at one level; arguments as for `record_attention`."""
    level = torch.full((1,), sigma, device=latents.device)
    x_t = add_noise(latents, noise_like(latents, clip_seeds(seed, 1)), level)
    model(x_t, to_timestep(level), text, text_mask, topk=topk, recorder=recorder)


def draw_attention(
    run: LoadedRun,
    prompt: str,
    settings: SampleSettings,
    path: str | Path | None,
    *,
    layer: int | None = None,
    sigma: float = 0.5,
) -> Path | None:
    """Sample a clip and draw which tiles three of its query tiles attend to, halfway through the denoising.

    Args:
        run: from `load_run`, with sparse attention.
        prompt: caption of the clip.
        settings: how to sample; the clip is clip 0 of its seed.
        path: PNG to write; None runs the model and draws nothing (ranks beside the first, when weights are sharded).
        layer: layer to show, None for the one in the middle.
        sigma: noise level at which the layer is looked at.

    Raises:
        ValueError: the model's attention is dense, or there is no such layer.
    """
    seeds = clip_seeds(settings.seed, 1)
    latents = sample_latents(run.model, run.text_encoder, [prompt], seeds, settings)
    video = decode_latents(run.codec, latents, run.statistics)[0]
    text, mask = encode_prompts(run.text_encoder, [prompt], run.device, settings.text_padding)
    found = record_attention(run.model, latents, text, mask, sigma=sigma, topk=settings.topk, seed=settings.seed)
    found = {index: tensors for index, tensors in found.items() if "kv_indices" in tensors}
    if not found:
        raise ValueError(f"{run.source} selects no tiles (dense attention, or all of them are kept): nothing to draw")
    layer = sorted(found)[len(found) // 2] if layer is None else layer
    if layer not in found:
        raise ValueError(f"layer {layer} selects no tiles, layers that do are {sorted(found)}")
    if path is None:
        return None
    layout = run.model.layout_for(settings.latent_shape)
    topk = per_layer(row_at(settings.topk, progress_of(1000 * sigma)), layer + 1)[layer]
    caption = " ".join(prompt.split())
    return attention_picture(
        video,
        layout,
        found[layer]["kv_indices"][0],
        found[layer]["kv_num_blocks"][0],
        path,
        times=token_times(run.codec, len(video), run.model.patch_size[0]),
        title=f"{caption}\nlayer {layer}, sigma {sigma:g}: {topk} of {layout.num_video_tiles} tiles per query",
    )


def tile_map(layout: TileLayout, blocks: Blocks | None = None) -> Tensor:
    """int64 `[T, H, W]`: the tile each token of a one-segment video row belongs to.

    Args:
        layout: of the row.
        blocks: the tiles, `layout.kv_blocks` those that are selected; None: `layout.blocks`, those of queries.

    Raises:
        ValueError: the row has more than one segment.
    """
    if len(layout.segments) != 1 or layout.segments[0].kind not in ("video", "image"):
        raise ValueError(f"a tile map needs a row of one video, got {[s.kind for s in layout.segments]}")
    blocks = layout.blocks if blocks is None else blocks
    tiles = torch.empty(layout.num_tokens, dtype=torch.int64)
    tiles[layout.order.cpu()] = torch.arange(blocks.num).repeat_interleave(blocks.sizes.cpu().long())
    return tiles.view(layout.segments[0].grid_thw)


def token_times(codec: Codec, num_frames: int, patch: int) -> list[int]:
    """Place in time of the tokens that each of a clip's frames is in: a causal codec has one frame in its first cell.

    Args:
        codec: of the latents.
        num_frames: that the codec takes.
        patch: latent frames of a token.
    """
    fitting = [n for n in range(1, num_frames + 1) if codec.frames_that_fit(n) == n]
    times = []
    for frame in range(num_frames):
        enough = next(n for n in fitting if n > frame)
        times.append((codec.latent_shape(enough, *codec.stride[1:])[1] - 1) // patch)
    return times


def selection_share(kv_indices: Tensor, kv_num_blocks: Tensor, num_blocks: int) -> Tensor:
    """Share of heads in which each query tile selects each kv tile, float32 `[Nq, num_blocks]`.

    Args:
        kv_indices: int `[H, Nq, K]`; only the first `kv_num_blocks` entries of a row count.
        kv_num_blocks: int `[H, Nq]`.
        num_blocks: number of kv tiles.
    """
    heads, queries, capacity = kv_indices.shape
    valid = torch.arange(capacity) < kv_num_blocks.cpu()[..., None]
    # entries past the count may hold anything: send them to a spare column
    columns = torch.where(valid, kv_indices.cpu().long(), num_blocks)
    chosen = torch.zeros(heads, queries, num_blocks + 1).scatter_(2, columns, 1.0)
    return chosen[..., :num_blocks].mean(0)


def to_pixels(values: Tensor, times: Sequence[int], height: int, width: int) -> np.ndarray:
    """Nearest neighbour `[T, H, W]` tokens to `[frames, height, width]` pixels, frame i of the tokens at `times[i]`."""
    rows, columns = (torch.arange(n) * size // n for n, size in zip((height, width), values.shape[1:], strict=True))
    return values[torch.tensor(times)][:, rows][:, :, columns].numpy()


def _outline(mask: np.ndarray, thickness: int) -> np.ndarray:
    """The inner border of a boolean picture."""
    inner = mask.copy()
    for _ in range(thickness):
        padded = np.pad(inner, 1, constant_values=False)
        inner &= padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return mask & ~inner


def attention_overlay(
    video: Tensor, tiles: Tensor, share: Tensor, query_tokens: Tensor, times: Sequence[int]
) -> Tensor:
    """A clip with the tiles one query tile selects tinted and the query tile outlined.

    Args:
        video: uint8 `[T, H, W, 3]`.
        tiles: int64 token grid of kv tile numbers from `tile_map`.
        share: float `[Nkv]`, share of heads that select each tile; the tint's strength.
        query_tokens: bool token grid, True in the query tile.
        times: see `token_times`.

    Returns:
        float32 `[T, H, W, 3]` in [0, 1].
    """
    height, width = video.shape[1:3]
    # dimmed, so that the tint stands out on bright and dark clips
    base = video.float().numpy() / 255 * 0.6
    strength = to_pixels(share[tiles], times, height, width)[..., None] * 0.75
    picture = base * (1 - strength) + np.array(KEY_COLOUR, dtype=np.float32) * strength
    inside = to_pixels(query_tokens, times, height, width)
    thickness = max(1, min(height, width) // 48)
    for frame, mask in zip(picture, inside, strict=True):
        frame[_outline(mask, thickness)] = QUERY_COLOUR
    return torch.from_numpy(picture.astype(np.float32))


def attention_picture(
    video: Tensor,
    layout: TileLayout,
    kv_indices: Tensor,
    kv_num_blocks: Tensor,
    path: str | Path,
    *,
    times: Sequence[int],
    queries: Sequence[int] | None = None,
    frames: int = 4,
    title: str = "",
) -> Path:
    """Which tiles a few query tiles attend to, drawn over the frames of the clip: one row per query.

    Args:
        video: uint8 `[T, H, W, 3]`.
        layout: of the clip's one video segment.
        kv_indices: `[H, Nq, K]` as recorded.
        kv_num_blocks: `[H, Nq]`.
        path: PNG to write.
        times: see `token_times`.
        queries: query tiles; None picks the tiles of the frame's moving content: those that vary most.
        frames: frames shown, evenly spaced.
        title: above the picture.

    Raises:
        ValueError: the row is not one video, or a query is out of range.
    """
    tiles = tile_map(layout)
    share = selection_share(kv_indices, kv_num_blocks, layout.kv_blocks.num)
    if queries is None:
        queries = varied_tiles(video, tiles, times, count=3)
    bad = [q for q in queries if not 0 <= q < layout.num_blocks]
    if bad or not queries:
        raise ValueError(f"query tiles must lie in 0..{layout.num_blocks - 1}, got {list(queries)}")
    rows = [(f"query tile {query}", tiles == query, share[query]) for query in queries]
    kv_tiles = tile_map(layout, layout.kv_blocks)
    return attention_sheet(
        video, kv_tiles, rows, path, times=times, frames=frames, title=title, strength="brighter: by more heads"
    )


def attention_sheet(
    video: Tensor,
    tiles: Tensor,
    rows: Sequence[tuple[str, Tensor, Tensor]],
    path: str | Path,
    *,
    times: Sequence[int],
    frames: int = 4,
    title: str = "",
    strength: str,
) -> Path:
    """Frames of a clip with tinted tiles, one line per row.

    Args:
        video: uint8 `[T, H, W, 3]`.
        tiles: kv tiles, from `tile_map`.
        rows: name, bool token grid of the query tile and float `[Nkv]` strength of the tint in [0, 1].
        path: PNG to write.
        times: see `token_times`.
        frames: frames shown, evenly spaced.
        title: above the picture.
        strength: what it means, for the legend.
    """
    picked = torch.linspace(0, len(video) - 1, min(frames, len(video))).round().long().tolist()
    shown, shown_times = video[picked], [times[frame] for frame in picked]
    figure = Figure(figsize=(1.9 * len(picked) + 0.4, 1.95 * len(rows) + 1.0), layout="constrained")
    grid = figure.subplots(len(rows), len(picked), squeeze=False)
    for number, (row, (name, query, share)) in enumerate(zip(grid, rows, strict=True)):
        overlay = attention_overlay(shown, tiles, share, query, shown_times)
        for axes, frame, picture in zip(row, picked, overlay, strict=True):
            axes.imshow(picture.clamp(0, 1).numpy())
            axes.set_xticks([])
            axes.set_yticks([])
            if number == 0:
                axes.set_title(f"frame {frame}", fontsize=8)
        row[0].set_ylabel(name, fontsize=8)
    legend = [
        Patch(color=QUERY_COLOUR, label="query tile"),
        Patch(color=KEY_COLOUR, label=f"selected tiles ({strength})"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=2, fontsize=8)
    # of the figure's width, in letters
    set_title(figure.suptitle, title, width=round(9 * figure.get_figwidth()))
    return save_figure(figure, path)


def varied_tiles(video: Tensor, tiles: Tensor, times: Sequence[int], count: int) -> list[int]:
    """The `count` tiles whose pixels vary most, at most one per tile-time where there are enough of those.

    Args:
        video: uint8 `[T, H, W, 3]`.
        tiles: int64 token grid of tile numbers.
        times: see `token_times`.
        count: how many.
    """
    height, width = video.shape[1:3]
    of_pixel = torch.from_numpy(to_pixels(tiles, times, height, width)).flatten()
    grey = video.float().mean(-1).flatten()
    num = int(tiles.max()) + 1
    size = torch.bincount(of_pixel, minlength=num).clamp_min(1)
    mean = torch.zeros(num).index_add_(0, of_pixel, grey) / size
    variance = torch.zeros(num).index_add_(0, of_pixel, (grey - mean[of_pixel]) ** 2) / size
    start = torch.full((num,), tiles.shape[0]).scatter_reduce_(
        0, tiles.flatten(), torch.arange(tiles.shape[0]).repeat_interleave(tiles[0].numel()), "amin"
    )
    ranked = torch.argsort(variance, descending=True, stable=True).tolist()
    fresh, later, seen = [], [], set()
    for tile in ranked:
        (later if int(start[tile]) in seen else fresh).append(tile)
        seen.add(int(start[tile]))
    return sorted([*fresh, *later][:count], key=lambda tile: (int(start[tile]), tile))

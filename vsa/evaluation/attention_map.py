"""Attention maps: the tiles that a trained model selects in one denoising step, drawn over a sampled clip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor
from vsa_kernels import Blocks

from vsa.attention.context import Recorder
from vsa.attention.denoising import progress_of
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import TileLayout
from vsa.data.codecs import Codec
from vsa.diffusion.flow_matching import add_noise, noise_like, to_timestep
from vsa.models.network import Network
from vsa.plotting import QUERY, SELECTED, TITLE, save_figure, set_title
from vsa.sampling.first_frames import frames_of, image_inputs
from vsa.sampling.pipeline import (
    SampleSettings,
    SamplingPipeline,
    clip_seeds,
    decode_latents,
    encode_prompts,
    sample_latents,
)

QUERY_COLOUR, KEY_COLOUR = to_rgb(QUERY), to_rgb(SELECTED)


@torch.no_grad()
def record_attention(
    model: Network,
    latents: Tensor,
    text: Tensor,
    text_mask: Tensor | None,
    **how: Any,
) -> dict[int, dict[str, Tensor]]:
    """Record the selection of each sparse layer in a denoising step of `latents` at one noise level.

    Args:
        model: velocity model.
        latents: normalised `[1, C, T, H, W]`.
        text: `[1, S, E]`.
        text_mask: bool `[1, S]`, or None.
        how: arguments of `denoise_once`.

    Returns:
        By layer, the recorded `kv_indices` `[1, H, Nq, K]`, `kv_num_blocks` `[1, H, Nq]` and scores, if there are any,
        on the CPU. Empty if no layer records (dense attention).
    """
    records: dict[int, dict[str, Tensor]] = {}

    def recorder(layer_idx: int, tensors: dict[str, Tensor]) -> None:
        # the other tensors are as long as the sequence
        names = [name for name in ("scores", "kv_indices", "kv_num_blocks") if name in tensors]
        records[layer_idx] = {name: tensors[name].detach().cpu() for name in names}

    denoise_once(model, latents, text, text_mask, recorder=recorder, **how)
    return records


@torch.no_grad()
def denoise_once(
    model: Network,
    latents: Tensor,
    text: Tensor,
    text_mask: Tensor | None,
    *,
    sigma: float,
    topk: KeptTiles,
    recorder: Recorder | None = None,
    seed: int = 0,
    images: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """One forward on `latents` with the noise of a seed at one noise level; arguments as in `record_attention`, and

    Args:
        sigma: noise level in [0, 1].
        topk: kv tiles per query tile.
        recorder: see `AttnContext`.
        seed: seed of the noise.
        images: image conditions, by the names of `Network.forward`.
    """
    level = torch.full((1,), sigma, device=latents.device)
    x_t = add_noise(latents, noise_like(latents, clip_seeds(seed, [""])), level)
    model(x_t, to_timestep(level), text, text_mask, **images, topk=topk, recorder=recorder)


def draw_attention(run: SamplingPipeline, prompt: str, settings: SampleSettings, path: Path | None) -> Path | None:
    """Sample a clip and draw the tiles that three of its query tiles attend to, halfway through the denoising.

    The layer is the middle one of those that select tiles.

    Args:
        run: run from `load_run`, with sparse attention.
        prompt: caption of the clip.
        settings: sampling settings; the clip is that of `generate`.
        path: PNG to write; None runs the model without drawing (on ranks other than the first, with sharded weights).
    """
    sigma = 0.5
    seeds = clip_seeds(settings.seed, [prompt])
    given = frames_of(run, [prompt], settings.latent_shape)
    latents = sample_latents(run.model, run.text_encoder, [prompt], seeds, settings, given=given)
    video = decode_latents(run.codec, latents, run.statistics)[0]
    text, mask = encode_prompts(run.text_encoder, [prompt], run.device, settings.text_padding)
    how: dict[str, Any] = {"topk": settings.topk, "seed": settings.seed, "images": image_inputs(given)}
    records = record_attention(run.model, latents, text, mask, sigma=sigma, **how)
    records = {index: tensors for index, tensors in records.items() if "kv_indices" in tensors}
    if not records:
        raise ValueError(f"{run.source} selects no tiles (dense attention, or all tiles are kept): nothing to draw")
    layer = sorted(records)[len(records) // 2]
    if path is None:
        return None
    layout = run.model.layout_for(settings.latent_shape)
    topk = settings.topk.at(progress_of(1000 * sigma)).layer(layer)
    caption = " ".join(prompt.split())
    return attention_picture(
        video,
        layout,
        records[layer]["kv_indices"][0],
        records[layer]["kv_num_blocks"][0],
        path,
        times=token_times(run.codec, len(video), run.model.patch_size[0]),
        title=f"{caption}\nlayer {layer}, sigma {sigma:g}: {topk} of {layout.num_video_tiles} tiles per query",
    )


def tile_map(layout: TileLayout, blocks: Blocks | None = None) -> Tensor:
    """Tile of each token of a row of one video, int64 `[T, H, W]`.

    Args:
        layout: layout of the row.
        blocks: the tiles, such as `layout.kv_blocks`, the selected ones; None: `layout.blocks`, those of the queries.
    """
    if len(layout.segments) != 1 or layout.segments[0].kind not in ("video", "image"):
        raise ValueError(f"a tile map needs a row of one video, got {[s.kind for s in layout.segments]}")
    blocks = layout.blocks if blocks is None else blocks
    tiles = torch.empty(layout.num_tokens, dtype=torch.int64)
    tiles[layout.order.cpu()] = torch.arange(blocks.num).repeat_interleave(blocks.sizes.cpu().long())
    return tiles.view(layout.segments[0].grid_thw)


def token_times(codec: Codec, num_frames: int, patch: int) -> list[int]:
    """Time index of the token that contains each frame of a clip; a causal codec has one frame in its first cell.

    Args:
        codec: codec of the latents.
        num_frames: number of frames, one that the codec can encode.
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
        kv_indices: int `[H, Nq, K]`; only the first `kv_num_blocks` entries of a row are valid.
        kv_num_blocks: int `[H, Nq]`.
        num_blocks: number of kv tiles.
    """
    heads, queries, capacity = kv_indices.shape
    valid = torch.arange(capacity) < kv_num_blocks.cpu()[..., None]
    # entries past the count are arbitrary and go to a spare column
    columns = torch.where(valid, kv_indices.cpu().long(), num_blocks)
    selection = torch.zeros(heads, queries, num_blocks + 1).scatter_(2, columns, 1.0)
    return selection[..., :num_blocks].mean(0)


def to_pixels(values: Tensor, times: Sequence[int], height: int, width: int) -> np.ndarray:
    """Nearest-neighbour upsampling of tokens `[T, H, W]` to `[frames, height, width]`; frame i is at `times[i]`."""
    rows, columns = (torch.arange(n) * size // n for n, size in zip((height, width), values.shape[1:], strict=True))
    return values[torch.tensor(times)][:, rows][:, :, columns].numpy()


def _outline(mask: np.ndarray, thickness: int) -> np.ndarray:
    """Inner border of a boolean mask."""
    inner = mask.copy()
    for _ in range(thickness):
        padded = np.pad(inner, 1, constant_values=False)
        inner &= padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return mask & ~inner


def attention_overlay(
    video: Tensor, tiles: Tensor, share: Tensor, query_tokens: Tensor, times: Sequence[int]
) -> Tensor:
    """A clip with an outlined query tile and a tint on the tiles that it selects.

    Args:
        video: uint8 `[T, H, W, 3]`.
        tiles: int64 token grid of kv tile indices from `tile_map`.
        share: float `[Nkv]`, share of heads that select each tile, the strength of the tint.
        query_tokens: bool token grid, True in the query tile.
        times: see `token_times`.

    Returns:
        float32 `[T, H, W, 3]` in [0, 1].
    """
    height, width = video.shape[1:3]
    # dimmed, so that the tint is visible on bright and dark clips
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
    title: str = "",
) -> Path:
    """Picture of the tiles that the three query tiles whose pixels vary most, the moving content, attend to.

    Args:
        video: uint8 `[T, H, W, 3]`.
        layout: layout of the clip's video segment.
        kv_indices: `[H, Nq, K]`, recorded.
        kv_num_blocks: `[H, Nq]`, recorded.
        path: PNG to write.
        times: see `token_times`.
        title: title above the picture.
    """
    tiles, kv_tiles = tile_map(layout), tile_map(layout, layout.kv_blocks)
    share = selection_share(kv_indices, kv_num_blocks, layout.kv_blocks.num)
    queries = varied_tiles(video, tiles, times, count=3)
    rows = [(f"query tile {query}", tiles == query, share[query]) for query in queries]
    return attention_sheet(video, kv_tiles, rows, path, times=times, title=title, strength="brighter: by more heads")


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
        frames: number of frames, evenly spaced.
        title: title above the picture.
        strength: meaning of the tint's strength, for the legend.
    """
    picked = torch.linspace(0, len(video) - 1, min(frames, len(video))).round().long().tolist()
    picked_frames, shown_times = video[picked], [times[frame] for frame in picked]
    figure = Figure(figsize=(1.9 * len(picked) + 0.4, 1.95 * len(rows) + 1.0), layout="constrained")
    grid = figure.subplots(len(rows), len(picked), squeeze=False)
    for number, (row, (name, query, share)) in enumerate(zip(grid, rows, strict=True)):
        overlay = attention_overlay(picked_frames, tiles, share, query, shown_times)
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
    set_title(figure.suptitle, title, width=round(TITLE * figure.get_figwidth()))
    return save_figure(figure, path)


def varied_tiles(video: Tensor, tiles: Tensor, times: Sequence[int], count: int) -> list[int]:
    """The `count` tiles whose pixels vary most, at most one per time index of the tiles if there are enough.

    Args:
        video: uint8 `[T, H, W, 3]`.
        tiles: int64 token grid of tile indices.
        times: see `token_times`.
        count: number of tiles.
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
    fresh, later, used_starts = [], [], set()
    for tile in ranked:
        (later if int(start[tile]) in used_starts else fresh).append(tile)
        used_starts.add(int(start[tile]))
    return sorted([*fresh, *later][:count], key=lambda tile: (int(start[tile]), tile))

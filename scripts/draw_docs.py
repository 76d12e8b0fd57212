"""Figures of README and docs.

    python -m scripts.draw_docs methods docs/attention
    python -m scripts.draw_docs selection RUN VIDEOS/toy-5-000001.mp4 docs/selection.gif --query 41 --heads 1:2 0:1

`methods` computes every attention method on a small grid and draws the attention weights of one query on all tokens.
`selection` draws the tiles that one query tile of a trained model selects over the frames of a clip, as a GIF. The
run and the clip of the README were created with

    vsa train experiment=quickstart data=toy_online data.toy.size=[16,256,256] tile_thw=[1,2,2] data.batch_size=4 \\
        trainer.max_steps=309 optim.schedule.total_steps=700 trainer.val_check_interval=100
    vsa toy VIDEOS --count 8 --size 16 256 256 --seed 5
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from vsa.attention.context import AttnContext
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.data.video_files import write_gif
from vsa.errors import one_line_errors
from vsa.evaluation.attention_map import attention_overlay, tile_map, token_times, varied_tiles
from vsa.evaluation.comparison.methods import parse_method
from vsa.evaluation.comparison.synthetic import draw_captures
from vsa.evaluation.inspection.clip import open_clip, open_inspected
from vsa.evaluation.inspection.measure import Shown, inspect_clip
from vsa.plotting import save_figure
from vsa.sampling.pipeline import encode_prompts

GRID, TILE = (4, 12, 12), (2, 3, 3)
QUERY = (1, 5, 7)
"""The token whose weights are drawn."""
METHODS = {
    "full": "full",
    "video_sparse": "video_sparse topk=6 fine_gate=true",
    "staged": "staged stages=l window_thw=[2,3,3]",
    "pooled_tail": "pooled_tail topk=6",
    "compressed_kv": "compressed_kv pool_thw=[2,3,3]",
    "spatial_temporal": "spatial_temporal",
    "strided_window": "strided_window",
    "neighborhood": "neighborhood window_thw=[3,5,5] stride_thw=[1,1,1]",
    "sparge": "sparge q_tokens=16 kv_tokens=16 tau=0.7 theta=-1",
    "fine_grained": "fine_grained q_tokens=16 kv_tokens=4 top_p=0.6",
    "dynamic_hilbert": "dynamic_hilbert topk=6 tokens=16 sub_tokens=4",
}
WEAKEST = 1e-5


def attention_weights(method: str, q: Tensor, k: Tensor, layer: int = 0) -> Tensor:
    """Weights of every query on every key, `[L, L]` in raster order: the output of the method for the identity as v.

    Args:
        method: see `parse_method`; the gates of VSA are one half each, so that both stages are visible.
        q: `[1, L, 1, L]` queries in raster order; the head dim is the number of tokens, so that v can be the identity.
        k: keys of the same shape.
        layer: index of the layer, on which the groups of `spatial_temporal` and similar methods depend.
    """
    tokens = q.shape[1]
    parsed_method = parse_method(method, tile_thw=TILE)
    attention = parsed_method.make(dim=tokens, num_heads=1, head_dim=tokens, layer_idx=layer)
    layout = attention.layout([Segment(GRID)], None)
    extra = attention.project(q.new_zeros(1, tokens, tokens))
    if {"gate_compress", "gate_fine"} <= extra.keys():
        extra = {name: torch.full_like(gate, 0.5) for name, gate in extra.items()}
    q, k, v = (layout.permute(x).contiguous() for x in (q, k, torch.eye(tokens)[None, :, None]))
    context = AttnContext(layout=layout, topk=KeptTiles.of(parsed_method.kept(layout)), layer_idx=layer)
    return layout.unpermute(attention.attend_combine(q, k, v, extra, context))[0, :, 0]


def draw_weights(weights: Sequence[Tensor], path: Path) -> None:
    """Draw the weights of `QUERY` over the frames of the grid, one row of frames for each of `weights` `[L, L]`."""
    frames = GRID[0]
    figure = Figure(figsize=(1.35 * frames, 1.38 * len(weights)), layout="constrained")
    # transparent, because the page may be light or dark
    figure.patch.set_alpha(0)
    grid = figure.subplots(len(weights), frames, squeeze=False)
    token = int(torch.arange(GRID[0] * GRID[1] * GRID[2]).view(GRID)[QUERY])
    for axes, matrix in zip(grid, weights, strict=True):
        for frame, cell in enumerate(axes):
            row = matrix[token].view(GRID)[frame].detach()
            cell.imshow(row.clamp_min(0).numpy(), cmap="YlOrRd", norm=LogNorm(WEAKEST, 0.1, clip=False))
            # background for tokens that are not attended to
            cell.set_facecolor("#b9bec6")
            cell.images[0].get_cmap().set_under(alpha=0)
            cell.set_xticks([])
            cell.set_yticks([])
            if frame == QUERY[0]:
                corner = (QUERY[2] - 0.5, QUERY[1] - 0.5)
                cell.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="#0a9a3a", linewidth=2))
    save_figure(figure, path)


def methods(args: argparse.Namespace) -> None:
    """Draw a PNG of every method."""
    tokens = GRID[0] * GRID[1] * GRID[2]
    # the second head has fields that vary over two tokens
    fields = draw_captures(GRID, heads=2, head_dim=tokens, seed=3).items[0]
    q, k = (x[:, :, 1:].contiguous() for x in (fields.q, fields.k))
    args.out.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        for name, method in METHODS.items():
            layers = (0, 1) if name in ("spatial_temporal", "strided_window") else (0,)
            draw_weights([attention_weights(method, q, k, layer) for layer in layers], args.out / f"{name}.png")
    print(f"{len(METHODS)} pictures in {args.out}")


def selection(args: argparse.Namespace) -> None:
    """Write a GIF of the tiles that one query tile selects: the clip beside overlays of the tiles of each head."""
    run = open_inspected(args.run)
    clip = open_clip(run, args.clip)
    settings = run.settings(latent_shape=tuple(clip.latents.shape))
    layout = run.model.layout_for(settings.latent_shape)
    times = token_times(run.codec, len(clip.video), run.model.patch_size[0])
    query = varied_tiles(clip.video, tile_map(layout), times, count=1)[0] if args.query is None else args.query
    layers, heads = (tuple(sorted(set(numbers))) for numbers in zip(*args.heads, strict=True))
    text, mask = encode_prompts(run.text_encoder, [clip.caption], run.device, run.text_padding)
    inspection = inspect_clip(
        run.model,
        run.statistics.normalise(clip.latents[None]),
        text,
        mask,
        timesteps=(args.timestep,),
        topk=settings.topk,
        shown=Shown(layers=layers, heads=heads, queries=(query,)),
        layers=layers,
    )
    panels = [clip.video.float() / 255]
    for layer, head in args.heads:
        tiles = inspection.selected[0, layers.index(layer), heads.index(head), 0].float()
        panels.append(attention_overlay(clip.video, inspection.tiles, tiles, inspection.query_tiles == query, times))
        recall = inspection.table("recall")[0, layers.index(layer), head]
        print(f"layer {layer}, head {head}: {int(tiles.sum())} of {len(tiles)} tiles, recall {recall:.0%}")
    gap = torch.ones(*panels[0].shape[:2], 8, 3)
    pieces = [part for panel in panels for part in (gap, panel)][1:]
    write_gif(args.out, (torch.cat(pieces, dim=2) * 255).round().byte(), fps=args.fps)
    print(f"{args.out}: {clip.caption!r}, step {run.step}, query tile {query}")


def layer_head(text: str) -> tuple[int, int]:
    """Layer and head from a text like 1:2."""
    layer, _, head = text.partition(":")
    return int(layer), int(head)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    of_methods = commands.add_parser("methods", help="weights of every attention method")
    of_methods.add_argument("out", type=Path, help="folder for the PNGs")
    of_methods.set_defaults(draw=methods)
    of_run = commands.add_parser("selection", help="tiles that a trained model selects")
    of_run.add_argument("run", help="run folder")
    of_run.add_argument("clip", help="video file")
    of_run.add_argument("out", type=Path, help="GIF to write")
    of_run.add_argument("--heads", type=layer_head, nargs="+", default=[(0, 0)], metavar="LAYER:HEAD")
    of_run.add_argument("--timestep", type=float, default=300, help="1000 is noise")
    of_run.add_argument("--query", type=int, help="query tile (default: where the clip changes most)")
    of_run.add_argument("--fps", type=float, default=6)
    of_run.set_defaults(draw=selection)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    args = parse_args(argv)
    with one_line_errors():
        args.draw(args)


if __name__ == "__main__":
    main()

"""Arguments of `vsa toy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vsa.cli.options import MANY, option
from vsa.cli.values import made_of


def toy(
    out: Annotated[Path, typer.Argument(help="folder for the mp4 files and captions.jsonl")],
    count: Annotated[int | None, option("number of clips (1024)", whole=(1, 10_000_000))] = None,
    size: Annotated[
        tuple[int, int, int] | None,
        option("size of a clip (16 128 128)", whole=(1, 8192), metavar="FRAMES HEIGHT WIDTH"),
    ] = None,
    seed: Annotated[int | None, option("seed of the set (0)", whole=(0, MANY))] = None,
    fps: Annotated[int | None, option("frame rate (8)", whole=(1, 240))] = None,
) -> None:
    """Render captioned toy clips of moving shapes as mp4 files.

    A caption names colour, shape, direction and speed, so that a sampled clip can be scored on its pixels.

    \b
    vsa toy data/toy/videos
    vsa toy VIDEOS --count 64 --size 16 64 64
    """
    arguments = locals()
    from vsa.data.toy_videos import ToyClips, write_toy_videos

    clips = made_of(ToyClips, arguments)
    write_toy_videos(clips, out)
    frames, height, width = clips.size
    print(f"{clips.count} clips of {frames}x{height}x{width} in {out}")

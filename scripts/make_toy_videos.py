"""Renders captioned toy clips as mp4 files: moving shapes whose caption names colour, shape, direction and speed."""

from __future__ import annotations

import argparse

from vsa.data.toy_videos import ToyClips, write_toy_videos
from vsa.errors import one_line_errors


def main() -> None:
    """Command line entry."""
    defaults = ToyClips()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="folder for the mp4 files and captions.jsonl")
    parser.add_argument("--count", type=int, default=defaults.count, help="number of clips (default %(default)s)")
    parser.add_argument(
        "--size",
        type=int,
        nargs=3,
        default=defaults.size,
        metavar=("FRAMES", "HEIGHT", "WIDTH"),
        help="default 16 128 128",
    )
    parser.add_argument("--seed", type=int, default=defaults.seed, help="seed of the set (default %(default)s)")
    parser.add_argument("--fps", type=int, default=defaults.fps, help="frames per second (default %(default)s)")
    args = parser.parse_args()
    with one_line_errors():
        frames, height, width = args.size
        clips = ToyClips(count=args.count, size=(frames, height, width), seed=args.seed, fps=args.fps)
        write_toy_videos(clips, args.out)
        print(f"{clips.count} clips of {frames}x{height}x{width} in {args.out}")


if __name__ == "__main__":
    main()

"""Encodes a folder of captioned videos and images to latent and text shards that training reads.

Captions come from captions.jsonl in the folder (lines of {"video": "a.mp4", "captions": ["...", "..."]}), from the file
named with --captions (.jsonl, .json or .txt with name, tab, caption), or from a.txt beside a.mp4.
"""

from __future__ import annotations

import argparse

from vsa.cli import one_line_errors
from vsa.data.codecs import HaarCodec
from vsa.data.encode import encode_folder
from vsa.data.text import HashedNgramEncoder


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", help="folder of videos and images, searched with its subfolders")
    parser.add_argument("out", help="folder of shards to write")
    parser.add_argument("--captions", help="caption file")
    parser.add_argument(
        "--size",
        type=int,
        nargs=2,
        metavar=("HEIGHT", "WIDTH"),
        help="scale to cover and crop the middle (default: as is)",
    )
    parser.add_argument("--frames", type=int, help="frames of a clip, from the start (default: all)")
    parser.add_argument("--fps", type=float, help="resample to that frame rate (default: as stored)")
    parser.add_argument("--channels", type=int, default=16, help="latent channels of the codec (default %(default)s)")
    parser.add_argument("--text-dim", type=int, default=64, help="width of a text token (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=16, help="text tokens of a caption (default %(default)s)")
    parser.add_argument("--dtype", default="float16", help="float16, bfloat16 or float32 latents (default %(default)s)")
    parser.add_argument("--samples-per-shard", type=int, default=1024, help="default %(default)s")
    parser.add_argument("--device", default="cpu", help="where the codec runs (default %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace the data set in OUT")
    parser.add_argument("--skip-bad", action="store_true", help="leave out and list videos that do not decode")
    args = parser.parse_args()
    with one_line_errors():
        report = encode_folder(
            args.videos,
            args.out,
            codec=HaarCodec(args.channels),
            text_encoder=HashedNgramEncoder(args.text_dim, args.max_tokens),
            captions=args.captions,
            size=tuple(args.size) if args.size else None,
            frames=args.frames,
            fps=args.fps,
            dtype=args.dtype,
            samples_per_shard=args.samples_per_shard,
            overwrite=args.overwrite,
            skip_bad=args.skip_bad,
            device=args.device,
        )
        for name, reason in report.skipped:
            print(f"left out {name}: {reason}")
        print(f"{report.samples} samples in {args.out}, {len(report.skipped)} left out")


if __name__ == "__main__":
    main()

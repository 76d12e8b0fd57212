"""Encodes a folder of captioned videos and images to latent and text shards that training reads.

Captions come from captions.jsonl in the folder (lines of {"video": "a.mp4", "captions": ["...", "..."]}), from the file
named with --captions (.jsonl, .json or .txt with name, tab, caption), or from a.txt beside a.mp4.

Codec and text encoder are the embedded ones (Haar wavelets, hashed n-grams) unless Wan's are named:
python scripts/encode_videos.py videos shards --model Wan2.1-T2V-1.3B-Diffusers --buckets 448x832x61 480x480x33

An interrupted command is repeated to go on. To share the work, run it with --rank R --world-size N on every GPU, then
once without them.
"""

from __future__ import annotations

import argparse
import shlex
import sys

from vsa.data.buckets import Bucket
from vsa.data.codecs import Codec, HaarCodec, WanVAE
from vsa.data.encode import UnusableFiles, encode_folder
from vsa.data.shards import LatentReader
from vsa.data.text import HashedNgramEncoder, TextEncoder, UMT5Encoder
from vsa.errors import one_line_errors, usable_device

# problems that are told one by one, the rest is counted
LISTED = 20


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", help="folder of videos and images, searched with its subfolders")
    parser.add_argument("out", help="folder of shards to write")
    parser.add_argument("--captions", help="caption file")

    clips = parser.add_argument_group("clips")
    clips.add_argument(
        "--size",
        type=int,
        nargs=2,
        metavar=("HEIGHT", "WIDTH"),
        help="scale to cover and crop the middle (default: as is, cropped to whole patches)",
    )
    clips.add_argument("--frames", type=int, help="frames of a clip, from the start (default: all)")
    clips.add_argument("--fps", type=float, help="resample to that frame rate (default: as stored)")
    clips.add_argument(
        "--buckets",
        nargs="+",
        default=[],
        metavar="HxWxT",
        help="clip sizes to choose from: of those a video can fill, the nearest in aspect, then the longest",
    )

    encoders = parser.add_argument_group("encoders")
    encoders.add_argument("--model", help="Wan pipeline folder or hub id: its VAE and its text encoder")
    encoders.add_argument("--vae", help="the same for the VAE alone, or a VAE folder")
    encoders.add_argument("--text", help="the same for the text encoder alone")
    types = ("float32", "bfloat16", "float16")
    encoders.add_argument("--vae-dtype", default="float32", choices=types, help="it computes in (default %(default)s)")
    encoders.add_argument("--text-dtype", default="bfloat16", choices=types, help="the same (default %(default)s)")
    encoders.add_argument(
        "--channels",
        type=int,
        default=16,
        help="channels of the Haar codec, the coarsest first: 24, 48 or 192 keep more detail (default %(default)s)",
    )
    encoders.add_argument("--text-dim", type=int, default=64, help="width of an n-gram token (default %(default)s)")
    encoders.add_argument("--max-tokens", type=int, help="tokens of a caption (default 16; 512 for Wan)")
    encoders.add_argument("--device", default="cpu", help="where the encoders run (default %(default)s)")
    encoders.add_argument(
        "--image-condition",
        action="store_true",
        help="store the first-frame condition of image-to-video models with every clip (needs Wan's VAE)",
    )

    output = parser.add_argument_group("output")
    output.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"), help="of the latents")
    output.add_argument(
        "--samples-per-shard", type=int, default=256, help="also what an interruption costs (default %(default)s)"
    )
    output.add_argument("--overwrite", action="store_true", help="replace the data set in OUT")
    output.add_argument("--skip-bad", action="store_true", help="leave out and list what cannot be encoded")
    output.add_argument("--rank", type=int, default=0, help="number of this process (default %(default)s)")
    output.add_argument("--world-size", type=int, default=1, help="processes that share the work (default %(default)s)")
    return parser.parse_args(argv)


def make_encoders(args: argparse.Namespace) -> tuple[Codec, TextEncoder]:
    """The codec and the text encoder that the command line names."""
    vae, text = args.vae or args.model, args.text or args.model
    codec = WanVAE(vae, dtype=args.vae_dtype) if vae else HaarCodec(args.channels)
    if text:
        tokens = args.max_tokens or 512
        return codec, UMT5Encoder(text, max_tokens=tokens, dtype=args.text_dtype, device=args.device)
    return codec, HashedNgramEncoder(args.text_dim, args.max_tokens or 16)


def training_settings(args: argparse.Namespace) -> list[str]:
    """The settings with which train.py reads the shards: those of its data groups, and what differs from them."""
    if args.vae or args.text:
        # parts of two pipelines: there is no data group for that
        return []
    if args.model:
        return ["data=wan", f"data.root={args.out}", f"data.codec.source={args.model}"]
    settings = ["data=folder", f"data.root={args.out}"]
    if args.channels != 16:
        keys = ("data.codec.channels", "model.in_channels", "model.out_channels")
        settings += [f"{key}={args.channels}" for key in keys]
    if args.text_dim != 64:
        settings += [f"{key}={args.text_dim}" for key in ("data.text_encoder.dim", "model.text_dim")]
    if args.max_tokens not in (None, 16):
        settings.append(f"data.text_encoder.max_tokens={args.max_tokens}")
    return settings


def main(argv: list[str] | None = None) -> None:
    """Command line entry."""
    args = parse_args(argv)
    args.device = usable_device(args.device, rank=args.rank)
    codec, text_encoder = make_encoders(args)
    try:
        report = encode_folder(
            args.videos,
            args.out,
            codec=codec,
            text_encoder=text_encoder,
            captions=args.captions,
            size=tuple(args.size) if args.size else None,
            frames=args.frames,
            fps=args.fps,
            buckets=[Bucket.parse(text) for text in args.buckets],
            image_condition=args.image_condition,
            dtype=args.dtype,
            samples_per_shard=args.samples_per_shard,
            overwrite=args.overwrite,
            skip_bad=args.skip_bad,
            device=args.device,
            rank=args.rank,
            world_size=args.world_size,
        )
    except UnusableFiles as error:
        # the error itself tells of one
        for name, reason in error.problems[:LISTED] if len(error.problems) > 1 else ():
            print(f"{name}: {reason}", file=sys.stderr)
        if len(error.problems) > LISTED:
            print(f"and {len(error.problems) - LISTED} more", file=sys.stderr)
        raise
    for name, reason in report.skipped:
        print(f"left out {name}: {reason}")
    if args.world_size == 1:
        print(LatentReader(args.out).index.summary())
    elif report.complete:
        print("every part is done: run the command once more without --rank and --world-size")
    print(f"{report.samples} samples in {args.out}, {len(report.skipped)} left out")
    if args.world_size == 1 and (settings := training_settings(args)):
        print(f"to train on them: python train.py {shlex.join(settings)}")


if __name__ == "__main__":
    with one_line_errors():
        main()

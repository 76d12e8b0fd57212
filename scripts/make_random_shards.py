"""Shards of random latents, for speed measurements of training with any latent shape, without videos and encoders."""

from __future__ import annotations

import argparse

import torch

from vsa.data.codecs import HaarCodec
from vsa.data.shard_writer import ShardWriter
from vsa.data.text import HashedNgramEncoder
from vsa.errors import one_line_errors


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="folder for the shards")
    parser.add_argument("--count", type=int, default=64, help="samples (default %(default)s)")
    parser.add_argument(
        "--latent",
        type=int,
        nargs=4,
        default=(16, 16, 64, 64),
        metavar=("CHANNELS", "FRAMES", "HEIGHT", "WIDTH"),
        help="latents of a sample, default 16 16 64 64: a token grid of 16 x 32 x 32 with Wan's patches",
    )
    parser.add_argument("--text-dim", type=int, default=4096, help="width of the text embeddings (default %(default)s)")
    parser.add_argument("--text-tokens", type=int, default=16, help="length of padded captions (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with one_line_errors():
        if min(args.count, args.text_tokens, *args.latent) < 1:
            numbers = f"{args.count}, {list(args.latent)} and {args.text_tokens}"
            raise ValueError(f"count, latent and text-tokens must be above 0, got {numbers}")
        g = torch.Generator().manual_seed(args.seed)
        codec = HaarCodec(channels=args.latent[0])
        text = HashedNgramEncoder(dim=args.text_dim, max_tokens=args.text_tokens)
        with ShardWriter(args.out, codec=codec, text_encoder=text) as writer:
            for n in range(args.count):
                latents = torch.randn(*args.latent, generator=g)
                writer.add(f"random-{n:06d}", latents, [f"random latents number {n}"], {})
        print(f"{args.count} samples of {'x'.join(map(str, args.latent))} in {args.out}")


if __name__ == "__main__":
    main()

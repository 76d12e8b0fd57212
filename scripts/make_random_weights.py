"""A safetensors folder of random weights in diffusers' layout, to measure how finetuning starts without a download."""

from __future__ import annotations

import argparse

import torch
import yaml

from vsa.attention.full import FullAttention
from vsa.checkpoints.wan import export_pretrained
from vsa.config import config_folder
from vsa.errors import one_line_errors
from vsa.models.video_dit import VideoDiT


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="folder for the weights, which must not exist")
    parser.add_argument("--model", default="wan_1_3b", help="name of a model config (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with one_line_errors():
        names = sorted(path.stem for path in (config_folder() / "model").glob("*.yaml"))
        if args.model not in names:
            raise ValueError(f"--model must be one of {', '.join(names)}, got {args.model!r}")
        size = yaml.safe_load((config_folder() / "model" / f"{args.model}.yaml").read_text(encoding="utf-8"))
        del size["_target_"]
        torch.manual_seed(args.seed)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = VideoDiT(attention=FullAttention, **size)
        export_pretrained(model, args.out, sparse=None)
        print(
            f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M random parameters of {args.model} in {args.out}"
        )


if __name__ == "__main__":
    main()

"""Train a video diffusion transformer: `python train.py experiment=quickstart`, which is `vsa train`."""

import sys

from vsa.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])

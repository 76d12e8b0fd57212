"""Train a video diffusion transformer: `python train.py experiment=quickstart`, which is `vsa train`."""

import sys

from vsa.signals import end_at_once, handled_by

if __name__ == "__main__":
    # before anything is loaded, which takes seconds
    with handled_by(end_at_once):
        from vsa.cli import main

        main(["train", *sys.argv[1:]])

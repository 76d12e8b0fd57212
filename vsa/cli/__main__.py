"""`python -m vsa.cli` is the same as `vsa`; a sweep starts its runs with it."""

import sys

from vsa.sweeps.lifeline import end_with_sweep

if __name__ == "__main__":
    words = end_with_sweep(sys.argv[1:])

    from vsa.cli import main

    main(words)

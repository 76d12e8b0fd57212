"""Train as `train.py` does, with torch's own operations in place of the fused elementwise kernels.

These are `residual_norm`, `gated_residual` and `linear_gelu` in the embeddings and `norm_rope` in the blocks. Beside a
run of `train.py` with the same settings it shows whether both converge equally.
"""

import sys
from functools import partial

from vsa.signals import end_at_once, handled_by


def use_reference() -> None:
    """Let all models of this process compute these operations by their reference backend."""
    from vsa.models import blocks, embeddings

    names = [(embeddings, name) for name in ("residual_norm", "gated_residual", "linear_gelu")]
    for module, name in (*names, (blocks, "norm_rope")):
        setattr(module, name, partial(getattr(module, name), backend="reference"))


if __name__ == "__main__":
    with handled_by(end_at_once):
        from vsa.cli import main

        use_reference()
        main(["train", *sys.argv[1:]])

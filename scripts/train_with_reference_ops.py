"""Train as `train.py` does, with torch's own operations in place of the fused elementwise kernels.

Beside a run of `train.py` with the same settings it shows whether both converge equally.
"""

import sys
from functools import partial

from vsa_kernels.operators import OPERATORS

from vsa.signals import end_at_once, handled_by


def use_reference() -> None:
    """Let all models of this process compute these operations by their reference backend."""
    from vsa.models import blocks, embeddings

    for module in (blocks, embeddings):
        for name, operator in OPERATORS.items():
            if operator.elementwise and hasattr(module, name):
                setattr(module, name, partial(getattr(module, name), backend="reference"))


if __name__ == "__main__":
    with handled_by(end_at_once):
        from vsa.cli import main

        use_reference()
        main(["train", *sys.argv[1:]])

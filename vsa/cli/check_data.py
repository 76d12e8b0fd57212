"""Arguments of `vsa check-data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def check_data(root: Annotated[Path, typer.Argument(help="folder of shards with index.json")]) -> None:
    """Read a data set whole: index, digests, encoders, shapes.

    Every problem is listed; exit status 1 when there is one.

    \b
    vsa check-data SHARDS
    """
    from vsa.data.check import check_dataset

    check_dataset(root)

"""Arguments of `vsa check-data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vsa.cli.options import option


def check_data(
    root: Annotated[Path, typer.Argument(help="folder of shards with index.json")],
    drop_list: Annotated[Path | None, option("list of bad samples to write (ROOT/drop.txt)")] = None,
) -> None:
    """Check a whole data set: index, digests, encoders, shapes, values, statistics.

    Lists every problem and exits with status 1 if there is one. Bad samples are written to a list; data.drop=FILE
    leaves them out of a training.

    \b
    vsa check-data SHARDS
    """
    from vsa.data.check import check_dataset

    check_dataset(root, drop_list)

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
    """Read a data set whole: index, digests, encoders, shapes, values, statistics.

    Every problem is listed; exit status 1 when there is one. Samples that cannot be trained on go to a list that
    training leaves out with data.drop=FILE.

    \b
    vsa check-data SHARDS
    """
    from vsa.data.check import check_dataset

    check_dataset(root, drop_list)

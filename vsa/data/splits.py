"""Which samples are held out together: those of one film may not lie on both sides of a split."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from vsa.data.index import SampleEntry

SplitBy = Literal["id", "file", "prefix", "field"]
"""`id`: each sample by itself; `file`: the samples of a file; `prefix`: those of files whose names differ in their last
number alone (`film7-0001.mp4` and `film7-0002.mp4`, or the files of a folder that are named by numbers); `field`: those
for which the caption file says the same."""

_LAST_NUMBER = re.compile(r"[^A-Za-z0-9/]*\d+$")


def split_group(by: SplitBy, field: str | None) -> Callable[[SampleEntry], str]:
    """The name of a sample's group.

    Args:
        by: what makes a group.
        field: name of the field in the caption file.

    Raises:
        ValueError: a field without `by="field"`, or the reverse; the function for a sample of which nothing is known.
    """
    if (by == "field") != (field is not None):
        raise ValueError(f"data.val_by=field needs data.val_field and the others take none, got {by} and {field}")

    def group(sample: SampleEntry) -> str:
        if by == "id":
            return sample.id
        if field is not None:
            if field not in sample.about.fields:
                raise ValueError(
                    f"data.val_field={field}: sample {sample.id} has no such field, a caption file gives it"
                )
            return sample.about.fields[field]
        source = sample.about.source
        if source is None:
            raise ValueError(
                f"data.val_by={by}: the index does not say which file sample {sample.id} comes from: encode the data "
                "set again, or use data.val_by=id"
            )
        return source if by == "file" else _LAST_NUMBER.sub("", source.rpartition(".")[0] or source)

    return group

"""Groups of samples that are held out together, so that clips of one film are never on both sides of a split."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from vsa.data.index import SampleEntry
from vsa.data.plan import hash64, is_validation

SplitBy = Literal["id", "file", "prefix", "field"]
"""`id`: each sample by itself; `file`: the samples of a file; `prefix`: the samples of files whose names differ only in
their last number (`film7-0001.mp4` and `film7-0002.mp4`, or the files of a folder that are named by numbers); `field`:
the samples with equal values of a field in the caption file."""

_LAST_NUMBER = re.compile(r"[^A-Za-z0-9/]*\d+$")


def split_group(by: SplitBy, field: str | None) -> Callable[[SampleEntry], str]:
    """Function from a sample to the name of its group.

    Args:
        by: definition of a group.
        field: name of the field in the caption file.
    """
    if (by == "field") != (field is not None):
        raise ValueError(f"data.val_field applies to data.val_by=field only, got val_by={by} and val_field={field}")

    def group(sample: SampleEntry) -> str:
        if by == "id":
            return sample.id
        if field is not None:
            if field not in sample.about.fields:
                raise ValueError(
                    f"data.val_field={field}: sample {sample.id} has no such field; it comes from the caption file"
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


def more_held_out(sizes: Mapping[str, int], fraction: float, least: int) -> set[str]:
    """Groups to hold out besides the fraction, until `least` samples are held out or half of all.

    Args:
        sizes: number of samples of every group.
        fraction: share of the groups that is held out by their hash, see `vsa.data.plan.is_validation`.
        least: number of samples to hold out.
    """
    count, total = sum(size for group, size in sizes.items() if is_validation(group, fraction)), sum(sizes.values())
    more: set[str] = set()
    for group in sorted(sizes, key=lambda group: hash64("validation", group)):
        if count < least and not is_validation(group, fraction) and count + sizes[group] <= total // 2:
            more.add(group)
            count += sizes[group]
    return more


def count_held_out(first: Sequence[SampleEntry], samples: Sequence[SampleEntry], data: Mapping[str, Any]) -> int:
    """How many of the samples of a run are held out from its training.

    Args:
        first: samples of the first phase, which decide on `val_least`.
        samples: all samples.
        data: settings of the data module of the run.
    """
    group, fraction = split_group(data.get("val_by", "id"), data.get("val_field")), data.get("val_fraction", 0.05)
    more = more_held_out(Counter(map(group, first)), fraction, data.get("val_least", 0)) if fraction else set()
    return sum(is_validation(name, fraction) or name in more for name in map(group, samples))

"""What a run says before its first step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vsa.data.plan import SampleRef
from vsa.training.callbacks.print_estimate import few_held_out

WORDS = "note: samples held out: {}; their loss says little about others (data.val_fraction)"


def data_of(films):
    """Held-out samples of these files."""
    refs = tuple(SampleRef(source="main", id=str(n)) for n in range(len(films)))

    def entry(source, sample):
        return SimpleNamespace(id=sample, about=SimpleNamespace(source=films[int(sample)], fields={}))

    return SimpleNamespace(held_out={(16, 4, 8, 8): refs}, store=SimpleNamespace(entry=entry))


@pytest.mark.parametrize(
    ("films", "told"),
    [
        (["dark.mp4"] * 2, "2, all of dark.mp4"),
        (["dark.mp4"] * 40, "40, all of dark.mp4"),
        (["a.mp4", "b.mp4"], "2"),
        ([None, None], "2"),
        ([f"{n}.mp4" for n in range(20)], None),
        ([None] * 20, None),
        ([], None),
    ],
)
def test_few_held_out_samples_and_those_of_one_film_are_told(films, told):
    found = few_held_out(data_of(films))
    assert found == (None if told is None else WORDS.format(told))


def test_data_without_an_index_are_counted():
    data = SimpleNamespace(held_out={(1, 1, 1, 1): (SampleRef(source="main", id="0"),)}, store=SimpleNamespace())
    assert few_held_out(data) == WORDS.format(1)
    assert few_held_out(SimpleNamespace(store=SimpleNamespace())) is None

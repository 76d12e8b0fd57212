"""Every "yes" in the table of families names tests that pytest collects, which run all families of the table."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT
from tests.integrations.test_trained_families import FAMILIES

JOBS = ("load", "train", "LoRA", "distil", "sample", "export")


def test_every_yes_names_a_test():
    text = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    # an item of the list may go on in further lines
    items = dict(re.findall(r"^(\d+)\. (.+?)(?=^\d+\. |\Z)", text, re.M | re.S))
    tests = {number: re.findall(r"`(tests/\S+::\w+)`", item) for number, item in items.items()}
    table = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]
    head = next(row for row in table if row[:2] == ["family", "class"])
    assert tuple(head[2:-1]) == JOBS
    rows = [row for row in table if len(row) == len(head) and row is not head and "---" not in row[0]]
    cells = [cell for row in rows for cell in row[2:-1] if cell != "no"]
    numbers = {number for cell in cells for number in re.findall(r"^yes \((\d+)\)$", cell) or [cell]}
    # every item is somebody's
    assert numbers == tests.keys()
    assert all(tests.values())
    paths = {path for own in tests.values() for path in own}
    # in this process, which has imported the models
    assert pytest.main(["--collect-only", "-qq", "-m", "", "-p", "no:cacheprovider", *sorted(paths)]) == 0
    # a family that trains is one that the tests train
    trained = {row[1] for row in rows if row[3] != "no"}
    assert trained == {type(family.make().model).__name__ for family in FAMILIES.values()}

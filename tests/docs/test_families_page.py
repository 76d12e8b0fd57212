"""Every "yes" in the table of families names a test of all families of the table."""

from __future__ import annotations

import importlib
import re

from tests.docs.pages import ROOT
from tests.integrations.test_trained_families import FAMILIES


def test_every_yes_names_a_test():
    text = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    tests = dict(re.findall(r"^(\d)\. \w+: `(tests/\S+)`", text, re.M))
    assert {*re.findall(r"\byes \((\d)\)", text)} == {*tests}
    for path in re.findall(r"`(tests/\S+::\w+)`", text):
        file, _, name = path.partition("::")
        assert callable(getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)), path
    rows = [line.split("|") for line in text.splitlines() if line.count("yes (") > 0]
    # every cell but the last says yes, for every class that the tests train
    assert all(len(row) == 11 and all("yes (" in cell for cell in row[3:9]) for row in rows)
    assert {row[2].strip(" `") for row in rows} == {type(family.make().model).__name__ for family in FAMILIES.values()}

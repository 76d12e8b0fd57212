"""docs/attention.md lists every attention method, by names and settings that exist, each with its own section."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vsa.attention.base import own_settings
from vsa.attention.named import NAMED
from vsa.integrations.diffusers.factories import named_factory

ROOT = Path(__file__).parents[1]
SIZES = {"dim": 16, "num_heads": 2, "head_dim": 8}


def rows() -> dict[str, str]:
    """Each method's row, by its name."""
    page = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if line.startswith("| [`")]
    return {name: line for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])}


def test_every_method_has_a_row():
    assert set(rows()) == {path.stem for path in (ROOT / "configs" / "attention").glob("*.yaml")}
    for name, line in rows().items():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 4, name
        assert all(cells), name


def test_settings_that_a_row_names_exist():
    for name in ("sparge", "fine_grained"):
        budget = rows()[name].strip("|").split("|")[1]
        names = set(re.findall(r"`(\w+)`", budget))
        assert names, name
        assert names <= set(own_settings(NAMED[name])), name


def test_every_method_has_a_section_and_those_that_are_drawn_a_picture():
    from scripts.draw_docs import METHODS

    page = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", page, re.M)}
    for name, line in rows().items():
        assert re.findall(r"\]\(#([\w-]+)\)", line)[0] in headings, name
    assert set(re.findall(r"\]\(attention/(\w+)\.png\)", page)) == set(METHODS) <= set(rows())


def test_the_methods_that_can_enter_diffusers_are_named():
    sentence = re.search(
        r"Every one of them can enter a pretrained diffusers model: .*?\n\n",
        (ROOT / "docs" / "attention.md").read_text(encoding="utf-8"),
        re.S,
    )
    assert sentence is not None

    # the sentence says how the one does whose settings begin with a gate, and which ones do not
    settings = {name: {} for name in rows()} | {"staged": {"stages": "f"}}
    assert "`staged` without `stages=f`, the presets `vsa` and\n`vsa2`) and `sla`" in sentence[0]
    for name in rows():
        if name in ("vsa", "vsa2", "sla"):
            with pytest.raises(ValueError, match=f"^{name} with these settings has parameters to train"):
                named_factory(name, {}, {}, None)
        else:
            assert not named_factory(name, {}, settings[name], None)(**SIZES).extra_modules(), name
    assert "each of which" in (ROOT / "README.md").read_text(encoding="utf-8")

"""One quantity has one value on all pages."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT


def stated(page: str, pattern: str) -> list[str]:
    return re.findall(pattern, (ROOT / page).read_text(encoding="utf-8"))


def test_the_number_of_runs_of_the_pilot():
    (own,) = stated("benchmarks/ablation/README.md", r"## The pilot: 2e16 FLOPs, (\d+) runs")
    assert stated("README.md", r"\[(\d+) runs") == [own]
    assert stated("README.md", r"all (\d+) runs at 2e16") == [own]
    assert stated("docs/benchmarks.md", r"the pilot's (\d+) runs") == [own]


def test_the_step_of_wan():
    (own,) = stated("docs/benchmarks.md", r"a finetuning step of Wan-1.3B's shape \| ([\d.]+) s")
    assert stated("README.md", r"23,296 tokens: \*\*([\d.]+) s\*\*") == [f"{float(own):.2f}"]
    assert stated("docs/finetuning.md", r"\d+ ms \| \*\*(\d+) ms\*\*") == [f"{1000 * float(own):.0f}"]


def test_the_step_of_the_quickstart():
    assert stated("README.md", r"about ([\d.]+) against") == stated("docs/quickstart.md", r"each about ([\d.]+) s")
    assert stated("README.md", r"about ([\d.]+) against") == stated("docs/quickstart.md", r"about ([\d.]+) against")

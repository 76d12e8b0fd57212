"""Links between the files of the repository lead to files and headings that exist, and so do paths in sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import FENCE, PAGES, ROOT, prose

LINKED = [
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "kernels" / "README.md",
    *sorted((ROOT / "benchmarks").glob("**/*.md")),
]
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links, on code hosts and in the site."""
    counts: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = counts.get(slug, 0)
        counts[slug] = count + 1
        names.add(f"{slug}-{count}" if count else slug)
    if page.name == "configuration.md":
        # the site adds a heading for every group
        names |= {folder.name for folder in (ROOT / "configs").iterdir() if folder.is_dir()}
    # the site describes an object of the code here
    return names | set(re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.M))


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    bad = []
    for target, anchor in LINK.findall(prose(page)):
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            bad.append(f"{target}#{anchor}")
    return bad


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# One + two\n## Two\n## Two\n")
    page.write_text(
        "[a](other.md) [b](other.md#one--two) [c](other.md#two-1) [web](https://example.org)\n"
        "```\n[code](nowhere.md)\n```\n[d](nowhere.md) ![e](other.md#two-2) [f](#missing)\n"
    )
    assert broken(page) == ["nowhere.md#", "other.md#two-2", "#missing"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_sentences_exist(page):
    for path in re.findall(r"`((?:vsa|kernels|configs|scripts|tests|benchmarks)/[\w/.]+)`", prose(page)):
        assert (ROOT / path).exists(), path


def test_every_page_has_a_title():
    for page in PAGES:
        assert page.read_text(encoding="utf-8").startswith("# "), page


def test_the_faults_of_the_readme_are_those_of_the_linked_soak():
    (row,) = re.findall(r"^\| reliability \|.*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    (table,) = (ROOT / target for target, _ in LINK.findall(row))
    total = re.search(r"^\| all (\d+) cases \| (\d+) \| (\d+) \|", table.read_text(encoding="utf-8"), re.M)
    assert total is not None
    kinds, attempts, survivals = map(int, total.groups())
    assert f"and {kinds - 3} more kinds of faults: **{survivals:,} of {attempts:,}** attempts" in row

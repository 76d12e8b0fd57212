"""The documentation site builds strictly, loads nothing from a network address, and lists every option."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts import docs_hooks
from tests.docs.pages import ROOT
from vsa.config_help import choices, options

RESOURCES = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
"""Attributes by which a page loads something by itself; links that a reader follows are not among them."""
ADDRESS = re.compile(r"^\s*(?:https?:)?//", re.I)


class Loads(HTMLParser):
    """Addresses that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        addresses = [values.get(RESOURCES.get(tag, ""))]
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            addresses.append(values.get("href"))
        addresses += re.findall(r"url\(['\"]?([^)'\"]+)", values.get("style") or "")
        self.found += [address for address in addresses if address and ADDRESS.match(address)]
        self._style = tag == "style"

    def handle_data(self, data: str) -> None:
        if self._style:
            self.found += [url for url in styles(data) if ADDRESS.match(url)]


def styles(text: str) -> list[str]:
    """Addresses in a style sheet."""
    return re.findall(r"url\(\s*['\"]?([^)'\"]+)", text) + re.findall(r"@import\s+['\"]([^'\"]+)", text)


def loaded(site: Path) -> list[str]:
    """What pages and style sheets of a site load from network addresses."""
    requests = []
    for path in sorted(site.rglob("*.html")):
        page = Loads()
        page.feed(path.read_text(encoding="utf-8"))
        requests += [f"{path.relative_to(site)}: {url}" for url in page.found]
    for path in sorted(site.rglob("*.css")):
        urls = styles(path.read_text(encoding="utf-8"))
        requests += [f"{path.relative_to(site)}: {url}" for url in urls if ADDRESS.match(url)]
    return requests


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if find_spec("material") is None or find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs-material and mkdocstrings are not installed (extra `docs`)")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    # warnings end a strict build with an exception
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    return folder


@pytest.mark.slow
def test_every_page_of_docs_is_built(site):
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / page.with_suffix(".html").name).is_file(), page.name
    # linked to from a page, and published beside it
    assert (site / "repository" / "benchmarks" / "index.html").is_file()
    assert (site / "repository" / "CONTRIBUTING.html").is_file()


@pytest.mark.slow
def test_nothing_is_loaded_from_a_network_address(site):
    assert loaded(site) == []


@pytest.mark.slow
def test_the_reference_has_every_group_and_option(site):
    page = (site / "configuration.html").read_text(encoding="utf-8")
    assert [group for group in choices() if f'id="{group}"' not in page] == []
    for option in (*options("run"), *options("task/distill"), *options("sweep")):
        assert f"<code>{option.key}</code>" in page, option.key


@pytest.mark.slow
def test_functions_of_the_kernels_are_described(site):
    import vsa_kernels

    page = (site / "kernels.html").read_text(encoding="utf-8")
    assert [name for name in vsa_kernels.__all__ if f'id="vsa_kernels.{name}"' not in page] == []


def test_what_a_page_loads_is_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="https://a.org">x</a><link rel="canonical" href="https://b.org"><img src="x.png">'
        '<script src="//c.org/x.js"></script><link rel="stylesheet" href="https://d.org/x.css">'
        '<p style="background: url(http://e.org/x.png)"></p><style>a { background: url("https://f.org/x") }</style>'
    )
    (tmp_path / "a.css").write_text("@import 'https://g.org'; a { src: url(x.woff) } b { src: url( 'https://h.org') }")
    assert [line.split("//")[1][:5] for line in loaded(tmp_path)] == [f"{c}.org" for c in "cdefhg"]


def test_links_of_the_repository_become_links_of_the_site():
    assert docs_hooks.site_uri("attention.md", "../benchmarks/README.md") == "repository/benchmarks/README.md"
    assert docs_hooks.site_uri("attention.md", "../benchmarks/") == "repository/benchmarks/README.md"
    assert docs_hooks.site_uri("attention.md", "data.md") == "data.md"
    assert docs_hooks.site_uri("repository/benchmarks/README.md", "../docs/data.md") == "data.md"
    assert docs_hooks.site_uri("repository/CONTRIBUTING.md", "docs/data.md") == "data.md"
    assert docs_hooks.site_uri("repository/benchmarks/README.md", "x.png") == "repository/benchmarks/x.png"

"""Hooks of the documentation site (mkdocs.yml): files outside `docs/`, and the configuration reference.

Pages link to files of the repository by relative paths, which code hosts resolve. The site has these files under
`repository/`, with the same paths below it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from scripts.soak_rows import with_age

ROOT = Path(__file__).parents[1]
OUTSIDE = "repository/"
OPTIONS = "<!-- options -->"
"""Marker in configuration.md that the generated reference replaces."""

SOAK = "benchmarks/soak.md"
"""Page whose rows stand for the code that they were measured with."""

BAR = "\\|"
"""Escaped vertical bar inside a Markdown table."""

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
FENCE = re.compile(r"(^ *```.*?^ *```)", re.M | re.S)


def on_files(files: Any, *, config: Any) -> Any:
    """Add the files outside `docs/` that the navigation or a page links to, and those that these link to in turn."""
    from mkdocs.structure.files import File

    links = list(_named(config.nav))
    links += [link for file in files.documentation_pages() for link in _links(file.src_uri, file.content_string)]
    while links:
        uri = links.pop()
        path = ROOT / uri.removeprefix(OUTSIDE)
        if uri.startswith(OUTSIDE) and files.get_file_from_path(uri) is None and path.is_file():
            files.append(file := File.generated(config, uri, abs_src_path=str(path)))
            if file.is_documentation_page():
                links += _links(uri, file.content_string)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Turn links between files of the repository into links between files of the site; tell which rows are older."""
    if page.file.src_uri == SOAK:
        markdown = with_age(markdown)
    parts = FENCE.split(markdown)
    uri = page.file.src_uri
    # every second part is a code block
    parts[::2] = [
        LINK.sub(lambda m: posixpath.relpath(site_uri(uri, m[1]), posixpath.dirname(uri)), part) for part in parts[::2]
    ]
    text = "".join(parts)
    return text.replace(OPTIONS, configuration()) if OPTIONS in text else text


def site_uri(page: str, link: str) -> str:
    """The path in the site of a file that a page of the site links to by its relative path in the repository."""
    source = page.removeprefix(OUTSIDE) if page.startswith(OUTSIDE) else f"docs/{page}"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if (ROOT / target).is_dir():
        target += "/README.md"
    return target.removeprefix("docs/") if target.startswith("docs/") else OUTSIDE + target


def _links(page: str, markdown: str) -> Iterator[str]:
    for part in FENCE.split(markdown)[::2]:
        yield from (site_uri(page, link) for link in LINK.findall(part))


def _named(nav: Any) -> Iterator[str]:
    """Paths in a navigation, which nests lists and mappings."""
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from _named(item)


def configuration() -> str:
    """All config groups with their files and options as Markdown, the content of `vsa config`.

    An option of several files of a group is explained once, at the first of them.
    """
    from vsa.config import PLAIN
    from vsa.config_help import choices, options

    lines = ["## The run itself", "", *_definitions(options("run"))]
    for group, files in choices().items():
        lines += ["", f"## {group}", "", "| file | meaning |", "|---|---|"]
        lines += [f"| `{group}={file}` | {about.replace('|', BAR)} |" for file, about in files.items()]
        if group in PLAIN:
            lines += ["", *_definitions(options(group))]
            continue
        explained: dict[str, Any] = {}
        for file in files:
            try:
                file_options = options(f"{group}/{file}")
            except ValueError:
                # raised for groups whose files set options of other groups
                break
            new = [o for o in file_options if o.key not in explained or explained[o.key].meaning != o.meaning]
            shared = [f"`{o.key}={o.default}`" for o in file_options if o not in new]
            lines += ["", f"### {group}={file}", ""] if file_options else []
            lines += [f"Explained above, here with these defaults: {', '.join(shared)}.", ""] if shared else []
            lines += _definitions(new)
            explained |= {option.key: option for option in new}
    return "\n".join(lines)


def _definitions(options: Iterable[Any]) -> Iterator[str]:
    for option in options:
        yield f"`{option.key}`"
        yield f":   {option.meaning or 'see the package that it belongs to'}"
        yield f"    <br><small>{option.type}; default `{option.default}`</small>"
        yield ""

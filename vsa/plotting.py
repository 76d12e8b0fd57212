"""Helpers for all figures: atomic PNG files, and text of any language and length.

They use only the object interface of Matplotlib, without window system and global figure state.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.ft2font import LoadFlags

from vsa.files import atomic_file

# families of Matplotlib that draw boxes for every letter, or symbols at other code points than those of Unicode
_NO_TEXT = ("Last Resort", "STIXNonUnicode", "STIXSize", "cm")

LETTER = 0.69
"""Width of a letter in ems: 13 letters of 8 points take one inch."""


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a PNG atomically."""
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    return Path(path)


class Fitted(NamedTuple):
    """Text that was wrapped and cut to fit.

    Args:
        text: lines to draw.
        style: arguments of the Matplotlib text.
    """

    text: str
    style: dict[str, Any]

    @property
    def lines(self) -> int:
        return self.text.count("\n") + 1


def fit_text(text: str, width: int, lines: int) -> Fitted:
    """Wrap text to at most `lines` lines of about `width` Latin letters; longer text ends with an ellipsis.

    A letter that no installed font has is written as its code point (`\\u732b`). Dollar signs are not formulas.

    Args:
        text: text of a user, in any language.
        width: letters per line; half as many in scripts with letters twice as wide.
        lines: largest number of lines.
    """
    words = " ".join(text.split())
    families, missing = _fonts_for({ord(letter) for letter in words})
    wide = any(unicodedata.east_asian_width(letter) in "WF" for letter in words if ord(letter) not in missing)
    # missing letters are replaced by their code points
    shown = "".join(s.encode("unicode_escape").decode() if ord(s) in missing else s for s in words)
    letters = width // 2 if wide else width
    cut = textwrap.wrap(shown, letters, max_lines=lines, placeholder=" …")
    # some letters, like capitals, are wider than the average
    while letters > 2 and (widest := max((_ems(line, families) for line in cut), default=0)) > width * LETTER:
        letters = max(2, min(letters - 1, int(letters * width * LETTER / widest)))
        cut = textwrap.wrap(shown, letters, max_lines=lines, placeholder=" …")
    return Fitted("\n".join(cut), {"family": families, "parse_math": False})


def set_title(setter: Callable[..., Any], title: str, *, width: int) -> None:
    """Call `set_title` of axes or `suptitle` of a figure; each line of the title is wrapped to at most two lines."""
    fitted = [fit_text(line, width, 2) for line in title.splitlines()]
    families = [family for line in fitted for family in line.style["family"]]
    if fitted:
        style = {**fitted[0].style, "family": list(dict.fromkeys(families))}
        setter("\n".join(line.text for line in fitted), fontsize=9, **style)


def _fonts_for(letters: Iterable[int]) -> tuple[list[str], set[int]]:
    """Font families that together have the letters, default families first, and the letters that no family has."""
    families = list(rcParams["font.family"])
    missing = set(letters).difference(*map(_letters_of, families))
    for family in _upright_families() if missing else ():
        if found := missing & _letters_of(family):
            families.append(family)
            missing -= found
    return families, missing


def _ems(line: str, families: list[str]) -> float:
    """Width of a line in ems, the sum of the widths of its letters."""
    having = ((letter, next((f for f in families if ord(letter) in _letters_of(f)), None)) for letter in line)
    return sum(LETTER if family is None else _advance(letter, family) for letter, family in having)


@cache
def _advance(letter: str, family: str) -> float:
    font = get_font(findfont(FontProperties(family=[family])))
    font.set_size(100, 72)
    return font.load_char(ord(letter), flags=LoadFlags.NO_HINTING).linearHoriAdvance / 65536 / 100


@cache
def _upright_families() -> tuple[str, ...]:
    """Installed text families with a normal weight; for others, Matplotlib would warn about a replacement."""
    fonts = [font for font in fontManager.ttflist if font.style == "normal" and font.weight in (400, "normal")]
    return tuple(sorted({font.name for font in fonts if not font.name.startswith(_NO_TEXT)}))


@cache
def _letters_of(family: str) -> frozenset[int]:
    """Code points of a font family; empty for bitmap fonts, which do not scale."""
    font = get_font(findfont(FontProperties(family=[family])))
    return frozenset(font.get_charmap()) if font.scalable else frozenset()

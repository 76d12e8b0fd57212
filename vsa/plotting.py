"""Helpers for all figures: colours, axes, atomic PNG files, and text of any language and length.

They use only the object interface of Matplotlib, without window system and global figure state.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rcParams
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.ft2font import LoadFlags
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from vsa.files import atomic_file

# families of Matplotlib that draw boxes for every letter, or symbols at other code points than those of Unicode
_NO_TEXT = ("Last Resort", "STIXNonUnicode", "STIXSize", "cm")

COLOURS = (
    "#3b7dd8",
    "#dd7a33",
    "#2f9e6e",
    "#c94f7c",
    "#8a63d2",
    "#b08a00",
    "#1a9fb5",
    "#9a5b3c",
    "#d6453d",
    "#708090",
    "#5460c8",
    "#7f9a2d",
)
"""Colours of curves, readable on white and on black."""

SOFT = "#59636e"
"""Colour of notes."""

QUERY, SELECTED, MISSED = "#1aff4d", "#ff8c00", "#4aa8ff"
"""Colours over a clip: the query tile, the tiles that it selects, attention outside of them."""

LETTER = 0.69
"""Width of a letter in ems: 13 letters of 8 points take one inch."""

TITLE = 11
"""Number of letters of a title that fit into an inch."""


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a PNG atomically."""
    if figure.get_layout_engine() is not None:
        # the first layout decides about the ticks for which the second one makes room
        figure.draw_without_rendering()
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    return Path(path)


def step_axis(axis: Axis, *, most: int = 9) -> None:
    """Put ticks at whole, round numbers of steps."""
    axis.set_major_locator(MaxNLocator(nbins=most, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def log_axis(axis: Axis, low: float, high: float) -> None:
    """Write the ticks of a logarithmic axis as numbers, no powers of ten, with several of them in any range.

    Args:
        axis: x or y axis.
        low, high: smallest and largest value on it, above 0.
    """
    axis.set_minor_locator(NullLocator())
    if high < 4 * low:
        axis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    else:
        between = (1, 2, 3, 4, 6, 8) if high < 10 * low else (1, 2, 5) if high < 1000 * low else (1,)
        axis.set_major_locator(LogLocator(subs=between))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def short_number(value: float) -> str:
    """A number for an axis; thousands and more with the letter of their power, such as 50k or 2.5M."""
    for power, letter in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        # 2,000 steps stay 2000
        if abs(value) >= max(10**power, 10_000):
            return f"{value / 10**power:g}{letter}"
    return f"{value:g}"


class Fitted(NamedTuple):
    """Text that was wrapped and cut to fit.

    Args:
        text: lines to draw.
        style: arguments of the Matplotlib text.
        escaped: whether letters are written as code points, because no installed font has them.
    """

    text: str
    style: dict[str, Any]
    escaped: bool = False

    @property
    def leftward(self) -> bool:
        """Whether the text is read from the right: its first letter with a direction says so."""
        kinds = (unicodedata.bidirectional(letter) for letter in self.text)
        return next((kind != "L" for kind in kinds if kind in ("L", "R", "AL")), False)

    @property
    def lines(self) -> int:
        return self.text.count("\n") + bool(self.text)


def fit_text(text: str, width: int, lines: int) -> Fitted:
    """Wrap text to at most `lines` lines of about `width` Latin letters; longer text ends with an ellipsis.

    A letter that no installed font has is written as its code point (`\\u732b`). Dollar signs are not formulas.

    Args:
        text: text of a user, in any language.
        width: letters per line; half as many in scripts with letters twice as wide.
        lines: maximum number of lines.
    """
    words = " ".join(text.split())
    families, missing = _fonts_for({ord(letter) for letter in words})
    wide = any(unicodedata.east_asian_width(letter) in "WF" for letter in words if ord(letter) not in missing)
    # missing letters are replaced by their code points
    printable_text = "".join(s.encode("unicode_escape").decode() if ord(s) in missing else s for s in words)
    letters = width // 2 if wide else width
    cut = _wrap(printable_text, letters, lines)
    # some letters, like capitals, are wider than the average
    while letters > 2 and (widest := max((_ems(line, families) for line in cut), default=0)) > width * LETTER:
        letters = max(2, min(letters - 1, int(letters * width * LETTER / widest)))
        cut = _wrap(printable_text, letters, lines)
    return Fitted("\n".join(cut), {"family": families, "parse_math": False}, bool(missing))


class _Wrapper(textwrap.TextWrapper):
    """Lines that may end between two code points, and do not end within one."""

    def _split(self, text: str) -> list[str]:
        return [part for chunk in super()._split(text) for part in _CODE_POINT.split(chunk) if part]


_CODE_POINT = re.compile(r"(\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8})")


def _wrap(text: str, letters: int, lines: int) -> list[str]:
    return _Wrapper(letters, max_lines=lines, placeholder=" …").wrap(text)


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
        if covered_letters := missing & _letters_of(family):
            families.append(family)
            missing -= covered_letters
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

"""Pages of clips: the pictures keep their size whatever prompts say, and prompts of any language are drawn."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from vsa import plotting
from vsa.plotting import fit_text
from vsa.sampling.contact_sheet import contact_sheet, side_by_side
from vsa.sampling.sample_writer import write_clips

pytestmark = pytest.mark.filterwarnings("error")

COLOURS = ((250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0))
# as Wan's captions are
LONG = " ".join(["The camera slowly pans over a wide valley where a river of gold runs"] * 8)
PROMPTS = {
    "one word": "cat",
    "110 words": LONG,
    "no letter": "",
    "other scripts": "猫が走る " * 40,
    "emoji": "a cat \N{SLIGHTLY SMILING FACE}\ufe0f runs \u200b\x00 مرحبا",
    "a formula": r"it costs $5 or $\frac$ more",
    "lines": "a\n\tb\r\n" * 20,
}


def clips(size: tuple[int, int]) -> torch.Tensor:
    """A clip of each colour, uint8 `[4, 5, H, W, 3]`."""
    return torch.tensor(COLOURS, dtype=torch.uint8)[:, None, None, None].expand(-1, 5, *size, 3)


def pixels_of(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def areas(path: Path) -> list[int]:
    """Pixels of each colour on a page."""
    pixels = pixels_of(path)
    return [int((np.abs(pixels - np.array(colour)) < 6).all(-1).sum()) for colour in COLOURS]


def sheet(prompts: list[str], path: Path, size: tuple[int, int] = (16, 24)) -> Path:
    return contact_sheet(clips(size), prompts, path)


def pair(prompts: list[str], path: Path, size: tuple[int, int] = (16, 24)) -> Path:
    return side_by_side({"teacher": clips(size), LONG: clips(size)}, prompts, path, title=LONG)


@pytest.mark.parametrize("draw", [sheet, pair])
@pytest.mark.parametrize(
    "size", [pytest.param((16, 24), id="landscape"), pytest.param((24, 16), id="portrait", marks=pytest.mark.slow)]
)
def test_pictures_have_their_size_whatever_the_prompts_say(draw, size, tmp_path: Path, caplog):
    # two prompts are enough for one of the shapes
    prompts = list(PROMPTS.items())[: None if size[0] < size[1] else 2]
    areas_by_name = {
        name: areas(draw([prompt] * 4, tmp_path / f"{i}.png", size)) for i, (name, prompt) in enumerate(prompts)
    }
    first = areas_by_name["one word"]
    # a pixel at the borders, by rounding
    for name, area in areas_by_name.items():
        assert area == pytest.approx(first, rel=0.02), name
    page = pixels_of(tmp_path / "1.png").shape
    assert sum(areas_by_name["110 words"]) / (page[0] * page[1]) > 0.4
    # each clip is on the page once and as large as the others
    assert min(first) > 0.97 * max(first) > 5000
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_contact_sheet_shows_each_clip_below_its_prompt(tmp_path: Path):
    path = sheet(["a", "b" * 90, "", LONG], tmp_path / "sheet.png")
    pixels = pixels_of(path)
    boxes = []
    for colour in COLOURS:
        rows, columns = np.nonzero((np.abs(pixels - np.array(colour)) < 6).all(-1))
        boxes.append((rows.min(), rows.max(), columns.min(), columns.max()))
    # two by two, in reading order
    (red, green, blue, yellow) = boxes
    assert red[0] == green[0] < red[1] < blue[0] == yellow[0]
    assert red[2] == blue[2] < red[3] < green[2] == yellow[2]
    # four frames with white between them
    assert all((pixels[(box[0] + box[1]) // 2, box[2] : box[3]] > 240).all(-1).sum() >= 3 for box in boxes)
    above = [pixels[max(0, box[0] - 60) : box[0] - 2, box[2] : box[3]] for box in boxes]
    ink = [int((part.sum(-1) < 300).sum()) for part in above]
    assert ink[2] == 0
    assert 0 < ink[0] < ink[1] < ink[3]
    with pytest.raises(ValueError, match="2 prompts and 4 clips"):
        contact_sheet(clips((16, 24)), ["a", "b"], tmp_path / "other.png")
    assert [p.name for p in tmp_path.iterdir()] == ["sheet.png"]


def test_the_record_beside_the_clips_keeps_the_whole_prompt(tmp_path: Path):
    prompts = [LONG, PROMPTS["other scripts"]]
    write_clips(tmp_path, prompts, clips((16, 24))[:2], {"seed": 4})
    record = json.loads((tmp_path / "samples.json").read_text(encoding="utf-8"))
    assert [clip["prompt"] for clip in record["clips"]] == prompts


def test_a_prompt_is_cut_with_an_ellipsis():
    assert len(LONG.split()) > 110
    text = fit_text(LONG, 50, 4).text
    lines = text.splitlines()
    assert len(lines) == 4
    assert all(40 < len(line) <= 50 for line in lines)
    assert text.endswith(" …")
    assert LONG.startswith(text.removesuffix(" …").replace("\n", " "))
    # control
    assert fit_text("a red\ncircle", 50, 4).text == "a red circle"


@pytest.mark.parametrize(
    "text", ["W" * 300, "WIDE MAMMOTHS WALK " * 12, "@%MW " * 60, "ШЩЖФ " * 60, "il" * 200, "ΩΨ " * 90]
)
def test_no_line_is_wider_than_its_place(text: str):
    fit = fit_text(text, 39, 4)
    figure = Figure(figsize=(10, 3), dpi=100)
    canvas = FigureCanvasAgg(figure)
    # 39 letters of 8 points are 3 inches
    artist = figure.text(0, 0.5, fit.text, fontsize=8, **fit.style)
    assert artist.get_window_extent(canvas.get_renderer()).width <= 3 * 100
    # and none is half empty that is followed by another
    other = figure.text(0, 0.5, fit.text.splitlines()[0], fontsize=8, **fit.style)
    if text[0] not in "il":
        assert other.get_window_extent(canvas.get_renderer()).width > 0.5 * 3 * 100
    # control: as many letters as fit on average
    if text[0] == "W" and " " not in text:
        wide = figure.text(0, 0.5, text[:39], fontsize=8, **fit.style)
        assert wide.get_window_extent(canvas.get_renderer()).width > 1.2 * 3 * 100


def test_wide_letters_take_two_places(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plotting, "_fonts_for", lambda letters: (["sans-serif"], set()))
    assert [len(line) for line in fit_text("猫" * 60, 50, 3).text.splitlines()] == [25, 25, 10]
    assert fit_text("c" * 60, 50, 3).text.index("\n") == 50


def test_letters_are_drawn_in_a_font_that_has_them_or_as_code_points(tmp_path: Path, monkeypatch):
    # matplotlib's own DejaVu Sans Mono has the arc, its DejaVu Sans has not
    arc = fit_text("a \u2312", 50, 1)
    assert arc.text == "a \u2312"
    assert len(arc.style["family"]) == 2
    arc_bytes = sheet(["a \u2312"] * 4, tmp_path / "arc.png").read_bytes()
    monkeypatch.setattr(plotting, "_upright_families", tuple)
    assert fit_text("a \u2312\U0001f9ff é", 50, 1).text == r"a \u2312\U0001f9ff é"
    escape_page = sheet(["a \u2312"] * 4, tmp_path / "escaped.png")
    literal_page = sheet([*[r"a \u2312"] * 3, "a \u2312"], tmp_path / "written.png")
    assert escape_page.read_bytes() == literal_page.read_bytes() != arc_bytes
    # what the code points are is said below the clips, where nothing else stands
    assert (pixels_of(escape_page)[-18:].sum(-1) < 500).sum() > 100
    # control
    plain = pixels_of(sheet([r"a \u2312"] * 4, tmp_path / "plain.png"))
    assert (plain[-5:] == 255).all()
    assert len(plain) < len(pixels_of(escape_page))
    other = side_by_side({"a": clips((16, 24))}, ["\u2312"] * 4, tmp_path / "pair.png")
    plain = side_by_side({"a": clips((16, 24))}, ["x"] * 4, tmp_path / "short.png")
    assert len(pixels_of(other)) > len(pixels_of(plain))


@pytest.mark.parametrize("letters", ["\u732b", "\U0001f9ff"])
def test_a_code_point_stands_whole_in_one_line(monkeypatch: pytest.MonkeyPatch, letters: str):
    monkeypatch.setattr(plotting, "_upright_families", tuple)
    for width in (23, 39, 50):
        fit = fit_text(f"ab {letters * 40}", width, 4)
        assert fit.escaped
        assert fit.lines == 4
        code = letters.encode("unicode_escape").decode()
        for line in fit.text.removesuffix(" …").removeprefix("ab").splitlines():
            assert line.strip().replace(code, "") == ""
    # control
    assert not fit_text("ab", 23, 4).escaped


@pytest.mark.parametrize(
    ("prompt", "right"),
    [
        ("a red circle", False),
        ("دائرة حمراء", True),
        ("12 עיגול אדום", True),
        ("a دائرة", False),
        ("猫", False),
        ("", False),
    ],
)
def test_a_prompt_that_is_read_from_the_right_ends_at_the_right(tmp_path: Path, prompt: str, right: bool):
    assert fit_text(prompt, 50, 1).leftward == right
    if not prompt:
        return
    pixels = pixels_of(sheet([prompt, "", "", ""], tmp_path / "a.png"))
    columns = np.nonzero((np.abs(pixels - np.array(COLOURS[0])) < 6).all(-1).any(0))[0]
    ink = np.nonzero((pixels[:28, : columns.max() + 4].sum(-1) < 300).any(0))[0]
    # at the edge of its picture
    assert abs(ink.max() - columns.max() if right else ink.min() - columns.min()) < 8
    assert right == (ink.mean() > columns.mean())

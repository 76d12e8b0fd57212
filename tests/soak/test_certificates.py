"""A row about `vsa certify`: whatever is altered beside it, no command ends well with a verdict that is not true."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.evaluation.certificate.conftest import WEIGHTS, export, record_of, settings, wan  # noqa: F401 (fixtures)
from vsa.evaluation.certificate.folder import certify

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")


@pytest.fixture(scope="module")
def certified(export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A folder with the export `mine`, a wrong one `other`, and certificates of both."""
    folder = tmp_path_factory.mktemp("certified")
    shutil.copytree(export, folder / "mine")
    certify(settings(folder / "mine"))
    shutil.copytree(export, folder / "other")
    wrong(folder / "other" / WEIGHTS, random.Random(0))
    with pytest.raises(ValueError, match="fails parity"):
        certify(settings(folder / "other"))
    return folder


def wrong(path: Path, draw: random.Random) -> None:
    """Change what attention computes, under the same size and often the same time stamp."""
    tensors, stat = load_file(path), path.stat()
    names = sorted(name for name, x in tensors.items() if ".attn1." in name and x.ndim == 2 and "gate" not in name)
    value = tensors[draw.choice(names)]
    how = draw.choice(("nan", "infinity", "moved", "zeroed"))
    if how in ("nan", "infinity"):
        value.view(-1)[draw.randrange(value.numel())] = float("nan" if how == "nan" else "inf")
    elif how == "moved":
        value += draw.choice((-1, 1))
    else:
        value.zero_()
    save_file(tensors, path, {"format": "pt"})
    if draw.random() < 0.7:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def altered_result(path: Path, draw: random.Random) -> None:
    """Edit the stored parity, as somebody would who wants it to pass or as a damaged disk does."""
    stored = json.loads(path.read_text())
    result, kind = (
        stored["result"],
        draw.choice(("check", "check", "apart", "checks", "cut", "bits", "settings", "gone")),
    )
    check = draw.choice(result["checks"])
    if kind == "check":
        check |= {"failed": False, "tolerance": 1e9}
        check |= {"error": draw.choice((float("nan"), float("inf"), "nan", "0", None, -1.0, 0.9, False))}
    elif kind == "apart":
        result["sparse_difference"] = draw.choice((float("nan"), float("inf"), "nan", None))
    elif kind == "checks":
        result["checks"] = draw.choice(([], result["checks"][:1], {}, None))
    elif kind == "settings":
        stored["settings"] = draw.choice(({}, None, []))
    content = bytearray(json.dumps(stored).encode())
    if kind == "bits":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(7)
    path.write_bytes(content[: draw.randrange(len(content))] if kind == "cut" else content)
    if kind == "gone":
        path.unlink()


@pytest.mark.soak("altered weights, results and certificates", attempts=80, short=0)
def test_no_certificate_says_what_is_not_true(attempt, certified, tmp_path):
    draw = random.Random(attempt)
    for name in ("mine", "mine-certificate", "other-certificate"):
        shutil.copytree(certified / name, tmp_path / name)
    model, folder = tmp_path / "mine", tmp_path / "mine-certificate"
    ways = draw.sample(("weights", "results", "page", "swapped"), draw.randint(1, 3))
    if "swapped" in ways:
        # of the wrong model, whose results are its own
        shutil.rmtree(folder)
        shutil.move(tmp_path / "other-certificate", folder)
    if "weights" in ways:
        wrong(model / WEIGHTS, draw)
    parity = folder / "certificate" / "parity-transformer.json"
    if "results" in ways and parity.is_file():
        altered_result(parity, draw)
    if "page" in ways:
        record = json.loads((folder / "certificate.json").read_text())
        record["facts"]["verdict"], record["failed"] = "Right (3 checks, the worst 0 of 1 allowed)", []
        (folder / "certificate.json").write_text(json.dumps(record))
    refusal = ended(model)
    told = f"{ways}: {refusal}"
    assert "\n" not in refusal, told
    if "weights" in ways:
        # by hand: what attention computes is another thing than before
        good, now = load_file(certified / "mine" / WEIGHTS), load_file(model / WEIGHTS)
        assert any(not torch.equal(good[name], now[name]) for name in good)
        # one that is not finite is refused when it is read, before a page is written
        if "NaN or infinite" in refusal and "fails parity" not in refusal:
            return
        # a result that does not parse is refused before anything is measured
        if "results" in ways and "parity-transformer.json" in refusal:
            return
        assert "fails parity" in refusal, told
        assert not record_of(folder / "certificate.html")["facts"]["verdict"].startswith("Right"), told
        return
    # a right model: an edited result may fail once, and is measured anew then
    assert not refusal or "results" in ways, told
    assert not refusal or "fails parity" in refusal or "parity-transformer" in refusal, told
    if refusal:
        parity.unlink(missing_ok=True)
        assert not ended(model), told
    verdict = record_of(folder / "certificate.html")
    assert verdict["facts"]["verdict"].startswith("Right ("), told
    assert [check["error"] < 1e-5 for check in verdict["parity"]["transformer"]["checks"]] == [True] * 3, told


def ended(model: Path) -> str:
    """The error with which a certification ends; empty if it ends well."""
    try:
        certify(settings(model))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_verdict_that_is_believed_is_noticed(certified, tmp_path, monkeypatch):
    """The control of the attempts above: results that are told apart by their names alone."""
    from vsa.evaluation.certificate import folder as module

    def believing(own: Any, name: str, asked: Any, measure: Any, picture: Any = None) -> Any:
        path = own.folder / f"{name}.json"
        return json.loads(path.read_text())["result"] if path.is_file() else measure()

    monkeypatch.setattr(module._Parts, "get", believing)
    for name in ("mine", "mine-certificate"):
        shutil.copytree(certified / name, tmp_path / name)
    wrong(tmp_path / "mine" / WEIGHTS, random.Random(3))
    assert not ended(tmp_path / "mine")

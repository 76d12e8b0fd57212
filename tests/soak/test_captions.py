"""A row about folders of videos: what is encoded is what a walk of the folder by other means expects."""

from __future__ import annotations

import json
import os
import random
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from tests.data.encoding import encode_folder
from vsa.data.codecs import HaarCodec
from vsa.data.shards import LatentReader
from vsa.data.text import HashedNgramEncoder
from vsa.data.toy_videos import render_clip
from vsa.data.video_files import write_video

VOID = ("", "nan", "None", "null", "N/A", "  ", "\u200b")
HIDDEN = (".git", "@eaDir", "__MACOSX", ".Trash-1000", "lost+found", ".ipynb_checkpoints")
FOLDERS = ("", "deep", "deep/er", "a b", "\u00e9t\u00e9", "@me", "#1")
SECRET = "what lies outside of the folder"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("clip") / "a.mp4"
    write_video(path, render_clip(0, 0, size=(4, 16, 16))[0])
    return path.read_bytes()


def words_of(draw: random.Random) -> str:
    return " ".join(
        draw.choice(("a", "dog", "cat", "runs", "\u00fcber", "\u732b", "\U0001f415")) for _ in range(draw.randint(2, 6))
    )


def drawn_tree(root: Path, clip: bytes, draw: random.Random) -> dict[str, list[str]]:
    """Write a tree of clips with captions of one kind each; returns captions by name, of the clips that have some."""
    expected, entries = dict[str, list[str]](), list[dict[str, Any]]()
    table = draw.choice((None, "captions.jsonl", "metadata.csv", "captions.json", "videos2caption.json"))
    for number in range(draw.randint(1, 8)):
        folder = draw.choice(FOLDERS)
        name = "/".join(part for part in (folder, f"{draw.choice('abc')}{number}.mp4") if part)
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(clip)
        text, kind = words_of(draw), draw.choice(("txt", "caption", "json", "table", "none", "void", "outside"))
        if kind in ("txt", "caption"):
            path.with_suffix(f".{kind}").write_text(draw.choice(("{}", "{}\n", "\ufeff{}\r\n")).format(text))
            expected[name] = [text]
        elif kind == "json":
            path.with_suffix(".json").write_text(json.dumps({"caption": text}))
            expected[name] = [text]
        elif kind == "table" and table is not None:
            entries.append({"video": name, "caption": text})
            expected[name] = [text]
        elif kind == "void":
            path.with_suffix(".txt").write_text(draw.choice(VOID))
        elif kind == "outside":
            (root.parent / "secret.txt").write_text(SECRET)
            path.with_suffix(".txt").symlink_to(root.parent / "secret.txt")
    if entries and table == "metadata.csv":
        lines = [f'{entry["video"]},"{entry["caption"]}"' for entry in entries]
        (root / table).write_text("\n".join(["video,caption", *lines]) + "\n")
    elif entries and table == "captions.jsonl":
        (root / table).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    elif entries and table is not None:
        (root / table).write_text(json.dumps(entries))
    for name in draw.sample(HIDDEN, 2):
        (root / name).mkdir(exist_ok=True)
        (root / name / "hidden.mp4").write_bytes(clip)
        (root / name / "hidden.txt").write_text("hidden")
    for name in ("half.mp4.part", "._x.mp4"):
        (root / name).write_bytes(clip)
    if draw.random() < 0.5:
        # the folder itself again, and a link that leads nowhere
        (root / "loop").symlink_to(".")
        (root / "gone.mp4").symlink_to("/nowhere")
    if draw.random() < 0.5:
        (root / "broken.mp4").write_bytes(clip[: len(clip) // 3])
        (root / "broken.txt").write_text("a broken one")
    if draw.random() < 0.5:
        films = root.parent / "films"
        films.mkdir()
        (films / "far.mp4").write_bytes(clip)
        (films / "far.txt").write_text("a film of elsewhere")
        (root / "films").symlink_to(films)
        expected["films/far.mp4"] = ["a film of elsewhere"]
    return expected


@pytest.mark.soak("drawn folders of videos with captions of all forms", attempts=150, short=0)
def test_what_is_encoded_is_what_the_tree_has(attempt, clip, tmp_path, monkeypatch):
    draw, root = random.Random(attempt), tmp_path / "videos"
    root.mkdir()
    expected = {
        name: [unicodedata.normalize("NFC", text) for text in texts]
        for name, texts in drawn_tree(root, clip, draw).items()
    }
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    options = {"codec": HaarCodec(), "text_encoder": HashedNgramEncoder(dim=8, max_tokens=16), "skip_bad": True}
    try:
        encode_folder(root, tmp_path / "out", **options)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = ""
    if not expected:
        # nothing is left to encode
        assert refusal
        assert not (tmp_path / "out" / "index.json").exists()
        return
    assert not refusal
    reader = LatentReader(tmp_path / "out")
    reader.verify()
    samples = reader.index.samples.values()
    found = sorted([reader.text(s.id, k)[0] for k in range(s.captions)] for s in samples)
    assert found == sorted(expected.values())
    assert {path: path.read_bytes() for path in before} == before
    # nothing that lies outside is in what was written
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    assert not [path for path in written if b"hidden.mp4" in path.read_bytes() and path.suffix == ".tar"]
    assert os.path.islink(root / "loop") == (root / "loop").exists()


@pytest.mark.slow
def test_a_hidden_clip_more_is_noticed(clip, tmp_path, monkeypatch):
    """The control of the attempts above: a product that leaves nothing out."""
    monkeypatch.setattr("vsa.data.media_folder._LEFT_OUT", re.compile("(?!)"))
    with pytest.raises(AssertionError):
        test_what_is_encoded_is_what_the_tree_has(1, clip, tmp_path, monkeypatch)

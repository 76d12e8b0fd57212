"""From a person's films to a published model and a clip of it, by what each command prints to go on with."""

from __future__ import annotations

import json
import shlex
from collections import Counter

import pytest
import torch

from tests.data.media import write
from tests.docs.typist import NEXT, Typist
from tests.tiny_runs import command_line  # noqa: F401
from vsa.data.index import DatasetIndex
from vsa.data.toy_videos import render_clip


@pytest.mark.filterwarnings("ignore:tiles .* full:UserWarning")
def test_films_become_a_published_model(tmp_path, monkeypatch, command_line, caplog):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    typist, films = Typist(tmp_path, command_line, caplog), tmp_path / "FILMS"
    films.mkdir()
    scenes = [render_clip(0, i, size=(24, 64, 96))[0] for i in range(9)]
    one = 1 << 16
    # a phone held upright stores its pictures lying, with a quarter turn to show them by
    quarter = (0, one, 0, -one, 0, 0, 0, 0, 1 << 30)
    # films of three scenes each, of which the second is turned
    for number, matrix in enumerate((None, quarter, None)):
        film = torch.cat(scenes[3 * number : 3 * number + 3])
        write(films / f"film {number}.mp4", [*film.numpy()], matrix=matrix)
    table = 'file_name,text\r\n"film 0.mp4","shapes, moving"\r\nfilm 1.mp4,upright shapes\r\nfilm 2.mp4,more shapes\r\n'
    # as spreadsheets save it
    (films / "metadata.csv").write_bytes(b"\xef\xbb\xbf" + table.encode())

    cut = ("--buckets", "64x96x16,96x64x16", "--clips-per-film", "0", "--shots", "none", "--device", "cpu")
    status, out, err = command_line("encode", "FILMS", "SHARDS", *cut)
    assert status == 0, err
    samples = DatasetIndex.load(tmp_path / "SHARDS" / "index.json").samples.values()
    # four clips of 16 frames from each film
    assert Counter(tuple(sample.latent_shape) for sample in samples) == {(16, 4, 8, 12): 8, (16, 4, 12, 8): 4}
    (train,) = NEXT.findall(out)
    (sample,) = typist(train)
    typist(sample)
    run = shlex.split(sample)[2]
    typist(f"vsa push {run} ./hub --license apache-2.0")
    assert "license: apache-2.0" in (tmp_path / "hub" / "README.md").read_text()
    # the films are not published
    assert not [path for path in (tmp_path / "hub").rglob("*") if path.name.startswith("film")]
    typist("vsa sample ./hub --prompt 'shapes, moving' --out CLIPS --device cpu")
    (clip,) = json.loads((tmp_path / "CLIPS" / "samples.json").read_text())["clips"]
    assert clip["prompt"] == "shapes, moving"
    assert [*(tmp_path / "CLIPS").glob("*.mp4")]
    typist(train, "run=again", "init_from=./hub")

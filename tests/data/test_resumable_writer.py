"""Interrupted and shared work gives the data set of a straight run."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

import vsa.data.resumable_writer as parts
from tests.data.encoding import encode_folder
from tests.limits import HANGS
from vsa.data.codecs import HaarCodec
from vsa.data.encode import UnusableFiles
from vsa.data.shards import LatentReader
from vsa.data.text import HashedNgramEncoder
from vsa.data.video_files import write_video

CODEC, ENCODER = HaarCodec(), HashedNgramEncoder(dim=8, max_tokens=5)
OPTIONS = {"codec": CODEC, "text_encoder": ENCODER, "samples_per_shard": 3, "skip_bad": True}


def encode_killed(videos: Path, out: Path, clip: int) -> int | None:
    """Encode in a process that kills itself at a clip, counted from 1; returns its exit code."""

    class Deadly(HaarCodec):
        count = 0

        def encode(self, video: torch.Tensor) -> torch.Tensor:
            self.count += 1
            if self.count == clip:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().encode(video)

    def encode() -> None:
        # the threads of this process do not exist in a forked one
        torch.set_num_threads(1)
        encode_folder(videos, out, **{**OPTIONS, "codec": Deadly()})

    child = multiprocessing.get_context("fork").Process(target=encode)
    child.start()
    child.join(HANGS)
    return child.exitcode


def files_of(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten clips of two shapes, the third of which does not decode."""
    folder = tmp_path_factory.mktemp("videos")
    generator = torch.Generator().manual_seed(0)
    for i in range(10):
        size = (16, 32) if i % 4 else (32, 16)
        video = torch.randint(0, 256, (1, 1, 1, 3), generator=generator, dtype=torch.uint8).expand(8, *size, 3)
        write_video(folder / f"{i:02d}.mp4", video.contiguous())
        (folder / f"{i:02d}.txt").write_text(f"clip number {i}\n\nanother caption")
    (folder / "02.mp4").write_bytes(b"no video")
    return folder


@pytest.fixture(scope="module")
def straight(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("straight") / "out"
    report = encode_folder(videos, root, **OPTIONS)
    assert (report.samples, [name for name, _ in report.skipped], report.complete) == (9, ["02.mp4"], True)
    return files_of(root)


def test_a_straight_run_leaves_shards_and_an_index_only(straight: dict[str, bytes], tmp_path: Path) -> None:
    assert sorted(straight) == [
        "index.json",
        *(f"latents-C16x2x2x4-{i:05d}.tar" for i in range(4)),
        *(f"latents-C16x2x4x2-{i:05d}.tar" for i in range(3)),
        *(f"text-{i:05d}.tar" for i in range(4)),
    ]
    for name, content in straight.items():
        (tmp_path / name).write_bytes(content)
    reader = LatentReader(tmp_path)
    reader.verify()
    values = [reader.latent(name).double().flatten(1) for name in reader.index.samples]
    for k, name in enumerate(reader.index.samples):
        assert reader.text(name, 0)[0] == f"clip number {int(name)}"
        assert reader.text(name, 1)[0] == "another caption", k
    all_values = torch.cat(values, 1)
    mean, std = torch.tensor([reader.index.latent_mean, reader.index.latent_std], dtype=torch.float64)
    expected = all_values.std(1, correction=0)
    torch.testing.assert_close(mean, all_values.mean(1), atol=1e-10, rtol=0)
    # clips that do not move leave the time bands constant
    torch.testing.assert_close(std, torch.where(expected > 1e-6, expected, 1.0), atol=1e-6, rtol=0)
    assert (std == 1).any()
    assert (std != 1).any()


@pytest.mark.parametrize("killed_at", [(5, 1), *(pytest.param(at, marks=pytest.mark.slow) for at in ((2,), (9,)))])
def test_killed_and_repeated_equals_straight(
    videos: Path, straight: dict[str, bytes], tmp_path: Path, killed_at: tuple[int, ...]
) -> None:
    out = tmp_path / "out"
    for clip in killed_at:
        assert encode_killed(videos, out, clip) == -signal.SIGKILL
        with pytest.raises(ValueError, match=r"no index\.json"):
            LatentReader(out)
    calls = []

    class Counting(HaarCodec):
        def encode(self, video: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return super().encode(video)

    report = encode_folder(videos, out, **{**OPTIONS, "codec": Counting()})
    assert (report.samples, len(report.skipped)) == (9, 1)
    assert files_of(out) == straight
    if killed_at == (9,):
        # finished parts were not encoded again
        assert len(calls) == 1


def test_an_exception_keeps_finished_parts(videos: Path, straight: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"

    class Failing(HaarCodec):
        left = 4

        def encode(self, video: torch.Tensor) -> torch.Tensor:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return super().encode(video)

    with pytest.raises(KeyboardInterrupt):
        encode_folder(videos, out, **{**OPTIONS, "codec": Failing()})
    assert [path.name for path in (out / "parts").iterdir()] == ["00000"]
    encode_folder(videos, out, **OPTIONS)
    assert files_of(out) == straight


@pytest.mark.parametrize("world", [3, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 7))])
def test_processes_share_the_work(videos: Path, straight: dict[str, bytes], tmp_path: Path, world: int) -> None:
    out = tmp_path / "out"
    reports = [encode_folder(videos, out, **OPTIONS, rank=rank, world_size=world) for rank in reversed(range(world))]
    assert [report.complete for report in reports][-1]
    assert not (out / "index.json").exists()
    # what is left to do is to join the parts
    report = encode_folder(videos, out, **OPTIONS)
    assert report == reports[-1]
    assert files_of(out) == straight


@pytest.mark.slow
def test_joining_can_be_interrupted(
    videos: Path, straight: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace
    # after so many of the 11 shards were moved; 11: before the index gets its name; -1: before the parts are removed
    for moves in (0, 3, 10, 11, -1):
        out = tmp_path / f"out{moves}"
        for rank in range(2):
            encode_folder(videos, out, **OPTIONS, rank=rank, world_size=2)
        left = [moves]

        def replace_some(source, target, left=left) -> None:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            replace(source, target)

        def interrupt(path) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace_some)
            if moves < 0:
                patch.setattr(parts.shutil, "rmtree", interrupt)
            with pytest.raises(KeyboardInterrupt):
                parts.join_parts(out)
        if moves < 0:
            LatentReader(out).verify()
            parts.shutil.rmtree(out / "parts")
        else:
            encode_folder(videos, out, **OPTIONS)
        assert files_of(out) == straight


@pytest.mark.slow
def test_other_settings_are_refused_by_name(videos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    encode_folder(videos, out, **OPTIONS, rank=1, world_size=2)
    before = files_of(out)
    changes = [
        ({"dtype": "float32"}, r"started with dtype float16, got float32"),
        ({"samples_per_shard": 4}, r"samples_per_shard 3, got 4"),
        ({"fps": 4.0}, r"fps None, got 4\.0"),
        ({"size": (16, 16)}, r"size None, got \[16, 16\]"),
        ({"codec": HaarCodec(8)}, r"codec haar-4x8x8-c16 .* got haar-4x8x8-c8"),
        ({"text_encoder": HashedNgramEncoder(dim=9)}, r"text_encoder hashed-ngrams-8x5 .* hashed-ngrams-9x16"),
    ]
    for change, message in changes:
        with pytest.raises(ValueError, match=message) as caught:
            encode_folder(videos, out, **{**OPTIONS, **change})
        assert "\n" not in str(caught.value)
        assert files_of(out) == before
    # other files under the same names, or other captions, are another data set
    copy = tmp_path / "videos"
    copy.mkdir()
    for name, content in files_of(videos).items():
        (copy / name).write_bytes(content)
    (copy / "01.txt").write_text("other words")
    with pytest.raises(ValueError, match="started with videos 10 files"):
        encode_folder(copy, out, **OPTIONS)
    encode_folder(copy, out, **OPTIONS, overwrite=True)
    assert LatentReader(out).text("01", 0)[0] == "other words"


def test_parts_of_other_settings_are_looked_at_again(videos: Path, tmp_path: Path) -> None:
    out, copy = tmp_path / "out", tmp_path / "videos"
    copy.mkdir()
    for name, content in files_of(videos).items():
        (copy / name).write_bytes(content)
    encode_folder(copy, out, **OPTIONS, rank=0, world_size=2)
    before = files_of(out)
    # in a part that is done, and has to be made again
    (copy / "00.mp4").write_bytes(b"no video")
    (copy / "02.mp4").unlink()
    with pytest.raises(UnusableFiles, match=r"00\.mp4"):
        encode_folder(copy, out, **{**OPTIONS, "skip_bad": False}, overwrite=True)
    assert files_of(out) == before


@pytest.mark.slow
def test_overwriting_goes_on_after_an_interruption(videos: Path, straight: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    encode_folder(videos, out, **{**OPTIONS, "dtype": "float32"})
    old = files_of(out)
    with pytest.raises(ValueError, match="already holds a data set"):
        encode_folder(videos, out, **OPTIONS)

    class Failing(HaarCodec):
        left = 4

        def encode(self, video: torch.Tensor) -> torch.Tensor:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return super().encode(video)

    with pytest.raises(KeyboardInterrupt):
        encode_folder(videos, out, **{**OPTIONS, "codec": Failing()}, overwrite=True)
    done_file = out / "parts" / "00000" / "done.json"
    assert json.loads(done_file.read_text())["samples"] == 2
    # the old data set stands until there is a new one
    assert {name: content for name, content in files_of(out).items() if not name.startswith("parts")} == old
    calls = []

    class Counting(HaarCodec):
        def encode(self, video: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return super().encode(video)

    encode_folder(videos, out, **{**OPTIONS, "codec": Counting()}, overwrite=True)
    assert files_of(out) == straight
    assert len(calls) == 7


def test_a_smaller_data_set_leaves_nothing_of_the_old_one(
    videos: Path, straight: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    encode_folder(videos, out, **{**OPTIONS, "samples_per_shard": 1})
    assert len(files_of(out)) > len(straight)
    encode_folder(videos, out, **OPTIONS, overwrite=True)
    assert files_of(out) == straight


def test_overwriting_removes_what_the_index_lists_and_nothing_else(
    videos: Path, straight: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    encode_folder(videos, out, **OPTIONS)
    (out / "README.md").write_text("mine")
    encode_folder(videos, out, **OPTIONS, overwrite=True)
    assert files_of(out) == {**straight, "README.md": b"mine"}

    def expect_refusal(file: str, culprit: str) -> None:
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        (out / file).write_text("mine")
        before = files_of(out)
        with pytest.raises(ValueError, match=rf"out/{culprit} is not part of a data set in"):
            encode_folder(videos, out, **OPTIONS, overwrite=True)
        assert files_of(out) == before
        (out / file).unlink()

    # shards of somebody else, and a folder of parts that is not ours
    for name in ("text-holiday.tar", "latents-00009.tar"):
        expect_refusal(name, name)
    for name in ("parts/left.jpg", "parts/00000/photo.jpg", "parts/00000/text-00000.tar/a"):
        expect_refusal(name, name)
        parts.shutil.rmtree(out / "parts")
    expect_refusal("parts/holiday/a.jpg", "parts/holiday")
    parts.shutil.rmtree(out / "parts")
    (out / "index.json").write_text('{"name": "a website"}')
    with pytest.raises(ValueError, match=r"index\.json: expected schema 1, got None.*, or remove that file"):
        encode_folder(videos, out, **OPTIONS, overwrite=True)
    assert files_of(out) == {**straight, "README.md": b"mine", "index.json": b'{"name": "a website"}'}
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"file is not a folder"):
        encode_folder(videos, tmp_path / "file", **OPTIONS)


@pytest.mark.parametrize("again", ["joined", "encoded", "written"])
def test_an_interrupted_removal_leaves_no_data_set_and_goes_on(
    videos: Path, straight: dict[str, bytes], tmp_path: Path, monkeypatch, make_dataset, again: str
) -> None:
    out = tmp_path / "out"
    encode_folder(videos, out, **{**OPTIONS, "samples_per_shard": 1})
    unlink, removals = Path.unlink, []

    def kill_second(path: Path, missing_ok: bool = False) -> None:
        if path.parent == out:
            removals.append(path)
            if len(removals) == 2:
                raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", kill_second)
        with pytest.raises(KeyboardInterrupt):
            encode_folder(videos, out, **OPTIONS, overwrite=True)
    with pytest.raises(ValueError, match=r"index\.json"):
        LatentReader(out)
    (out / "README.md").write_text("mine")
    if again != "joined":
        parts.shutil.rmtree(out / "parts")
    if again == "written":
        other = files_of(make_dataset(tmp_path / "other"))
        make_dataset(out)
        assert files_of(out) == {**other, "README.md": b"mine"}
    else:
        encode_folder(videos, out, **OPTIONS)
        assert files_of(out) == {**straight, "README.md": b"mine"}


def test_joining_replaces_no_file_of_others(videos: Path, straight: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    for rank in range(2):
        encode_folder(videos, out, **OPTIONS, rank=rank, world_size=2)
    (out / "text-00002.tar").write_text("mine")
    with pytest.raises(ValueError, match=r"text-00002\.tar is not part of the data set in .*: move it"):
        encode_folder(videos, out, **OPTIONS)
    assert (out / "text-00002.tar").read_text() == "mine"
    (out / "text-00002.tar").unlink()
    encode_folder(videos, out, **OPTIONS)
    assert files_of(out) == straight


def test_bad_shares_are_refused(videos: Path, tmp_path: Path) -> None:
    cases = [
        ({"rank": 2, "world_size": 2}, r"rank must be in 0\.\.1, got 2"),
        ({"rank": 1, "world_size": 2, "overwrite": True}, "overwrite needs one process, got 2"),
        ({"samples_per_shard": 0}, "samples_per_shard must be at least 1, got 0"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            encode_folder(videos, tmp_path / "out", **{**OPTIONS, **change})
        assert not (tmp_path / "out").exists()

"""A full disk is told with the file, what was written and what is free."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tests.disks import small_files
from vsa.errors import DISK_FULL, one_line_errors
from vsa.files import DiskFullError, atomic_file, atomic_folder, typed, writing

FREE = r"\d[\d.]* [kMGT]?B free"


def test_no_space_is_told_in_one_line_with_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target, temporary = tmp_path / "model.bin", tmp_path / ".writing"
    temporary.write_bytes(b"x" * 1500)
    with pytest.raises(SystemExit) as stop, one_line_errors(), writing(target, temporary, needed=2_500_000):
        # the device that is always full
        Path("/dev/full").write_text("x")
    assert stop.value.code == DISK_FULL == 28
    line = capsys.readouterr().err
    assert line.startswith(f"error: cannot write {target}: No space left on device (2.5 MB needed, 1.5 kB written, ")
    assert line.endswith(" free)\n")
    assert line.count("\n") == 1


def fail_with(error: OSError, *paths: Path) -> None:
    """Raise an error while several files are being written, one inside the other."""
    with ExitStack() as stack:
        for path in paths:
            stack.enter_context(writing(path))
        raise error


def test_a_folder_counts_with_all_its_files(tmp_path: Path):
    (tmp_path / "new" / "in").mkdir(parents=True)
    for path in (tmp_path / "new" / "a", tmp_path / "new" / "in" / "b"):
        path.write_bytes(b"x" * 300)
    with pytest.raises(DiskFullError, match=rf"{tmp_path}/new: Disk quota exceeded \(600 B written, {FREE}\)"):
        fail_with(OSError(errno.EDQUOT, "quota", "some temporary name"), tmp_path / "new")


def test_the_innermost_file_is_the_one_named(tmp_path: Path):
    with pytest.raises(DiskFullError, match="inner") as failure:
        fail_with(OSError(errno.ENOSPC, "full"), tmp_path / "outer", tmp_path / "inner")
    assert failure.value.errno == errno.ENOSPC
    assert failure.value.filename == str(tmp_path / "inner")


def test_other_errors_keep_their_words_and_get_a_name(tmp_path: Path):
    with pytest.raises(OSError, match=r"\[Errno 5\] Input/output error: '.*/broken'") as failure:
        fail_with(OSError(errno.EIO, "Input/output error"), tmp_path / "broken")
    assert not isinstance(failure.value, DiskFullError)
    with pytest.raises(FileNotFoundError, match="'/nowhere/x'"):
        fail_with(FileNotFoundError(errno.ENOENT, "missing", "/nowhere/x"), tmp_path / "broken")
    # not of the system
    with pytest.raises(OSError, match=r"^another rank failed$"):
        fail_with(OSError("another rank failed"), tmp_path / "broken")


def test_an_atomic_file_on_a_full_disk_stays_what_it_was(tmp_path: Path):
    target = tmp_path / "index.json"
    target.write_text("before")

    def replace() -> None:
        with small_files(1000), atomic_file(target) as temporary:
            temporary.write_bytes(b"x" * 1001)

    with pytest.raises(DiskFullError, match=rf"{target}: File too large \(1 kB written, {FREE}\)"):
        replace()
    assert target.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["index.json"]


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        calls.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        calls.append(("name", os.path.basename(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_rename)
    with atomic_folder(tmp_path / "runs" / "new") as temporary:
        (temporary / "in").mkdir()
        for name in ("b", "in/c", "a"):
            (temporary / name).write_text(name)
    inside = [("sync", name) for name in ("a", "b", "in", "c", ".writing-new")]
    assert calls == [*inside, ("name", "new"), ("sync", "runs")]


@pytest.mark.parametrize("replace", [False, True])
def test_a_folder_takes_the_place_of_another_only_where_it_is_to(tmp_path: Path, replace: bool):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "old").touch()
    # litter of a write that was killed
    (tmp_path / ".writing-new").mkdir()
    (tmp_path / ".writing-new" / "half").touch()

    def write() -> None:
        with atomic_folder(tmp_path / "new", replace=replace) as temporary:
            (temporary / "a").touch()

    if replace:
        write()
    else:
        with pytest.raises(OSError, match="not empty"):
            write()
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert left == ["new", "new/a" if replace else "new/old"]


def test_a_folder_on_a_full_disk_leaves_nothing(tmp_path: Path):
    def write() -> None:
        with small_files(1000), atomic_folder(tmp_path / "new", needed=2000) as temporary:
            (temporary / "a").write_bytes(b"x" * 2000)

    with pytest.raises(DiskFullError, match=rf"{tmp_path}/new: File too large \(2 kB needed, 1 kB written, {FREE}\)"):
        write()
    assert not list(tmp_path.iterdir())


def _by_safetensors(folder: Path) -> None:
    save_file({"x": torch.ones(1000)}, folder / "x.safetensors")


def _by_copying(folder: Path) -> None:
    shutil.copytree(folder.parent / "tree", folder / "tree")


def _in_a_part(folder: Path) -> None:
    with atomic_file(folder / "part") as temporary:
        temporary.write_bytes(bytes(4000))


@pytest.mark.parametrize("write", [_by_safetensors, _by_copying, _in_a_part])
def test_a_full_disk_is_told_whatever_library_writes(write, tmp_path):
    """With exit status 28 in one line, and nothing under the final name."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "x").write_bytes(bytes(4000))
    told = pytest.raises(DiskFullError, match=r"^cannot write .*/new(/part)?: File too large \(")
    with told as failure, small_files(1000), atomic_folder(tmp_path / "new") as temporary:
        write(temporary)
    assert failure.value.errno == errno.EFBIG
    assert ".writing" not in str(failure.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


def test_other_errors_of_libraries_stay_as_they_are(tmp_path):
    with (
        pytest.raises(SafetensorError, match=r"No such file or directory \(os error 2\)"),
        atomic_folder(tmp_path / "new"),
    ):
        save_file({"x": torch.ones(1)}, tmp_path / "absent" / "x.safetensors")
    with pytest.raises(RuntimeError, match="28"), atomic_folder(tmp_path / "new"):
        raise RuntimeError("an error of 28 words")


def test_a_path_that_is_typed_is_one_argument_and_no_option():
    for name in ("-out/a b", "--x", "a'b", "plain/-x"):
        (argument,) = shlex.split(typed(Path(name)))
        assert not argument.startswith("-")
        assert Path(argument) == Path(name)


WRITER = """import os, sys
from vsa.files import atomic_file
with atomic_file(sys.argv[1]) as temporary:
    temporary.write_text("half")
    os._exit(9)
"""


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path):
    subprocess.run([sys.executable, "-c", WRITER, tmp_path / "a.json"])
    (left,) = tmp_path.iterdir()
    with atomic_file(tmp_path / "b.json") as mine:
        mine.touch()
        assert not left.exists()
        with atomic_file(tmp_path / "c.json") as other:
            # the control: that of a process that lives
            assert mine.exists()
            other.touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json", "c.json"]

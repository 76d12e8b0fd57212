"""What every command does with bad input."""

from pathlib import Path

import pytest
import torch

from vsa.errors import one_line_errors, refuse_unwritable, usable_device
from vsa.places import place_of


def test_a_device_that_works_is_kept():
    assert usable_device("cpu", rank=3) == "cpu"
    assert usable_device(None) == ("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["gpu", "cpu:x", "cuda:99"])
def test_a_device_that_does_not_work_is_named(name, capsys):
    with pytest.raises(SystemExit) as stop, one_line_errors():
        usable_device(name)
    assert stop.value.code == 1
    line = capsys.readouterr().err
    assert line.startswith(f"error: device '{name}' cannot be used: ")
    assert line.count("\n") == 1


CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 byte\nand more"
CPU = "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (torch.OutOfMemoryError(CUDA), "CUDA out of memory. Tried to allocate 2.00 GiB"),
        (RuntimeError(CPU), "can't allocate memory: you tried to allocate 8 bytes."),
        (MemoryError(), "MemoryError"),
    ],
)
def test_memory_that_runs_out_is_one_line(error, line, capsys):
    with pytest.raises(SystemExit) as stop, one_line_errors():
        raise error
    assert stop.value.code == 1
    assert capsys.readouterr().err == f"error: not enough memory: {line}\n"
    with pytest.raises(type(error)), one_line_errors(traceback=True):
        raise error


def test_links_in_a_circle_are_one_line(tmp_path, capsys):
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(SystemExit) as stop, one_line_errors():
        # from Python 3.13 on, only a strict one is an error
        link.resolve(strict=True)
    line = capsys.readouterr().err
    assert (stop.value.code, line.count("\n")) == (1, 1)
    assert line.startswith("error: ")
    assert str(link) in line


def test_a_defect_keeps_its_traceback(capsys):
    with pytest.raises(RuntimeError, match="a defect"), one_line_errors():
        raise RuntimeError("a defect")
    assert capsys.readouterr().err == ""


def test_ranks_share_the_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    devices = []
    monkeypatch.setattr(torch, "empty", lambda n, device: devices.append(device))
    assert [usable_device("cuda", rank=rank) for rank in (0, 3, 6)] == ["cuda:0", "cuda:3", "cuda:2"]
    assert usable_device("cuda:1", rank=3) == "cuda:1"
    assert devices == ["cuda:0", "cuda:3", "cuda:2", "cuda:1"]


def test_folders_that_cannot_be_written_are_named(tmp_path, monkeypatch):
    refuse_unwritable(tmp_path / "new" / "one")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write to .*file/in: .*file is not a writable folder"):
        refuse_unwritable(tmp_path / "file" / "in")
    # permissions do not bind a superuser, and yet no file can be made in /proc
    with pytest.raises(ValueError, match=r"^cannot write to /proc/x: /proc is not a writable folder$"):
        refuse_unwritable(Path("/proc/x"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ValueError, match="cannot write to"):
        refuse_unwritable(tmp_path)


@pytest.mark.parametrize("name", ["s3://bucket/shards", "hf://me/m", "https://huggingface.co/me/m", "C:/models/m"])
def test_an_address_does_not_become_a_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"--out {name} is not a path of this machine"):
        place_of(name, f"--out {name}")
    # control: a name with a colon, and folders that are not there yet
    refuse_unwritable(place_of("clips-12:30/new", "--out"))

"""Whose a run folder is: nothing of anybody else's is removed or written into, and one process has it at a time."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import lightning as L
import pytest

import vsa.checkpoints.manifest as manifest_module
import vsa.checkpoints.run_folder as run_folder
from tests.disks import small_files
from tests.limits import HANGS
from vsa.checkpoints.run_folder import MANIFEST, RunFolder, check_folder, locked
from vsa.checkpoints.run_history import note_start
from vsa.places import check_name


def contents(folder: Path) -> dict[str, bytes | None]:
    """Files with what they hold, and folders."""
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in paths}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a/..", ".hidden", "None", "a\0b"])
def test_what_is_not_a_name_is_refused(name):
    with pytest.raises(ValueError, match=rf"^run={re.escape(name)} is not a name: expected one folder name"):
        check_name("run", name)


@pytest.mark.parametrize("name", ["default", "s0.5", "lr=0.1,seed=2", "a b", "ä", "x.", "5"])
def test_names_of_sweeps_and_people_stay(name):
    check_name("run", name)


def open_folder(folder: Path, config: str, *, overwrite: bool) -> None:
    with RunFolder(folder) as run:
        run.open(config, overwrite=overwrite)


# whose a folder is


def a_run(folder: Path, config: str = "old: true\n") -> Path:
    open_folder(folder, config, overwrite=False)
    (folder / "metrics.csv").write_text("step\n")
    return folder


def an_old_run(folder: Path) -> Path:
    """A run of a version without manifests."""
    (folder / "checkpoints" / "step-00000002").mkdir(parents=True)
    (folder / "config.yaml").write_text("old: true\n")
    return folder


def test_a_new_run_opens_no_folder_of_something_else(tmp_path):
    for free in ("missing", "empty"):
        if free == "empty":
            (tmp_path / free).mkdir()
        check_folder(tmp_path / free, overwrite=False)
        check_folder(tmp_path / free, overwrite=True)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.yaml").write_text("my own")
    with pytest.raises(ValueError, match=r"holds files of something else \(it has no run.json\)"):
        check_folder(mine, overwrite=False)
    # a run above or below it is no proof
    a_run(tmp_path / "outer")
    (tmp_path / "outer" / "data").mkdir()
    (tmp_path / "outer" / "data" / "x").write_text("x")
    a_run(mine / "inner")
    for folder in (mine, tmp_path / "outer" / "data"):
        with pytest.raises(ValueError, match=r"holds files of something else|is inside a run"):
            check_folder(folder, overwrite=False)
        with pytest.raises(ValueError, match=r"overwrite=true cannot set .* aside: it has no run.json|is inside"):
            check_folder(folder, overwrite=True)
    with pytest.raises(ValueError, match="is not a folder"):
        check_folder(mine / "config.yaml", overwrite=False)


@pytest.mark.parametrize("manifest", ["", "{}", "[]", '{"written_by": "someone"}', "null"])
def test_a_manifest_must_be_our_own(tmp_path, manifest):
    (tmp_path / MANIFEST).write_text(manifest)
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=MANIFEST):
            check_folder(tmp_path, overwrite=overwrite)


def keep_things(run: Path) -> None:
    """What people keep in the folder of a run, some of it known as something else."""
    files = {
        "notes.txt": b"mine",
        "adapters/adapter_model.safetensors": b"\0" * 99,
        ".git/HEAD": b"ref: refs/heads/main",
        "best-checkpoint/state.json": b"{}",
        "shards/index.json": b"{}",
        "export/config.json": b"{}",
        "pipeline/model_index.json": b"{}",
        "checkpoints/step-00000002/model.safetensors": b"weights",
        "checkpoints/step-00000002 (copy)/model.safetensors": b"weights",
        "odd \n name/\u00e4 .mp4": b"clip",
        ".hidden": b"",
        ".lock": b"",
    }
    for name, content in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content)
    (run / "sweep").mkdir()
    a_run(run.parent / "a").rename(run / "sweep" / "a")
    (run / "empty" / "folder").mkdir(parents=True)
    (run / "link").symlink_to(run.parent)
    (run / "gone").symlink_to("nowhere")
    (run / "step").symlink_to("checkpoints/step-00000002")
    os.link(run / "notes.txt", run / "same.txt")
    os.mkfifo(run / "pipe")
    (run / "notes.txt").chmod(0o400)


def states(folder: Path) -> dict[str, object]:
    """Every path below a folder with its kind, rights, time, and content or target."""
    found = {}
    for place, names, files in os.walk(folder):
        for name in (*names, *files):
            path = Path(place, name)
            what = path.lstat()
            content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
            found[str(path.relative_to(folder))] = (what.st_ino, what.st_mode, what.st_mtime_ns, content)
    return found


def test_all_that_lies_in_an_old_run_is_set_aside_with_it(tmp_path):
    run = a_run(tmp_path / "run")
    keep_things(run)
    before = states(run)
    assert len(before) > 26
    open_folder(run, "new: true\n", overwrite=True)
    assert states(tmp_path / "run.1") == before
    assert contents(run).keys() == {"config.yaml", MANIFEST}
    # and it comes back whole
    keep_things(run)
    before = states(tmp_path)
    with pytest.raises(KeyError):
        fail_in(run, overwrite=True)
    assert states(tmp_path) == before


def die_at(call: int) -> None:
    """Kill this process right before its `call`-th change of names."""
    calls = itertools.count()

    def counted(change):
        def dying(*args, **kwargs):
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*args, **kwargs)

        return dying

    for name in ("rename", "replace", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))


@pytest.mark.filterwarnings("ignore:run folder .* put its old run back")
def test_a_kill_at_any_moment_loses_nothing(tmp_path):
    """Between all steps of setting aside: the old run is whole in one place, and the next start goes on from there."""
    outcomes = []
    for call in itertools.count():
        run = a_run(tmp_path / str(call) / "run")
        keep_things(run)
        old = states(run)
        child = os.fork()
        if child == 0:
            die_at(call)
            with locked(run), RunFolder(run) as opened:
                opened.open("new: true\n", overwrite=True)
                opened.keep()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        with locked(run):
            pass
        (place,) = (path for path in (run, run.with_name("run.1")) if path.exists() and states(path) == old)
        outcomes.append(place.name)
        assert set(os.listdir(run.parent)) <= {"run", "run.1"}
        open_folder(run, "newer: true\n", overwrite=True)
        assert states(run.with_name("run.1")) == old
        assert (run / "config.yaml").read_text() == "newer: true\n"
        if not os.WIFSIGNALED(status):
            break
    # it stands until the new run has made its step, and then has its new name
    assert outcomes == sorted(outcomes)
    assert outcomes.count("run") >= 5
    assert outcomes[-1] == "run.1"


@pytest.mark.parametrize("kind", ["run", "file", "link", "log", "in use"])
def test_a_name_that_is_taken_is_left_alone(tmp_path, kind):
    run, taken = a_run(tmp_path / "run"), tmp_path / "run.1"
    log = tmp_path / "run.1.log"
    if kind == "run":
        a_run(taken)
    elif kind == "file":
        taken.write_text("mine")
    elif kind == "link":
        taken.symlink_to("nowhere")
    elif kind == "log":
        log.write_text("mine")
    before, old = states(tmp_path), states(run)
    # a run of this name has been checked, and opens its folder soon
    with locked(taken) if kind == "in use" else nullcontext():
        open_folder(run, "new: true\n", overwrite=True)
    after = states(tmp_path)
    assert states(tmp_path / "run.2") == old
    others = {name: state for name, state in before.items() if not name.startswith("run/") and name != "run"}
    assert others.items() <= after.items()
    assert sorted(os.listdir(tmp_path)) == sorted({"run", "run.2", *others} - {n for n in others if "/" in n})


def test_a_link_is_followed_neither_to_write_nor_to_remove(tmp_path):
    a_run(tmp_path / "real")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=rf"link is a symbolic link to {tmp_path}/real"):
            check_folder(link, overwrite=overwrite)
    link.unlink()
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=rf"link is a symbolic link to {tmp_path}/gone"):
        check_folder(link, overwrite=False)
    # nor are links below a run
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "photo").write_text("mine")
    (tmp_path / "real" / "photos").symlink_to(outside)
    with pytest.raises(ValueError, match=rf"has a link out of it, {tmp_path}/real/photos -> {outside}"):
        check_folder(tmp_path / "real", overwrite=False)
    (tmp_path / "real" / "photos").unlink()
    # but one back to itself, and those of a tracker's logs to its cache
    (tmp_path / "real" / "loop").symlink_to("loop")
    (tmp_path / "real" / "wandb" / "run-1").mkdir(parents=True)
    (tmp_path / "real" / "wandb" / "run-1" / "debug-core.log").symlink_to(outside / "photo")
    check_folder(tmp_path / "real", overwrite=False)
    (tmp_path / "real" / "wandb").rename(tmp_path / "away")
    (tmp_path / "real" / "wandb").symlink_to(tmp_path / "away")
    with pytest.raises(ValueError, match=r"has a link out of it, .*/wandb -> "):
        check_folder(tmp_path / "real", overwrite=False)
    open_folder(tmp_path / "real", "new: true\n", overwrite=True)
    assert contents(tmp_path / "real").keys() == {"config.yaml", MANIFEST}
    assert os.readlink(tmp_path / "real.1" / "wandb") == str(tmp_path / "away")
    assert (outside / "photo").read_text() == "mine"


def test_the_folder_one_stands_in_is_not_removed(tmp_path, monkeypatch):
    monkeypatch.chdir(a_run(tmp_path / "run"))
    for folder in (Path("."), Path("../run"), tmp_path / "run"):
        with pytest.raises(ValueError, match="the command was started inside it"):
            check_folder(folder, overwrite=True)


# opening


def test_overwriting_moves_opens_and_names_what_was_moved(tmp_path):
    folder = a_run(tmp_path / "run")
    first = json.loads((folder / MANIFEST).read_text())
    assert first.keys() == {"written_by", "version", "commits", "run_id", "created", "started_in"}
    assert first["written_by"] == "vsa-train"
    # an old run of an overwrite that was killed, and a new one that made no step and was being removed
    lefts = [".run.overwritten-0123abcd", ".run.removing-0123abcd", ".run2.overwritten-0123abcd"]
    for left in lefts:
        (tmp_path / left / "checkpoints").mkdir(parents=True)
    (tmp_path / lefts[0] / "notes").write_text("mine")
    with RunFolder(folder) as run:
        run.open("new: true\n", overwrite=True)
        assert set(lefts) < set(os.listdir(tmp_path))
        assert run.keep() == [tmp_path / "run.1", tmp_path / "run.2"]
        assert run.keep() == []
    assert sorted(os.listdir(tmp_path)) == [lefts[2], "run", "run.1", "run.2"]
    # the older one first
    assert (tmp_path / "run.1" / "notes").read_text() == "mine"
    assert json.loads((tmp_path / "run.2" / MANIFEST).read_text()) == first
    assert contents(folder).keys() == {"config.yaml", MANIFEST}
    assert (folder / "config.yaml").read_text() == "new: true\n"
    assert json.loads((folder / MANIFEST).read_text())["run_id"] != first["run_id"]


def test_a_run_knows_the_commits_that_trained_it(tmp_path, monkeypatch):
    for commit in ("0123abc", "0123abc", "0123abc+", None):
        monkeypatch.setattr(manifest_module, "checked_out_commit", lambda commit=commit: commit)
        open_folder(tmp_path / "run", "a: 1\n", overwrite=False)
    first = json.loads((tmp_path / "run" / MANIFEST).read_text())
    assert first["commits"] == ["0123abc", "0123abc+", None]
    # a run of a version that did not say
    del first["commits"]
    (tmp_path / "run" / MANIFEST).write_text(json.dumps(first))
    open_folder(tmp_path / "run", "a: 1\n", overwrite=False)
    assert json.loads((tmp_path / "run" / MANIFEST).read_text()) == {**first, "commits": [None]}


def test_the_commit_is_that_of_the_checkout(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        own = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *own, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    monkeypatch.setattr(manifest_module, "__file__", str(tmp_path / "vsa" / "checkpoints" / "manifest.py"))
    commit = manifest_module.checked_out_commit.__wrapped__
    assert commit() is None
    git("init", "-q")
    assert commit() is None
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    # a tag is no commit
    git("tag", "-a", "v1", "-m", "v1")
    assert commit() == git("rev-parse", "--short", "HEAD").strip()
    # files that git does not know are no change of the code, and a hook's own variables are not those of the checkout
    (tmp_path / "notes").write_text("2")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert commit() == commit().rstrip("+")
    (tmp_path / "code.py").write_text("2")
    assert commit().endswith("+")
    # a package that lies inside another project's checkout, or a machine without git
    monkeypatch.setattr(manifest_module, "__file__", str(tmp_path / "a" / "vsa" / "checkpoints" / "manifest.py"))
    assert commit() is None
    monkeypatch.setattr(manifest_module, "__file__", str(tmp_path / "vsa" / "checkpoints" / "manifest.py"))
    monkeypatch.setenv("PATH", "")
    assert commit() is None


def fail_in(folder: Path, *, overwrite: bool, opens: bool = True, keeps: bool = False) -> None:
    """A run that fails before it is opened, before its first step or later."""
    with RunFolder(folder) as run:
        if opens:
            run.open("new: true\n", overwrite=overwrite)
            assert (folder / "config.yaml").read_text() == "new: true\n"
            # as the logger does
            (folder / "metrics.csv").write_text("")
        if keeps:
            run.keep()
        raise KeyError


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_fails_before_it_is_kept_is_undone(tmp_path, overwrite):
    folder = a_run(tmp_path / "run")
    old = an_old_run(tmp_path / "old")
    before = contents(tmp_path)
    for path in (folder, tmp_path / "new", *([] if overwrite else [old])):
        with pytest.raises(KeyError):
            fail_in(path, overwrite=overwrite)
        assert contents(tmp_path) == before
    with pytest.raises(KeyError):
        fail_in(folder, overwrite=overwrite, opens=False)
    assert contents(tmp_path) == before
    with pytest.raises(KeyError):
        fail_in(folder, overwrite=overwrite, keeps=True)
    assert (folder / "config.yaml").read_text() == "new: true\n"
    assert sorted(os.listdir(tmp_path)) == ["old", "run", *(["run.1"] if overwrite else [])]


def test_a_run_that_cannot_be_moved_aside_stays(tmp_path, monkeypatch):
    folder = a_run(tmp_path / "run")
    before = contents(tmp_path)

    def refuse(source, target):
        raise PermissionError(13, "Permission denied", str(source))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError):
        open_folder(folder, "new: true\n", overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", [MANIFEST, "config.yaml"])
def test_an_old_run_comes_back_when_the_new_one_cannot_be_opened(tmp_path, monkeypatch, name):
    folder = a_run(tmp_path / "run")
    before = contents(tmp_path)
    write = run_folder.write_whole

    def full_disk(path, content):
        if Path(path).name == name:
            raise OSError(28, "No space left on device", str(path))
        write(path, content)

    for module in (manifest_module, run_folder):
        monkeypatch.setattr(module, "write_whole", full_disk)
    with pytest.raises(OSError, match="No space left"):
        open_folder(folder, "new: true\n", overwrite=True)
    assert contents(tmp_path) == before
    with pytest.raises(OSError, match="No space left"):
        open_folder(tmp_path / "other", "new: true\n", overwrite=False)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("where", ["moved", "writing", "opened", "noted", "made a checkpoint", "of something else"])
def test_overwritten_run_is_restored_if_the_new_one_made_no_step(tmp_path, where):
    folder = a_run(tmp_path / "run")
    (folder / "checkpoints" / "step-00000002").mkdir(parents=True)
    before = contents(tmp_path)
    RunFolder(folder).open("new: true\n", overwrite=True)
    if where == "moved":
        shutil.rmtree(folder)
    if where == "writing":
        # killed before the manifest had its name
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / ".tmp-0123456789abcdef.json").write_text("{")
    if where == "noted":
        (folder / "notes").write_text("mine")
    if where == "made a checkpoint":
        (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    if where == "of something else":
        (folder / MANIFEST).unlink()
    if where in ("moved", "writing", "opened", "noted"):
        with pytest.warns(UserWarning, match=rf"^run folder {folder}: put its old run back"), locked(folder):
            pass
        if where == "noted":
            # what somebody keeps in the new one is not lost either
            assert (tmp_path / "run.1" / "notes").read_text() == "mine"
            shutil.rmtree(tmp_path / "run.1")
        assert contents(tmp_path) == before
    else:
        left = contents(tmp_path)
        with locked(folder):
            pass
        assert contents(tmp_path) == left


def test_undoing_leaves_alone_what_was_not_changed(tmp_path, recwarn):
    folder = a_run(tmp_path / "run")
    before, manifest = contents(folder), (folder / MANIFEST).stat()
    with pytest.raises(KeyError):
        fail_in(folder, overwrite=False)
    assert contents(folder) == before
    assert (folder / MANIFEST).stat().st_mtime_ns == manifest.st_mtime_ns
    assert not recwarn


def test_undoing_on_a_full_disk_says_so_beside_the_error(tmp_path):
    folder = a_run(tmp_path / "run", "old: " + "x" * 20_000)
    warning = pytest.warns(UserWarning, match=rf"^{folder}/config.yaml could not be put back: cannot write")
    with small_files(10_000), warning, pytest.raises(KeyError):
        fail_in(folder, overwrite=False)
    # nothing was cut off
    assert (folder / "config.yaml").read_text() == "new: true\n"
    assert (folder / "metrics.csv").read_text() == "step\n"


@pytest.mark.parametrize("thread", [False, True])
def test_signals_do_not_stop_the_undoing(tmp_path, monkeypatch, thread):
    folder = a_run(tmp_path / "run")
    before = contents(tmp_path)
    remove = shutil.rmtree

    def slow(path, **kwargs):
        # the old run stands there before anything is removed
        assert (folder / "config.yaml").read_text() == "old: true\n"
        if not thread:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
        remove(path, **kwargs)

    def work() -> None:
        with pytest.raises(KeyError):
            fail_in(folder, overwrite=True)

    monkeypatch.setattr(shutil, "rmtree", slow)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    if thread:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()
    else:
        work()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert contents(tmp_path) == before


def test_an_undoing_that_fails_names_where_the_old_run_is(tmp_path, monkeypatch):
    folder = a_run(tmp_path / "run")

    rename = os.rename

    def refuse(source, target):
        if Path(target) == folder or ".removing-" in str(target):
            raise PermissionError(13, "Permission denied", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    where = r"could not be put back: .* the run before is .*/\.run\.overwritten-\w{8}$"
    with pytest.warns(UserWarning, match=where), pytest.raises(KeyError):
        fail_in(folder, overwrite=True)


def test_a_resumed_run_keeps_its_manifest_and_an_old_one_gets_one(tmp_path):
    folder = a_run(tmp_path / "run")
    before = (folder / MANIFEST).read_bytes()
    open_folder(folder, "new: true\n", overwrite=False)
    assert (folder / MANIFEST).read_bytes() == before
    assert (folder / "metrics.csv").exists()
    old = an_old_run(tmp_path / "old")
    with pytest.raises(ValueError, match="a run of an older version gets one when it is resumed with ckpt_path=last"):
        check_folder(old, overwrite=True)
    open_folder(old, "new: true\n", overwrite=False)
    check_folder(old, overwrite=True)


# the lock


def test_the_second_process_is_told_of_the_first(tmp_path):
    folder = tmp_path / "out" / "group" / "run"
    with locked(folder):
        assert contents(tmp_path).keys() == {"out", "out/group", "out/group/.run.lock"}
        here = re.escape(f"process {os.getpid()} on {socket.gethostname()} since 2")
        refusal = pytest.raises(ValueError, match=rf"^run folder {folder} is in use by {here}.* name another run")
        with refusal, locked(folder):
            pass
        # a link is another name of the same folder
        (tmp_path / "link").symlink_to(folder.parent)
        with pytest.raises(ValueError, match="is in use by"), locked(tmp_path / "link" / "run"):
            pass
        (tmp_path / "link").unlink()
        # neither the one that was refused nor another run took anything
        with locked(folder.parent / "other"):
            pass
        assert contents(tmp_path).keys() == {"out", "out/group", "out/group/.run.lock"}
    assert contents(tmp_path) == {}


def test_the_lock_is_given_back_when_the_run_fails(tmp_path):
    for _ in range(2):
        with pytest.raises(KeyError), locked(tmp_path / "run"):
            raise KeyError
    assert contents(tmp_path) == {}


def test_a_lock_does_not_outlive_its_process(tmp_path):
    context = multiprocessing.get_context("fork")
    inside = context.Event()

    def hold() -> None:
        with locked(tmp_path / "run"):
            inside.set()
            signal.pause()

    holder = context.Process(target=hold)
    holder.start()
    assert inside.wait(HANGS)
    with pytest.raises(ValueError, match=f"in use by process {holder.pid} on "), locked(tmp_path / "run"):
        pass
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert (tmp_path / ".run.lock").exists()
    with locked(tmp_path / "run"):
        pass
    assert contents(tmp_path) == {}


def test_a_process_that_was_forked_does_not_hold_the_lock(tmp_path):
    context = multiprocessing.get_context("fork")
    end = context.Event()
    with locked(tmp_path / "run"):
        # as the workers of a data loader, which may outlive a killed run for seconds
        worker = context.Process(target=end.wait)
        worker.start()
    try:
        with locked(tmp_path / "run"):
            pass
    finally:
        end.set()
        worker.join()


def deny(monkeypatch, *folders: Path) -> None:
    """No rights to write into some folders, also for root."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) not in folders and access(path, mode))


def test_a_folder_that_only_itself_can_be_written_to_is_locked_inside(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    deny(monkeypatch, tmp_path)
    for _ in range(2):
        with locked(folder):
            assert (folder / ".lock").is_file()
            with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"), locked(folder):
                pass
            open_folder(folder, "new: true\n", overwrite=False)
            with pytest.raises(ValueError, match=rf"^overwrite=true cannot set {folder} aside: the folder above"):
                open_folder(folder, "new: true\n", overwrite=True)
    assert contents(folder).keys() == {"config.yaml", MANIFEST}
    deny(monkeypatch, folder)
    with pytest.raises(ValueError, match=f"cannot write to {tmp_path}"), locked(folder):
        pass


def test_a_mount_point_is_not_overwritten(tmp_path, monkeypatch):
    folder = a_run(tmp_path / "run")
    before = contents(tmp_path)

    def busy(source, target):
        raise OSError(errno.EBUSY, "Device or resource busy", str(source))

    monkeypatch.setattr(os, "rename", busy)
    with pytest.raises(ValueError, match=rf"^overwrite=true cannot set {folder} aside: it is a mount point, name"):
        open_folder(folder, "new: true\n", overwrite=True)
    assert contents(tmp_path) == before


def test_a_full_disk_does_not_cost_the_lock(tmp_path):
    refusal = pytest.raises(ValueError, match="in use by another process")
    with small_files(0), locked(tmp_path / "run"), refusal, locked(tmp_path / "run"):
        pass
    assert contents(tmp_path) == {}


# through `train`


class Fails(L.Callback):
    """In the first step, after which there is no way back."""

    def __init__(self, step: int):
        self.step = step

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == self.step - 1:
            raise KeyError


def test_an_overwritten_run_is_set_aside_when_the_new_one_has_made_a_step(training, caplog):
    common = ("trainer.max_steps=2", "trainer.accumulate_grad_batches=2")
    with pytest.raises(KeyError):
        training(*common, callbacks=(Fails(1),))
    assert not training.output.exists()
    training(*common)
    (training.folder() / "notes").write_text("mine")
    before, old = contents(training.output), states(training.folder())
    with pytest.raises(KeyError):
        training(*common, "overwrite=true", callbacks=(Fails(1),))
    assert contents(training.output) == before
    with pytest.raises(KeyError):
        training(*common, "overwrite=true", "seed=1", callbacks=(Fails(2),))
    assert sorted(training.losses()) == [1]
    aside = training.folder("default.1")
    assert sorted(path.name for path in training.folder().parent.iterdir()) == ["default", "default.1"]
    assert states(aside) == old
    assert f"the run that was in {training.folder()} is in {aside} now" in caplog.messages
    assert "seed: 1" in (training.folder() / "config.yaml").read_text()


class Second(L.Callback):
    """Tries to start the same run once more in some step."""

    def __init__(self, start, step: int):
        self.start, self.step, self.refused = start, step, ""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.step:
            with pytest.raises(ValueError) as error:
                self.start()
            self.refused = str(error.value)


@pytest.mark.soak("two runs in one folder at once", attempts=12, short=1)
def test_two_runs_do_not_share_a_folder(attempt, training):
    training("trainer.max_steps=4", "run=alone")
    draw = random.Random(attempt)
    seconds = [
        Second(lambda extra=extra: training("trainer.max_steps=4", *extra), draw.randrange(4))
        for extra in ((), ("overwrite=true",), ("ckpt_path=last",))
    ]
    training("trainer.max_steps=4", callbacks=tuple(seconds))
    for second in seconds:
        assert f"{training.folder()} is in use by process {os.getpid()}" in second.refused
    # the first ends as it would alone, and nothing is left to keep the next one out
    assert training.losses() == training.losses("alone")
    assert sorted(p.name for p in training.folder().parent.iterdir()) == ["alone", "default"]


def test_overwriting_cannot_leave_the_folder_of_the_run(training):
    a_run(training.folder())
    before = contents(training.output)
    for name in ("run=", "run=..", "name=.."):
        with pytest.raises(ValueError, match=f"^{name.partition('=')[0]}=.* is (not a name|empty)"):
            training(name, "overwrite=true")
    assert contents(training.output) == before


def test_a_file_where_checkpoints_go_is_found_before_the_first_step(training):
    (a_run(training.folder()) / "checkpoints").write_text("mine")
    before = contents(training.output)
    with pytest.raises(ValueError, match="already holds checkpoints: resume with"):
        training("trainer.max_steps=1")
    assert contents(training.output) == before


def test_loggers_make_no_files_before_the_run_is_checked(training):
    pytest.importorskip("tensorboard")
    # found out when the trainer sets up
    settings = ("logger=tensorboard", "data.batch_size=3", "trainer.accumulate_grad_batches=2")
    with pytest.raises(ValueError, match=r"data\.batch_size=3 must be a multiple"):
        training(*settings)
    assert not training.output.exists()
    for extra in ((), ("overwrite=true",)):
        training("logger=tensorboard", "trainer.max_steps=1", *extra)
        assert len(list((training.folder() / "tensorboard").glob("events.*"))) == 1
    before = contents(training.output)
    with pytest.raises(ValueError, match=r"data\.batch_size=3 must be a multiple"):
        training(*settings, "overwrite=true")
    assert contents(training.output) == before


def test_a_folder_that_is_no_run_stays_as_it_is(training, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "config.yaml").write_text("mine")
    for path, overwrite in ((folder, "true"), (folder, "false"), (tmp_path, "true")):
        with pytest.raises(ValueError, match=f"{path}( |:).*{MANIFEST}"):
            training(f"run_dir={path}", f"overwrite={overwrite}")
    with pytest.raises(ValueError, match=r"^run_dir= is not a folder: "):
        training("run_dir=", "overwrite=true")
    assert contents(tmp_path) == {"photos": None, "photos/config.yaml": b"mine"}


def test_a_start_tells_what_has_changed_since_the_last_one(tmp_path):
    (tmp_path / MANIFEST).write_text('{"written_by": "vsa-train"}')
    here = {"cpu": "a", "cores": 8, "threads": 4, "versions": {"torch": "2.12.0", "numpy": "2"}, "level": 0}
    assert note_start(tmp_path, step=0, environment=here) == []
    # neither cores nor the level change a number
    assert note_start(tmp_path, step=3, environment={**here, "cores": 2, "level": 1}) == []
    there = {"cpu": "a", "gpu": "H200", "threads": 2, "versions": {"torch": "2.13.0", "numpy": "2"}}
    expected = ["gpu None -> H200", "threads 4 -> 2", "torch 2.12.0 -> 2.13.0"]
    assert note_start(tmp_path, step=5, environment=there) == expected
    assert note_start(tmp_path, step=7, environment=there) == []

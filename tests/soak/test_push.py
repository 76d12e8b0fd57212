"""Rows about `vsa push`: what it says has happened is what the hub, or the folder, really holds."""

from __future__ import annotations

import random
import shutil
import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from tests.reports.fake_hub import TOKEN, FakeHub, Fault, Repository, fake_hub
from tests.reports.test_hub import MODEL, WEIGHTS, Pusher
from tests.reports.test_push import make_run
from tests.soak.forks import in_fork, left_alone_ends
from tests.tiny_runs import command_line, vsa_command  # noqa: F401 (a fixture)
from tests.training.test_places import contents
from vsa.checkpoints.published import RECORD

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed: pip install huggingface_hub")

PARTS = ("/api/repos/create", "/api/models/me/m", "/tree/", "/resolve/", "/preupload/", "/info/", "/storage/")
PARTS += ("/commit/",) * 7
STATUSES = (401, 403, 409, 413, 429, 500, 502, 504, 302, 0, -1)
THEIRS = {"LICENSE": "mine", "card/own.png": "mine", "notes/config.json": "mine", "a b/\u00e9.txt": "mine"}
BLOCKED = ({"README.md": "by hand"}, {f"{WEIGHTS}.index.json": "{}"}, {"card": "a file"}, {RECORD: "{}"})
NEW = {**MODEL, "config.json": '{"new": 1}', "card/new.png": "picture"}
NOTHING, UNKNOWN = "cannot push to me/m, nothing was published: ", "unknown whether me/m was published ("


def encoded(texts: dict[str, str]) -> dict[str, bytes]:
    return {name: text.encode() for name, text in texts.items()}


def prepared(hub: FakeHub, push: Pusher, draw: random.Random, *, private: bool) -> tuple[bool, set[str]]:
    """What the hub holds before: whether it is in the way of a push, and the names that a push wrote."""
    state, written = (
        draw.choice(("absent", "empty", "theirs", "pushed", "pushed", "both", "both", "blocked")),
        set[str](),
    )
    if state == "absent":
        return False, written
    hub.repositories["me/m"] = Repository(private=private)
    if state in ("pushed", "both"):
        push({**MODEL, "old/gone.txt": "of the first push"}, private=private)
        written = {*hub.files("me/m")} - {".gitattributes"}
    if state in ("theirs", "both"):
        hub.files("me/m").update(encoded(THEIRS))
    if state == "blocked":
        hub.files("me/m").update(encoded(draw.choice(BLOCKED)))
    return state == "blocked", written


def said(push: Pusher, *, private: bool, replace: bool = False) -> str:
    """What a push says has happened."""
    try:
        url = push(NEW, private=private, replace=replace)
    except ValueError as error:
        text = str(error)
        assert TOKEN not in text
        assert "\n" not in text
        assert text.startswith((NOTHING, UNKNOWN)), text
        print(text)
        return "nothing" if text.startswith(NOTHING) else "unknown"
    assert "/me/m" in url
    return "published"


def push_once(folder: Path, attempt: int) -> None:
    draw = random.Random(attempt)
    with pytest.MonkeyPatch.context() as patch, fake_hub(patch, folder / "cache") as hub:
        patch.setattr("time.sleep", lambda seconds: None)
        push, private = Pusher(folder / "pushes"), draw.random() < 0.3
        blocked, written = prepared(hub, push, draw, private=private)
        there = "me/m" in hub.repositories
        before = dict(hub.files("me/m")) if there else {}
        commits = len(hub.repositories["me/m"].commits) if there else 0
        asked = private if draw.random() < 0.9 else not private
        refused = blocked or (there and asked != private)

        part, status, interrupted = draw.choice(PARTS), draw.choice(STATUSES), draw.random() < 0.2
        fault = Fault(status, after=draw.random() < 0.5, times=draw.choice((1, 2, 1000)))
        if fault.after and (status <= 0 or status >= 500) and draw.random() < 0.4:
            fault.late = draw.choice((2, 3, 100))
        if status == 302:
            fault.headers = {"Location": draw.choice(("/elsewhere", "/api/models/me/m", "https://127.0.0.1:9/x"))}
        if status == 429:
            fault.headers = {"Retry-After": draw.choice(("1", "9999"))}
        if status == -1 or interrupted:
            patch.setattr("vsa.reports.hub.PATIENCE", 1.5)
            patch.setattr("vsa.reports.hub.SLOWEST", 1e9)
        if not interrupted or draw.random() < 0.5:
            hub.faults[part] = fault
        asked_for: list[str] = []

        def see(request: str) -> None:
            asked_for.append(request)
            if interrupted and sum(part in each for each in asked_for) == 1 and part in request:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        hub.seen = see
        outcome = said(push, private=asked)
        reached = any(part in request for request in asked_for)
        committed = any("/commit/" in request for request in asked_for)
        hub.ended.set()
        left_alone_ends()
        hub.faults.clear()
        for repository, files in hub.pending:
            repository.commits.append(files)
        hub.pending.clear()
        hub.wait = 0

        # what the hub holds now: all of it or nothing
        keeps = {name: content for name, content in before.items() if name not in written}
        files = dict(hub.files("me/m")) if "me/m" in hub.repositories else {}
        record = files.get(RECORD, b"")
        after = {".gitattributes": b"*.safetensors lfs\n", **keeps, **encoded(NEW), RECORD: record}
        same = len(hub.repositories["me/m"].commits) == commits if there else set(files) <= {".gitattributes"}
        assert same or (files == after and record), f"{part} {fault}: a mixture of {sorted(files)}"
        print(told := f"{part} {fault}, interrupted {interrupted}, asked {asked_for}: {outcome}")
        assert outcome != "published" or not same, told
        assert outcome != "nothing" or same, told
        assert outcome != "unknown" or committed, told
        assert not refused or (outcome == "nothing" and same and not committed), told
        # it is not refused for nothing
        seen = part == "/commit/" and fault.after and fault.late == 0 and status != -1 and not interrupted
        assert refused or not (seen or not reached) or outcome == "published", told

        # a hub that is well again, with what is in the way replaced on demand
        hub.seen = hub.requests.append
        patch.setattr("vsa.reports.hub.PATIENCE", 60.0)
        own = hub.repositories["me/m"].private if "me/m" in hub.repositories else asked
        assert said(push, private=own, replace=blocked) == "published"
        files, last = hub.files("me/m"), {**keeps, **encoded(NEW)}
        assert {name for name in last if files.get(name) != last[name]} <= (set(keeps) if blocked else set())
        assert all(files[name] == content for name, content in encoded(NEW).items())
        assert "old/gone.txt" not in files


@pytest.mark.soak("pushes to a hub that goes wrong, and Ctrl-C", attempts=300, short=0)
def test_a_push_says_what_the_hub_holds(attempt, tmp_path):
    in_fork(lambda: push_once(tmp_path, attempt), tmp_path / "printed")


MUTANTS = {
    "it is there, unseen": ("_has", lambda *_: True),
    "it is not there, unseen": ("_has", lambda *_: False),
    "all may be replaced": ("changes", lambda new, there, recorded, **_: [n for n in there if n not in new]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_push_that_says_something_else_fails(name, tmp_path, monkeypatch):
    """The control of the attempts above."""
    part, mutant = MUTANTS[name]
    monkeypatch.setattr(f"vsa.reports.hub.{part}", mutant)

    def attempts() -> None:
        for attempt in range(40):
            in_fork(partial(push_once, tmp_path / str(attempt), attempt), tmp_path / "printed")

    with pytest.raises(AssertionError, match="status 1"):
        attempts()


# folders as targets


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run and what a push of it writes."""
    folder = tmp_path_factory.mktemp("pushed")
    run = make_run(folder / "run")
    vsa_command("push", run, folder / "m")
    return run, folder / "m"


PLACES = ("./m", "m", "FOLDER/m", "FOLDER/./sub/..//m/", "link", "./sub/../m", "up/m")
NO_PLACES = ("https://huggingface.co/me/m", "hf://me/m", "me@host:m", "me/m/x", "C:\\m", "s3://me/m", "Some Owner/a b!")


@pytest.mark.soak("pushes to folders of other files", attempts=60, short=0)
def test_a_push_to_a_folder_leaves_what_is_anothers(attempt, pushed, tmp_path, monkeypatch, command_line):  # noqa: F811
    draw, (run, model) = random.Random(attempt), pushed
    monkeypatch.chdir(tmp_path)
    state = draw.choice(("absent", "pushed", "both", "theirs", "edited", "linked", "no place"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "up").symlink_to(".")
    (tmp_path / "mine.txt").write_text("mine")
    place, own, spelling = tmp_path / "m", contents(model), draw.choice(PLACES)
    if state not in ("absent", "no place"):
        shutil.copytree(model, place)
        (tmp_path / "link").symlink_to("m")
    elif spelling == "link":
        spelling = "m"
    files = sorted(name for name, content in own.items() if content is not None)
    if state == "theirs":
        (place / RECORD).unlink()
    if state in ("both", "theirs"):
        for name, text in THEIRS.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
    if state in ("edited", "linked"):
        chosen = place / draw.choice(files)
        chosen.unlink()
        chosen.symlink_to("../mine.txt") if state == "linked" else chosen.write_bytes(b"by hand")
    replace = ["--replace"] * draw.randrange(2)
    before = contents(tmp_path)
    spelling = draw.choice(NO_PLACES) if state == "no place" else spelling.replace("FOLDER", str(tmp_path))
    status, _, err = command_line("push", str(run), spelling, *replace)
    told = f"{state} {spelling} {replace}: {status} {err}"
    assert "Traceback" not in err, told
    now = contents(tmp_path)
    # a folder that is there may be refused as well as brought up to date
    refused = state == "no place" or (state in ("theirs", "edited", "linked") and not replace)
    assert state not in ("no place", "absent") or status == int(refused), told
    assert status == 1 or not refused, told
    if status:
        assert now == before, told
        assert err.count("error: ") == 1, told
        return
    assert {name: now[name] for name in before if not name.startswith("m/")} == {
        name: content for name, content in before.items() if not name.startswith("m/")
    }
    assert {name for name in now if name not in before} <= {"m", *(f"m/{name}" for name in own)}, told
    kept = {name: content for name, content in before.items() if name.removeprefix("m/") not in own}
    assert {name: now.get(name) for name in kept} == kept, told
    # the card is dated, and the record has its digest
    assert {n: now.get(f"m/{n}") for n in own if n not in ("README.md", RECORD)} == {
        n: content for n, content in own.items() if n not in ("README.md", RECORD)
    }, told

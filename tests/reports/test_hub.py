"""Publication on the hub: what a push may change there, and what it says of a hub that goes wrong."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reports.fake_hub import TOKEN, FakeHub, Fault, Repository, fake_hub
from vsa.checkpoints.published import RECORD
from vsa.errors import one_line_errors
from vsa.reports.hub import files_in, hub_client, publish, write_record

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed: pip install huggingface_hub")

WEIGHTS = "diffusion_pytorch_model.safetensors"
MODEL = {
    "README.md": "---\nlicense: mit\n---\n# m\n",
    "config.json": "{}",
    "card/loss.png": "curve",
    WEIGHTS: "weights",
}


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[FakeHub]:
    with fake_hub(monkeypatch, tmp_path / "cache") as hub:
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        yield hub


class Pusher:
    """Pushes folders of a few small files; what it told is in `lines`."""

    def __init__(self, folder: Path):
        self.folder, self.number, self.lines = folder, 0, []

    def __call__(self, content: dict[str, str] = MODEL, *, private: bool = False, replace: bool = False) -> str:
        self.number += 1
        self.lines.clear()
        folder = self.folder / str(self.number)
        for name, text in content.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        write_record(folder)
        new = files_in(folder)
        return publish(
            hub_client("me/m"), folder, new, "me/m", private=private, replace=replace, tell=self.lines.append
        )


@pytest.fixture
def push(tmp_path, hub) -> Pusher:
    return Pusher(tmp_path / "pushes")


def texts(hub: FakeHub) -> dict[str, str]:
    """The files of the repository but the record and the hub's own."""
    return {n: c.decode() for n, c in hub.files("me/m").items() if n not in (RECORD, ".gitattributes")}


def test_a_push_is_one_commit_with_all_files(hub, push):
    assert push().startswith(f"{hub.endpoint}/me/m/commit/")
    assert texts(hub) == MODEL
    assert len(hub.repositories["me/m"].commits) == 2
    assert push.lines == ["me/m: 5 files"]
    # the same again changes nothing
    push()
    assert len(hub.repositories["me/m"].commits) == 2


def test_another_push_changes_what_the_first_one_wrote_and_nothing_else(hub, push):
    push()
    theirs = {"LICENSE": "mine", "card/own.png": "mine", "notes/config.json": "mine"}
    hub.files("me/m").update({name: text.encode() for name, text in theirs.items()})
    other = {"README.md": MODEL["README.md"], "run.json": "{}", "checkpoints/step-1/model.safetensors": "others"}
    push(other)
    assert texts(hub) == {**theirs, **other}
    assert sorted(push.lines[1:]) == [
        "deletes card/loss.png",
        "deletes config.json",
        f"deletes {WEIGHTS}",
        f"replaces {RECORD}",
    ]


@pytest.mark.parametrize(
    ("theirs", "line"),
    [
        ({"README.md": "by hand"}, "replaces README.md"),
        ({WEIGHTS: "of another model"}, f"replaces {WEIGHTS}"),
        # not written by a push, but a reader of the model would take it for a part
        ({f"{WEIGHTS}.index.json": "{}"}, f"deletes {WEIGHTS}.index.json"),
        ({"checkpoints/step-9/state.json": "{}"}, "deletes checkpoints/step-9/state.json"),
        ({"card": "a file where the folder has to be"}, "deletes card"),
        ({RECORD: "{}"}, f"replaces {RECORD}"),
        ({RECORD: json.dumps({"made_by": "other", "files": {"README.md": []}})}, f"replaces {RECORD}"),
    ],
)
@pytest.mark.parametrize("pushed", [False, True])
@pytest.mark.slow
def test_files_that_no_push_wrote_are_changed_on_demand_only(theirs, line, pushed, hub, push):
    hub.repositories["me/m"] = Repository()
    if pushed:
        push()
        if "card" in theirs:
            del hub.files("me/m")["card/loss.png"]
    before = {**hub.files("me/m"), "LICENSE": b"mine", **{name: text.encode() for name, text in theirs.items()}}
    hub.repositories["me/m"].commits.append(before)
    with pytest.raises(ValueError, match=r"nothing was published: no push wrote .*--replace"):
        push({**MODEL, "config.json": '{"other": 1}'})
    assert line in push.lines
    assert hub.files("me/m") == before
    assert not any("/preupload/" in request for request in hub.requests) or pushed
    push({**MODEL, "config.json": '{"other": 1}'}, replace=True)
    assert texts(hub) == {**MODEL, "config.json": '{"other": 1}', "LICENSE": "mine"}


def test_names_that_differ_in_case_alone_are_in_the_way(hub, push):
    theirs = {"readme.md": b"mine", "CARD": b"mine", "Run.JSON/x": b"mine", "reader.md": b"mine"}
    hub.repositories["me/m"] = Repository()
    hub.repositories["me/m"].commits.append(theirs)
    with pytest.raises(ValueError, match=r"nothing was published: no push wrote .*--replace"):
        push({**MODEL, "run.json": "{}"})
    assert {*push.lines[1:]} == {"deletes readme.md", "deletes CARD", "deletes Run.JSON/x"}
    assert hub.files("me/m") == theirs
    push({**MODEL, "run.json": "{}"}, replace=True)
    assert texts(hub) == {**MODEL, "run.json": "{}", "reader.md": "mine"}


def test_a_record_names_only_what_is_there(hub, push):
    push()
    record = json.loads(hub.files("me/m")[RECORD])
    record["files"] |= {name: record["files"]["README.md"] for name in ("../me/other", "/etc/passwd", "LICENSE")}
    hub.files("me/m").update({RECORD: json.dumps(record).encode(), "LICENSE": b"mine"})
    push({**MODEL, "config.json": "[]"})
    assert texts(hub) == {**MODEL, "config.json": "[]", "LICENSE": "mine"}
    assert set(push.lines[1:]) == {"replaces config.json", f"replaces {RECORD}"}


@pytest.mark.parametrize("private", [False, True])
def test_the_visibility_is_what_was_asked_for_or_nothing_is_written(private, hub, push):
    hub.repositories["me/m"] = Repository(private=not private)
    before = dict(hub.files("me/m"))
    advice = "public on the hub: leave out --private" if private else "private on the hub: add --private"
    with pytest.raises(ValueError, match=f"nothing was published: it is {advice}"):
        push(private=private)
    assert hub.files("me/m") == before
    hub.repositories.clear()
    push(private=private)
    assert hub.repositories["me/m"].private == private


NOTHING, UNKNOWN = "cannot push to me/m, nothing was published: ", "unknown whether me/m was published ("


@pytest.mark.parametrize(
    ("part", "fault", "outcome"),
    [
        ("/commit/", Fault(502, after=True), None),
        ("/commit/", Fault(500, after=True), None),
        ("/commit/", Fault(0, after=True), None),
        ("/commit/", Fault(302, after=True, headers={"Location": "/elsewhere"}), None),
        # it is seen with the third look
        ("/commit/", Fault(504, after=True, late=3), None),
        ("/commit/", Fault(502), f"{UNKNOWN}HTTP status 502: it went wrong): look at "),
        ("/commit/", Fault(504, after=True, late=100), UNKNOWN),
        ("/commit/", Fault(401), f"{NOTHING}HTTP status 401: it went wrong (log in with `hf auth login`"),
        ("/commit/", Fault(409), f"{NOTHING}HTTP status 409: it went wrong"),
        ("/commit/", Fault(413), f"{NOTHING}HTTP status 413: it went wrong"),
        (
            "/commit/",
            Fault(429, headers={"Retry-After": "77"}),
            f"{NOTHING}HTTP status 429: it went wrong (try again in 77 s)",
        ),
        ("/commit/", Fault(400), NOTHING),
        ("/tree/", Fault(503), f"{NOTHING}HTTP status 503: it went wrong"),
        (
            "/preupload/",
            Fault(429, headers={"Retry-After": "9999"}),
            f"{NOTHING}HTTP status 429: it went wrong (try again",
        ),
        ("/storage/", Fault(403), f"{NOTHING}HTTP status 403: Error while uploading"),
        ("/storage/", Fault(0), NOTHING),
        ("/api/models/", Fault(302, headers={"Location": "/api/models/me/m"}), f"{NOTHING}TooManyRedirects"),
    ],
)
@pytest.mark.slow
def test_the_outcome_is_told_as_it_is(part, fault, outcome, hub, push, monkeypatch):
    push({**MODEL, "config.json": "of before"})
    before = texts(hub)
    hub.faults[part] = fault
    if outcome is None:
        assert push() == f"{hub.endpoint}/me/m"
        assert texts(hub) == MODEL
        return
    with pytest.raises(ValueError) as raised:
        push()
    assert str(raised.value).startswith(outcome)
    assert "mozilla" not in str(raised.value)
    assert TOKEN not in str(raised.value)
    assert ("look at http" in str(raised.value)) == outcome.startswith(UNKNOWN)
    assert texts(hub) == before


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_hub_that_makes_no_repository_is_told(status, hub, push):
    hub.faults["/api/repos/create"] = Fault(status)
    with pytest.raises(ValueError, match=f"nothing was published: HTTP status {status}: it went wrong") as raised:
        push()
    assert ("hf auth login" in str(raised.value)) == (status == 401)
    assert not hub.repositories


def test_a_card_that_the_hub_refuses_is_not_published(hub, push):
    with pytest.raises(ValueError, match=r"nothing was published: Invalid metadata in README.md.\s- no such license"):
        push({**MODEL, "README.md": "---\nlicense: made-up\n---\n"})


def test_an_answer_that_is_good_is_not_believed(hub, push, monkeypatch):
    """The hub says that it has made the commit, and has another content."""
    whole = FakeHub.commit
    monkeypatch.setattr(FakeHub, "commit", lambda hub, name, lines: whole(hub, name, lines[:-1]))
    with pytest.raises(ValueError, match=r"unknown whether me/m was published .it does not show all files"):
        push()


@pytest.mark.slow
def test_another_push_in_between_is_not_undone(hub, push, monkeypatch):
    push()
    whole = FakeHub.commit

    def late(hub: FakeHub, name: str, lines: list) -> tuple:
        hub.repositories[name].commits.append({**hub.files(name), "config.json": b"of another"})
        return whole(hub, name, lines)

    monkeypatch.setattr(FakeHub, "commit", late)
    with pytest.raises(ValueError, match="nothing was published: HTTP status 412: A commit has happened since"):
        push({**MODEL, "config.json": "mine"})
    assert texts(hub)["config.json"] == "of another"


@pytest.mark.parametrize(
    ("part", "outcome"),
    [("/api/repos/create", NOTHING), ("/tree/", NOTHING), ("/storage/", NOTHING), ("/commit/", UNKNOWN)],
)
@pytest.mark.slow
def test_a_hub_without_an_answer_is_left_in_time(part, outcome, hub, push, monkeypatch, capsys):
    # on a busy machine the other requests take a part of it
    monkeypatch.setattr("vsa.reports.hub.PATIENCE", 3.0)
    monkeypatch.setattr("vsa.reports.hub.SLOWEST", 1e9)
    hub.faults[part] = Fault(-1)
    with pytest.raises(SystemExit), one_line_errors():
        push()
    # behind the progress of an upload
    before, *lines = capsys.readouterr().err.split("error: ")
    assert len(lines) == 1
    assert "Traceback" not in before
    assert lines[0].startswith(f"{outcome}the hub took too long")
    assert lines[0].count("\n") == 1


@pytest.mark.parametrize(("part", "outcome"), [("/tree/", NOTHING), ("/commit/", UNKNOWN)])
@pytest.mark.slow
def test_an_interruption_says_what_has_happened(part, outcome, hub, push):
    hub.faults[part] = Fault(-1)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(request: str) -> None:
        hub.requests.append(request)
        if part in request and len([each for each in hub.requests if part in each]) == 1:
            signal.pthread_kill(main, signal.SIGINT)

    hub.seen = interrupt
    with pytest.raises(ValueError, match=r"interrupted") as raised:
        push()
    assert str(raised.value).startswith(outcome)


@pytest.mark.parametrize("name", ["me/m.git", "me/foo--bar", "me/a..b", "me/m-", "me/" + "m" * 97])
def test_names_that_the_hub_does_not_take_are_refused_first(name, hub):
    with pytest.raises(ValueError, match="epo"):
        hub_client(name)
    assert not hub.requests

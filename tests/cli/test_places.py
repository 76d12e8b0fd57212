"""Paths of commands: one value for checks, readers and writers, whatever was typed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import vsa.cli.toy
from vsa.cli import COMMANDS
from vsa.places import place_of, refuse_inputs, run_folder_of

# a place that does not exist by the rules of the system, and would be another one after `mkdir missing`
LOST = "missing/../kept"
WORDS = {
    "encode": ("kept", LOST),
    "latents": ("RUN", "kept/notes", LOST),
    "convert": ("RUN", LOST),
    "merge": ("RUN", LOST, "--sparse", "A", "--few-step", "B"),
    "sample": ("RUN", "--out", LOST),
    "evaluate": ("kept", "--out", LOST),
    "inspect": ("RUN", "CLIP", "--out", LOST),
    "report": ("kept", LOST),
    "certify": ("MODEL", "--out", LOST),
    "compare-attention": ("--synthetic", "2", "4", "4", "--save", LOST),
    "tune-sparge": ("--captures", "kept/notes", "--out", LOST),
    "check-data": ("kept", "--drop-list", LOST),
    "toy": (LOST,),
    "replay": (LOST,),
    "verify-export": (LOST,),
}


@pytest.mark.parametrize("command", WORDS)
def test_a_place_behind_a_missing_folder_is_refused(command, command_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes").write_text("mine")
    status, _, err = command_line(command, *WORDS[command])
    assert status == 1
    assert err.splitlines()[-1].startswith("error: ")
    assert f" {LOST}: missing is no folder, expected a path without it\n" in err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "notes"]


def test_no_other_command_takes_a_path():
    assert {"train", "sweep", "plan", "config", "tiles", "simulate", "info", "push"} == COMMANDS.keys() - WORDS.keys()


@pytest.mark.parametrize(
    "spelling", ["real", "./real/", "link/../real", "one/sub/../../real", "up", "up/.", "TMP/real"]
)
def test_a_command_gets_the_real_folder(spelling, command_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("real", "one/sub"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("one")
    (tmp_path / "up").symlink_to("real")
    got = []

    def toy(out: Path) -> None:
        """Note the place."""
        got.append(out)

    monkeypatch.setattr(vsa.cli.toy, "toy", toy)
    status, _, err = command_line("toy", spelling.replace("TMP", str(tmp_path)) + "/new")
    assert status == 0, err
    (place,) = got
    assert place == (tmp_path / "real" / "new" if "TMP" in spelling else Path("real/new"))


def test_a_place_is_what_the_system_makes_of_the_path(tmp_path, monkeypatch):
    """Every path of up to three of these parts: the same file as by the system's own rules, or refused by both."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").write_text("")
    (tmp_path / "link").symlink_to("a/b")
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    parts = ("a", "b", "..", "link", "up", "file", "none", "gone", "loop")
    paths = [()]
    seen = {"same": 0, "refused": 0}
    for _ in range(3):
        paths = [(*path, part) for path in paths for part in parts]
        for path in paths:
            text = "/".join(path)
            inside = [k for k in range(1, len(path)) if path[k] == ".."]
            lost = any(not os.path.isdir("/".join(path[:k])) for k in inside)
            above = ["/".join(path[:k]) for k in range(1, len(path))]
            lost |= any(os.path.islink(part) and not os.path.exists(part) for part in above)
            # the last part may be missing, but no link that the system follows without end
            lost |= os.path.islink(text) and os.path.islink(os.path.realpath(text))
            try:
                place = place_of(text, text)
            except ValueError:
                assert lost, text
                seen["refused"] += 1
                continue
            assert not lost, text
            assert os.path.realpath(place) == os.path.realpath(text)
            assert os.path.lexists(place) == os.path.lexists(text)
            assert ".." not in place.parts
            # its folder is real: what is a link later is not asked again
            assert os.path.realpath(place.parent) == os.path.abspath(place.parent)
            seen["same"] += 1
    assert min(seen.values()) > 100


@pytest.mark.parametrize("text", ["", " ", "a\0b", "~", "~/x", "file:///tmp/x", "s3://a/b", "file:x/y"])
def test_what_is_no_path_of_this_machine_is_refused(text):
    if text == "file:x/y":
        # the control: a colon is a letter as others
        assert place_of(text, "out") == Path(text)
        return
    with pytest.raises(ValueError, match=r"^out is not a (folder: leave it out|path of this machine: expected)"):
        place_of(text, "out")


def test_a_link_back_to_itself_is_named_and_no_input(tmp_path):
    links = {"one": "two", "two": "one", "below": "one/x", "in/one": "one", "in/run": "../run/notes", "gone": "nowhere"}
    for folder in ("in", "run"):
        (tmp_path / folder).mkdir()
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    settings = {"name": "a", "run": "b", "output_dir": str(tmp_path)}
    assert run_folder_of({**settings, "run_dir": f"{tmp_path}/gone"}) == tmp_path / "gone"
    for key in ("run_dir", "output_dir"):
        for name in ("one", "below"):
            with pytest.raises(ValueError, match=rf"^{key}={tmp_path}/{name} is a link that leads back to itself: exp"):
                run_folder_of({"run_dir": f"{tmp_path}/new", **settings, key: f"{tmp_path}/{name}"})
    # the control: another link of the folder leads into the run
    with pytest.raises(ValueError, match=r"the run is to read .*in/run$"):
        refuse_inputs(tmp_path / "run", [tmp_path / "in"])
    (tmp_path / "in" / "run").unlink()
    refuse_inputs(tmp_path / "run", [tmp_path / "in"])
